"""How one rank's ends of one call are carried out over a transport, again and again: what all have is found once."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import cast

import trio

from transports import Endpoint, Starter

from ...collectives.call import Call
from ...collectives.reduce import Array
from ...diagnostics import first
from ..communicator import Communicator, ShortWay
from ..match import Match
from ..operation import Operation
from .cc_core import Execution
from .compiled import Compiled
from .compiler import MESSAGE_ALGORITHM
from .locking import start_locked
from .message_run import MessageRun
from .settling import settle
from .wire_driven import Station, WireDrivenExecution
from .workers import Workers


class WireWay(ShortWay):
    """How the ends of one call are carried out.

    Args:
        communicator: Where they meet.
        call: What travels.
        algorithm: What that goes by in timelines.
    """

    def __init__(self, communicator: Communicator, call: Call, algorithm: str) -> None:
        self._communicator, self._call, self._algorithm = communicator, call, algorithm

    def take(self, operation: Operation) -> None:
        """Carry out one rank's end."""
        start_locked(operation, self.start, self._communicator.match_alone(operation), operation)

    def start(self, match: Match, operation: Operation) -> None:
        """Do what needs no waiting at once: small messages are on their way before any task starts."""
        operation.running, operation.algorithm = True, self._algorithm
        try:
            operation.fit(self._call)
            over = self._begin(match, operation)
        except Exception as error:
            end(self._communicator, match, operation, error)
            return
        if not over:
            return
        if match.count == self._communicator.here:
            end(self._communicator, match, operation, None)
        else:  # one may come who means something else
            operation.context.spawn(self._end_soon, match, operation)

    @abstractmethod
    def _begin(self, match: Match, operation: Operation) -> bool:
        """Begin; True if it is over."""

    async def _end_soon(self, match: Match, operation: Operation) -> None:
        try:
            await trio.lowlevel.checkpoint()
        finally:
            operation.stopped()
        settle(self._communicator, match, operation, None)


class MessageWay(WireWay):
    """A message between two ranks, which needs neither a schedule nor a program.

    Args:
        communicator: Where its ends meet.
        call: What travels.
        peer: World rank of the other end.
        starter: What starts messages to there and from there.
    """

    def __init__(self, communicator: Communicator, call: Call, peer: int, starter: Starter) -> None:
        super().__init__(communicator, call, MESSAGE_ALGORITHM)
        self._peer, self._starter = peer, starter

    def _begin(self, match: Match, operation: Operation) -> bool:
        tag = self._communicator.tag(self._call, operation.seq)
        operation.scope = run = MessageRun(self._starter, self._peer, tag, spawn=operation.context.spawn)
        ended = partial(end, self._communicator, match, operation)
        if operation.port.position == 0:
            over = run.send(cast(Array, operation.source), operation.urgency, ended)
        else:
            over = run.receive(cast(Array, operation.target), ended)
        operation.look = None if over else run.look
        return over


class DrivenWay(WireWay):
    """A program that the wires drive.

    Args:
        communicator: Where the ends meet.
        call: What travels.
        compiled: The program.
        station: Whose it is.
    """

    def __init__(self, communicator: Communicator, call: Call, compiled: Compiled, station: Station) -> None:
        super().__init__(communicator, call, compiled.schedule.algorithm)
        self._compiled, self._station = compiled, station

    def _begin(self, match: Match, operation: Operation) -> bool:
        communicator = self._communicator
        operation.scope = execution = WireDrivenExecution(
            *self._compiled.laid(operation),
            self._station,
            tag=communicator.tag(self._call, operation.seq),
            priority=operation.urgency,
            spawn=operation.context.spawn,
        )
        over = execution.begin(partial(end, communicator, match, operation))
        operation.look = None if over else execution.look
        return over


class TaskWay(WireWay):
    """A program that runs in a task.

    Args:
        communicator: Where the ends meet.
        call: What travels.
        compiled: The program.
        endpoint: The rank's end of the transport.
        workers: Where large reductions run.
        fans_out: As for `Execution`.
    """

    def __init__(
        self,
        communicator: Communicator,
        call: Call,
        compiled: Compiled,
        endpoint: Endpoint,
        workers: Workers,
        *,
        fans_out: bool,
    ) -> None:
        super().__init__(communicator, call, compiled.schedule.algorithm)
        self._compiled, self._endpoint = compiled, endpoint
        self._workers, self._fans_out = workers, fans_out

    def _begin(self, match: Match, operation: Operation) -> bool:
        """Run it in a task, unless it is over at once."""
        communicator = self._communicator
        execution = Execution(
            self._compiled.program,
            self._compiled.buffers(operation),
            self._endpoint,
            members=communicator.members,
            tag=communicator.tag(self._call, operation.seq),
            priority=operation.urgency,
            workers=self._workers,
            fans_out=self._fans_out,
        )
        over = execution.begin()
        if not over:
            operation.scope = scope = trio.CancelScope()
            operation.context.spawn(self._run, match, operation, execution, scope)
        return over

    async def _run(self, match: Match, operation: Operation, execution: Execution, scope: trio.CancelScope) -> None:
        failure: BaseException | None = None
        try:
            with scope:
                await execution.run()
        except* Exception as group:
            failure = first(group)
        finally:
            operation.stopped()
        settle(self._communicator, match, operation, failure)


def end(communicator: Communicator, match: Match, operation: Operation, error: BaseException | None) -> None:
    """Settle an operation whose bytes have stopped moving."""
    operation.stopped()
    settle(communicator, match, operation, error)
