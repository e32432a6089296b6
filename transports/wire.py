"""The contract of wires: one rank's end of a fabric, where its messages are begun.

Messages are begun by plain functions, so that no message needs a task; awaiting calls wait for the ends of begun ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
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
    # Time of the arrival of an announced message, on the clock of `perf_counter_ns`: a receive from any source takes
    # the oldest message, also of several transports. By default the time at which the envelope was made.
    since_ns: int = field(default_factory=perf_counter_ns, compare=False, repr=False)
    signature: PlainSignature = field(default=OPEN_SIGNATURE, compare=False, repr=False)  # Of the sender


class Wire(ABC):
    """End of a transport at which one rank sends and receives.

    A wire has `begin_send`, `begin_recv`, `unexpected`, `watch` and `check`.

    Promises of every wire, which ``transports.testing.check_transport`` proves:

    * **Order.** Messages with the same (src, dst, tag) are received in the order in which their sends were begun, by
      receives in the order in which these were begun. Messages of different tags are independent: one that nobody
      receives yet blocks no other.
    * **Ends.** `done` is called once for each request, in the event loop's thread, or in one that runs in its place.
    * **Cancellation.** A request that is withdrawn before both ends have met is as if it had never been made. After
      that, it is completed first: memory that the other end reads or writes is never given back early.
    * **Signatures.** Where the two ends meet, signatures are compared, then lengths. Both ends that wait raise
      `SignatureMismatchError` or `LengthMismatchError`. Zero bytes are a message.
    * **Checkpoints.** Every awaiting call is a Trio checkpoint, also when it need not wait.

    Attributes:
        rank: The rank whose end this is.
        within_host: Whether messages go through memory of this host.
    """

    rank: int
    within_host: bool = False

    @abstractmethod
    def begin_send(
        self, dst: int, tag: int, data: Buffer, *, priority: int = 0, signature: Signature | None = None, done: Done
    ) -> Request | None:
        """Begin to send the bytes of ``data``.

        Whether the send ends before somebody receives depends on the wire and on the size; do not rely on either.

        Args:
            dst: Receiving rank.
            tag: ``0 <= tag < 2**64``.
            data: C-contiguous buffer; must not change until the end.
            priority: Lower is more urgent, negative allowed. Orders messages that wait for the same wire.
            signature: What the message is; compared with the receiver's before the lengths. None: it may be anything.
            done: Called once with the request, perhaps before this returns. It must neither raise nor wait; after an
                error it must not use the wire.

        Returns:
            The send, which has ended if `done` has been called. None, without a call of `done`, if it has left.

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
        """Begin to receive the next message of (src, tag) into ``out``, or without it as a read-only view on loan.

        Args:
            src: Sending rank.
            tag: ``0 <= tag < 2**64``.
            out: C-contiguous writable buffer of `nbytes`; neither read nor write it until the end.
            nbytes: Length of the message. `OPEN`, without `out`: any.
            signature: What the message must be; a `SignatureMismatchError` ends both sides if it is something else.
            done: As for `begin_send`.
            consume: Without `out`, called with the offset and the bytes of each piece of a long message as it arrives.
                The bytes are valid until it returns. It must neither raise nor wait. A wire calls it for all pieces,
                and then the delivery is empty, or for none.
            allocate: For a message of any length, called with the receive once its `nbytes` and `theirs` are known.
                It returns memory of that length, for which it is as with `out`. If it raises, the receive ends with
                that error, and the message is refused. Without it, the message is on loan.

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
        """Call a function, for the length of a block, whenever a message without a receive, or a loss, may be there."""

    @abstractmethod
    def check(self, peer: int, tag: int = 0) -> None:
        """Raise the error of a message with a peer that cannot be: `ArgumentError`, or `TransportClosedError`."""

    def lost(self, src: int, tag: int = 0) -> LinkLostError | None:
        """Return the error of a receive whose message has not arrived and never will, because its wire has ended."""
        return None

    def route(self, peer: int) -> Wire:
        """Return the wire that carries the messages with a peer, after `check`: this one, or one within it.

        It has the answers of `takes_threads`, `promise_wait`, `catch_up` and `patience` for the peer.
        """
        self.check(peer)
        return self

    @property
    def patience(self) -> Patience | None:
        """Limit of polling with `catch_up` before sleep; None where polling never helps."""
        return None

    def takes_threads(self, peer: int) -> bool:
        """Whether a thread that runs in place of the event loop may begin messages with a peer."""
        return False

    def promise_wait(self, peer: int) -> None:  # noqa: B027 - most wires wake nothing
        """Say that a thread is about to begin a message with a peer, and to wait for its end right after.

        Nothing else need be woken for what comes before that wait. A message that ends at once, a wait, and the next
        turn of the event loop each end the promise.
        """

    def catch_up(self, peer: int) -> bool:
        """Move the bytes from and to a peer that are ready, without waiting for the transport's own task.

        For a caller that is about to sleep. Requests may end here, and their callbacks are called; a callback must not
        call this.

        Args:
            peer: The other rank.

        Returns:
            Whether anything was moved.

        Raises:
            TransportClosedError: This end is closed.
        """
        return False

    # -- awaiting calls -----------------------------------------------------------------------------------------------

    async def send(
        self, dst: int, tag: int, data: Buffer, *, priority: int = 0, signature: Signature | None = None
    ) -> None:
        """Send, and wait for the end: the buffer is the caller's again. Arguments and errors are as of `begin_send`."""
        await finish(partial(self.begin_send, dst, tag, data, priority=priority, signature=signature))

    async def recv_into(self, src: int, tag: int, out: Buffer, *, signature: Signature | None = None) -> None:
        """Receive into ``out``, which has exactly the length of the message; as `begin_recv`."""
        view = as_bytes(out, name="out", writable=True)
        await finish(partial(self.begin_recv, src, tag, view, view.nbytes, signature=signature))

    async def recv(self, src: int, tag: int, nbytes: int, *, signature: Signature | None = None) -> Delivery:
        """Receive a message of `nbytes`, or `OPEN`, on loan; as `begin_recv`."""
        if nbytes < 0:
            raise ArgumentError(f"nbytes is {nbytes}; a message has 0 bytes or more")
        request = await finish(partial(self.begin_recv, src, tag, None, nbytes, signature=signature))
        assert request is not None, "only a send may have left at once"
        return request.delivery()

    def announced(self, choices: Sequence[tuple[int, int]]) -> Envelope | None:
        """Return the message that `wait_any` would return at once; None if there is none.

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
        """Wait until one of some messages has been announced, without receiving it; for receives from any source.

        A message counts as announced from the arrival of its announcement until a receive matches it. Nothing else is
        promised: another task may receive it before this one does.

        Args:
            choices: (src, tag) of each message; at least one.

        Returns:
            The message that was announced first, see `Envelope.since_ns`.

        Raises:
            ArgumentError: At once, for an unknown rank or a bad tag, or no choices.
            LinkLostError: No choice has a message, and one never will: its wire is cut or its peer is gone.
            TransportClosedError: This end is closed.
        """
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


async def finish(begin: Callable[..., Request | None]) -> Request | None:
    """Begin a message, wait for its end, and raise its error; withdraw it if the task is cancelled.

    Args:
        begin: Called with `done`; None from it is the end of a send that has left.
    """
    await checkpoint_if_cancelled()
    task: Task | None = None
    thread, token, give_up, cancelling = get_ident(), current_trio_token(), _go_on, False

    def done(request: Request) -> None:
        """Wake the task, unless its cancellation has withdrawn the request."""
        if task is None or (cancelling and request.withdrawn):
            return
        if get_ident() == thread:
            reschedule(task)
        else:  # a thread that runs in place of the event loop
            token.run_sync_soon(reschedule, task)

    def abort(raise_cancel: RaiseCancelT) -> Abort:
        """Withdraw the request of a cancelled task, which wakes now if that succeeded, and otherwise at the end."""
        nonlocal give_up, cancelling
        give_up, cancelling = raise_cancel, True
        assert request is not None, "there is nothing to wait for"
        request.withdraw()
        cancelling = False
        return Abort.SUCCEEDED if request.ended and request.withdrawn else Abort.FAILED

    request = begin(done=done)
    if request is None or request.ended:
        await cancel_shielded_checkpoint()
    else:
        task = current_task()
        await wait_task_rescheduled(abort)
    if request is not None and request.withdrawn:
        give_up()
    if request is not None and request.error is not None:
        raise request.error
    return request


def _go_on() -> None:
    """Do nothing: the task was not cancelled."""


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
