"""Watch of the event loop: a thread that wakes it now and then, and finds the rank that keeps it busy.

A timer of the loop itself would stand still with the loop, and on the clocks of tests time passes when nothing moves.
The thread wakes fifty times a second, and only reads the time while all is well; four times a second it also checks how
long the present turn of the loop has lasted. While a turn seems long it samples more often.

Long turns of the loop become spans of the timeline: `Turn` has the start and the end of a turn, and the thread the rank
and its place in a turn that lasts.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, takewhile
from time import perf_counter_ns
from types import CodeType, FrameType
from typing import TypeAlias

import trio
from trio.lowlevel import Task

from ...diagnostics import is_installed, is_of_tasks, is_ours, program_point
from ...kernel_facts import queued_ns
from ...threads import read_frames, start_thread, without_collector
from ...timeline.recording import call_site
from ..future import Future
from ..trio_private import joins_children

#: Time for which a program may keep the loop without a report or a span. People notice a second.
BUSY_S = 1.0
#: Factor on the reported time until the next report for the same place.
_AGAIN = 10

_PERIOD_S = 0.25
_SAMPLE_S = 0.02
#: A turn of this length is sampled again after as long. It is long if both samples found the same rank, and its code
#: had a processor for half of the time in between: each turn of 30 ms is found on a quiet machine, none below 8.
_LONG_S = 0.005
#: A turn in which the rank sleeps, or waits for a disk or for the interpreter's lock, is long after this much more time
#: in which the loop could run: each turn of 60 ms is found.
_BLOCKED_S = 0.025
_LOOKS_S = 0.06  # greatest age of a turn that is sampled more often


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyLoop:
    """A rank that keeps the loop."""

    rank: int  # World rank
    place: str  # Its line, as "file:line"
    since_ns: int  # Start of the turn of the loop, or of this rank's stretch within it


class Turn(trio.abc.Instrument):
    """Start time of the present turn of the loop; costs a tenth of a microsecond each turn.

    Args:
        record: Takes the rank that kept the loop for a long turn, and the end of the turn; on the loop's thread.
        report_free: Takes a reported rank once the loop is free again; on the loop's thread.
    """

    def __init__(self, record: Callable[[BusyLoop, int], None], report_free: Callable[[BusyLoop], None]) -> None:
        self.began_ns: int = perf_counter_ns()
        self.samples: list[BusyLoop] = []  # Samples of a long turn, in order; the watch appends, in its thread
        self.reported: dict[int, BusyLoop] = {}  # Ranks that were reported in this turn
        self._record, self._report_free = record, report_free

    def before_io_wait(self, timeout: float) -> None:
        """Note the end of a turn."""
        self.began_ns = 0
        if self.samples or self.reported:
            self.flush()

    def flush(self) -> None:
        """Pass the ranks on that kept the loop."""
        samples, self.samples = self.samples, []
        reported, self.reported = self.reported, {}
        for busy, end_ns in _stretches(samples, perf_counter_ns()):
            self._record(busy, end_ns)
        for busy in reported.values():
            self._report_free(busy)

    def longest(self, now_ns: int) -> tuple[BusyLoop, int] | None:
        """Return the rank that has kept the loop longest in this turn, and its time in ns; None without samples."""
        times = [(busy, end_ns - busy.since_ns) for busy, end_ns in _stretches(list(self.samples), now_ns)]
        return max(times, key=lambda entry: entry[1], default=None)

    def after_io_wait(self, timeout: float) -> None:
        """Note the begin of a turn."""
        self.began_ns = perf_counter_ns()


def _stretches(samples: Sequence[BusyLoop], now_ns: int) -> Iterator[tuple[BusyLoop, int]]:
    """Yield each rank of some samples, at its most frequent line, and the time of the next rank's first sample."""
    for rank, group in groupby(samples, key=lambda busy: busy.rank):
        own = list(group)
        places = Counter(busy.place for busy in own)
        place = max(places, key=lambda place: places[place])
        later = (busy.since_ns for busy in samples if busy.since_ns > own[-1].since_ns)
        yield BusyLoop(rank=rank, place=place, since_ns=own[0].since_ns), next(later, now_ns)


