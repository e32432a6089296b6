"""NeuronLink: ranks of one process meet in memory, and a receiver reads the sender's own buffer.

A message is a rendezvous. The end that comes first waits in the mailbox of the receiving rank; the second one moves the
bytes and ends both. Nothing is copied except into a buffer that the receiver asked to have filled.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from time import perf_counter_ns
from typing import Any, TypeAlias

import numpy as np
import trio
from trio.lowlevel import cancel_shielded_checkpoint, current_trio_token, start_thread_soon

from transports.base import Transport
from transports.buffers import Buffer, Delivery, as_bytes
from transports.factory import Bootstrap
from transports.failures import (
    ArgumentError,
    LengthMismatchError,
    SignatureMismatchError,
    TransportClosedError,
    TransportError,
)
from transports.request import Done, Request
from transports.signature import OPEN_SIGNATURE, PlainSignature, Signature
from transports.wire import OPEN, Envelope, Wire, check_tag, describe_ranks

#: From this size on, `NeuronLink` copies in a worker thread: a GiB takes a tenth of a second or more, in which the
#: event loop would stand still; below, the copy costs no more than waking a thread (about 100 us).
THREAD_COPY_BYTES = 1 << 20

_Key: TypeAlias = "tuple[int, int]"  # (src, tag)


class _NeuronLinkRequest(Request):
    """One end of a message, with its bytes.

    Attributes:
        since_ns: Time since which it waits for the other end.
        view: The caller's bytes; None once the call has ended, and of a receive that reads the sender's memory.
        matched: The other end has arrived: from here on the message finishes, whatever is cancelled.
        sender: Owner of the memory that the delivery of a receive reads; it ends when the loan is released.
    """

    nbytes: int
    done: Done | None
    error: Exception | None = None
    matched: bool = False
    sender: _NeuronLinkRequest
    since_ns: int

    def __init__(
        self,
        link: NeuronLink,
        queues: dict[_Key, deque[_NeuronLinkRequest]],
        key: _Key,
        view: memoryview | None,
        nbytes: int,
        done: Done,
        signature: Signature | None,
    ) -> None:
        self._link, self._queues, self._key, self.view, self.nbytes, self.done = link, queues, key, view, nbytes, done
        self.signature = signature
        self.allocate: Callable[[Any], Buffer] | None = None

    def queue(self) -> None:
        """Queue this end of a message until the other end arrives."""
        self.since_ns = perf_counter_ns()
        queue = self._queues.get(self._key)
        if queue is None:
            queue = self._queues[self._key] = deque()
        queue.append(self)

    def envelope(self, dst: int) -> Envelope:
        """Return the unmatched message, to or from the mailbox of a rank, without its bytes."""
        src, tag = self._key
        return Envelope(
            src=src, dst=dst, tag=tag, nbytes=self.nbytes, since_ns=self.since_ns, signature=_plain(self.signature)
        )

    def withdraw(self) -> None:
        """Cancel the call, unless its other end has arrived."""
        if self.matched:
            return
        queue = self._queues[self._key]
        queue.remove(self)
        if not queue:
            del self._queues[self._key]
        self.matched = True
        self.end(withdrawn=True)

    def take_memory(self, sender: _NeuronLinkRequest) -> bool:
        """Get memory for a sender's message of any length; False with errors of both if there is none."""
        self.nbytes = sender.nbytes
        if self.allocate is None:
            return True
        try:
            self.view = self.make_memory(self.allocate)
        except Exception as error:  # the caller's own
            self.error, sender.error = error, TransportError("the receiver has refused the message")
        return self.error is None

    def delivery(self) -> Delivery:
        return _Loan(self._link, self.sender)

    def fail_dropped(self, finish: Callable[[], None]) -> None:
        """Fail a send whose receiver has dropped the loan, and cannot release it any more."""
        self.error = TransportError(
            "the receiver dropped the Delivery of this message without release(); release each Delivery"
        )
        finish()

    @property
    def bytes(self) -> memoryview:
        """Bytes of a sender, or of a receive into a buffer."""
        assert self.view is not None, "only receives wait without bytes"
        return self.view

    def end(self, error: Exception | None = None, *, withdrawn: bool = False) -> None:
        """Release the view, so that the caller may resize its buffer, and call the callback."""
        self.view = None
        super().end(error or self.error, withdrawn=withdrawn)


