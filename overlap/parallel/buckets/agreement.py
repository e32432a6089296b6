"""Comparison of parameters, orders and weights between ranks, by digests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from ...errors import ReplicaError, UsageError, mark_agreed
from ...runtime.future import Future
from ...runtime.group import Group
from ...runtime.memory.arrays import metadata
from ...timeline.span import RoleName
from ..memory_work import MemoryWork, do_nothing, users_frame

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..tree import Array

_SLOTS = 64
"""Slots for digests; 512 bytes travel as fast as 8."""


def digest_texts(items: Iterable[str]) -> NDArray[np.int64]:
    """Return an array of 64 integers: the number of items, then a digest of each item, then filling.

    Only the first 62 items have a digest of their own; one more digest stands for all later items together.
    """
    texts = list(items)
    parts = [*texts[: _SLOTS - 2], "\n".join(texts[_SLOTS - 2 :])]
    hashes = [int.from_bytes(blake2b(part.encode(), digest_size=8).digest(), "big", signed=True) for part in parts]
    return np.array([len(texts), *hashes, *[0] * (_SLOTS - 1 - len(hashes))], np.int64)


def check_equal_items(
    subject: str, items: Sequence[str], gathered: NDArray[np.int64], ranks: Sequence[int], this_rank: int
) -> None:
    """Compare the digests of all ranks with the items of this one.

    Args:
        subject: The name of the items, and advice, for the message: "params: ...".
        items: The items of this rank.
        gathered: The results of `digest_texts` of all ranks, joined in the order of `ranks`.
        ranks: World ranks of the ranks that compare.
        this_rank: World rank of the caller.

    Raises:
        UsageError: Naming the first rank that differs, and the first item that does.
    """
    expected = digest_texts(items)
    for rank, row in zip(ranks, gathered.reshape(len(ranks), -1), strict=True):
        if (row != expected).any():
            # Index of the first item that differs. Column 0 is the number of items; if only that differs, argmax is 0.
            index = int((row[1:] != expected[1:]).argmax())
            count = int(row[0])
            if index < min(len(items), count, _SLOTS - 2):
                item = f"{items[index]} here is something else there"
            elif count != len(items):
                item = f"there are {len(items)} here and {count} there"
            elif index >= len(items):
                item = "the digests have come damaged"
            else:
                item = f"one of those after {items[index - 1]}"
            raise mark_agreed(UsageError(f"{subject} differ between rank {this_rank} and rank {rank}: {item}"))


def compare_items_of_ranks(
    work: MemoryWork, group: Group, subject: str, items: Sequence[str], *, name: str = ""
) -> Future[None]:
    """Return a future that fails, on every rank of a group, unless all have the same items.

    Args:
        work: Issues the comparison.
        group: The ranks that compare.
        subject: The name of the items; see `check_equal_items`.
        items: The items of this rank.
        name: Name of the operation in timelines.
    """
    label = RoleName(name, "library")
    gathered = group.all_gather(metadata(digest_texts(items)), name=label, call_site=users_frame())
    check = partial(check_equal_items, subject, items, ranks=group.ranks, this_rank=work.rank.rank)
    return work.compute(check if work.real else do_nothing, gathered, name="compare")


def compare_replicas(work: MemoryWork, group: Group, views: Mapping[str, Array], step: int) -> Future[None]:
    """Issue a comparison of the weights of all ranks; it runs after all computes issued so far, and nothing waits.

    Cost: one pass over the weights, at 10 GB/s and more. Each rank sends 8 bytes for each parameter, on a separate
    stream.

    Args:
        work: Issues the digests and the comparison.
        group: The ranks that should have the same weights.
        views: The weights by name.
        step: Number of the step after which they are compared, from 1, for the message.

    Returns:
        A future that fails on every rank, with a `ReplicaError`, if they differ.
    """
    nbytes = sum(view.nbytes for view in views.values())
    digest = partial(_digest_weights, views) if work.real else partial(metadata, np.zeros(len(views), np.int64))
    digested = work.compute(digest, name="digest of weights", moved_bytes=nbytes)
    stream, name = work.rank.stream(f"replicas of {group.name}"), RoleName("compare replicas", "library")
    gathered = group.all_gather(digested, stream=stream, name=name, call_site=users_frame())
    # In a world without data all digests are 0: there is nothing to compare.
    check = partial(_check_replicas, tuple(views), group.ranks, step)
    return work.compute(check if work.real else do_nothing, gathered, name="compare replicas")


def minority_ranks(digests: Sequence[int]) -> list[int]:
    """Return the indices of the ranks whose digest is not the most common one; empty if all digests are equal.

    If several digests are equally common, the one that occurs first counts as the most common.

    >>> minority_ranks([7, 7, 5, 7])
    [2]

    Args:
        digests: The digest of each rank.
    """
    [(usual, _)] = Counter(digests).most_common(1)  # of several that are as common, the first
    return [index for index, digest in enumerate(digests) if digest != usual]


def _digest_weights(views: Mapping[str, Array]) -> Array:
    """Return an int64 array with a digest of each weight, in the order of `views`."""
    hashes = [xxhash.xxh3_64_intdigest(view.reshape(-1).view(np.uint8).data) for view in views.values()]
    return metadata(np.array(hashes, np.uint64).view(np.int64))


def _check_replicas(names: Sequence[str], ranks: Sequence[int], step: int, gathered: NDArray[np.int64]) -> None:
    """Raise a `ReplicaError` for the first parameter whose digests are not the same on all ranks.

    `gathered` has all digests of the first rank, in the order of `names`, then all of the second, and so on. `ranks`
    are world ranks.
    """
    table = gathered.reshape(len(ranks), -1)
    for name, digests in zip(names, table.T.tolist(), strict=True):
        odd = minority_ranks(digests)
        if odd:
            raise ReplicaError(ranks=[ranks[index] for index in odd], of=len(ranks), parameter=name, step=step)
