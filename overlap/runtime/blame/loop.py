"""Watch of the event loop: a thread that wakes it now and then, and finds the rank that keeps it busy.

A timer of the loop itself would not do: it stands still with the loop, and on the clocks of tests time passes when
nothing moves. The thread wakes fifty times a second, and only reads an instant while all goes well; four times a second
it also asks the loop to answer. While a turn of the loop seems long it looks more often.

Long turns of the loop become spans of the timeline: `Turn` knows when a turn began and ended, and the thread which rank
runs, and where, in a turn that lasts.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import dropwhile, groupby, takewhile
from time import perf_counter_ns
from types import CodeType
from typing import TypeAlias

import outcome
import trio
from trio.lowlevel import Task

from ...diagnostics import is_ours, program_point
from ...kernel_facts import queued_ns
from ...threads import frames_of, start_thread, without_collector
from ...timeline.recording import call_site
from ..future import Future
from ..trio_private import joins_children

#: So long may a program keep the loop before that is told, and shown in the timeline. People notice a second.
BUSY_S = 1.0
#: At one place it is told again when it takes this much longer than what has been told.
_AGAIN = 10

_PERIOD_S = 0.25
_SAMPLE_S = 0.02
#: A turn that lasts so long is looked at again so much later. It is long if both looks found the same rank, whose code
#: had a processor for half of that in between: on a quiet machine each turn of 30 ms is found, and none of less than 8.
_LONG_S = 0.005
#: Where the rank sleeps, or waits for a disk or for the interpreter's lock, it is long after so much more time in which
#: the loop could run: each turn of 60 ms is found.
_BLOCKED_S = 0.025
_LOOKS_S = 0.06  # So old may a turn be that is looked at more often


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyLoop:
    """A rank that keeps the loop."""

    rank: int  # Which one
    place: str  # Where, as "file:line"
    since_ns: int  # When the turn of the loop began, or when another rank of the same turn was seen no longer


class Turn(trio.abc.Instrument):
    """Knows when the present turn of the loop began; costs a tenth of a microsecond each turn.

    Args:
        over: Takes the rank that kept the loop for a long turn, and when the turn ended; on the loop's thread.
    """

    def __init__(self, over: Callable[[BusyLoop, int], None]) -> None:
        self.began_ns = perf_counter_ns()
        self.kept: list[BusyLoop] = []  # What samples of a long turn found, in order; the watch appends, in its thread
        self._over = over

    def before_io_wait(self, timeout: float) -> None:
        """Note the end of a turn."""
        self.began_ns = 0
        if self.kept:
            self.tell()

    def tell(self) -> None:
        """Hand the ranks over that kept the loop."""
        kept, self.kept = self.kept, []
        for busy, end_ns in _stretches(kept, perf_counter_ns()):
            self._over(busy, end_ns)

    def longest(self, now_ns: int) -> tuple[BusyLoop, int] | None:
        """Return the rank that has kept the loop longest in this turn, and for how many ns; None if none was seen."""
        found = [(busy, end_ns - busy.since_ns) for busy, end_ns in _stretches(list(self.kept), now_ns)]
        return max(found, key=lambda each: each[1], default=None)

    def after_io_wait(self, timeout: float) -> None:
        """Note the begin of a turn."""
        self.began_ns = perf_counter_ns()


def _stretches(kept: Sequence[BusyLoop], now_ns: int) -> Iterator[tuple[BusyLoop, int]]:
    """Yield each rank of some samples, at the line that was seen most, and the instant when another one was seen."""
    for rank, found in groupby(kept, key=lambda busy: busy.rank):
        samples = list(found)
        places = Counter(busy.place for busy in samples)
        place = max(places, key=lambda place: places[place])
        later = (busy.since_ns for busy in kept if busy.since_ns > samples[-1].since_ns)
        yield BusyLoop(rank=rank, place=place, since_ns=samples[0].since_ns), next(later, now_ns)


class LoopWatch:
    """Watches the loop for the length of a ``with``.

    Args:
        token: Of the loop.
        thread: In which it runs.
        look: Called on the loop's thread, every so often.
        period_s: How often.
        tasks: Returns the task of each rank's program.
        told: Takes the rank that has kept the loop longest, and for how many seconds; in the thread of the watch.
        over: Takes a rank of which that was told, once the loop is free again; on the loop's thread.
        kept: Takes the rank that kept the loop for a long turn, and when the turn ended; on the loop's thread.
    """

    def __init__(
        self,
        token: trio.lowlevel.TrioToken,
        thread: int,
        *,
        look: Callable[[], None],
        period_s: float,
        tasks: Callable[[], Mapping[int, Task]],
        told: Callable[[BusyLoop, float], None],
        over: Callable[[BusyLoop], None],
        kept: Callable[[BusyLoop, int], None],
    ) -> None:
        self._token, self._loop_thread, self._native_thread = token, thread, 0
        self._look, self._look_s = look, period_s
        self._tasks, self._tell, self._tell_over = tasks, told, over
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="overlap loop watch", daemon=True)
        self._asked_ns = self._looked_ns = 0
        self._queued_ns = 0  # when it was asked: see `queued_ns`
        self._answered = True  # the loop has run since it was asked
        self._busy: dict[int, BusyLoop] = {}  # by rank: what was found since the loop answered
        self._limits_s: dict[str, float] = {}  # by place: from when on it is told
        self._turn = Turn(kept)
        self._seen = (0, -1)  # when the turn began that samples found last, and which rank
        # Of the first of these samples: its instant, `queued_ns`, `processor_ns`, and since when the rank kept the loop
        self._first = (0, 0, 0, 0)

    def __enter__(self) -> None:
        self._native_thread = threading.get_native_id()
        start_thread(self._thread)
        trio.lowlevel.add_instrument(self._turn)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        trio.lowlevel.remove_instrument(self._turn)
        self._turn.tell()

    def _run(self) -> None:
        period_s = min(_PERIOD_S, self._look_s)
        due_ns = perf_counter_ns()
        wait_s = usual_s = min(_SAMPLE_S, period_s)
        with suppress(trio.RunFinishedError):
            while not self._ended.wait(wait_s):
                now_ns = perf_counter_ns()
                wait_s = _LONG_S if self._sample(now_ns) else usual_s
                if now_ns - due_ns >= 1e9 * period_s:
                    late = now_ns - due_ns > 2e9 * period_s
                    due_ns = now_ns
                    self._check(now_ns, late=late)

    def _sample(self, now_ns: int) -> bool:
        """Find the rank that keeps the loop if an earlier sample found it in the same turn; in the watch's thread.

        Returns:
            Whether to look again soon.
        """
        began_ns = self._turn.began_ns
        if not began_ns or now_ns - began_ns < _LONG_S * 1e9:
            return False
        busy = self._find(working_for=False)
        if busy is not None:
            self._compare(busy, began_ns, now_ns)
        return now_ns - began_ns < _LOOKS_S * 1e9

    def _compare(self, busy: BusyLoop, began_ns: int, now_ns: int) -> None:
        """Keep a sample if the rank has been busy since it was found first, or if the turn is known to be long."""
        turn = self._turn
        if turn.kept:
            if began_ns == turn.began_ns:
                turn.kept.append(BusyLoop(rank=busy.rank, place=busy.place, since_ns=now_ns))
            return
        waited_ns, ran_ns = queued_ns(self._native_thread), processor_ns(self._loop_thread)
        if self._seen != (began_ns, busy.rank):
            since_ns = now_ns if self._seen[0] == began_ns else began_ns
            self._seen, self._first = (began_ns, busy.rank), (now_ns, waited_ns, ran_ns, since_ns)
            return
        first_ns, before_ns, had_ns, since_ns = self._first
        own_ns = now_ns - first_ns - (waited_ns - before_ns)
        if (ran_ns - had_ns >= _LONG_S * 1e9 / 2 or own_ns >= _BLOCKED_S * 1e9) and began_ns == turn.began_ns:
            turn.kept.append(BusyLoop(rank=busy.rank, place=busy.place, since_ns=since_ns))

    def _check(self, now_ns: int, *, late: bool) -> None:
        if self._answered:
            self._answered = False
            self._ask_again(now_ns)
            self._token.run_sync_soon(self._answer)
        elif late and not self._busy:
            self._ask_again(now_ns)  # this thread did not run either: the loop need not be to blame
        elif now_ns - self._asked_ns >= BUSY_S * 1e9 and (self._busy or self._own_ns(now_ns) >= BUSY_S * 1e9):
            self._note_busy(now_ns)

    def _ask_again(self, now_ns: int) -> None:
        self._asked_ns, self._queued_ns = now_ns, queued_ns(self._native_thread)

    def _own_ns(self, now_ns: int) -> int:
        """Return for how much of the time the loop could have run: on a crowded machine nobody's does for seconds."""
        return now_ns - self._asked_ns - (queued_ns(self._native_thread) - self._queued_ns)

    def _note_busy(self, now_ns: int) -> None:
        """Tell of the rank that samples of this turn saw longest; of the one that runs now if they saw none."""
        kept_ns = now_ns - self._asked_ns
        seen = self._turn.longest(now_ns)
        busy, own_ns = seen or (next(iter(self._busy.values()), None) or self._find(), kept_ns)
        if busy is None:
            return
        self._busy[busy.rank] = busy
        if kept_ns >= 1e9 * self._limits_s.get(busy.place, BUSY_S):
            self._limits_s[busy.place] = max(_AGAIN * BUSY_S, _AGAIN * self._limits_s.get(busy.place, 0.0))
            self._tell(busy, own_ns / 1e9)

    def _find(self, *, working_for: bool = True) -> BusyLoop | None:
        """Find the rank that has the running task, and its place; None if no rank has it.

        Args:
            working_for: Whether work of ours that the rank has called counts, such as a copy.
        """
        with without_collector():
            return self._found(working_for=working_for)

    def _found(self, *, working_for: bool) -> BusyLoop | None:
        running = frames_of(self._loop_thread)
        for rank, main in self._tasks().items():
            for task in tasks_of(main):
                outermost = getattr(task.coro, "cr_frame", None)
                if outermost in running:
                    inside = running[: running.index(outermost) + 1]
                    points = [(each.f_code, each.f_lasti) for each in reversed(inside)]
                    if not working_for and is_our_work(points):
                        return None
                    return BusyLoop(rank=rank, place=place_of(points), since_ns=self._asked_ns)
        return None

    def _answer(self) -> None:
        """Let the thread know that the loop runs; on the loop's thread."""
        now_ns = perf_counter_ns()
        found, self._busy = self._busy, {}
        for busy in found.values():
            self._tell_over(busy)
        self._answered = True
        if now_ns - self._looked_ns >= 0.9e9 * self._look_s:
            self._looked_ns = now_ns
            self._look()


