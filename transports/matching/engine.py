"""The matching engine: all that two processes know of the messages between them, seen from one side."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from transports.bounce import BounceBuffers
from transports.failures import LinkLostError
from transports.matching.ends import Lane, Receive, Send
from transports.matching.incoming import Incoming
from transports.matching.outgoing import Outgoing
from transports.matching.protocol import Limits, MessageKind


class Engine:
    """One for each other process (or for this one itself, where a transport carries those messages, too).

    Args:
        name: Of the other process, for errors.
        srcs: Its ranks.
        dsts: Ranks of this process.
        limits: What both have agreed on.
        memory: For messages that are lent.

    Attributes:
        outgoing: What leaves.
        incoming: What comes.
        gone: Why nothing more can be sent to the other process or expected from it; None while it is there.
    """

    def __init__(
        self, name: str, srcs: Iterable[int], dsts: Iterable[int], limits: Limits, memory: BounceBuffers
    ) -> None:
        self.name = name
        self.outgoing = Outgoing(limits)
        self.incoming = Incoming(srcs, dsts, limits, memory, self.outgoing.answer)
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

    # -- what the ranks of this process want --------------------------------------------------------------------------

    def receive(self, receive: Receive) -> bool:
        """Take a message that has come, or queue for it; return whether one had.

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
        """Take back a call that was cancelled; False if it ends some other time, and says then if that was in time."""
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
        """Whether nothing is due, and nothing that both sides have begun is unfinished."""
        return not (self.outgoing.due or self.outgoing.sends or self.incoming.moving)

    # -- what the other process says ----------------------------------------------------------------------------------

    def hear(self, kind: int, fields: Iterable[int]) -> None:
        """Act on a message that has no payload.

        Raises:
            ProtocolError: It makes no sense, or not now.
        """
        self._hear[kind](*fields)

    def _abandoned(self, number: int) -> None:
        receive = self.incoming.abandoned(number)
        if receive is not None:
            receive.lose(f"{self.name} has left")

    # -- how it ends --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Fail every call that has not met its other end: this side closes. What has met goes on."""
        for end in (*self.outgoing.give_up_waiting(), *self.incoming.give_up_waiting()):
            end.close()
        self.incoming.watchers.wake_all()

    def end(self, reason: str, *, evident: bool = False, keep_arrived: bool = False, keep_moving: bool = False) -> None:
        """Fail what waits: the other process is gone.

        Args:
            reason: Why.
            evident: This side has seen that for itself, see `LinkLostError`.
            keep_arrived: Messages that are here can still be received.
            keep_moving: What has been accepted, on either side, is going to be finished nevertheless.
        """
        if self.gone is None:
            self.gone, self._evident = reason, evident
        sends = self.outgoing.clear(keep_moving=keep_moving)
        # Receives first: whoever waits for messages both ways shall name the one that did not come.
        for end in (*self.incoming.clear(keep_arrived=keep_arrived, keep_moving=keep_moving), *sends):
            end.lose(self.gone)
            if isinstance(end.error, LinkLostError):
                end.error.evident = self._evident
        self.incoming.watchers.wake_all()
