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
from transports.failures import ArgumentError, LinkLostError, TransportClosedError, lane_fields
from transports.request import Done, Request
from transports.signature import PlainSignature
from transports.wire import Envelope, Wire, check_tag, describe_ranks


class Wrapper(Transport):
    """A transport around another one. Subclasses override `wrap`, which makes their wires.

    A wrapper shares no memory: ranks that copied from each other's memory would bypass it.

    Args:
        inner: The wrapped transport.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.ranks: tuple[int, ...] = inner.ranks
        self.peers: tuple[int, ...] = inner.peers
        self._wires: dict[int, Wire] = {}

    @abstractmethod
    def wrap(self, wire: Wire) -> Wire:
        """Return the wire to use in place of `wire`, a wire of the inner transport."""

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
    """A wire around another one. Every call is passed on to the inner wire, unless a subclass overrides it.

    Args:
        inner: The wrapped wire.
        peers: Ranks that the inner wire reaches.
    """

    def __init__(self, inner: Wire, peers: Sequence[int]) -> None:
        self.rank: int = inner.rank
        self.inner = inner
        self._peers = frozenset(peers)

    def begin_send(self, dst: int, tag: int, data: Buffer, *, done: Done, **options: Any) -> Request | None:
        """Begin a send of the inner wire; arguments and options are those of `Wire.begin_send`."""
        return self.inner.begin_send(dst, tag, data, done=done, **options)

    def begin_recv(self, src: int, tag: int, out: Buffer | None, nbytes: int, *, done: Done, **options: Any) -> Request:
        """Begin a receive of the inner wire; arguments and options are those of `Wire.begin_recv`."""
        return self.inner.begin_recv(src, tag, out, nbytes, done=done, **options)

    def unexpected(self, tag: int | None = None) -> Sequence[Envelope]:
        """Return the messages that have arrived at the inner wire."""
        return self.inner.unexpected(tag)

    def watch(self, notify: Callable[[], None]) -> AbstractContextManager[None]:
        """Watch the inner wire."""
        return self.inner.watch(notify)

    def check(self, peer: int, tag: int = 0) -> None:
        """Raise the error that a message with the peer would raise at the inner wire; see `Wire.check`."""
        self.inner.check(peer, tag)

    def lost(self, src: int, tag: int = 0) -> LinkLostError | None:
        """Return the inner wire's error of a receive whose message cannot arrive any more; see `Wire.lost`."""
        return self.inner.lost(src, tag)

    def check_send(self, dst: int, tag: int, data: Buffer) -> memoryview:
        """Return the bytes of a send after checking its arguments, as the inner wire would do at the call.

        Args:
            dst: Receiving rank.
            tag: Tag of the message.
            data: The buffer to send.

        Raises:
            ArgumentError: The rank is unknown, or tag or buffer is bad.
        """
        view = as_bytes(data)
        check_tag(tag)
        if dst not in self._peers:
            raise ArgumentError(f"there is no rank {dst} here; known are {describe_ranks(tuple(sorted(self._peers)))}")
        return view


_Lane: TypeAlias = "tuple[int, int, int]"  # (src, dst, tag)


class RelayedRequest(Request):
    """A request of a wrapper, whose message is begun at the inner wire later than the request is made, or never.

    Args:
        done: Called once with this request at its end.
        nbytes: Length of the message.
        begin: Called with `done=`, begins the message at the inner wire. Returns the inner request, or None if the
            message was sent at once.

    Attributes:
        leave: Called once, when the message begins or, without having begun, ends.
        due_s: Time at which to begin the message.
        due: Whether that time has come. Then the message waits only for earlier messages of its lane.
    """

    due_s: float = 0.0
    due: bool = False
    leave: Callable[[], None] | None = None
    _inner: Request | None = None

    def __init__(self, done: Done, nbytes: int, begin: Callable[..., Request | None]) -> None:
        super().__init__(done, nbytes)
        self._begin = begin

    def begin(self) -> None:
        """Begin the message at the inner wire, unless the request has ended; errors are those of the inner wire."""
        self._call_leave()
        if self.ended:
            return
        begun = self._begin(done=self._on_end)
        if begun is None:
            self.end()
        # if the inner request ended within `_begin`, `_on_end` was called, and has set `_inner`
        elif not self.ended:
            self._inner = begun

    def _call_leave(self) -> None:
        """Call `leave`, once."""
        leave, self.leave = self.leave, None
        if leave is not None:
            leave()

    def _on_end(self, inner: Request) -> None:
        """End this request like the inner one, which calls it; an error of `fail` takes precedence."""
        self.nbytes: int = inner.nbytes
        self.theirs: PlainSignature | None = inner.theirs
        self._inner = inner
        self.end(self.error or inner.error, withdrawn=inner.withdrawn and self.error is None)

    def withdraw(self) -> None:
        """Withdraw the inner request; if the message has not begun, end this request, so that it never begins."""
        if self._inner is not None:
            self._inner.withdraw()
            self.matched: bool = self._inner.matched
        elif not self.ended:
            self._call_leave()
            self.end(self.error, withdrawn=self.error is None)

    def fail(self, error: Exception) -> None:
        """End with an error, unless the message has met its other end: then it finishes without."""
        # `withdraw` ends the request with `self.error`, if the inner wire can still withdraw
        self.error = error
        self.withdraw()
        if not self.ended:
            self.error = None

    def delivery(self) -> Delivery:
        """Return the message of the inner receive."""
        assert self._inner is not None, "only a receive that has ended delivers"
        return self._inner.delivery()


