"""The matching engine: the state of all messages between two processes, seen from one side."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from transports.buffers import BounceBuffers
from transports.failures import LinkLostError
from transports.matching.ends import Lane, Receive, Send
from transports.matching.incoming import Incoming
from transports.matching.outgoing import Outgoing
from transports.matching.protocol import Limits, MessageKind, ProtocolError


class Engine:
    """The matching of messages with one other process, or with this one if the transport joins its own ranks.

    Args:
        name: Name of the other process in errors.
        srcs: Ranks of the other process.
        dsts: Ranks of this process.
        limits: The limits that both have agreed on.
        memory: Buffers of messages on loan.

    Attributes:
        outgoing: Messages that leave.
        incoming: Messages that come.
        gone: Why the other process can be reached no more; None while it can.
    """

    def __init__(
        self, name: str, srcs: Iterable[int], dsts: Iterable[int], limits: Limits, memory: BounceBuffers
    ) -> None:
        self.name = name
        self.outgoing: Outgoing = Outgoing(limits)
        self.incoming: Incoming = Incoming(srcs, dsts, limits, memory, self.outgoing.answer)
        self.gone: str | None = None
        self._evident = False
        self._handlers: dict[int, Callable[..., None]] = {
            MessageKind.OFFER: self.incoming.handle_offer,
            MessageKind.PUSH: self.incoming.handle_push,
            MessageKind.SIGNATURE: self.incoming.handle_signature,
            MessageKind.ACCEPT: self.outgoing.handle_accept,
            MessageKind.REFUSE: self.outgoing.handle_refuse,
            MessageKind.TAKEN: self.outgoing.handle_taken,
            MessageKind.WITHDRAW: self.incoming.handle_withdraw,
            MessageKind.WITHDRAWN: self.outgoing.handle_withdrawn,
            MessageKind.CREDIT: self.outgoing.handle_credit,
            MessageKind.ABANDON: self._handle_abandon,
        }

    # -- calls of the ranks of this process ---------------------------------------------------------------------------

    def receive(self, receive: Receive) -> bool:
        """Match an arrived message, or queue the receive; return whether it has matched.

        Raises:
            LinkLostError: The message has not arrived, and never will.
        """
        incoming = self.incoming
        if receive.lane in incoming.arrived:
            incoming.match_arrived(receive)
            return True
        if (error := self.loss_error(receive.lane)) is not None:
            raise error
        incoming.posted.setdefault(receive.lane, deque()).append(receive)
        return False

    def withdraw(self, end: Send | Receive) -> bool:
        """Cancel a call; False if it ends later, with `withdrawn` set if the cancellation was in time."""
        return self.outgoing.withdraw(end) if isinstance(end, Send) else self.incoming.withdraw_receive(end)

    def loss_error(self, lane: Lane) -> LinkLostError | None:
        """Return the error of a new message if the other process is lost or has left."""
        if self.gone is None:
            return None
        src, dst, tag = lane
        error = LinkLostError(self.gone, src=src, dst=dst, tag=tag)
        error.evident = self._evident
        return error

    @property
    def quiet(self) -> bool:
        """Whether nothing is due, and every matched message is finished."""
        return not (self.outgoing.due or self.outgoing.sends or self.incoming.filling)

    # -- messages of the other process --------------------------------------------------------------------------------

    def handle(self, kind: int, fields: Iterable[object]) -> None:
        """Handle a message that is neither `EAGER` nor a chunk.

        A payload, unless it is empty, is the last of its fields, as bytes.

        Raises:
            ProtocolError: The message is invalid in this state.
        """
        handler = self._handlers.get(kind)
        if handler is None:
            raise ProtocolError(f"peer sent a message of kind {kind}, which no engine handles")
        handler(*fields)

    def _handle_abandon(self, number: int) -> None:
        """Drop an offer whose sender has closed, and fail the receive that accepted it."""
        if not self.incoming.drop_offer(number) and (receive := self.incoming.filling.pop(number, None)) is not None:
            receive.lose(f"{self.name} has left")

    # -- how it ends --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Fail every unmatched call, because this side closes. Matched messages continue."""
        for end in (*self.outgoing.give_up_waiting(), *self.incoming.give_up_waiting()):
            end.close()
        self.incoming.wake_watchers()

    def end(self, reason: str, *, evident: bool = False, keep_arrived: bool = False) -> None:
        """Fail the waiting calls, because the other process is lost or has left.

        Args:
            reason: The cause, for messages.
            evident: This side has seen the fault itself, see `LinkLostError`.
            keep_arrived: Arrived messages can still be received.
        """
        if self.gone is None:
            self.gone, self._evident = reason, evident
        sends = self.outgoing.clear()
        # Receives first: a caller that waits both ways should name the message that did not arrive.
        for end in (*self.incoming.clear(keep_arrived=keep_arrived), *sends):
            end.lose(self.gone)
            if isinstance(end.error, LinkLostError):
                end.error.evident = self._evident
        self.incoming.wake_watchers()
