"""Hosts whose clocks differ by hours: reports, traces and saves are those of one clock."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from overlap.timeline import read_trace

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
