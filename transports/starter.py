"""Messages begun by plain functions: a callback reports the end of each, so that none needs a task of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transports.buffers import Buffer, Delivery
    from transports.failures import TransportError
    from transports.patience import Patience


class Call(ABC):
    """A send or receive under way.

    Attributes:
        ended: The call is done, failed or withdrawn, and its callback has been called.
        error: The error of a failed call.
        withdrawn: The call was taken back in time, as if it had never been made.
    """

    __slots__ = ()

    ended: bool
    error: TransportError | None
    withdrawn: bool

    @abstractmethod
    def withdraw(self) -> None:
        """Take the call back, as a cancellation would; its callback is called all the same, at once or later."""

    def look(self) -> bool:
        """Wait for a moment, for a task that is about to sleep until the end; return False where a wire cannot.

        The callback may be called meanwhile. The loop's thread only.
        """
        return False

    def wait(self, seconds: float) -> bool:
        """Wait in a thread, without the interpreter, until no more bytes move; False if they may, or a wire cannot.

        After True the thread calls `settle_in_thread` in the loop's place, or lets the loop call `settle`.
        """
        return False

    def settle(self) -> None:  # noqa: B027 - most wires have no such end
        """Note the end that a thread has waited for, and call the callback unless it has been called."""

    def settle_in_thread(self) -> bool:
        """Do likewise in a thread that has the loop's place; return whether that was possible."""
        return False

    def delivery(self) -> Delivery:
        """Return the message of a receive without a place of its own; once."""
        raise AssertionError("a send delivers nothing")


class Starter(ABC):
    """Begins the messages between one endpoint and a peer; `Endpoint.starter` returns it."""

    __slots__ = ()

    @abstractmethod
    def begin_send(
        self, dst: int, tag: int, data: Buffer, *, priority: int = 0, done: Callable[[Call], None]
    ) -> Call | None:
        """Begin an `Endpoint.send`.

        Args:
            dst: Receiving rank, which is the peer.
            tag: As for `Endpoint.send`.
            data: As for `Endpoint.send`, until `done` is called.
            priority: As for `Endpoint.send`.
            done: Called once, with the call: perhaps before this returns, else by the task that brings the news. It
                must neither raise nor wait; after an error it must not use the endpoint.

        Returns:
            The send; if `done` has been called, it has ended. None if the message has left: `done` is not called then.

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
        done: Callable[[Call], None],
        consume: Callable[[int, memoryview], None] | None = None,
    ) -> Call:
        """Begin an `Endpoint.recv_into`, or without `out` an `Endpoint.recv`.

        Args:
            src: Sending rank, which is the peer.
            tag: As for `Endpoint.recv`.
            out: As for `Endpoint.recv_into`, until `done` is called.
            nbytes: Length of the message.
            done: As for `begin_send`.
            consume: Without `out`, takes pieces of a long message as they arrive: the offset of each, and its bytes,
                which are valid for the length of that call. It must neither raise nor wait. If it was called at all,
                it was for every byte once, and the delivery has none of them. A transport need not call it.

        Returns:
            The receive; if `done` has been called, it has ended.

        Raises:
            ArgumentError: For an unknown rank, a bad tag or a bad buffer; `done` is not called then.
            LinkLostError: The wire is cut or the peer is gone; only if that was known before.
            TransportClosedError: This end is closed.
        """

    @property
    def patience(self) -> Patience | None:
        """Whether, and for how long, to call `catch_up` repeatedly before sleeping; None where that never helps."""
        return None

    @property
    def within_host(self) -> bool:
        """Whether messages go through memory of this host."""
        return False

    def takes_threads(self, peer: int) -> bool:
        """Whether a thread that has the event loop's place may begin messages with a peer."""
        return False

    def catch_up(self, peer: int) -> bool:
        """Move the bytes from and to a peer that are ready, before the task that would do so runs.

        A caller that is about to sleep may call this. Calls may end meanwhile, and their callbacks are called; a
        callback must not call this.

        Args:
            peer: The other rank.

        Returns:
            Whether anything was moved.

        Raises:
            TransportClosedError: This end is closed.
        """
        return False
