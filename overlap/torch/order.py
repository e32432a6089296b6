"""Order in which the buckets of a module travel: as backward fills them, agreed on once.

The first step sends buckets in the order of their plan, which is the reverse of the module's parameters. Where backward
fills them in another order, that holds buckets back. So from the second step on all ranks use the order of the group's
first rank. Ranks whose backward differs from it hold buckets back, and get the right means.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..collectives.reduce import Array
from ..errors import UsageError
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.rank import Rank
from ..timeline.span import RoleName
from .issuing import users_frame


class BucketOrder:
    """The order of one module on one rank, until and once all ranks of the group have the same."""

    def __init__(self, rank: Rank, group: Group) -> None:
        self._rank, self._group = rank, group
        self._used: list[int] | None = []  # buckets in the order in which forward first needs them
        self._filled: list[int] = []  # buckets in the order in which backward fills them
        self._orders: Future[Array] | None = None  # those of all ranks

    def note_use(self, index: int) -> None:
        """Note that forward needs the weights of a bucket, in the first step."""
        if self._used is not None and index not in self._used:
            self._used.append(index)

    def note_full(self, index: int) -> None:
        """Note that a bucket is full, in the first step."""
        if self._used is not None and index not in self._filled:
            self._filled.append(index)

    def end_step(self, count: int) -> None:
        """Send the other ranks the order of the first step, of `count` buckets; issues, and does not wait."""
        used, self._used = self._used, None
        if used is None or self._group.size == 1 or count == 1:
            return
        own_order = [*_complete(used, count), *_complete(self._filled, count)]
        stream = self._rank.stream(f"order of {self._group.name}")
        site = users_frame()
        self._orders = self._group.all_gather(
            np.array(own_order), stream=stream, name=RoleName("order of buckets", "library"), call_site=site
        )

    def agree(self, names: Sequence[Sequence[str]], *, same: bool) -> list[int] | None:
        """Return the first rank's order after the first step, once; otherwise None. Waits for all ranks.

        Args:
            names: The parameters of each bucket.
            same: Whether ranks may have no other order: stage 3 gathers weights in the order of their use.

        Raises:
            UsageError: If they have another one and may not; on every rank.
        """
        orders, self._orders = self._orders, None
        if orders is None:
            return None
        rows = orders.result().reshape(self._group.size, 2, -1)
        different = [index for index, row in enumerate(rows) if (row != rows[0]).any()]
        if different and same:
            first, other = self._group.ranks[0], self._group.ranks[different[0]]
            direction = int((rows[0][0] == rows[different[0]][0]).all())  # forward, else backward
            raise UsageError(
                f"stage=3 needs one order of modules on all ranks, and {('forward', 'backward')[direction]} differs: "
                f"rank {first} has {_name_list(rows[0][direction], names)}; rank {other} has "
                f"{_name_list(rows[different[0]][direction], names)}; use stage=2, or call the modules in one order"
            )
        return [int(index) for index in rows[0][1]]


def _complete(order: Sequence[int], count: int) -> list[int]:
    """Return an order of buckets with the missing ones at its end."""
    return [*order, *(index for index in range(count) if index not in order)]


def _name_list(order: Array, names: Sequence[Sequence[str]]) -> str:
    """Return the parameters of buckets as text, in an order."""
    return ", ".join(name for index in order for name in names[int(index)])
