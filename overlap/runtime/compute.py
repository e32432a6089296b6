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
from ..diagnostics import set_place_of_call
from ..errors import FutureCancelledError, PeerFailedError, UsageError
from ..kernel_facts import processor_wait_ns
from ..threads import start_thread
from ..timeline.recording import RawSpan
from .arguments import check_no_pending_writes
from .callbacks import wait_in_thread
from .context import RankContext
from .derived import replace_futures
from .failure import Failure
from .forks import exit_process
from .future import Future, source_of, take_outcome
from .memory.buffer_locks import arrays_in, explain_write_error
from .outstanding import CallSite, code_place, is_own_error, seconds_since
from .settling import change_state, deliver, settle
from .state import BLOCKED, DONE, ISSUED, QUEUED, RUNNING
from .task import OwnCode

T_co = TypeVar("T_co", covariant=True)

DEFAULT_LANE = "compute"
STARVED_SHARE = 0.05
"""Share of compute time without a processor from which on a message reports it."""


class ComputeFuture(OwnCode[T_co]):
    """Handle of a function on the compute stream; `await` it for the function's result.

    Args:
        context: What all operations of the rank share.
        function: The function.
        args: Arguments of the function. Futures may be among them, also in tuples, lists and dicts.
        name: Name that the caller has given, or the function's name.
        caller: Frame or line that issued it.

    Attributes:
        stream: Name of the compute stream; None: the default one.
        prompt: Whether an error of the function that nobody awaits ends the rank at once.
        step: Step of the rank in which it was issued; None: outside of a step.
        cost: On the virtual clock, the duration in ns and the resource that limits it; see `ComputeStream.price`.
        issued_ns: Instant at which it was queued; 0 before.
        started_ns: Instant at which the function was called; None before, and on the virtual clock.
        span: Span for the timeline, once the function has run in a thread.
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
        issued: OwnCode[T_co] = self  # the base class, which declares some of the attributes
        issued.state, self._taken, issued.context, issued.name = ISSUED, False, context, name
        self._value = self._failure = self._waiters = self._callbacks = self._threads = self._thread_callbacks = None
        self.step: int | None = context.step
        self.function: Callable[..., T_co] | None = function
        self.args: tuple[object, ...] = args
        self.locked: list[Array] = []  # arrays that are locked until the function has returned
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
        """Instant at which the function was called; None before."""
        return self.started_ns

    def describe_state(self, now_ns: int) -> str:
        """Describe the present state."""
        if self.started_ns is None:
            return super().describe_state(now_ns)
        run_s = seconds_since(self.started_ns, now_ns)
        return f"has run {run_s} s" if run_s else "runs"

    def lock_arguments(self) -> None:
        """Lock the arrays among the arguments and in the results of settled futures, and collect `awaited`.

        Raises:
            UsageError: If an unfinished operation writes to one of the arrays.
        """
        arrays, others = arrays_in(self.args)
        for other in others:
            if isinstance(other, Future):
                self.awaited.append(other)
                if other.done:
                    arrays += arrays_in((take_outcome(other)[0],))[0]
        if arrays and not self.context.arrays.shapes_only:  # else no array has data
            self._lock_arrays(arrays)

    def resolve_arguments(self) -> tuple[tuple[object, ...], Failure | None]:
        """Put results in the place of futures among the arguments, and lock their arrays. All futures must have ended.

        Returns:
            The arguments and None. If a future has failed, or an array may not be read: () and the failure.
        """
        args, failure = replace_futures(self.args)
        if failure is not None:
            return (), failure
        resolved = cast("tuple[object, ...]", args)
        try:
            if not self.context.arrays.shapes_only:
                self._lock_arrays(arrays_in(resolved)[0])
        except UsageError as error:
            return (), Failure(error)
        return resolved, None

    def _lock_arrays(self, arrays: list[Array]) -> None:
        """Lock arrays; raise `UsageError` if an unfinished operation writes to one of them."""
        locks = self.context.locks
        for array in arrays:
            if not array.flags.writeable:
                check_no_pending_writes(locks, (array,), self.label)
        self.locked += locks.lock(tuple(arrays))

    def unlock_arguments(self, value: object = None) -> None:
        """Unlock the arrays of a function that has returned `value`, or will never run. Any thread may call this.

        If `value` is a view of a locked argument, it becomes writable together with the argument.
        """
        locked = self.locked
        if locked:
            locks = self.context.locks
            locks.unlock_with_base(arrays_in((value,))[0], locked)  # a result may be a view of an argument
            while locked:
                locks.unlock((locked.pop(),))

    def settle(self, value: object, failure: Failure | None = None) -> None:
        """Set the result or error of the function, unless the world has abandoned it. Any thread may call this.

        The end is recorded first: an operation that uses the result may end before the loop delivers this end.

        Args:
            value: Result of the function.
            failure: Failure of the function; None: it has returned.
        """
        if self.locked:
            self.unlock_arguments(value)
        self.function, self.args, self.awaited = None, (), []
        context, span = self.context, self.span
        if span is not None and self.state < DONE and failure is None:
            context.flight.record_success(self.record, span[3], span[4], span)  # items 3 and 4 are start and end
        else:
            if span is not None:
                context.record(span)
            if self.state < DONE:  # a compute that the world has abandoned stays unfinished in the flight record
                now_ns = context.now_ns()
                context.flight.record_end(self.record, now_ns if failure is None else -now_ns)  # negative: it failed
        settle(self, value, failure)

    def cancel(self) -> bool:
        """Withdraw the function, unless it has been called (see `Future.cancel`)."""
        failure = Failure(FutureCancelledError(f"{self.label} ({self.call_site}) was cancelled"), seen=True)
        if not settle(self, None, failure, before=RUNNING):
            return self.cancelled()
        self.unlock_arguments()
        self.function, self.args, self.awaited = None, (), []  # the queue holds it until its turn
        self.context.flight.record_end(self.record, -self.context.now_ns())
        if get_ident() == self.context.thread:
            deliver(self)
        else:
            with suppress(PeerFailedError):  # the loop has ended
                self.context.post_to_loop(deliver, self)
        return True

    def make_failure(self, error: BaseException) -> Failure:
        """Return the failure for an error that the function has raised.

        An error of a write into a locked array gets a note that explains it. One without a frame of the program has the
        line of the compute's call. If `prompt`, and no peer has caused the error, the failure ends the rank at once
        unless it is awaited.
        """
        set_place_of_call(error, self.call_site)
        explain_write_error(error, list(self.context.outstanding.operations))
        return Failure(error, prompt=self.prompt and is_own_error(error))

    @property
    def inputs(self) -> Iterable[Future[object]]:
        """Futures of the arguments, until their results are taken."""
        return map(source_of, self.awaited)

    def abandon(self, error: BaseException) -> None:
        """Fail because the world has ended, and stay unfinished in the flight record.

        Only the loop's thread may call this.
        """
        if self.state <= QUEUED or self.cost is not None:  # else a thread runs the function, and unlocks the arrays
            self.unlock_arguments()
        settle(self, None, Failure(error, seen=True))
        deliver(self)


class ComputeStream(ABC):
    """Runs functions of one rank one after the other, in the order of issue.

    Attributes:
        context: Context of the rank.
        lane: Name of the stream, also in the timeline.
        current: The compute whose function runs in a thread now; None: none runs.
        busy_ns: Time that all functions took that have ended.
        priced: Whether the time of functions is modelled (see `price`), not measured.
    """

    priced: bool = False

    def __init__(self, context: RankContext, lane: str = DEFAULT_LANE) -> None:
        self.context = context
        self.lane = lane
        self.current: ComputeFuture[object] | None = None
        self.busy_ns: int = 0

    @property
    def starved_ns(self) -> int:
        """Time in which functions could run and had no processor, as far as the kernel counts it."""
        return 0

    def price(
        self, name: str, *, seconds: float | None, flops: float | None, bytes_moved: float | None
    ) -> tuple[int, str] | None:
        """Return the modelled time of a function in nanoseconds, and the resource that limits it, such as "memory".

        Streams that measure the time of functions, as by default, return None.

        Args:
            name: Name of the function, for errors.
            seconds: Time of the function in seconds, or None.
            flops: Number of its floating-point operations, or None.
            bytes_moved: Its memory traffic in bytes, or None.
        """
        return None

    @abstractmethod
    def submit(self, operation: ComputeFuture[object]) -> None:
        """Append a function; it runs when all before it have run and the futures among its arguments are settled."""

    @abstractmethod
    def stop(self) -> None:
        """Let the running function finish, and start no other. Any thread may call this."""

    @abstractmethod
    async def wait_ended(self) -> None:
        """Wait until no function runs any more, after a call of `stop`."""


class ThreadedCompute(ComputeStream):
    """Compute stream in real time: one thread runs the functions; it starts when the first of them is submitted.

    Args:
        context: What all operations of the rank share.
        prepare: Called once, just before the thread starts.
        lane: Name of the stream in timelines.
    """

    def __init__(self, context: RankContext, prepare: Callable[[], None], lane: str = DEFAULT_LANE) -> None:
        super().__init__(context, lane)
        self._prepare = prepare
        self._queue: SimpleQueue[ComputeFuture[object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._exited = trio.Event()
        self._stopped = False
        self._idle_ns = 0  # time inside functions in which the thread used no processor: it waited, or found none free
        self._queued_ns = 0  # for a thread that has ended, the time in which it found no processor free, by the kernel

    def submit(self, operation: ComputeFuture[object]) -> None:
        """Append a function; it runs when all before it have run and the futures among its arguments are settled."""
        if self._thread is None:
            self._prepare()
            name = f"overlap-rank-{self.context.rank}" + (f"-{self.lane}" if self.lane != DEFAULT_LANE else "")
            thread = threading.Thread(target=self._run_queue, name=name, daemon=True)
            start_thread(thread, need="each rank of a process computes in one of its own")
            self._thread = thread
        self._queue.put(operation)

    @property
    def starved_ns(self) -> int:
        """Time in which functions could run and had no processor, as far as the kernel counts it."""
        thread = self._thread  # the kernel counts for a living thread; `_run_queue` keeps the count of an ended one
        waited_ns = (
            processor_wait_ns(thread.native_id or 0) if thread is not None and thread.is_alive() else self._queued_ns
        )
        return max(min(self._idle_ns, waited_ns), 0)

    def stop(self) -> None:
        """Let the running function finish, and start no other. Any thread may call this."""
        self._stopped = True
        self._queue.put(None)

    async def wait_ended(self) -> None:
        """Wait until the thread has ended, after a call of `stop`."""
        if self._thread is not None:
            await self._exited.wait()
            self._thread.join()

    def _run_queue(self) -> None:
        """Run the queued computes until the stream ends. The compute thread runs this."""
        try:
            while (operation := self._queue.get()) is not None and not self._stopped:
                self._run_compute(operation)
                del operation
        finally:
            self._queued_ns = processor_wait_ns(get_native_id())
            self.context.handover.post_if_open(self._exited.set)

    def _run_compute(self, operation: ComputeFuture[object]) -> None:
        """Run the function of one compute, settle the compute, and post its delivery to the event loop."""
        self.current = operation
        value, failure = None, None
        try:
            value, failure = self._call_function(operation)
        except BaseException as error:
            failure = operation.make_failure(error)
        if self.context.ending.forked:
            exit_process(failure.error if failure is not None else None)
        self.current = None
        operation.settle(value, failure)
        self.context.handover.post_if_open(operation._deliver)
        # the traceback of an error holds this frame: without these names they form no reference cycle with it
        del operation, value, failure

    def _call_function(self, operation: ComputeFuture[object]) -> tuple[object, Failure | None]:
        """Wait for the arguments, call the function, and record its time; whatever the function raises is raised.

        Return (result, None); (None, failure) if an argument has failed; (None, None) if the compute was cancelled or
        abandoned before the call.
        """
        for future in operation.awaited:
            # `change_state` returns False if the operation was cancelled or has ended: then it waits for nothing more
            if not future.done and change_state(operation, BLOCKED):
                wait_in_thread(future, unless=operation)
            del future
        if operation.state >= DONE:  # cancelled or abandoned
            return None, None
        args, failure = operation.resolve_arguments() if operation.awaited else (operation.args, None)
        function = operation.function
        # an argument has failed, or the operation was cancelled or abandoned just now
        if failure is not None or function is None or not change_state(operation, RUNNING):
            return None, failure
        started_cpu_ns = thread_time_ns()
        started_ns = operation.started_ns = perf_counter_ns()
        self.context.flight.record_start(operation.record, started_ns)
        try:
            return function(*args), None
        finally:
            end_ns = perf_counter_ns()
            wall_ns, cpu_ns = end_ns - started_ns, thread_time_ns() - started_cpu_ns
            self.busy_ns: int = self.busy_ns + wall_ns
            self._idle_ns += wall_ns - cpu_ns
            info = (*operation.place, operation.issued_ns, operation.step)
            operation.span = "compute", self.lane, operation.name, started_ns, end_ns, info
            # the traceback of an error holds this frame: without these names they form no reference cycle with it
            del operation, function, args


class ComputeStreams:
    """Compute streams of one rank, by name. `make(name)` makes a stream at its first use."""

    def __init__(self, make: Callable[[str], ComputeStream]) -> None:
        self._make = make
        self.default: ComputeStream = make(DEFAULT_LANE)
        self._streams = {DEFAULT_LANE: self.default}

    @property
    def current(self) -> ComputeFuture[object] | None:
        """Function that a thread of the rank runs now; None: none runs."""
        return next((stream.current for stream in self._streams.values() if stream.current is not None), None)

    @property
    def starved_share(self) -> float:
        """Share of the functions' time, from 0 to 1, in which they could run and had no processor."""
        streams = self._streams.values()
        return sum(stream.starved_ns for stream in streams) / (sum(stream.busy_ns for stream in streams) or 1)

    def get_or_make(self, name: str) -> ComputeStream:
        """Return the stream with this name; make it at the first call. Only the loop's thread may call this."""
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = self._make(name)
        return stream

    def stop(self) -> None:
        """Let the running functions finish, and start no other."""
        for stream in self._streams.values():
            stream.stop()

    async def wait_ended(self) -> None:
        """Wait until no function runs any more, after a call of `stop`."""
        for stream in self._streams.values():
            await stream.wait_ended()
