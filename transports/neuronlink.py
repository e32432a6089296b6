"""NeuronLink: ranks of one process meet in memory, and a receiver reads the sender's own buffer.

A message is a rendezvous. Whoever comes first waits in the mailbox of the receiving rank; whoever comes second does the
work and wakes the other. Nothing is copied except into a buffer that the receiver asked to have filled.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias, cast

import numpy as np
import outcome
import trio
from trio.lowlevel import (
    Abort,
    RaiseCancelT,
    Task,
    cancel_shielded_checkpoint,
    checkpoint_if_cancelled,
    current_task,
    reschedule,
    wait_task_rescheduled,
)

from transports.base import (
    Endpoint,
    Envelope,
    Statistics,
    Transport,
    check_choices,
    check_length,
    check_tag,
    describe_ranks,
)
from transports.buffers import Buffer, Delivery, as_bytes
from transports.factory import Bootstrap
from transports.failures import ArgumentError, LengthMismatchError, TransportClosedError

#: From this size on, `NeuronLink` copies in a worker thread: a GiB takes a tenth of a second or more, in which the
#: event loop would stand still; below, the copy costs no more than waking a thread (about 100 us).
THREAD_COPY_BYTES = 1 << 20

_Key: TypeAlias = "tuple[int, int]"  # (src, tag)


class _Waiter:
    """One end of a message: a task, its bytes, and where it waits until the other end comes."""

    __slots__ = ("key", "matched", "nbytes", "queues", "task", "view")

    def __init__(self, queues: dict[_Key, deque[_Waiter]], key: _Key, view: memoryview | None, nbytes: int) -> None:
        self.queues = queues
        self.key = key
        self.view = view
        self.nbytes = nbytes
        self.task: Task = current_task()
        self.matched = False

    async def wait(self) -> object:
        """Queue, and return what the other end hands over."""
        queue = self.queues.get(self.key)
        if queue is None:
            queue = self.queues[self.key] = deque()
        queue.append(self)
        return await wait_task_rescheduled(self._withdraw)

    async def wait_for_release(self) -> None:
        """Stay suspended, whatever is cancelled, until the other end has read the bytes."""
        self.matched = True
        await wait_task_rescheduled(self._withdraw)

    def wake(self) -> None:
        """Give the bytes back to their owner, who may resize them: hold no view any more."""
        self.view = None
        reschedule(self.task)

    def fail(self, error: Exception) -> None:
        """Raise in the waiting task."""
        reschedule(self.task, outcome.Error(error))

    def _withdraw(self, _: RaiseCancelT) -> Abort:
        if self.matched:
            return Abort.FAILED
        queue = self.queues[self.key]
        queue.remove(self)
        if not queue:
            del self.queues[self.key]
        return Abort.SUCCEEDED


class _Mailbox:
    """What waits at one receiving rank. For each key, only one of the two dicts has an entry, and no entry is empty.

    Attributes:
        sends: Sends that no receive has met.
        receives: Receives that no send has met.
        watchers: Set when a send joins the others, or nothing more can come.
    """

    __slots__ = ("receives", "sends", "watchers")

    def __init__(self) -> None:
        self.sends: dict[_Key, deque[_Waiter]] = {}
        self.receives: dict[_Key, deque[_Waiter]] = {}
        self.watchers: list[trio.Event] = []

    def changed(self) -> None:
        """Let whoever waits for any message look again."""
        watchers, self.watchers = self.watchers, []
        for watcher in watchers:
            watcher.set()


def _pop(queues: dict[_Key, deque[_Waiter]], key: _Key) -> _Waiter:
    queue = queues[key]
    waiter = queue.popleft()
    if not queue:
        del queues[key]
    waiter.matched = True
    return waiter


class NeuronLink(Transport):
    """The in-process transport: every endpoint in one process, zero-copy.

    A send returns once the receiver has consumed the bytes. `Endpoint.recv` lends the sender's memory itself. A matched
    pair of 8 bytes costs about 10 us, nearly all of it two task switches. Priorities are accepted and change nothing:
    handing over a reference takes no time that another message could want.

    Args:
        ranks: Their number, or the ranks themselves.
        thread_copy_bytes: `Endpoint.recv_into` copies messages of this size and larger in a worker thread. None never
            uses a thread, which is right on a clock that does not run by itself.

    Raises:
        ArgumentError: No ranks, or one of them twice or negative.
    """

    def __init__(self, ranks: int | Sequence[int], *, thread_copy_bytes: int | None = THREAD_COPY_BYTES) -> None:
        self.ranks = tuple(range(ranks)) if isinstance(ranks, int) else tuple(ranks)
        if not self.ranks or len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise ArgumentError(f"ranks is {ranks!r}; name at least one rank, each once, from 0 up")
        self.peers = self.ranks
        self._thread_copy_bytes: float = float("inf") if thread_copy_bytes is None else thread_copy_bytes
        # copies are bound by memory, so more of them at once than processors only take turns
        self._copiers = trio.CapacityLimiter(os.cpu_count() or 1)
        self._mailboxes = {rank: _Mailbox() for rank in self.ranks}
        self._endpoints = {rank: _NeuronLinkEndpoint(self, rank) for rank in self.ranks}
        self._closed = False

    def shares_memory(self, ranks: Sequence[int]) -> bool:
        """Return whether all of the ranks are joined by this."""
        return self._mailboxes.keys() >= set(ranks)

    def endpoint(self, rank: int) -> Endpoint:
        """Return the endpoint of a rank.

        Raises:
            ArgumentError: The rank is not one of ours.
        """
        self._mailbox(rank)
        return self._endpoints[rank]

    def statistics(self) -> Statistics:
        """Return what waits for its other end now, oldest first for each receiving rank."""
        return Statistics(
            unmatched_sends=self._waiting([(dst, box.sends) for dst, box in self._mailboxes.items()]),
            unmatched_receives=self._waiting([(dst, box.receives) for dst, box in self._mailboxes.items()]),
        )

    async def aclose(self) -> None:
        """Raise `TransportClosedError` in all unmatched operations and in later calls; matched ones finish."""
        self._closed = True
        for dst, box in self._mailboxes.items():
            for queues in (box.sends, box.receives):
                for key in list(queues):
                    while key in queues:
                        _pop(queues, key).fail(_closed(src=key[0], dst=dst, tag=key[1]))
            box.changed()
        await cancel_shielded_checkpoint()

    def _mailbox(self, rank: int) -> _Mailbox:
        try:
            return self._mailboxes[rank]
        except KeyError:
            raise ArgumentError(f"there is no rank {rank} here; this NeuronLink joins {self._names}") from None

    @property
    def _names(self) -> str:
        return describe_ranks(self.ranks)

    @staticmethod
    def _waiting(tables: list[tuple[int, dict[_Key, deque[_Waiter]]]]) -> tuple[Envelope, ...]:
        return tuple(
            Envelope(src=src, dst=dst, tag=tag, nbytes=waiter.nbytes)
            for dst, queues in tables
            for (src, tag), queue in queues.items()
            for waiter in queue
        )


def factory(bootstrap: Bootstrap) -> NeuronLink:
    """Make the transport of a world that is one process.

    Raises:
        ArgumentError: There are several processes.
    """
    if len(bootstrap.placement) > 1:
        raise ArgumentError(f"neuronlink joins the ranks of one process; there are {len(bootstrap.placement)}")
    return NeuronLink(bootstrap.ranks)


class _NeuronLinkEndpoint(Endpoint):
    """The end of one rank. Both orders of arrival end in the same few steps; see `NeuronLink`."""

    def __init__(self, link: NeuronLink, rank: int) -> None:
        self.rank = rank
        self._link = link

    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        view = as_bytes(data)
        box = self._meet(self.rank, dst, dst, tag)
        key = (self.rank, tag)
        if key not in box.receives:
            if box.watchers:
                box.changed()  # they run once this task is suspended, with its message in the queue
            await _Waiter(box.sends, key, view, view.nbytes).wait()
            return
        await checkpoint_if_cancelled()
        receiver = _pop(box.receives, key)
        if receiver.nbytes != view.nbytes:
            await self._disagree(receiver, view.nbytes, receiver.nbytes, dst, key)
        if receiver.view is not None and view.nbytes < self._link._thread_copy_bytes:
            receiver.view[:] = view
            receiver.wake()
            await cancel_shielded_checkpoint()
        else:
            sender = _Waiter(box.sends, key, view, view.nbytes)
            reschedule(receiver.task, outcome.Value(sender))
            await sender.wait_for_release()

    def try_send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> bool:
        view = as_bytes(data)
        box = self._meet(self.rank, dst, dst, tag)
        key = (self.rank, tag)
        waiting = box.receives.get(key)
        if waiting is None or waiting[0].nbytes != view.nbytes or view.nbytes >= self._link._thread_copy_bytes:
            return False
        if waiting[0].view is None:  # it wants to read our memory, and we would have to wait until it has
            return False
        receiver = _pop(box.receives, key)
        assert receiver.view is not None
        receiver.view[:] = view
        receiver.wake()
        return True

    async def recv_into(self, src: int, tag: int, out: Buffer) -> None:
        view = as_bytes(out, name="out", writable=True)
        box = self._meet(src, self.rank, src, tag)
        key = (src, tag)
        if key not in box.sends:
            sender = await _Waiter(box.receives, key, view, view.nbytes).wait()
            if sender is not None:
                await self._copy_in_thread(cast("_Waiter", sender), view)
            return
        sender = await self._take(box, key, view.nbytes)
        if view.nbytes < self._link._thread_copy_bytes:
            view[:] = _bytes_of(sender)
            sender.wake()
            await cancel_shielded_checkpoint()
        else:
            await self._copy_in_thread(sender, view)

    async def recv(self, src: int, tag: int, nbytes: int) -> Delivery:
        check_length(nbytes)
        box = self._meet(src, self.rank, src, tag)
        key = (src, tag)
        if key not in box.sends:
            sender = cast("_Waiter", await _Waiter(box.receives, key, None, nbytes).wait())
        else:
            sender = await self._take(box, key, nbytes)
            await cancel_shielded_checkpoint()
        return Delivery(_bytes_of(sender).toreadonly(), sender.wake)

    async def wait_any(self, choices: Sequence[tuple[int, int]]) -> int:
        check_choices(choices)
        for src, tag in choices:
            self._meet(src, self.rank, src, tag)
        await trio.lowlevel.checkpoint()
        while True:
            for index, (src, tag) in enumerate(choices):
                if (src, tag) in self._meet(src, self.rank, src, tag).sends:
                    return index
            changed = trio.Event()
            box = self._link._mailboxes[self.rank]
            box.watchers.append(changed)
            try:
                await changed.wait()
            finally:
                if changed in box.watchers:
                    box.watchers.remove(changed)

    def _meet(self, src: int, dst: int, peer: int, tag: int) -> _Mailbox:
        """Return the mailbox where both ends meet, after checking that they can."""
        check_tag(tag)
        self._link._mailbox(peer)
        if self._link._closed:
            raise _closed(src=src, dst=dst, tag=tag)
        return self._link._mailboxes[dst]

    async def _take(self, box: _Mailbox, key: _Key, nbytes: int) -> _Waiter:
        """Match the sender that has waited longest; from here on it is suspended until it is woken."""
        await checkpoint_if_cancelled()
        sender = _pop(box.sends, key)
        if sender.nbytes != nbytes:
            await self._disagree(sender, sender.nbytes, nbytes, self.rank, key)
        return sender

    @staticmethod
    async def _disagree(other: _Waiter, sent_bytes: int, expected_bytes: int, dst: int, key: _Key) -> None:
        """Raise at both ends, each its own error, so that the tracebacks do not mix."""
        src, tag = key
        here, there = (
            LengthMismatchError(sent_bytes=sent_bytes, expected_bytes=expected_bytes, src=src, dst=dst, tag=tag)
            for _ in range(2)
        )
        other.fail(there)
        await cancel_shielded_checkpoint()
        raise here

    async def _copy_in_thread(self, sender: _Waiter, out: memoryview) -> None:
        try:
            # shielded: the message is taken, so it arrives; a copy is bounded and cannot be stopped half-way
            with trio.CancelScope(shield=True):
                # numpy lets go of the interpreter lock while it copies; assigning to a memoryview does not
                await trio.to_thread.run_sync(
                    np.copyto, np.asarray(out), np.asarray(_bytes_of(sender)), limiter=self._link._copiers
                )
        finally:
            sender.wake()


def _bytes_of(sender: _Waiter) -> memoryview:
    assert sender.view is not None, "only receives wait without bytes"
    return sender.view


def _closed(*, src: int, dst: int, tag: int) -> TransportClosedError:
    return TransportClosedError("the transport has been closed", src=src, dst=dst, tag=tag)
