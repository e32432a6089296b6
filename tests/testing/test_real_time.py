"""The limit of real time of a test: a rank that computes for ever is ended, one that gets no processor is not."""

import faulthandler
import threading
from collections.abc import Iterator

import pytest

from overlap.cli import test as command
from overlap.testing import running, threads
from overlap.testing.running import limit_real_time
from overlap.testing.threads import RealTimeError
from transports.delays import Instant

S = 10**9


class Times:
    """A clock that the test moves, and the delay of the one thread of the process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall_ns = self.delay_ns = 0
        for module in (running, threads):
            monkeypatch.setattr(module, "Instant", self)

    def now(self) -> Instant:
        return Instant(self.wall_ns, {"1": self.delay_ns})


class Lock:
    """A lock of a rank that computes for some time, of which it waits for a processor the given share."""

    def __init__(self, times: Times, busy_s: float, delayed: float) -> None:
        self.times, self.busy_ns, self.delayed = times, round(busy_s * S), delayed

    def acquire(self, *, timeout: float) -> bool:
        passed_ns = round(timeout * S)
        if self.times.wall_ns + passed_ns >= self.busy_ns:
            return True
        self.times.wall_ns += passed_ns
        self.times.delay_ns += round(self.delayed * passed_ns)
        return False


@pytest.mark.everyday(5)
@pytest.mark.parametrize(
    ("busy_s", "delayed", "ends"),
    [(59, 0, True), (61, 0, False), (1700, 31 / 32, True), (1800, 31 / 32, False), (10**6, 0.5, False)],
)
def test_a_turn_is_limited_in_own_time(
    monkeypatch: pytest.MonkeyPatch, busy_s: float, delayed: float, *, ends: bool
) -> None:
    """Of 60 s the first six are wall time; the other 54 pass in 1728 s if 31 of 32 processes are others."""
    lock = Lock(Times(monkeypatch), busy_s, delayed)
    assert threads._acquire_within_limit(lock, 60.0) is ends  # type: ignore[arg-type]


def test_a_program_that_nothing_moves_is_ended_in_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each of the first ten looks the process has waited for a processor; from then on it has had one."""
    times, looks = Times(monkeypatch), 0

    def progress() -> int:
        nonlocal looks
        looks += 1
        times.wall_ns += S
        times.delay_ns += S if looks <= 10 else 0
        return 0

    def compute_for_ever() -> None:
        while True:
            pass

    with limit_real_time(0.001, progress), pytest.raises(RealTimeError):
        compute_for_ever()
    assert looks == 13  # 2 s and a moment later


def test_the_end_by_force_waits_longer_on_a_host_with_load(monkeypatch: pytest.MonkeyPatch) -> None:
    limits_s: list[float] = []
    loads: Iterator[float] = iter([0.5, 65.0])
    armed = threading.Event()

    def arm(seconds: float, **_: object) -> None:
        limits_s.append(seconds)
        if len(limits_s) == 2:
            armed.set()

    class Ended(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            return armed.is_set()

    monkeypatch.setattr(command, "usable_cores", lambda: {0, 1})
    monkeypatch.setattr(command.os, "getloadavg", lambda: (next(loads), 0.0, 0.0))
    monkeypatch.setattr(faulthandler, "dump_traceback_later", arm)
    monkeypatch.setattr(command.threading, "Event", Ended)
    with command._ending_if_locked(60.0):
        armed.wait()
    assert limits_s == [60.0, 32.5 * 60.0]
