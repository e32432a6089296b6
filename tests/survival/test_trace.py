"""The trace of a run that survives has all of its epochs, with the ranks of the first world."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from overlap.timeline.files.reading import read_trace
from tests.faults.job import Job

PROGRAM = str(Path(__file__).with_name("looping.py"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "killed", [[0], *(pytest.param(killed, marks=pytest.mark.slow) for killed in ([1, 2], [2, 0]))], ids=str
)
def test_a_trace_has_all_epochs(tmp_path, killed):
    options = ["--survive", "--processes", "3", "--trace", "run.json"]
    job = Job(tmp_path, *options, program=PROGRAM, arguments=[str(len(killed))])
    try:
        for epoch, member in enumerate(killed):
            job.until(f"goes on {epoch}")
            os.kill(int(re.search(rf"pid (\d+) of member {member} ", job.out)[1]), signal.SIGKILL)
        assert job.end() == 0, job.err
    finally:
        job.kill()
    timeline, alive = read_trace(tmp_path / "run.json"), sorted({0, 1, 2} - set(killed))
    assert (set(alive) <= {*timeline.ranks()}, timeline.world_size) == (True, 3)  # and spans of lost processes
    worlds = {span.info.ranks for span in timeline.spans if span.info is not None}
    members = [tuple(sorted({0, 1, 2} - set(killed[:losses]))) for losses in range(len(killed) + 1)]
    assert worlds == set(members)
    for rank in alive:
        ends = [
            [span.end_ns for span in timeline.for_rank(rank) if span.info and span.info.ranks == world]
            for world in members
        ]
        begins = [
            min(span.start_ns for span in timeline.for_rank(rank) if span.info and span.info.ranks == world)
            for world in members
        ]
        assert all(max(before) < after for before, after in zip(ends, begins[1:], strict=False))
    shown = [span.name for span in timeline.spans if span.name.startswith("epoch ")]
    assert sum("lost process" in name for name in shown) >= len(alive) * len(killed)
    assert not [*tmp_path.glob("run-process*")]
