"""Programs that mpiexec, torchrun and multiprocessing start or fork, as users start them."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from overlap.timeline import read_trace

dist = pytest.importorskip("torch.distributed", reason="torch is not installed")
pytest.importorskip("overlap.torch", reason="torch is not installed")

from overlap.processes.place import without_launcher_variables  # noqa: E402
from tests.errors import error_of  # noqa: E402

# -- programs that mpiexec, torchrun and `spawn` start, as users start them --------------------------------------------

PROGRAM = Path(__file__).with_name("launched.py")
TIMEOUT_S = 120
SAID = ["rank 0 of 2: [3.0, 3.0, 3.0]", "rank 1 of 2: [3.0, 3.0, 3.0]"]


def lines(*command: str) -> list[str]:
    """Return what a command prints of ranks, in their order."""
    environ = {**without_launcher_variables(os.environ), "PYTHONPATH": str(PROGRAM.parents[2])}
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
@pytest.mark.parametrize("method", ["overlap://", "env://"])
def test_overlap_run(method: str) -> None:
    run = [sys.executable, "-m", "overlap", "run", "--processes", "2", "--no-prefix"]
    assert lines(*run, str(PROGRAM), method) == SAID


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
        (
            {"PMI_RANK": "2", "PMI_SIZE": "2"},
            "init_method: PMI_RANK=2 is too large: with PMI_SIZE=2 it can be 0 to 1; correct what MPICH sets",
        ),
    ],
)
def test_where_nobody_says_who_meets(environ: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", environ)
    assert str(error_of(ValueError, dist.init_process_group, "overlap", init_method="overlap://")) == message


# -- processes that multiprocessing forks, as torch.multiprocessing does: they end well, or say why they did not -------

ROOT = Path(__file__).parents[2]

FORKING = """
import sys, tempfile
import torch, torch.distributed as dist, torch.multiprocessing as mp
import overlap.torch

def main(rank, path, wrong):
    dist.init_process_group("overlap", init_method=f"file://{path}", rank=rank, world_size=2)
    x = torch.ones(1)
    dist.all_reduce(x)
    if wrong and rank == 1:
        raise ValueError("no data")
    if wrong:
        try:
            dist.barrier()
        except dist.DistBackendError as error:
            print(error)
            return
    print(f"rank {rank}: {x.item()}")  # and no destroy_process_group

torch.set_num_threads(1)
path = tempfile.mkdtemp() + "/store"
processes = [mp.get_context("fork").Process(target=main, args=(rank, path, "wrong" in sys.argv)) for rank in range(2)]
for each in processes: each.start()
for each in processes: each.join(60)
"""


def told(*arguments: str) -> tuple[list[str], str]:
    command = [sys.executable, "-c", FORKING, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    return sorted(done.stdout.splitlines()), done.stderr


@pytest.mark.torch
def test_a_program_that_forgets_to_leave_ends_well() -> None:
    lines, errors = told()
    assert lines == ["rank 0: 2.0", "rank 1: 2.0"]
    assert "lost" not in errors


@pytest.mark.torch
def test_an_error_of_one_is_told_to_the_others() -> None:
    [line], _ = told("wrong")
    assert "rank 1 failed" in line
    assert "ValueError: no data" in line


EARLY = """
import sys, tempfile
from multiprocessing.connection import wait
import torch, torch.distributed as dist, torch.multiprocessing as mp
import overlap.torch.backend

overlap.torch.backend._LEAVE_S = 0.01

def main(rank, path, first):
    dist.init_process_group("overlap", init_method=f"file://{path}", rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        print("rank 0 has ended:", bool(wait([first], 1)))
    xs = [torch.ones(size) for size in (1, 100_000) for _ in range(20)]
    works = [dist.reduce(x, dst=1, async_op=True) for x in xs]
    if rank == 1:
        for work in works: work.wait()
        print(sorted({x[-1].item() for x in xs}))
    elif "destroys" in sys.argv:
        dist.destroy_process_group()

torch.set_num_threads(1)
path, first = tempfile.mkdtemp() + "/store", None
processes = []
for rank in range(2):
    processes.append(mp.get_context("fork").Process(target=main, args=(rank, path, first)))
    processes[-1].start()
    first = processes[0].sentinel
for each in processes: each.join(60)
"""


@pytest.mark.torch
@pytest.mark.parametrize("ending", ["returns", "destroys"])
def test_a_rank_stays_until_the_others_have_what_it_has_issued(ending: str) -> None:
    command = [sys.executable, "-c", EARLY, ending]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines() == ["rank 0 has ended: False", "[2.0]"]
    assert done.stderr == ""


# -- the first program of the page on PyTorch, as it is printed, under torchrun ----------------------------------------


@pytest.mark.torch
def test_the_program_trains_all_ranks_alike_and_shows_what_computes(tmp_path: Path) -> None:
    [program] = re.findall(r"## One word.*?```python\n(.*?)```", (ROOT / "docs" / "pytorch.md").read_text(), re.DOTALL)
    script, trace = tmp_path / "train.py", tmp_path / "run.json"
    script.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OVERLAP_TRACE": str(trace), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    told = dict(re.findall(r"rank (\d): (-?\d+\.\d{6})", done.stdout))  # torchrun may join lines of two ranks
    assert set(told) == {"0", "1"}
    assert told["0"] == told["1"]
    timeline = read_trace(trace)
    assert {"forward module.0", "backward module.0", "Adam"} <= {span.name for span in timeline.spans}
    assert timeline.meta["torch"] == "yes"
