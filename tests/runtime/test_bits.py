"""The same bits on all ranks, and again in the next run: rounding, zeros of both signs, NaNs with payloads."""

import ml_dtypes
import numpy as np
import pytest

import overlap

from .cases import OPS
from .reference import Array
from .worlds import FEW_PATHS, PATHS, run

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


async def everything(rank: overlap.Rank, elements: int) -> list[bytes]:
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
    first = run(everything, size, 37, path=path)
    for got in first[1:]:
        assert got == first[0]
    assert run(everything, size, 37, path=path) == first


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
