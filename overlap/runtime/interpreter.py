"""Settings of the interpreter and its libraries that running worlds change, and restore when the last of them ends."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

# CPython lets threads take turns with the GIL every 5 ms. With a compute thread in Python code, that delayed every
# tenth wake-up of the event loop by 5 ms; with turns of 0.5 ms the delay was 13 us (measured).
SWITCH_INTERVAL_S = 0.0005

# The timeline keeps tuples, so that CPython looks for garbage cycles every 30 small collectives. With a look only every
# 10,000 new objects, the latency of 8 bytes on 8 ranks is 5 % shorter (measured).
GC_THRESHOLD = 10_000


class _SharedChange:
    """A change of a setting that several worlds may need at one time: the first makes it, the last undoes it.

    Args:
        change: Makes the change, and returns the function that undoes it.
    """

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
        self._change, self._users, self._lock = change, 0, threading.Lock()
        self._put_back: Callable[[], None]

    def begin(self) -> None:
        """Make the change, if no other world has made it."""
        with self._lock:
            if self._users == 0:
                self._put_back = self._change()
            self._users += 1

    def end(self) -> None:
        """Undo the change, unless other worlds still need it."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._put_back()


def _tune_interpreter() -> Callable[[], None]:
    """Let threads switch more often, and collect garbage less often. Return a function that restores both settings."""
    interval_s, (young, *older) = sys.getswitchinterval(), gc.get_threshold()

    def put_back() -> None:
        sys.setswitchinterval(interval_s)
        gc.set_threshold(young, *older)

    sys.setswitchinterval(min(interval_s, SWITCH_INTERVAL_S))
    gc.set_threshold(max(young, GC_THRESHOLD) if young else 0, *older)  # 0: the program has switched it off
    return put_back


@cache
def _blas_controller() -> ThreadpoolController:
    """Return the controller of the loaded BLAS libraries. It is kept, because to find them takes milliseconds."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


_TUNING = _SharedChange(_tune_interpreter)
_ONE_BLAS_THREAD = _SharedChange(lambda: _blas_controller().limit(limits=1, user_api="blas").restore_original_limits)


@contextmanager
def tuned_interpreter() -> Iterator[None]:
    """Let threads switch often, and collect garbage seldom, while the block runs."""
    _TUNING.begin()
    try:
        yield
    finally:
        _TUNING.end()


class BlasLimit:
    """Limits BLAS to one thread for each compute thread, while a world runs."""

    def __init__(self) -> None:
        self._imposed = False

    def impose(self) -> None:
        """Impose the limit, unless this world has done so already. On the loop's thread only."""
        if not self._imposed:
            self._imposed = True
            _ONE_BLAS_THREAD.begin()

    def lift(self) -> None:
        """Restore the number of BLAS threads, unless other worlds still need the limit."""
        if self._imposed:
            self._imposed = False
            _ONE_BLAS_THREAD.end()
