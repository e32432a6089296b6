"""Pieces of a segment, lent and taken back. Pure."""

from __future__ import annotations

from collections import defaultdict

_PAGE_BYTES = 4096


class Heap:
    """Lends pieces by size, rounded up to pages and to one of four sizes an octave, so that others fit there later.

    Args:
        start: Where the memory begins.
        stop: Where it ends.

    Attributes:
        lent_bytes: How much is lent.
    """

    def __init__(self, start: int, stop: int) -> None:
        self.lent_bytes = 0
        self._next, self._stop = start, stop
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._sizes: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """Return where a piece begins; None if there is no room."""
        size = _size_for(nbytes)
        if self._free[size]:
            start = self._free[size].pop()
        elif self._next + size <= self._stop:
            start, self._next = self._next, self._next + size
        else:
            return None
        self._sizes[start] = size
        self.lent_bytes += size
        return start

    def give_back(self, start: int) -> int:
        """Take a piece back, and return its size."""
        size = self._sizes.pop(start)
        self._free[size].append(start)
        self.lent_bytes -= size
        return size


def _size_for(nbytes: int) -> int:
    least = max(nbytes, _PAGE_BYTES)
    unit = max(_PAGE_BYTES, 1 << (least - 1).bit_length() - 3)
    return -(-least // unit) * unit