class LoopWatch:
    """Watches the loop for the length of a ``with``.

    Args:
        look: Called on the loop's thread, once in a period.
        tasks: Returns the task of each rank's program.
        report: Takes the rank that has kept the loop longest, and its time in seconds; in the thread of the watch.
        report_free: Takes a reported rank once the loop is free again; on the loop's thread.
        record: Takes the rank that kept the loop for a long turn, and the end of the turn; on the loop's thread.
        token: Of the loop.
        period_s: Time between two looks.
    """

    def __init__(
        self,
        token: trio.lowlevel.TrioToken,
        thread: int,
        *,
        look: Callable[[], None],
        period_s: float,
        tasks: Callable[[], Mapping[int, Task]],
        report: Callable[[BusyLoop, float], None],
        report_free: Callable[[BusyLoop], None],
        record: Callable[[BusyLoop, int], None],
    ) -> None:
        self._token, self._loop_thread, self._native_thread = token, thread, 0
        self._look, self._look_s = look, period_s
        self._tasks, self._report = tasks, report
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="overlap loop watch", daemon=True)
        self._watched = (0, 0, 0)  # start of the checked turn, the time of its first check, and `queued_ns` then
        self._limits_s: dict[str, float] = {}  # by place: time from which on it is reported
        self._turn = Turn(record, report_free)
        self._seen = (0, -1)  # start of the turn of the last sample, and its rank
        # First of these samples: its time, `queued_ns`, `processor_ns`, and the start of the rank's stretch.
        self._first = (0, 0, 0, 0)

    def __enter__(self) -> None:
        self._native_thread = threading.get_native_id()
        start_thread(self._thread)
        trio.lowlevel.add_instrument(self._turn)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        trio.lowlevel.remove_instrument(self._turn)
        self._turn.flush()

    def _run(self) -> None:
        """Sample the event loop, check it every period, and have it look, in the thread of the watch."""
        period_s = min(_PERIOD_S, self._look_s)
        due_ns = looked_ns = perf_counter_ns()
        wait_s = usual_s = min(_SAMPLE_S, period_s)
        with suppress(trio.RunFinishedError):
            while not self._ended.wait(wait_s):
                now_ns = perf_counter_ns()
                wait_s = _LONG_S if self._sample(now_ns) else usual_s
                if now_ns - due_ns >= 1e9 * period_s:
                    late = now_ns - due_ns > 2e9 * period_s
                    due_ns = now_ns
                    self._check_turn(now_ns, late=late)
                    if now_ns - looked_ns >= 0.9e9 * self._look_s:
                        looked_ns = now_ns
                        self._token.run_sync_soon(self._look, idempotent=True)

    def _sample(self, now_ns: int) -> bool:
        """Find the rank that keeps the loop, and note a sample if the turn is long; in the watch's thread.

        Returns:
            Whether to sample again soon.
        """
        began_ns = self._turn.began_ns
        if not began_ns or now_ns - began_ns < _LONG_S * 1e9:
            return False
        busy = self._find(working_for=False)
        if busy is not None:
            self._compare(busy, began_ns, now_ns)
        return now_ns - began_ns < _LOOKS_S * 1e9

    def _compare(self, busy: BusyLoop, began_ns: int, now_ns: int) -> None:
        """Keep a sample if the rank has been busy since its first sample, or if the turn is known to be long."""
        turn = self._turn
        if turn.samples:
            if began_ns == turn.began_ns:
                turn.samples.append(BusyLoop(rank=busy.rank, place=busy.place, since_ns=now_ns))
            return
        waited_ns, ran_ns = queued_ns(self._native_thread), processor_ns(self._loop_thread)
        if self._seen != (began_ns, busy.rank):
            since_ns = now_ns if self._seen[0] == began_ns else began_ns
            self._seen, self._first = (began_ns, busy.rank), (now_ns, waited_ns, ran_ns, since_ns)
            return
        first_ns, before_ns, had_ns, since_ns = self._first
        own_ns = now_ns - first_ns - (waited_ns - before_ns)
        if (ran_ns - had_ns >= _LONG_S * 1e9 / 2 or own_ns >= _BLOCKED_S * 1e9) and began_ns == turn.began_ns:
            turn.samples.append(BusyLoop(rank=busy.rank, place=busy.place, since_ns=since_ns))

    def _check_turn(self, now_ns: int, *, late: bool) -> None:
        """Report the rank that keeps the loop if the present turn has lasted for too long."""
        turn, (began_ns, since_ns, waited_ns) = self._turn, self._watched
        if turn.began_ns != began_ns or (late and not turn.reported):  # late: the machine may be to blame
            self._watched = turn.began_ns, now_ns, queued_ns(self._native_thread)
            return
        busy_ns = now_ns - since_ns
        if not began_ns or busy_ns < BUSY_S * 1e9:
            return
        # on a crowded machine the loop may not run for seconds
        if turn.reported or busy_ns - (queued_ns(self._native_thread) - waited_ns) >= BUSY_S * 1e9:
            self._record_busy(now_ns, busy_ns)

    def _record_busy(self, now_ns: int, busy_ns: int) -> None:
        """Report the rank with the most samples of this turn; the running one if there are none."""
        reported = self._turn.reported
        seen = self._turn.longest(now_ns)
        busy, own_ns = seen or (next(iter(reported.values()), None) or self._find(), busy_ns)
        if busy is None:
            return
        reported[busy.rank] = busy
        if busy_ns >= 1e9 * self._limits_s.get(busy.place, BUSY_S):
            self._limits_s[busy.place] = max(_AGAIN * BUSY_S, _AGAIN * self._limits_s.get(busy.place, 0.0))
            self._report(busy, own_ns / 1e9)

    @without_collector()
    def _find(self, *, working_for: bool = True) -> BusyLoop | None:
        """Find the rank that runs on the event loop, with its line; None for our own work, and without one.

        Args:
            working_for: Whether work of ours for the rank counts, such as a copy.
        """
        running = read_frames(self._loop_thread)
        for rank, main in self._tasks().items():
            for task in tasks_of(main):
                outermost = getattr(task.coro, "cr_frame", None)
                if outermost in running:
                    inside = running[: running.index(outermost) + 1]
                    points = _points(reversed(inside))
                    if not working_for and is_our_work(points):
                        return None
                    return BusyLoop(rank=rank, place=place_of(points), since_ns=self._turn.began_ns)
        return None


