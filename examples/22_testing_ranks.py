"""A test of a loop on many ranks: in virtual time, in orders that seeds decide, with faults.

`python -m pytest examples/22_testing_ranks.py` runs the tests. You will see, without pytest, the verdict on a wrong
loop, the line that repeats it, and what the right loop leaves exposed.

    python examples/22_testing_ranks.py
"""

import numpy as np
import pytest

import overlap
from overlap.testing import Ranks, RanksFailed

STEPS = 3


async def train(rank: overlap.Rank, stops_at: int = STEPS) -> float:
    """Average gradients, while the next layer computes; a rank may stop early, which is wrong."""
    weight = np.zeros(1 << 16, np.float32)
    for step in range(STEPS):
        if step == stops_at:
            break
        with rank.step(step):
            gradient = rank.compute(np.full, weight.shape, step + 1.0, np.float32, seconds=1e-3)
            reduced = rank.all_reduce(gradient, op="mean")
            rank.compute(np.zeros, 4, seconds=1e-3)
            weight = weight - 0.1 * await reduced
    return float(weight[0])


async def wrong(rank: overlap.Rank) -> float:
    return await train(rank, stops_at=2 if rank.rank == 1 else STEPS)


@pytest.mark.ranks(8, cluster="trn1.32xlarge", seeds=20)
async def test_every_rank_learns(rank: overlap.Rank) -> None:
    assert await train(rank) == pytest.approx(-0.6)


def test_it_names_a_rank_that_dies(ranks: Ranks) -> None:
    ranks.run(train, ranks=8, cluster="trn1.32xlarge", faults="die, late", seeds=10)


if __name__ == "__main__":
    try:
        Ranks().run(wrong, ranks=8, cluster="trn1.32xlarge")
    except RanksFailed as failed:
        print(failed)
    run = Ranks().run(train, ranks=8, cluster="trn1.32xlarge")
    print(f"right: {run.exposed:.1%} exposed, {run.sent_bytes:,} bytes sent by a rank")
