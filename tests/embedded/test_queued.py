"""More operations than a board has rows, issued before the first of them has ended."""

import numpy as np
import pytest

import overlap
from transports.base import OPERATIONS

from .connecting import TIMEOUT_S, connected


@pytest.mark.parametrize(
    ("count", "elements"),
    [(20 * OPERATIONS, 1), (20 * OPERATIONS, 2_000), pytest.param(100_000, 1, marks=pytest.mark.slow)],
)
def test_operations_that_nobody_awaits_yet(count: int, elements: int) -> None:
    def program(world: overlap.Connection) -> bool:
        rank = world.rank
        mine = [np.full(elements, float(number % 7 + rank.rank)) for number in range(7)]
        futures = [rank.all_reduce(mine[number % 7]) for number in range(count)]
        if rank.rank:
            futures.reverse()  # it hears of the last one first
        found = [float(future.result(TIMEOUT_S)[-1]) for future in futures]
        sums = [float(2 * (number % 7) + 1) for number in range(count)]
        return found == (sums[::-1] if rank.rank else sums)

    assert connected(program, 2) == [True, True]
