"""Compute streams: plain functions in threads of a rank, in order."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import SimpleQueue
from threading import get_ident, get_native_id
from time import perf_counter_ns, thread_time_ns
from types import FrameType
from typing import TypeVar, cast

import trio

from ..collectives.reduce import Array
from ..errors import FutureCancelledError, PeerFailedError, UsageError, shown
from ..kernel_facts import queued_ns
from ..threads import start_thread
from ..timeline.recording import RawSpan
from .arguments import check_unwritten
from .callbacks import wait_in_thread
from .context import RankContext
from .derived import resolve
from .ending import leave
from .failure import Failure
from .future import Future, outcome, source_of
from .memory.buffer_locks import arrays_in, explain
from .outstanding import CallSite, IssuedFuture, arose_here, code_place, seconds_since
from .settling import advance, deliver, settle
from .state import BLOCKED, DONE, ISSUED, QUEUED, RUNNING
from .task import OwnCode

T_co = TypeVar("T_co", covariant=True)

DEFAULT_LANE = "compute"
STARVED_SHARE = 0.05
"""Part of computing without a processor that is worth a word."""


class ComputeFuture(OwnCode[T_co]):
    """Handle of a function on the compute stream; `await` it for the function's result.

    Args:
        context: What all operations of the rank share.
        args: Arguments of the function, which may be futures.
        caller: Where it was issued.

    Attributes:
        name: Given name, or the function's name.
        stream: Name of its compute stream; None: the default one.
        prompt: Whether an unawaited error of the function ends the rank at once.
        step: Step of the rank in which it was issued, if any.
        cost: Its nanoseconds and their limit, on the virtual clock.
        issued_ns: Time at which it was queued; 0 before.
        started_ns: Time of the function's call; None before, and on the virtual clock.
        span: Entry in the timeline, once the function has run in a thread.
    """

    __slots__ = (
        "args", "awaited", "cost", "function", "issued_ns", "locked", "prompt", "record", "span", "started_ns", "step",
        "stream",
    )  # fmt: skip

    def __init__(
        self,
        context: RankContext,
        function: Callable[..., T_co],
        args: tuple[object, ...],
        name: str,
        caller: CallSite,
    ) -> None:
        # the base class's part is inlined, as in `CollectiveFuture`
        issued: IssuedFuture[T_co] = self
        issued.state, self._taken, issued.context, issued.name = ISSUED, False, context, name
        self._value = self._failure = self._waiters = self._callbacks = self._threads = self._anywhere = None
        self.step: int | None = context.step
        self.function: Callable[..., T_co] | None = function
        self.args: tuple[object, ...] = args
        self.locked: list[Array] = []  # arrays locked for it
        self.awaited: list[Future[object]] = []  # futures among the arguments
        self.prompt: bool = False
        self.record: int = -1  # number in the flight record
        self.issued_ns: int = 0
        self.started_ns: int | None = None
        self.span: RawSpan | None = None
        self.cost: tuple[int, str] | None = None
        self.stream: str | None = None
        issued.place = (caller.f_code, caller.f_lasti) if type(caller) is FrameType else code_place(caller)

    @property
    def label(self) -> str:
        """Name of the compute in messages."""
        return f"compute '{self.name}'"

    def flight_fields(self) -> dict[str, object]:
        """Return the fields of `waits.ends.CallRecord`, which all computes of this name at this line share."""
        return {"op": "compute", "name": self.name, "site": self.call_site}

    @property
    def since_ns(self) -> int | None:
        """Time of the function's call; None before."""
        return self.started_ns

    def describe_state(self, now_ns: int) -> str:
        """Describe the present state."""
        if self.started_ns is None:
            return super().describe_state(now_ns)
        run_s = seconds_since(self.started_ns, now_ns)
        return f"has run {run_s} s" if run_s else "runs"

    def lock_arguments(self) -> None:
        """Lock the arrays among the arguments, including the results of settled futures.

        Raises:
            UsageError: If an unfinished operation writes to one of them.
        """
        arrays, others = arrays_in(self.args)
        for other in others:
            if isinstance(other, Future):
                self.awaited.append(other)
                if other.done:
                    arrays += arrays_in((outcome(other)[0],))[0]
        if arrays and not self.context.arrays.shapes_only:  # else no array has data
            self._lock(arrays)

    def resolve_arguments(self) -> tuple[tuple[object, ...], Failure | None]:
        """Return the arguments, with results in place of futures, and lock the arrays among these."""
        args, failure = resolve(self.args)
        if failure is not None:
            return (), failure
        resolved = cast("tuple[object, ...]", args)
        try:
            if not self.context.arrays.shapes_only:
                self._lock(arrays_in(resolved)[0])
        except UsageError as error:
            return (), Failure(error)
        return resolved, None

    def _lock(self, arrays: list[Array]) -> None:
        """Lock the arrays that the function uses."""
        locks = self.context.locks
        for array in arrays:
            if not array.flags.writeable:
                check_unwritten(locks, (array,), self.label)
        self.locked += locks.lock(tuple(arrays))

    def unlock_arguments(self, value: object = None) -> None:
        """Unlock the arrays of a function that has returned `value` or will never run; any thread."""
        locked = self.locked
        if locked:
            locks = self.context.locks
            locks.follow(arrays_in((value,))[0], locked)
            while locked:
                locks.unlock((locked.pop(),))

    def settle(self, value: object, failure: Failure | None = None) -> None:
        """Set the result or error of the function, unless the world has abandoned it; any thread.

        Its end is recorded first: an operation that uses its result may end before the loop delivers it.
        """
        if self.locked:
            self.unlock_arguments(value)
        self.function, self.args, self.awaited = None, (), []
        context = self.context
        if self.state >= DONE or failure is not None or self.span is None:
            if self.span is not None:
                context.record(self.span)
            if self.state < DONE:
                now_ns = context.now_ns()
                context.flight.ended(self.record, now_ns if failure is None else -now_ns)
        else:
            context.flight.carried(self.record, self.span[3], self.span[4], self.span)
        settle(self, value, failure)

    def cancel(self) -> bool:
        """Withdraw the function, unless it has been called; see `Future.cancel`."""
        failure = Failure(FutureCancelledError(f"{self.label} ({self.call_site}) was cancelled"), seen=True)
        if not settle(self, None, failure, before=RUNNING):
            return self.cancelled()
        self.unlock_arguments()
        self.function, self.args, self.awaited = None, (), []  # the queue holds it until its turn
        self.context.flight.ended(self.record, -self.context.now_ns())
        if get_ident() == self.context.thread:
            deliver(self)
        else:
            with suppress(PeerFailedError):  # the loop has ended
                self.context.from_thread(deliver, self)
        return True

    def failure_of(self, error: BaseException) -> Failure:
        """Return the failure for an error of this future's function; the error gets an explanation."""
        explain(error, list(self.context.outstanding.operations))
        return Failure(error, prompt=self.prompt and arose_here(error))

    @property
    def inputs(self) -> Iterable[Future[object]]:
        """Futures of the arguments, until their results are taken."""
        return map(source_of, self.awaited)

    def abandon(self, error: BaseException) -> None:
        """Fail because the world has ended; the loop's thread only. In the flight record it stays unfinished."""
        if self.state <= QUEUED or self.cost is not None:  # else a thread runs it, and unlocks them
            self.unlock_arguments()
        settle(self, None, Failure(error, seen=True))
        deliver(self)


