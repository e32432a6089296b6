"""Comparison of items between ranks: which rank is named, and which item."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from overlap import UsageError
from overlap.parallel.buckets.agreement import check_alike, digest_texts

ITEMS = [f"item {number}" for number in range(100)]


def told(mine: Sequence[str], *others: Sequence[str]) -> str:
    """Return what rank 5 says of itself and others, which are ranks 6, 7, ...; "" if all are alike."""
    gathered = np.concatenate([digest_texts(mine), *map(digest_texts, others)])
    try:
        check_alike("params", mine, gathered, range(5, 6 + len(others)), 5)
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
        check_alike("params", ITEMS[:1], np.concatenate([digest_texts(ITEMS[:1]), damaged]), [5, 6], 5)
    assert str(caught.value) == "params differ between rank 5 and rank 6: the digests have come damaged"
