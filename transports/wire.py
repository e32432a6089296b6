"""The contract of wires: one rank's end of a fabric, where its messages are begun.

Messages are begun by plain functions, so that no message needs a task; awaiting calls wait for the ends of begun ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import trio
from trio.lowlevel import (
    Abort,
    RaiseCancelT,
    Task,
    cancel_shielded_checkpoint,
    checkpoint_if_cancelled,
    current_task,
    current_trio_token,
    reschedule,
    wait_task_rescheduled,
)

from transports.buffers import Buffer, Delivery, as_bytes
from transports.failures import ArgumentError, LinkLostError
from transports.request import Done, Request
from transports.signature import OPEN_SIGNATURE, PlainSignature, Signature

if TYPE_CHECKING:
    from transports.patience import Patience

#: Tags are unsigned 64-bit integers, so that they fit any wire format: ``0 <= tag < TAG_LIMIT``.
TAG_LIMIT = 2**64
#: Length of a receive that takes a message of any length, see `Wire.begin_recv`.
OPEN = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A message without its bytes: sender, receiver, tag and length."""

    src: int
    dst: int
    tag: int
    nbytes: int
    # Time at which the message was announced here, on the clock of `perf_counter_ns`. A receive from any source takes
    # the oldest message of all transports. By default the time at which the envelope was made.
    since_ns: int = field(default_factory=perf_counter_ns, compare=False, repr=False)
    signature: PlainSignature = field(default=OPEN_SIGNATURE, compare=False, repr=False)  # Of the sender


