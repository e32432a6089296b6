"""The folder of a launcher in memory ends with it, or with the start of the next one."""

import os
import signal
from pathlib import Path

import pytest

from overlap.launch import memory_folder as module
from overlap.launch.memory_folder import memory_folder
from tests.faults.job import Job

PROGRAM = str(Path(__file__).parents[1] / "survival" / "looping.py")


@pytest.fixture(autouse=True)
def memory(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_MEMORY", tmp_path)
    return tmp_path


def test_a_start_removes_what_no_launcher_has_a_lock_on(memory):
    old = memory / "witness-1-ab.locked"
    (old / "state").mkdir(parents=True)
    (old / "state" / "weights").write_text("many")
    other = memory / "witness-of-another-program"
    other.mkdir()
    with memory_folder() as first, memory_folder() as second:
        assert {*memory.iterdir()} == {other, first, second}
        (second / "file").touch()
    assert [*memory.iterdir()] == [other]


def test_a_folder_is_never_there_without_its_lock(memory, monkeypatch):
    lock, seen = module.fcntl.flock, []

    def locked(descriptor, how):
        seen.extend(memory.glob("witness-*.locked"))
        lock(descriptor, how)

    monkeypatch.setattr(module.fcntl, "flock", locked)
    with memory_folder():
        assert seen == []


@pytest.mark.slow
def test_the_next_job_removes_the_folder_of_a_killed_launcher(tmp_path):
    jobs = [Job(tmp_path, "--survive", "--processes", "2", program=PROGRAM, arguments=["9"])]
    try:
        jobs[0].until("goes on 0")
        folder = folder_of(jobs[0])
        os.kill(jobs[0].process.pid, signal.SIGKILL)
        jobs[0].end()
        jobs.append(Job(tmp_path, "--survive", "--processes", "2", program=PROGRAM, arguments=["9"]))
        jobs[1].until("goes on 0")
        assert not folder.exists()
        own = folder_of(jobs[1])
        jobs.append(Job(tmp_path, "--processes", "2", program=PROGRAM, arguments=["0"]))
        assert jobs[2].end() == 0, jobs[2].err
        assert own.exists()
        jobs[1].process.send_signal(signal.SIGTERM)
        jobs[1].end()
        assert not own.exists()
    finally:
        for job in jobs:
            job.kill()


def folder_of(job):
    """Return the folder of a launcher that runs."""
    return next(Path("/dev/shm").glob(f"witness-{job.process.pid}-*"))