class _Loan(Delivery):
    """The memory of a sender. The send fails if the loan is dropped: parts of the view may still be read."""

    __slots__ = ("_sender",)

    def __init__(self, link: NeuronLink, sender: _NeuronLinkRequest) -> None:
        super().__init__(sender.bytes.toreadonly(), partial(link.end, sender))
        self._sender = sender

    def __del__(self) -> None:
        if self._finish is not None:
            # the garbage collector runs anywhere: within other work of the loop, in other threads, after its end
            with suppress(RuntimeError):
                current_trio_token().run_sync_soon(self._sender.fail_dropped, self._finish)


class _Mailbox:
    """The unmatched messages of one receiving rank. For each key, only one of the two dicts has an entry.

    Attributes:
        sends: Sends without a receive.
        receives: Receives without a send.
        watchers: Functions to call when a send arrives or the transport closes.
    """

    __slots__ = ("receives", "sends", "watchers")

    def __init__(self) -> None:
        self.sends: dict[_Key, deque[_NeuronLinkRequest]] = {}
        self.receives: dict[_Key, deque[_NeuronLinkRequest]] = {}
        self.watchers: list[Callable[[], None]] = []

    def notify_watchers(self) -> None:
        """Notify the tasks that wait for any message."""
        for notify in tuple(self.watchers):
            notify()


def _pop_first(queues: dict[_Key, deque[_NeuronLinkRequest]], key: _Key) -> _NeuronLinkRequest:
    """Return the oldest waiting end of a key, now matched."""
    queue = queues[key]
    end = queue.popleft()
    if not queue:
        del queues[key]
    end.matched = True
    return end


