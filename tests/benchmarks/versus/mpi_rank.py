"""MPI through mpi4py, as one rank sees it.

`python -m tests.benchmarks.versus.mpi_rank ASSIGNMENT` is such a rank.
"""

from __future__ import annotations

import sys

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from overlap.cli.bench.cases import Case
from overlap.collectives.reduce import Array

from .inside import Action, LibraryRank, measure_and_tell

_OPS = {"sum": MPI.SUM, "prod": MPI.PROD, "max": MPI.MAX, "min": MPI.MIN}


class MpiRank(LibraryRank):
    """Joins the world that mpiexec has made."""

    def __init__(self) -> None:
        self._world = MPI.COMM_WORLD
        self.rank = self._world.Get_rank()
        self.version = " ".join(MPI.Get_library_version().replace("Version:", "").split("\n")[0].split())

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self._world.Barrier()

    def action(self, case: Case, x: Array, out: Array | None) -> Action:
        """Return the function that does the operation once."""
        world, op, root = self._world, _OPS[case.op], case.root
        source = MPI.IN_PLACE if case.in_place and out is not None else x
        at_root = x if self.rank == root else None
        ahead, behind = (self.rank + 1) % case.ranks, (self.rank - 1) % case.ranks
        actions: dict[str, Action] = {
            "all_reduce": lambda: world.Allreduce(source, out, op),
            "reduce_scatter": lambda: world.Reduce_scatter_block(x, out, op),
            "all_gather": lambda: world.Allgather(source, out),
            "all_to_all": lambda: world.Alltoall(x, out),
            "broadcast": lambda: world.Bcast(out, root),
            "reduce": lambda: world.Reduce(source, out, op, root),
            "gather": lambda: world.Gather(source, out, root),
            "scatter": lambda: world.Scatter(at_root, out, root),
            "permute": lambda: world.Sendrecv(x, ahead, recvbuf=out, source=behind),
            "send_recv": lambda: world.Sendrecv(x, ahead, recvbuf=out, source=behind),
            "barrier": world.Barrier,
        }
        return actions[case.operation.name]

    def gather(self, numbers: NDArray[np.int64]) -> list[list[int]]:
        """Return the numbers of all ranks, on every rank."""
        told = np.empty((self._world.Get_size(), len(numbers)), np.int64)
        self._world.Allgather(numbers, told)
        return [[int(number) for number in one] for one in told]

    def close(self) -> None:
        """Leave the world; mpi4py does it as the process ends."""


if __name__ == "__main__":
    measure_and_tell(MpiRank(), sys.argv[1])
