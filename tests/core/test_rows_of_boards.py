"""Rows of boards are used again only once all ranks are done with them, whatever else a group does in between."""

import numpy as np
import pytest
import trio

import overlap
from transports.common import OPERATIONS

from .companies import by_shared_memory, run_far

ELEMENTS = {"on the board": 1, "behind its rows": 100, "mapped": 20_000}


@pytest.mark.parametrize("kind", ELEMENTS)
@pytest.mark.parametrize("between", [OPERATIONS - 2, OPERATIONS - 1, 2 * OPERATIONS - 1])
def test_a_rank_that_only_sends_meanwhile_does_not_run_round(between: int, kind: str) -> None:
    """Rank 0 has ended the first operation, and the messages after it, before rank 1 sees that all have come to it."""
    begun, elements = trio.Event(), ELEMENTS[kind]

    async def main(rank: overlap.Rank) -> list[float]:
        x = np.full(elements, 1.0 + rank.rank)
        await rank.all_reduce(x)
        await rank.broadcast(np.ones(1), algorithm="binomial")
        if rank.rank == 0:
            await begun.wait()
        first = rank.all_reduce(10 * x)
        begun.set()
        told = [rank.broadcast(np.full(1, float(number)), algorithm="binomial") for number in range(between)]
        last = rank.all_reduce(100 * x)
        assert [float((await each)[0]) for each in told] == [float(number) for number in range(between)]
        return [float((await each)[-1]) for each in (first, last)]

    assert run_far(main, 2, 1, wires=by_shared_memory) == [[30.0, 300.0]] * 2
