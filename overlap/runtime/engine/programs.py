"""Operations as programs: each rank executes its part of a compiled collective over a transport."""

from __future__ import annotations

from functools import partial
from threading import get_ident
from typing import cast

import trio
from trio.lowlevel import TrioToken

from transports import Transport
from transports.blocking import TaskStarter

from ...collectives.call import Call
from ...collectives.kinds import Collective
from ...collectives.reduce import Array
from ..communicator import Communicator, ShortWay
from ..match import Match
from ..operation import Operation
from .compiler import Compiled, Compiler
from .execution import Execution, Station
from .host_bytes import bytes_of
from .message import Message
from .workers import Workers


class ProgramRunner:
    """Runs operations whose bytes travel over a transport, while the ranks compute."""

    def __init__(self, transport: Transport, workers: Workers, compiler: Compiler, token: TrioToken) -> None:
        self._transport, self._workers, self._compiler, self._token = transport, workers, compiler, token
        self._stations: dict[tuple[int, ...], Station] = {}  # by world rank and group members

    def start(self, communicator: Communicator, match: Match, *, lasting: bool) -> None:
        """Start the programs of all local ranks that have arrived and have not started yet.

        Args:
            communicator: The communicator of the operation.
            match: The ends of the operation; its `pattern` is known.
            lasting: Whether later operations with an equal call run as this program without asking the engine.
        """
        for operation in match.arrived:
            if operation is not None and operation.scope is None and not operation.done:
                self._start(communicator, match, operation, lasting=lasting)

    def _start(self, communicator: Communicator, match: Match, operation: Operation, *, lasting: bool) -> None:
        call = match.pattern
        assert call is not None, "a program is started for a known call"
        try:
            way = self._way(communicator, call, operation)
        except Exception as error:
            _end(communicator, match, operation, error)
            return
        if lasting and call is operation.call and not call.counts:  # uneven blocks seldom repeat
            communicator.shorten(call, way)
        way.start(match, operation)

    def _way(self, communicator: Communicator, call: Call, operation: Operation) -> ProgramWay:
        """Return the program of one rank for a call, as a short way for its later operations."""
        members, position = communicator.members, operation.port.position
        compiled = self._compiler.compile(call, members, position)
        station = self._stations.get((members[position], *members))
        if station is None:
            station = self._stations[members[position], *members] = self._station(members, position, operation)
        if call.kind is Collective.P2P and station.starters:  # a rank with itself has none
            return MessageWay(communicator, call, compiled, station)
        return ProgramWay(communicator, call, compiled, station)

    def _station(self, members: tuple[int, ...], position: int, operation: Operation) -> Station:
        """Return the starters of a rank's messages; where the transport has none, each message gets a task."""
        endpoint, spawn = self._transport.endpoint(members[position]), operation.context.spawn
        peers = [peer for peer in members if peer != members[position]]
        starters = {peer: endpoint.starter(peer) or TaskStarter(endpoint, spawn) for peer in peers}
        thread = operation.context.thread
        return Station(starters=starters, workers=self._workers, token=self._token, thread=thread)

    def at_once(self, communicator: Communicator, operation: Operation) -> bool:
        """Whether one end of a message starts, and may end, without a task that is started or woken."""
        station = self._stations.get((operation.context.rank, *communicator.members))
        if station is None or not communicator.shortened(operation.call):
            return False
        for peer, starter in station.starters.items():  # noqa: SIM110 - in every message, and twice as fast
            if not starter.takes_threads(peer):
                return False
        return True


class ProgramWay(ShortWay):
    """Carries out one rank's operations with one call as executions of a program.

    Args:
        communicator: The communicator of the operations.
        call: The call: kind, sizes and dtype.
        compiled: The program of the rank.
        station: The starters of the rank's messages.
    """

    def __init__(self, communicator: Communicator, call: Call, compiled: Compiled, station: Station) -> None:
        self._communicator, self._call, self._compiled, self._station = communicator, call, compiled, station

    def take(self, operation: Operation) -> None:
        """Start an operation as soon as its rank has arrived."""
        if not (lock_later := operation.may_leave_at_once):
            operation.lock()
        self.start(self._communicator.match_alone(operation), operation)
        if lock_later and not operation.done:
            operation.lock()

    def start(self, match: Match, operation: Operation) -> None:
        """Start the program; small messages leave before any task starts."""
        operation.algorithm = self._compiled.schedule.algorithm
        communicator = self._communicator
        try:
            operation.fit(self._call)
            execution, over = self._begin(match, operation)
            operation.look = None if over or communicator.here > 1 else execution.look_before_sleeping
        except Exception as error:
            _end(communicator, match, operation, error)
            return
        if over:
            self._over(match, operation, None)

    def _begin(self, match: Match, operation: Operation) -> tuple[Execution, bool]:
        """Begin an execution, which becomes the operation's scope; return it, and whether it is over."""
        execution = Execution(
            *self._compiled.laid(operation),
            self._station,
            tag=self._communicator.tag(self._call, operation.seq),
            priority=operation.urgency,
            spawn=operation.context.spawn,
        )
        operation.moves(execution)
        return execution, execution.begin(partial(self._over, match, operation))

    def _over(self, match: Match, operation: Operation, error: BaseException | None) -> None:
        """End an operation; in a task if a local rank has yet to arrive, because its call may disagree."""
        elsewhere = get_ident() != operation.context.thread
        if elsewhere and (error is not None or operation.heard or self._communicator.here > 1):
            operation.context.from_thread(self._over, match, operation, error)
        elif error is None and match.count < self._communicator.here:
            operation.context.spawn(self._end_soon, match, operation)
        else:
            operation.stopped()
            self._communicator.settle(match, operation, error)

    async def _end_soon(self, match: Match, operation: Operation) -> None:
        try:
            await trio.lowlevel.checkpoint()
        finally:
            operation.stopped()
        self._communicator.settle(match, operation, None)


class MessageWay(ProgramWay):
    """Carries out one rank's ends of messages with another rank."""

    def _begin(self, match: Match, operation: Operation) -> tuple[Execution, bool]:
        communicator, receives = self._communicator, operation.port.position == 1
        peer = communicator.members[1 - operation.port.position]
        message = Message(self._station, peer, operation.context.spawn)
        operation.moves(message)
        tag, over = communicator.tag(self._call, operation.seq), partial(self._over, match, operation)
        if receives:
            return message, message.receive(tag, bytes_of(cast(Array, operation.target).reshape(-1)), over)
        data = bytes_of(cast(Array, operation.source).reshape(-1))
        return message, message.send(tag, data, operation.urgency, over)


def _end(communicator: Communicator, match: Match, operation: Operation, error: BaseException | None) -> None:
    """Settle an operation whose bytes have stopped moving."""
    operation.stopped()
    communicator.settle(match, operation, error)