def processor_ns(thread: int) -> int:
    """Return how long a thread of this process, which has not ended, has had a processor; 0 if nobody counts.

    Args:
        thread: As Python numbers it.
    """
    with suppress(AttributeError, OSError):  # not every system has it
        return time.clock_gettime_ns(time.pthread_getcpuclockid(thread))
    return 0


Points: TypeAlias = list[tuple[CodeType, int]]
"""Code and instruction of some frames, outermost first."""

# Frames of the libraries in which tasks wait: trio, and outcome.
_TRIO = tuple(os.path.join(os.path.dirname(str(module.__file__)), "") for module in (trio, outcome))
_IMPORTING = ("<frozen importlib", importlib.__file__)


def tasks_of(task: Task) -> Iterator[Task]:
    """Yield a task, those in its nurseries, those in theirs, and so on."""
    yield task
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from tasks_of(child)


def program_places(task: Task, rank: int) -> list[str]:
    """Return "file:line" of each task of a rank that waits for something other than its operations; each place once.

    Of one that awaits what another rank has issued, that is told, too.

    Args:
        task: The one in which the rank's program runs.
        rank: Which rank.
    """
    places: dict[str, None] = {}
    for each in tasks_of(task):
        with without_collector():
            frames = [frame for frame, _ in each.iter_await_frames()]
        points = [(frame.f_code, frame.f_lasti) for frame in frames]
        awaited = next((frame.f_locals["self"] for frame in frames if frame.f_code is _AWAIT), None)
        context = getattr(awaited, "context", None)  # those have it that a rank issues
        if awaited is not None and context is not None and context.rank != rank:
            places[f"{place_of(points)} (awaits {awaited.label} of rank {context.rank})"] = None
        elif not (each.child_nurseries and _joins(points)):  # else its children stand for it
            places[_outside(points)] = None
    return [place for place in places if place]


