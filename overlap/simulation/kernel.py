"""Kernel of virtual time: it waits until every task is blocked, then jumps to the next instant with an event.

Within an instant, events come in the order of `EventOrder`, then of ranks, then of their creation. Events of one kind
come only once all tasks that the previous kind has woken are blocked again. Trio may run a batch of tasks in either
direction, so tasks of different ranks must not race within an instant: events that depend on several ranks belong in
`EventOrder.RATES`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from enum import IntEnum
from heapq import heappop, heappush
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

import trio
from trio.lowlevel import Abort, Task, current_task, reschedule, wait_task_rescheduled

from ..errors import OverlapError, UsageError
from ..runtime.interpreter import collection_interval
from ..runtime.interrupts import deferring_interrupts
from .clock import VirtualClock

if TYPE_CHECKING:
    import trio.testing

T = TypeVar("T")


class EventOrder(IntEnum):
    """Order of events within an instant. Trio's deadlines come together with the first batch of events."""

    TRANSFER = 0
    """Communication ends."""
    COMPUTE = 1
    """Computes end."""
    WAKE = 2
    """Tasks that slept wake up."""
    RATES = 3
    """All tasks are blocked; operations that ranks have issued together in this instant start."""


_ORDERS, _WAKE_ORDER = len(EventOrder), int(EventOrder.WAKE)
# New objects between two garbage collections: a few hundred for each of a thousand ranks. With fewer, they took a fifth
# of the time.
_OBJECTS_BETWEEN_COLLECTIONS = 200_000


class Timer:
    """An event at an instant: a callback, or the end of a task's sleep.

    Args:
        rank: Rank of the event, by which events of an instant are ordered.
        callback: The function to call; None if a task sleeps.
        task: The task that sleeps; None for a callback. If both are None, the event is cancelled.
    """

    __slots__ = ("callback", "rank", "task")

    rank: int
    callback: Callable[[], object] | None
    task: Task | None

    def __init__(self, rank: int, callback: Callable[[], object] | None, task: Task | None = None) -> None:
        self.rank, self.callback, self.task = rank, callback, task

    def cancel(self) -> None:
        """Cancel the event; the clock skips an instant whose events are all cancelled."""
        self.callback = self.task = None

    def _abort_sleep(self, _: object) -> Abort:
        self.task = None
        return Abort.SUCCEEDED


_timer_rank = attrgetter("rank")


def _ignore_instant() -> None:
    """Do nothing: the default of callbacks."""


