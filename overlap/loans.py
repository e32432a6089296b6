"""Arrays in flight: read-only for their owner until the operation that uses them ends."""

from __future__ import annotations

from collections.abc import Iterable

from .collectives.reduce import Array

__all__ = ["Loans"]


class Loans:
    """Knows who uses an array: the first user makes it read-only, the last one gives it back.

    Only the array object itself is guarded: other views of the same memory stay writable, numpy cannot reach them.
    Arrays that were read-only to begin with are left alone.
    """

    __slots__ = ("_unreturned", "_users")

    def __init__(self) -> None:
        self._users: dict[int, int] = {}
        self._unreturned: list[Array] = []

    def take(self, array: Array) -> None:
        """Guard `array`; the caller keeps it alive until `give_back`."""
        if array.flags.writeable:
            array.setflags(write=False)
            self._users[id(array)] = 1
        elif id(array) in self._users:
            self._users[id(array)] += 1

    def give_back(self, arrays: Iterable[Array]) -> None:
        """Undo one `take` of each array."""
        users = self._users
        for array in arrays:
            count = users.pop(id(array), 0)
            if count > 1:
                users[id(array)] = count - 1
            elif count:
                try:
                    array.setflags(write=True)
                except ValueError:  # a view whose base is itself in flight: numpy refuses until the base is back
                    self._unreturned.append(array)
                else:
                    if self._unreturned:
                        self._retry()

    def _retry(self) -> None:
        waiting, self._unreturned = self._unreturned, []
        for array in waiting:
            try:
                array.setflags(write=True)
            except ValueError:
                self._unreturned.append(array)
