"""Patterns by name, in two families that give several collectives each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from ...errors import ScheduleError
from .. import pattern as read
from ..pattern import Pattern
from ..schedule import Schedule
from . import doubling as bruck
from . import layouts, mesh, ring, scattered, torus, tree
from . import tree as double_tree
from .along_rings import Rings

Options: TypeAlias = Mapping[str, object]
Make: TypeAlias = Callable[..., Pattern]

SPREADING: dict[str, Make] = {
    "ring": ring.ring,
    "multi_ring": ring.multi_ring,
    "mesh": mesh.mesh,
    "rdh": layouts.rdh,
    "kangaring": layouts.kangarings,
    "swing": torus.swing,
    "bucket": torus.bucket,
    "bruck": bruck.bruck,
}
"""Patterns in which every rank owns a chunk: each gives an all-reduce, a reduce-scatter and an all-gather."""

READINGS: Mapping[str, Callable[[str, Pattern], Schedule]] = {
    "all_reduce": read.all_reduce,
    "reduce_scatter": read.reduce_scatter,
    "all_gather": read.all_gather,
}
"""Collectives that each of these patterns gives."""


def _scatter_all_gather(
    size: int,
    root: int,
    *,
    gather: str = "ring",
    scatter: str = "binomial",
    gather_options: Options | None = None,
    rings: Rings | None = None,
) -> Pattern:
    """Return a broadcast as a scatter and an all-gather, by the names of their algorithms."""
    inside = find_pattern(SPREADING, gather)(size, **(gather_options or {}))
    return scattered.scatter_all_gather(size, root, inside, scatter=scatter, rings=rings)


FROM_ROOT: dict[str, Make] = {
    "mesh": mesh.star,
    "binomial": tree.binomial,
    "chain": tree.chain,
    "binary_tree": tree.binary_tree,
    "double_binary_tree": double_tree.from_root,
    "scatter_all_gather": _scatter_all_gather,
}
"""Patterns in which the root owns everything: each gives a broadcast and a reduce."""

SLICED = ("chain", "binary_tree", "double_binary_tree", "rank_chain")
"""Algorithms that send the data in `slices`, one after the other."""


def find_pattern(family: Mapping[str, Make], algorithm: str) -> Make:
    """Return the pattern of this name of a family, `SPREADING` or `FROM_ROOT`.

    Raises:
        ScheduleError: If there is none.
    """
    if algorithm not in family:
        raise ScheduleError(f"algorithm {algorithm!r} does not fit this level; known are {', '.join(family)}")
    return family[algorithm]
