"""Own time: wall time less the delay of the thread that has waited longest for a processor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import get_native_id

import pytest
import trio

from transports import delays
from transports.delays import Instant, limit_own_time, read_delays

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
    assert Instant(30 * S, after).since(Instant(20 * S, before)) == own_s


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
