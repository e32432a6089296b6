"""What threads hand over to an event loop: a queue, and one wake-up for all that is in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

__all__ = ["Handover"]


class Handover:
    """The way from other threads to the loop; the order in which they ask is kept.

    Waking a loop takes a system call, which also hands the interpreter to it: a burst is to do that once.

    Args:
        token: Of the loop.
    """

    __slots__ = ("_called", "_queue", "_token")

    def __init__(self, token: trio.lowlevel.TrioToken) -> None:
        self._token = token
        self._queue: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._called = False  # the loop has been called, and has not begun to look

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Let the loop call a function, soon; any thread.

        Raises:
            trio.RunFinishedError: If there is no loop any more.
        """
        self._queue.append((function, args))
        if not self._called:
            self._called = True
            self._token.run_sync_soon(self._look)

    def _look(self) -> None:
        self._called = False  # first: what is posted from here on calls again, or is seen below
        queue = self._queue
        for _ in range(len(queue)):  # no more, lest threads that never rest keep all else from its turn
            function, args = queue.popleft()
            function(*args)
        if queue and not self._called:
            self._called = True
            self._token.run_sync_soon(self._look)
