"""Streams: queues of one rank whose operations start in the order of issue, a bounded number (the window) at a time.

Why priorities cannot deadlock: operations are matched by (group, stream, sequence number), never by arrival. A stream
works on its first `window` unfinished operations in issue order, which is the same order on every rank. All operations
in the window may receive; priority only decides which of them sends next. So the oldest unfinished operation is active
on all ranks and always moves, for any timing and any priorities.

Why a window also has a span: an operation starts only if fewer than `SPAN` (or `window`, if that is more) were started
since the oldest unfinished one. Operation n + 2 * SPAN overwrites the shared memory that operation n uses. A rank that
starts operation n + 2 * SPAN has finished n + SPAN, so every rank had started n + SPAN, and therefore finished n: no
rank reads the memory of operation n any more. If operation n + SPAN used no shared memory, and a rank has finished it
by sending, the rank checks that the others are done with n (`row_is_free` in native/collectives.c).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

from ..defaults import DEFAULT_WINDOW
from ..errors import UsageError, argument_text
from .arguments import prepare_late_input
from .callbacks import call_when_done
from .context import RankContext
from .derived import replace_futures
from .failure import Failure
from .future import Future
from .operation import Operation
from .state import ADMITTED, BLOCKED, DONE, MATCHING, QUEUED

SPAN = 32  # Number of operations, see above; half of `transports.base.OPERATIONS`


class Stream:
    """A communication stream of one rank: a queue of operations, which start in the order of issue.

    Make one with `rank.stream(name)` and pass it as `stream=`. Operations of different streams overlap. Of one stream
    at most `window` operations are in flight, which bounds the memory that they hold. With a window of 1 they run one
    after the other.

    Args:
        context: Context of the rank.

    Attributes:
        name: Name, also of the lane in the timeline; the same on every rank.
        priority: Added to the priority of each operation of the stream; lower is more urgent.
        window: Number of unfinished operations that may be in flight at once.
        rank: World rank that owns the stream.
        in_flight: Operations in flight, in issue order. Maps each to the number of operations started before it.
        queue: Operations that wait for room.
        started: Number of operations that the stream has started so far.
    """

    name: str
    priority: int
    window: int
    rank: int
    in_flight: dict[Operation, int]
    queue: deque[Operation]
    started: int
    _context: RankContext
    _span: int  # most operations started since the oldest one in flight, that one included
    __slots__ = tuple(__annotations__)

    def __init__(self, context: RankContext, name: str, *, priority: int = 0, window: int = DEFAULT_WINDOW) -> None:
        self.name, self.priority, self.window, self.rank = name, priority, window, context.rank
        self.in_flight, self.queue, self.started = {}, deque(), 0
        self._context, self._span = context, max(window, SPAN)

    def __repr__(self) -> str:
        in_flight, queued = len(self.in_flight), len(self.queue)
        return f"<Stream '{self.name}' of rank {self.rank}: {in_flight} in flight, {queued} queued>"

    @property
    def has_room(self) -> bool:
        """Whether one more operation may start: fewer than `window` are in flight, and `SPAN` allows it."""
        in_flight = self.in_flight
        if len(in_flight) >= self.window:
            return False
        return not in_flight or self.started - next(iter(in_flight.values())) < self._span

    @property
    def end_needs_loop(self) -> bool:
        """Whether the end of an operation starts one that waits for room, or wakes a rank that waits to end."""
        return bool(self.queue) or self._context.outstanding.draining

    def admit_or_queue(self, operation: Operation) -> bool:
        """Add an operation to the stream. Return whether there is room, so that the caller starts it now.

        Otherwise its arrays are locked, and it waits in `queue`, until `on_operation_end` starts it.
        """
        self._context.outstanding.operations[operation] = None
        in_flight = self.in_flight
        if not in_flight or (len(in_flight) < self.window and self.has_room):
            in_flight[operation] = self.started
            self.started += 1
            return True
        operation._enter(QUEUED)
        operation.lock_arrays()
        self.queue.append(operation)
        return False

    def on_operation_end(self, operation: Operation, failure: Failure | None) -> None:
        """Remove an operation that has ended, and start the next ones that wait for room.

        Args:
            operation: The operation.
            failure: Its failure; None: it went well.
        """
        outstanding = self._context.outstanding
        if outstanding.operations.pop(operation, operation) is not None:  # the value of each is None
            return  # not there: a receive that has left its lane
        if outstanding.draining or failure is not None:
            outstanding.record_end(operation, failure)
        if self.in_flight.pop(operation, None) is None:  # it failed in the queue; an ending world fails the last first
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
            self._context.call_in_turn(partial(start_queued_operation, following))


class OpenLane:
    """Replaces a stream for operations that start at once and take no room in a window: messages, and parts of trees.

    Args:
        on_operation_end: Called with an operation that has ended, and its failure or None.

    Attributes:
        name: Name in the timeline.
        priority: Added to the priority of each of its operations.
        window: Window of the stream.
    """

    # the interface of `Stream`: there is always room, nothing is counted, and only the loop handles ends
    in_flight = None
    queue: tuple[()] = ()
    started = 0
    has_room = end_needs_loop = True

    def __init__(
        self, name: str, priority: int, window: int, on_operation_end: Callable[[Any, Failure | None], None]
    ) -> None:
        self.name = name
        self.priority = priority
        self.window = window
        self.on_operation_end = on_operation_end

    def admit_or_queue(self, operation: Operation) -> bool:
        """Add an operation. Return True: the caller starts it now."""
        operation.context.outstanding.operations[operation] = None
        return True


def start_operation(operation: Operation) -> None:
    """Start an operation for which its stream has room: at once, or, if its input is a future, after that has ended."""
    if isinstance(operation.input, Future):
        operation._enter(BLOCKED)
        operation.lock_arrays()
        settled = partial(_on_input_settled, operation)
        # not within the end of the input, but after it: chains of operations must not recurse
        call_when_done(operation.input, lambda: operation.context.call_in_turn(settled))
    else:
        operation._enter(MATCHING)
        operation.arrive()


def start_queued_operation(operation: Operation) -> None:
    """Start an operation that had to wait for room, unless it was cancelled or has failed in the meantime."""
    if operation.state is ADMITTED:
        operation.started_ns = operation.context.now_ns()
        start_operation(operation)


def _on_input_settled(operation: Operation) -> None:
    """Continue an operation whose input, a future, has ended: match it, or fail it if the input has failed."""
    if operation.state >= DONE:  # the world failed in the meantime
        return
    operation.input, failure = replace_futures(operation.input)
    if failure is None:
        try:
            prepare_late_input(operation)
        except Exception as error:  # no memory for a copy, or invalid arguments
            failure = Failure(error)
    if failure is not None:
        operation.port.communicator.fail_and_report(operation, failure)
        return
    operation.context.flight.record_call(operation.record, operation, operation.known_calls, operation.call)
    operation.started_ns = operation.context.now_ns()
    operation._enter(MATCHING)
    operation.arrive()


class Streams:
    """Communication streams of one rank, by name.

    Args:
        context: What all operations of the rank share.

    Attributes:
        default: The stream of calls that name none.
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._streams_by_name: dict[str, Stream] = {}
        self.default: Stream = self.open("comm")

    def with_default_stream(self, stream: Stream) -> Streams:
        """Return the same streams, with another default."""
        other = copy(self)
        other.default = stream
        return other

    def open(self, name: str, *, priority: int = 0, window: int = DEFAULT_WINDOW) -> Stream:
        """Return the stream with this name; make it at the first call.

        Args:
            name: Name of the stream.
            priority: See `Stream`.
            window: See `Stream`. If priority and window are the defaults, an existing stream may have other values.

        Raises:
            UsageError: If the stream exists with other settings, `window` is below 1, or a setting is of another type.
        """
        _check_settings(name, priority, window)
        named = self._streams_by_name.get(name)
        if named is None:
            named = self._streams_by_name[name] = Stream(self._context, name, priority=priority, window=window)
        elif (priority, window) not in ((named.priority, named.window), (0, DEFAULT_WINDOW)):
            raise UsageError(
                f"stream '{name}' has priority={named.priority}, window={named.window}; "
                f"got priority={priority}, window={window}; use these, or another name"
            )
        return named

    def find(self, stream: Stream | str | None) -> Stream:
        """Return the stream that the `stream` argument of a call means: a stream, a name, or None for the default.

        Raises:
            UsageError: If there is no stream of that name, or it is another rank's.
        """
        if stream is None:
            return self.default
        if isinstance(stream, Stream):
            if self._streams_by_name.get(stream.name) is not stream:
                raise UsageError(
                    f"stream: '{stream.name}' is rank {stream.rank}'s, this is rank {self._context.rank}; use its own"
                )
            return stream
        if not isinstance(stream, str) or stream not in self._streams_by_name:
            known = ", ".join(self._streams_by_name)
            raise UsageError(
                f"stream: {argument_text(stream)} is unknown; known are {known}; rank.stream(NAME) makes one"
            )
        return self._streams_by_name[stream]


def _check_settings(name: str, priority: int, window: int) -> None:
    """Raise `UsageError` unless these are a name, a priority and a window that a stream may have."""
    if not isinstance(name, str) or not name:
        raise UsageError(f"name: expected a non-empty string, such as 'gradients', got {argument_text(name)}")
    if not isinstance(priority, int):
        raise UsageError(f"priority: expected an integer, lower is more urgent, got {argument_text(priority)}")
    if not isinstance(window, int) or window < 1:
        raise UsageError(f"window: expected an integer, 1 or more, got {argument_text(window)}")
