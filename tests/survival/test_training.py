"""Training goes on after losses, with the weights of a run that was given the same history of members."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.faults.job import Job
from tests.survival.training import FURTHER, reference

PROGRAM = str(Path(__file__).with_name("training.py"))
LOSING = str(Path(__file__).with_name("losing.py"))
EXAMPLE = Path(__file__).parents[2] / "examples" / "28_survives.py"


def history_of(output: str, each: int = 1) -> list[tuple[list[int], int]]:
    """Return the ranks of each epoch, numbered as in the first one, and the step after which it began."""
    found = re.findall(r"epoch (\d+) members \[([\d, ]+)\] step (\d+) ", output)
    epochs = {int(n): (list(map(int, members.split(","))), int(step)) for n, members, step in found}
    worlds = [epochs[number] for number in sorted(epochs)]
    return [([member * each + i for member in members for i in range(each)], step) for members, step in worlds]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "killed"),
    [
        pytest.param(["--processes", "3"], [1, 0], marks=pytest.mark.slow),
        (["--processes", "2", "--ranks", "4"], [0]),
        pytest.param(["--processes", "3", "--shared-memory", "0"], [0, 2], marks=pytest.mark.slow),
    ],
    ids=["memory", "2x2", "sockets"],
)
def test_weights_are_those_of_the_history(tmp_path, options, killed):
    with Job(tmp_path, "--survive", *options, program=PROGRAM, arguments=[f"-{len(killed)}"]) as job:
        for epoch, member in enumerate(killed):
            job.until(f"first step of epoch {epoch}")
            os.kill(int(re.search(rf"\[process {member}\] epoch 0 .* pid (\d+)", job.out)[1]), signal.SIGKILL)
        assert job.end() == 0, job.err
        processes, each = int(options[1]), 2 if "--ranks" in options else 1
        history = history_of(job.out, each)
        assert [len(ranks) // each for ranks, _ in history] == [processes - lost for lost in range(len(killed) + 1)]
        results = reference(history, history[-1][1] + FURTHER)
        assert len(set(results)) == 1
        assert job.out.count(f"results {results[:each]}") == processes - len(killed)
        job.check_nothing_is_left()


@pytest.mark.slow
def test_a_step_that_was_not_agreed_is_not_applied_after_two_losses(tmp_path):
    os.mkfifo(tmp_path / "prepared")
    with Job(tmp_path, "--survive", "--processes", "5", program=LOSING, arguments=[str(tmp_path / "prepared")]) as job:
        assert job.end() == 0, job.err
        assert history_of(job.out) == [([0, 1, 2, 3, 4], 0), ([1, 2, 3, 4], 9), ([3, 4], 9)]
        assert job.out.count("weights [{-20.0}]") == 2
        job.check_nothing_is_left()


@pytest.mark.slow
def test_the_example(tmp_path):
    with Job(tmp_path, "--survive", "--processes", "3", program=str(EXAMPLE)) as job:
        assert job.end() == 0, job.err
        assert job.out.count("processes (1, 2) go on after step 20") == 1
        results = re.findall(r"rank ([01]) of 2: (weights [0-9a-f]{8}, \d\d\.\d% right)\n", job.out)
        assert {rank for rank, _ in results} == {"0", "1"}
        assert len({result for _, result in results}) == 1
        job.check_nothing_is_left()
