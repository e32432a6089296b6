"""Real processes go on in a smaller world when one of them is killed, whichever it is."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.faults.job import Job

PROGRAM = str(Path(__file__).with_name("looping.py"))
SHARDING = str(Path(__file__).with_name("sharding.py"))


@pytest.fixture
def start(tmp_path):
    jobs = []

    def begin(*options, last_epoch=0, manner="", program=PROGRAM, **variables):
        arguments = [str(last_epoch), manner] if program == PROGRAM else [manner]
        jobs.append(Job(tmp_path, *options, program=program, arguments=arguments, **variables))
        return jobs[-1]

    yield begin
    ended = [job for job in jobs if job.process.poll() is not None]
    for job in jobs:
        job.kill()
    for job in ended:
        job.check_nothing_is_left()
        assert not [*Path("/dev/shm").glob(f"witness-{job.process.pid}-*")]


def hit(job, *members, number=signal.SIGKILL, epoch=0):
    """Send a signal to members once they go on in an epoch."""
    job.until(f"goes on {epoch}")
    for member in members:
        os.kill(int(re.search(rf"pid (\d+) of member {member} ", job.out)[1]), number)


@pytest.mark.parametrize(
    ("options", "killed", "worlds"),
    [
        pytest.param(["--processes", "4"], [2, 0], [4, 3, 2], marks=pytest.mark.slow),
        pytest.param(["--processes", "4", "--shared-memory", "0"], [0], [4, 3], marks=pytest.mark.slow),
        pytest.param(["--processes", "2", "--ranks", "4"], [0], [4, 2], marks=pytest.mark.slow),
        pytest.param(["--processes", "2"], [1], [2, 1], marks=pytest.mark.slow),
        (["--processes", "3"], [0, 2], [3, 2, 1]),
    ],
    ids=["4", "sockets", "2x2", "one of two", "nodes"],
)
def test_the_others_go_on(start, options, killed, worlds):
    job = start("--survive", *options, last_epoch=len(killed))
    for epoch, member in enumerate(killed):
        hit(job, member, epoch=epoch)
    assert job.end() == 0, job.err
    alive = tuple(sorted(set(range(int(options[1]))) - set(killed)))
    result = f"result {[(alive, worlds)] * (worlds[0] // int(options[1]))}"
    assert job.out.count(result) == len(alive)
    for member in killed:
        assert f"overlap: lost process {member}: " in job.err


@pytest.mark.slow
def test_an_error_of_the_program_ends_the_job(start):
    job = start("--survive", "--processes", "3", last_epoch=9, manner="raises")
    assert job.end() == 1
    assert "ValueError: own code" in job.err
    assert "lost process" not in job.err


@pytest.mark.slow
def test_a_loss_ends_a_job_that_does_not_survive(start):
    job = start("--processes", "2", last_epoch=1)
    hit(job, 0)
    assert job.end() == 128 + signal.SIGKILL


@pytest.mark.slow
def test_a_program_may_ask_to_survive(start):
    job = start("--processes", "3", last_epoch=1, manner="asks")
    hit(job, 0)
    assert job.end() == 0, job.err
    assert job.out.count(f"result {[((1, 2), [3, 2])]}") == 2


@pytest.mark.slow
def test_an_option_wins_over_the_program(start):
    job = start("--processes", "2", "--no-survive", last_epoch=1, manner="asks")
    hit(job, 0)
    assert job.end() == 128 + signal.SIGKILL


def test_one_process_may_ask_as_well(start):
    job = start(manner="asks")
    assert job.end() == 0, job.err
    assert f"result {[((), [2])] * 2}" in job.out


def test_processes_of_another_launcher_have_no_witness(start):
    job = start(manner="asks", RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    assert job.end() == 2
    assert "survive: processes need a witness; start them with `overlap run --survive --processes N`" in job.err


@pytest.mark.slow
def test_the_loss_of_all_ends_the_job(start):
    job = start("--survive", "--processes", "2", last_epoch=9)
    hit(job, 0, 1)
    assert job.end() == 128 + signal.SIGKILL


@pytest.mark.slow
def test_zero_goes_on_from_a_checkpoint_in_memory(start):
    job = start("--survive", "--processes", "3", program=SHARDING, manner="save")
    assert job.end() == 0, job.err
    assert job.out.count("epoch 1 goes on from 15") == 2
    assert job.out.count("steps [30]") == 2


@pytest.mark.slow
def test_zero_without_a_checkpoint_is_refused(start):
    job = start("--survive", "--processes", "2", program=SHARDING)
    assert job.end() == 1
    assert re.search(r"UsageError: Sharded: its \d+ steps are lost with a process", job.err)


@pytest.mark.slow
def test_a_process_that_was_stopped_for_too_long_is_left_behind(start):
    job = start("--survive", "--processes", "3", "--grace", "1", last_epoch=1)
    hit(job, 1, number=signal.SIGSTOP)
    assert job.end() == 0, job.err
    assert job.out.count(f"result {[((0, 2), [3, 2])]}") == 2


HOST_0 = ["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "127.0.0.1:29555"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (HOST_0, "add --witness DIR"),
        (["--processes", "2", "--lost-after", "1"], "expected at least 2 seconds, got 1"),
        (["--processes", "2", "--witness", "."], "--witness: on one host the launcher has the witness in memory"),
        (["--no-survive", "--processes", "2", "--witness", "."], "--witness: it decides who goes on after a loss"),
        ([*HOST_0, "--witness", ".", "--max-restarts", "1"], "--max-restarts: not possible with --survive on several"),
    ],
)
def test_what_cannot_survive_is_refused(start, options, reason):
    job = start("--survive", *options)
    assert job.end() == 2
    assert reason in job.err
