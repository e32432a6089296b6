"""Messages begun by plain functions: a callback reports the end of a message, so that no message needs a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transports.buffers import Buffer, Delivery
    from transports.patience import Patience
    from transports.signature import PlainSignature, Signature


class Request(ABC):
    """A send or receive under way.

    Attributes:
        ended: The request has finished, failed or been withdrawn, and its callback has been called.
        error: The error of a failed request.
        withdrawn: The request was cancelled before it matched, as if it had never been made.
        nbytes: Length of the message; of a receive of any length once it has matched.
        theirs: Signature of the other end, where the two ends differ, or the length was `OPEN`.
    """

    __slots__ = ()

    ended: bool
    error: Exception | None
    withdrawn: bool
    nbytes: int
    theirs: PlainSignature | None

    @abstractmethod
    def withdraw(self) -> None:
        """Cancel the request if it has not matched; its callback is called all the same, at once or later."""

    def look(self) -> bool:
        """Poll for a moment, on behalf of a task that is about to sleep; return False where a wire cannot.

        The callback may be called during the poll. The event loop's thread only.
        """
        return False

    def wait(self, seconds: float) -> bool:
        """Wait in a thread, without the interpreter lock, until no more bytes move; False if they may, or unsupported.

        After True, the thread calls `settle_in_thread`, or lets the event loop call `settle`.
        """
        return False

    def settle(self) -> None:  # noqa: B027 - most wires have no such end
        """Record the end that a thread has waited for, and call the callback once."""

    def settle_in_thread(self) -> bool:
        """Settle in the calling thread, which runs in place of the event loop; return whether that was possible."""
        return False

    def delivery(self) -> Delivery:
        """Return the message of a receive without a buffer; once."""
        raise AssertionError("a send delivers nothing")


class Starter(ABC):
    """Begins the messages between one endpoint and a peer; `Endpoint.starter` returns it."""

    __slots__ = ()

    @abstractmethod
    def begin_send(
        self,
        dst: int,
        tag: int,
        data: Buffer,
        *,
        priority: int = 0,
        signature: Signature | None = None,
        done: Callable[[Request], None],
    ) -> Request | None:
        """Begin an `Endpoint.send`.

        Args:
            dst: Receiving rank, which is the peer.
            tag: As for `Endpoint.send`.
            data: As for `Endpoint.send`, until `done` is called.
            priority: As for `Endpoint.send`.
            signature: What the message is; compared with the receiver's before the lengths. None: it may be anything.
            done: Called once with the request, perhaps before this returns. It must neither raise nor wait; after an
                error it must not use the endpoint.

        Returns:
            The send, which has ended if `done` has been called. None, without a call of `done`, if it has left.

        Raises:
            ArgumentError: For an unknown rank, a bad tag or a bad buffer; `done` is not called then.
            LinkLostError: The wire is cut or the peer is gone; only if that was known before.
            TransportClosedError: This end is closed.
        """

    @abstractmethod
    def begin_recv(
        self,
        src: int,
        tag: int,
        out: Buffer | None,
        nbytes: int,
        *,
        signature: Signature | None = None,
        done: Callable[[Request], None],
        consume: Callable[[int, memoryview], None] | None = None,
        allocate: Callable[[Any], Buffer] | None = None,
    ) -> Request:
        """Begin an `Endpoint.recv_into`, or without `out` an `Endpoint.recv`.

        Args:
            src: Sending rank, which is the peer.
            tag: As for `Endpoint.recv`.
            out: As for `Endpoint.recv_into`, until `done` is called.
            nbytes: Length of the message. `OPEN`, without `out`: any.
            signature: What the message must be; a `SignatureMismatchError` ends both sides if it is something else.
            done: As for `begin_send`.
            consume: Without `out`, called with the offset and the bytes of each piece of a long message as it arrives.
                The bytes are valid until it returns. It must neither raise nor wait. A transport calls it for all
                pieces, and then the delivery is empty, or for none.
            allocate: For a message of any length, called with the receive once its `nbytes` and `theirs` are known.
                It returns memory of that length, for which it is as with `out`. If it raises, the receive ends with
                that error, and the message is refused. Without it, the message is on loan.

        Returns:
            The receive; if `done` has been called, it has ended.

        Raises:
            ArgumentError: For an unknown rank, a bad tag or a bad buffer; `done` is not called then.
            LinkLostError: The wire is cut or the peer is gone; only if that was known before.
            TransportClosedError: This end is closed.
        """

    @property
    def patience(self) -> Patience | None:
        """Limit of polling with `catch_up` before sleep; None where polling never helps."""
        return None

    @property
    def within_host(self) -> bool:
        """Whether messages go through memory of this host."""
        return False

    def takes_threads(self, peer: int) -> bool:
        """Whether a thread that runs in place of the event loop may begin messages with a peer."""
        return False

    def catch_up(self, peer: int) -> bool:
        """Move the bytes from and to a peer that are ready, without waiting for the transport's own task.

        For a caller that is about to sleep. Calls may end here, and their callbacks are called; a callback must not
        call this.

        Args:
            peer: The other rank.

        Returns:
            Whether anything was moved.

        Raises:
            TransportClosedError: This end is closed.
        """
        return False
