"""Wrappers around transports and wires, messages that are begun later, and `Recording`, the simplest wrapper."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any, Self, TypeAlias

import trio

from transports.base import Transport
from transports.buffers import Buffer, Delivery, as_bytes
from transports.failures import ArgumentError, LinkLostError, TransportClosedError
from transports.request import Done, Request
from transports.signature import PlainSignature
from transports.wire import Envelope, Wire, check_tag, describe_ranks


class Wrapper(Transport):
    """A transport around another one. Subclasses say how they wrap a wire.

    It shares no memory: a short cut through memory would lead around the wrapper.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.ranks: tuple[int, ...] = inner.ranks
        self.peers: tuple[int, ...] = inner.peers
        self._wires: dict[int, Wire] = {}

    @abstractmethod
    def wrap(self, wire: Wire) -> Wire:
        """Return the wire to use in place of an inner one."""

    def wire(self, rank: int) -> Wire:
        """Return the wrapped wire of a local rank."""
        if rank not in self._wires:
            self._wires[rank] = self.wrap(self.inner.wire(rank))
        return self._wires[rank]

    def spans_hosts(self, ranks: Sequence[int]) -> bool:
        """Return whether some ranks live on different hosts."""
        return self.inner.spans_hosts(ranks)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        """Open the inner transport for the length of a block."""
        async with self.inner.open():
            yield self

    async def aclose(self) -> None:
        """Close the inner transport."""
        await self.inner.aclose()

    def __repr__(self) -> str:
        """Name the wrapper and the inner transport."""
        return f"<{type(self).__name__} around {self.inner!r}>"


class WrappedWire(Wire):
    """A wire around another one: everything goes straight through, unless a subclass overrides it.

    Args:
        inner: The other one.
        peers: Ranks that it reaches.
    """

    def __init__(self, inner: Wire, peers: Sequence[int]) -> None:
        self.rank: int = inner.rank
        self.inner = inner
        self._peers = frozenset(peers)

    def begin_send(self, dst: int, tag: int, data: Buffer, *, done: Done, **options: Any) -> Request | None:
        """Begin a send of the inner wire; options are those of `Wire.begin_send`."""
        return self.inner.begin_send(dst, tag, data, done=done, **options)

    def begin_recv(self, src: int, tag: int, out: Buffer | None, nbytes: int, *, done: Done, **options: Any) -> Request:
        """Begin a receive of the inner wire; options are those of `Wire.begin_recv`."""
        return self.inner.begin_recv(src, tag, out, nbytes, done=done, **options)

    def unexpected(self, tag: int | None = None) -> Sequence[Envelope]:
        """Return the messages that have arrived at the inner wire."""
        return self.inner.unexpected(tag)

    def watch(self, notify: Callable[[], None]) -> AbstractContextManager[None]:
        """Watch the inner wire."""
        return self.inner.watch(notify)

    def check(self, peer: int, tag: int = 0) -> None:
        """Raise the error of a message that cannot be."""
        self.inner.check(peer, tag)

    def lost(self, src: int, tag: int = 0) -> LinkLostError | None:
        """Return the error of a receive whose message never arrives at the inner wire."""
        return self.inner.lost(src, tag)

    def check_send(self, dst: int, tag: int, data: Buffer) -> memoryview:
        """Return the bytes, or raise the errors that the inner wire would raise at the call."""
        view = as_bytes(data)
        check_tag(tag)
        if dst not in self._peers:
            raise ArgumentError(f"there is no rank {dst} here; known are {describe_ranks(tuple(sorted(self._peers)))}")
        return view


_Lane: TypeAlias = "tuple[int, int, int]"  # (src, dst, tag)


class RelayedRequest(Request):
    """A request whose message is begun at an inner wire now, later or never.

    Args:
        done: Called at the end.
        nbytes: Length of the message.
        begin: Begins the message, with `done`; None from it: the message has left.

    Attributes:
        leave: Called as the message is begun, and if it ends before.
        due_s: Time at which it is to be begun.
        due: Whether that has come, so that only messages before it are waited for.
    """

    nbytes: int
    theirs: PlainSignature | None
    due_s: float = 0.0
    due: bool = False
    leave: Callable[[], None] | None = None
    _inner: Request | None = None

    def __init__(self, done: Done, nbytes: int, begin: Callable[..., Request | None]) -> None:
        super().__init__(done, nbytes)
        self.theirs, self._begin = None, begin

    def begin(self) -> None:
        """Begin the message now, unless the request has ended; raises the errors of the inner wire."""
        self._leave()
        if self.ended:
            return
        begun = self._begin(done=self._on_end)
        if begun is None:
            self.end()
        elif not self.ended:
            self._inner = begun

    def _leave(self) -> None:
        leave, self.leave = self.leave, None
        if leave is not None:
            leave()

    def _on_end(self, inner: Request) -> None:
        self.nbytes, self.theirs, self._inner = inner.nbytes, inner.theirs, inner
        self.end(self.error or inner.error, withdrawn=inner.withdrawn and self.error is None)

    def withdraw(self) -> None:
        """Withdraw the message, or do not begin it."""
        if self._inner is not None:
            self._inner.withdraw()
        elif not self.ended:
            self._leave()
            self.end(self.error, withdrawn=self.error is None)

    def fail(self, error: Exception) -> None:
        """End with an error, unless the message has met its other end and finishes."""
        self.error = error
        self.withdraw()
        if not self.ended:
            self.error = None

    def delivery(self) -> Delivery:
        """Return the message of the inner receive."""
        assert self._inner is not None, "only a receive that has ended delivers"
        return self._inner.delivery()


