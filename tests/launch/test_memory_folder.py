"""The folder of a launcher in memory ends with it, or with the start of the next one."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from overlap.kernel_facts import process_identity
from overlap.launch import memory_folder as module
from overlap.launch.memory_folder import memory_folder
from tests.faults.job import Job

PROGRAM = str(Path(__file__).parents[1] / "survival" / "looping.py")


@pytest.fixture(autouse=True)
def memory(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_MEMORY", tmp_path)
    return tmp_path


def test_a_start_removes_the_folders_of_launchers_that_have_ended(memory):
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        identity = process_identity(ended.pid)
    owners = {"ended": identity, "elsewhere": identity.replace("/pid:", "/pid:9"), "unknown": "", "lives": None}
    for name, owner in owners.items():
        (memory / f"witness-{name}" / "state").mkdir(parents=True)
        (memory / f"witness-{name}" / "state" / "weights").write_text("many")
        (memory / f"witness-{name}" / "launcher").write_text(process_identity() if owner is None else owner)
    (memory / "witness-of-another-program").mkdir()
    others = {*memory.iterdir()} - {memory / "witness-ended"}
    with memory_folder() as first, memory_folder() as second:
        assert {*memory.iterdir()} == others | {first, second}
        assert first.stat().st_mode & 0o777 == 0o700
        (second / "file").touch()
    assert {*memory.iterdir()} == others


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
