"""A grid of ranks with named axes: data parallel, tensor parallel, pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from ..errors import UsageError
from .group import Group


class Mesh:
    """One rank's place in a grid of all ranks, row-major: the last axis runs fastest.

        mesh = rank.mesh(dp=2, tp=4)
        await mesh["tp"].all_reduce(x)

    Make one with `rank.mesh(dp=2, tp=4)`; every rank makes the same call. No communication. The group of an axis is
    `mesh["tp"]`: the ranks that differ along it only; that of several is `mesh["dp", "tp"]`.

    Attributes:
        axes: Sizes by name, in order.
        coordinates: Index of this rank along each axis, by name.
    """

    def __init__(self, world: Group, axes: Mapping[str, int]) -> None:
        for name, size in axes.items():
            if not isinstance(size, int) or size < 1:
                raise UsageError(f"{name}: an axis needs a whole number of ranks, at least 1; got {size!r}")
        if prod(axes.values()) != world.size:
            sizes = " x ".join(f"{name}={size}" for name, size in axes.items())
            raise UsageError(
                f"axes: {sizes or 'none'} makes {prod(axes.values())} ranks, but the world has {world.size}; "
                "choose sizes with that product"
            )
        self.axes: dict[str, int] = dict(axes)
        place = np.unravel_index(world.rank, tuple(axes.values())) if axes else ()
        self.coordinates: dict[str, int] = {name: int(index) for name, index in zip(axes, place, strict=True)}
        self._world = world
        self._groups: dict[tuple[str, ...], Group] = {(name,): self._make((name,)) for name in axes}

    def __getitem__(self, axis: str | tuple[str, ...]) -> Group:
        """Return the group of ranks that differ from this one along an axis only, or along several.

        Args:
            axis: One, or a tuple of several, in any order: its ranks are in the order of the world's.

        Returns:
            The group, as this rank sees it.

        Raises:
            UsageError: If there is no such axis.
        """
        names = (axis,) if isinstance(axis, str) else axis
        for name in names or ("",):
            if name not in self.axes:
                raise UsageError(f"axis: {name!r} is unknown; known are {', '.join(self.axes)}")
        axes = tuple(name for name in self.axes if name in names)
        if axes not in self._groups:
            self._groups[axes] = self._make(axes)
        return self._groups[axes]

    def __repr__(self) -> str:
        coordinates = ", ".join(f"{name}={self.coordinates[name]}/{size}" for name, size in self.axes.items())
        return f"<Mesh {coordinates}>"

    def _make(self, axes: tuple[str, ...]) -> Group:
        """Make the group of the ranks along some axes."""
        along = tuple(slice(None) if name in axes else index for name, index in self.coordinates.items())
        grid = np.arange(self._world.size).reshape(tuple(self.axes.values()))
        return self._world.group(grid[along].reshape(-1).tolist(), name="x".join(axes))