class ComputeStream(ABC):
    """FIFO queue of functions of one rank.

    Attributes:
        lane: Its name, also in the timeline.
        current: The function that a thread runs now.
        busy_ns: Time of all functions that have ended.
        priced: Whether functions have a price, which is modelled, not measured.
    """

    context: RankContext
    lane: str
    priced: bool = False

    def __init__(self, context: RankContext, lane: str = DEFAULT_LANE) -> None:
        self.context, self.lane = context, lane
        self.current: ComputeFuture[object] | None = None
        self.busy_ns: int = 0

    @property
    def starved_ns(self) -> int:
        """Time in which functions could run and had no processor, as far as the kernel counts it."""
        return 0

    def price(
        self, name: str, *, seconds: float | None, flops: float | None, bytes_moved: float | None
    ) -> tuple[int, str] | None:
        """Return the cost of a function in nanoseconds and its limit; None if it is measured, not modelled."""
        return None

    @abstractmethod
    def submit(self, operation: ComputeFuture[object]) -> None:
        """Append a function; it runs when all before it have run and the futures among its arguments are settled."""

    @abstractmethod
    def stop(self) -> None:
        """Let the running function finish, and start no other; any thread."""

    @abstractmethod
    async def ended(self) -> None:
        """Wait until no function runs any more; `stop` first."""


