"""Messages that need no task: they are started by a plain function, and their end is told by a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from transports.failures import TransportError

if TYPE_CHECKING:
    from transports.buffers import Buffer, Delivery
    from transports.patience import Patience


class Call(ABC):
    """A send or receive that was started by a plain function, and whose end is told by a call.

    Attributes:
        ended: It is over: done, failed or withdrawn, and has been told so.
        error: What it failed with.
        withdrawn: It was taken back in time, and has never been.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether it is over."""

    @property
    @abstractmethod
    def error(self) -> TransportError | None:
        """What it failed with."""

    @property
    @abstractmethod
    def withdrawn(self) -> bool:
        """Whether it was taken back in time."""

    @abstractmethod
    def withdraw(self) -> None:
        """Take it back, as a cancellation would; its end is told all the same, at once or later."""

    @abstractmethod
    def delivery(self) -> Delivery:
        """Return what a receive without a place of its own has got; once."""


class Starter(ABC):
    """What starts the messages between one endpoint and a peer; `Endpoint.starter` has it."""

    __slots__ = ()

    @abstractmethod
    def begin_send(
        self, dst: int, tag: int, data: Buffer, *, priority: int = 0, done: Callable[[Call], None]
    ) -> Call | None:
        """Start an `Endpoint.send`, whose end is told by a call: it needs no task.

        Args:
            dst: Receiving rank, which is the peer.
            tag: As for `Endpoint.send`.
            data: As for `Endpoint.send`, until `done` is called.
            priority: As for `Endpoint.send`.
            done: Called once, with what was started: perhaps before this returns, else by whatever task brings the
                news. It must neither raise nor wait; after an error it must not call the endpoint.

        Returns:
            The send; if `done` has been called, over. None if it has left as by `Endpoint.try_send`: nothing is told.

        Raises:
            ArgumentError: For an unknown rank, a bad tag or a bad buffer; these are not told.
            LinkLostError: The wire is cut or the peer is gone; only if it has been before.
            TransportClosedError: This end is closed.
        """

    @property
    def patience(self) -> Patience | None:
        """Whether, and for how long, to catch up again and again before sleeping; None where that never helps."""
        return None

    def catch_up(self, peer: int) -> bool:
        """Move what can be from and to a peer, though a task would do so soon: who is about to sleep may call this.

        Whatever was started may end meanwhile, and is told so. Not to be called while anything is told.

        Args:
            peer: The other rank.

        Returns:
            Whether anything was moved.

        Raises:
            TransportClosedError: This end is closed.
        """
        return False

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
        """Start an `Endpoint.recv_into` (or, without `out`, a `recv`), whose end is told by a call: it needs no task.

        Args:
            src: Sending rank, which is the peer.
            tag: As for `Endpoint.recv`.
            out: As for `Endpoint.recv_into`, until `done` is called.
            nbytes: Length of the message.
            done: As for `begin_send`.
            consume: Without `out`, takes pieces of a long message as they come: the offset of each, and its bytes,
                which are there for the length of that call. It must neither raise nor wait. If it was called at all,
                it was for every byte once, and the delivery has none of them. A transport need not call it.

        Returns:
            The receive; if `done` has been called, over.

        Raises:
            ArgumentError: For an unknown rank, a bad tag or a bad buffer; these are not told.
            LinkLostError: The wire is cut or the peer is gone; only if it has been before.
            TransportClosedError: This end is closed.
        """
