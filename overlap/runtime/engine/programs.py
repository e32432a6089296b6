"""Operations as programs: each rank executes its part of a compiled collective over a transport."""

from __future__ import annotations

from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING

import trio

from ...collectives.call import Call
from ..communicator import Communicator
from ..match import Match
from ..operation import Operation
from ..plan import CallPlan
from .compiler import Compiled
from .execution import Execution, ProgramResources

if TYPE_CHECKING:
    from .real_engine import RealEngine


class ProgramPlan(CallPlan):
    """Runs the operations of one rank with one call as executions of a program. The first operation compiles it.

    Args:
        engine: Moves bytes, and compiles programs.
        communicator: Communicator of the group and stream.
        call: The call that all ranks agree on.
    """

    _compiled: Compiled
    _resources: ProgramResources | None = None

    def __init__(self, engine: RealEngine, communicator: Communicator, call: Call) -> None:
        super().__init__(call)
        self._engine, self._communicator = engine, communicator
        self.lasts: bool = not call.counts  # uneven blocks seldom repeat

    def __str__(self) -> str:
        if self._resources is None:
            return "program"
        return f"program {self._compiled.schedule.algorithm} over {self._resources.wire_kind}"

    def start(self, match: Match, operation: Operation) -> None:
        """Start the program for an operation: its first messages leave at once, without a task."""
        communicator = self._communicator
        if self._resources is None:
            position = operation.port.position
            self._compiled = self._engine.compiler.compile(self.call, communicator.members, position)
            self._resources = self._engine.program_resources(operation.context, communicator.members)
        operation.algorithm = self._compiled.schedule.algorithm
        operation.prepare_result(self.call)
        execution = Execution(
            *self._compiled.lay_out_on_arrays(operation),
            self._resources,
            tag=communicator.first_transport_tag(operation.seq),
            priority=operation.urgency,
            spawn=operation.context.spawn,
            signature=self.signature_at(operation.place) if communicator.spans else None,
        )
        operation.start_moving(execution)
        over = execution.begin(partial(self._end_operation, match, operation))
        operation.poll = None if over or communicator.local_count > 1 else execution.look_before_sleeping
        if over:
            self._end_operation(match, operation, None)

    def _end_operation(self, match: Match, operation: Operation, error: BaseException | None) -> None:
        """End an operation whose program is over; `error` is the first one of its steps.

        If a rank of this process has not arrived yet, a task ends the operation a turn of the event loop later, because
        the calls may still turn out to disagree.
        """
        elsewhere = get_ident() != operation.context.thread
        if elsewhere and (error is not None or operation.end_wakes_loop or self._communicator.local_count > 1):
            operation.context.post_to_loop(self._end_operation, match, operation, error)
        elif error is None and match.arrived < self._communicator.local_count:
            operation.context.spawn(self._end_next_turn, match, operation)
        else:
            operation.on_bytes_stopped()
            self._communicator.settle(match, operation, error)

    async def _end_next_turn(self, match: Match, operation: Operation) -> None:
        try:
            await trio.lowlevel.checkpoint()
        finally:
            operation.on_bytes_stopped()
        self._communicator.settle(match, operation, None)