_AWAIT = Future.__await__.__code__


def place_in(error: BaseException) -> str:
    """Return "file:line" where the program was when an error reached it; empty if it waited for our operations."""
    points: Points = []
    traceback = error.__traceback__
    while traceback is not None:
        points.append((traceback.tb_frame.f_code, traceback.tb_lasti))
        traceback = traceback.tb_next
    return _outside(points)


def place_of(points: Points) -> str:
    """Return "file:line" of the innermost of them that is the program's, or at least not ours; empty if none is."""
    point = program_point(points)
    return "" if point is None else call_site(*point)


def is_our_work(points: Points) -> bool:
    """Whether code of ours runs, or imports a module: frames of what is imported then are not the program's."""
    codes = [code for code, _ in points]
    importing = next((index for index, code in enumerate(codes) if code.co_filename.startswith(_IMPORTING)), None)
    return is_ours(codes[-1] if not importing else codes[importing - 1])


def _outside(points: Points) -> str:
    """Return where a task is that waits for something; empty if that is one of our operations."""
    waits = list(dropwhile(_is_trio, reversed(points)))
    return place_of(points) if waits and not is_ours(waits[0][0]) else ""


def _joins(points: Points) -> bool:
    return any(joins_children(point[0]) for point in takewhile(_is_trio, reversed(points)))


def _is_trio(point: tuple[CodeType, int]) -> bool:
    return point[0].co_filename.startswith(_TRIO)
