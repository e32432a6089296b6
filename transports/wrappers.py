"""Base classes of wrappers around a transport, and the order of delayed messages.

Also `Recording`, the simplest wrapper.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self, TypeAlias

from trio.lowlevel import Abort, RaiseCancelT, Task, current_task, reschedule, wait_task_rescheduled

from transports.base import Endpoint, Envelope, Statistics, Transport, check_tag, describe_ranks
from transports.buffers import Buffer, Delivery, as_bytes
from transports.failures import ArgumentError


class Wrapper(Transport):
    """A transport around another one. Subclasses say how they wrap an endpoint.

    It shares no memory: a short cut through memory would lead around the wrapper.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.ranks: tuple[int, ...] = inner.ranks
        self.peers: tuple[int, ...] = inner.peers
        self._endpoints: dict[int, Endpoint] = {}

    @abstractmethod
    def wrap(self, endpoint: Endpoint) -> Endpoint:
        """Return the endpoint to use in place of an inner one."""

    def endpoint(self, rank: int) -> Endpoint:
        """Return the wrapped endpoint of a local rank."""
        if rank not in self._endpoints:
            self._endpoints[rank] = self.wrap(self.inner.endpoint(rank))
        return self._endpoints[rank]

    def spans_hosts(self, ranks: Sequence[int]) -> bool:
        """Return whether some ranks live on different hosts."""
        return self.inner.spans_hosts(ranks)

    def statistics(self) -> Statistics:
        """Return the unmatched messages of the inner transport."""
        return self.inner.statistics()

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Self]:
        """Open the inner transport for the length of a block."""
        async with self.inner.open():
            yield self

    async def aclose(self) -> None:
        """Close the inner transport."""
        await self.inner.aclose()

    def __repr__(self) -> str:
        """Name the wrapper and the inner transport."""
        return f"<{type(self).__name__} around {self.inner!r}>"


class WrapperEndpoint(Endpoint):
    """An endpoint around another one; receives go straight through."""

    def __init__(self, inner: Endpoint, peers: tuple[int, ...]) -> None:
        self.rank: int = inner.rank
        self.inner = inner
        self._peers = frozenset(peers)

    async def recv_into(self, src: int, tag: int, out: Buffer) -> None:
        """Receive from the inner endpoint."""
        await self.inner.recv_into(src, tag, out)

    async def recv(self, src: int, tag: int, nbytes: int) -> Delivery:
        """Receive from the inner endpoint, which loans the memory in its own way."""
        return await self.inner.recv(src, tag, nbytes)

    def announced(self, choices: Sequence[tuple[int, int]], *, free_bits: int = 0) -> Envelope | None:
        """Return the message that the inner endpoint has announced."""
        return self.inner.announced(choices, free_bits=free_bits)

    def unexpected(self) -> Sequence[Envelope]:
        """Return the messages without a receive at the inner endpoint."""
        return self.inner.unexpected()

    async def wait_any(self, choices: Sequence[tuple[int, int]], *, free_bits: int = 0) -> Envelope:
        """Wait at the inner endpoint: a message is announced once it has arrived there."""
        return await self.inner.wait_any(choices, free_bits=free_bits)

    def check_send(self, dst: int, tag: int, data: Buffer) -> memoryview:
        """Return the bytes, or raise the errors that the inner endpoint would raise at the call."""
        view = as_bytes(data)
        check_tag(tag)
        if dst not in self._peers:
            raise ArgumentError(f"there is no rank {dst} here; known are {describe_ranks(tuple(sorted(self._peers)))}")
        return view


_Lane: TypeAlias = "tuple[int, int, int]"  # (src, dst, tag)


class OrderedGate:
    """Lets the messages of a lane pass in the order of their tickets, in whatever order their tasks wake.

    Trio wakes tasks whose time has come in random order. A message that is held up takes a ticket at the call, and
    passes when all tickets before it on its lane have passed or left.
    """

    def __init__(self) -> None:
        self._lanes: dict[_Lane, deque[Ticket]] = {}

    @property
    def idle(self) -> bool:
        """Whether no ticket is held."""
        return not self._lanes

    def ticket(self, lane: _Lane) -> Ticket:
        """Return the next ticket of a lane, for a ``with`` statement."""
        queue = self._lanes.setdefault(lane, deque())
        ticket = Ticket(self._lanes, lane)
        queue.append(ticket)
        return ticket


class Ticket:
    """A place in the queue of a lane. Leaving the ``with`` statement gives it up."""

    __slots__ = ("_lane", "_lanes", "_task")

    def __init__(self, lanes: dict[_Lane, deque[Ticket]], lane: _Lane) -> None:
        self._lanes = lanes
        self._lane = lane
        self._task: Task | None = None

    async def turn(self) -> None:
        """Wait until all earlier tickets of the lane have passed; no checkpoint if there are none."""
        if self._lanes[self._lane][0] is not self:
            self._task = current_task()
            await wait_task_rescheduled(self._give_up)

    def _give_up(self, _: RaiseCancelT) -> Abort:
        """Let a cancelled task continue, and never wake it for its turn."""
        self._task = None  # the task is about to run with Cancelled, and must not be woken a second time
        return Abort.SUCCEEDED

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let the next one pass.

        Its task runs only after ours has suspended, and by the contract the send that we call next has queued by then.
        """
        queue = self._lanes[self._lane]
        queue.remove(self)
        if queue:
            queue[0]._wake()
        else:
            del self._lanes[self._lane]

    def _wake(self) -> None:
        """Wake the task that waits for its turn, if one does."""
        if self._task is not None:
            reschedule(self._task)
            self._task = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One call of send."""

    src: int  # Sending rank
    dst: int  # Receiving rank
    tag: int  # Tag
    nbytes: int  # Length
    priority: int  # Priority of the call
    payload: bytes | None = None  # A copy of the bytes, if asked for


class Recording(Wrapper):
    """Writes down every send at its call, also one that fails or is cancelled later.

    Args:
        inner: The transport to listen to.
        keep_payloads: Also copy the bytes.

    Attributes:
        sent: The sends, in the order of the calls.
    """

    def __init__(self, inner: Transport, *, keep_payloads: bool = False) -> None:
        super().__init__(inner)
        self.sent: list[Sent] = []
        self.keep_payloads = keep_payloads

    def wrap(self, endpoint: Endpoint) -> Endpoint:
        """Return an endpoint that records its sends."""
        return _RecordingEndpoint(endpoint, self)


class _RecordingEndpoint(WrapperEndpoint):
    def __init__(self, inner: Endpoint, recording: Recording) -> None:
        super().__init__(inner, recording.peers)
        self._recording = recording

    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        """Record the call, then send."""
        view = self.check_send(dst, tag, data)
        payload = bytes(view) if self._recording.keep_payloads else None
        self._recording.sent.append(
            Sent(src=self.rank, dst=dst, tag=tag, nbytes=view.nbytes, priority=priority, payload=payload)
        )
        await self.inner.send(dst, tag, view, priority=priority)
