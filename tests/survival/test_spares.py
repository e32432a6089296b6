"""Spares take the places of lost processes, with the state, and the weights of a run with that history of members."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.faults.job import LIMIT_S, Job
from tests.survival.test_training import history_of
from tests.survival.training import FURTHER, reference

PROGRAM = Path(__file__).with_name("joining.py")


@pytest.fixture
def start(tmp_path):
    jobs = []

    def begin(*options, epochs, program=PROGRAM, **variables):
        arguments = [f"-{epochs}"]
        jobs.append(job := Job(tmp_path, "--survive", *options, program=str(program), arguments=arguments, **variables))
        for process in range(int(options[1])):
            job.until(f"[process {process}] first step of epoch 0")
        return job

    yield begin
    for job in jobs:
        job.kill()


def ready(job: Job, spare: int) -> Path:
    """Return the file by which a spare that waits is known, once it is there."""
    limit_s = time.monotonic() + LIMIT_S
    while not (found := [*Path("/dev/shm").glob(f"witness-{job.process.pid}-*/attempt-0/run-0/spare-{spare}")]):
        assert time.monotonic() < limit_s, f"spare {spare} is not ready: {job.err}"
    return found[0]


def kill(job, *members, number=signal.SIGKILL):
    pids = [re.search(rf"\[process {member}\] (epoch|spare) .* pid (\d+)", job.out)[2] for member in members]
    for pid in pids:
        os.kill(int(pid), number)


def check_end(job, sizes, each=1):
    """Check the sizes of all worlds, and the weights at the end; return the history."""
    assert job.end() == 0, job.err
    history = history_of(job.out, each)
    assert [len(ranks) // each for ranks, _ in history] == sizes
    results = reference(history, history[-1][1] + FURTHER)
    assert len(set(results)) == 1
    assert job.out.count(f"results {results[:each]}") == sizes[-1]
    job.check_nothing_is_left()
    assert not [*Path("/dev/shm").glob(f"witness-{job.process.pid}-*")]
    return history


@pytest.mark.parametrize(
    ("options", "losses", "sizes"),
    [
        pytest.param(["--processes", "2", "--spares", "2"], [[0], [1]], [2, 2, 2], marks=pytest.mark.slow),
        (["--processes", "2", "--ranks", "4", "--spares", "1", "--shared-memory", "0"], [[0]], [2, 2]),
        pytest.param(["--processes", "3", "--spares", "2"], [[0, 2]], [3, 3], marks=pytest.mark.slow),
        pytest.param(["--processes", "3", "--spares", "1"], [[1], [0]], [3, 3, 2], marks=pytest.mark.slow),
    ],
    ids=["all of the first", "2x2, sockets", "two in one step", "more losses than spares"],
)
def test_spares_take_the_places_of_the_lost(start, options, losses, sizes):
    job = start(*options, epochs=len(losses))
    for epoch, members in enumerate(losses):
        job.until(f"first step of epoch {epoch}")
        kill(job, *members)
    each = 2 if "--ranks" in options else 1
    check_end(job, sizes, each)
    taken = sum(map(len, losses)) - (sizes[0] - sizes[-1])
    ranks = re.findall(r"joined \((.*)\) memory {} in epoch [1-9]", job.out)
    assert [len(found.strip(",").split(", ")) for found in ranks] == [each * len(losses[0])] * taken * each
    assert all(found.strip(",").endswith(str(sizes[0] * each - 1)) for found in ranks)
    assert job.err.count("no spare is ready") == int(sizes[-1] < sizes[0])


@pytest.mark.slow
def test_a_spare_that_is_not_needed_ends_with_the_job(start):
    job = start("--processes", "2", "--spares", "1", epochs=0)
    check_end(job, [2])
    assert job.err == ""


@pytest.mark.slow
def test_a_spare_that_dies_while_it_joins_costs_an_epoch(start):
    job = start("--processes", "2", "--spares", "2", epochs=2, DIES="2")
    kill(job, 0)
    history = check_end(job, [2, 2, 2])
    assert [members for members, _ in history] == [[0, 1], [1, 2], [1, 3]]
    assert history[1][1] == history[2][1]


@pytest.mark.slow
def test_a_spare_that_dies_while_it_waits_is_not_taken(start):
    job = start("--processes", "2", "--spares", "2", epochs=1)
    kill(job, 2)
    job.until("is lost, the others go on: ")
    kill(job, 0)
    assert check_end(job, [2, 2])[1][0] == [1, 3]
    assert re.search(r"spare 2 \(pid \d+\) is lost, the others go on: exit code -9", job.err)


@pytest.mark.slow
def test_a_late_spare_joins_after_a_step(start, tmp_path):
    job = start("--processes", "2", "--spares", "1", epochs=2, READY=str(tmp_path / "ready"))
    kill(job, 0)
    job.until("first step of epoch 1")
    Path(tmp_path / "ready").touch()
    history = check_end(job, [2, 1, 2])
    assert history[2][1] > history[1][1]
    assert "no spare is ready" in job.err
    assert f"process 2 joins; going on with 2 of 1 processes after step {history[2][1]}" in job.err


@pytest.mark.slow
def test_a_spare_with_another_program_is_refused(start, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.read_text())
    job = start("--processes", "2", "--spares", "1", epochs=1, program=program, READY=str(tmp_path / "ready"))
    program.write_text(PROGRAM.read_text() + "# another\n")
    Path(tmp_path / "ready").touch()
    job.until("it cannot join them")
    digests = re.search(r"process 2 runs (\S+ \(\w+\)) with overlap \S+, the others (\S+ \(\w+\)) with", job.err)
    assert digests[1] != digests[2]
    kill(job, 1)
    assert job.end() == 0, job.err
    assert "no spare is ready" in job.err
    job.check_nothing_is_left()


@pytest.mark.slow
def test_a_state_that_nobody_has_ends_the_job_by_name(start):
    job = start("--processes", "2", "--spares", "1", epochs=2, HANGS="2")
    kill(job, 0)
    job.until("[process 2] joined (1,)")
    kill(job, 1)
    assert job.end() == 1
    lost = r"the state of step \d+ is lost: processes \[0, 1\] were lost before processes \[2\] had received it"
    assert re.search(lost, job.err)
    job.check_nothing_is_left()


@pytest.mark.slow
def test_the_loss_of_all_members_ends_the_job(start):
    job = start("--processes", "2", "--spares", "1", epochs=2)
    kill(job, 0, 1)
    assert job.end() == 128 + signal.SIGKILL
    job.check_nothing_is_left()


@pytest.mark.slow
def test_a_stopped_spare_is_not_taken_and_joins_later(start):
    """Its file is made older than it could be otherwise without a wait."""
    job = start("--processes", "2", "--spares", "1", epochs=2)
    kill(job, 2, number=signal.SIGSTOP)
    os.utime(ready(job, 2), ns=(0, 0))
    kill(job, 0)
    job.until("first step of epoch 1")
    kill(job, 2, number=signal.SIGCONT)
    assert [members for members, _ in check_end(job, [2, 1, 2])] == [[0, 1], [1], [1, 2]]


@pytest.mark.slow
def test_a_spare_that_stops_as_it_is_taken_costs_an_epoch(start):
    job = start("--processes", "2", "--spares", "1", epochs=2)
    kill(job, 2, number=signal.SIGSTOP)
    kill(job, 0)
    check_end(job, [2, 1])
    assert "epoch 2 members [1]" in job.out
    assert "lost process 2: NotMetError: a process has not come in time" in job.err


TWICE = """
from tests.survival.joining import main, overlap

async def size(rank):
    await rank.barrier()
    return rank.world_size

print("again", overlap.run(size), flush=True)
"""


@pytest.mark.slow
def test_a_spare_that_has_joined_is_in_the_next_run(start, tmp_path):
    (tmp_path / "twice.py").write_text(TWICE)
    job = start("--processes", "3", "--spares", "1", epochs=1, program=tmp_path / "twice.py")
    kill(job, 1)
    check_end(job, [3, 3])
    assert job.out.count("again [3]") == 3
    assert job.err.count("is lost; the others go on") == 1


@pytest.mark.parametrize("options", [["--processes", "2"], ["--survive", "--processes", "1"]], ids=["no", "one"])
def test_spares_without_places_are_refused(tmp_path, options):
    job = Job(tmp_path, "--spares", "1", *options, program=str(PROGRAM), arguments=["3"])
    try:
        assert job.end() == 2
        assert "--spares: they take the places of lost processes; give --survive" in job.err
    finally:
        job.kill()
