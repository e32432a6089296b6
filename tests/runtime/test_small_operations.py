"""Small operations between processes that share memory, again and again: all on the board, mostly without a match."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import overlap
from overlap import PeerFailedError
from overlap.collectives.call import Call
from overlap.runtime.operation import CollectiveFuture
from transports.base import OPERATIONS, PAYLOAD_BYTES
from transports.shared_memory.engine import BUILT

from .companies import by_shared_memory, run_far

pytestmark = pytest.mark.skipif(not BUILT, reason="the engine was not compiled")

INPUTS: list[tuple[str, Any]] = [
    ("sum", np.float64(3)),
    ("sum", np.arange(6, dtype=np.float32).reshape(2, 3)),
    ("mean", np.array([-7, 3, 5], np.int8)),
    ("max", np.array([True, False])),
    ("prod", np.array([2, 0.5], ml_dtypes.bfloat16)),
    ("sum", np.arange(PAYLOAD_BYTES // 8)),
]


async def again_and_again(rank: overlap.Rank) -> list[bool]:
    same = []
    for turn in range(OPERATIONS):  # each row is used several times
        for op, x in INPUTS:
            mine = np.asarray(x * (rank.rank + 1) if x.dtype != bool else x == bool(rank.rank), x.dtype)
            issued = rank.all_reduce(mine, op, out=mine) if turn % 3 == 0 and mine.shape else rank.all_reduce(mine, op)
            if turn % 5 == 0:
                await rank.barrier()
            result = await issued
            found = expected(op, x, rank.world_size)
            same.append(result.dtype == x.dtype and result.shape == x.shape and bool((result == found).all()))
            assert mine.flags.writeable
    return same


def expected(op: str, x: Any, ranks: int) -> Any:
    each = [x * (rank + 1) if x.dtype != bool else x == bool(rank) for rank in range(ranks)]
    if op == "mean":  # truncated towards zero
        return (sum(part.astype(np.int64) for part in each) / ranks).astype(x.dtype)
    return {"sum": np.add, "max": np.maximum, "prod": np.multiply}[op].reduce(np.stack(each), axis=0)


@pytest.mark.parametrize("processes", [2, 3])
def test_results_are_right_however_often_a_row_is_used(processes: int) -> None:
    assert (
        run_far(again_and_again, processes, 1, wires=by_shared_memory)
        == [[True] * (OPERATIONS * len(INPUTS))] * processes
    )


def test_who_comes_last_and_cannot_end_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = CollectiveFuture.fit

    def short_of_memory(operation: CollectiveFuture[Any], pattern: Call) -> None:
        if operation.context.rank == 1 and operation.name == "last":
            raise MemoryError("no more")
        fit(operation, pattern)

    async def main(rank: overlap.Rank) -> str:
        for _ in range(2):
            await rank.all_reduce(np.ones(2))
        monkeypatch.setattr(CollectiveFuture, "fit", short_of_memory)
        try:
            total = await rank.all_reduce(np.ones(2), name="last")
        except MemoryError as error:
            return str(error)
        except PeerFailedError as error:
            return str(error.culprit)
        return str(total.tolist())

    first, last = run_far(main, 2, 1, wires=by_shared_memory)
    assert last == "no more"
    assert first in ("1", "[2.0, 2.0]")  # it may have its result before rank 1 has failed, and then that is right
