"""Event loop: work that can be stopped or withdrawn, callbacks that must not recurse, fair pauses of tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import Protocol

from trio.lowlevel import checkpoint, checkpoint_if_cancelled


class Cancels(Protocol):
    """Work that can be stopped."""

    def cancel(self) -> object:
        """Stop the work, soon."""


class InTurn:
    """Calls callbacks one after the other, never one within another: chains of operations must not recurse."""

    def __init__(self) -> None:
        self._callbacks: deque[Callable[[], None]] = deque()
        self._calling = False

    def call(self, callback: Callable[[], None]) -> None:
        """Call `callback` now, or after the running one and the waiting ones."""
        self._callbacks.append(callback)
        if self._calling:
            return
        self._calling, errors = True, []
        try:
            while self._callbacks:
                try:
                    self._callbacks.popleft()()
                except Exception as error:  # later callbacks belong to other operations
                    errors.append(error)
        finally:
            self._calling = False
        if errors:
            raise errors[0] if len(errors) == 1 else ExceptionGroup("callbacks of operations", errors)


# A turn of the loop takes 15 to 35 us. A message of 64 KiB each way between two processes takes 250, and two such
# turns if each await of an ended operation takes one. Other tasks wait as long as two of those messages take.
_EVERY_S = 0.5e-3


class CallbackTurns:
    """Callbacks of the tasks of one loop, in their order; after `every_s` seconds other tasks run."""

    __slots__ = ("_every_s", "_last_s")

    def __init__(self, every_s: float = _EVERY_S) -> None:
        self._every_s, self._last_s = every_s, perf_counter()

    def pause(self) -> Coroutine[object, object, None]:
        """Return a checkpoint: it checks for cancellation, and lets other tasks run if it is their turn."""
        now_s = perf_counter()
        if now_s - self._last_s < self._every_s:
            return checkpoint_if_cancelled()  # noqa: ASYNC105 (the caller awaits it)
        self._last_s = now_s
        return checkpoint()  # noqa: ASYNC105 (the caller awaits it)
