"""A thread of each world that lets the loop look around now and then; real time only.

A timer of the loop itself would not do: on the clocks of tests time passes when nothing moves, here it must be real.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import trio

__all__ = ["LoopWatch"]


class LoopWatch:
    """Calls a function on the loop's thread, a few times a second, for the length of a ``with``.

    Args:
        token: Of the loop.
        look: Called there.
        period_s: How often.
    """

    def __init__(self, token: trio.lowlevel.TrioToken, look: Callable[[], None], *, period_s: float) -> None:
        self._token, self._look, self._period_s = token, look, period_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="overlap loop watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with suppress(trio.RunFinishedError):
            while not self._over.wait(self._period_s):
                self._token.run_sync_soon(self._look, idempotent=True)
