"""Ranks of several processes that each take themselves for the root: none of them waits for another one."""

import re
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

import overlap

from .companies import Wires, by_shared_memory, by_sockets, run_far

WIRES = [by_sockets, by_shared_memory]


async def broadcast(rank: overlap.Rank) -> object:
    return await rank.broadcast(np.full(2, rank.rank), root=rank.rank)


async def scatter(rank: overlap.Rank) -> object:
    return await rank.scatter(np.arange(rank.world_size), root=rank.rank)


@pytest.mark.parametrize("wires", WIRES)
@pytest.mark.parametrize("issue", [broadcast, scatter])
def test_different_roots_end_the_world_at_its_end_at_the_latest(
    issue: Callable[[overlap.Rank], Awaitable[object]], wires: Wires
) -> None:
    async def main(rank: overlap.Rank) -> None:
        await issue(rank)

    for error in run_far(main, 3, 1, wires=wires):
        assert isinstance(error, overlap.RankFailedError)
        assert "operation #0 on group 'world' differs between ranks" in str(error)
        assert len(re.findall(r"rank (\d) called \w+\(int64 \(\d,\), root=\1\)", str(error))) == 2


def test_a_program_that_was_told_by_a_later_operation_and_goes_on_may_end_well() -> None:
    async def main(rank: overlap.Rank) -> str:
        await broadcast(rank)
        try:
            while True:
                await rank.all_reduce(np.ones(2))
        except overlap.CollectiveMismatchError as error:
            return str(error)[:12]

    assert run_far(main, 2, 1, wires=by_shared_memory) == ["operation #0"] * 2
