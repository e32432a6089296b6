"""Rows of boards are used again only once all ranks are done with them, whatever else a group does in between."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio

import overlap
from transports import Router, Transport
from transports.base import OPERATIONS
from transports.shared_memory import SharedMemory

from .companies import Company, by_shared_memory, run_far

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


@pytest.mark.parametrize("begins", ["before the loss", "after the loss"])
def test_an_operation_fails_whose_board_is_never_ready_because_a_process_is_lost(begins: str) -> None:
    """The lost process lives, and sends a note that makes no sense: no other news ends the operation."""
    pytest.importorskip("transports.shared_memory._native", reason="it was not compiled")
    memories = list[SharedMemory]()

    @asynccontextmanager
    async def wires(companies: list[Company], placement: Sequence[range]) -> AsyncIterator[list[Transport]]:
        async with by_shared_memory(companies, placement) as routers:
            for router in routers:
                assert isinstance(router, Router)
                memories.extend(each for each in router.parts if isinstance(each, SharedMemory))
            yield routers

    async def main(rank: overlap.Rank) -> None:
        here, there = memories
        if rank.rank == 0:
            first = rank.all_reduce(np.ones(1)) if begins == "before the loss" else None
            assert there.engine is not None
            there.engine.note(0, 1, 99, 0)
            while here.links[1].gone is None:
                await trio.lowlevel.checkpoint()
            await (rank.all_reduce(np.ones(1)) if first is None else first)
        await trio.sleep_forever()

    outcome = run_far(main, 2, 1, wires=wires)[0]
    assert isinstance(outcome, overlap.RankFailedError)
    assert "process 1 (rank 1) is lost: it sent a note about rank 99" in str(outcome)
