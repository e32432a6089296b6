"""Compiles calls: from a collective on a group to the program of each rank, and its layout on arrays.

The algorithm is chosen by cost on the placed topology (or by name, where the program insists), its table is generated
and proved, and each rank's part cut out. Everything is kept for the next call of the same collective, group and size
class, so a training loop compiles in its first step only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ...collectives.call import Call, Pairs
from ...collectives.generators.rank_order import ONLY_FOR_ORDER
from ...collectives.kinds import ALL_GATHER, BARRIER, GATHER
from ...collectives.program import Program, StepKind, project
from ...collectives.proof import verify
from ...collectives.reduce import Array, reducer
from ...collectives.schedule import Buffer, Schedule
from ...collectives.slicing import in_slices
from ...collectives.uneven import UnevenSchedule, block_starts, make_uneven
from ...cost.choice import Choices
from ...cost.select import size_class
from ..operation import Operation
from .laid_out import LaidOut, lay_out
from .layout import BufferLayout, Buffers, ThinLayout, UnevenLayout, scratch_runs

if TYPE_CHECKING:
    from topology import Cluster

# Most calls with a cached program: the calls of a training loop are the same in every step.
_REMEMBERED = 1 << 14

_Key: TypeAlias = tuple[str, str, int, Pairs, bool, str | None, int, bool, tuple[int, ...]]


def joined_by(cluster: Cluster, processes: Sequence[Sequence[int]]) -> Cluster:
    """Return the machine for the prices of a world: processes of this computer that sockets join are nodes.

    Args:
        cluster: Machine of the world.
        processes: Ranks of each process, if sockets join all of them; else empty.
    """
    each, nodes = cluster.world_size // max(1, len(processes)), len(processes)
    even = all(tuple(ranks) == tuple(range(i * each, (i + 1) * each)) for i, ranks in enumerate(processes))
    if cluster.machine.devices is not None or nodes <= cluster.nodes or not even:
        return cluster
    return cluster.of(cluster.machine, nodes=nodes, lnc=cluster.lnc, ranks=cluster.world_size, strict=cluster.strict)


class Compiler:
    """Compiles the collectives of one world.

    Args:
        cluster: Where the ranks run.

    Attributes:
        algorithm: Name of the algorithm to use wherever it exists, unless a call names another; None leaves the choice
            to the cost.
        far: Whether some ranks are on different hosts; then long messages travel in slices.
    """

    cluster: Cluster
    algorithm: str | None
    far: Callable[[Sequence[int]], bool]

    def __init__(
        self, cluster: Cluster, algorithm: str | None, *, far: Callable[[Sequence[int]], bool] = lambda _: False
    ) -> None:
        self.cluster, self.algorithm, self.far = cluster, algorithm, far
        # The engine compiles operations that it does not run out of common memory.
        self._choices = Choices(cluster, algorithm, programs_only=True)
        self._cached: dict[tuple[Call, tuple[int, ...], int], Compiled] = {}
        self._schedules: dict[_Key, Schedule] = {}
        self._programs: dict[tuple[_Key, int], Program] = {}

    def compile(self, call: Call, members: tuple[int, ...], position: int) -> Compiled:
        """Return the proved schedule of a call and the program of the rank at `position` of the group `members`."""
        if call.counts:  # seldom the same twice, and the program does not depend on them
            return self._compile(call, members, position)
        compiled = self._cached.get((call, members, position))
        if compiled is None:
            if len(self._cached) >= _REMEMBERED:
                self._cached.clear()
            compiled = self._cached[call, members, position] = self._compile(call, members, position)
        return compiled

    def _compile(self, call: Call, members: tuple[int, ...], position: int) -> Compiled:
        """Return the schedule and this rank's program of a call, made once for each shape."""
        named = call.kind.value, str(call.dtype), call.root, call.pairs, call.exact, call.algorithm
        key = *named, size_class(call.nbytes), bool(call.counts), members
        schedule = self._schedules.get(key)
        if schedule is None:
            schedule = self._choices.plan(call, members).schedule()
            schedule = self._schedules[key] = self._for_blocks_of(call, schedule, members)
        program = self._programs.get((key, position))
        if program is None:
            program = self._programs[key, position] = project(schedule, position)
        return Compiled(schedule, program, members)

    def _for_blocks_of(self, call: Call, schedule: Schedule, members: tuple[int, ...]) -> Schedule:
        """Return the table for the blocks of a call, which may differ in size, or be worth slicing."""
        if not call.counts:
            return in_slices(schedule, size_class(call.nbytes)) if self.far(members) else schedule
        table = make_uneven(schedule)
        verify(table)
        return table


# Inputs and results of barriers: always zero, so all barriers share them.
_BARRIER_IN, _BARRIER_OUT = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
_MOST = reducer("max", np.dtype(np.uint8))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fixed:
    """Parts of a program that are equal in every call."""

    layout: BufferLayout  # BufferLayout of the buffers
    none: Array  # Empty array, for ranks without an input, or without a result
    scratch: Array  # Empty array of the type of SCRATCH, for ranks without SCRATCH
    room: int  # Number of elements of SCRATCH
    in_result: bool  # Whether SCRATCH may lie in the result


