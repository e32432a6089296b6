"""`exact=True`: every element is reduced in the order of ranks, along every path, wherever it lies."""

import ml_dtypes
import numpy as np
import pytest

import overlap

from .companies import run_far
from .reference import Array, fold
from .worlds import run

DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
EXACT_PATHS = ("direct", "ring", "wire", "one_shot", "rank_order", "rank_chain")
KINDS = ("all_reduce", "reduce_scatter", "uneven")


def rough(rank: int, elements: int, dtype: np.dtype = DTYPES[0]) -> Array:
    """Numbers of all magnitudes: every order of addition rounds differently."""
    rng = np.random.default_rng((rank, 5))
    return (rng.standard_normal(elements) * 10.0 ** rng.integers(-3, 4, elements)).astype(dtype)


def issue(rank: overlap.Rank, kind: str, x: Array, op: str) -> "overlap.CollectiveFuture":
    if kind == "all_reduce":
        return rank.all_reduce(x, op, exact=True)
    if kind == "reduce_scatter":
        return rank.reduce_scatter(x, op, exact=True)
    n = rank.world_size
    return rank.reduce_scatter(x, op, counts=[len(x), *[0] * (n - 1)] if n < 3 else cuts(n, len(x)), exact=True)


def cuts(ranks: int, rows: int) -> list[int]:
    """Blocks that differ, one of them empty."""
    return [0, rows // 3, *[1] * (ranks - 3), rows - rows // 3 - ranks + 3]


async def everything(rank: overlap.Rank, elements: int, dtypes: tuple[np.dtype, ...], ops: tuple[str, ...]) -> Array:
    parts = []
    for dtype in dtypes:
        x = rough(rank.rank, elements * rank.world_size, dtype)
        for op in ops:
            parts += [(await issue(rank, kind, x, op)).tobytes() for kind in KINDS]
            parts.append((await rank.all_reduce(x, op, out=x.copy(), exact=True)).tobytes())
    return parts


def expected(size: int, elements: int, dtypes: tuple[np.dtype, ...], ops: tuple[str, ...]) -> list[list[bytes]]:
    parts: list[list[bytes]] = [[] for _ in range(size)]
    for dtype in dtypes:
        xs = [rough(rank, elements * size, dtype) for rank in range(size)]
        for op in ops:
            whole = fold(op, xs)
            uneven = np.split(whole, np.cumsum([elements * size, *[0] * (size - 1)] if size < 3 else
                                               cuts(size, elements * size))[:-1])  # fmt: skip
            for rank, block in enumerate(np.split(whole, size)):
                parts[rank] += [whole.tobytes(), block.tobytes(), uneven[rank].tobytes(), whole.tobytes()]
    return parts


@pytest.mark.parametrize("path", EXACT_PATHS)
@pytest.mark.parametrize("size", [1, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4, 7))])
def test_every_element_is_reduced_in_rank_order_along_every_path(size: int, path: str) -> None:
    asked = 13, DTYPES, ("sum", "mean", "max")
    assert run(everything, size, *asked, path=path) == expected(size, *asked)


@pytest.mark.parametrize("path", ["ring", "rank_order", "rank_chain", "wire"])
@pytest.mark.parametrize("elements", [0, 1, 70_001])
def test_few_elements_and_many(elements: int, path: str) -> None:
    """Fewer than ranks, and enough for worker threads and slices."""
    assert run(everything, 3, elements, DTYPES[:1], ("sum",), path=path) == expected(3, elements, DTYPES[:1], ("sum",))


@pytest.mark.parametrize("path", ["ring", "wire"])
def test_where_buckets_are_cut_does_not_matter(path: str) -> None:
    async def main(rank: overlap.Rank) -> list[bytes]:
        x = rough(rank.rank, 1000)
        whole = [await rank.all_reduce(x, "mean", exact=True)]
        cut = [await rank.all_reduce(part, "mean", exact=True) for part in np.split(x, [7, 8, 500, 777])]
        return [np.concatenate(each).tobytes() for each in (whole, cut)]

    for whole, cut in run(main, 4, path=path):
        assert whole == cut


def test_a_ring_does_otherwise() -> None:
    """What the tests above would not see if numbers were not rough enough."""

    async def main(rank: overlap.Rank) -> bytes:
        return (await rank.all_reduce(rough(rank.rank, 1000))).tobytes()

    assert run(main, 4, path="ring")[0] != fold("sum", [rough(rank, 1000) for rank in range(4)]).tobytes()


@pytest.mark.parametrize(("processes", "each"), [(2, 2), (4, 1)])
def test_between_processes(processes: int, each: int) -> None:
    asked = 50, DTYPES[:1], ("sum",)
    assert run_far(everything, processes, each, *asked) == expected(4, *asked)


@pytest.mark.parametrize("algorithm", [None, "ring", "rank_chain"])
def test_on_the_virtual_clock(algorithm: str | None) -> None:
    """Where the data moves at once, but an algorithm that keeps the order is priced."""
    asked = 50, DTYPES[:1], ("sum",)
    algorithms = set()

    async def main(rank: overlap.Rank) -> Array:
        future = rank.all_reduce(np.ones(1 << 18, np.float32), exact=True)
        await future
        algorithms.add(future.algorithm)
        return await everything(rank, *asked)

    got = overlap.run(main, ranks=8, cluster="trn1.32xlarge", clock="virtual", algorithm=algorithm)
    assert got == expected(8, *asked)
    assert algorithms <= {"one_shot", "rank_order", "rank_chain"}
    assert algorithms == {algorithm} or algorithm != "rank_chain"


def test_ranks_agree_on_it() -> None:
    async def main(rank: overlap.Rank) -> str:
        with pytest.raises(overlap.CollectiveMismatchError) as caught:
            await rank.all_reduce(np.ones(4), exact=rank.rank == 1)
        return caught.value.calls

    calls = ("all_reduce(float64 (4,), op='sum')", "all_reduce(float64 (4,), op='sum', exact=True)")
    assert {tuple(sorted(told)) for told in run(main, 2)} == {tuple(sorted(calls))}


def test_ranks_of_other_processes_agree_on_it_too() -> None:
    async def main(rank: overlap.Rank) -> list[str]:
        with pytest.raises(overlap.CollectiveMismatchError) as caught:
            await rank.all_reduce(np.ones(4), exact=rank.rank == 1)
        return sorted(caught.value.calls)

    calls = ["all_reduce(float64 (4,), op='sum')", "all_reduce(float64 (4,), op='sum', exact=True)"]
    assert run_far(main, 2, 1) == [calls, calls]


def test_it_is_yes_or_no() -> None:
    async def main(rank: overlap.Rank) -> None:
        with pytest.raises(overlap.UsageError) as caught:
            rank.all_reduce(np.ones(4), exact=1)  # type: ignore[arg-type]
        assert str(caught.value) == "exact: expected True or False, got 1"

    run(main, 1)
