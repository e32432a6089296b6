"""Runs operations as programs: each rank's part of a compiled collective, run on a CC-core of that rank."""

from __future__ import annotations

from math import prod
from typing import cast

import numpy as np
import trio

from transports import Transport, TransportError

from ...collectives.call import Call
from ...collectives.generators.rank_order import ONLY_FOR_ORDER
from ...collectives.kinds import Collective
from ...collectives.program import Program
from ...collectives.reduce import Array, reducer
from ...collectives.schedule import Buffer, Schedule
from ...collectives.uneven import UnevenSchedule, block_starts
from ...diagnostics import first
from ..communicator import Communicator
from ..context import Arrays
from ..future import Failure
from ..match import Match
from ..operation import Operation
from .cc_core import Buffers, Execution, UnevenBuffers
from .compiler import Compiler
from .thin_buffers import ThinBuffers, runs_touched
from .wire_driven import WORTH_DRIVING_BYTES, WireDrivenExecution
from .workers import Workers

__all__ = ["ProgramRunner"]


class ProgramRunner:
    """Runs operations whose bytes must travel over a transport, each rank's part in a task of that rank."""

    def __init__(self, transport: Transport, workers: Workers, compiler: Compiler) -> None:
        self._transport, self._workers, self._compiler = transport, workers, compiler

    def start(self, communicator: Communicator, match: Match) -> None:
        """Start the programs of all ranks that are ready and not under way."""
        for operation in match.arrived:
            if operation is not None and not (operation.running or operation.done):
                self._begin(communicator, match, operation)

    def _begin(self, communicator: Communicator, match: Match, operation: Operation) -> None:
        """Do what needs no waiting at once: small messages are on their way before any task starts."""
        failure: Failure | None = None
        operation.running, pattern = True, cast("Call", match.pattern)
        try:
            operation.fit(pattern)
            execution = self._execution(communicator, operation, pattern)
            over = execution.begin() and match.count == communicator.here  # else one may come who means something else
        except Exception as error:
            failure, over = Failure(error), True
        if over:
            operation.stopped()
            self._settle(communicator, match, operation, failure)
        else:
            operation.scope = trio.CancelScope()
            operation.context.spawn(self._run, communicator, match, operation, execution)

    async def _run(self, communicator: Communicator, match: Match, operation: Operation, execution: Execution) -> None:
        failure: Failure | None = None
        assert operation.scope is not None
        try:
            with operation.scope:
                await execution.run()
        except* Exception as group:
            failure = Failure(first(group))
        finally:
            operation.stopped()
        self._settle(communicator, match, operation, failure)

    def _settle(self, communicator: Communicator, match: Match, operation: Operation, failure: Failure | None) -> None:
        if failure is not None and isinstance(failure.error, TransportError):
            failure.error.operation = f"{operation.label} ({operation.call_site})"
        if failure is not None and not operation.done:
            communicator.fail_one(match, operation, failure)
        elif not operation.done:
            met_ns = max(end.started_ns for end in match.arrived if end is not None)
            operation.finish(operation.context.now_ns(), operation.describe(cast("Call", match.pattern), met_ns))
        communicator.ended(match, operation)

    def _execution(self, communicator: Communicator, operation: Operation, pattern: Call) -> Execution:
        position = operation.port.position
        schedule, program = self._compiler.compile(pattern, communicator.members, position)
        operation.algorithm = schedule.algorithm
        endpoint = self._transport.endpoint(communicator.members[position])
        others = communicator.members[:position] + communicator.members[position + 1 :]
        driven = pattern.nbytes >= WORTH_DRIVING_BYTES and all(endpoint.starter(other) for other in others)
        kind = WireDrivenExecution if driven else Execution
        return kind(
            program,
            _buffers(schedule, program, operation, operation.context.arrays),
            endpoint,
            members=communicator.members,
            tag=communicator.tag(pattern, operation.seq),
            priority=operation.urgency,
            workers=self._workers,
            fans_out=not self._transport.shares_memory(communicator.members),
        )


def _buffers(schedule: Schedule, program: Program, operation: Operation, arrays: Arrays) -> Buffers:
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
        flat_in = arrays.copy(flat_in)
    accumulator = like.dtype if combine is None else combine.accumulator
    if isinstance(schedule, UnevenSchedule):
        starts = block_starts(schedule, operation.port.position, operation.call.counts, prod(like.shape[1:]))
        room = starts[Buffer.SCRATCH][-1]
    elif schedule.algorithm in ONLY_FOR_ORDER:  # whose tables have a place for the pieces of all ranks
        layout = block, schedule.slots_per_block, combine, schedule.size
        runs = runs_touched(program)
        size = ThinBuffers((flat_in, flat_out, flat_out), *layout, runs).elements()
        return ThinBuffers((flat_in, flat_out, arrays.empty((size,), accumulator)), *layout, runs)
    else:
        starts, room = (), schedule.blocks[2] * block
    shared = schedule.in_place and flat_out.size == room and flat_out.dtype == accumulator
    scratch: Array = flat_out if shared else arrays.empty((room,), accumulator)
    laid = (flat_in, flat_out, scratch), block, schedule.slots_per_block, combine, schedule.size
    return UnevenBuffers(*laid, starts) if starts else Buffers(*laid)
