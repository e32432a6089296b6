"""Arrays where other processes of this host read them: the same results, without a copy of theirs."""

import gc
from functools import partial
from typing import Any

import numpy as np
import pytest

import overlap

from .companies import Wires, by_shared_memory, by_sockets, run_far
from .test_shared_results import lies

SIZE = 600_000  # elements of 4 bytes: too many to be copied

WIRES: dict[str, Wires] = {
    "shared memory": by_shared_memory,
    "slots": partial(by_shared_memory, reads=False),
    "no room": partial(by_shared_memory, limit_bytes=0),
    "sockets": by_sockets,
}


def filled(rank: overlap.Rank, *, common: bool) -> Any:
    x = rank.empty(SIZE, np.float32, common=common)
    assert not x.any()
    x[...] = np.arange(SIZE) % 1000 + rank.rank
    return x


async def every_way(rank: overlap.Rank, common: list[bool]) -> list[bool]:
    n, mine = rank.world_size, common[rank.rank]
    base, total = np.arange(SIZE) % 1000, np.arange(SIZE) % 1000 * rank.world_size + sum(range(rank.world_size))
    same = []
    x = filled(rank, common=mine)
    same.append(bool((await rank.all_reduce(x) == total).all()))
    same.append(bool((await rank.all_reduce(x, shared=True) == total).all()))
    same.append(bool((await rank.all_reduce(x, out=rank.empty(SIZE, common=not mine)) == total).all()))
    same.append(bool((x == base + rank.rank).all()))
    same.append(bool((await rank.all_reduce(x, out=x) == total).all() and (x == total).all()))
    x = filled(rank, common=mine)
    joined = (await rank.all_gather(x)).reshape(n, SIZE)
    same.append(all(bool((joined[other] == base + other).all()) for other in range(n)))
    block = SIZE // n
    own = await rank.reduce_scatter(x)
    same.append(bool((own == total[rank.rank * block :][:block]).all()))
    same.append(bool((await rank.broadcast(x, root=1) == base + 1).all()))
    return same


@pytest.mark.parametrize(
    ("wires", "common"),
    [
        ("shared memory", [True, True, True]),
        ("shared memory", [True, False, True]),
        ("shared memory", [True, True]),
        ("slots", [False, True, True]),
        ("no room", [True, True]),
        ("sockets", [True, True]),
    ],
)
def test_results_are_those_of_private_arrays(wires: str, common: list[bool]) -> None:
    assert run_far(every_way, len(common), 1, common, wires=WIRES[wires]) == [[True] * 8] * len(common)


@pytest.mark.slow
def test_they_lie_in_memory_that_processes_have_in_common_and_give_it_back() -> None:
    async def main(rank: overlap.Rank) -> list[bool]:
        first = rank.empty((600, 1000), np.float32, common=True)
        before, kept = lies(first), first[5:].T
        first[...] = 7
        del first
        beside = lies(rank.empty(SIZE, np.float32, common=True))
        assert (kept == 7).all()
        del kept
        gc.collect()
        again = rank.empty(SIZE, np.float32, common=True)
        return [before[0] > 0, beside != before, lies(again) == before or lies(again) == beside, bool(again.any())]

    assert run_far(main, 2, 1, wires=by_shared_memory) == [[True, True, True, False]] * 2


def test_small_ones_and_those_without_room_are_private() -> None:
    async def main(rank: overlap.Rank) -> list[int]:
        return [lies(rank.empty(size, np.uint8, common=True))[0] for size in (1 << 20, 1 << 30)]

    assert run_far(main, 2, 1, wires=partial(by_shared_memory, limit_bytes=1 << 24)) == [[0, 0]] * 2


def test_one_outlives_its_world() -> None:
    async def main(rank: overlap.Rank) -> Any:
        return filled(rank, common=True)

    kept = run_far(main, 2, 1, wires=by_shared_memory)
    assert [int(each[1999]) for each in kept] == [999, 1000]


@pytest.mark.parametrize("asked", [{}, {"common": False}, {"common": True}], ids=str)
def test_an_array_is_common_only_where_that_is_asked(asked: dict[str, bool]) -> None:
    async def main(rank: overlap.Rank) -> bool:
        return lies(rank.empty(SIZE, **asked))[0] != 0

    assert run_far(main, 2, 1, wires=by_shared_memory) == [asked.get("common", False)] * 2
