"""Training goes on after losses, with the weights of a run that was given the same history of members."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.faults.job import Job
from tests.survival.training import reference

PROGRAM = str(Path(__file__).with_name("training.py"))
STEPS = 200
AHEAD = 3  # issued steps that need not be applied: two by default, and the one that is printed


def history_of(output):
    """Return the members of each epoch, and the step after which it began."""
    found = re.findall(r"epoch (\d+) members \[([\d, ]+)\] step (\d+) ", output)
    lines = {int(n): (tuple(map(int, members.split(","))), int(step)) for n, members, step in found}
    return [lines[number] for number in sorted(lines)]


@pytest.mark.parametrize("options", [["--processes", "3"], ["--processes", "2", "--ranks", "4"]])
@pytest.mark.parametrize("killed", [0, 1])
def test_weights_are_those_of_the_history(tmp_path, options, killed):
    job = Job(tmp_path, "--survive", *options, program=PROGRAM, arguments=[str(STEPS)])
    try:
        job.until("step 20")
        pids = re.findall(r"\[node (\d)\] epoch 0 .* pid (\d+)", job.out)
        os.kill(int(dict(pids)[str(killed)]), signal.SIGKILL)
        assert job.end() == 0, job.err
        history = history_of(job.out)
        processes, each = int(options[1]), 2 if "--ranks" in options else 1
        assert [len(members) for members, _ in history] == [processes, processes - 1]
        assert killed not in history[1][0]
        assert 20 - AHEAD <= history[1][1] < STEPS, "no step that was applied is lost"
        members = [([m * each + i for m in world for i in range(each)], step) for world, step in history]
        digests = reference(members, STEPS)
        assert len(set(digests)) == 1
        assert job.out.count(f"digests {digests[:each]}") == processes - 1
        job.check_nothing_is_left()
    finally:
        job.kill()
