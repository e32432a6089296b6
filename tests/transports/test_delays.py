"""Delays: own time of threads, and other cores for those that share theirs."""

import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from threading import get_native_id

import pytest
import trio

from transports import delays
from transports.delays import Instant, limit_own_time, read_delays
from transports.patience import Crowding, Patience, leave_core

# -- own time: wall time less the delay of the thread that has waited longest for a processor --------------------------

S = 10**9


@pytest.mark.parametrize(
    ("before", "after", "own_s"),
    [
        ({}, {}, 10),  # the system counts nothing
        ({"1": 5 * S, "2": 7 * S}, {"1": 9 * S, "2": 8 * S}, 6),
        ({"1": 5 * S}, {"1": 5 * S, "2": 3 * S}, 7),  # a thread that has started since
        ({"1": 5 * S, "2": 0}, {"2": S}, 9),  # a thread that has ended
    ],
)
def test_own_time_leaves_out_the_delay_of_the_most_delayed_thread(
    before: Mapping[str, int], after: Mapping[str, int], own_s: float
) -> None:
    assert Instant(30 * S, after).own_seconds_since(Instant(20 * S, before)) == own_s


def test_the_delay_of_the_thread_that_watches_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy host a thread that looks 50 times a second is delayed all the time, and a limit would never end."""
    monkeypatch.setattr(delays, "read_delays", lambda: {str(get_native_id()): 5 * S, "1": S})
    assert Instant.now(lambda: 7) == Instant(7, {"1": S})


def test_delays_are_the_second_field_of_each_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for thread, text in {"7": "100 2500 3\n", "8": "1 0 1\n", "9": "strange"}.items():
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    (tmp_path / "10").mkdir()  # a thread that has ended in the meantime
    monkeypatch.setattr(delays, "_THREADS", tmp_path)
    assert read_delays() == {"7": 2500, "8": 0}
    monkeypatch.setattr(delays, "_THREADS", tmp_path / "nothing")
    assert read_delays() == {}


async def test_a_limit_of_own_time_passes_when_the_process_has_had_its_time(
    monkeypatch: pytest.MonkeyPatch, autojump_clock
) -> None:
    """Of 8 s the process waits 6 for a processor: the limit of 2 s passes after 8."""
    began_s = trio.current_time()
    monkeypatch.setattr(delays, "read_delays", lambda: {"1": round(min(trio.current_time() - began_s, 6.0) * S)})
    with limit_own_time(2.0) as limit:
        await trio.sleep_forever()
    assert limit.cancelled_caught
    assert trio.current_time() - began_s == pytest.approx(8.0)
    with limit_own_time(2.0) as limit:
        await trio.sleep(1.0)
    assert not limit.cancelled_caught


# -- who shares a core with others goes on at another one, unless that does not help -----------------------------------


class Clock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.now_s, self.left_s = 0.0, list[float]()

    def __call__(self) -> float:
        return self.now_s

    def leave(self) -> bool:
        self.left_s.append(self.now_s)
        return True

    def crowded(self, crowding: Crowding, until_s: float) -> list[float]:
        """Let others run for 1 ms each ms; return when the core was left."""
        while self.now_s < until_s:
            self.now_s += 0.001
            crowding.leave_shared_core(0.001)
        return self.left_s


def test_the_thread_may_run_where_it_might_before() -> None:
    before = os.sched_getaffinity(0)
    assert leave_core() == (len(before) > 1)
    assert os.sched_getaffinity(0) == before


def test_nobody_leaves_the_only_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("there is nowhere to go"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert not leave_core()


def test_where_threads_may_not_be_moved_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert not leave_core()


def test_a_core_that_others_hardly_use_is_not_left() -> None:
    clock = Clock()
    assert not Crowding(clock.leave, clock).leave_shared_core(10e-6)
    assert clock.left_s == []


def test_a_shared_core_is_left_at_once_and_then_ever_more_rarely() -> None:
    clock = Clock()
    left_s = clock.crowded(Crowding(clock.leave, clock), 10.0)
    pauses_s = [later - sooner for sooner, later in pairwise(left_s)]
    assert left_s[0] == pytest.approx(0.001)
    assert pauses_s[:3] == pytest.approx([0.002, 0.004, 0.008], abs=0.0015)
    assert pauses_s[-1] == pytest.approx(1.0, abs=0.0015)


def test_after_a_while_alone_the_next_shared_core_is_left_at_once_again() -> None:
    clock = Clock()
    crowding = Crowding(clock.leave, clock)
    clock.crowded(crowding, 3.0)
    clock.now_s += 2.0
    clock.left_s.clear()
    crowding.leave_shared_core(0.001)
    clock.now_s += 0.0021
    crowding.leave_shared_core(0.001)
    assert len(clock.left_s) == 2


def test_patience_without_it_stays_where_it_is() -> None:
    clock = Clock()
    assert not Patience(50e-6).leave_crowded_core(1.0)
    assert Patience(50e-6, Crowding(clock.leave, clock)).leave_crowded_core(1.0)
