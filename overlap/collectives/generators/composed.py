"""Compositions by name: any algorithm inside nodes with any between them, pipelined in slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from .. import pattern as read
from ..pattern import Pattern
from ..schedule import Schedule
from ..slicing import pipeline_phases
from . import blockwise
from .along_rings import Rings
from .families import FROM_ROOT, READINGS, SPREADING, Options, find_pattern
from .hierarchical import compose, node_count, with_inner
from .scattered import scatter_steps, two_level_broadcast

_DEFAULTS = {
    **dict.fromkeys(READINGS, ("ring", "ring")),
    **dict.fromkeys(("broadcast", "reduce"), ("ring", "binomial")),
    "all_to_all": ("pairwise", "pairwise"),
    **dict.fromkeys(("gather", "scatter"), ("binomial", "binomial")),
}
_BLOCKWISE = {"all_to_all": blockwise.all_to_all, "gather": blockwise.gather, "scatter": blockwise.scatter}


class Scope(Enum):
    """Ranks that a phase runs on."""

    INSIDE = "all nodes, each for itself"
    BETWEEN = "the same place in all nodes, for each place"
    HOME = "the root's node"


@dataclass(frozen=True, slots=True)
class Phase:
    """A collective that is a part of another one."""

    level: Scope  # where it runs
    collective: str  # collective of these ranks
    continues: bool = False  # whether its input is in place already, from the phase before
    copies: bool = False  # whether the root copies its own vector next to the messages of the phase


PHASES: Mapping[str, tuple[Phase, ...]] = {
    "all_reduce": (
        Phase(Scope.INSIDE, "reduce_scatter"),
        Phase(Scope.BETWEEN, "all_reduce"),
        Phase(Scope.INSIDE, "all_gather", continues=True),
    ),
    "reduce_scatter": (Phase(Scope.INSIDE, "reduce_scatter"), Phase(Scope.BETWEEN, "reduce_scatter")),
    "all_gather": (Phase(Scope.BETWEEN, "all_gather"), Phase(Scope.INSIDE, "all_gather", continues=True)),
    "broadcast": (
        Phase(Scope.HOME, "scatter", copies=True),
        Phase(Scope.BETWEEN, "broadcast", continues=True),
        Phase(Scope.INSIDE, "all_gather", continues=True),
    ),
    "reduce": (
        Phase(Scope.INSIDE, "reduce_scatter"),
        Phase(Scope.BETWEEN, "reduce"),
        Phase(Scope.HOME, "gather", continues=True),
    ),
    "all_to_all": (Phase(Scope.INSIDE, "all_to_all"), Phase(Scope.BETWEEN, "all_to_all")),
    "gather": (Phase(Scope.BETWEEN, "gather"), Phase(Scope.HOME, "gather")),
    "scatter": (Phase(Scope.HOME, "scatter"), Phase(Scope.BETWEEN, "scatter")),
}
"""Phases of a collective on two levels, in the order of time: tables are pipelined and priced by them."""

Tables: TypeAlias = Callable[..., Schedule]
"""Makes the table of one level, as `generate` does."""


def phase_starts(collective: str, steps: Mapping[Scope, Sequence[int]]) -> list[int]:
    """Return the first step of each phase that has steps.

    Args:
        collective: One of `PHASES`.
        steps: Steps of the phases of a level, in one or several parts; none for a level that is left out.
    """
    lengths = [count for phase in PHASES[collective] for count in steps.get(phase.level, ())]
    return sorted(set(accumulate(lengths[:-1], initial=0)))


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
    """Return a schedule on two levels: one algorithm inside nodes, another between them, in slices.

    Args:
        table: Makes the table of a level, as `generate` does.
        collective: One of `PHASES`.
        size: Ranks, numbered node by node.
        nodes: Number of nodes; by default the smaller of the two factors of `size` that differ least.
        intra: Algorithm inside nodes: a pattern in which every rank owns a chunk, or if blocks have one destination
            each, an algorithm of the collective.
        inter: Algorithm between nodes: of the same kind; for an all-reduce any of its algorithms; for a broadcast or a
            reduce one of theirs.
        slices: Number of pieces of the data, which are pipelined through the phases.
        root: Root of a rooted collective.
        scatter: How the root's node scatters a broadcast, or backwards gathers a reduce: "binomial", "mesh" or
            "multi_ring".
        rings: Rings of one node for "multi_ring": sequences of devices, which are sequences of ranks.
        intra_options: Further options of `intra`.
        inter_options: Further options of `inter`.

    Raises:
        ScheduleError: If an algorithm is unknown, or nodes would have different numbers of ranks.
    """
    count = node_count(size, nodes)
    inside = _LevelAlgorithm(intra or _DEFAULTS[collective][0], size // count, intra_options or {})
    between = _LevelAlgorithm(inter or _DEFAULTS[collective][1], count, inter_options or {})
    if collective in READINGS:
        made = _compose_spread(table, collective, inside, between)
    elif collective in _BLOCKWISE:
        made = _compose_blocks(table, collective, root, inside, between)
    else:
        made = _compose_from_root(collective, root, scatter, rings, inside, between)
    return pipeline_phases(made.schedule, phase_starts(collective, made.steps), slices)


class _Composition(NamedTuple):
    """A schedule on two levels."""

    schedule: Schedule
    steps: Mapping[Scope, Sequence[int]]  # by level: steps of each of its phases, in one or several parts


@dataclass(frozen=True, slots=True)
class _LevelAlgorithm:
    """An algorithm inside nodes or between them."""

    algorithm: str
    size: int
    options: Options

    @property
    def folds(self) -> bool:
        """Whether some ranks fold into others, and own nothing in the middle of an all-reduce."""
        return self.algorithm == "rdh" and not self.options and self.size & (self.size - 1) != 0

    def spreading(self) -> Pattern:
        return find_pattern(SPREADING, self.algorithm)(self.size, **self.options)


def _compose_spread(table: Tables, collective: str, inside: _LevelAlgorithm, between: _LevelAlgorithm) -> _Composition:
    """Return the composition of a collective in which every rank owns a chunk: patterns inside nodes and between.

    An all-reduce may have any other of its algorithms between nodes, in the middle of the one inside.
    """
    within = inside.spreading()
    if collective == "all_reduce" and (between.algorithm not in SPREADING or between.folds):
        inner = table(collective, between.algorithm, between.size, **between.options)
        schedule = with_inner(read.all_reduce("hierarchical", within), inner, inside.size)
        return _Composition(schedule, {Scope.INSIDE: (within.steps,), Scope.BETWEEN: (inner.steps,)})
    across = between.spreading()
    schedule = READINGS[collective]("hierarchical", compose(across, within))
    both_ways = (across.steps,) * (2 if collective == "all_reduce" else 1)
    return _Composition(schedule, {Scope.INSIDE: (within.steps,), Scope.BETWEEN: both_ways})


def _compose_blocks(
    table: Tables, collective: str, root: int, inside: _LevelAlgorithm, between: _LevelAlgorithm
) -> _Composition:
    """Return the composition of a collective whose blocks have one destination each: whole tables on both levels."""
    root_node, root_place = divmod(root, inside.size)
    near = table(collective, inside.algorithm, inside.size, root=root_place, **inside.options)
    far = table(collective, between.algorithm, between.size, root=root_node, **between.options)
    steps = {Scope.INSIDE: (near.steps,), Scope.HOME: (near.steps,), Scope.BETWEEN: (far.steps,)}
    return _Composition(_BLOCKWISE[collective](near, far), steps)


def _compose_from_root(
    collective: str, root: int, scatter: str, rings: Rings | None, inside: _LevelAlgorithm, between: _LevelAlgorithm
) -> _Composition:
    """Return the composition of a broadcast: a scatter in the root's node, transfers between nodes, a gather in each.

    A reduce is the same backwards.
    """
    within = inside.spreading()
    across = find_pattern(FROM_ROOT, between.algorithm)(between.size, root // inside.size, **between.options)
    lower = read.reduce if collective == "reduce" else read.broadcast
    schedule = lower("hierarchical", two_level_broadcast(root, across, within, scatter=scatter, rings=rings), root)
    steps = {
        Scope.HOME: (scatter_steps(inside.size, scatter, root % inside.size, rings),),
        Scope.BETWEEN: (across.steps,) if between.size > 1 else (),
        Scope.INSIDE: (within.steps,),
    }
    return _Composition(schedule, steps)
