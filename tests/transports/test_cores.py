"""Who shares a core with others goes on at another one, unless that does not help."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest

from transports.patience import Crowding, Patience, leave_core


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
            crowding.leave_if_shared(0.001)
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
    assert not Crowding(clock.leave, clock).leave_if_shared(10e-6)
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
    crowding.leave_if_shared(0.001)
    clock.now_s += 0.0021
    crowding.leave_if_shared(0.001)
    assert len(clock.left_s) == 2


def test_patience_without_it_stays_where_it_is() -> None:
    clock = Clock()
    assert not Patience().leave_if_crowded(1.0)
    assert Patience(crowding=Crowding(clock.leave, clock)).leave_if_crowded(1.0)
