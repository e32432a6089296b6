"""The matching engine: the state of all messages between two processes, seen from one side."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from transports.buffers import BounceBuffers
from transports.failures import LinkLostError, lane_fields
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
        incoming: Messages that arrive, and receives.
        gone: Why no message can pass any more: the other process is lost or has left. None while messages can pass.
    """

    def __init__(
        self, name: str, srcs: Iterable[int], dsts: Iterable[int], limits: Limits, memory: BounceBuffers
    ) -> None:
        self.name = name
        self.outgoing: Outgoing = Outgoing(limits)
        self.incoming: Incoming = Incoming(srcs, dsts, limits, memory, self.outgoing.queue_answer)
        self.gone: str | None = None
        self._evident = False  # whether this side saw the fault itself, see `LinkLostError.evident`
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
        if (error := self.peer_gone_error(receive.lane)) is not None:
            raise error
        incoming.posted.setdefault(receive.lane, deque()).append(receive)
        return False

    def withdraw(self, end: Send | Receive) -> bool:
        """Cancel a send or receive; return whether it has ended as withdrawn.

        False: it ends later, as withdrawn only if the other side has not accepted it before.
        """
        return self.outgoing.withdraw(end) if isinstance(end, Send) else self.incoming.withdraw_receive(end)

    def peer_gone_error(self, lane: Lane) -> LinkLostError | None:
        """Return the error of a new message with the other process if that is lost or has left; else None."""
        if self.gone is None:
            return None
        error = LinkLostError(self.gone, **lane_fields(lane))
        error.evident = self._evident
        return error

    @property
    def quiet(self) -> bool:
        """Whether no message is due to leave, and every matched message has finished."""
        return not (self.outgoing.due or self.outgoing.sends or self.incoming.filling)

    # -- messages of the other process --------------------------------------------------------------------------------

    def handle(self, kind: int, fields: Iterable[object]) -> None:
        """Handle a message that is neither `EAGER` nor a chunk.

        Args:
            kind: A `MessageKind`.
            fields: The fields of this kind; a payload that is not empty follows them, as bytes.

        Raises:
            ProtocolError: The message is invalid in this state.
        """
        handler = self._handlers.get(kind)
        if handler is None:
            raise ProtocolError(f"peer sent a message of kind {kind}, which no engine handles")
        handler(*fields)

    def _handle_abandon(self, number: int) -> None:
        """Drop an offer whose sender has closed; fail the receive if one has accepted the offer."""
        if not self.incoming.drop_offer(number) and (receive := self.incoming.filling.pop(number, None)) is not None:
            receive.lose(f"{self.name} has left")

    # -- how it ends --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Fail every unmatched call, because this side closes. Matched messages continue."""
        for end in (*self.outgoing.remove_unmatched(), *self.incoming.remove_unmatched()):
            end.close()
        self.incoming.notify_watchers()

    def end(self, reason: str, *, evident: bool = False, keep_arrived: bool = False) -> None:
        """Fail the waiting calls, because the other process is lost or has left.

        Args:
            reason: The cause, for messages.
            evident: This side has seen the fault itself, see `LinkLostError`.
            keep_arrived: Arrived messages can still be received.
        """
        # the first reason counts
        if self.gone is None:
            self.gone, self._evident = reason, evident
        sends = self.outgoing.clear()
        # Receives first: a caller that waits both ways should name the message that did not arrive.
        for end in (*self.incoming.clear(keep_arrived=keep_arrived), *sends):
            end.lose(self.gone)
            if isinstance(end.error, LinkLostError):
                end.error.evident = self._evident
        self.incoming.notify_watchers()
