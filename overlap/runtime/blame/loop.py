"""Watch of the event loop: a thread that finds the rank whose code keeps the loop busy.

A turn of the loop is the time between two of its waits for input and output. In a long turn the code of one rank keeps
all other ranks of the process from going on. A timer of the loop itself could not notice that: it stops with the loop.

The thread wakes fifty times a second, and only reads the time while all is well. In a turn that seems long it takes
samples, more often: which rank runs, at which line. Four times a second it checks how long the turn has lasted.

Long turns become spans of the timeline: `LoopTurn` records the start and the end of a turn, the thread the rank and
its line.
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
from typing import NamedTuple, TypeAlias

import trio
from trio.lowlevel import Task

from ...diagnostics import innermost_program_point, is_installed, is_of_tasks, is_ours
from ...kernel_facts import processor_wait_ns
from ...threads import read_frames, start_thread, without_garbage_collector
from ...timeline.recording import format_call_site
from ..future import Future
from ..trio_private import joins_children

#: Time for which a program may keep the loop without a report. People notice a second.
BUSY_S = 1.0
#: After each report of a line, the time that the line may keep the loop until the next report is this much longer.
_AGAIN = 10

_PERIOD_S = 0.25
#: Time between two samples of a loop on which programs run; where they run in other threads it is `_PERIOD_S`.
_SAMPLE_S = 0.02
#: A turn of this length is sampled again after as long. It is long if both samples found the same rank, and its code
#: had a processor for half of the time in between: each turn of 30 ms is found on a quiet machine, none below 8.
_LONG_S = 0.005
#: A turn in which the rank sleeps, or waits for a disk or for the interpreter's lock, is long after this much more time
#: in which the loop could run: each turn of 60 ms is found.
_BLOCKED_S = 0.025
_LOOKS_S = 0.06  # greatest age of a turn that is sampled more often: every `_LONG_S`


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyLoop:
    """A rank whose code keeps the loop."""

    rank: int  # World rank
    place: str  # Line of the code, as "file:line"
    since_ns: int  # Start of the turn of the loop, or of this rank's stretch within it


class LoopTurn(trio.abc.Instrument):
    """Instrument of Trio that records the present turn of the loop. Cost: a tenth of a microsecond for each turn.

    Args:
        record: Called with each rank that kept the loop in a long turn, and the end of its time in ns.
        report_free: Called with each reported rank once the loop is free again. Both are called on the loop's thread.
    """

    def __init__(self, record: Callable[[BusyLoop, int], None], report_free: Callable[[BusyLoop], None]) -> None:
        self.began_ns: int = perf_counter_ns()  # Start of the present turn; 0 while the loop waits
        self.samples: list[BusyLoop] = []  # Samples of a long turn, in order; the thread of the watch appends
        self.reported: dict[int, BusyLoop] = {}  # Ranks that were reported in this turn, by world rank
        self._record, self._report_free = record, report_free

    def before_io_wait(self, timeout: float) -> None:
        """Record the end of a turn. Trio calls this before the loop waits."""
        self.began_ns = 0
        if self.samples or self.reported:
            self.flush()

    def flush(self) -> None:
        """Record the ranks that kept the loop in this turn, and report that it is free again."""
        samples, self.samples = self.samples, []
        reported, self.reported = self.reported, {}
        for busy, end_ns in _busy_stretches(samples, perf_counter_ns()):
            self._record(busy, end_ns)
        for busy in reported.values():
            self._report_free(busy)

    def longest_busy_rank(self, now_ns: int) -> tuple[BusyLoop, int] | None:
        """Return the rank that has kept the loop longest in this turn, and for how many ns; None without samples."""
        times = [(busy, end_ns - busy.since_ns) for busy, end_ns in _busy_stretches(list(self.samples), now_ns)]
        return max(times, key=lambda entry: entry[1], default=None)

    def after_io_wait(self, timeout: float) -> None:
        """Record the start of a turn. Trio calls this after the loop has waited."""
        self.began_ns = perf_counter_ns()


def _busy_stretches(samples: Sequence[BusyLoop], now_ns: int) -> Iterator[tuple[BusyLoop, int]]:
    """Join successive samples of one rank of a turn; yield for each stretch the rank and the end of the stretch in ns.

    A stretch has the rank's most frequent line, begins with its first sample, and ends with the next rank's first one.
    Samples of ranks 0, 0, 1 at 10, 15 and 20 ns give rank 0 from 10 to 20, and rank 1 from 20 to `now_ns`.
    """
    for rank, group in groupby(samples, key=lambda busy: busy.rank):
        own = list(group)
        places = Counter(busy.place for busy in own)
        place = max(places, key=lambda place: places[place])
        later = (busy.since_ns for busy in samples if busy.since_ns > own[-1].since_ns)
        yield BusyLoop(rank=rank, place=place, since_ns=own[0].since_ns), next(later, now_ns)


class _FirstCheck(NamedTuple):
    """First check of a turn that seems long."""

    began_ns: int = 0  # Start of the turn
    now_ns: int = 0  # Instant of the check
    queued_ns: int = 0  # Time that the loop's thread had waited for a processor, until the check


class _FirstSample(NamedTuple):
    """The first sample of a turn that found a certain rank."""

    began_ns: int = 0  # Start of the turn
    rank: int = -1
    now_ns: int = 0  # Instant of the sample
    queued_ns: int = 0  # Time that the loop's thread had waited for a processor, until the sample
    processor_ns: int = 0  # Processor time of the loop's thread, until the sample
    since_ns: int = 0  # Start of the time in which this rank keeps the loop


class LoopWatch:
    """Watches the event loop while a ``with`` block runs. The loop's thread enters and leaves the block.

    Args:
        look: Called on the loop's thread every `period_s` seconds, such as a look for stalls.
        tasks: Returns the main task of each rank's program, by world rank.
        report: Called in the thread of the watch with the rank that has kept the loop longest, and the seconds.
        report_free: Called on the loop's thread with a reported rank, once the loop is free again.
        record: Called on the loop's thread with each rank that kept the loop in a long turn, and the end of its time.
        token: Token of the loop.
        thread: Ident of the loop's thread.
        period_s: Time between two calls of `look`.
        runs_programs: Whether the programs of ranks run on the loop, not in threads of their own.
    """

    def __init__(
        self,
        token: trio.lowlevel.TrioToken,
        thread: int,
        *,
        look: Callable[[], None],
        period_s: float,
        runs_programs: bool,
        tasks: Callable[[], Mapping[int, Task]],
        report: Callable[[BusyLoop, float], None],
        report_free: Callable[[BusyLoop], None],
        record: Callable[[BusyLoop, int], None],
    ) -> None:
        self._token, self._loop_thread, self._native_thread = token, thread, 0
        self._look, self._look_s = look, period_s
        self._sample_s = _SAMPLE_S if runs_programs else _PERIOD_S
        self._tasks, self._report = tasks, report
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch_loop, name="overlap loop watch", daemon=True)
        self._first_check = _FirstCheck()
        self._limits_s: dict[str, float] = {}  # by reported line: time for which it may keep the loop before the next
        self._turn = LoopTurn(record, report_free)
        self._first_sample = _FirstSample()

    def __enter__(self) -> None:
        self._native_thread = threading.get_native_id()
        start_thread(self._thread)
        trio.lowlevel.add_instrument(self._turn)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        trio.lowlevel.remove_instrument(self._turn)
        self._turn.flush()

    def _watch_loop(self) -> None:
        """Sample the loop, report long turns, and have the loop call `look`. The thread of the watch runs this."""
        period_s = min(_PERIOD_S, self._look_s)
        due_ns = looked_ns = perf_counter_ns()
        wait_s = usual_s = min(self._sample_s, period_s)
        with suppress(trio.RunFinishedError):
            while not self._ended.wait(wait_s):
                now_ns = perf_counter_ns()
                wait_s = _LONG_S if self._take_sample(now_ns) else usual_s
                if now_ns - due_ns >= 1e9 * period_s:
                    late = now_ns - due_ns > 2e9 * period_s
                    due_ns = now_ns
                    self._report_long_turn(now_ns, late=late)
                    if now_ns - looked_ns >= 0.9e9 * self._look_s:
                        looked_ns = now_ns
                        self._token.run_sync_soon(self._look, idempotent=True)

    def _take_sample(self, now_ns: int) -> bool:
        """In the watch's thread, sample a turn that seems long. Return whether to take the next sample soon."""
        began_ns = self._turn.began_ns
        if not began_ns or now_ns - began_ns < _LONG_S * 1e9:
            return False
        busy = self._find_running_rank(counts_our_work=False)
        if busy is not None:
            self._add_sample(busy, began_ns, now_ns)
        return now_ns - began_ns < _LOOKS_S * 1e9

    def _add_sample(self, busy: BusyLoop, began_ns: int, now_ns: int) -> None:
        """Add a sample to the present turn if it is long; remember the first sample of a rank for comparison.

        A turn is long once a second sample finds the same rank, and that rank was busy in between. If the turn that
        began at `began_ns` has ended, nothing is added.
        """
        turn = self._turn
        # the turn is known to be long: each sample counts
        if turn.samples:
            if began_ns == turn.began_ns:
                turn.samples.append(BusyLoop(rank=busy.rank, place=busy.place, since_ns=now_ns))
            return
        waited_ns, ran_ns = processor_wait_ns(self._native_thread), processor_ns(self._loop_thread)
        first = self._first_sample
        is_new_turn, is_new_rank = first.began_ns != began_ns, first.rank != busy.rank
        # the first sample that finds this rank: the rank has run since the start of the turn, or since another rank
        if is_new_turn or is_new_rank:
            since_ns = began_ns if is_new_turn else now_ns
            self._first_sample = _FirstSample(began_ns, busy.rank, now_ns, waited_ns, ran_ns, since_ns)
            return
        # the same rank again: it has computed, or it was blocked, not counting the time without a free processor
        is_running = ran_ns - first.processor_ns >= _LONG_S * 1e9 / 2
        blocked_ns = (now_ns - first.now_ns) - (waited_ns - first.queued_ns)
        is_blocked = blocked_ns >= _BLOCKED_S * 1e9
        if (is_running or is_blocked) and began_ns == turn.began_ns:
            turn.samples.append(BusyLoop(rank=busy.rank, place=busy.place, since_ns=first.since_ns))

    def _report_long_turn(self, now_ns: int, *, late: bool) -> None:
        """Report the rank that keeps the loop if the present turn has lasted for `BUSY_S` since its first check.

        A turn is the time from one scheduling of tasks to the next. If this check is `late`, the machine may be to
        blame, so that a turn without a report counts as if it began now.
        """
        turn, first = self._turn, self._first_check
        is_new_turn = turn.began_ns != first.began_ns
        if is_new_turn or (late and not turn.reported):
            self._first_check = _FirstCheck(turn.began_ns, now_ns, processor_wait_ns(self._native_thread))
            return
        busy_ns, no_turn_yet = now_ns - first.now_ns, not first.began_ns
        if no_turn_yet or busy_ns < BUSY_S * 1e9:
            return
        if not turn.reported:
            # on a crowded machine the loop may wait for a processor for seconds: that time does not count
            ran_ns = busy_ns - (processor_wait_ns(self._native_thread) - first.queued_ns)
            if ran_ns < BUSY_S * 1e9:
                return
        self._report_busiest(now_ns, busy_ns)

    def _report_busiest(self, now_ns: int, busy_ns: int) -> None:
        """Report the rank that has kept the loop longest in this turn; without samples, the rank that runs now.

        After each report of a line, the time that the line may keep the loop before the next becomes ten times as long.
        `busy_ns` is the time since the first check of the turn.
        """
        reported, longest = self._turn.reported, self._turn.longest_busy_rank(now_ns)
        busy: BusyLoop | None
        if longest is not None:
            busy, own_ns = longest
        else:  # no samples: the rank that was reported before in this turn, or the one that runs now
            busy, own_ns = next(iter(reported.values()), None) or self._find_running_rank(), busy_ns
        if busy is None:
            return
        reported[busy.rank] = busy
        if busy_ns >= 1e9 * self._limits_s.get(busy.place, BUSY_S):
            self._limits_s[busy.place] = max(_AGAIN * BUSY_S, _AGAIN * self._limits_s.get(busy.place, 0.0))
            self._report(busy, own_ns / 1e9)

    @without_garbage_collector()
    def _find_running_rank(self, *, counts_our_work: bool = True) -> BusyLoop | None:
        """Return the rank whose task runs on the event loop, with its line; None if no rank's task runs.

        With `counts_our_work`, a rank for which code of this package works, such as a copy of an array, counts, too.
        """
        running = read_frames(self._loop_thread)
        for rank, main in self._tasks().items():
            for task in tasks_of(main):
                outermost = getattr(task.coro, "cr_frame", None)
                if outermost in running:  # a coroutine that is suspended is in no thread's frames
                    inside = running[: running.index(outermost) + 1]  # the innermost frame comes first
                    points = _points(reversed(inside))
                    if not counts_our_work and is_our_work(points):
                        return None
                    return BusyLoop(rank=rank, place=program_line_of(points), since_ns=self._turn.began_ns)
        return None


