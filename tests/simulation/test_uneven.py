"""What blocks of different sizes cost in virtual time: by the bytes that travel, not by those of the largest block."""

import numpy as np
import pytest

import overlap
from overlap import UsageError

from .worlds import KB, MS, assert_fails, mesh, simulate

RANKS = 4
KINDS = ("all_gather", "reduce_scatter", "all_to_all")
COUNTS = {
    "primes": [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53],
    "one larger": [8] * 14 + [9, 8],
    "some empty": [0, 9, 0, 4] * 4,
}


def took_ns(kind, counts, *, row_bytes=KB, cluster=None, algorithm=None, plain=False):
    """Return how long a collective takes with these counts; `plain`: as if nobody had said them."""
    counts = np.array(counts)

    async def main(rank):
        rows = int(counts.sum() if kind == "reduce_scatter" else counts[rank.rank].sum())
        x = overlap.shape_only((rows, row_bytes), np.uint8)
        await getattr(rank, kind)(x, **({} if plain else {"counts": counts}))
        return rank.now_ns()

    results, _ = simulate(main, len(counts), cluster=cluster, algorithm=algorithm, shapes_only=True)
    return max(results)


def shaped(kind, numbers):
    table = np.array(numbers).reshape(RANKS, RANKS)
    return table if kind == "all_to_all" else table[1]


def test_on_wires_of_their_own_the_largest_block_decides():
    table = [[9, 1, 2, 3], [7, 9, 0, 1], [0, 2, 9, 4], [1, 5, 1, 9]]
    assert took_ns("all_to_all", table, algorithm="mesh") == 7 * MS  # a row takes a millisecond; own rows stay


def test_in_a_ring_every_step_waits_for_the_largest_block_in_it():
    assert took_ns("all_gather", [1, 6, 2, 3], algorithm="ring") == 18 * MS  # three hops of 6 rows


def test_nothing_is_free():
    assert took_ns("all_gather", [0, 0, 0, 5], algorithm="mesh") == 5 * MS


@pytest.mark.parametrize("algorithm", ["mesh", "ring", None])
@pytest.mark.parametrize("numbers", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("kind", KINDS)
def test_between_equal_blocks_of_the_average_and_of_the_largest_size(kind, numbers, algorithm):
    counts = shaped(kind, numbers)
    row_bytes, n = 1600 * KB, len(counts)
    average = np.full_like(counts, int(counts.sum()))  # of rows that are as much smaller
    took = took_ns(kind, counts, row_bytes=row_bytes, algorithm=algorithm)
    least = took_ns(kind, average, row_bytes=row_bytes // counts.size, algorithm=algorithm, plain=True)
    most = took_ns(kind, np.full_like(counts, counts.max()), row_bytes=row_bytes, algorithm=algorithm, plain=True)
    assert least <= took <= most
    sent = [counts.sum() - counts[r] for r in range(n)] if kind != "all_to_all" else counts.sum(1) - counts.diagonal()
    busiest_ns = int(max(sent)) * row_bytes // (n - 1) * 1000  # of so many wires, a byte in a microsecond
    assert took >= busiest_ns


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("machine", "ranks"), [("trn1.32xlarge", 8), ("trn1.32xlarge x2", 64), ("dl1.24xlarge", 8)])
def test_blocks_that_hardly_differ_cost_hardly_more_than_equal_ones(machine, ranks, kind):
    numbers = np.full((ranks, ranks) if kind == "all_to_all" else ranks, 1000)
    equal = took_ns(kind, numbers, cluster=machine, plain=True)
    numbers.flat[3] += 1
    took = took_ns(kind, numbers, cluster=machine)
    assert equal <= took <= equal * 1.001  # the largest block has a thousandth more


def test_ranks_that_stand_for_others_have_blocks_of_one_size():
    async def main(rank):
        await rank.all_gather(np.ones(rank.rank + 1), counts=range(1, 9))

    with assert_fails(
        UsageError, r"counts: ranks that behave alike have blocks of one size, got all_gather\(float64 \(36,\)"
    ):
        simulate(main, 8, cluster=mesh(8), alike=lambda rank: rank % 2, shapes_only=True)
