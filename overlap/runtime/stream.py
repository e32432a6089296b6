"""Streams: FIFO lanes of one rank, worked on a window at a time.

Why priorities cannot deadlock: operations are matched by (group, stream, sequence number), never by arrival. A stream
works on its first `window` unfinished operations in issue order, which is the same order on every rank. Everything in
the window may receive; priority only orders what is sent next. So the oldest unfinished operation is active on all
ranks and always moves, for any timing and any priorities.

Why a window also has a span: an operation starts only if fewer than `SPAN` (or `window`, if that is more) were started
since the oldest unfinished one. Operation n + 2 * SPAN overwrites the shared memory that operation n posts to. A rank
that posts operation n + 2 * SPAN has finished n + SPAN, so every rank had started n + SPAN, and therefore finished n:
no rank reads the memory of operation n any more. If operation n + SPAN used no shared memory, and a rank has finished
it by sending, it checks that the others are done with n (`row_is_free` in native/collectives.c).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

from ..defaults import DEFAULT_WINDOW
from ..errors import UsageError, shown
from .arguments import prepare_late
from .callbacks import call_when_done
from .context import RankContext
from .derived import resolve
from .failure import Failure
from .future import Future
from .operation import Operation
from .state import ADMITTED, BLOCKED, DONE, MATCHING, QUEUED

SPAN = 32  # Operations; half of `transports.base.OPERATIONS`


class Stream:
    """A communication stream of one rank: a FIFO lane for its CC-cores.

    Make one with `rank.stream(name)` and pass it as `stream=`. Streams overlap each other; within a stream at most
    `window` operations are in flight, which bounds the memory they hold. A window of 1 is strict FIFO.

    Args:
        context: What all operations of the rank share.

    Attributes:
        name: Name, also of its lane in the timeline; the same on every rank.
        priority: Added to the priority of each of its operations; lower is more urgent.
        window: Number of unfinished operations that may be in flight at once.
        rank: World rank that owns the stream.
        in_flight: Operations in flight in issue order, with the number of operations started before each.
        queue: Operations that wait for room.
        started: Number of operations started.
    """

    __slots__ = (
        "_context",
        "_outstanding",
        "_span",
        "in_flight",
        "name",
        "priority",
        "queue",
        "rank",
        "started",
        "window",
    )  # fmt: skip
    name: str
    priority: int
    rank: int
    window: int

    def __init__(self, context: RankContext, name: str, *, priority: int = 0, window: int = DEFAULT_WINDOW) -> None:
        self.rank, self.name, self.priority, self.window = context.rank, name, priority, window
        self._context, self._outstanding = context, context.outstanding
        self.in_flight: dict[Operation, int] = {}  # in issue order, with the number of operations started before
        self.started: int = 0
        self._span = max(window, SPAN)
        self.queue: deque[Operation] = deque()

    def __repr__(self) -> str:
        in_flight, queued = len(self.in_flight), len(self.queue)
        return f"<Stream '{self.name}' of rank {self.rank}: {in_flight} in flight, {queued} queued>"

    @property
    def has_room(self) -> bool:
        """Whether there is room for one more operation. If so, no operation is waiting, so its end starts no other."""
        in_flight = self.in_flight
        if len(in_flight) >= self.window:
            return False
        return not in_flight or self.started - next(iter(in_flight.values())) < self._span

    @property
    def end_wakes(self) -> bool:
        """Whether the end of an operation wakes another one that waits for room, or the end of the rank."""
        return bool(self.queue) or self._outstanding.draining

    def admit(self, operation: Operation) -> bool:
        """Take an operation in; return whether the window has room for it now. Else it starts when its turn comes."""
        self._outstanding.operations[operation] = None
        in_flight = self.in_flight
        if not in_flight or (len(in_flight) < self.window and self.has_room):
            in_flight[operation] = self.started
            self.started += 1
            return True
        operation._enter(QUEUED)
        operation.lock()
        self.queue.append(operation)
        return False

    def finished(self, operation: Operation, failure: Failure | None) -> None:
        """Remove an operation that has ended, and start the next one that waits for room."""
        outstanding = self._outstanding
        if outstanding.operations.pop(operation, operation) is not None:
            return  # a receive that has given its place back
        if outstanding.draining or failure is not None:
            outstanding.record_end(operation, failure)
        if self.in_flight.pop(operation, None) is None:  # failed while queued; a failing world starts at the end
            if self.queue[-1] is operation:
                self.queue.pop()
            else:
                self.queue.remove(operation)
            return
        while self.queue and self.has_room:
            following = self.queue.popleft()
            self.in_flight[following] = self.started
            self.started += 1
            following._enter(ADMITTED)
            self._context.soon(partial(activate_late, following))


class OpenLane:
    """Lane of operations that start at once and take no room in the window of a stream: of messages, or parts of trees.

    Args:
        finished: Called with an operation that has ended, and its failure.

    Attributes:
        name: Name in the timeline.
        priority: Added to the priority of each of its operations.
        window: That of the stream.
    """

    in_flight = None
    queue: tuple[()] = ()
    started = 0
    has_room = end_wakes = True

    def __init__(self, name: str, priority: int, window: int, finished: Callable[[Any, Failure | None], None]) -> None:
        self.name: str = name
        self.priority: int = priority
        self.window: int = window
        self.finished: Callable[[Any, Failure | None], None] = finished

    def admit(self, operation: Operation) -> bool:
        """Take an operation in, and let it start at once."""
        operation.context.outstanding.operations[operation] = None
        return True


def activate(operation: Operation) -> None:
    """Start an operation that its stream has room for, once its input exists."""
    if isinstance(operation.input, Future):
        operation._enter(BLOCKED)
        operation.lock()
        settled = partial(_input_settled, operation)
        call_when_done(operation.input, lambda: operation.context.soon(settled))
    else:
        operation._enter(MATCHING)
        operation.arrive()


def activate_late(operation: Operation) -> None:
    """Start an operation that had to wait for room, unless it was withdrawn or has failed in the meantime."""
    if operation.state is ADMITTED:
        operation.started_ns = operation.context.now_ns()
        activate(operation)


def _input_settled(operation: Operation) -> None:
    """Continue an operation after the end of its input: match it, or fail it with the input."""
    if operation.state >= DONE:  # the world failed in the meantime
        return
    operation.input, failure = resolve(operation.input)
    if failure is None:
        try:
            prepare_late(operation)
        except Exception as error:  # no memory for a copy, or invalid arguments
            failure = Failure(error)
    if failure is not None:
        operation.port.communicator.withdraw(operation, failure)
        return
    operation.context.flight.described(operation.record, operation, operation.known, operation.call)
    operation.started_ns = operation.context.now_ns()
    operation._enter(MATCHING)
    operation.arrive()


class Streams:
    """Communication streams of one rank, by name."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._named: dict[str, Stream] = {}
        self.default: Stream = self.open("comm")

    def preferring(self, stream: Stream) -> Streams:
        """Return the same streams, with another default."""
        other = copy(self)
        other.default = stream
        return other

    def open(self, name: str, *, priority: int = 0, window: int = DEFAULT_WINDOW) -> Stream:
        """Return the stream of a name, made at the first call.

        Raises:
            UsageError: If it exists with other settings, `window` is below 1, or a setting is of another type.
        """
        _check(name, priority, window)
        named = self._named.get(name)
        if named is None:
            named = self._named[name] = Stream(self._context, name, priority=priority, window=window)
        elif (priority, window) not in ((named.priority, named.window), (0, DEFAULT_WINDOW)):
            raise UsageError(
                f"stream '{name}' has priority={named.priority}, window={named.window}; "
                f"got priority={priority}, window={window}; use these, or another name"
            )
        return named

    def find(self, stream: Stream | str | None) -> Stream:
        """Return the stream of the `stream` argument of a call.

        Raises:
            UsageError: If there is no stream of that name, or it is another rank's.
        """
        if stream is None:
            return self.default
        if isinstance(stream, Stream):
            if self._named.get(stream.name) is not stream:
                raise UsageError(
                    f"stream: '{stream.name}' is rank {stream.rank}'s, this is rank {self._context.rank}; use its own"
                )
            return stream
        if not isinstance(stream, str) or stream not in self._named:
            raise UsageError(f"stream: {shown(stream)} is unknown; known are {', '.join(self._named)}")
        return self._named[stream]


def _check(name: str, priority: int, window: int) -> None:
    """Raise `UsageError` unless these are valid settings of a stream."""
    if not isinstance(name, str) or not name:
        raise UsageError(f"name: expected the name of a stream, got {shown(name)}")
    if not isinstance(priority, int):
        raise UsageError(f"priority: expected an integer, lower is more urgent, got {shown(priority)}")
    if not isinstance(window, int) or window < 1:
        raise UsageError(f"window: must be at least 1, got {shown(window)}")
