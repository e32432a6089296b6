"""Programs that mpiexec, torchrun and `spawn` start, as users start them."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

dist = pytest.importorskip("torch.distributed", reason="torch is not installed")
pytest.importorskip("overlap.torch", reason="torch is not installed")

from overlap.processes.place import without_membership  # noqa: E402
from tests.errors import error_of  # noqa: E402

PROGRAM = Path(__file__).with_name("launched.py")
TIMEOUT_S = 120
SAID = ["rank 0 of 2: [3.0, 3.0, 3.0]", "rank 1 of 2: [3.0, 3.0, 3.0]"]


def lines(*command: str) -> list[str]:
    """Return what a command prints of ranks, in their order."""
    environ = {**without_membership(os.environ), "PYTHONPATH": str(PROGRAM.parents[2])}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))


@pytest.mark.torch
@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed: pip install mpi4py")
def test_mpiexec() -> None:
    mpiexec = str(Path(sys.executable).with_name("mpiexec"))
    assert lines(mpiexec, "-n", "2", sys.executable, str(PROGRAM), "overlap://") == SAID


@pytest.mark.torch
@pytest.mark.parametrize("method", ["overlap://", "env://"])
def test_torchrun(method: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    assert lines(*torchrun, str(PROGRAM), method) == SAID


@pytest.mark.torch
@pytest.mark.parametrize("dies", ["meeting", "working"])
@pytest.mark.parametrize("rendezvous", [[], ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]])
def test_torchrun_starts_again_what_was_killed(rendezvous: list[str], dies: str) -> None:
    """Each of the first two attempts loses another rank; the store of the agent outlives them."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    assert lines(*torchrun, *rendezvous, str(PROGRAM.with_name("restarted.py")), dies) == [
        "rank 0 of 2, attempt 2: 200.0",
        "rank 1 of 2, attempt 2: 200.0",
    ]


@pytest.mark.torch
def test_spawn(tmp_path: Path) -> None:
    assert lines(sys.executable, str(PROGRAM), f"file://{tmp_path}/store") == SAID


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "init_method: no launcher has started this process; use env:// or tcp://, with a rank"),
        ({"PMI_RANK": "2", "PMI_SIZE": "2"}, "init_method: PMI_RANK=2: ranks are numbered from 0, and PMI_SIZE=2"),
    ],
)
def test_where_nobody_says_who_meets(environ: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", environ)
    assert str(error_of(ValueError, dist.init_process_group, "overlap", init_method="overlap://")) == message