class Later:
    """Begins messages at their times, in one task; messages of a lane keep the order of their calls.

    A message that is due waits for messages before it on its lane.

    Attributes:
        runs: Whether `run` begins messages, now or soon.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RelayedRequest, _Lane]] = []
        self._lanes: dict[_Lane, deque[RelayedRequest]] = {}
        self._serial = count()
        self._changed = trio.Event()
        self.runs: bool = False

    def holds(self, lane: _Lane) -> bool:
        """Whether messages of a lane wait."""
        return lane in self._lanes

    def hold(self, lane: _Lane, request: RelayedRequest) -> None:
        """Keep a message until the time that `plan` has set for it.

        Raises:
            TransportClosedError: The transport is not open.
        """
        if not self.runs:
            src, dst, tag = lane
            raise TransportClosedError("the transport is not open", src=src, dst=dst, tag=tag)
        self._lanes.setdefault(lane, deque()).append(request)
        request.leave = partial(self.drop, lane, request)

    def plan(self, lane: _Lane, request: RelayedRequest, due_s: float) -> None:
        """Set the time of a message, or another one."""
        request.due_s = due_s
        heappush(self._heap, (due_s, next(self._serial), request, lane))
        if self._heap[0][2] is request:
            self._changed.set()

    def drop(self, lane: _Lane, request: RelayedRequest) -> None:
        """Forget a message that ends before its time."""
        queue = self._lanes.get(lane, ())
        if request in queue:
            self._lanes[lane].remove(request)
            self._begin_due(lane)

    def _begin_due(self, lane: _Lane) -> None:
        """Begin the messages of a lane that are due, up to the first that is not."""
        queue = self._lanes[lane]
        while queue and queue[0].due:
            request = queue.popleft()
            try:
                request.begin()
            except Exception as error:  # what the inner wire has learned since the call
                request.end(error)
        if not queue:
            self._lanes.pop(lane, None)

    async def run(self) -> None:
        """Begin messages when they are due, until cancelled; then fail those that still wait."""
        reached_s = -math.inf  # a clock may pass a deadline that it cannot show exactly
        try:
            while True:
                self._changed = trio.Event()
                while self._heap and self._heap[0][0] <= max(reached_s, trio.current_time()):
                    due_s, _, request, lane = heappop(self._heap)
                    if due_s == request.due_s and not request.ended and not request.due:  # else it has another time
                        request.due = True
                        self._begin_due(lane)
                with trio.CancelScope(deadline=self._heap[0][0] if self._heap else math.inf) as scope:
                    await self._changed.wait()
                if scope.cancelled_caught:
                    reached_s = scope.deadline
        finally:
            self.runs = False
            for (src, dst, tag), queue in tuple(self._lanes.items()):
                for request in tuple(queue):
                    request.fail(TransportClosedError("the transport has been closed", src=src, dst=dst, tag=tag))


class Delaying(Wrapper):
    """A wrapper that begins messages later.

    Attributes:
        later: Begins them.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.later: Later = Later()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        """Open the inner transport, and begin messages, for the length of a block."""
        async with self.inner.open(), trio.open_nursery() as nursery:
            self.later.runs = True
            nursery.start_soon(self.later.run)
            try:
                yield self
            finally:
                nursery.cancel_scope.cancel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One send."""

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

    def wrap(self, wire: Wire) -> Wire:
        """Return a wire that records its sends."""
        return _RecordingWire(wire, self)


class _RecordingWire(WrappedWire):
    def __init__(self, inner: Wire, recording: Recording) -> None:
        super().__init__(inner, recording.peers)
        self._recording = recording

    def begin_send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0, **options: Any) -> Request | None:
        """Record the call, then send."""
        view, recording = self.check_send(dst, tag, data), self._recording
        payload = bytes(view) if recording.keep_payloads else None
        recording.sent.append(
            Sent(src=self.rank, dst=dst, tag=tag, nbytes=view.nbytes, priority=priority, payload=payload)
        )
        return super().begin_send(dst, tag, view, priority=priority, **options)
