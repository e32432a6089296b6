"""Who is told of messages that no receive waits for: receives from any source begin so."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from transports.matching.ends import Lane


class Watchers:
    """What to call, by lane."""

    def __init__(self) -> None:
        self._calls: dict[Lane, list[Callable[[], None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, lane: Lane, wake: Callable[[], None]) -> None:
        """Call ``wake`` whenever a message of a lane has been announced that no receive waits for, and at the end."""
        self._calls.setdefault(lane, []).append(wake)

    def remove(self, lane: Lane, wake: Callable[[], None]) -> None:
        """Call it no more."""
        self._calls[lane].remove(wake)
        if not self._calls[lane]:
            del self._calls[lane]

    def wake(self, lane: Lane) -> None:
        """Let who watches a lane look again."""
        for wake in self._calls.get(lane, ()):
            wake()

    def wake_all(self) -> None:
        """Let everybody who watches look again."""
        for wake in tuple(chain.from_iterable(self._calls.values())):
            wake()