def processor_ns(thread: int) -> int:
    """Return the processor time that a thread of this process has used, in ns; 0 if the system does not count it.

    `thread` is the ident of the thread, as `threading.get_ident` returns it.
    """
    with suppress(AttributeError, OSError):  # not every system has it
        return time.clock_gettime_ns(time.pthread_getcpuclockid(thread))
    return 0


Points: TypeAlias = list[tuple[CodeType, int]]
"""Code object and index of the present instruction of each frame, the outermost frame first."""

_IMPORTING = ("<frozen importlib", importlib.__file__)


def _points(frames: Iterable[FrameType]) -> Points:
    return [(frame.f_code, frame.f_lasti) for frame in frames]


def tasks_of(task: Task) -> Iterator[Task]:
    """Yield a task and all tasks below it in its nurseries."""
    yield task
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from tasks_of(child)


def program_task_lines(task: Task, rank: int) -> list[str]:
    """Return "file:line" of each task of a rank, without the tasks that wait for operations of this rank.

    A line with several tasks is returned once. A task that awaits an operation of another rank is returned with the
    operation: "train.py:8 (awaits ... of rank 1)".

    Args:
        task: Task that runs the rank's program.
        rank: World rank.
    """
    places: dict[str, None] = {}
    for child in tasks_of(task):
        with without_garbage_collector():
            frames = [frame for frame, _ in child.iter_await_frames()]
        points = _points(frames)
        awaited = next((frame.f_locals["self"] for frame in frames if frame.f_code is _AWAIT), None)
        context = getattr(awaited, "context", None)  # futures of a rank have one
        if awaited is not None and context is not None and context.rank != rank:
            places[f"{program_line_of(points)} (awaits {awaited.label} of rank {context.rank})"] = None
        elif not (child.child_nurseries and _waits_for_children(points)):  # its children stand for such a task
            places[_waiting_line(points)] = None
    return [place for place in places if place]


