"""Training with DistributedDataParallel goes on after losses, at the same step, with the weights of that history."""

import re
from ast import literal_eval
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from overlap import UsageError
from overlap.torch import next_world
from tests.faults.job import Job

PROGRAM = str(Path(__file__).with_name("ddp.py"))
EXAMPLE = Path(__file__).parents[2] / "examples" / "25_pytorch_survives.py"
STEPS = 30


@pytest.fixture
def run(tmp_path):
    jobs = []

    def begin(*options, kills):
        jobs.append(Job(tmp_path, "--survive", *options, program=PROGRAM, arguments=[kills]))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()


def weight_of(history):
    """Compute the weight that a history of (first step, ranks) leads to."""
    ends = [first for first, _ in history[1:]] + [STEPS]
    means = [
        sum(4 * (step * 7 % 11) + 12 * rank for rank in range(ranks)) / ranks
        for (first, ranks), end in zip(history, ends, strict=True)
        for step in range(first, end)
    ]
    return -sum(means)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "kills", "sizes"),
    [
        (["--processes", "2"], "5:0", [2, 1]),
        pytest.param(["--processes", "3"], "5:0,12:2", [3, 2, 1], marks=pytest.mark.slow),
        pytest.param(["--processes", "3", "--shared-memory", "0"], "10:0", [3, 2], marks=pytest.mark.slow),
        pytest.param(["--processes", "4"], "8:0,8:3", [4, 2], marks=pytest.mark.slow),
    ],
    ids=["one of two", "one after the other", "sockets", "two in one step"],
)
def test_the_others_go_on_at_the_same_step(run, options, kills, sizes):
    job = run(*options, kills=kills)
    assert job.end() == 0, job.err
    ends = re.findall(r"member (\d) history (.*) weight (.*)", job.out)
    killed = {int(kill.partition(":")[2]) for kill in kills.split(",")}
    assert {int(member) for member, _, _ in ends} == set(range(sizes[0])) - killed
    worlds = {(0, sizes[0]), *(world for _, history, _ in ends for world in literal_eval(history))}
    history = sorted(worlds, key=lambda world: (world[0], -world[1]))  # no world grows here
    first = [int(kill.partition(":")[0]) for kill in kills.split(",")]
    assert [step for step, _ in history[1:]][-1] == first[-1]
    assert {size for _, size in history} >= set(sizes)
    for _, _, weight in ends:
        assert literal_eval(weight) == [weight_of(history)] * 3
    job.check_nothing_is_left()


@pytest.mark.slow
def test_an_error_of_a_rank_is_no_loss(run):
    job = run("--processes", "2", kills="raises")
    assert job.end() == 1
    assert "own code" in job.err
    assert "going on" not in job.err
    job.check_nothing_is_left()


def test_without_a_witness_nobody_goes_on():
    with pytest.raises(UsageError, match="overlap run --survive"):
        next_world(RuntimeError("a rank is lost"), step=3)


@pytest.mark.slow
def test_the_example(tmp_path):
    """25_pytorch_survives."""
    with Job(tmp_path, "--survive", "--processes", "3", program=str(EXAMPLE)) as job:
        assert job.end() == 0, job.err
        assert job.out.count("processes (0, 2) go on after step 20") == 2
        assert len(set(re.findall(r"of 2: (.*)", job.out))) == 1
        job.check_nothing_is_left()
