"""Callbacks that call each other through their ends, one after the other instead of one within the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class InTurn:
    """Calls what it is given at once, or after what it is calling: chains of operations must not recurse."""

    def __init__(self) -> None:
        self._callbacks: deque[Callable[[], None]] = deque()
        self._calling = False

    def call(self, callback: Callable[[], None]) -> None:
        """Call `callback` now, or after the one that is running and those that wait."""
        self._callbacks.append(callback)
        if self._calling:
            return
        self._calling = True
        try:
            while self._callbacks:
                self._callbacks.popleft()()
        finally:
            self._calling = False