class ThreadedCompute(ComputeStream):
    """Compute stream in real time: one thread runs the functions, after `prepare`; it starts with the first of them.

    Args:
        context: What all operations of the rank share.
        lane: Name of the stream in timelines.
    """

    busy_ns: int

    def __init__(self, context: RankContext, prepare: Callable[[], None], lane: str = DEFAULT_LANE) -> None:
        super().__init__(context, lane)
        self._prepare = prepare
        self._queue: SimpleQueue[ComputeFuture[object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._exited = trio.Event()
        self._stopped = False
        self._idle_ns = 0  # of functions, in which the thread had no processor
        self._queued_ns = 0  # in which it could have run then, and at other times

    def submit(self, operation: ComputeFuture[object]) -> None:
        """Append a function; it runs when all before it have run and the futures among its arguments are settled."""
        if self._thread is None:
            self._prepare()
            name = f"overlap-rank-{self.context.rank}" + (f"-{self.lane}" if self.lane != DEFAULT_LANE else "")
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            start_thread(thread, need="each rank of a process computes in one of its own")
            self._thread = thread
        self._queue.put(operation)

    @property
    def starved_ns(self) -> int:
        """Time in which functions could run and had no processor, as far as the kernel counts it."""
        thread = self._thread
        waited_ns = queued_ns(thread.native_id or 0) if thread is not None and thread.is_alive() else self._queued_ns
        return max(min(self._idle_ns, waited_ns), 0)

    def stop(self) -> None:
        """Let the running function finish, and start no other; any thread."""
        self._stopped = True
        self._queue.put(None)

    async def ended(self) -> None:
        """Wait until the thread has ended; `stop` first."""
        if self._thread is not None:
            await self._exited.wait()
            self._thread.join()

    def _work(self) -> None:
        """Run operations from the queue in the compute thread, until the stream ends."""
        try:
            while (operation := self._queue.get()) is not None and not self._stopped:
                self._run(operation)
                del operation
        finally:
            self._queued_ns = queued_ns(get_native_id())
            self.context.handover.post_if_open(self._exited.set)

    def _run(self, operation: ComputeFuture[object]) -> None:
        """Run one operation, and deliver its end to the event loop."""
        self.current = operation
        value, failure = None, None
        try:
            value, failure = self._call(operation)
        except BaseException as error:
            failure = operation.failure_of(error)
        if self.context.ending.forked:
            leave(failure.error if failure is not None else None)
        self.current = None
        operation.settle(value, failure)
        self.context.handover.post(operation._deliver)
        del operation, value, failure  # the traceback of an error holds this frame, a reference cycle

    def _call(self, operation: ComputeFuture[object]) -> tuple[object, Failure | None]:
        """Wait for the arguments of an operation, call its function, and record the time."""
        for future in operation.awaited:
            if not future.done and advance(operation, BLOCKED):
                wait_in_thread(future, unless=operation)
            del future
        if operation.state >= DONE:  # cancelled or abandoned
            return None, None
        args, failure = operation.resolve_arguments() if operation.awaited else (operation.args, None)
        function = operation.function
        if failure is not None or self._stopped or function is None or not advance(operation, RUNNING):
            return None, failure
        ran_ns = thread_time_ns()
        started_ns = operation.started_ns = perf_counter_ns()
        self.context.flight.started(operation.record, started_ns)
        try:
            return function(*args), None
        finally:
            end_ns = perf_counter_ns()
            self.busy_ns += end_ns - started_ns
            self._idle_ns += end_ns - started_ns - (thread_time_ns() - ran_ns)
            info = (*operation.place, operation.issued_ns, operation.step)
            operation.span = "compute", self.lane, operation.name, started_ns, end_ns, info
            del operation, function, args  # as in `_run`


class ComputeStreams:
    """Compute streams of one rank, made by `make(lane)` on first use."""

    def __init__(self, make: Callable[[str], ComputeStream]) -> None:
        self._make = make
        self.default: ComputeStream = make(DEFAULT_LANE)
        self._streams = {DEFAULT_LANE: self.default}

    @property
    def current(self) -> ComputeFuture[object] | None:
        """Function that a thread runs now."""
        return next((stream.current for stream in self._streams.values() if stream.current is not None), None)

    @property
    def starved_share(self) -> float:
        """Part of the time of functions in which they could run and had no processor."""
        streams = self._streams.values()
        return sum(stream.starved_ns for stream in streams) / (sum(stream.busy_ns for stream in streams) or 1)

    def find(self, name: str) -> ComputeStream:
        """Return the stream of a name, made at the first call; the loop's thread only."""
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = self._make(name)
        return stream

    def stop(self) -> None:
        """Let the running functions finish, and start no other."""
        for stream in self._streams.values():
            stream.stop()

    async def ended(self) -> None:
        """Wait until no function runs any more; `stop` first."""
        for stream in self._streams.values():
            await stream.ended()


def check_stream(name: str) -> None:
    """Check the name of a compute stream.

    Raises:
        UsageError: If it is no text, or an empty one.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"stream: expected the name of a compute stream, got {shown(name)}")
