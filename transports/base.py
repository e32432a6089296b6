"""The contract of transports and of their endpoints.

A transport is one process's end of a fabric. Each rank that lives in the process has an endpoint there. Bytes go from
a buffer of one rank into a buffer of another; what they mean is not known here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, Self

import numpy as np
import trio

from transports.buffers import Buffer, Delivery, as_bytes
from transports.failures import ArgumentError
from transports.signature import OPEN_SIGNATURE, PlainSignature

if TYPE_CHECKING:
    from transports.common import Board
    from transports.shared_memory.engine import Post
    from transports.starter import Starter

#: Tags are unsigned 64-bit integers, so that they fit any wire format: ``0 <= tag < TAG_LIMIT``.
TAG_LIMIT = 2**64
#: Length of a receive that takes a message of any length, see `Starter.begin_recv`.
OPEN = -1


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
    """

    rank: int  # The rank whose end this is

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

    def starter(self, peer: int) -> Starter | None:
        """Return the object that begins messages to and from a peer without a task; None if messages need tasks.

        This default returns None: an endpoint with awaiting calls alone is complete.

        Args:
            peer: The other rank.

        Raises:
            ArgumentError: For an unknown rank.
            TransportClosedError: This end is closed, or not open yet.
        """
        return None

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

        This default receives into memory of its own; transports that share memory loan the sender's.

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

    def announced(self, choices: Sequence[tuple[int, int]], *, free_bits: int = 0) -> Envelope | None:
        """Return the message that `wait_any` would return at once; None if there is none, or that is not known.

        This default returns None. `wait_any` describes the arguments.

        Raises:
            ArgumentError: For an unknown rank or a bad tag, or no choices.
            TransportClosedError: This end is closed.
        """
        return None

    def unexpected(self) -> Sequence[Envelope]:
        """Return the messages for this rank that no receive has met; empty where that is not known."""
        return ()

    @abstractmethod
    async def wait_any(self, choices: Sequence[tuple[int, int]], *, free_bits: int = 0) -> Envelope:
        """Wait until one of some messages has been announced, without receiving it; for receives from any source.

        A message counts as announced from the arrival of its announcement until a receive matches it. Nothing else is
        promised: another task may receive it before this one does.

        Args:
            choices: (src, tag) of each message; at least one.
            free_bits: Number of low bits of the tag that are ignored in the comparison.

        Returns:
            The message that was announced first, see `Envelope.since_ns`; if the order is not known, of any sender, so
            that none waits for ever while others have messages.

        Raises:
            ArgumentError: At once, for an unknown rank or a bad tag, or no choices.
            LinkLostError: No choice has a message, and one never will: its wire is cut or its peer is gone.
            TransportClosedError: This end is closed.
        """

    def __repr__(self) -> str:
        """Name the rank."""
        return f"<{type(self).__name__} of rank {self.rank}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A message without its bytes: sender, receiver, tag and length."""

    src: int
    dst: int
    tag: int
    nbytes: int
    # Time of the arrival of an announced message, on the clock of `perf_counter_ns`: a receive from any source takes
    # the oldest message, also of several transports. By default the time at which the envelope was made.
    since_ns: int = field(default_factory=perf_counter_ns, compare=False, repr=False)
    signature: PlainSignature = field(default=OPEN_SIGNATURE, compare=False, repr=False)  # Of the sender


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """The unmatched messages of a transport at this instant, from which stall reports are made."""

    unmatched_sends: tuple[Envelope, ...] = ()  # Sends that no receive has met
    unmatched_receives: tuple[Envelope, ...] = ()  # Receives that no send has met


class Transport(ABC):
    """One process's end of a fabric."""

    ranks: tuple[int, ...]  # The local ranks, whose endpoints live in this process
    # Ranks that the local ranks can send to and receive from; local ranks only if the transport joins them too.
    peers: tuple[int, ...]

    def shares_memory(self, ranks: Sequence[int]) -> bool:
        """Return whether every two of some ranks can read each other's memory at no cost.

        This default returns False, as do wrappers that emulate or damage a wire: a short cut would lead around them.
        """
        return False

    def board(self, key: int, ranks: Sequence[int]) -> Board | None:
        """Return the shared memory of some ranks in several processes of one host; None if they share none.

        This default returns None, as do wrappers that emulate or damage a wire.

        Args:
            key: The group's number, below 2**64, the same on every rank.
            ranks: Ranks of the group, in its order.
        """
        return None

    def loan(self, nbytes: int) -> tuple[memoryview, Callable[[], None]] | None:
        """Return memory that other processes of the host map, and its release; None: there is none.

        Any thread may call it and release the memory, at any time; the release does nothing in a forked process. This
        default returns None.
        """
        return None

    def post(self, ranks: Sequence[int]) -> Post | None:
        """Return the mailbox of this process if the mailboxes of all of some ranks reach each other.

        All ranks get the same answer. This default returns None, as do wrappers that emulate or damage a wire.
        """
        return None

    def spans_hosts(self, ranks: Sequence[int]) -> bool:
        """Return whether some ranks live on different hosts, joined by a wire that is slower than a processor.

        All processes of the ranks return the same. This default returns False.
        """
        return False

    @property
    def socket_placement(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each process, if sockets join all processes of the world, inside a host as well; else empty.

        All processes return the same. This default is empty.
        """
        return ()

    @abstractmethod
    def endpoint(self, rank: int) -> Endpoint:
        """Return the endpoint of a local rank, the same one each time.

        Raises:
            ArgumentError: The rank does not live here.
        """

    def lose(self, ranks: Sequence[int], reason: str) -> bool:
        """Give up ranks of other processes that are known to be lost: calls that wait for them fail now.

        Args:
            ranks: All ranks of the lost processes.
            reason: Evidence of the loss, for messages.

        Returns:
            Whether any rank was given up; False where wires notice by themselves.
        """
        return False

    @abstractmethod
    def statistics(self) -> Statistics:
        """Return the messages that wait for their other end now."""

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Self]:
        """Yield this transport, and close it at the end, whatever was cancelled."""
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
    """Return a short text that names some ranks.

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
    """Raise `ArgumentError` unless there is at least one choice and all tags are valid."""
    if not choices:
        raise ArgumentError("choices is empty; name at least one (src, tag)")
    for _, tag in choices:
        check_tag(tag)