class Wire(ABC):
    """End of a transport at which one rank sends and receives.

    A subclass has to define `begin_send`, `begin_recv`, `unexpected`, `watch` and `check`.

    Promises of every wire, which ``transports.testing.check_transport`` proves:

    * **Order.** Sends and receives with the same (src, dst, tag) match in the order in which each side began them.
      Messages of different tags are independent: a message that nobody receives yet blocks no other.
    * **Ends.** `done` is called once for each request, in the event loop's thread, or in a thread that runs in place of
      the event loop.
    * **Cancellation.** A request that is withdrawn before both ends have met is as if it had never been made. After
      they have met, the message is completed first: memory that the other end reads or writes is never given back
      early.
    * **Signatures.** Where the two ends meet, signatures are compared, then lengths. Both ends that wait raise
      `SignatureMismatchError` or `LengthMismatchError`. Zero bytes are a message.
    * **Checkpoints.** Every awaiting call is a Trio checkpoint, also when it need not wait.

    Attributes:
        rank: The rank that sends and receives here.
        within_host: Whether messages go through memory of this host.
    """

    rank: int
    within_host: bool = False

    @abstractmethod
    def begin_send(
        self, dst: int, tag: int, data: Buffer, *, priority: int = 0, signature: Signature | None = None, done: Done
    ) -> Request | None:
        """Begin to send the bytes of ``data``.

        Whether the send can end before a rank receives the message depends on the wire and on the size.

        Args:
            dst: Receiving rank.
            tag: ``0 <= tag < 2**64``.
            data: C-contiguous buffer; must not change until the end.
            priority: Lower is more urgent, negative allowed. Orders messages that wait for the same wire.
            signature: What the message is. It is compared with the signature of the receive before the lengths are.
                None: the message may be anything.
            done: Called once with the request, perhaps before `begin_send` returns. The callback must neither raise nor
                wait, and after an error it must not use the wire.

        Returns:
            The send, which has ended if `done` has been called. None if the message has left at once; `done` is not
            called then.

        Raises:
            ArgumentError: For an unknown rank, a bad tag or a bad buffer; `done` is not called then.
            LinkLostError: The wire is cut or the peer is gone; only if that was known before.
            TransportClosedError: This end is closed, or not open yet.
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
        done: Done,
        consume: Callable[[int, memoryview], None] | None = None,
        allocate: Callable[[Any], Buffer] | None = None,
    ) -> Request:
        """Begin to receive the next message of (src, tag) into ``out``; if `out` is None, as a read-only view on loan.

        Args:
            src: Sending rank.
            tag: ``0 <= tag < 2**64``.
            out: C-contiguous writable buffer of `nbytes`, which nobody may read or write until the end; or None.
            nbytes: Length of the message. `OPEN`, without `out`: any.
            signature: What the message must be; another message ends both sides with a `SignatureMismatchError`.
            done: As for `begin_send`.
            consume: Without `out`, called with the offset and the bytes of each piece of a long message that arrives.
                The bytes are valid during the call. The callback must neither raise nor wait. A wire calls it either
                for all pieces, and then the delivery is empty, or for none.
            allocate: For a message of any length: called with the request once `request.nbytes` and `request.theirs`
                are known. It returns a writable buffer of that length, which is then used like `out`. If it raises, the
                receive ends with that error, and the message is refused. Without `allocate`, the message is on loan.

        Returns:
            The receive; if `done` has been called, it has ended.

        Raises:
            ArgumentError: For an unknown rank, a bad tag or a bad buffer; `done` is not called then.
            LinkLostError: The wire is cut or the peer is gone; only if that was known before.
            TransportClosedError: This end is closed, or not open yet.
        """

    @abstractmethod
    def unexpected(self, tag: int | None = None) -> Sequence[Envelope]:
        """Return the messages for this rank that no receive has met; if a tag is given, only messages of this tag."""

    @abstractmethod
    def watch(self, notify: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context in which `notify` is called whenever a message without a receive may have arrived.

        It is called, too, when a peer may have been lost.
        """

    @abstractmethod
    def check(self, peer: int, tag: int = 0) -> None:
        """Raise the error that a message with the peer would raise at the call; do nothing if it would raise none.

        Raises:
            ArgumentError: The peer is not reached, or the tag is out of range.
            TransportClosedError: The transport is not open.
        """

    def lost(self, src: int, tag: int = 0) -> LinkLostError | None:
        """Return the error of a receive whose message cannot arrive any more, because the wire to `src` has ended.

        None if the message has arrived or still may. This default returns None.
        """
        return None

    def route(self, peer: int) -> Wire:
        """Return the wire that carries the messages with a peer: this one, or, in a router, one of its parts' wires.

        Callers ask that wire for `takes_threads`, `promise_wait`, `catch_up` and `polling_patience`. Errors are as of
        `check`.
        """
        self.check(peer)
        return self

    @property
    def polling_patience(self) -> Patience | None:
        """How long a task polls with `catch_up` before it sleeps, learnt from past waits; None: polling never helps."""
        return None

    def takes_threads(self, peer: int) -> bool:
        """Whether another thread than the event loop's may begin messages with a peer; this default returns False."""
        return False

    def promise_wait(self, peer: int) -> None:  # noqa: B027 - most wires wake nothing
        """Announce that the calling thread will begin a message with a peer now, and wait for its end right after.

        Until then the wire need not wake the event loop for arrivals, because the wait handles them. The promise ends
        with that wait, with a message that ends at once, or at the next turn of the event loop. By default it has no
        effect.
        """

    def catch_up(self, peer: int) -> bool:
        """Move the bytes from and to a peer that are ready, without waiting for the transport's own task.

        A caller uses it before it sleeps. Requests may end during the call, so callbacks may be called; a callback must
        not call `catch_up`.

        Args:
            peer: The other rank.

        Returns:
            Whether any bytes were moved. This default returns False.

        Raises:
            TransportClosedError: This end is closed.
        """
        return False

    # -- awaiting calls -----------------------------------------------------------------------------------------------

    async def send(
        self, dst: int, tag: int, data: Buffer, *, priority: int = 0, signature: Signature | None = None
    ) -> None:
        """Send, and wait for the end, after which the caller may write into the buffer again.

        Arguments and errors are as of `begin_send`. Errors with which the request ends, such as `LengthMismatchError`,
        are raised as well.
        """
        await begin_and_wait(partial(self.begin_send, dst, tag, data, priority=priority, signature=signature))

    async def recv_into(self, src: int, tag: int, out: Buffer, *, signature: Signature | None = None) -> None:
        """Receive into ``out``, a buffer of exactly the length of the message, and wait for the end.

        Other arguments and errors are as of `begin_recv`.
        """
        view = as_bytes(out, name="out", writable=True)
        await begin_and_wait(partial(self.begin_recv, src, tag, view, view.nbytes, signature=signature))

    async def recv(self, src: int, tag: int, nbytes: int, *, signature: Signature | None = None) -> Delivery:
        """Receive a message on loan, and wait for it; the caller releases the returned delivery.

        Args:
            src: Sending rank.
            tag: ``0 <= tag < 2**64``.
            nbytes: Length of the message; `OPEN`: any length.
            signature: What the message must be; None: anything.

        Raises:
            ArgumentError: `nbytes` is negative. Other errors are as of `begin_recv`.
        """
        if nbytes < 0:
            raise ArgumentError(f"nbytes is {nbytes}; a message has 0 bytes or more")
        request = await begin_and_wait(partial(self.begin_recv, src, tag, None, nbytes, signature=signature))
        assert request is not None, "only a send may have left at once"
        return request.delivery()

    def announced(self, choices: Sequence[tuple[int, int]]) -> Envelope | None:
        """Return the message that `wait_any` would return at once; None if there is none.

        Args:
            choices: (src, tag) of each message; at least one.

        Raises:
            ArgumentError: For an unknown rank or a bad tag, or no choices.
            TransportClosedError: This end is closed.
        """
        if not choices:
            raise ArgumentError("choices is empty; name at least one (src, tag)")
        for src, tag in choices:
            self.check(src, tag)
        tags = {tag for _, tag in choices}
        arrived = self.unexpected(tags.pop() if len(tags) == 1 else None)
        found = (each for each in arrived if (each.src, each.tag) in choices)
        return min(found, key=attrgetter("since_ns"), default=None)

    async def wait_any(self, choices: Sequence[tuple[int, int]]) -> Envelope:
        """Wait until one of several messages has been announced, and do not receive it.

        Receives from any source use this. A message counts as announced from the arrival of its announcement until a
        receive matches the message. After `wait_any` returns, another task may still receive the message first.

        Args:
            choices: (src, tag) of each message; at least one.

        Returns:
            The message that was announced first, see `Envelope.since_ns`.

        Raises:
            ArgumentError: At once, for an unknown rank or a bad tag, or no choices.
            LinkLostError: No choice has a message, and one choice cannot get any: its wire is cut or its peer is gone.
            TransportClosedError: This end is closed.
        """
        # before the checkpoint, so that wrong choices raise at once
        changed, envelope = trio.Event(), self.announced(choices)
        await trio.lowlevel.checkpoint()
        with self.watch(lambda: changed.set()):
            while (envelope := self.announced(choices)) is None:
                for src, tag in choices:
                    if (error := self.lost(src, tag)) is not None:
                        raise error
                await changed.wait()
                changed = trio.Event()
        return envelope

    def __repr__(self) -> str:
        """Name the rank."""
        return f"<{type(self).__name__} of rank {self.rank}>"


