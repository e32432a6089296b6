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
from itertools import chain
from time import perf_counter_ns
from typing import Any

import numpy as np
import trio
from trio.lowlevel import cancel_shielded_checkpoint, current_trio_token, start_thread_soon

from transports.base import Transport
from transports.buffers import Buffer, Delivery, as_bytes
from transports.factory import Bootstrap
from transports.failures import ArgumentError, TransportClosedError, TransportError
from transports.matching.ends import Lane, MessageEnd, Receive, Send, pop_first
from transports.request import Done, Request
from transports.signature import OPEN_SIGNATURE, PlainSignature, Signature
from transports.wire import OPEN, Envelope, Wire, check_tag, describe_ranks

#: From this size on, `NeuronLink` copies in a worker thread: a GiB takes a tenth of a second or more, in which the
#: event loop would stand still; below, the copy costs no more than waking a thread (about 100 us).
THREAD_COPY_BYTES = 1 << 20


class _LocalSend(Send):
    """A send, with the time since which it waits for its receive."""

    since_ns: int


class _LocalReceive(Receive):
    """A receive, whose delivery is the memory of its sender."""

    link: NeuronLink
    sender: Send

    def delivery(self) -> Delivery:
        return _Loan(self.link, self.sender)


class _Loan(Delivery):
    """The memory of a sender. The send fails if the loan is dropped: parts of the view may still be read."""

    __slots__ = ("_sender",)

    def __init__(self, link: NeuronLink, sender: Send) -> None:
        assert sender.view is not None, "a send keeps its bytes until it ends"
        super().__init__(sender.view.toreadonly(), partial(link.end, (sender, None)))
        self._sender = sender

    def __del__(self) -> None:
        if self._finish is not None:
            error = TransportError(
                "the receiver dropped the Delivery of this message without release(); release each Delivery"
            )
            # the garbage collector runs anywhere: within other work of the loop, in other threads, after its end
            with suppress(RuntimeError):
                current_trio_token().run_sync_soon(self._sender.end, error)


class _Mailbox:
    """The unmatched messages of one receiving rank. For each lane, only one of the two dicts has an entry.

    Attributes:
        sends: Sends without a receive.
        receives: Receives without a send.
        watchers: Functions to call when a send arrives or the transport closes.
    """

    __slots__ = ("receives", "sends", "watchers")

    def __init__(self) -> None:
        self.sends: dict[Lane, deque[_LocalSend]] = {}
        self.receives: dict[Lane, deque[_LocalReceive]] = {}
        self.watchers: list[Callable[[], None]] = []

    def notify_watchers(self) -> None:
        """Notify the tasks that wait for any message."""
        for notify in tuple(self.watchers):
            notify()

    def withdraw(self, end: MessageEnd) -> None:
        """Cancel a send or a receive, unless its other end has arrived."""
        queues: Any = self.sends if isinstance(end, Send) else self.receives
        if end in queues.get(end.lane, ()):
            queues[end.lane].remove(end)
            if not queues[end.lane]:
                del queues[end.lane]
            end.end(withdrawn=True)


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
        self._copies: deque[tuple[Send, _LocalReceive]] = deque()  # copies that wait for a thread
        # copies are bound by memory, so more of them at once than processors only take turns
        self._idle_threads = os.cpu_count() or 1
        # calls that have ended with their errors, and whose callbacks are due
        self._ending: deque[tuple[MessageEnd, Exception | None]] = deque()
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
        for box in self.mailboxes.values():
            waiting: list[MessageEnd] = [*chain(*box.sends.values(), *box.receives.values())]
            box.sends.clear()
            box.receives.clear()
            for end in waiting:
                end.close()
            box.notify_watchers()
        await cancel_shielded_checkpoint()

    def _mailbox_at(self, rank: int) -> _Mailbox:
        try:
            return self.mailboxes[rank]
        except KeyError:
            raise ArgumentError(
                f"there is no rank {rank} here; this NeuronLink joins {describe_ranks(self.ranks)}"
            ) from None

    # -- messages ---------------------------------------------------------------------------------------------------

    def receiver_mailbox(self, lane: Lane, peer: int) -> _Mailbox:
        """Return the mailbox of the receiver; raises the errors of a wrong peer, a wrong tag or a closed transport."""
        src, dst, tag = lane
        check_tag(tag)
        self._mailbox_at(peer)
        if self._closed:
            raise TransportClosedError("the transport has been closed", src=src, dst=dst, tag=tag)
        return self.mailboxes[dst]

    def match(self, sender: Send, receiver: _LocalReceive) -> None:
        """Move the bytes of a message whose ends have both arrived."""
        signature, sent, sent_bytes = receiver.signature, sender.signature, sender.nbytes
        agree = signature is sent or signature is None or sent is None or signature.agrees(sent.fingerprint)
        if not (agree and sent_bytes == receiver.nbytes):
            error, expected_bytes = receiver.refusal(sent_bytes, _to_plain(sent)), receiver.nbytes
            if error is not None:
                if expected_bytes == OPEN:
                    expected_bytes = sent_bytes
                theirs = sender.mismatch(_to_plain(signature), sent_bytes=sent_bytes, expected_bytes=expected_bytes)
                self.end((receiver, error), (sender, theirs or sender.refused_error()))
                return
        if receiver.wants_loan:
            receiver.sender = sender
            self.end((receiver, None))
        elif sent_bytes < self._thread_copy_bytes:
            receiver.view[:] = sender.view  # type: ignore[index,assignment]  # they keep their bytes until they end
            self.end((receiver, None), (sender, None))
        else:
            self._copies.append((sender, receiver))
            self._copy_in_threads()

    def end(self, *ends: tuple[MessageEnd, Exception | None]) -> None:
        """End calls. Callbacks may begin messages; their ends wait in the queue, so that the stack does not grow."""
        ending = self._ending
        ending.extend(ends)
        if self._notifying:
            return
        self._notifying = True
        try:
            while ending:
                end, error = ending.popleft()
                end.end(error)
        finally:
            self._notifying = False

    def _copy_in_threads(self) -> None:
        """Start waiting copies, one in each idle thread."""
        while self._copies and self._idle_threads:
            sender, receiver = self._copies.popleft()
            self._idle_threads -= 1
            token = current_trio_token()
            # numpy lets go of the interpreter lock while it copies; assigning to a memoryview does not
            copy = partial(np.copyto, np.asarray(receiver.view), np.asarray(sender.view))
            start_thread_soon(copy, partial(_call_in_loop, token, partial(self._finish_copy, sender, receiver)))

    def _finish_copy(self, sender: Send, receiver: _LocalReceive) -> None:
        """End both ends of a copied message, and start the next copy."""
        self._idle_threads += 1
        self._copy_in_threads()
        self.end((receiver, None), (sender, None))


