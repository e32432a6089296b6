"""Two-level schedules: an algorithm inside nodes and another between nodes, by name, pipelined in slices."""

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
from .families import FROM_ROOT, READINGS, SPREADING, Options, find_pattern_maker
from .hierarchical import compose_two_levels, insert_inter_node_schedule, node_count
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

    INSIDE = "all ranks of a node, in every node"
    BETWEEN = "ranks of one local rank in all nodes, for every local rank"
    HOME = "the root's node"


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a collective on two levels: a smaller collective on some of the ranks."""

    level: Scope  # ranks that the phase runs on
    collective: str  # collective of these ranks
    continues: bool = False  # whether the phase before has left the phase's input in the right place
    copies: bool = False  # whether the root copies its own vector during the phase


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
"""Phases of each collective on two levels, in the order of time. Tables are pipelined and priced by these phases."""

Tables: TypeAlias = Callable[..., Schedule]
"""A function that makes the table of one level, such as `generate`."""


def phase_starts(collective: str, steps: Mapping[Scope, Sequence[int]]) -> list[int]:
    """Return the first step of each phase, ascending from 0.

    Args:
        collective: One of `PHASES`.
        steps: By scope, the number of steps of each phase in it. A phase may be given as several numbers, which become
            several phases; a scope without steps is left out.
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
        table: Function that makes the table of a level, such as `generate`.
        collective: One of `PHASES`.
        size: Ranks, numbered node by node.
        nodes: Number of nodes; by default the smaller of the two factors of `size` that differ least.
        intra: Algorithm inside nodes: one of `SPREADING`; for an all-to-all, gather or scatter, an algorithm of that
            collective. None: a default.
        inter: Algorithm between nodes: as `intra`, or for an all-reduce any algorithm of all-reduces; for a broadcast
            or a reduce, one of `FROM_ROOT`. None: a default.
        slices: Number of pieces of the data, which are pipelined through the phases.
        root: Root of a rooted collective.
        scatter: Algorithm by which the root's node scatters the data of a broadcast or gathers that of a reduce:
            "binomial", "mesh" or "multi_ring".
        rings: Rings of one node for "multi_ring": sequences of devices, which are sequences of ranks. None: a default.
        intra_options: Further options of `intra`.
        inter_options: Further options of `inter`.

    Raises:
        ScheduleError: If an algorithm is unknown, or nodes would have different numbers of ranks.
    """
    count = node_count(size, nodes)
    inside = _LevelAlgorithm(intra or _DEFAULTS[collective][0], size // count, intra_options or {})
    between = _LevelAlgorithm(inter or _DEFAULTS[collective][1], count, inter_options or {})
    if collective in READINGS:
        made = _compose_patterns(table, collective, inside, between)
    elif collective in _BLOCKWISE:
        made = _compose_addressed_blocks(table, collective, root, inside, between)
    else:
        made = _compose_from_root(collective, root, scatter, rings, inside, between)
    return pipeline_phases(made.schedule, phase_starts(collective, made.steps), slices)


class _Composition(NamedTuple):
    """A schedule on two levels."""

    schedule: Schedule
    steps: Mapping[Scope, Sequence[int]]  # argument of `phase_starts`: the number of steps of each phase, by scope


@dataclass(frozen=True, slots=True)
class _LevelAlgorithm:
    """The algorithm of one level."""

    algorithm: str
    size: int  # Ranks of the level: of a node, or the number of nodes
    options: Options

    @property
    def folds_surplus_ranks(self) -> bool:
        """Whether the algorithm adds the data of surplus ranks to others, so that these ranks own no chunk."""
        # By default "rdh" works on a power of two of the ranks.
        return self.algorithm == "rdh" and not self.options and self.size & (self.size - 1) != 0

    def make_pattern(self) -> Pattern:
        return find_pattern_maker(SPREADING, self.algorithm)(self.size, **self.options)


def _compose_patterns(
    table: Tables, collective: str, inside: _LevelAlgorithm, between: _LevelAlgorithm
) -> _Composition:
    """Compose an all-reduce, reduce-scatter or all-gather.

    Usually both levels are patterns in which every rank owns a chunk. Between nodes an all-reduce may use any other
    algorithm: its table, which `table` makes, is inserted in the middle of the pattern inside nodes.
    """
    within = inside.make_pattern()
    # This algorithm is no pattern, or it is one in which not every rank owns a chunk.
    if collective == "all_reduce" and (between.algorithm not in SPREADING or between.folds_surplus_ranks):
        inner = table(collective, between.algorithm, between.size, **between.options)
        schedule = insert_inter_node_schedule(read.all_reduce("hierarchical", within), inner, inside.size)
        return _Composition(schedule, {Scope.INSIDE: (within.steps,), Scope.BETWEEN: (inner.steps,)})
    across = between.make_pattern()
    schedule = READINGS[collective]("hierarchical", compose_two_levels(across, within))
    both_ways = (across.steps,) * (2 if collective == "all_reduce" else 1)
    return _Composition(schedule, {Scope.INSIDE: (within.steps,), Scope.BETWEEN: both_ways})


def _compose_addressed_blocks(
    table: Tables, collective: str, root: int, inside: _LevelAlgorithm, between: _LevelAlgorithm
) -> _Composition:
    """Compose an all-to-all, gather or scatter of two tables, inside nodes and between them, which `table` makes."""
    root_node, root_place = divmod(root, inside.size)
    inside_table = table(collective, inside.algorithm, inside.size, root=root_place, **inside.options)
    between_table = table(collective, between.algorithm, between.size, root=root_node, **between.options)
    # Inside nodes an all-to-all has a phase in scope INSIDE; a gather or scatter, in HOME.
    inside_steps, between_steps = (inside_table.steps,), (between_table.steps,)
    steps = {Scope.INSIDE: inside_steps, Scope.HOME: inside_steps, Scope.BETWEEN: between_steps}
    return _Composition(_BLOCKWISE[collective](inside_table, between_table), steps)


def _compose_from_root(
    collective: str, root: int, scatter: str, rings: Rings | None, inside: _LevelAlgorithm, between: _LevelAlgorithm
) -> _Composition:
    """Compose a broadcast: a scatter in the root's node, broadcasts between nodes, an all-gather in each node.

    A reduce is the same backwards. `rings` are those of one node for a "multi_ring" scatter; None: its default.
    """
    pattern_inside = inside.make_pattern()
    pattern_between = find_pattern_maker(FROM_ROOT, between.algorithm)(
        between.size, root // inside.size, **between.options
    )
    whole = two_level_broadcast(root, pattern_between, pattern_inside, scatter=scatter, rings=rings)
    make_schedule = read.reduce if collective == "reduce" else read.broadcast
    schedule = make_schedule("hierarchical", whole, root)
    # Both collectives have one phase in each scope; with one node there is none between nodes.
    steps = {
        Scope.HOME: (scatter_steps(inside.size, scatter, root % inside.size, rings),),
        Scope.BETWEEN: (pattern_between.steps,) if between.size > 1 else (),
        Scope.INSIDE: (pattern_inside.steps,),
    }
    return _Composition(schedule, steps)
