"""Arrays in flight: read-only for their owner until the operation that uses them ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..collectives.reduce import Array

if TYPE_CHECKING:
    from .rank import Issued

__all__ = ["Loans"]


class Loans:
    """Knows which arrays of a rank are in use: the first user makes one read-only, the last one gives it back.

    Only the array object itself is guarded: other views of the same memory stay writable, numpy cannot reach them.
    Arrays that were read-only to begin with are left alone.
    """

    __slots__ = ("_shared", "_unfinished", "_unreturned")

    def __init__(self, unfinished: Iterable[Issued]) -> None:
        self._unfinished = unfinished  # where an array that is read-only already may be lent to
        self._shared: dict[int, int] = {}  # users of the arrays that have several
        self._unreturned: list[Array] = []

    def join(self, array: Array) -> bool:
        """Say whether an array that is read-only is so because it is in use; if it is, count one more user."""
        if id(array) in self._shared:
            self._shared[id(array)] += 1
            return True
        if any(array is lent for operation in self._unfinished for lent in operation.lent):
            self._shared[id(array)] = 2
            return True
        return False

    def give_back(self, arrays: Iterable[Array]) -> None:
        """Take one user off each array, and make it writable again after the last."""
        for array in arrays:
            if self._shared and self._still_used(array):
                continue
            try:
                array.setflags(write=True)
            except ValueError:  # a view whose base is itself in flight: numpy refuses until the base is back
                self._unreturned.append(array)
            else:
                if self._unreturned:
                    self._retry()

    def _still_used(self, array: Array) -> bool:
        users = self._shared.pop(id(array), 1) - 1
        if users > 1:
            self._shared[id(array)] = users
        return users > 0

    def _retry(self) -> None:
        waiting, self._unreturned = self._unreturned, []
        for array in waiting:
            try:
                array.setflags(write=True)
            except ValueError:
                self._unreturned.append(array)
