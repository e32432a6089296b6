"""Compiles calls: from a collective on a group to the program of each rank, and its layout on arrays.

The algorithm is chosen by cost on the placed topology, or by name if the program requests one. Its table is generated
and proved, and each rank's program is cut out. Results are cached for later calls of the same collective, group and
size class, so a training loop compiles in its first step only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ...collectives.call import Call, Pairs
from ...collectives.generators.rank_order import ONLY_FOR_ORDER
from ...collectives.kinds import ALL_GATHER, BARRIER, GATHER
from ...collectives.program import Program, StepKind, project
from ...collectives.proof import verify
from ...collectives.reduce import Array, find_reducer
from ...collectives.schedule import Buffer, Schedule
from ...collectives.slicing import slice_long_messages
from ...collectives.uneven import UnevenSchedule, block_starts, make_uneven
from ...cost.choice import Choices
from ...cost.select import size_class
from ..operation import Operation
from .laid_out import LaidOutProgram, lay_out_program
from .layout import BufferLayout, Buffers, ThinLayout, UnevenLayout, used_scratch_runs

if TYPE_CHECKING:
    from topology import Cluster

# Most calls with a cached program: the calls of a training loop are the same in every step.
_MOST_CACHED = 1 << 14

_Key: TypeAlias = tuple[str, str, int, Pairs, bool, str | None, int, bool, tuple[int, ...]]


def cluster_for_prices(cluster: Cluster, processes: Sequence[Sequence[int]]) -> Cluster:
    """Return the machine that gives the prices of a world: each process that sockets join counts as a node.

    It is `cluster` itself if the machine has a fixed number of devices, or as many nodes as processes, or if the
    processes do not have equally many consecutive ranks.

    Args:
        cluster: Machine of the world.
        processes: World ranks of each process, if sockets join all processes; else ().
    """
    each, nodes = cluster.world_size // max(1, len(processes)), len(processes)
    even = all(tuple(ranks) == tuple(range(i * each, (i + 1) * each)) for i, ranks in enumerate(processes))
    if cluster.machine.devices is not None or nodes <= cluster.nodes or not even:
        return cluster
    return cluster.of(cluster.machine, nodes=nodes, lnc=cluster.lnc, ranks=cluster.world_size, strict=cluster.strict)


class Compiler:
    """Compiles the collectives of one world.

    Args:
        cluster: Machine with the ranks of the world.
        algorithm: Name of the algorithm to use wherever it exists, unless a call names another; None leaves the choice
            to the cost.
        far: Function of world ranks: whether some of them are on different hosts. Then long messages travel in slices.
    """

    def __init__(
        self, cluster: Cluster, algorithm: str | None, *, far: Callable[[Sequence[int]], bool] = lambda _: False
    ) -> None:
        self.cluster = cluster
        self._far = far
        # `programs_only`: operations that use shared memory are not compiled.
        self._choices = Choices(cluster, algorithm, programs_only=True)
        self._compile_cached = lru_cache(_MOST_CACHED)(self._compile_uncached)
        self._schedules: dict[_Key, Schedule] = {}
        self._programs: dict[tuple[_Key, int], Program] = {}

    def compile(self, call: Call, members: tuple[int, ...], position: int) -> Compiled:
        """Return the program of one rank for a call, with its proved schedule.

        Args:
            call: The call, with all values.
            members: World ranks of the group, in group order.
            position: Group rank.
        """
        if call.counts:  # counts seldom repeat, and `_compile_uncached` caches programs without them
            return self._compile_uncached(call, members, position)
        return self._compile_cached(call, members, position)

    def _compile_uncached(self, call: Call, members: tuple[int, ...], position: int) -> Compiled:
        """Do the work of `compile`. Schedules and programs are cached by size class, not by exact size."""
        named = call.kind.value, str(call.dtype), call.root, call.pairs, call.exact, call.algorithm
        key = *named, size_class(call.nbytes), bool(call.counts), members
        schedule = self._schedules.get(key)
        if schedule is None:
            schedule = self._choices.plan(call, members).schedule()
            if call.counts:
                schedule = make_uneven(schedule)
                verify(schedule)  # `make_uneven` has changed the table that was proved
            elif self._far(members):
                schedule = slice_long_messages(schedule, size_class(call.nbytes))
            self._schedules[key] = schedule
        program = self._programs.get((key, position))
        if program is None:
            program = self._programs[key, position] = project(schedule, position)
        return Compiled(schedule, program, members)


# Inputs and results of barriers: always zero, so all barriers share them.
_BARRIER_IN, _BARRIER_OUT = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
_BARRIER_REDUCER = find_reducer("max", np.dtype(np.uint8))


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallConstants:
    """Values that all operations of one call share."""

    layout: BufferLayout  # Positions of slots in the buffers
    none: Array  # Empty array, in place of an input or result that the rank does not have
    scratch: Array  # Empty array with the dtype of SCRATCH, used if there is no SCRATCH
    scratch_elements: int  # Number of elements of SCRATCH
    in_result: bool  # Whether the memory of the result serves as SCRATCH


class Compiled:
    """The program of one rank for a call, which `lay_out_on_arrays` binds to the arrays of each operation.

    Args:
        schedule: The proved schedule of the call.
        program: The rank's part of the schedule.
        members: World ranks of the group, in group order.
    """

    __slots__ = ("_barrier_layout", "_constants", "_keeps_block", "_layouts", "_members", "program", "schedule")
    program: Program
    schedule: Schedule

    def __init__(self, schedule: Schedule, program: Program, members: Sequence[int]) -> None:
        self.schedule, self.program, self._members = schedule, program, members
        self._constants: _CallConstants | None = None  # None until the first operation
        self._layouts: dict[bool, LaidOutProgram] = {}  # by whether input and result share memory
        self._barrier_layout: tuple[LaidOutProgram, Buffers] | None = None  # layout and arrays of all barriers
        self._keeps_block: bool | None = None  # result of `_keeps_own_block`; None: not needed so far

    def lay_out_on_arrays(self, operation: Operation) -> tuple[LaidOutProgram, Buffers]:
        """Return the program laid out on the arrays of an operation, and these arrays as buffers."""
        if self._barrier_layout is not None:
            return self._barrier_layout
        buffers, in_place = self._make_buffers(operation)
        if operation.kind is BARRIER:
            self._barrier_layout = lay_out_program(self.program, buffers, self._members, blank=True), buffers
            return self._barrier_layout
        laid = self._layouts.get(in_place)
        if laid is None:
            laid = self._layouts[in_place] = lay_out_program(self.program, buffers, self._members)
        return laid, buffers

    def _make_buffers(self, operation: Operation) -> tuple[Buffers, bool]:
        """Return the arrays as IN, OUT and SCRATCH, and whether IN and OUT share memory.

        If they share memory in a way that the schedule does not allow, IN is a copy of the input.
        """
        source, target, constants = operation.source, operation.target, self._constants
        if operation.kind is BARRIER:
            source, target = _BARRIER_IN, _BARRIER_OUT
        if constants is None:
            constants = self._constants = self._make_call_constants(operation, source, target)
        flat_in = constants.none if source is None else source.reshape(-1)
        flat_out = constants.none if target is None else target.reshape(-1)
        in_place = source is not None and target is not None and _shares_memory(source, operation.out)
        if in_place and not (self.schedule.in_place or self._input_is_own_block(operation, flat_in, constants)):
            flat_in, in_place = operation.context.arrays.copy(flat_in), False
        scratch = constants.scratch
        if constants.in_result and target is not None:
            scratch = flat_out
        elif constants.scratch_elements:
            scratch = operation.context.arrays.empty((constants.scratch_elements,), scratch.dtype)
        return Buffers((flat_in, flat_out, scratch), constants.layout), in_place

    def _make_call_constants(self, operation: Operation, source: Array | None, target: Array | None) -> _CallConstants:
        schedule, program = self.schedule, self.program
        like = source if source is not None else target
        assert like is not None, "this is a bug in overlap: a rank without input and result"
        combine = _BARRIER_REDUCER if operation.kind is BARRIER else operation.call.reducer
        accumulator = like.dtype if combine is None else combine.accumulator
        block = like.size // schedule.blocks[Buffer.IN if source is not None else Buffer.OUT]
        layout = BufferLayout(block, schedule.slots_per_block, combine, schedule.size)
        scratch_elements, in_result = schedule.blocks[Buffer.SCRATCH] * block, schedule.in_place
        if isinstance(schedule, UnevenSchedule):
            starts = block_starts(schedule, program.rank, operation.call.counts, prod(like.shape[1:]))
            layout = UnevenLayout(block, schedule.slots_per_block, combine, schedule.size, starts)
            scratch_elements = starts[Buffer.SCRATCH][-1]
        elif schedule.algorithm in ONLY_FOR_ORDER:  # SCRATCH has blocks for all ranks, of which a rank uses few slots
            layout = ThinLayout(block, schedule.slots_per_block, combine, schedule.size, used_scratch_runs(program))
            scratch_elements, in_result = layout.scratch_elements(), False
        return _CallConstants(
            layout=layout,
            none=np.empty(0, like.dtype),
            scratch=np.empty(0, accumulator),
            scratch_elements=scratch_elements,
            in_result=in_result
            and target is not None
            and target.size == scratch_elements
            and target.dtype == accumulator,
        )

    def _input_is_own_block(self, operation: Operation, source: Array, constants: _CallConstants) -> bool:
        """Whether the input of a gather is this rank's own block of the result, and the program keeps it intact.

        Other overlaps do not occur: `check_overlap` has refused them.
        """
        gathers, out = operation.kind in (ALL_GATHER, GATHER), operation.out
        uneven = isinstance(constants.layout, UnevenLayout)
        if not gathers or uneven or source.size != constants.layout.block or out is None or source.dtype != out.dtype:
            return False
        if self._keeps_block is None:
            self._keeps_block = _keeps_own_block(self.program, constants.layout.slots)
        return self._keeps_block


def _shares_memory(source: Array, out: Array | None) -> bool:
    """Whether both share memory. Identity and `base` decide most cases, which is quicker."""
    if source is out or out is None or (source.base is None and out.base is None):
        return source is out
    return np.may_share_memory(source, out)


def _keeps_own_block(program: Program, slots: int) -> bool:
    """Whether the program writes the rank's own block of OUT only by copying IN to it, slot by slot."""
    first = program.rank * slots
    for step in (step for queue in program.queues for step in queue if step.kind is not StepKind.SEND):
        dst, src = step.dst, step.src
        apart = dst.buffer != Buffer.OUT or dst.slot + dst.count <= first or first + slots <= dst.slot
        same = step.kind is StepKind.LOCAL and src.buffer == Buffer.IN and src.slot == dst.slot - first
        if not (apart or same):
            return False
    return True