class Kernel:
    """Clock and events of one simulation.

    Attributes:
        clock: Trio's clock.
        task_names: Names of the tasks.
        on_stall: Function that is called when every task is blocked and nothing is due. It returns the error with which
            the run ends, or None if it has woken a task or added an event, for example by a cancellation.
        on_idle: Function that is called when every task is blocked and at most deadlines of Trio are due. It returns
            whether it has woken a task or added an event.
        on_instant: Function that is called when the clock has jumped to the instant of an event.
        late_calls: Functions that are called once every task is blocked; they must wake no task. Any thread may append.
    """

    clock: VirtualClock
    task_names: TaskNames

    def __init__(self) -> None:
        self.clock, self.task_names = VirtualClock(), TaskNames()
        self.on_stall: Callable[[], BaseException | None] | None = None
        self.on_idle: Callable[[], bool] = lambda: False
        self.on_instant: Callable[[], None] = _ignore_instant
        self.late_calls: deque[Callable[[], None]] = deque()
        self._due: dict[int, list[Timer]] = {}  # batches of events, by instant * _ORDERS + order
        self._due_keys: list[int] = []  # the keys of `_due`, as a heap
        self._limit_ns: int | None = None
        self._at_limit: Callable[[], None] = _ignore_instant
        self._stalled = False  # whether `on_stall` was called, and nothing was due since
        self._failure: BaseException | None = None  # error of the task that moves the clock

    def __repr__(self) -> str:
        return f"<Kernel at {self.now_ns} ns: {len(self._due_keys)} batches due>"

    @property
    def now_ns(self) -> int:
        """The present instant."""
        return self.clock.now_ns

    # -- events --------------------------------------------------------------------------------------------------

    def call_at(
        self, time_ns: int, rank: int, callback: Callable[[], object], *, order: EventOrder = EventOrder.COMPUTE
    ) -> Timer:
        """Call `callback` at an instant, not before the present one.

        Args:
            time_ns: The instant.
            rank: Rank of the event: events of the same instant and kind come in the order of ranks.
            callback: The function, which must not block; an exception ends the run.
            order: Kind of the event.

        Returns:
            The event, which can be cancelled.
        """
        assert time_ns >= self.clock.now_ns, f"{time_ns} ns is over, it is {self.clock.now_ns} ns"
        timer = Timer(rank, callback)
        # One number sorts events by instant, and within an instant by kind.
        self._add_timer(time_ns * _ORDERS + order, timer)
        return timer

    def _add_timer(self, key: int, timer: Timer) -> None:
        """Add an event to its batch; `key` is instant * _ORDERS + order."""
        batch = self._due.get(key)
        if batch is None:
            self._due[key] = [timer]
            heappush(self._due_keys, key)
        else:
            batch.append(timer)

    def set_limit(self, time_ns: int, callback: Callable[[], None]) -> None:
        """Call `callback` at an instant, if the program still runs then; a new limit replaces the last one.

        Args:
            time_ns: The instant.
            callback: The function.
        """
        self._limit_ns, self._at_limit = time_ns, callback

    async def sleep_until(self, time_ns: int, *, rank: int = 0) -> None:
        """Sleep until an instant; if it has passed, until the tasks of the present instant wake (`EventOrder.WAKE`).

        Args:
            time_ns: The instant.
            rank: Rank of the task, by which tasks that wake up in one instant are ordered.
        """
        # No callback: the event wakes the task.
        timer = Timer(rank, None, current_task())
        self._add_timer(max(time_ns, self.clock.now_ns) * _ORDERS + _WAKE_ORDER, timer)
        await wait_task_rescheduled(timer._abort_sleep)

    # -- life ----------------------------------------------------------------------------------------------------

    def run(self, main: Callable[..., Awaitable[T]], *args: object) -> T:
        """Run `main(*args)` in virtual time, from instant 0, and return its result.

        Raises:
            UsageError: The program waits for real input or output, or for a thread.
            OverlapError: The program is blocked forever, and `on_stall` has no other error.
        """
        import trio.testing  # loads pytest where that is installed, for longer than all of Trio takes

        return trio.run(self._run_in_loop, main, args, clock=self.clock)

    async def _run_in_loop(self, main: Callable[..., Awaitable[T]], args: tuple[object, ...]) -> T:
        """Run the program in parallel with the task that moves the clock; return its result, or raise its error."""
        with deferring_interrupts(), collection_interval.at_least(_OBJECTS_BETWEEN_COLLECTIONS):
            # With 0 tokens no task gets a thread: trio.to_thread.run_sync waits, and `_OutsideWaits` notices that.
            trio.to_thread.current_default_thread_limiter().total_tokens = 0
            trio.lowlevel.add_instrument(self.task_names)
            # `_OutsideWaits` counts the waits of Trio's own tasks for files, once they are blocked.
            await trio.testing.wait_all_tasks_blocked()
            outside = _OutsideWaits()
            results: list[T] = []
            error: Exception | None = None
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._drive_clock, outside, nursery.cancel_scope)
                try:
                    results.append(await main(*args))
                except Exception as raised:
                    error = raised
                nursery.cancel_scope.cancel()
            if self._failure is not None:
                raise self._failure from error
            if error is not None:
                raise error
            return results[0]

    async def _drive_clock(self, outside: _OutsideWaits, scope: trio.CancelScope) -> None:
        """Move the clock whenever all tasks are blocked, until cancelled; an error here ends the run."""
        try:
            while True:
                await trio.testing.wait_all_tasks_blocked()
                while self.late_calls:
                    self.late_calls.popleft()()
                outside.check_no_waits(trio.lowlevel.current_statistics())
                self._advance_until_woken()
        except Exception as error:
            self._failure = error
            scope.cancel()

    def _advance_until_woken(self) -> None:
        """Jump from instant to instant until a task can run, or a stall is handled.

        Most batches of events wake no task, and a round of Trio costs more than a jump.
        """
        while True:
            statistics = trio.lowlevel.current_statistics()
            if statistics.tasks_runnable or statistics.run_sync_soon_queue_size:
                return
            deadline_s = statistics.seconds_to_next_deadline
            deadline_ns = (
                None if deadline_s == inf else self.clock.deadline_instant_ns(self.clock.current_time() + deadline_s)
            )
            batch = self._next_batch()
            # At most Trio's deadlines are due: `on_idle` may let a task run first.
            if batch is None and self.on_idle():
                self._stalled = False
                continue
            if batch is None and deadline_ns is None:
                self._handle_stall()
                return
            self._stalled = False
            if self._limit_ns is not None and self._jump_to_limit(deadline_ns):
                return
            if self._advance_clock(batch, deadline_ns):
                return

    def _jump_to_limit(self, deadline_ns: int | None) -> bool:
        """If the limit comes before all events and deadlines, jump to it and call its callback; return whether so."""
        due_ns = [self._due_keys[0] // _ORDERS] if self._due_keys else []
        if deadline_ns is not None:
            due_ns.append(deadline_ns)
        assert self._limit_ns is not None
        if min(due_ns) < self._limit_ns:
            return False
        self.clock.jump_to(self._limit_ns)
        self._limit_ns = None
        self._at_limit()
        return True

    def _advance_clock(self, batch: list[Timer] | None, deadline_ns: int | None) -> bool:
        """Jump to the next instant and run its first batch of events; return whether Trio's deadlines are due then.

        At least one of the arguments must be given.
        """
        time_ns = deadline_ns
        if batch is not None:
            due_ns = self._due_keys[0] // _ORDERS
            if deadline_ns is None or due_ns <= deadline_ns:
                time_ns = due_ns
                self.clock.jump_to(time_ns)
                self.on_instant()
                self._run_batch(batch)
        assert time_ns is not None
        if time_ns == deadline_ns:
            self.clock.jump_to(time_ns, expire=True)
        return time_ns == deadline_ns

    def _run_batch(self, batch: list[Timer]) -> None:
        """Remove the batch that is due next; call its callbacks and wake its tasks, in the order of ranks."""
        del self._due[heappop(self._due_keys)]
        batch.sort(key=_timer_rank)
        for timer in batch:
            if timer.task is not None:
                reschedule(timer.task)
            elif timer.callback is not None:
                timer.callback()
        batch.clear()  # the traceback of an error has the frames of the callers, and would keep the operations alive
        del timer

    def _next_batch(self) -> list[Timer] | None:
        """Return the batch of events that is due next; None if there is none. Removes batches with no event left."""
        while self._due_keys:
            batch = self._due[self._due_keys[0]]
            for timer in batch:
                if timer.task is not None or timer.callback is not None:
                    return batch
            del self._due[heappop(self._due_keys)]
        return None

    def _handle_stall(self) -> None:
        """Call `on_stall`, and raise the error that it returns, if any.

        Raises `OverlapError` if there is no `on_stall`, or if nothing has been due since it was called last.
        """
        error = self.on_stall() if self.on_stall is not None and not self._stalled else _blocked_error()
        self._stalled = True
        if error is not None:
            raise error


def _blocked_error() -> OverlapError:
    return OverlapError(
        "the program is blocked for ever: every task waits, and nothing is due on the virtual clock; "
        "see what each task awaits"
    )


class _OutsideWaits:
    """Check that no task waits for files or threads, which would take real time. Make it before the program begins."""

    def __init__(self) -> None:
        self._limiter = trio.to_thread.current_default_thread_limiter()
        self._files = _count_file_waits(trio.lowlevel.current_statistics().io_statistics)

    def check_no_waits(self, statistics: trio.lowlevel.RunStatistics) -> None:
        """Refuse waits for real input and output, and for threads.

        Raises:
            UsageError: Naming the kind of wait.
        """
        if _count_file_waits(statistics.io_statistics) > self._files:
            raise _outside_wait_error("real input or output (a socket, a pipe or a process)")
        if self._limiter.statistics().tasks_waiting or trio.testing.active_thread_count():
            raise _outside_wait_error("a thread (trio.to_thread)")


def _count_file_waits(statistics: object) -> int:
    """Return the number of tasks that wait for files, given Trio's `io_statistics`: names differ by platform."""
    names = ("tasks_waiting", "tasks_waiting_read", "tasks_waiting_write", "tasks_waiting_overlapped")
    return sum(getattr(statistics, name, 0) for name in names)


def _outside_wait_error(kind: str) -> UsageError:
    """Return the error of a program that waits for something outside virtual time."""
    return UsageError(
        f"clock: the program waits for {kind}, which takes no virtual time; do that before or after the run, declare a "
        "compute with its seconds=, or run on clock='real'"
    )


class TaskNames(trio.abc.Instrument):
    """Names of tasks by their parents: the third task that task (0, 5) starts is (0, 5, 2).

    A task starts the same tasks in every run, so names are the same in every run. The order in which Trio runs tasks is
    not.
    """

    def __init__(self) -> None:
        self._names: dict[Task, tuple[int, ...]] = {}
        self._children: dict[Task, int] = {}

    def current_name(self) -> tuple[int, ...]:
        """Return the name of the running task; () for a task that is older than this object."""
        return self._names.get(current_task(), ())

    def task_spawned(self, task: Task) -> None:
        """Name a new task: the name of its parent, then its number among the parent's children (hook of Trio)."""
        parent = current_task()
        number = self._children.get(parent, 0)
        self._children[parent] = number + 1
        self._names[task] = (*self._names.get(parent, ()), number)

    def task_exited(self, task: Task) -> None:
        """Drop the name of a task that has ended (hook of Trio)."""
        self._names.pop(task, None)
        self._children.pop(task, None)
