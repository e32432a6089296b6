"""A grid of ranks with named axes: data parallel, tensor parallel, pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ..errors import UsageError
from .group import Group

__all__ = ["Mesh"]


class Mesh:
    """One rank's place in a grid of all ranks, row-major: the last axis runs fastest.

    Make one with `rank.mesh(dp=2, tp=4)`; every rank makes the same call. No communication. The group of an axis is
    `mesh["tp"]`: the ranks that differ along it only.

    Attributes:
        axes: Sizes by name, in order.
        coordinates: Where this rank is, by axis.
    """

    def __init__(self, world: Group, axes: Mapping[str, int]) -> None:
        for name, size in axes.items():
            if not isinstance(size, int) or size < 1:
                raise UsageError(f"{name}: an axis needs a whole number of ranks, at least 1; got {size!r}")
        if prod(axes.values()) != world.size:
            sizes = " x ".join(f"{name}={size}" for name, size in axes.items())
            raise UsageError(
                f"axes: {sizes or 'none'} makes {prod(axes.values())} ranks, but the world has {world.size}"
            )
        self.axes = dict(axes)
        self.coordinates = dict(zip(axes, _coordinates(world.rank, tuple(axes.values())), strict=True))
        self._groups = {name: self._make(world, name) for name in axes}

    def __getitem__(self, axis: str) -> Group:
        """Return the group of ranks that differ from this one along `axis` only."""
        if axis not in self._groups:
            raise UsageError(f"axis: {axis!r} is unknown; known are {', '.join(self._groups)}")
        return self._groups[axis]

    def __repr__(self) -> str:
        place = ", ".join(f"{name}={self.coordinates[name]}/{size}" for name, size in self.axes.items())
        return f"<Mesh {place}>"

    def _make(self, world: Group, axis: str) -> Group:
        stride = prod(list(self.axes.values())[list(self.axes).index(axis) + 1 :])
        first = world.rank - self.coordinates[axis] * stride
        return world.group([first + i * stride for i in range(self.axes[axis])], name=axis)


def _coordinates(rank: int, sizes: tuple[int, ...]) -> list[int]:
    places: list[int] = []
    for size in reversed(sizes):
        rank, place = divmod(rank, size)
        places.append(place)
    return places[::-1]
