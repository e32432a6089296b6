"""Ranks that should have alike: comparison of items and of weights, and who is named."""

from collections.abc import Sequence

import numpy as np
import pytest

import overlap
from overlap import UsageError, parallel
from overlap.parallel.buckets.agreement import check_equal_items, digest_texts, minority_ranks
from tests.errors import error_of

from .programs import train, weights

# -- comparison of items between ranks: which rank is named, and which item --------------------------------------------

ITEMS = [f"item {number}" for number in range(100)]


def told(mine: Sequence[str], *others: Sequence[str]) -> str:
    """Return what rank 5 says of itself and others, which are ranks 6, 7, ...; "" if all are alike."""
    gathered = np.concatenate([digest_texts(mine), *map(digest_texts, others)])
    try:
        check_equal_items("params", mine, gathered, range(5, 6 + len(others)), 5)
    except UsageError as error:
        return str(error)
    return ""


def changed(items: Sequence[str], at: int) -> list[str]:
    return [*items[:at], "other", *items[at + 1 :]]


@pytest.mark.parametrize("count", [0, 1, 2, 61, 62, 63, 64, 100])
def test_equal_items_are_alike(count: int) -> None:
    assert told(ITEMS[:count], ITEMS[:count]) == ""


@pytest.mark.parametrize(
    ("count", "at", "item"),
    [
        (1, 0, "item 0 here is something else there"),
        (3, 2, "item 2 here is something else there"),
        (100, 0, "item 0 here is something else there"),
        (62, 61, "item 61 here is something else there"),
        (100, 61, "item 61 here is something else there"),
        (63, 62, "one of those after item 61"),
        (100, 62, "one of those after item 61"),
        (100, 99, "one of those after item 61"),
    ],
)
def test_the_first_rank_and_the_first_item_are_named(count: int, at: int, item: str) -> None:
    mine = ITEMS[:count]
    expected = f"params differ between rank 5 and rank 7: {item}"
    assert told(mine, mine, changed(mine, at), changed(mine, 0)) == expected


@pytest.mark.parametrize(("mine", "theirs"), [(0, 1), (2, 3), (3, 2), (1, 0), (2, 100), (62, 63), (63, 64), (100, 99)])
def test_another_number_of_items_is_told(mine: int, theirs: int) -> None:
    expected = f"params differ between rank 5 and rank 6: there are {mine} here and {theirs} there"
    assert told(ITEMS[:mine], ITEMS[:theirs]) == expected


def test_damaged_digests_are_told() -> None:
    damaged = digest_texts(ITEMS[:1])
    damaged[32] ^= 1 << 62
    with pytest.raises(UsageError) as caught:
        check_equal_items("params", ITEMS[:1], np.concatenate([digest_texts(ITEMS[:1]), damaged]), [5, 6], 5)
    assert str(caught.value) == "params differ between rank 5 and rank 6: the digests have come damaged"


# -- weights that all ranks should have alike are compared, and whoever has others is named ----------------------------


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
    error = error_of(overlap.RankFailedError, trained, ranks, flipped).cause
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