def has_working_thread(loop_thread: int) -> bool:
    """Whether a thread that the program has started runs code of the program: it may issue an operation at any time.

    Threads that this package or Trio has started do not count, nor threads inside a call of this package.
    """
    for ident in sys._current_frames().keys() - {loop_thread, threading.get_ident()}:
        points = _points(reversed(read_frames(ident)))
        point = innermost_program_point(points)
        if point is None or is_installed(point[0]):
            continue
        # code of this package around the program's code: it has started the thread; inside it: the thread waits there
        inner, outer = points[points.index(point) + 1 :], points[: points.index(point)]
        if not any(is_ours(code) or is_of_tasks(code) for code, _ in outer) and not any(is_ours(c) for c, _ in inner):
            return True
    return False


_AWAIT = Future.__await__.__code__


def program_line_in(error: BaseException) -> str:
    """Return the program's "file:line" that an error passed through, or "" if the program awaited an operation there.

    The line is the innermost one of the program in the traceback.
    """
    points: Points = []
    traceback = error.__traceback__
    while traceback is not None:
        points.append((traceback.tb_frame.f_code, traceback.tb_lasti))
        traceback = traceback.tb_next
    return _waiting_line(points)


def program_line_of(points: Points) -> str:
    """Return "file:line" of the innermost frame of the program, or else of the innermost frame outside this package.

    Return "" if there is neither.
    """
    point = innermost_program_point(points)
    return "" if point is None else format_call_site(*point)


def is_our_work(points: Points) -> bool:
    """Whether code of this package runs, or has imported the module whose code runs.

    Args:
        points: Code and instruction of the frames, from the outermost to the innermost.
    """
    codes = [code for code, _ in points]
    importing = next((index for index, code in enumerate(codes) if code.co_filename.startswith(_IMPORTING)), None)
    # The frame outside an import decides; without an import (None), or a frame outside it (0), the innermost frame.
    return is_ours(codes[-1] if not importing else codes[importing - 1])


def _waiting_line(points: Points) -> str:
    """Return the line at which a task waits, or "" if it waits in code of this package, such as for an operation."""
    waiting = next((code for code, _ in reversed(points) if not is_of_tasks(code)), None)
    return program_line_of(points) if waiting is not None and not is_ours(waiting) else ""


def _waits_for_children(points: Points) -> bool:
    """Whether a task has reached the end of a nursery block, where it waits for the children."""
    return any(map(joins_children, takewhile(is_of_tasks, (code for code, _ in reversed(points)))))
