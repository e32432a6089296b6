"""The same bits on all ranks and in the next run; with `exact=True`, in the order of ranks wherever it is reduced."""

import ml_dtypes
import numpy as np
import pytest

import overlap
from tests.errors import error_from, error_of

from .cases import OPS
from .companies import run_far
from .reference import Array, fold
from .worlds import FEW_PATHS, PATHS, run

# -- `exact=True`: every element is reduced in the order of ranks, along every path, wherever it lies ------------------

EXACT_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
EXACT_PATHS = ("direct", "ring", "wire", "one_shot", "rank_order", "rank_chain")
KINDS = ("all_reduce", "reduce_scatter", "uneven")


def rough(rank: int, elements: int, dtype: np.dtype = EXACT_DTYPES[0]) -> Array:
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


async def reductions(rank: overlap.Rank, elements: int, dtypes: tuple[np.dtype, ...], ops: tuple[str, ...]) -> Array:
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
    asked = 13, EXACT_DTYPES, ("sum", "mean", "max")
    assert run(reductions, size, *asked, path=path) == expected(size, *asked)


@pytest.mark.parametrize("path", ["ring", "rank_order", "rank_chain", "wire"])
@pytest.mark.parametrize("elements", [0, 1, 70_001])
def test_few_elements_and_many(elements: int, path: str) -> None:
    """Fewer than ranks, and enough for worker threads and slices."""
    assert run(reductions, 3, elements, EXACT_DTYPES[:1], ("sum",), path=path) == expected(
        3, elements, EXACT_DTYPES[:1], ("sum",)
    )


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
    asked = 50, EXACT_DTYPES[:1], ("sum",)
    assert run_far(reductions, processes, each, *asked) == expected(4, *asked)


@pytest.mark.parametrize("algorithm", [None, "ring", "rank_chain"])
def test_on_the_virtual_clock(algorithm: str | None) -> None:
    """Where the data moves at once, but an algorithm that keeps the order is priced."""
    asked = 50, EXACT_DTYPES[:1], ("sum",)
    algorithms = set()

    async def main(rank: overlap.Rank) -> Array:
        future = rank.all_reduce(np.ones(1 << 18, np.float32), exact=True)
        await future
        algorithms.add(future.algorithm)
        return await reductions(rank, *asked)

    got = overlap.run(main, ranks=8, cluster="trn1.32xlarge", clock="virtual", algorithm=algorithm)
    assert got == expected(8, *asked)
    assert algorithms <= {"one_shot", "rank_order", "rank_chain"}
    assert algorithms == {algorithm} or algorithm != "rank_chain"


def test_ranks_agree_on_it() -> None:
    async def main(rank: overlap.Rank) -> str:
        error = await error_from(overlap.CollectiveMismatchError, rank.all_reduce(np.ones(4), exact=rank.rank == 1))
        return error.calls

    calls = ("all_reduce(float64 (4,), op='sum')", "all_reduce(float64 (4,), op='sum', exact=True)")
    assert {tuple(sorted(told)) for told in run(main, 2)} == {tuple(sorted(calls))}


def test_ranks_of_other_processes_agree_on_it_too() -> None:
    async def main(rank: overlap.Rank) -> list[str]:
        error = await error_from(overlap.CollectiveMismatchError, rank.all_reduce(np.ones(4), exact=rank.rank == 1))
        return sorted(error.calls)

    calls = ["all_reduce(float64 (4,), op='sum')", "all_reduce(float64 (4,), op='sum', exact=True)"]
    assert run_far(main, 2, 1) == [calls, calls]


def test_it_is_yes_or_no() -> None:
    async def main(rank: overlap.Rank) -> None:
        error = error_of(overlap.UsageError, rank.all_reduce, np.ones(4), exact=1)
        assert str(error) == "exact: expected True or False, got 1"

    run(main, 1)


# -- the same bits on all ranks, and again in the next run: rounding, zeros of both signs, NaNs with payloads ----------

DTYPES = tuple(np.dtype(kind) for kind in (np.float32, np.float64, np.float16, np.complex64, ml_dtypes.bfloat16))


def rough_numbers(rank: int, dtype: np.dtype, elements: int) -> Array:
    """Numbers of all magnitudes, so that every order of addition rounds differently; some zeros, NaNs, infinities."""
    rng = np.random.default_rng((rank, elements))
    x = rng.standard_normal(elements) * 10.0 ** rng.integers(-3, 4, elements)
    for value in (0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf):
        x[rng.random(elements) < 0.1] = value
    with np.errstate(all="ignore"):
        if dtype.kind == "c":
            return (x + 1j * rng.permutation(x)).astype(dtype)
        return x.astype(dtype)


async def reductions_as_bytes(rank: overlap.Rank, elements: int) -> list[bytes]:
    """All reductions of all dtypes, as bytes; blocks of a reduce_scatter are gathered again."""
    results: list[Array] = []
    for dtype in DTYPES:
        x = rough_numbers(rank.rank, dtype, elements * rank.world_size)
        for op in OPS:
            results.append(await rank.all_reduce(x, op))
            results.append(await rank.all_gather(rank.reduce_scatter(x, op)))
            results.append(await rank.broadcast(await rank.reduce(x, 0, op)))
    return [result.tobytes() for result in results]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("size", "path"),
    [
        *((3, path) for path in PATHS),
        (4, "recursive_doubling"),
        *(pytest.param(4, path, marks=pytest.mark.slow) for path in PATHS if path != "recursive_doubling"),
        *(pytest.param(size, path, marks=pytest.mark.slow) for size in (2, 7, 8) for path in PATHS),
    ],
)
def test_all_ranks_get_the_same_bits_in_every_run(size: int, path: str) -> None:
    first = run(reductions_as_bytes, size, 37, path=path)
    for got in first[1:]:
        assert got == first[0]
    assert run(reductions_as_bytes, size, 37, path=path) == first


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    "path", [path if path in FEW_PATHS else pytest.param(path, marks=pytest.mark.slow) for path in PATHS]
)
def test_large_results_too(path: str) -> None:
    """Worker threads take the pieces of a large array in any order."""

    async def main(rank: overlap.Rank) -> list[bytes]:
        x = rough_numbers(rank.rank, np.dtype(np.float32), 200_001 * 3)
        issued = [rank.all_reduce(x), rank.all_reduce(x, "max"), rank.all_gather(rank.reduce_scatter(x, "mean"))]
        return [(await future).tobytes() for future in issued]

    first = run(main, 3, path=path)
    assert first[0] == first[1] == first[2]
    assert run(main, 3, path=path) == first


def test_the_direct_path_adds_in_rank_order() -> None:
    """So a result can be predicted to the last bit: ((x0 + x1) + x2) + x3."""

    async def main(rank: overlap.Rank) -> tuple[Array, Array]:
        x = rough_numbers(rank.rank, np.dtype(np.float32), 1000)
        return x, await rank.all_reduce(x)

    results = run(main, 4)
    with np.errstate(all="ignore"):
        (x0, _), (x1, _), (x2, _), (x3, _) = results
        total = ((x0 + x1) + x2) + x3
    assert all(got.tobytes() == total.tobytes() for _, got in results)
