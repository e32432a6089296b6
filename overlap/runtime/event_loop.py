"""Helpers of the event loop: callbacks that must not recurse, fair checkpoints, and errors that end the loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from time import perf_counter
from typing import Protocol

import trio
from trio.lowlevel import checkpoint, checkpoint_if_cancelled

from ..diagnostics import error_place, make_presentable
from ..errors import RankFailedError
from .trio_private import find_failed_task


class Cancellable(Protocol):
    """An object with a `cancel` method, such as a cancel scope of Trio or a run in an engine."""

    def cancel(self) -> object:
        """Stop the work, soon."""


class SerialCaller:
    """Calls callbacks one after the other, never one within another, so that chains of operations do not recurse."""

    def __init__(self) -> None:
        self._callbacks: deque[Callable[[], None]] = deque()
        self._calling = False

    def call(self, callback: Callable[[], None]) -> None:
        """Call `callback` now; within a call of another callback, add it to the queue, and return at once.

        The outermost call works off the queue, and then raises the error of a callback; of several, a group.
        """
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


# Other tasks wait this long at most. A turn of the loop takes 15 to 35 us; 64 KiB to another process and back take 250
# us, and two turns more if every await of an ended operation let other tasks run.
_EVERY_S = 0.5e-3


class FairPauses:
    """Checkpoints for tasks that await ended operations. They let other tasks run, but only every `every_s` seconds."""

    __slots__ = ("_every_s", "_last_s")

    def __init__(self, every_s: float = _EVERY_S) -> None:
        self._every_s, self._last_s = every_s, perf_counter()

    def pause(self) -> Coroutine[object, object, None]:
        """Return a checkpoint to await: it checks for cancellation, and lets other tasks run if it is time to."""
        now_s = perf_counter()
        if now_s - self._last_s < self._every_s:
            return checkpoint_if_cancelled()  # noqa: ASYNC105 (the caller awaits it)
        self._last_s = now_s
        return checkpoint()  # noqa: ASYNC105 (the caller awaits it)


RANK: ContextVar[tuple[int, int]] = ContextVar("rank")
"""Rank of the program that a task belongs to, and the size of its world."""


def failed_repr_error(internal: trio.TrioInternalError) -> RankFailedError | None:
    """Return the error of a world whose event loop has died because `repr(error)` of a task's error raised; else None.

    A nursery of the program calls that `repr` in the loop itself, before `make_presentable` could replace the error.
    """
    task, error = find_failed_task(internal)
    if task is None or error is None or RANK not in task.context:
        return None
    shown = make_presentable(error)
    if shown is error:  # its `repr` works: the loop has died for another reason
        return None
    rank, world_size = task.context[RANK]
    return RankFailedError(rank=rank, cause=shown, where=error_place(shown), doing=(), others={}, world_size=world_size)
