"""How often a task that finds everything done lets the others of its event loop run."""

from __future__ import annotations

from collections.abc import Coroutine
from time import perf_counter

from trio.lowlevel import checkpoint, checkpoint_if_cancelled

# A turn of the loop takes 15 to 35 us. A message of 64 KiB each way between two processes takes 250, and two such turns
# if each await that finds its operation ended takes one. Others wait for so long as for two of those messages.
_EVERY_S = 0.5e-3


class Turns:
    """Those of the other tasks of one loop.

    Args:
        every_s: They have one after so long.
    """

    __slots__ = ("_every_s", "_last_s")

    def __init__(self, every_s: float = _EVERY_S) -> None:
        self._every_s, self._last_s = every_s, perf_counter()

    def pause(self) -> Coroutine[object, object, None]:
        """Return what to await without need: it checks for cancellation, and lets others run if it is their turn."""
        now_s = perf_counter()
        if now_s - self._last_s < self._every_s:
            return checkpoint_if_cancelled()  # noqa: ASYNC105 (whoever calls awaits it)
        self._last_s = now_s
        return checkpoint()  # noqa: ASYNC105 (so here)
