"""The example of a transport over MPI carries a world under mpiexec."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.transports.test_factory import install

EXAMPLE = Path(__file__).parents[2] / "examples/transports/mpi.py"

PROGRAM = """
import numpy as np
import trio
import overlap

EAGER_BYTES = 16 << 10


async def main(rank):
    other = (rank.rank + 1) % rank.world_size
    large = await rank.all_reduce(np.full(1 << 20, rank.rank + 1.0))
    gathered = await rank.all_gather(np.array([rank.rank]))
    for nbytes in (0, 1, EAGER_BYTES, EAGER_BYTES + 1, 5 << 20):
        sent = rank.send(np.full(nbytes, rank.rank, np.uint8), other, tag=nbytes)
        got = await rank.recv(((nbytes,), np.uint8), (rank.rank - 1) % rank.world_size, tag=nbytes)
        assert (got == (rank.rank - 1) % rank.world_size).all(), nbytes
        await sent
    with trio.move_on_after(0.01):
        await rank.recv(((3,), np.uint8), other, tag=99)  # nobody sends: it is withdrawn
    sent = rank.send(np.full(3, rank.rank), other, tag=98)
    assert (await rank.recv(((3,), int), None, tag=98))[0] == (rank.rank - 1) % rank.world_size
    await sent
    return float(large[0]), gathered.tolist()


print(overlap.run(main)[0], flush=True)
"""

DIFFERENT = """
import numpy as np
import overlap


async def main(rank):
    await rank.all_reduce(np.ones(4 + rank.rank))


try:
    overlap.run(main)
except overlap.RankFailedError as error:
    print("(4,)" in str(error), "(5,)" in str(error), flush=True)
"""


def run(folder: Path, program: str, processes: int) -> list[str]:
    """Run a program under mpiexec with the transport installed; return its lines, in alphabetical order."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install mpi4py mpich")
    mpiexec = Path(sys.executable).with_name("mpiexec")
    install(folder, "mpi", "mpi:make", EXAMPLE.read_text())
    script = folder / "train.py"
    script.write_text(program)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    command = [str(mpiexec), "-n", str(processes), sys.executable, "-m", "mpi4py", str(script)]
    environment = {**os.environ, "PYTHONPATH": path, "OVERLAP_TRANSPORT": "mpi"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


@pytest.mark.engines
@pytest.mark.parametrize("processes", [2, 3])
def test_a_world_over_mpi(tmp_path: Path, processes: int) -> None:
    total = processes * (processes + 1) / 2
    assert run(tmp_path, PROGRAM, processes) == [str((total, list(range(processes))))] * processes


@pytest.mark.engines
def test_ranks_that_disagree_over_mpi_hear_of_both_calls(tmp_path: Path) -> None:
    lines = run(tmp_path, DIFFERENT, 2)
    assert lines == ["True True"] * 2


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 150