async def begin_and_wait(begin: Callable[..., Request | None]) -> Request | None:
    """Begin a message, wait for its end, and raise its error; withdraw it if the task is cancelled.

    Args:
        begin: `begin_send` or `begin_recv` with all arguments but `done`.

    Returns:
        The request, which has ended without an error; None: `begin` returned None, because the message left at once.
    """
    await checkpoint_if_cancelled()
    task: Task | None = None
    thread, token, cancelling = get_ident(), current_trio_token(), False
    raise_cancelled: RaiseCancelT | None = None  # once the task is cancelled

    def done(request: Request) -> None:
        """Notify the task, unless its cancellation has withdrawn the request."""
        # without a task the end came within `begin`, and nobody sleeps
        if task is None or (cancelling and request.withdrawn):
            return
        if get_ident() == thread:
            reschedule(task)
        else:  # a thread that runs in place of the event loop
            token.run_sync_soon(reschedule, task)

    def abort(raise_cancel: RaiseCancelT) -> Abort:
        """Withdraw the request, because Trio cancels the task; return whether the task may wake now.

        After `Abort.FAILED` the task sleeps on until the request ends, see `trio.lowlevel.wait_task_rescheduled`.
        """
        nonlocal raise_cancelled, cancelling
        raise_cancelled, cancelling = raise_cancel, True
        assert request is not None, "there is nothing to wait for"
        request.withdraw()
        # an end within `withdraw` is reported by the result of this function, a later one by `done`
        cancelling = False
        return Abort.SUCCEEDED if request.ended and request.withdrawn else Abort.FAILED

    request = begin(done=done)
    if request is None or request.ended:
        await cancel_shielded_checkpoint()
    else:
        task = current_task()
        await wait_task_rescheduled(abort)
    if request is not None and request.withdrawn and raise_cancelled is not None:
        raise_cancelled()
    if request is not None and request.error is not None:
        raise request.error
    return request


@contextmanager
def add_to_watchers(watchers: Sequence[list[Callable[[], None]]], notify: Callable[[], None]) -> Iterator[None]:
    """Add `notify` to lists of callbacks for the length of a block.

    Args:
        watchers: The lists; a wire calls all functions of a list of its own.
        notify: The function to add.
    """
    for functions in watchers:
        functions.append(notify)
    try:
        yield
    finally:
        for functions in watchers:
            functions.remove(notify)


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
