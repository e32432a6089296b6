"""A world in which all wait while an error is known that nobody has awaited ends with that error."""

from __future__ import annotations

import numpy as np
import pytest

import overlap


def no_data() -> None:
    raise ValueError("no data")


async def main(rank: overlap.Rank) -> None:
    if rank.rank == 0:
        rank.compute(no_data, errors="await", seconds=0.001)
    await rank.recv(np.empty(1), src=1 - rank.rank)


@pytest.mark.parametrize("clock", [pytest.param("real", marks=pytest.mark.slow), "virtual"])
def test_it_ends_with_that_error(clock: str) -> None:
    cluster = "local" if clock == "real" else "trn1.2xlarge"
    with pytest.raises(
        overlap.RankFailedError, match=r"rank 0 failed at test_unseen_errors\.py:12: ValueError: no data"
    ):
        overlap.run(main, ranks=2, clock=clock, cluster=cluster)
