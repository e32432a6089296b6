"""Weights that all ranks should have alike are compared, and whoever has others is named."""

import numpy as np
import pytest

import overlap
from overlap import parallel
from overlap.parallel.buckets.agreement import minority_ranks

from .programs import train, weights


def flip(model, name):
    """Flip the lowest bit of a weight's first element, as a cosmic ray would."""
    view = model[name]
    view = view.base if view.base is not None else view
    view.setflags(write=True)
    view.reshape(-1).view(np.uint8)[0] ^= 1


def trained(ranks, flipped=(), compare_every=2, steps=5):
    """Train; the ranks that are named have another bit after the third step. Return what all raise."""

    async def main(rank):
        params = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(5)}
        sgd = parallel.SGD(0.1)
        model = parallel.DataParallel(rank, params, optimizer=sgd, compare_every=compare_every)
        for step in range(steps):
            for name in ("b", "a"):
                model.reduce(name, np.ones_like(params[name]))
            await model.step()
            if step == 2 and rank.rank in flipped:
                await model.wait_updates()
                flip(model, "b")
        await model.finish()
        return model.steps

    return overlap.run(main, ranks=ranks, timeout_s=60)


def test_alike_nobody_is_named():
    assert trained(3) == [5] * 3


@pytest.mark.parametrize(
    ("ranks", "flipped", "told"),
    [
        (4, [2], "after step 4 rank 2 of 4 has other weights than the rest, first in 'b'"),
        (5, [1, 3], "after step 4 ranks 1, 3 of 5 have other weights than the rest, first in 'b'"),
        (2, [1], "after step 4 rank 1 of 2 has other weights than the rest, first in 'b'; with two halves, either may "
                 "be right"),
    ],
)  # fmt: skip
def test_a_bit_that_flips_in_one_replica_is_told_with_its_rank(ranks, flipped, told):
    with pytest.raises(overlap.RankFailedError) as caught:
        trained(ranks, flipped)
    error = caught.value.cause
    assert isinstance(error, overlap.ReplicaError)
    assert str(error) == f"{told}: the program wrote to them there, or memory or a processor failed"
    assert (error.ranks, error.parameter, error.step) == (tuple(flipped), "b", 4)


def test_without_it_nobody_looks():
    assert trained(2, [1], compare_every=None) == [5] * 2


def test_of_shapes_only_there_is_nothing_to_compare():
    async def main(rank):
        model = parallel.DataParallel(rank, {"w": rank.empty(4, "f4")}, optimizer=parallel.SGD(0.1), compare_every=1)
        model.reduce("w", rank.compute(lambda w: w, model["w"], seconds=0.001))
        model.step()
        return (await model.finish())["w"].shape

    assert overlap.run(main, ranks=2, clock=overlap.Virtual(shapes_only=True)) == [(4,)] * 2


def test_comparing_changes_no_bits():
    def make(rank, **options):
        return parallel.DataParallel(rank, weights(), optimizer=parallel.Adam(1e-2), **options)

    plain = overlap.run(train, make, 3, ranks=2, timeout_s=60)
    compared = overlap.run(train, lambda rank: make(rank, compare_every=1), 3, ranks=2, timeout_s=60)
    for one, other in zip(plain, compared, strict=True):
        assert {name: w.tobytes() for name, w in one.items()} == {name: w.tobytes() for name, w in other.items()}


@pytest.mark.parametrize(
    ("digests", "expected"), [([1], []), ([1, 1], []), ([2, 1, 1], [0]), ([1, 2], [1]), ([3, 1, 2, 1], [0, 2])]
)
def test_who_is_odd(digests, expected):
    assert minority_ranks(digests) == expected


def test_a_number_that_cannot_be_meant_is_refused():
    async def main(rank):
        with pytest.raises(overlap.UsageError) as caught:
            parallel.DataParallel(rank, {"w": np.zeros(2)}, optimizer=parallel.SGD(0.1), compare_every=0)
        return str(caught.value)

    assert overlap.run(main, ranks=1) == ["compare_every: expected a whole number from 1, got 0"]
