"""NeuronLink: ranks of one process meet in memory, and a receiver reads the sender's own buffer.

A message is a rendezvous. The send or receive that begins first waits in the mailbox of the receiving rank. The second
one moves the bytes and ends both. Bytes are copied only if the receiver has passed a buffer.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
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
from transports.wire import OPEN, Envelope, Wire, add_to_watchers, check_tag, describe_ranks

#: From this size on, `NeuronLink` copies in a worker thread, because the copy of a GiB would block the event loop for a
#: tenth of a second or more. A shorter copy takes no longer than waking a thread (about 100 us).
THREAD_COPY_BYTES = 1 << 20


class _LocalSend(Send):
    """A send within the process."""

    since_ns: int  # Time since which it waits for its receive, on the clock of `perf_counter_ns`


class _LocalReceive(Receive):
    """A receive within the process. Its delivery is the memory of the sender."""

    link: NeuronLink
    sender: Send

    def delivery(self) -> Delivery:
        """Return the sender's memory on loan; its release ends the send."""
        return _Loan(self.link, self.sender)


class _Loan(Delivery):
    """The memory of a sender, on loan to the receiver; the release ends the send.

    If the loan is dropped without a release, the send fails: arrays made from the view may still read the memory.
    """

    __slots__ = ("_sender",)

    def __init__(self, link: NeuronLink, sender: Send) -> None:
        assert sender.view is not None, "a send keeps its bytes until it ends"
        super().__init__(sender.view.toreadonly(), partial(link.end, (sender, None)))
        self._sender = sender

    def __del__(self) -> None:
        if self._finish is not None:
            reason = "the receiver dropped the Delivery of this message without release()"
            error = TransportError(f"{reason}; release each Delivery")
            # The garbage collector may run in any thread, within other work of the loop, and after the end of the loop
            # (`RuntimeError`).
            with suppress(RuntimeError):
                current_trio_token().run_sync_soon(self._sender.end, error)


@dataclass(slots=True, eq=False)
class _Mailbox:
    """The unmatched sends and receives of one receiving rank. A lane has an entry in one of the two dicts at most."""

    sends: dict[Lane, deque[_LocalSend]] = field(default_factory=dict)  # Sends without a receive
    receives: dict[Lane, deque[_LocalReceive]] = field(default_factory=dict)  # Receives without a send
    # Functions to call when a send arrives or the transport closes
    watchers: list[Callable[[], None]] = field(default_factory=list)

    def notify_watchers(self) -> None:
        """Notify the tasks that wait for any message."""
        for notify in tuple(self.watchers):
            notify()

    def withdraw(self, end: MessageEnd) -> None:
        """Cancel a send or a receive, unless its other end has arrived; then nothing happens."""
        queues: Any = self.sends if isinstance(end, Send) else self.receives
        if end in queues.get(end.lane, ()):
            queues[end.lane].remove(end)
            if not queues[end.lane]:
                del queues[end.lane]
            end.end(withdrawn=True)


