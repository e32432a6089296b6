"""Results and inputs in memory that ranks share: the same results, read-only, without copies of their own."""

import gc
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

import overlap
from overlap import CollectiveMismatchError, RemoteError, UsageError
from overlap.parallel import Adam, Sharded
from overlap.runtime.memory.arrays import array_in_loan, as_read_only
from tests.errors import error_of
from transports.shared_memory.engine import BUILT

from .cases import Case, whole_numbers
from .companies import Wires, by_shared_memory, by_sockets, in_memory, run_far
from .worlds import failure_of, run

# -- results that ranks share: read-only, once in memory that ranks have in common, and gone with the last of them -----

pytestmark = pytest.mark.skipif(not BUILT, reason="it was not compiled")

WIRES: dict[str, Wires] = {
    "shared memory": by_shared_memory,
    "slots": partial(by_shared_memory, reads=False),
    "no room": partial(by_shared_memory, limit_bytes=0),
    "sockets": by_sockets,
    "one wire": in_memory,
}
F4 = np.dtype(np.float32)
CASES = [
    # on the board, copied to memory that all map, and read where they are; and nothing at all
    *(Case(kind="all_reduce", shape=(size,), dtype=F4, kwargs={"op": "sum"}) for size in (0, 3, 2000, 270_001)),
    Case(kind="all_reduce", shape=(), kwargs={"op": "max"}),
    Case(kind="all_reduce", shape=(40, 3), dtype=np.dtype(np.int8), kwargs={"op": "mean"}),
    *(Case(kind="all_gather", shape=(size, 2)) for size in (0, 3, 5000)),
    *(Case(kind="broadcast", shape=(size,), kwargs={"root": 1}) for size in (0, 3, 5000)),
]
LARGE = 2  # of what is not empty


def lies(array: Any) -> tuple[int, int]:
    """Return the file and the place in it that an array's memory is; file 0 is a process's own."""
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines():
        bounds, _, offset, _, inode = line.split()[:5]
        start, stop = (int(part, 16) for part in bounds.split("-"))
        if start <= address < stop:
            return int(inode), int(offset, 16) + address - start if int(inode) else address
    raise AssertionError("every array is somewhere")


async def all_cases(rank: overlap.Rank) -> list[Any]:
    found = [await case.issue(rank.world, case.input(rank.rank), shared=True) for case in CASES]
    for case, got, want in zip(
        CASES, found, [case.expected(rank.world_size)[rank.rank] for case in CASES], strict=True
    ):
        assert (got.dtype, got.shape) == (want.dtype, want.shape), case
        assert (got == want).all(), case
        assert not got.flags.writeable
        if got.size:
            with pytest.raises(ValueError):
                got.flags.writeable = True
    places = [lies(got) for got in found if got.size]
    await rank.barrier()  # until then nobody's memory is another's
    return places


@pytest.mark.parametrize(("wires", "each"), [*((name, 1) for name in WIRES), ("shared memory", 2)])
def test_the_same_results_everywhere_and_once_where_memory_is_common(wires: str, each: int) -> None:
    places = run_far(all_cases, 2, each, wires=WIRES[wires])
    for place, lying in enumerate(zip(*places, strict=True)):
        if wires in ("shared memory", "slots") or (wires == "no room" and place != LARGE):  # a little there always is
            assert len(set(lying)) == 1
            assert lying[0][0] > 0
        else:
            assert len(set(lying)) == len(lying)


def test_one_array_for_all_ranks_of_a_process(clock: str) -> None:
    places = overlap.run(all_cases, ranks=3, clock=clock)
    assert all(len(set(each)) == 1 for each in zip(*places, strict=True))


@pytest.mark.parametrize("wires", [in_memory, by_shared_memory])
def test_blocks_that_differ(wires: Wires) -> None:
    async def main(rank: overlap.Rank) -> tuple[list[int], tuple[int, int]]:
        mine = np.full((rank.rank + 1, 2), rank.rank)
        joined = await rank.all_gather(mine, counts=[1, 2, 3], shared=True)
        return joined[:, 1].tolist(), lies(joined)

    found = run_far(main, 3, 1, wires=wires)
    assert [rows for rows, _ in found] == [[0, 1, 1, 2, 2, 2]] * 3
    assert len({place for _, place in found}) == (1 if wires is by_shared_memory else 3)


def test_memory_is_used_again_once_every_rank_has_dropped_all_views_of_it() -> None:
    limit = partial(by_shared_memory, limit_bytes=5 << 20)  # of which each process has 3 MiB left for two results

    async def main(rank: overlap.Rank) -> list[bool]:
        mine, kept, shared = np.full(1 << 19, rank.rank, np.uint8), list[Any](), list[bool]()

        async def gather() -> Any:
            joined = await rank.all_gather(mine, shared=True)
            assert joined.sum() == 1 << 19
            shared.append(lies(joined)[0] > 0)
            return joined

        for _ in range(4):
            kept.append(memoryview(await gather()).cast("B")[5:])
        await gather()  # all are in use
        if rank.rank == 0:
            kept.clear()
        await rank.barrier()
        await gather()  # still, by one of two
        kept.clear()
        await rank.barrier()
        for _ in range(9):  # more than there is room for
            await gather()
            await rank.barrier()
        return shared

    gc.collect()
    assert run_far(main, 2, 1, wires=limit) == [[True] * 4 + [False] * 2 + [True] * 9] * 2


