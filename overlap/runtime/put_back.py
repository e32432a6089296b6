"""Receives that are withdrawn, and received messages that go to the next receive."""

from __future__ import annotations

from abc import abstractmethod
from bisect import insort
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import cast

from ..collectives.reduce import Array
from .disputes import Disputes
from .event_loop import Withdraws
from .failure import Failure
from .match import Match, RankCall, mismatch
from .operation import Operation, OperationPort, ReturnedMessage
from .receive import ReceiveFuture

RETURNED_NS = -1
"""Start time of a message that was received before, and put back."""


class PutBack(Disputes):
    """The part of a communicator that takes receives out of matching, and gives their messages to others."""

    ports: dict[int, OperationPort]
    _matches: dict[int, Match]
    _moving: dict[int, Match]

    @abstractmethod
    def arrive(self, operation: Operation) -> None:
        """Match the arrived end of one rank."""

    @abstractmethod
    def offer_again(self) -> None:
        """Offer messages to receives from any source: a receive that waited for them has left the queue."""

    def withdraw_receive(self, operation: Operation, later: Callable[[], None]) -> bool | None:
        """Take a receive out of matching, as if it had never been issued, unless a message has met it.

        Args:
            operation: The receive, which its lane has admitted.
            later: Function to call once the transport has given it back, if that takes a task.

        Returns:
            Whether it is withdrawn now; None if that is still open.
        """
        match = self._matches.get(operation.seq)
        if match is None or match.arrived > 1 or match.error is not None:
            return False
        if operation.scope is not None:
            scope = operation.scope
            withdrawn = scope.withdraw(later) if isinstance(scope, Withdraws) else False
            if not withdrawn:
                return withdrawn
        self.forget_receive(operation)
        return True

    def forget_receive(self, operation: Operation) -> None:
        """Forget a receive that the transport has given back; a sender that arrived in between waits for the next."""
        seq = operation.seq
        match = self._matches.pop(seq, None) or self._moving.pop(seq, None)
        if match is not None and match.arrived > 1:
            match[operation.port.place] = None
            match.arrived -= 1
            (sender,) = match.ends
            match.pattern, match.first = sender.call, sender
            self._matches[seq] = match
        operation.reset_receive()

    def put_back(self, port: OperationPort, message: ReturnedMessage, giver: Operation) -> None:
        """Give a received message that no task has taken to the next receive; a later message may have met that one."""
        returned = list(port.returned)
        insort(returned, message, key=attrgetter("order"))
        port.returned = returned
        waiting = port.stream.first
        if waiting is None or waiting is giver:
            self.offer_again()
            return
        if self.withdraw_receive(waiting, partial(self._restart_late, waiting)):
            self.arrive(waiting)
        self.offer_again()

    def _restart_late(self, operation: Operation) -> None:
        """Match a receive again that the transport has given back, so that it gets a returned message."""
        if not operation.done:
            self.forget_receive(operation)
            self.arrive(operation)

    def has_message(self, port: OperationPort) -> bool:
        """Whether a receive would meet a message at once, if that is known."""
        return self.offered_ns is not None

    def _take_returned(self, operation: Operation) -> None:
        """Give a receive the oldest returned message; fail the receive if its call differs."""
        port, (message, *port.returned) = operation.port, operation.port.returned
        port.give_back(operation.seq)  # the number belongs to a later message
        cast("ReceiveFuture[object]", operation).order = message.order
        try:
            if not message.call.agrees(operation.call):
                sender, rank = self.members[0], operation.context.rank
                rank_calls = (
                    RankCall(sender, message.call, "received before"),
                    RankCall(rank, operation.call, operation.call_site),
                )
                raise mismatch(self.name, operation.seq, *rank_calls)()
            operation.fit(message.call)
            if message.data is not None:
                cast(Array, operation.target).reshape(-1)[...] = message.data
        except Exception as error:  # no memory, or another call
            operation.fail(Failure(error))
            return
        operation.finish(operation.context.now_ns(), operation.describe(message.call, operation.started_ns))

    @property
    def offered_ns(self) -> int | None:
        """Start time of the oldest message without a receive; None if there is none.

        Returned messages are older than all others: see `RETURNED_NS`.
        """
        alone = [match.ends[0] for match in self._matches.values() if match.error is None and len(match.ends) == 1]
        started = sorted(end.started_ns for end in alone if end.port.position == 0)
        port = self.ports.get(1)
        if port is not None:
            started = [*(RETURNED_NS for _ in port.returned), *started][len(port.stream.queue) :]
        return started[0] if started else None
