"""Values that are computed once for each key, and remembered as long as there is room."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class LimitedCache(dict[Key, Value]):
    """A cache: values by key, each computed at its first use. A full cache drops its oldest value.

    Args:
        most: Greatest number of values in the cache.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def find_or_compute(self, key: Key, compute: Callable[[], Value]) -> Value:
        """Return the value of a key; if it is not in the cache, `compute()` makes it."""
        if key not in self:
            value = compute()
            if len(self) >= self._most:
                # The first key, as a dict keeps the order in which keys were added.
                del self[next(iter(self))]
            self[key] = value
        return self[key]