def test_what_is_held_outlives_the_world() -> None:
    async def main(rank: overlap.Rank) -> Any:
        return await rank.all_reduce(np.arange(5.0), shared=True)

    assert [each.tolist() for each in run_far(main, 2, 1, wires=by_shared_memory)] == [[0.0, 2.0, 4.0, 6.0, 8.0]] * 2


def test_a_fork_drops_nothing() -> None:
    async def main(rank: overlap.Rank) -> list[bool]:
        limit_reached, kept = list[bool](), [await rank.all_gather(np.ones(1 << 19, np.uint8), shared=True)]
        if rank.rank == 0:
            child = os.fork()
            if not child:
                kept.clear()
                os._exit(0)
            assert await trio.to_thread.run_sync(os.waitpid, child, 0) == (child, 0)
        await rank.barrier()
        before = lies(kept[0])
        for _ in range(3):
            limit_reached.append(lies(await rank.all_gather(np.zeros(1 << 19, np.uint8), shared=True)) == before)
            await rank.barrier()
        assert kept[0].all()
        return limit_reached

    assert run_far(main, 2, 1, wires=by_shared_memory) == [[False] * 3] * 2


@pytest.mark.parametrize("place", ["one process", "shared memory"])
def test_ranks_must_agree_on_it(place: str) -> None:
    async def main(rank: overlap.Rank) -> None:
        await rank.all_reduce(np.ones(3, np.float32), shared=rank.rank == 0)

    errors: list[Any] = (
        [failure_of(run, main, 2)] if place == "one process" else run_far(main, 2, 1, wires=by_shared_memory)
    )
    for error in errors:
        cause = error.__cause__  # of two processes one may be told by the other before it sees for itself
        told = isinstance(cause, RemoteError) and cause.type_name == "CollectiveMismatchError"
        assert isinstance(cause, CollectiveMismatchError) or told
        assert "all_reduce(float32 (3,), op='sum', shared=True)" in str(error)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"shared": 1}, "shared: expected True or False, got 1"),
        ({"out": np.ones(3)}, "out: a result that ranks share lies in memory of its own; pass out= or shared=True"),
        ({"x": [np.ones(3)]}, "x: a list or dict of arrays cannot be shared; issue a call with shared=True for each"),
    ],
)
def test_what_cannot_be_meant(kwargs: dict[str, Any], message: str) -> None:
    async def main(rank: overlap.Rank) -> str:
        return str(error_of(UsageError, rank.all_reduce, **{"x": np.ones(3), "shared": True, **kwargs}))

    assert run(main, 1) == [message]


def test_arrays_in_borrowed_memory() -> None:
    dropped = list[int]()
    memory = bytearray(range(8))
    array = array_in_loan(memoryview(memory).toreadonly(), (2, 2), np.dtype(np.int16), lambda: dropped.append(1))
    views = [array.T[:1], memoryview(array), np.asarray(array).reshape(-1).view(np.uint8), array[0, 1:]]
    assert array.tobytes() == bytes(memory)
    del array
    while views:
        assert not dropped
        views.pop(0)
    assert dropped == [1]


def test_read_only_arrays_stay_so() -> None:
    for array in (np.ones(3), np.ones((2, 3), np.float16), np.ones(()), np.ones(0)):
        closed = as_read_only(array)
        assert (closed.dtype, closed.shape) == (array.dtype, array.shape)
        assert closed.tobytes() == array.tobytes()
        assert not closed.flags.writeable


async def train(rank: overlap.Rank, shared: bool) -> tuple[bytes, set[bool]]:
    params = {f"layer {i}": whole_numbers((64, 33), np.dtype(np.float32), i) for i in range(3)}
    model = Sharded(rank, params, optimizer=Adam(0.1), stage=3, shared=shared, bucket_bytes=1)
    common = set()
    for step in range(3):
        for name in params:
            common.add(lies(await model[name])[0] > 0)
        for name in reversed(params):
            model.reduce(name, np.full((64, 33), rank.rank + step, np.float32))
        model.step()
    weights = await model.finish()
    return b"".join(weights[name].tobytes() for name in params), common


def test_gathered_weights_lie_there_once() -> None:
    alone, together = (run_far(train, 2, 1, shared, wires=by_shared_memory) for shared in (False, True))
    assert [weights for weights, _ in together] == [weights for weights, _ in alone]
    assert [common for _, common in together] == [{True}] * 2
    assert [common for _, common in alone] == [{False}] * 2


def test_weights_that_stay_are_not_shared() -> None:
    async def main(rank: overlap.Rank) -> str:
        return str(error_of(UsageError, Sharded, rank, {"w": np.ones(3)}, optimizer=Adam(0.1), stage=2, shared=True))

    assert run(main, 1) == ["shared: only stage 3 gathers parameters anew for each use; stage 2 keeps them"]


# -- arrays where other processes of this host read them: the same results, without a copy of theirs -------------------

SIZE = 600_000  # elements of 4 bytes: too many to be copied

COMMON_WIRES = {name: wires for name, wires in WIRES.items() if name != "one wire"}


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
    assert run_far(every_way, len(common), 1, common, wires=COMMON_WIRES[wires]) == [[True] * 8] * len(common)


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
