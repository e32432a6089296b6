"""Patterns by name, in two families. Each pattern gives several collectives: see `overlap.collectives.pattern`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from ...errors import ScheduleError
from .. import pattern as read
from ..pattern import Pattern
from ..schedule import Schedule
from . import doubling, layouts, mesh, ring, scattered, torus, tree
from .along_rings import Rings

Options: TypeAlias = Mapping[str, object]
PatternMaker: TypeAlias = Callable[..., Pattern]

SPREADING: dict[str, PatternMaker] = {
    "ring": ring.ring,
    "multi_ring": ring.multi_ring,
    "mesh": mesh.mesh,
    "rdh": layouts.rdh,
    "kangaring": layouts.kangarings,
    "swing": torus.swing,
    "bucket": torus.bucket,
    "bruck": doubling.bruck,
}
"""Patterns in which every rank owns a chunk: each gives an all-reduce, a reduce-scatter and an all-gather."""

READINGS: Mapping[str, Callable[[str, Pattern], Schedule]] = {
    "all_reduce": read.all_reduce,
    "reduce_scatter": read.reduce_scatter,
    "all_gather": read.all_gather,
}
"""For each collective: the function (name of the algorithm, pattern) -> schedule, for a pattern of `SPREADING`. It
reads the edges of the pattern forwards, backwards, or first backwards and then forwards."""


def _scatter_all_gather(
    size: int,
    root: int,
    *,
    gather: str = "ring",
    scatter: str = "binomial",
    gather_options: Options | None = None,
    rings: Rings | None = None,
) -> Pattern:
    """Return a broadcast as a scatter and an all-gather, by the names of their algorithms.

    `gather` is one of `SPREADING`; for `scatter` and `rings`, see `scattered.scatter_all_gather`.
    """
    inside = find_pattern_maker(SPREADING, gather)(size, **(gather_options or {}))
    return scattered.scatter_all_gather(root, inside, scatter=scatter, rings=rings)


FROM_ROOT: dict[str, PatternMaker] = {
    "mesh": mesh.star,
    "binomial": tree.binomial,
    "chain": tree.chain,
    "binary_tree": tree.binary_tree,
    "double_binary_tree": tree.double_tree_from_root,
    "scatter_all_gather": _scatter_all_gather,
}
"""Patterns in which the root owns everything: each gives a broadcast and a reduce."""

SLICED = ("chain", "binary_tree", "double_binary_tree", "rank_chain")
"""Algorithms that send the data in `slices`, one after the other."""


def find_pattern_maker(family: Mapping[str, PatternMaker], algorithm: str) -> PatternMaker:
    """Return the function that makes the pattern of an algorithm.

    Args:
        family: `SPREADING` or `FROM_ROOT`.
        algorithm: Name of the algorithm.

    Raises:
        ScheduleError: The family has no algorithm of this name.
    """
    if algorithm not in family:
        raise ScheduleError(f"algorithm {algorithm!r} does not fit this level; known are {', '.join(family)}")
    return family[algorithm]