class NeuronLink(Transport):
    """The in-process transport: every wire in one process, zero-copy.

    A send returns once the receiver has consumed the bytes. `Wire.recv` loans the sender's memory itself. A matched
    pair of 8 bytes costs about 10 us, nearly all of it two task switches. Priorities are accepted and change nothing:
    handing over a reference takes no time that another message could want.

    Args:
        ranks: Their number, or the ranks themselves.
        thread_copy_bytes: `Wire.recv_into` copies messages of this size and larger in a worker thread. None never
            uses a thread, which is right on a clock that does not run by itself.

    Raises:
        ArgumentError: No ranks, or one of them twice or negative.
    """

    def __init__(self, ranks: int | Sequence[int], *, thread_copy_bytes: int | None = THREAD_COPY_BYTES) -> None:
        self.ranks: tuple[int, ...] = tuple(range(ranks)) if isinstance(ranks, int) else tuple(ranks)
        if not self.ranks or len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise ArgumentError(f"ranks is {ranks!r}; name at least one rank, each once, from 0 up")
        self.peers: tuple[int, ...] = self.ranks
        self._thread_copy_bytes: float = float("inf") if thread_copy_bytes is None else thread_copy_bytes
        self._copies: deque[tuple[_NeuronLinkRequest, _NeuronLinkRequest]] = deque()  # copies that wait for a thread
        # copies are bound by memory, so more of them at once than processors only take turns
        self._idle_threads = os.cpu_count() or 1
        self._ending: deque[_NeuronLinkRequest] = deque()  # calls that have ended and whose callbacks are due
        self._notifying = False
        self.mailboxes: dict[int, _Mailbox] = {rank: _Mailbox() for rank in self.ranks}
        self._wires = {rank: _NeuronLinkWire(self, rank) for rank in self.ranks}
        self._closed = False

    def shares_memory(self, ranks: Sequence[int]) -> bool:
        """Return whether all of the ranks live in this process."""
        return self.mailboxes.keys() >= set(ranks)

    def wire(self, rank: int) -> Wire:
        """Return the wire of a rank.

        Raises:
            ArgumentError: The rank is not one of ours.
        """
        self._mailbox_at(rank)
        return self._wires[rank]

    async def aclose(self) -> None:
        """Raise `TransportClosedError` in all unmatched operations and in later calls; matched ones finish."""
        self._closed = True
        for dst, box in self.mailboxes.items():
            for queues in (box.sends, box.receives):
                for key in list(queues):
                    while key in queues:
                        end = _pop_first(queues, key)
                        end.error = _closed_error(src=key[0], dst=dst, tag=key[1])
                        self.end(end)
            box.notify_watchers()
        await cancel_shielded_checkpoint()

    def _mailbox_at(self, rank: int) -> _Mailbox:
        """Return the mailbox of a rank; `ArgumentError` if the rank does not live here."""
        try:
            return self.mailboxes[rank]
        except KeyError:
            raise ArgumentError(
                f"there is no rank {rank} here; this NeuronLink joins {describe_ranks(self.ranks)}"
            ) from None

    # -- messages ---------------------------------------------------------------------------------------------------

    def receiver_mailbox(self, src: int, dst: int, peer: int, tag: int) -> _Mailbox:
        """Return the mailbox of the receiver; raises the errors of a wrong peer, a wrong tag or a closed transport."""
        check_tag(tag)
        self._mailbox_at(peer)
        if self._closed:
            raise _closed_error(src=src, dst=dst, tag=tag)
        return self.mailboxes[dst]

    def match(self, sender: _NeuronLinkRequest, receiver: _NeuronLinkRequest, *, lane: tuple[int, int, int]) -> None:
        """Move the bytes of a message whose ends have both arrived."""
        if not self._agree(sender, receiver, *lane):
            self.end(receiver, sender)
        elif receiver.view is None:
            receiver.sender = sender
            self.end(receiver)
        elif sender.nbytes < self._thread_copy_bytes:
            receiver.view[:] = sender.bytes
            self.end(receiver, sender)
        else:
            self._copies.append((sender, receiver))
            self._copy_in_threads()

    @staticmethod
    def _agree(sender: _NeuronLinkRequest, receiver: _NeuronLinkRequest, src: int, dst: int, tag: int) -> bool:
        """Whether two ends agree in signature and length; otherwise both get their errors."""
        wanted, said = receiver.signature, sender.signature
        differ = wanted is not said and wanted is not None and said is not None and not wanted.agrees(said.fingerprint)
        if sender.nbytes == receiver.nbytes and not differ:
            return True
        receiver.theirs = _plain(said)
        if not differ and receiver.nbytes == OPEN:
            return receiver.take_memory(sender)
        sender.theirs = _plain(wanted)
        for end in (receiver, sender):  # one error each, so that the tracebacks do not mix
            if differ:
                end.error = SignatureMismatchError(end.theirs or OPEN_SIGNATURE, src=src, dst=dst, tag=tag)
            else:
                end.error = LengthMismatchError(
                    sent_bytes=sender.nbytes, expected_bytes=receiver.nbytes, src=src, dst=dst, tag=tag
                )
        return False

    def end(self, *ends: _NeuronLinkRequest) -> None:
        """End calls. Callbacks may begin messages; their ends wait in the queue, so that the stack does not grow."""
        ending = self._ending
        ending.extend(ends)
        if self._notifying:
            return
        self._notifying = True
        try:
            while ending:
                ending.popleft().end()
        finally:
            self._notifying = False

    def _copy_in_threads(self) -> None:
        """Start waiting copies, one in each idle thread."""
        while self._copies and self._idle_threads:
            sender, receiver = self._copies.popleft()
            self._idle_threads -= 1
            token = current_trio_token()
            # numpy lets go of the interpreter lock while it copies; assigning to a memoryview does not
            copy = partial(np.copyto, np.asarray(receiver.bytes), np.asarray(sender.bytes))
            start_thread_soon(copy, partial(_call_in_loop, token, partial(self._finish_copy, sender, receiver)))

    def _finish_copy(self, sender: _NeuronLinkRequest, receiver: _NeuronLinkRequest) -> None:
        """End both ends of a copied message, and start the next copy."""
        self._idle_threads += 1
        self._copy_in_threads()
        self.end(receiver, sender)


