"""The gloo backend of torch.distributed, as one rank sees it.

`python -m tests.benchmarks.versus.gloo_rank ASSIGNMENT` is such a rank.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from overlap.cli.bench.cases import Case
from overlap.collectives.reduce import Array

from .inside import Action, LibraryRank, measure_and_tell

_OPS = {"sum": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class GlooRank(LibraryRank):
    """Joins the world that the environment of torchrun describes, with one compute thread for each rank."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.version = f"gloo of torch {torch.__version__}"

    def barrier(self) -> None:
        """Return once every rank has called it."""
        dist.barrier()

    def action(self, case: Case, x: Array, out: Array | None) -> Action:
        """Return the function that does the operation once."""
        op = _OPS[case.op]
        source, result = torch.from_numpy(x), torch.from_numpy(x if out is None else out)
        parts = list(result.chunk(case.ranks)) if out is not None else None
        pieces = list(source.chunk(case.ranks)) if self.rank == case.root else None
        ahead, behind = (self.rank + 1) % case.ranks, (self.rank - 1) % case.ranks

        def exchange() -> None:
            pending = [dist.isend(source, ahead), dist.irecv(result, behind)]
            for work in pending:
                work.wait()

        actions: dict[str, Action] = {
            "all_reduce": lambda: dist.all_reduce(result, op),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(result, source, op),
            "all_gather": lambda: dist.all_gather_into_tensor(result, source),
            "all_to_all": lambda: dist.all_to_all_single(result, source),
            "broadcast": lambda: dist.broadcast(result, case.root),
            "reduce": lambda: dist.reduce(result, case.root, op),
            "gather": lambda: dist.gather(source, parts, case.root),
            "scatter": lambda: dist.scatter(result, pieces, case.root),
            "permute": exchange,
            "send_recv": exchange,
            "barrier": dist.barrier,
        }
        return actions[case.operation.name]

    def gather(self, numbers: NDArray[np.int64]) -> list[list[int]]:
        """Return the numbers of all ranks, on every rank."""
        mine = torch.from_numpy(numbers)
        told = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(told, mine)
        return [[int(number) for number in one.tolist()] for one in told]

    def close(self) -> None:
        """Leave the world."""
        dist.destroy_process_group()


if __name__ == "__main__":
    measure_and_tell(GlooRank(), sys.argv[1])
