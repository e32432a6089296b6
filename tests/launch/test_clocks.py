"""Clocks of hosts: the offset between two, and reports, traces and saves of hosts that differ by hours."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap.processes.clock import DRIFT_PPM, ClockOffset, ClockSample, CoordinatorClock
from overlap.timeline import read_trace

# -- the offset between two clocks, from what a network lets us see of it ----------------------------------------------

NANOSECONDS = st.integers(0, 10**9)


@pytest.mark.parametrize(
    ("sent_ns", "server_ns", "back_ns", "offset_ns", "error_ns"),
    [
        (0, 0, 0, 0, 0),
        (1000, 5010, 1020, 4000, 10),
        (1000, 510, 1020, -500, 10),
        (0, 7, 1, 7, 1),
        (0, 7, 3, 6, 2),
    ],
)
def test_the_middle_of_the_round_trip(
    sent_ns: int, server_ns: int, back_ns: int, offset_ns: int, error_ns: int
) -> None:
    sample = ClockSample(sent_ns=sent_ns, server_ns=server_ns, back_ns=back_ns)
    assert sample.offset_at(back_ns) == ClockOffset(offset_ns=offset_ns, error_ns=error_ns)


@given(sent_ns=NANOSECONDS, there_ns=NANOSECONDS, back_ns=NANOSECONDS, ahead_ns=st.integers(-(10**12), 10**12))
def test_the_truth_is_within_the_error_whichever_way_is_slow(
    sent_ns: int, there_ns: int, back_ns: int, ahead_ns: int
) -> None:
    answered_ns = sent_ns + there_ns
    sample = ClockSample(sent_ns=sent_ns, server_ns=answered_ns + ahead_ns, back_ns=answered_ns + back_ns)
    found = sample.offset_at(sample.back_ns)
    assert abs(found.offset_ns - ahead_ns) <= found.error_ns
    assert found.error_ns <= (there_ns + back_ns + 1) // 2


def test_the_shortest_round_trip_wins() -> None:
    clock = CoordinatorClock()
    clock.add(ClockSample(sent_ns=0, server_ns=900, back_ns=1000))  # waited on the way there
    clock.add(ClockSample(sent_ns=2000, server_ns=2505, back_ns=2010))
    clock.add(ClockSample(sent_ns=3000, server_ns=3600, back_ns=3200))
    assert clock.best_offset_at(2010) == ClockOffset(offset_ns=500, error_ns=5)


def test_an_old_sample_is_less_sure_and_gives_way() -> None:
    clock = CoordinatorClock()
    clock.add(ClockSample(sent_ns=0, server_ns=105, back_ns=10))
    assert clock.best_offset_at(10) == ClockOffset(offset_ns=100, error_ns=5)
    second_ns = 10**9
    assert clock.best_offset_at(10 + second_ns) == ClockOffset(offset_ns=100, error_ns=5 + 1000 * DRIFT_PPM)
    assert clock.best_offset_at(11) == ClockOffset(offset_ns=100, error_ns=6)  # what drifted is rounded up
    clock.add(ClockSample(sent_ns=second_ns, server_ns=second_ns + 300, back_ns=second_ns + 400))
    assert clock.best_offset_at(second_ns + 400) == ClockOffset(offset_ns=100, error_ns=200)


def test_only_the_last_samples_count() -> None:
    clock = CoordinatorClock(keep=2)
    for sent_ns, back_ns in ((0, 2), (10, 30), (40, 50)):
        clock.add(ClockSample(sent_ns=sent_ns, server_ns=0, back_ns=back_ns))
    assert len(clock) == 2
    assert clock.best_offset_at(0) == ClockOffset(offset_ns=-45, error_ns=5)


def test_without_a_sample_nothing_is_known() -> None:
    with pytest.raises(ValueError, match="empty"):
        CoordinatorClock().best_offset_at(0)


# -- hosts whose clocks differ by hours: reports, traces and saves are those of one clock ------------------------------

ROOT = Path(__file__).parents[2]
CLOCKS = """
import os, time

def shift(name, by_s):
    seconds, nanoseconds = getattr(time, name), getattr(time, f"{name}_ns")
    setattr(time, name, lambda: seconds() + by_s)
    setattr(time, f"{name}_ns", lambda: nanoseconds() + by_s * 10**9)

if os.environ.get("OVERLAP_NODE_RANK") == "1":
    shift("time", -5 * 3600)
    shift("perf_counter", 7 * 3600)
"""
PROGRAM = """
import numpy as np
import overlap
import trio

async def main(rank):
    state = await rank.state.latest()
    begin = state.step if state else 0
    with rank.step(begin):
        await rank.all_reduce(np.ones(4))
    await rank.state.save(begin + 1, {"rank": rank.rank})
    if rank.rank == 0:
        print("from step", begin)
        await trio.sleep(3.5)
    await rank.barrier()

overlap.run(main)
"""


@pytest.mark.slow
def test_waits_meetings_and_saves_are_of_one_clock(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CLOCKS)
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "overlap", "run", "--processes", "2", "--no-prefix", "--stall-warning", "1"]
    command += ["--trace", "run.json", "--state-dir", "state", "train.py"]
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    for begin in (0, 1):  # the second run goes on from the save of the first
        ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stdout) == (0, f"from step {begin}\n"), ended.stderr
    [waited_s] = re.findall(r"rank 1: barrier .* has waited (\d+) s for rank 0", ended.stderr)
    assert int(waited_s) < 60
    spans = read_trace(tmp_path / "run.json").spans
    ends = {span.rank: span for span in spans if span.name == "all_reduce"}
    assert max(span.start_ns for span in ends.values()) <= min(span.end_ns for span in ends.values())
