"""The contract: what a transport is, what its endpoints promise, and how they fail.

A transport is one process's end of a fabric. Each rank that lives in the process has an endpoint there. Bytes go from
a buffer of one rank into a buffer of another; what they mean is not known here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeAlias, cast

import numpy as np
import trio

if TYPE_CHECKING:
    from types import TracebackType

    import numpy.typing as npt
    from typing_extensions import Buffer as _Buffer

#: Anything C-contiguous with the buffer protocol; numpy arrays of every dtype, also those (bfloat16, complex) that
#: ``memoryview`` cannot name.
Buffer: TypeAlias = "_Buffer | npt.NDArray[np.generic]"

#: Tags are unsigned 64-bit integers, so that they fit any wire format: ``0 <= tag < TAG_LIMIT``.
TAG_LIMIT = 2**64

_BYTE = np.dtype(np.uint8)


class TransportError(Exception):
    """Something went wrong between two ranks; the subclass says whose fault it is.

    ::

        TransportError
        |- ArgumentError          the caller: a buffer, rank or tag that no transport can take (also a ValueError)
        |- LengthMismatchError    the program: the two ends of one message disagree on its length
        |- LinkLostError          the world: the wire is cut or the peer is gone
        |- HandshakeError         another process: it is not, or not this time, a member (`transports.handshake`)
        `- TransportClosedError   the owner: this end has been closed

    Attributes:
        reason: What happened, without the envelope.
        src: Sending rank, if known.
        dst: Receiving rank, if known.
        tag: Tag of the message, if known.
        operation: What the message is a part of, where somebody above knows that and has said so; for the text.
    """

    def __init__(self, reason: str, *, src: int | None = None, dst: int | None = None, tag: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.src = src
        self.dst = dst
        self.tag = tag
        self.operation = ""

    def __str__(self) -> str:
        """Put the envelope before the reason."""
        if self.src is None and self.dst is None:
            return self.reason
        part = f" of {self.operation}" if self.operation else "" if self.tag is None else f", tag {self.tag}"
        return f"message from rank {self.src} to rank {self.dst}{part}: {self.reason}"


class ArgumentError(TransportError, ValueError):
    """A buffer, rank, tag or length that no transport can take. Raised at the call; nothing has been queued."""


class LengthMismatchError(TransportError):
    """The receiver's buffer is not as long as the message. Raised at both ends; the message is gone.

    A transport that lets small sends return before their receiver is known cannot raise in those any more.

    Attributes:
        sent_bytes: Length of the sender's buffer.
        expected_bytes: Length that the receiver asked for.
    """

    def __init__(self, *, sent_bytes: int, expected_bytes: int, src: int, dst: int, tag: int) -> None:
        reason = f"{sent_bytes} bytes were sent, {expected_bytes} bytes were expected; both ends must name one length"
        super().__init__(reason, src=src, dst=dst, tag=tag)
        self.sent_bytes = sent_bytes
        self.expected_bytes = expected_bytes


class LinkLostError(TransportError):
    """The wire between two ranks is cut, or the peer is gone.

    Attributes:
        evident: This side has seen for itself what is wrong, such as damaged bytes; otherwise all it knows is that the
            other side is gone, which may be the consequence of something else.
    """

    evident = False


class TransportClosedError(TransportError):
    """This end of the fabric has been closed; raised in pending operations and by later calls."""


def as_bytes(data: Buffer, *, name: str = "data", writable: bool = False) -> memoryview:
    """View a buffer as flat bytes, without a copy.

    Args:
        data: Any C-contiguous buffer.
        name: Argument name for the error message.
        writable: Whether the bytes are going to be written.

    Raises:
        ArgumentError: No buffer, not C-contiguous, or read-only though ``writable``.
    """
    try:
        view = _flat(data)
    except (TypeError, ValueError, NotImplementedError, BufferError) as error:
        raise ArgumentError(f"{name} cannot be taken as bytes: {error}") from error
    if writable and view.readonly:
        raise ArgumentError(f"{name} is read-only; receive into memory that may be written")
    return view


def _flat(data: Buffer) -> memoryview:
    if isinstance(data, np.ndarray) and data.dtype is not _BYTE and data.flags.c_contiguous:
        # numpy can view dtypes that memoryview cannot name, and refuses arrays of objects, which hold no data
        data = data.reshape(-1).view(_BYTE)
    shaped = data if isinstance(data, np.ndarray) and data.dtype is not _BYTE else memoryview(cast("_Buffer", data))
    if isinstance(shaped, np.ndarray) or not shaped.c_contiguous:
        raise BufferError(f"not C-contiguous (shape {shaped.shape}, strides {shaped.strides}); copy it first")
    if shaped.format == "B" and shaped.ndim == 1:
        return shaped
    if shaped.nbytes:
        return shaped.cast("B")
    nothing = memoryview(bytearray())  # memoryview cannot cast an empty shape
    return nothing.toreadonly() if shaped.readonly else nothing


class Delivery:
    """A received message, lent: ``view`` may be read until ``release()``.

    Over shared memory the view is the sender's own buffer and the sender stays suspended until the release, so release
    soon and always: use it in a ``with`` statement. Releasing twice is harmless. Call it from the Trio thread; worker
    threads that read the view must have finished.

    Attributes:
        view: The bytes, read-only. Reading it after the release raises ``ValueError``; arrays made from it cannot
            notice the release, and must not be read any more.
    """

    __slots__ = ("_finish", "view")

    def __init__(self, view: memoryview, finish: Callable[[], None] | None = None) -> None:
        self.view = view
        self._finish = finish

    def __repr__(self) -> str:
        """Say how much is lent, or that it was given back."""
        try:
            return f"<Delivery of {self.view.nbytes} bytes>"
        except ValueError:
            return "<Delivery, released>"

    def release(self) -> None:
        """Give the memory back to its owner."""
        finish, self._finish = self._finish, None
        with suppress(BufferError):  # something still holds the view open; its owner promised not to read it
            self.view.release()
        if finish is not None:
            finish()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Release."""
        self.release()


class Call(ABC):
    """A send or receive that was started by a plain function, and whose end is told by a call.

    Attributes:
        error: What it failed with.
        withdrawn: It was taken back in time, and has never been.
    """

    __slots__ = ()

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


class Endpoint(ABC):
    """Where one rank sends and receives.

    Promises of every endpoint, which ``transports.testing.check_transport`` proves:

    * **Order.** Messages with the same (src, dst, tag) are received in the order in which their sends were called, by
      receives in the order in which these were called; an implementation queues before it first suspends. Messages of
      different tags are independent: one that nobody receives yet blocks no other.
    * **Checkpoints.** Every call is a Trio checkpoint, also when it need not wait.
    * **Cancellation.** A call that is cancelled before both ends have met is withdrawn as if it had never been made.
      After that, it is completed first: memory that the other end reads or writes is never given back early.
    * **Lengths.** Zero bytes are a message. Both ends name the same length, or both raise `LengthMismatchError`.

    Attributes:
        rank: The rank whose end this is.
    """

    rank: int

    @abstractmethod
    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        """Send the bytes of ``data``; the buffer is the caller's again when this returns.

        Whether it returns before somebody receives depends on the transport and on the size; do not rely on either.

        Args:
            dst: Receiving rank.
            tag: ``0 <= tag < 2**64``.
            data: C-contiguous buffer; must not change until this returns.
            priority: Lower is more urgent, negative allowed. Orders messages that wait for the same wire.

        Raises:
            ArgumentError: At once, for an unknown rank, a bad tag or a bad buffer.
            LengthMismatchError: The receiver asked for another length.
            LinkLostError: The wire is cut or the peer is gone.
            TransportClosedError: This end is closed.
        """

    def try_send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> bool:
        """Send the bytes of ``data`` if that needs no waiting at all; the buffer is the caller's again.

        A plain function: it saves a small message the task that a `send` would need beside a receive. This default
        never can.

        Args:
            dst: Receiving rank.
            tag: ``0 <= tag < 2**64``.
            data: C-contiguous buffer.
            priority: As for `send`.

        Returns:
            Whether it was sent. If not, nothing has happened; call `send`.

        Raises:
            ArgumentError: For an unknown rank, a bad tag or a bad buffer.
            LengthMismatchError: The receiver asked for another length.
            LinkLostError: The wire is cut or the peer is gone.
            TransportClosedError: This end is closed.
        """
        return False

    def tells(self, peers: Iterable[int]) -> bool:
        """Whether `begin_send` and `begin_recv` serve these peers. This default serves none."""
        return False

    def begin_send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0, done: Callable[[Call], None]) -> Call:
        """Start a `send`, whose end is told by a call: it needs no task.

        Args:
            dst: Receiving rank.
            tag: As for `send`.
            data: As for `send`, until `done` is called.
            priority: As for `send`.
            done: Called once, with what was started: perhaps before this returns, else by whatever task brings the
                news. It must neither raise nor wait; after an error it must not call this endpoint.

        Returns:
            The send; if `done` has been called, over.

        Raises:
            ArgumentError: For an unknown rank, a bad tag or a bad buffer; these are not told.
            LinkLostError: The wire is cut or the peer is gone; only if it has been before.
            TransportClosedError: This end is closed.
        """
        raise NotImplementedError(f"{self!r} tells nobody")

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
        """Start a `recv_into` (or, without `out`, a `recv`), whose end is told by a call: it needs no task.

        Args:
            src: Sending rank.
            tag: As for `recv`.
            out: As for `recv_into`, until `done` is called.
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
        raise NotImplementedError(f"{self!r} tells nobody")

    @abstractmethod
    async def recv_into(self, src: int, tag: int, out: Buffer) -> None:
        """Receive the next message of (src, tag) into ``out``, which must have exactly its length.

        Args:
            src: Sending rank.
            tag: ``0 <= tag < 2**64``.
            out: C-contiguous writable buffer; neither read nor write it until this returns.

        Raises:
            ArgumentError: At once, for an unknown rank, a bad tag or a bad buffer.
            LengthMismatchError: The message has another length.
            LinkLostError: The wire is cut or the peer is gone.
            TransportClosedError: This end is closed.
        """

    async def recv(self, src: int, tag: int, nbytes: int) -> Delivery:
        """Receive the next message of (src, tag), which has ``nbytes`` bytes, as a read-only view.

        This default receives into memory of its own; transports that share memory lend the sender's.

        Raises:
            ArgumentError: At once, for an unknown rank, a bad tag or a negative length.
            LengthMismatchError: The message has another length.
            LinkLostError: The wire is cut or the peer is gone.
            TransportClosedError: This end is closed.
        """
        check_length(nbytes)
        room = np.empty(nbytes, np.uint8)
        await self.recv_into(src, tag, room)
        return Delivery(as_bytes(room).toreadonly())

    @abstractmethod
    async def wait_any(self, choices: Sequence[tuple[int, int]]) -> int:
        """Wait until one of some messages has been announced, and take none: receives from any source begin so.

        A message has been announced when its send has been called and word of it has come here, and until a receive has
        met it. Nothing else is promised: another task may receive it before this one does.

        Args:
            choices: (src, tag) of each; at least one.

        Returns:
            The index of the first choice of which there is a message.

        Raises:
            ArgumentError: At once, for an unknown rank or a bad tag, or no choices.
            LinkLostError: There is a message of none, and of one there never will be: the wire is cut or the peer is
                gone.
            TransportClosedError: This end is closed.
        """

    def __repr__(self) -> str:
        """Name the rank."""
        return f"<{type(self).__name__} of rank {self.rank}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Who sends how much to whom."""

    src: int
    dst: int
    tag: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What waits in a transport at this instant: material for "who waits for whom".

    Attributes:
        unmatched_sends: Sends that no receive has met.
        unmatched_receives: Receives that no send has met.
    """

    unmatched_sends: tuple[Envelope, ...] = ()
    unmatched_receives: tuple[Envelope, ...] = ()


class Transport(ABC):
    """One process's end of a fabric.

    Attributes:
        ranks: The local ranks, whose endpoints live in this process.
        peers: All ranks that these can send to and receive from; their own process's only where it joins those too.
    """

    ranks: tuple[int, ...]
    peers: tuple[int, ...]

    def shares_memory(self, ranks: Sequence[int]) -> bool:
        """Return whether every two of some ranks can read each other's memory at no cost.

        This default says no. Wrappers that emulate or damage a wire do, too, so that nobody takes a short cut around
        them.
        """
        return False

    def spans_hosts(self, ranks: Sequence[int]) -> bool:
        """Return whether some ranks live on different hosts, so that a wire joins them which a processor outruns.

        All processes of the ranks say the same. This default says no.
        """
        return False

    @abstractmethod
    def endpoint(self, rank: int) -> Endpoint:
        """Return the endpoint of a local rank, the same one each time.

        Raises:
            ArgumentError: The rank does not live here.
        """

    def lose(self, ranks: Sequence[int], reason: str) -> bool:
        """Give up ranks of other processes that are known to be gone: whatever waits for them fails now.

        Args:
            ranks: All ranks of the processes that are gone.
            reason: How that is known, for messages.

        Returns:
            Whether anything is given up; not where wires notice by themselves.
        """
        return False

    @abstractmethod
    def statistics(self) -> Statistics:
        """Return what waits here now."""

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Self]:
        try:
            yield self
        finally:
            with trio.CancelScope(shield=True):
                await self.aclose()

    def open(self) -> AbstractAsyncContextManager[Self]:
        """Keep the transport open for the length of an ``async with``; background tasks, if any, live inside."""
        return self._open()

    async def aclose(self) -> None:
        """Close this end: pending operations and later calls raise `TransportClosedError`. Twice is harmless."""
        await trio.lowlevel.checkpoint()

    def __repr__(self) -> str:
        """Name the ranks."""
        return f"<{type(self).__name__} of {describe_ranks(self.ranks)}>"


def describe_ranks(ranks: tuple[int, ...]) -> str:
    """Say which ranks, briefly.

    >>> describe_ranks((0, 1, 2, 3)), describe_ranks((4,)), describe_ranks((0, 2))
    ('ranks 0-3', 'rank 4', 'ranks 0, 2')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def check_tag(tag: int) -> None:
    """Raise `ArgumentError` unless ``0 <= tag < 2**64``."""
    if not 0 <= tag < TAG_LIMIT:
        raise ArgumentError(f"tag {tag} is not in 0 ... 2**64 - 1")


def check_length(nbytes: int) -> None:
    """Raise `ArgumentError` for a negative length."""
    if nbytes < 0:
        raise ArgumentError(f"nbytes is {nbytes}; a message has 0 bytes or more")


def check_choices(choices: Sequence[tuple[int, int]]) -> None:
    """Raise `ArgumentError` unless there is at least one choice and all tags are good."""
    if not choices:
        raise ArgumentError("choices is empty; name at least one (src, tag)")
    for _, tag in choices:
        check_tag(tag)
