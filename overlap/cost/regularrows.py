"""Who sends to whom in a step that looks alike from everywhere: of one unit of ranks that stands for all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..collectives.placement import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Messages of one step, as a `Round` has them."""

    src: Ints  # (rows,) rank of the unit that sends
    dst: Ints  # (rows,) rank of the unit that receives, or whose like in another unit does; ascending
    count: Floats  # (rows,) how many messages each row stands for
    far: NDArray[np.bool_]  # (rows,) whether it goes to another unit

    def in_order(self) -> Rows:
        """Return the same, by who receives."""
        order = np.argsort(self.dst, kind="stable")
        return Rows(src=self.src[order], dst=self.dst[order], count=self.count[order], far=self.far[order])

    def key(self) -> bytes:
        """Return what rows have in common exactly if they are the same."""
        return b"".join(each.tobytes() for each in (self.src, self.dst, self.count, self.far))


class Unit:
    """Some ranks, of which there are many alike, one after the other.

    Attributes:
        size: ranks of all units.
        places: ranks of one of them.
    """

    def __init__(self, size: int, ring: Sequence[int]) -> None:
        """Take the first of the units.

        Args:
            size: Ranks of all units.
            ring: Ranks of this one in the order in which a ring passes them, before it goes on to the next unit.
        """
        self.size, self.places = size, len(ring)
        self._ring, self._own = np.asarray(ring, np.int64), np.arange(len(ring))

    def nobody(self) -> Rows:
        """Return no message."""
        return self._rows(self._own[:0], self._own[:0])

    def everybody(self) -> Rows:
        """Return a message from everybody to every other, one row for those that go to the same place elsewhere."""
        src, dst = (each.reshape(-1) for each in np.meshgrid(self._own, self._own))
        others = src != dst
        near, far = self._rows(src[others], dst[others]), self._rows(src, dst + self.places)
        elsewhere = self.size // self.places - 1
        if not elsewhere:
            return near
        return Rows(
            src=np.concatenate([near.src, far.src]),
            dst=np.concatenate([near.dst, far.dst]),
            count=np.concatenate([near.count, far.count * elsewhere]),
            far=np.concatenate([near.far, far.far]),
        ).in_order()

    def ahead(self, distance: int) -> Rows:
        """Return a message from everybody to the rank so many further on; after the last comes the first."""
        return self._rows(self._own, self._own + distance)

    def opposite(self, distance: int) -> Rows:
        """Return a message from everybody across one edge of a cube, of ranks that are a power of two."""
        return self._rows(self._own, self._own ^ distance)

    def following(self) -> Rows:
        """Return a message from everybody to the next one of the ring."""
        return self._rows(self._ring, np.append(self._ring[1:], self._ring[0] + self.places))

    def _rows(self, src: Ints, to: Ints) -> Rows:
        other, dst = np.divmod(to, self.places)
        far = other % (self.size // self.places) != 0
        return Rows(src=src, dst=dst, count=np.ones(len(src)), far=far).in_order()
