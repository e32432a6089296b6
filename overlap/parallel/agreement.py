"""What must be the same on all ranks, as digests that can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from ..errors import UsageError
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.rank import Rank
from .called_from import users_frame

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SLOTS = 64
"""Items are told apart as far as there are slots; 512 bytes travel as fast as 8."""


def digests(items: Iterable[str]) -> NDArray[np.int64]:
    """Return the number of items, and a digest of each; beyond the slots that there are, one of all the others."""
    told = list(items)
    parts = [*told[: _SLOTS - 2], "\n".join(told[_SLOTS - 2 :])]
    made = [int.from_bytes(blake2b(part.encode(), digest_size=8).digest(), "big", signed=True) for part in parts]
    return np.array([len(told), *made, *[0] * (_SLOTS - 1 - len(made))], np.int64)


def check_alike(what: str, mine: Sequence[str], gathered: NDArray[np.int64], ranks: Sequence[int], own: int) -> None:
    """Compare what all ranks told with what this one has.

    Args:
        what: That is compared, and what to do about it, for the message: "params: ...".
        mine: The items of this rank.
        gathered: The digests of all ranks, in the order of `ranks`.
        ranks: World ranks.
        own: This one.

    Raises:
        UsageError: Naming the first rank that differs, and the first item that does.
    """
    expected = digests(mine)
    for rank, theirs in zip(ranks, gathered.reshape(len(ranks), -1), strict=True):
        if (theirs != expected).any():
            at = int((theirs[1:] != expected[1:]).argmax())
            item = (
                f"{mine[at]} here is something else there"
                if at < min(len(mine), _SLOTS - 2)
                else (f"there are {len(mine)} here and {int(theirs[0])} there")
            )
            raise UsageError(f"{what} differ between rank {own} and rank {rank}: {item}")


def agreement(rank: Rank, group: Group, what: str, mine: Sequence[str]) -> Future[None]:
    """Return a future that fails, on every rank of a group, unless all tell the same.

    Args:
        rank: This rank.
        group: Those that compare.
        what: That is compared; see `check_alike`.
        mine: The items of this rank.
    """
    place = users_frame()
    gathered = group.all_gather(digests(mine), name=f"compare {what}", call_site=place)
    check = partial(check_alike, what, mine, ranks=group.ranks, own=rank.rank)
    real = rank.empty(1).flags.writeable  # else there is nothing to compare
    return rank.compute(check if real else _nothing, gathered, name="compare", seconds=0.0, call_site=place)


def _nothing(_: object) -> None:
    """Be done."""
