"""Operations as programs: each rank's part of a compiled collective, executed over a transport."""

from __future__ import annotations

from functools import partial

import trio

from transports import Transport
from transports.blocking import TaskStarter

from ...collectives.call import Call
from ..communicator import Communicator, ShortWay
from ..match import Match
from ..operation import Operation
from .compiler import Compiled, Compiler
from .ends import settle, start_locked
from .execution import Execution, Station
from .workers import Workers


class ProgramRunner:
    """Runs operations whose bytes must travel over a transport, each rank's part beside what the rank computes."""

    def __init__(self, transport: Transport, workers: Workers, compiler: Compiler) -> None:
        self._transport, self._workers, self._compiler = transport, workers, compiler
        self._stations: dict[tuple[int, ...], Station] = {}  # by a rank and the members

    def start(self, communicator: Communicator, match: Match, *, lasting: bool) -> None:
        """Start the programs of all ranks that are ready and not under way.

        Args:
            communicator: Where the ranks meet.
            match: Their ends; it is known what travels.
            lasting: Whether later operations of the same call take this way without asking the engine.
        """
        for operation in match.arrived:
            if operation is not None and not (operation.running or operation.done):
                self._start(communicator, match, operation, lasting=lasting)

    def _start(self, communicator: Communicator, match: Match, operation: Operation, *, lasting: bool) -> None:
        call = match.pattern
        assert call is not None, "it is known what travels"
        try:
            way = self._way(communicator, call, operation)
        except Exception as error:
            end(communicator, match, operation, error)
            return
        if lasting and call is operation.call and not call.counts:  # uneven blocks are seldom the same twice
            communicator.shorten(call, way)
        way.start(match, operation)

    def _way(self, communicator: Communicator, call: Call, operation: Operation) -> ProgramWay:
        """Return the way of one rank's ends of a call."""
        members, position = communicator.members, operation.port.position
        compiled = self._compiler.compile(call, members, position)
        station = self._stations.get((members[position], *members))
        if station is None:
            station = self._stations[members[position], *members] = self._station(members, position, operation)
        return ProgramWay(communicator, call, compiled, station)

    def _station(self, members: tuple[int, ...], position: int, operation: Operation) -> Station:
        """Return what begins a rank's messages; a transport that cannot begin them gets a task for each."""
        endpoint, spawn = self._transport.endpoint(members[position]), operation.context.spawn
        peers = [peer for peer in members if peer != members[position]]
        starters = {peer: endpoint.starter(peer) or TaskStarter(endpoint, spawn) for peer in peers}
        return Station(starters=starters, workers=self._workers)


class ProgramWay(ShortWay):
    """The way of one rank's ends of one call: as a program.

    Args:
        communicator: Where the ends meet.
        call: What travels.
        compiled: The program.
        station: Begins the rank's messages.
    """

    def __init__(self, communicator: Communicator, call: Call, compiled: Compiled, station: Station) -> None:
        self._communicator, self._call, self._compiled, self._station = communicator, call, compiled, station

    def take(self, operation: Operation) -> None:
        """Carry out one rank's end."""
        start_locked(operation, self.start, self._communicator.match_alone(operation), operation)

    def start(self, match: Match, operation: Operation) -> None:
        """Begin whatever need not wait: small messages are on their way before any task starts."""
        operation.running, operation.algorithm = True, self._compiled.schedule.algorithm
        try:
            operation.fit(self._call)
            over = self._begin(match, operation)
        except Exception as error:
            end(self._communicator, match, operation, error)
            return
        if over:
            self._over(match, operation, None)

    def _over(self, match: Match, operation: Operation, error: BaseException | None) -> None:
        """End an operation; a task later if a rank of this process has still to come, perhaps with another call."""
        if error is None and match.count < self._communicator.here:
            operation.context.spawn(self._end_soon, match, operation)
        else:
            end(self._communicator, match, operation, error)

    def _begin(self, match: Match, operation: Operation) -> bool:
        """Begin the program; return whether it is over."""
        communicator = self._communicator
        operation.scope = execution = Execution(
            *self._compiled.laid(operation),
            self._station,
            tag=communicator.tag(self._call, operation.seq),
            priority=operation.urgency,
            spawn=operation.context.spawn,
        )
        over = execution.begin(partial(self._over, match, operation))
        operation.look = None if over or communicator.here > 1 else execution.look
        return over

    async def _end_soon(self, match: Match, operation: Operation) -> None:
        try:
            await trio.lowlevel.checkpoint()
        finally:
            operation.stopped()
        settle(self._communicator, match, operation, None)


def end(communicator: Communicator, match: Match, operation: Operation, error: BaseException | None) -> None:
    """Settle an operation whose bytes have stopped moving."""
    operation.stopped()
    settle(communicator, match, operation, error)
