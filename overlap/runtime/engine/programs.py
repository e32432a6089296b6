"""Operations as programs: each rank executes its part of a compiled collective over a transport."""

from __future__ import annotations

from functools import partial
from threading import get_ident

import trio
from trio.lowlevel import TrioToken

from transports import Transport
from transports.guarded import guard

from ...collectives.call import Call
from ..communicator import Communicator
from ..match import Match
from ..operation import Operation
from ..plan import CallPlan
from .compiler import Compiled, Compiler
from .execution import Execution, Station
from .workers import Workers


class Programs:
    """Plans of operations with bytes that travel over a transport, while the ranks compute."""

    def __init__(self, transport: Transport, workers: Workers, compiler: Compiler, token: TrioToken) -> None:
        self._transport, self._workers, self._token = transport, workers, token
        self.compiler: Compiler = compiler
        self._stations: dict[tuple[int, ...], Station] = {}  # by world rank and group members

    def plan(self, communicator: Communicator, call: Call, operation: Operation) -> CallPlan:
        """Return the plan of one rank's operations with a call."""
        return ProgramPlan(self, communicator, call)

    def station(self, communicator: Communicator, operation: Operation) -> Station:
        """Return the wires of a rank's messages, and its workers."""
        rank, members = operation.context.rank, communicator.members
        station = self._stations.get((rank, *members))
        if station is None:
            wire = self._transport.wire(rank)
            peers = [peer for peer in members if peer != rank]
            wires = {peer: guard(wire, peer, operation.context.spawn) for peer in peers}
            thread = operation.context.thread
            station = Station(wires=wires, workers=self._workers, token=self._token, thread=thread)
            self._stations[rank, *members] = station
        return station


class ProgramPlan(CallPlan):
    """Runs operations of one rank with one call as executions of a program, which the first one compiles."""

    _compiled: Compiled
    _station: Station | None = None

    def __init__(self, programs: Programs, communicator: Communicator, call: Call) -> None:
        super().__init__(call)
        self._programs, self._communicator = programs, communicator
        self.lasts: bool = not call.counts  # uneven blocks seldom repeat

    def __str__(self) -> str:
        if self._station is None:
            return "program"
        return f"program {self._compiled.schedule.algorithm} over {self._station.wire_kind}"

    def start(self, match: Match, operation: Operation) -> None:
        """Start the program; small messages leave before any task starts."""
        communicator = self._communicator
        if self._station is None:
            position = operation.port.position
            self._compiled = self._programs.compiler.compile(self.call, communicator.members, position)
            self._station = self._programs.station(communicator, operation)
        operation.algorithm = self._compiled.schedule.algorithm
        operation.fit(self.call)
        execution = Execution(
            *self._compiled.laid(operation),
            self._station,
            tag=communicator.tag(self.call, operation.seq),
            priority=operation.urgency,
            spawn=operation.context.spawn,
            signature=self.sign(operation.place) if communicator.spans else None,
        )
        operation.start_moving(execution)
        over = execution.begin(partial(self._end_operation, match, operation))
        operation.poll = None if over or communicator.here > 1 else execution.look_before_sleeping
        if over:
            self._end_operation(match, operation, None)

    def _end_operation(self, match: Match, operation: Operation, error: BaseException | None) -> None:
        """End an operation; in a task if a local rank has not arrived yet, because its call may disagree."""
        elsewhere = get_ident() != operation.context.thread
        if elsewhere and (error is not None or operation.end_wakes_loop or self._communicator.here > 1):
            operation.context.from_thread(self._end_operation, match, operation, error)
        elif error is None and match.arrived < self._communicator.here:
            operation.context.spawn(self._end_soon, match, operation)
        else:
            operation.stopped()
            self._communicator.settle(match, operation, error)

    async def _end_soon(self, match: Match, operation: Operation) -> None:
        """End an operation without messages in the next turn of the event loop."""
        try:
            await trio.lowlevel.checkpoint()
        finally:
            operation.stopped()
        self._communicator.settle(match, operation, None)