def factory(bootstrap: Bootstrap) -> NeuronLink:
    """Make the transport of a world that is one process.

    Raises:
        ArgumentError: There are several processes.
    """
    if len(bootstrap.placement) > 1:
        raise ArgumentError(
            f"neuronlink joins the ranks of one process; there are {len(bootstrap.placement)}; choose another transport"
        )
    return NeuronLink(bootstrap.ranks)


class _NeuronLinkWire(Wire):
    """The wire of one rank. Both orders of arrival end in `NeuronLink.match`."""

    def __init__(self, link: NeuronLink, rank: int) -> None:
        self.rank = rank
        self._link = link

    def begin_send(
        self, dst: int, tag: int, data: Buffer, *, priority: int = 0, signature: Signature | None = None, done: Done
    ) -> Request | None:
        """Match a waiting receive, or wait for one."""
        view, key = as_bytes(data), (self.rank, tag)
        box = self._link.receiver_mailbox(self.rank, dst, dst, tag)
        send = _NeuronLinkRequest(self._link, box.sends, key, view, view.nbytes, done, signature)
        if key in box.receives:
            send.matched = True
            self._link.match(send, _pop_first(box.receives, key), lane=(self.rank, dst, tag))
        else:
            send.queue()
            if box.watchers:
                box.notify_watchers()
        return send

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
        """Match a waiting send, or wait for one."""
        view, key = None if out is None else as_bytes(out, name="out", writable=True), (src, tag)
        box = self._link.receiver_mailbox(src, self.rank, src, tag)
        receive = _NeuronLinkRequest(self._link, box.receives, key, view, nbytes, done, signature)
        receive.allocate = allocate
        if key in box.sends:
            receive.matched = True
            self._link.match(_pop_first(box.sends, key), receive, lane=(src, self.rank, tag))
        else:
            receive.queue()
        return receive

    def check(self, peer: int, tag: int = 0) -> None:
        """Raise the error of a message with a peer that cannot be."""
        self._link.receiver_mailbox(peer, self.rank, peer, tag)

    def unexpected(self, tag: int | None = None) -> list[Envelope]:
        """Return the sends to this rank that no receive has met."""
        sends = self._link.mailboxes[self.rank].sends.items()
        return [send.envelope(self.rank) for (_, of), queue in sends if tag in (None, of) for send in queue]

    @contextmanager
    def watch(self, notify: Callable[[], None]) -> Iterator[None]:
        """Call a function, for the length of a block, whenever a send arrives or the transport closes."""
        watchers = self._link.mailboxes[self.rank].watchers
        watchers.append(notify)
        try:
            yield
        finally:
            watchers.remove(notify)


def _call_in_loop(token: trio.lowlevel.TrioToken, function: Callable[[], None], _: object) -> None:
    """Let the event loop call a function, unless the loop has ended; for threads."""
    with suppress(trio.RunFinishedError):
        token.run_sync_soon(function)


def _plain(signature: Signature | None) -> PlainSignature:
    """Return a signature as the other end of a message gets it."""
    return OPEN_SIGNATURE if signature is None else PlainSignature(signature.fingerprint, signature.text)


def _closed_error(*, src: int, dst: int, tag: int) -> TransportClosedError:
    return TransportClosedError("the transport has been closed", src=src, dst=dst, tag=tag)
