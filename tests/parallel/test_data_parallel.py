"""Data parallel against one rank that trains on the whole batch, and what it says of wrong use."""

import numpy as np
import pytest

import overlap
from overlap import parallel

from .programs import alone, train, weights

OPTIMIZERS = (parallel.SGD(0.1), parallel.SGD(0.1, momentum=0.9), parallel.Adam(1e-2), parallel.AdamW(1e-2))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: f"{type(o).__name__}-{getattr(o, 'momentum', '')}")
@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_ranks_together_learn_what_one_learns_alone(optimizer, clock):
    def make(rank):
        return parallel.DataParallel(rank, weights(), optimizer=optimizer)

    found = overlap.run(train, make, ranks=4, clock=clock, timeout_s=60)
    expected = alone(optimizer)
    for weights_of_rank in found:
        assert list(weights_of_rank) == list(expected)
        for name, w in expected.items():
            np.testing.assert_allclose(weights_of_rank[name], w, rtol=1e-10, atol=1e-12)


def test_a_hook_takes_the_place_of_all_reduce():
    seen = []

    async def hook(bucket):
        seen.append((bucket.rank.rank, bucket.index, bucket.step, bucket.names))
        first = await bucket.group.all_reduce(bucket.buffer, op="sum")
        return bucket.group.all_reduce(first / bucket.group.size, op="max")

    def make(rank, **options):
        return parallel.DataParallel(rank, weights(), optimizer=parallel.SGD(0.1), bucket_bytes=300, **options)

    with_hook = overlap.run(train, lambda rank: make(rank, hook=hook), ranks=2, timeout_s=60)
    without = overlap.run(train, make, ranks=2, timeout_s=60)
    assert all((with_hook[0][name] == w).all() for name, w in without[0].items())
    assert set(seen) == {
        (rank, index, step, names)
        for rank in range(2)
        for index, names in enumerate([("w3", "w2"), ("w1", "w0")])
        for step in range(1, 6)
    }