class DelayedMessages:
    """Holds messages until their planned times; one task, `run`, begins each at its time.

    Messages of a lane (src, dst, tag) keep the order of their calls: a message whose time has come waits for earlier
    messages of its lane.

    Attributes:
        runs: Whether the task `run` is active, or about to start.
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
        """Hold a message until the time that `plan` sets for it.

        Raises:
            TransportClosedError: The transport is not open.
        """
        if not self.runs:
            raise TransportClosedError("the transport is not open; use it inside its `async with`", **lane_fields(lane))
        self._lanes.setdefault(lane, deque()).append(request)
        request.leave = partial(self.drop, lane, request)

    def plan(self, lane: _Lane, request: RelayedRequest, due_s: float) -> None:
        """Set or change the time of a message.

        Args:
            lane: Source, destination and tag.
            request: The message, which `hold` keeps.
            due_s: When to begin it, on Trio's clock.
        """
        request.due_s = due_s
        heappush(self._heap, (due_s, next(self._serial), request, lane))
        # the message is the next of all, so the sleeping task must wake earlier
        if self._heap[0][2] is request:
            self._changed.set()

    def drop(self, lane: _Lane, request: RelayedRequest) -> None:
        """Remove a message that begins or has ended; messages that are due and waited only for it begin now."""
        queue = self._lanes.get(lane, ())
        if request in queue:
            self._lanes[lane].remove(request)
            self._begin_due_messages(lane)

    def _begin_due_messages(self, lane: _Lane) -> None:
        """Begin the messages of a lane that are due, up to the first that is not."""
        queue = self._lanes[lane]
        while queue and queue[0].due:
            request = queue.popleft()
            try:
                request.begin()
            except Exception as error:  # such as a link that the inner wire has lost since the call
                request.end(error)
        if not queue:
            # a callback may have removed it already
            self._lanes.pop(lane, None)

    async def run(self) -> None:
        """Begin messages when they are due, until cancelled; then fail those that still wait."""
        # The last deadline that has passed: after it, `current_time` may still be below it by a rounding error.
        reached_s = -math.inf
        try:
            while True:
                self._changed = trio.Event()
                while self._heap and self._heap[0][0] <= max(reached_s, trio.current_time()):
                    due_s, _, request, lane = heappop(self._heap)
                    # a message whose time was changed has an entry for each time; only the last one counts
                    if due_s == request.due_s and not request.ended and not request.due:
                        request.due = True
                        self._begin_due_messages(lane)
                with trio.CancelScope(deadline=self._heap[0][0] if self._heap else math.inf) as scope:
                    await self._changed.wait()
                if scope.cancelled_caught:
                    reached_s = scope.deadline
        finally:
            self.runs = False
            for lane, queue in tuple(self._lanes.items()):
                for request in tuple(queue):
                    request.fail(TransportClosedError("the transport has been closed", **lane_fields(lane)))


class Delaying(Wrapper):
    """A wrapper whose wires may begin messages later than they are sent.

    Args:
        inner: The wrapped transport.

    Attributes:
        later: Holds messages, and begins each at its time.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.later: DelayedMessages = DelayedMessages()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        """Open the inner transport, and run `later`, for the length of a block."""
        async with self.inner.open(), trio.open_nursery() as nursery:
            self.later.runs = True
            nursery.start_soon(self.later.run)
            try:
                yield self
            finally:
                nursery.cancel_scope.cancel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One send that `Recording` has recorded."""

    src: int  # Sending rank
    dst: int  # Receiving rank
    tag: int  # Tag of the message
    nbytes: int  # Length of the message
    priority: int  # Priority of the call
    payload: bytes | None = None  # A copy of the bytes; None unless `Recording.keep_payloads`


class Recording(Wrapper):
    """A transport that records every send at its call, even a send that fails or is cancelled later.

    Args:
        inner: The transport that carries the messages.
        keep_payloads: Whether to record a copy of the bytes, too.

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
    """Wire of one rank that records each send before the inner wire gets it."""

    def __init__(self, inner: Wire, recording: Recording) -> None:
        super().__init__(inner, recording.peers)
        self._recording = recording

    def begin_send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0, **options: Any) -> Request | None:
        """Record the call, then send; arguments and options are those of `Wire.begin_send`."""
        view, recording = self.check_send(dst, tag, data), self._recording
        payload = bytes(view) if recording.keep_payloads else None
        sent = Sent(src=self.rank, dst=dst, tag=tag, nbytes=view.nbytes, priority=priority, payload=payload)
        recording.sent.append(sent)
        return super().begin_send(dst, tag, view, priority=priority, **options)