def processor_ns(thread: int) -> int:
    """Return the processor time of a thread of this process, by its ident; 0 if the system does not count it."""
    with suppress(AttributeError, OSError):  # not every system has it
        return time.clock_gettime_ns(time.pthread_getcpuclockid(thread))
    return 0


Points: TypeAlias = list[tuple[CodeType, int]]
"""Code and instruction of frames, outermost first."""

_IMPORTING = ("<frozen importlib", importlib.__file__)


def _points(frames: Iterable[FrameType]) -> Points:
    return [(frame.f_code, frame.f_lasti) for frame in frames]


def tasks_of(task: Task) -> Iterator[Task]:
    """Yield a task and all tasks below it in its nurseries."""
    yield task
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from tasks_of(child)


def program_places(task: Task, rank: int) -> list[str]:
    """Return "file:line" of each task of a rank that waits for anything but its own operations; each place once.

    A task that awaits another rank's operation is listed with that operation.

    Args:
        task: Task that runs the rank's program.
    """
    places: dict[str, None] = {}
    for child in tasks_of(task):
        with without_collector():
            frames = [frame for frame, _ in child.iter_await_frames()]
        points = _points(frames)
        awaited = next((frame.f_locals["self"] for frame in frames if frame.f_code is _AWAIT), None)
        context = getattr(awaited, "context", None)  # futures of a rank have one
        if awaited is not None and context is not None and context.rank != rank:
            places[f"{place_of(points)} (awaits {awaited.label} of rank {context.rank})"] = None
        elif not (child.child_nurseries and _waits_for_children(points)):  # else its children are listed
            places[_place_outside(points)] = None
    return [place for place in places if place]


def threads_at_work(loop_thread: int) -> bool:
    """Whether a thread that the program has started runs code of its own: it may issue an operation at any time.

    A thread that waits in a call of ours is none, nor is one that we or Trio have started.
    """
    for ident in sys._current_frames().keys() - {loop_thread, threading.get_ident()}:
        points = _points(reversed(read_frames(ident)))
        point = program_point(points)
        if point is None or is_installed(point[0]):
            continue
        inner, outer = points[points.index(point) + 1 :], points[: points.index(point)]
        if not any(is_ours(code) or is_of_tasks(code) for code, _ in outer) and not any(is_ours(c) for c, _ in inner):
            return True
    return False


_AWAIT = Future.__await__.__code__


def place_in(error: BaseException) -> str:
    """Return "file:line" of the program where an error reached it; empty if it waited for our operations."""
    points: Points = []
    traceback = error.__traceback__
    while traceback is not None:
        points.append((traceback.tb_frame.f_code, traceback.tb_lasti))
        traceback = traceback.tb_next
    return _place_outside(points)


def place_of(points: Points) -> str:
    """Return "file:line" of the innermost frame of the program, or at least not ours; empty without one."""
    point = program_point(points)
    return "" if point is None else call_site(*point)


def is_our_work(points: Points) -> bool:
    """Whether code of ours runs, or imports a module: frames of an import are not the program's."""
    codes = [code for code, _ in points]
    importing = next((index for index, code in enumerate(codes) if code.co_filename.startswith(_IMPORTING)), None)
    return is_ours(codes[-1] if not importing else codes[importing - 1])


def _place_outside(points: Points) -> str:
    """Return the place of a task that waits; empty if it waits for one of our operations."""
    waiting = next((code for code, _ in reversed(points) if not is_of_tasks(code)), None)
    return place_of(points) if waiting is not None and not is_ours(waiting) else ""


def _waits_for_children(points: Points) -> bool:
    """Whether a task is in the end of a nursery, where it waits for its children."""
    return any(map(joins_children, takewhile(is_of_tasks, (code for code, _ in reversed(points)))))