class NeuronLink(Transport):
    """The transport between ranks of one process, without copies.

    A send returns once the receiver has received the bytes into its buffer, or released the loan: `Wire.recv` loans the
    sender's own memory. A message of 8 bytes costs about 10 us, nearly all of it two task switches. Priorities change
    nothing, because messages do not wait for each other.

    Args:
        ranks: The number of ranks, or the ranks themselves.
        thread_copy_bytes: `Wire.recv_into` copies messages of this length and longer in a worker thread. None: it never
            uses a thread, as is right with a clock that does not run by itself.

    Raises:
        ArgumentError: There are no ranks, or a rank is negative or named twice.
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
        """Close: unmatched operations and later calls fail with `TransportClosedError`; matched operations finish."""
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
        """Raise `ArgumentError` if the rank is not here."""
        try:
            return self.mailboxes[rank]
        except KeyError:
            reason = f"there is no rank {rank} here"
            raise ArgumentError(
                f"{reason}; this NeuronLink joins {describe_ranks(self.ranks)}; pass one of them"
            ) from None

    # -- messages ---------------------------------------------------------------------------------------------------

    def receiver_mailbox(self, lane: Lane, peer: int) -> _Mailbox:
        """Return the mailbox of the receiver; raises the errors of a wrong peer, a wrong tag or a closed transport.

        Args:
            lane: Source, destination and tag.
            peer: The rank with which the caller exchanges the message: the source or the destination.
        """
        src, dst, tag = lane
        check_tag(tag)
        self._mailbox_at(peer)
        if self._closed:
            raise TransportClosedError("the transport has been closed; make another one", src=src, dst=dst, tag=tag)
        return self.mailboxes[dst]

    def match(self, sender: Send, receiver: _LocalReceive) -> None:
        """Move the bytes from a send to its receive; if lengths or signatures differ, end both with errors.

        The receive ends now, unless a thread copies the bytes. The send of a loan ends at the release.
        """
        receiver.matched = True
        signature, sent, sent_bytes = receiver.signature, sender.signature, sender.nbytes
        agree = signature is sent or signature is None or sent is None or signature.agrees(sent.fingerprint)
        # False from `_refuse_mismatch`: a receive of any length has taken over the length of the message
        if not (agree and sent_bytes == receiver.nbytes) and self._refuse_mismatch(sender, receiver):
            return
        if receiver.wants_loan:
            receiver.sender = sender  # the send ends when the receiver releases its memory
            self.end((receiver, None))
        elif sent_bytes < self._thread_copy_bytes:
            receiver.view[:] = sender.view  # type: ignore[index,assignment]  # they keep their bytes until they end
            self.end((receiver, None), (sender, None))
        else:
            self._copies.append((sender, receiver))
            self._start_waiting_copies()

    def _refuse_mismatch(self, sender: Send, receiver: _LocalReceive) -> bool:
        """End a send and its receive with errors if they differ; return whether they did.

        They do not differ if the receive is of any length: it then gets its length, and its memory, here.
        """
        error = receiver.refusal(sender.nbytes, _to_plain_signature(sender.signature))
        if error is None:
            return False
        expected_bytes = sender.nbytes if receiver.nbytes == OPEN else receiver.nbytes
        theirs = _to_plain_signature(receiver.signature)
        mismatch = sender.mismatch(theirs, sent_bytes=sender.nbytes, expected_bytes=expected_bytes)
        self.end((receiver, error), (sender, mismatch or sender.refused_error()))
        return True

    def end(self, *ends: tuple[MessageEnd, Exception | None]) -> None:
        """End sends and receives, each with its error; None: it has succeeded.

        Their callbacks may begin other messages, which end at once and call this method again. Such ends wait in a
        queue, so that the stack does not grow.
        """
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

    def _start_waiting_copies(self) -> None:
        """Start waiting copies, one in each idle thread."""
        while self._copies and self._idle_threads:
            sender, receiver = self._copies.popleft()
            self._idle_threads -= 1
            token = current_trio_token()
            # numpy lets go of the interpreter lock while it copies; assigning to a memoryview does not
            copy = partial(np.copyto, np.asarray(receiver.view), np.asarray(sender.view))
            start_thread_soon(copy, partial(_call_in_loop, token, partial(self._finish_copy, sender, receiver)))

    def _finish_copy(self, sender: Send, receiver: _LocalReceive) -> None:
        """End the send and the receive of a copied message, and start the next copy. The event loop calls it."""
        self._idle_threads += 1
        self._start_waiting_copies()
        self.end((receiver, None), (sender, None))


def factory(bootstrap: Bootstrap) -> NeuronLink:
    """Make the transport of a world that is one process.

    Raises:
        ArgumentError: There are several processes.
    """
    if len(bootstrap.placement) > 1:
        advice = "name a transport between processes, such as efa, or start all ranks in one process"
        count = len(bootstrap.placement)
        raise ArgumentError(f"neuronlink joins the ranks of one process; there are {count}; {advice}")
    return NeuronLink(bootstrap.ranks)


class _NeuronLinkWire(Wire):
    """The wire of one rank. Both orders of arrival end in `NeuronLink.match`."""

    def __init__(self, link: NeuronLink, rank: int) -> None:
        self.rank = rank
        self._link = link

    def begin_send(
        self, dst: int, tag: int, data: Buffer, *, priority: int = 0, signature: Signature | None = None, done: Done
    ) -> Request | None:
        """Send to a receive that waits, or wait for one; see `Wire.begin_send`. The priority changes nothing."""
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
        """Receive from a send that waits, or wait for one; see `Wire.begin_recv`. `consume` is never called."""
        view, lane = None if out is None else as_bytes(out, name="out", writable=True), (src, self.rank, tag)
        receive, box = _LocalReceive(lane, view, nbytes, signature), self._link.receiver_mailbox(lane, src)
        receive.done, receive._withdraw, receive.allocate, receive.link = done, box.withdraw, allocate, self._link
        if lane in box.sends:
            self._link.match(pop_first(box.sends, lane), receive)
        else:
            box.receives.setdefault(lane, deque()).append(receive)
        return receive

    def check(self, peer: int, tag: int = 0) -> None:
        """Raise the error that a message with the peer would raise at the call, if any; see `Wire.check`."""
        # called for its errors
        self._link.receiver_mailbox((peer, self.rank, tag), peer)

    def unexpected(self, tag: int | None = None) -> list[Envelope]:
        """Return the sends to this rank that no receive has met."""
        envelopes: list[Envelope] = []
        for (src, dst, lane_tag), sends in self._link.mailboxes[self.rank].sends.items():
            for send in sends if tag in (None, lane_tag) else ():
                signature, nbytes, since_ns = _to_plain_signature(send.signature), send.nbytes, send.since_ns
                envelopes.append(
                    Envelope(src=src, dst=dst, tag=lane_tag, nbytes=nbytes, since_ns=since_ns, signature=signature)
                )
        return envelopes

    def watch(self, notify: Callable[[], None]) -> AbstractContextManager[None]:
        """Call a function, for the length of a block, whenever a send arrives or the transport closes."""
        return add_to_watchers([self._link.mailboxes[self.rank].watchers], notify)


def _call_in_loop(token: trio.lowlevel.TrioToken, function: Callable[[], None], _: object) -> None:
    """Let the event loop call a function, unless the loop has ended. Threads call it."""
    with suppress(trio.RunFinishedError):
        token.run_sync_soon(function)


def _to_plain_signature(signature: Signature | None) -> PlainSignature:
    """Return the values as the other end of a message gets them; None is the open signature."""
    return OPEN_SIGNATURE if signature is None else PlainSignature(signature.fingerprint, signature.text)
