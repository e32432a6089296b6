"""Compute streams of a simulation: functions run in the event loop, and end after their modelled time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from operator import attrgetter, itemgetter

from ..runtime.callbacks import call_when_done
from ..runtime.compute import ComputeFuture, ComputeStream
from ..runtime.context import RankContext
from ..runtime.failure import Failure
from ..runtime.settling import deliver
from ..runtime.state import BLOCKED, QUEUED, RUNNING
from .compute_cost import ComputeCosts
from .conditions import Conditions
from .injector import FaultInjector, describe_place
from .kernel import EventOrder, Kernel
from .traffic import FabricDriver

_rank_and_lane = attrgetter("number", "lane")


class ComputeStarter:
    """Starts the computes of all ranks in an instant, once every task has issued its operations of that instant.

    Trio runs the tasks of an instant in any order. So streams start in the order of ranks, and the computes of several
    tasks of one rank in the order in which these tasks were started.

    Args:
        traffic: The transfers in flight, which slow computes down if the two interfere.
        costs: Prices of functions.
        conditions: Imperfections of the cluster.
        injector: Injector of faults; None: there are none.

    Attributes:
        rated: Whether some compute was priced by the peak of the device.
        alone: Whether communication never slows computes down.
    """

    traffic: FabricDriver
    kernel: Kernel
    costs: ComputeCosts
    conditions: Conditions

    def __init__(
        self, traffic: FabricDriver, costs: ComputeCosts, conditions: Conditions, injector: FaultInjector | None
    ) -> None:
        self.traffic, self.kernel, self.costs, self.conditions = traffic, traffic.kernel, costs, conditions
        self.injector = injector
        self.rated: bool = False
        self.alone: bool = traffic.fabric.interference.off
        self._waiting: list[SimulatedCompute] = []

    def start_soon(self, stream: SimulatedCompute) -> None:
        """Call `stream.start` in this instant, when all tasks are blocked."""
        if not self._waiting:
            self.kernel.call_at(self.kernel.now_ns, 0, self._start_streams, order=EventOrder.COMPUTE)
        self._waiting.append(stream)

    def _start_streams(self) -> None:
        """Call `start` on the streams that wait, in the order of ranks and names, not of the tasks' calls."""
        streams, self._waiting = self._waiting, []
        streams.sort(key=_rank_and_lane)
        for stream in streams:
            stream.start()


