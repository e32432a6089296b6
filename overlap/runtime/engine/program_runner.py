"""Operations as programs: each rank's part of a compiled collective, run on a CC-core of that rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import trio

from transports import Transport

from ...collectives.call import Call
from ...collectives.kinds import Collective
from ...collectives.reduce import Array, reducer
from ...collectives.schedule import Schedule
from ...diagnostics import first
from ..future import Failure
from ..memory.buffer_pool import BufferPool
from .cc_core import Buffers, Execution
from .compiler import Compiler
from .workers import Workers

if TYPE_CHECKING:
    from ..communicator import Channel, Meeting
    from ..operation import CollectiveFuture

Operation: TypeAlias = "CollectiveFuture[object]"

__all__ = ["Programs"]


class Programs:
    """Runs operations whose bytes must travel over a transport, each rank's part in a task of that rank."""

    def __init__(self, transport: Transport, workers: Workers, compiler: Compiler) -> None:
        self._transport, self._workers, self._compiler = transport, workers, compiler

    def start(self, channel: Channel, meeting: Meeting) -> None:
        """Start the programs of all ranks that are ready and not under way."""
        for operation in meeting.arrived:
            if operation is not None and not (operation.running or operation.done):
                operation.running = True
                operation.fit(cast("Call", meeting.pattern))
                self._begin(channel, meeting, operation)

    def _begin(self, channel: Channel, meeting: Meeting, operation: Operation) -> None:
        """Do what needs no waiting at once: small messages are on their way before any task starts."""
        failure: Failure | None = None
        try:
            execution = self._execution(channel, operation, cast("Call", meeting.pattern))
            over = execution.begin() and meeting.count == channel.here  # else one may come who means something else
        except Exception as error:
            failure, over = Failure(error), True
        if over:
            operation.stopped()
            self._settle(channel, meeting, operation, failure)
        else:
            operation.scope = trio.CancelScope()
            rank = operation.port.stream.rank
            rank._nursery.start_soon(self._run, channel, meeting, operation, execution)

    async def _run(self, channel: Channel, meeting: Meeting, operation: Operation, execution: Execution) -> None:
        failure: Failure | None = None
        assert operation.scope is not None
        try:
            with operation.scope:
                await execution.run()
        except* Exception as group:
            failure = Failure(first(group))
        finally:
            operation.stopped()
        self._settle(channel, meeting, operation, failure)

    def _settle(self, channel: Channel, meeting: Meeting, operation: Operation, failure: Failure | None) -> None:
        if failure is not None and not operation.done:
            channel.fail_one(meeting, operation, failure)
        elif not operation.done:
            met_ns = max(end.started_ns for end in meeting.arrived if end is not None)
            operation.finish(operation.group._now_ns(), operation.describe(cast("Call", meeting.pattern), met_ns))
        channel.ended(meeting, operation)

    def _execution(self, channel: Channel, operation: Operation, pattern: Call) -> Execution:
        position = operation.port.position
        schedule, program = self._compiler.compile(pattern, channel.members, position)
        operation.algorithm = schedule.algorithm
        return Execution(
            program,
            _buffers(schedule, operation, operation.group._world.clock.buffers),
            self._transport.endpoint(channel.members[position]),
            members=channel.members,
            tag=channel.tag(pattern, operation.seq),
            priority=operation.urgency,
            workers=self._workers,
            fans_out=not self._transport.shares_memory(channel.members),
        )


def _buffers(schedule: Schedule, operation: Operation, pool: BufferPool) -> Buffers:
    """Lay out an operation's arrays as the schedule's buffers."""
    source, target, combine = operation.source, operation.target, operation.call.reducer
    if operation.kind is Collective.BARRIER:
        source, target, combine = np.zeros(1, np.uint8), np.zeros(1, np.uint8), reducer("max", np.dtype(np.uint8))
    like = source if source is not None else target
    assert like is not None, "a rank that neither gives nor gets takes no part"
    flat_in = np.empty(0, like.dtype) if source is None else source.reshape(-1)
    flat_out = np.empty(0, like.dtype) if target is None else target.reshape(-1)
    block = flat_in.size // schedule.blocks[0] if source is not None else flat_out.size // schedule.blocks[1]
    if source is not None and target is not None and np.may_share_memory(source, target) and not schedule.in_place:
        flat_in = pool.copy(flat_in)
    accumulator = like.dtype if combine is None else combine.accumulator
    room = schedule.blocks[2] * block
    shared = schedule.in_place and flat_out.size == room and flat_out.dtype == accumulator
    scratch: Array = flat_out if shared else pool.empty((room,), accumulator)
    return Buffers((flat_in, flat_out, scratch), block, schedule.slots_per_block, combine, schedule.size)
