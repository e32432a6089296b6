"""The matching engine: the state of all messages between two processes, seen from one side."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from transports.buffers import BounceBuffers
from transports.failures import LinkLostError
from transports.matching.ends import Lane, Receive, Send
from transports.matching.incoming import Incoming
from transports.matching.outgoing import Outgoing
from transports.matching.protocol import Limits, MessageKind


class Engine:
    """The matching of messages with one other process, or with this one itself where a transport carries those, too.

    Args:
        name: Of the other process, for errors.
        srcs: Its ranks.
        dsts: Ranks of this process.
        limits: The limits that both have agreed on.
        memory: For messages that are lent.

    Attributes:
        outgoing: Messages that leave.
        incoming: Messages that come.
        gone: Why nothing more can be sent to the other process or expected from it; None while it is there.
    """

    def __init__(
        self, name: str, srcs: Iterable[int], dsts: Iterable[int], limits: Limits, memory: BounceBuffers
    ) -> None:
        self.name = name
        self.outgoing: Outgoing = Outgoing(limits)
        self.incoming: Incoming = Incoming(srcs, dsts, limits, memory, self.outgoing.answer)
        self.gone: str | None = None
        self._evident = False
        self._hear: dict[int, Callable[..., None]] = {
            MessageKind.OFFER: self.incoming.offer,
            MessageKind.PUSH: self.incoming.push,
            MessageKind.ACCEPT: self.outgoing.accepted,
            MessageKind.REFUSE: self.outgoing.refused,
            MessageKind.TAKEN: self.outgoing.taken,
            MessageKind.WITHDRAW: self.incoming.withdraw,
            MessageKind.WITHDRAWN: self.outgoing.withdrawn,
            MessageKind.CREDIT: self.outgoing.credited,
            MessageKind.ABANDON: self._abandoned,
        }

    # -- calls of the ranks of this process ---------------------------------------------------------------------------

    def receive(self, receive: Receive) -> bool:
        """Take a message that has come, or queue for it; return whether one had come.

        Raises:
            LinkLostError: It has not come, and never will.
        """
        incoming = self.incoming
        if receive.lane in incoming.arrived:
            incoming.take(receive)
            return True
        if self.gone is not None:
            self.check(receive.lane)
        incoming.post(receive)
        return False

    def withdraw(self, end: Send | Receive) -> bool:
        """Take back a cancelled call; False if it ends later, and tells then whether that was in time."""
        return self.outgoing.withdraw(end) if isinstance(end, Send) else self.incoming.forget(end)

    def check(self, lane: Lane) -> None:
        """Raise `LinkLostError` if the other process is not there any more."""
        if self.gone is not None:
            src, dst, tag = lane
            error = LinkLostError(self.gone, src=src, dst=dst, tag=tag)
            error.evident = self._evident
            raise error

    @property
    def quiet(self) -> bool:
        """Whether nothing is due, and every message that both sides have begun is finished."""
        return not (self.outgoing.due or self.outgoing.sends or self.incoming.moving)

    # -- messages of the other process --------------------------------------------------------------------------------

    def hear(self, kind: int, fields: Iterable[int]) -> None:
        """Act on a message that has no payload.

        Raises:
            ProtocolError: The message makes no sense, or not now.
        """
        self._hear[kind](*fields)

    def _abandoned(self, number: int) -> None:
        receive = self.incoming.abandoned(number)
        if receive is not None:
            receive.lose(f"{self.name} has left")

    # -- how it ends --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Fail every call that has not met its other end: this side closes. Matched messages go on."""
        for end in (*self.outgoing.give_up_waiting(), *self.incoming.give_up_waiting()):
            end.close()
        self.incoming.watchers.wake_all()

    def end(self, reason: str, *, evident: bool = False, keep_arrived: bool = False, keep_moving: bool = False) -> None:
        """Fail the waiting calls: the other process is gone.

        Args:
            reason: Why.
            evident: This side has seen that for itself, see `LinkLostError`.
            keep_arrived: Messages that are here can still be received.
            keep_moving: Messages that either side has accepted are finished nevertheless.
        """
        if self.gone is None:
            self.gone, self._evident = reason, evident
        sends = self.outgoing.clear(keep_moving=keep_moving)
        # Receives first: a caller that waits both ways should name the message that did not come.
        for end in (*self.incoming.clear(keep_arrived=keep_arrived, keep_moving=keep_moving), *sends):
            end.lose(self.gone)
            if isinstance(end.error, LinkLostError):
                end.error.evident = self._evident
        self.incoming.watchers.wake_all()
