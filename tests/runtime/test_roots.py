"""Ranks of several processes whose differing calls make none of them wait: each gives, and receives nothing."""

import re
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import trio

import overlap

from .companies import Wires, by_shared_memory, by_sockets, run_far

WIRES = [by_sockets, by_shared_memory]


async def broadcast(rank: overlap.Rank) -> object:
    return await rank.broadcast(np.full(2, rank.rank), root=rank.rank)


async def scatter(rank: overlap.Rank) -> object:
    return await rank.scatter(np.arange(rank.world_size), root=rank.rank)


async def reduce(rank: overlap.Rank) -> object:
    return await rank.reduce(np.full(2, rank.rank), root=(rank.rank + 1) % rank.world_size)


async def gather(rank: overlap.Rank) -> object:
    return await rank.gather(np.full(2, rank.rank), root=(rank.rank + 1) % rank.world_size)


async def permute(rank: overlap.Rank) -> object:
    return await rank.permute(np.full(2, rank.rank), [(rank.rank, (rank.rank + 1) % rank.world_size)])


async def one_of_each(rank: overlap.Rank) -> object:
    return await (gather, reduce, permute)[rank.rank](rank)


OWN_ROOT, ANY_CALL = r"rank (\d) called \w+\(int64 \(\d,\), root=\1\)", r"rank (\d) called \w+\(int64 "


@pytest.mark.parametrize("wires", WIRES)
@pytest.mark.parametrize(
    ("issue", "called"),
    [
        (broadcast, OWN_ROOT),
        (scatter, OWN_ROOT),
        *((issue, ANY_CALL) for issue in (reduce, gather, permute, one_of_each)),
    ],
)
def test_differing_calls_end_the_world_at_its_end_at_the_latest(
    issue: Callable[[overlap.Rank], Awaitable[object]], called: str, wires: Wires
) -> None:
    async def main(rank: overlap.Rank) -> None:
        await issue(rank)

    for error in run_far(main, 3, 1, wires=wires):
        assert isinstance(error, overlap.RankFailedError)
        assert "operation #0 on group 'world' differs between ranks" in str(error)
        assert len(re.findall(called, str(error))) == 2


@pytest.mark.parametrize("issue", [broadcast, gather])
def test_a_later_operation_reports_it_however_many_came_before(
    issue: Callable[[overlap.Rank], Awaitable[object]],
) -> None:
    async def main(rank: overlap.Rank) -> str:
        await issue(rank)
        try:
            while True:
                await rank.all_reduce(np.ones(2))
        except overlap.CollectiveMismatchError as error:
            return str(error)[:12]

    # in 25 ms, after which calls are reported, some hundred operations end: more than a communicator remembers
    assert run_far(main, 2, 1, wires=by_shared_memory) == ["operation #0"] * 2


@pytest.mark.parametrize("wires", WIRES)
def test_calls_that_agree_are_reported_and_fail_nothing(wires: Wires) -> None:
    async def main(rank: overlap.Rank) -> list[object]:
        results = list[object]()
        for step in range(50):
            root = step % rank.world_size
            results.append(await rank.reduce(np.ones(1), root=root))
            results.append(await rank.gather(np.ones(1), root=root))
            results.append(await rank.permute(np.ones(1), [(root, (root + 1) % rank.world_size)]))
            await trio.sleep(0.001)
        return [result for result in results if result is not None]

    assert [len(results) for results in run_far(main, 3, 1, wires=wires)] == [84, 84, 82]
