"""Hierarchical schedules by name: any algorithm inside nodes with any between them, pipelined in slices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from .. import pattern as read
from ..pattern import Pattern
from ..schedule import Schedule
from ..slicing import pipelined
from . import blockwise
from .along_rings import Rings
from .families import READINGS, SPREADING, Options, from_root, spreading
from .hierarchical import compose, node_count, stages, with_inner
from .scattered import handing_steps, phases, scattered

_DEFAULTS = {
    **dict.fromkeys(READINGS, ("ring", "ring")),
    **dict.fromkeys(("broadcast", "reduce"), ("ring", "binomial")),
    "all_to_all": ("pairwise", "pairwise"),
    **dict.fromkeys(("gather", "scatter"), ("binomial", "binomial")),
}
_BLOCKWISE = {"all_to_all": blockwise.all_to_all, "gather": blockwise.gather, "scatter": blockwise.scatter}
KINDS = tuple(_DEFAULTS)
"""The collectives that have two levels."""

Tables: TypeAlias = Callable[..., Schedule]
_Staged: TypeAlias = tuple[Schedule, list[int]]  # a schedule, and the first step of each of its phases


def hierarchical(
    table: Tables,
    collective: str,
    size: int,
    *,
    nodes: int | None = None,
    intra: str | None = None,
    inter: str | None = None,
    slices: int = 1,
    root: int = 0,
    scatter: str = "binomial",
    rings: Rings | None = None,
    intra_options: Options | None = None,
    inter_options: Options | None = None,
) -> Schedule:
    """Compose two levels.

    Args:
        table: Makes the table of a level, as `generate` does.
        collective: One of `KINDS`.
        size: Ranks, numbered node by node.
        nodes: How many nodes; by default the smaller of the two factors of `size` that differ least.
        intra: Algorithm inside nodes: one that every rank owns a chunk in, or one of the collective's own where blocks
            go to one place each.
        inter: Algorithm between nodes: of the same kind; for an all-reduce any of its algorithms; for a broadcast or a
            reduce one of theirs.
        slices: Cut the data in so many pieces, and pipeline them through the phases.
        root: Of a rooted collective.
        scatter: How the root's node hands out a broadcast, or backwards collects a reduce: "binomial", "mesh" or
            "multi_ring".
        rings: Those of one node for the last of these, each a sequence of devices, which are sequences of ranks.
        intra_options: Further options of `intra`.
        inter_options: Further options of `inter`.

    Raises:
        ScheduleError: If an algorithm is unknown, or nodes would have different numbers of ranks.
    """
    count = node_count(size, nodes)
    inside = _Level(intra or _DEFAULTS[collective][0], size // count, intra_options or {})
    between = _Level(inter or _DEFAULTS[collective][1], count, inter_options or {})
    if collective in READINGS:
        schedule, starts = _spread(table, collective, inside, between)
    elif collective in _BLOCKWISE:
        schedule, starts = _blockwise(table, collective, root, inside, between)
    else:
        schedule, starts = _from_root(collective, root, scatter, rings, inside, between)
    return pipelined(schedule, starts, slices)


@dataclass(frozen=True, slots=True)
class _Level:
    algorithm: str
    size: int
    options: Options

    @property
    def folds(self) -> bool:
        """Whether some of its ranks only stand in for others, and own nothing in the middle of an all-reduce."""
        return self.algorithm == "rdh" and not self.options and self.size & (self.size - 1) != 0

    def spreading(self) -> Pattern:
        return spreading(self.algorithm)(self.size, **self.options)


def _spread(table: Tables, collective: str, inside: _Level, between: _Level) -> _Staged:
    within = inside.spreading()
    if collective == "all_reduce" and (between.algorithm not in SPREADING or between.folds):
        inner = table(collective, between.algorithm, between.size, **between.options)
        return with_inner(read.all_reduce("hierarchical", within), inner, inside.size)
    across = between.spreading()
    schedule = READINGS[collective]("hierarchical", compose(across, within))
    return schedule, stages(collective, across.steps, within.steps)


def _blockwise(table: Tables, collective: str, root: int, inside: _Level, between: _Level) -> _Staged:
    home, place = divmod(root, inside.size)
    near = table(collective, inside.algorithm, inside.size, root=place, **inside.options)
    far = table(collective, between.algorithm, between.size, root=home, **between.options)
    return _BLOCKWISE[collective](near, far)


def _from_root(
    collective: str, root: int, scatter: str, rings: Rings | None, inside: _Level, between: _Level
) -> _Staged:
    within = inside.spreading()
    across = from_root(between.algorithm)(between.size, root // inside.size, **between.options)
    handing = handing_steps(inside.size, scatter, root % inside.size, rings)
    whole, backwards = scattered(root, across, within, scatter=scatter, rings=rings), collective == "reduce"
    lower = read.reduce if backwards else read.broadcast
    return lower("hierarchical", whole, root), phases(across, within, handing, backwards=backwards)