class Compiled:
    """One rank's program of a call, a part of a proved schedule, and its layouts on the arrays of operations.

    Args:
        members: World ranks of the group, in its order.
    """

    __slots__ = ("_blank", "_fixed", "_in_its_block", "_laid", "_members", "program", "schedule")
    program: Program
    schedule: Schedule

    def __init__(self, schedule: Schedule, program: Program, members: Sequence[int]) -> None:
        self.schedule, self.program, self._members = schedule, program, members
        self._fixed: _Fixed | None = None
        self._laid: dict[bool, LaidOut] = {}  # by whether input and result share memory
        self._blank: tuple[LaidOut, Buffers] | None = None  # layout and arrays of all barriers
        self._in_its_block: bool | None = None  # whether an input may be its own block of the result

    def laid(self, operation: Operation) -> tuple[LaidOut, Buffers]:
        """Return the program, laid out on an operation's arrays, with these arrays."""
        if self._blank is not None:
            return self._blank
        buffers, in_place = self._buffers(operation)
        if operation.kind is BARRIER:
            self._blank = lay_out(self.program, buffers, self._members, blank=True), buffers
            return self._blank
        laid = self._laid.get(in_place)
        if laid is None:
            laid = self._laid[in_place] = lay_out(self.program, buffers, self._members)
        return laid, buffers

    def _buffers(self, operation: Operation) -> tuple[Buffers, bool]:
        """Return an operation's arrays as the schedule's buffers, and whether input and result share memory."""
        source, target, fixed = operation.source, operation.target, self._fixed
        if operation.kind is BARRIER:
            source, target = _BARRIER_IN, _BARRIER_OUT
        if fixed is None:
            fixed = self._fixed = self._fixed_parts(operation, source, target)
        flat_in = fixed.none if source is None else source.reshape(-1)
        flat_out = fixed.none if target is None else target.reshape(-1)
        in_place = source is not None and target is not None and _share_memory(source, operation.out)
        if in_place and not (self.schedule.in_place or self._lies_in_its_block(operation, flat_in, fixed)):
            flat_in, in_place = operation.context.arrays.copy(flat_in), False
        scratch = fixed.scratch
        if fixed.in_result and target is not None:
            scratch = flat_out
        elif fixed.room:
            scratch = operation.context.arrays.empty((fixed.room,), scratch.dtype)
        return Buffers((flat_in, flat_out, scratch), fixed.layout), in_place

    def _fixed_parts(self, operation: Operation, source: Array | None, target: Array | None) -> _Fixed:
        """Return the layout of a call's buffers, which all its operations share."""
        schedule, program = self.schedule, self.program
        like = source if source is not None else target
        assert like is not None, "this is a bug in overlap: a rank without input and result"
        combine = _MOST if operation.kind is BARRIER else operation.call.reducer
        accumulator = like.dtype if combine is None else combine.accumulator
        block = like.size // schedule.blocks[0 if source is not None else 1]
        layout = BufferLayout(block, schedule.slots_per_block, combine, schedule.size)
        room, in_result = schedule.blocks[2] * block, schedule.in_place
        if isinstance(schedule, UnevenSchedule):
            starts = block_starts(schedule, program.rank, operation.call.counts, prod(like.shape[1:]))
            layout = UnevenLayout(block, schedule.slots_per_block, combine, schedule.size, starts)
            room = starts[Buffer.SCRATCH][-1]
        elif schedule.algorithm in ONLY_FOR_ORDER:  # tables with space for the pieces of all ranks
            layout = ThinLayout(block, schedule.slots_per_block, combine, schedule.size, scratch_runs(program))
            room, in_result = layout.elements(), False
        return _Fixed(
            layout=layout,
            none=np.empty(0, like.dtype),
            scratch=np.empty(0, accumulator),
            room=room,
            in_result=in_result and target is not None and target.size == room and target.dtype == accumulator,
        )

    def _lies_in_its_block(self, operation: Operation, source: Array, fixed: _Fixed) -> bool:
        """Whether an input is exactly its own block of the result, and nothing else is written there before.

        An input that shares memory with its gathered result is that block, or was refused: see `check_overlap`.
        """
        gathers, out = operation.kind in (ALL_GATHER, GATHER), operation.out
        uneven = isinstance(fixed.layout, UnevenLayout)
        if not gathers or uneven or source.size != fixed.layout.block or out is None or source.dtype != out.dtype:
            return False
        if self._in_its_block is None:
            self._in_its_block = _keeps_own(self.program, fixed.layout.slots)
        return self._in_its_block


def _share_memory(source: Array, out: Array | None) -> bool:
    """Whether an input and a result share memory; most are one array, or have memory of their own."""
    if source is out or out is None or (source.base is None and out.base is None):
        return source is out
    return np.may_share_memory(source, out)


def _keeps_own(program: Program, slots: int) -> bool:
    """Whether a rank's own block of the result is written only from the same place of its input."""
    first = program.rank * slots
    for step in (step for queue in program.queues for step in queue if step.kind is not StepKind.SEND):
        dst, src = step.dst, step.src
        apart = dst.buffer != Buffer.OUT or dst.slot + dst.count <= first or first + slots <= dst.slot
        same = step.kind is StepKind.LOCAL and src.buffer == Buffer.IN and src.slot == dst.slot - first
        if not (apart or same):
            return False
    return True
