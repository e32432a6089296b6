"""Connections in tests: a store in memory, and ranks in threads of one process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import overlap

T = TypeVar("T")

# Far above what any test here takes on a busy machine: it bounds a hang and decides nothing else.
TIMEOUT_S = 60.0


class MemoryStore:
    """Values that threads of one process put and wait for."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """Keep a value."""
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.values, TIMEOUT_S), f"nobody has set {key}"
            return self.values[key]


def connected(program: Callable[[overlap.Connection], T], size: int, **settings: Any) -> list[T]:
    """Run a plain function on every rank, each in a thread of its own, and return what they return."""
    store = MemoryStore()

    def live(rank: int) -> T:
        with overlap.connect(rank, size, store=store, **settings) as world:
            return program(world)

    return in_threads(live, size)


def in_threads(live: Callable[[int], T], size: int) -> list[T]:
    """Call `live(rank)` in a thread for each rank; raise the first error."""
    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(live, rank) for rank in range(size)]
        return [each.result(TIMEOUT_S) for each in running]
