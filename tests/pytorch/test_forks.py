"""Processes that multiprocessing forks, as torch.multiprocessing does: they end well, or say why they did not."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

ROOT = Path(__file__).parents[2]

PROGRAM = """
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
    command = [sys.executable, "-c", PROGRAM, *arguments]
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
