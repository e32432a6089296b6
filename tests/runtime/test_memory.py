"""Results, scratch and staging come from one pool of the world, which says what it keeps."""

import numpy as np
import pytest

import overlap

from .worlds import FEW_PATHS, run

ELEMENTS = 1 << 18  # 1 MiB of float32


@pytest.mark.parametrize("path", FEW_PATHS)
def test_dropped_results_are_used_again(path: str) -> None:
    """Twenty operations of two ranks, each with a staged input and a result; a few of these are alive at a time."""

    async def main(rank: overlap.Rank) -> tuple[int, int]:
        x = np.full((ELEMENTS, 2), 1.0, np.float32)[:, 0]  # not contiguous: it is staged
        for _ in range(20):
            result = await rank.all_reduce(x)
            assert result[-1] == 2
        await rank.barrier()
        figures = rank.statistics().buffer_pool
        return figures.hits + figures.misses, figures.misses

    for made, new in run(main, 2, path=path):
        assert made >= 80
        assert 4 <= new <= 16


def test_results_that_are_kept_are_not_written_to_again() -> None:
    async def main(rank: overlap.Rank) -> list[float]:
        kept = []
        for value in range(10):
            result = await rank.all_reduce(np.full(ELEMENTS, value, np.float32))
            kept.append(result[7:9].reshape(2, 1))
            del result
        return [float(part.sum()) for part in kept]

    assert run(main, 2) == [[4.0 * value for value in range(10)]] * 2


def test_results_outlive_their_world() -> None:
    async def main(rank: overlap.Rank) -> np.ndarray:
        return await rank.all_reduce(np.full(ELEMENTS, 1, np.float32))

    results = [result for _ in range(3) for result in run(main, 2)]
    assert {float(result.sum()) for result in results} == {2.0 * ELEMENTS}


def test_the_statistics_are_those_of_the_world() -> None:
    async def main(rank: overlap.Rank) -> list[int]:
        result = await rank.broadcast(np.zeros(ELEMENTS, np.float32))
        figures = rank.statistics().buffer_pool
        seen = [figures.used_bytes, figures.held_bytes]
        del result
        figures = rank.statistics().buffer_pool
        return [*seen, figures.used_bytes, figures.held_bytes]

    assert run(main, 1) == [[1 << 20, 0, 0, 1 << 20]]


@pytest.mark.parametrize("like", [(5, "f4"), ([5], "f4"), ((np.int64(5),), np.float32)])
def test_shapes_of_what_is_received(like: tuple[object, object]) -> None:
    async def main(rank: overlap.Rank) -> tuple[int, ...]:
        rank.send(np.zeros(5, np.float32), 0)
        return (await rank.recv(like, 0)).shape

    assert run(main, 1) == [(5,)]
