"""Programs that keep the event loop busy, and functions that keep the end waiting: who and where is told."""

import dataclasses
import importlib
import re
import sys
import threading
import typing
from collections.abc import Awaitable, Callable
from time import perf_counter_ns
from types import CodeType
from unittest.mock import Mock, call

import pytest
import trio

import overlap
from overlap.config import overriding_config
from overlap.diagnostics import error_place
from overlap.runtime.blame import loop as loop_watch
from overlap.runtime.blame import reports as world_member
from overlap.runtime.blame import reports as world_watch
from overlap.timeline import Timeline, read_trace, write_trace
from overlap.timeline.span import Span

from .worlds import TIMEOUT_S, failure_of

R = overlap.Rank
HERE = "tests/runtime/test_busy_loop.py"


class Told:
    """What worlds tell the user, and whether they have told anything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self.any = threading.Event()
        for module in (world_member, world_watch):
            monkeypatch.setattr(module, "notify", self._take)
        monkeypatch.setattr(loop_watch, "BUSY_S", 0.1)

    def _take(self, line: str) -> None:
        self.lines.append(re.sub(r"for [\d.]+ m?s at", "for N s at", line))
        self.any.set()


def timeline_of(main: Callable[[R], Awaitable[object]], ranks: int) -> Timeline:
    seen: list[Timeline] = []
    with overriding_config(watcher=seen.append):
        overlap.run(main, ranks=ranks, timeout_s=TIMEOUT_S)
    return seen[0]


def programs(timeline: Timeline) -> list[Span]:
    return [span for span in timeline.spans if span.kind == "program"]


def test_who_keeps_the_loop_busy_is_told_with_its_line(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    told = Told(monkeypatch)

    async def main(rank: R) -> None:
        await rank.barrier()
        if rank.rank == 1:
            assert told.any.wait(TIMEOUT_S)
        await rank.barrier()

    timeline = timeline_of(main, 2)
    at = f"{HERE}:{main.__code__.co_firstlineno + 3}"
    assert told.lines == [
        f"rank 1 has kept the event loop busy for N s at {at}; the other ranks of this process wait; "
        "rank.compute or trio.to_thread would take that work off the loop; awaited at once, it still makes the others "
        "wait at their next operation: issue it early and await it late, or start it in a nursery"
    ]
    spans = programs(timeline)
    assert {(span.rank, span.lane, span.name) for span in spans} == {(1, "program", at), (0, "loop", at)}
    assert len({(span.start_ns, span.end_ns) for span in spans}) == 1  # one turn of the loop, on both ranks
    assert spans[0].duration_ns >= 100_000_000
    write_trace(timeline, f"{tmp_path}/run.json")
    assert programs(read_trace(f"{tmp_path}/run.json")) == spans


def test_a_loop_that_gets_no_processor_is_not_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    waited: list[int] = []

    def queued_ns(thread: int) -> int:
        assert thread == threading.main_thread().native_id
        waited.append(perf_counter_ns())
        return waited[-1]

    monkeypatch.setattr(loop_watch, "processor_wait_ns", queued_ns)

    async def main(rank: R) -> None:
        seen = len(waited)
        while len(waited) < seen + 3 and not told.any.wait(0.01):  # each look but the first is at a busy loop
            pass

    assert programs(timeline_of(main, 1)) == []
    assert told.lines == []


def test_tasks_of_a_program_are_found_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)

    async def task() -> None:
        assert told.any.wait(TIMEOUT_S)

    async def main(rank: R) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(task)

    timeline = timeline_of(main, 1)
    at = f"{HERE}:{task.__code__.co_firstlineno + 1}"
    assert told.lines == [
        f"rank 0 has kept the event loop busy for N s at {at}; nothing else of it goes on; "
        "rank.compute or trio.to_thread would take that work off the loop; awaited at once, it still makes the others "
        "wait at their next operation: issue it early and await it late, or start it in a nursery"
    ]
    assert [(span.rank, span.name) for span in programs(timeline)] == [(0, at)]


def watching(
    told: list[float], named: list[tuple[int, str]] | None = None, *, runs_programs: bool = True
) -> loop_watch.LoopWatch:
    """Make a watch of this task that has not started; `told` takes times, `named` ranks and their places or "over"."""
    noted: list[tuple[int, str]] = [] if named is None else named

    def tell(busy: loop_watch.BusyLoop, seconds: float) -> None:
        told.append(seconds)
        noted.append((busy.rank, busy.place))

    return loop_watch.LoopWatch(
        trio.lowlevel.current_trio_token(),
        threading.get_ident(),
        look=lambda: None,
        period_s=1.0,
        runs_programs=runs_programs,
        tasks=lambda: {0: trio.lowlevel.current_task()},
        report=tell,
        report_free=lambda busy: noted.append((busy.rank, "over")),
        record=lambda busy, now_ns: None,
    )


@pytest.mark.parametrize(
    ("checks", "told"),
    [
        pytest.param([(5, 0, 0), (1004, 0, 0), (1005, 7, 0), (1011, 7, 0), (1012, 7, 0)], [1.007], id="own time"),
        pytest.param([(0, 0, 0), (30_000, 0, 1), (30_900, 0, 0), (31_000, 0, 0)], [1.0], id="the watch did not run"),
    ],
)
async def test_a_loop_is_busy_in_a_turn_of_a_second_of_its_own(
    monkeypatch: pytest.MonkeyPatch, checks: list[tuple[int, int, int]], told: list[float]
) -> None:
    """Each check: its time, how long the loop has waited for a processor, and whether the watch was late."""
    seen: list[float] = []
    watch = watching(seen)
    watch._native_thread, watch._turn.began_ns = threading.get_native_id(), 1
    for at, waited, late in checks:
        monkeypatch.setattr(loop_watch, "processor_wait_ns", lambda thread, ms=waited: ms * MS)
        watch._report_long_turn(at * MS, late=bool(late))
    assert seen == told


async def test_a_loop_that_takes_turns_is_not_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    watch = watching(told)
    watch._native_thread = threading.get_native_id()
    for at_ms in range(0, 5000, 250):
        watch._turn.began_ns = at_ms % 500 and at_ms * MS  # it waits, or has begun a turn
        watch._report_long_turn(at_ms * MS, late=False)
    assert told == []


async def test_the_loop_is_checked_four_times_a_second_and_not_at_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that the waits of the watch move; the last wait but one is long, because the watch did not run."""
    now_ns, asked = 0, list[tuple[int, bool]]()

    class Ended(threading.Event):
        waits = 0

        def wait(self, timeout: float | None = None) -> bool:
            nonlocal now_ns
            assert timeout is not None
            self.waits += 1
            now_ns += 600 * MS if self.waits == 40 else round(timeout * 1e9)
            return self.waits > 41

    watch = watching([])
    monkeypatch.setattr(loop_watch, "perf_counter_ns", lambda: now_ns)
    monkeypatch.setattr(watch, "_ended", Ended())
    monkeypatch.setattr(watch, "_report_long_turn", lambda now_ns, *, late: asked.append((now_ns // MS, late)))
    watch._watch_loop()
    assert asked == [(260, False), (520, False), (780, False), (1380, True)]


@pytest.mark.parametrize(("runs_programs", "pause_s"), [(True, 0.02), (False, 0.25)])
async def test_a_loop_is_sampled_often_only_if_programs_run_on_it(runs_programs: bool, pause_s: float) -> None:
    watch, ended = watching([], runs_programs=runs_programs), Mock()
    ended.wait.side_effect = [False, False, True]
    watch._ended = ended
    watch._watch_loop()
    assert ended.wait.call_args_list == 3 * [call(pause_s)]


async def test_a_place_is_told_once_until_it_takes_ten_times_as_long() -> None:
    told: list[float] = []
    watch = watching(told)
    for seconds in (1.0, 1.25, 3.0, 9.9, 10.0, 10.25, 60.0, 100.0, 100.25):
        watch._report_busiest(0, round(seconds * 1e9))
    assert told == [1.0, 10.0, 100.0]


async def test_the_rank_that_kept_a_turn_longest_is_named_with_its_own_line_and_time() -> None:
    """A look at the end of the second would find rank 2, which has only begun."""
    told: list[float] = []
    named: list[tuple[int, str]] = []
    seen = [(0, 46, 0), (0, 48, 100), (0, 48, 200), (1, 46, 400), (1, 48, 800), (1, 48, 900), (2, 46, 1000)]
    watch = watching(told, named)
    watch._turn.samples += [
        loop_watch.BusyLoop(rank=rank, place=f"train.py:{line}", since_ns=at_ms * 10**6) for rank, line, at_ms in seen
    ]
    watch._report_busiest(1100 * 10**6, 1100 * 10**6)
    watch._turn.flush()
    assert told == [0.6]
    assert named == [(1, "train.py:48"), (1, "over")]


MS = 10**6


@pytest.mark.parametrize(
    ("looks", "kept"),
    [
        pytest.param([(4, 0, 0, 1), (6, 0, 0, 1), (11, 0, 5, 1)], [(1, 0)], id="a rank that computes"),
        pytest.param([(6, 0, 0, 1), (11, 0, 1, 1), (16, 0, 2, 1)], [], id="one that waits for the interpreter"),
        pytest.param([(6, 0, 0, 1), (40, 33, 1, 1), (90, 83, 2, 1)], [], id="one without a processor"),
        pytest.param([(6, 0, 0, 1), (30, 0, 0, 1), (31, 0, 0, 1)], [(1, 0)], id="one that sleeps"),
        pytest.param([(6, 0, 0, 1), (11, 0, 5, 2), (16, 0, 10, 3)], [], id="ranks that each do little"),
        pytest.param(
            [(6, 0, 0, 1), (11, 0, 5, 1), (16, 0, 10, 2), (21, 0, 15, 3)],
            [(1, 0), (2, 16), (3, 21)], id="others after it",
        ),
        pytest.param([(6, 0, 0, 1), (11, 0, 5, 2), (16, 0, 10, 2)], [(2, 11)], id="one after another that did little"),
    ],
)  # fmt: skip
async def test_looks_at_a_turn_find_the_rank_that_keeps_it(
    monkeypatch: pytest.MonkeyPatch, looks: list[tuple[int, int, int, int]], kept: list[tuple[int, int]]
) -> None:
    """Each look: when it is, how long the loop has waited for a processor and had one, and the rank that it finds."""
    began_ns = 10**9
    found: list[tuple[int, int]] = []
    watch = watching([])
    watch._turn.began_ns = began_ns
    for at, waited, ran, rank in looks:
        busy = loop_watch.BusyLoop(rank=rank, place="train.py:4", since_ns=0)
        monkeypatch.setattr(loop_watch, "processor_wait_ns", lambda thread, ms=waited: ms * MS)
        monkeypatch.setattr(loop_watch, "processor_ns", lambda thread, ms=ran: ms * MS)
        monkeypatch.setattr(watch, "_find_running_rank", lambda *, counts_our_work, busy=busy: busy)
        watch._take_sample(began_ns + at * MS)
    found.extend((busy.rank, (busy.since_ns - began_ns) // MS) for busy in watch._turn.samples)
    assert found == kept


def test_the_end_says_which_function_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure, as after a time-out or Ctrl-C."""
    told = Told(monkeypatch)
    begun = threading.Event()

    def tokenise() -> None:
        begun.set()
        assert told.any.wait(TIMEOUT_S)

    async def main(rank: R) -> None:
        if rank.rank == 0:
            await rank.compute(tokenise)
        await trio.to_thread.run_sync(begun.wait)
        raise ValueError("on purpose")

    monkeypatch.setattr(world_member, "_SOON_S", 0.01)
    failure = failure_of(overlap.run, main, ranks=2)
    assert failure.rank == 1
    at = f"{HERE}:{main.__code__.co_firstlineno + 2}"
    assert told.lines == [
        f"waiting for compute 'tokenise' ({at}) of rank 0 to return: a function cannot be interrupted"
    ]


def test_functions_that_return_soon_are_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)

    async def main(rank: R) -> None:
        rank.compute(int)

    overlap.run(main, ranks=2)
    assert told.lines == []


def frames() -> list[tuple[CodeType, int]]:
    """Return code and instruction of all frames below this one, outermost first."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found[::-1]


def test_code_made_from_text_is_told_by_the_line_that_runs_it() -> None:
    points: list[tuple[CodeType, int]] = eval("frames()")
    assert points[-1][0].co_filename == "<string>"
    line = sys._getframe().f_lineno - 2
    assert loop_watch.program_line_of(points) == f"{HERE}:{line}"
    assert loop_watch.program_line_of(points[-1:]) == "<string>:1"  # of `python -c`
    typed = compile("1", "<stdin>", "exec")
    assert loop_watch.program_line_of([*points, (typed, 0)]).startswith("<stdin>:")
    with pytest.raises(ZeroDivisionError) as caught:
        exec("1 / 0")
    assert error_place(caught.value) == f" at test_busy_loop.py:{sys._getframe().f_lineno - 1}"


def test_modules_that_the_package_imports_are_not_the_programs_work() -> None:
    def points(*files: str) -> list[tuple[CodeType, int]]:
        return [(compile("0", file, "exec"), 0) for file in files]

    ours, imports = loop_watch.__file__, "<frozen importlib._bootstrap>"
    assert loop_watch.is_our_work(points("train.py", ours))
    assert loop_watch.is_our_work(points(ours, imports, ours, dataclasses.__file__, "<string>"))
    assert loop_watch.is_our_work(points("train.py", ours, importlib.__file__, imports, typing.__file__))
    assert not loop_watch.is_our_work(points(ours, "train.py"))
    assert not loop_watch.is_our_work(points(ours, "train.py", imports, ours, imports, typing.__file__))
    assert not loop_watch.is_our_work(points(ours, "<string>"))  # of `python -c`
