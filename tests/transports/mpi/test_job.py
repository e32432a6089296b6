"""Real MPI jobs: several processes that send everything everywhere, and one that fails."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TIMEOUT_S = 90.0


def mpiexec() -> str | None:
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


pytestmark = [
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed: pip install mpi4py"),
    pytest.mark.skipif(mpiexec() is None, reason="there is no mpiexec: pip install mpich"),
]


def run_job(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the job in a process group of its own, and leave none of it behind."""
    command = [str(mpiexec()), "-n", str(processes), sys.executable, "-m", "mpi4py", str(HERE / "job.py"), *arguments]
    job = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    with job:
        try:
            out, errors = job.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, job.returncode, out, errors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "ranks_each"), [(2, 2), *(pytest.param(processes, 1, marks=pytest.mark.slow) for processes in (2, 4))]
)
def test_every_byte_arrives_everywhere(processes: int, ranks_each: int) -> None:
    job = run_job(processes, "everything", str(ranks_each))
    assert (job.returncode, job.stdout, job.stderr) == (0, "OK\n", "")


def test_a_process_that_leaves_early_is_named() -> None:
    job = run_job(2, "leave")
    assert (job.returncode, job.stderr) == (0, "")
    assert job.stdout == "message from rank 1 to rank 0, tag 0: process 1 (rank 1) has left\n"


def test_an_uncaught_exception_ends_the_job() -> None:
    job = run_job(2, "fail")
    assert job.returncode != 0
    assert "RuntimeError: this process fails" in job.stderr
    assert "not reached" not in job.stdout


def test_abort_ends_the_job_with_its_code() -> None:
    job = run_job(2, "abort")
    assert job.returncode == 7
    assert "not reached" not in job.stdout