def factory(bootstrap: Bootstrap) -> NeuronLink:
    """Make the transport of a world that is one process.

    Raises:
        ArgumentError: There are several processes.
    """
    if len(bootstrap.placement) > 1:
        raise ArgumentError(
            f"neuronlink joins the ranks of one process; there are {len(bootstrap.placement)}; "
            "name a transport between processes, such as efa, or start all ranks in one process"
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
        """Send to a receive that waits, or wait for one."""
        lane = self.rank, dst, tag
        send, box = _LocalSend(lane, as_bytes(data), priority, signature), self._link.receiver_mailbox(lane, dst)
        send.done, send._withdraw = done, box.withdraw
        if lane in box.receives:
            self._link.match(send, pop_first(box.receives, lane))
        else:
            send.since_ns = perf_counter_ns()
            box.sends.setdefault(lane, deque()).append(send)
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
        """Receive from a send that waits, or wait for one."""
        view, lane = None if out is None else as_bytes(out, name="out", writable=True), (src, self.rank, tag)
        receive, box = _LocalReceive(lane, view, nbytes, signature), self._link.receiver_mailbox(lane, src)
        receive.done, receive._withdraw, receive.allocate, receive.link = done, box.withdraw, allocate, self._link
        if lane in box.sends:
            self._link.match(pop_first(box.sends, lane), receive)
        else:
            box.receives.setdefault(lane, deque()).append(receive)
        return receive

    def check(self, peer: int, tag: int = 0) -> None:
        """Raise the error of a message with a peer that cannot be."""
        self._link.receiver_mailbox((peer, self.rank, tag), peer)

    def unexpected(self, tag: int | None = None) -> list[Envelope]:
        """Return the sends to this rank that no receive has met."""
        sends = self._link.mailboxes[self.rank].sends.values()
        return [
            Envelope(src=src, dst=dst, tag=of, nbytes=send.nbytes, since_ns=send.since_ns, signature=_to_plain(sent))
            for send in chain(*sends)
            for (src, dst, of), sent in ((send.lane, send.signature),)
            if tag in (None, of)
        ]

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


def _to_plain(signature: Signature | None) -> PlainSignature:
    """Return a signature as the other end of a message gets it."""
    return OPEN_SIGNATURE if signature is None else PlainSignature(signature.fingerprint, signature.text)