class SimulatedCompute(ComputeStream):
    """A rank's compute stream in virtual time: a function runs when it starts, and its future ends after its cost.

    Args:
        context: State that all operations of the rank share.
        starts: Starts the computes of all ranks.
        lane: Name of the stream in timelines.

    Attributes:
        number: Number of the rank.
    """

    number: int
    priced = True

    def __init__(self, context: RankContext, starts: ComputeStarter, lane: str) -> None:
        super().__init__(context, lane)
        self.number, self._starts, self._kernel = context.rank, starts, starts.kernel
        self._computes = 0
        self._jitter = starts.conditions.jitter_of(context.rank)
        # Computes that were issued in this instant, each with the name of the task that issued it (see `TaskNames`).
        self._issued_now: list[tuple[tuple[int, ...], ComputeFuture[object]]] = []
        self._queue: deque[ComputeFuture[object]] = deque()
        self._busy = self._start_pending = self._stopped = False

    def price(
        self, name: str, *, seconds: float | None, flops: float | None, bytes_moved: float | None
    ) -> tuple[int, str] | None:
        """Return the time of a function in nanoseconds, and its `ComputeClass`; see `ComputeCosts.duration_ns`.

        The result is never None, which would mean that the time is measured. Sets `rated` if the time comes from the
        device's peak.
        """
        cost_ns, limit = self._starts.costs.duration_ns(name, seconds=seconds, flops=flops, bytes_moved=bytes_moved)
        # Traces say that the peak was used, because it may be for another dtype than that of the functions.
        self._starts.rated = self._starts.rated or (bool(flops) and limit != "seconds")
        return cost_ns, limit

    def submit(self, operation: ComputeFuture[object]) -> None:
        """Queue a function; it starts at the end of this instant at the earliest."""
        self._issued_now.append((self._kernel.task_names.current_name(), operation))
        if not self._start_pending:
            self._start_pending = True
            self._starts.start_soon(self)

    def start(self) -> None:
        """Queue the computes that were issued in this instant, and start the first if the stream is idle."""
        self._start_pending = False
        if len(self._issued_now) > 1:
            self._issued_now.sort(key=itemgetter(0))
        self._queue.extend(operation for _, operation in self._issued_now)
        self._issued_now.clear()
        if not self._busy:
            self._start_next_function()

    def stop(self) -> None:
        """Start no further functions."""
        self._stopped = True

    async def wait_ended(self) -> None:
        """Return at once: no thread has to end (method of the interface)."""

    def _start_next_function(self) -> None:
        """Start the first queued function, or arrange that it starts when its arguments exist."""
        self._busy = False
        while self._queue and not self._stopped:
            operation = self._queue[0]
            if operation.done:  # cancelled before its start
                self._queue.popleft()
                continue
            self._busy = True
            pending = next((future for future in operation.awaited if not future.done), None)
            if pending is not None:
                if operation.state is QUEUED:
                    operation._enter(BLOCKED)
                # Look again when the argument exists, and when the compute itself ends, which is by a cancellation.
                for end in (pending, operation):
                    call_when_done(end, partial(self.context.call_in_turn, partial(self._start_if_first, operation)))
            else:
                self._run_function(self._queue.popleft())
            del operation, pending  # as in `_run_function`
            return

    def _start_if_first(self, operation: ComputeFuture[object]) -> None:
        """Start the first function, if that is still `operation`; it may have been started or cancelled before."""
        is_first = self._queue and self._queue[0] is operation
        del operation  # as in `_run_function`
        if is_first:
            self._start_next_function()

    def _run_function(self, operation: ComputeFuture[object]) -> None:
        """Call a function now, and end its future after its modelled time, or now if an argument has failed."""
        started_ns = self._kernel.now_ns
        args, failure = operation.resolve_arguments()
        if failure is not None:
            self._settle_and_continue(operation, None, failure)
            return
        value = None
        operation._enter(RUNNING)
        assert operation.function is not None
        assert operation.cost is not None
        try:
            value = operation.function(*args)
        except (Exception, SystemExit) as error:
            failure = operation.make_failure(error)
        cost_ns, kind = operation.cost
        on_end = partial(self._record_and_settle, operation, started_ns, value, failure)
        self._call_after_compute(
            self._time_with_faults_ns(operation, self._jitter.next_compute_ns(cost_ns)), kind, on_end
        )
        # The traceback of an error has this frame and those of the callers: it would keep itself alive.
        del operation, args, on_end, failure

    def _time_with_faults_ns(self, operation: ComputeFuture[object], cost_ns: int) -> int:
        """Return the time of a function with faults; if its rank is to die during it, schedule the death."""
        injector = self._starts.injector
        if injector is None:
            return cost_ns
        cost_ns = injector.fates.slowed_compute_ns(self.number, cost_ns, operation.step)
        fate = injector.fates.draw_next_fate(self.number, operation.step)
        cost_ns += fate.late_ns
        if fate.dies_at is not None:
            dies_ns = self._kernel.now_ns + round(fate.dies_at * cost_ns)
            self._kernel.call_at(dies_ns, self.number, partial(self._kill_rank, operation, injector))
        return cost_ns

    def _kill_rank(self, operation: ComputeFuture[object], injector: FaultInjector) -> None:
        """Kill this stream's rank during a compute; the stream starts no further functions."""
        self.stop()
        injector.kill(self.context, describe_place(operation))

    def _call_after_compute(self, duration_ns: int, kind: str, on_end: Callable[[], None]) -> None:
        """Call `on_end` after the time of a compute; if communication slows computes down, the fabric stretches it.

        `kind` is the class of the compute, which decides how much communication slows it.
        """
        if self._starts.alone:
            self._kernel.call_at(self._kernel.now_ns + duration_ns, self.number, on_end)
            return
        self._computes += 1
        traffic = self._starts.traffic
        key = ("compute", str(self.number), self.lane, self._computes)
        transfer = traffic.fabric.compute_transfer(key, kind, self.number, duration_ns)
        traffic.begin_transfer(transfer, lambda _: on_end())

    def _record_and_settle(
        self, operation: ComputeFuture[object], started_ns: int, value: object, failure: Failure | None
    ) -> None:
        """Record the span of a function, then settle its future."""
        end_ns = self._kernel.now_ns
        info = (*operation.place, operation.issued_ns, operation.step)
        self.context.record(("compute", self.lane, operation.name, started_ns, end_ns, info))
        self._settle_and_continue(operation, value, failure)

    def _settle_and_continue(self, operation: ComputeFuture[object], value: object, failure: Failure | None) -> None:
        """Settle the future of a compute that has ended, then let the stream start the next compute."""
        if operation.done:  # the world has abandoned it in the meantime
            operation.unlock_arguments(value)
        else:
            operation.settle(value, failure)
            deliver(operation)
        self.context.call_in_turn(self._start_next_function)
