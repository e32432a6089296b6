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

# CPython passes the GIL on every 5 ms; a compute thread in Python code then delays every tenth wake-up of the event
# loop by as much. At 0.5 ms the same test shows 13 us (measured).
SWITCH_INTERVAL_S = 0.0005

# The timeline keeps tuples, which makes CPython look for garbage cycles every 30 small collectives. A look every
# 10,000 new objects instead takes 5 % off the latency of 8 bytes on 8 ranks (measured).
GC_THRESHOLD = 10_000


class _SharedChange:
    """A change that several worlds may need at one time: the first makes it, the last undoes it."""

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
        self._change, self._users, self._lock = change, 0, threading.Lock()
        self._put_back: Callable[[], None]

    def begin(self) -> None:
        """Make the change, unless it has been made."""
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
    """Let threads switch and garbage be collected less rarely; return a function that restores both."""
    interval_s, (young, *older) = sys.getswitchinterval(), gc.get_threshold()

    def put_back() -> None:
        sys.setswitchinterval(interval_s)
        gc.set_threshold(young, *older)

    sys.setswitchinterval(min(interval_s, SWITCH_INTERVAL_S))
    gc.set_threshold(max(young, GC_THRESHOLD) if young else 0, *older)
    return put_back


def _limit_blas() -> Callable[[], None]:
    limiter = _blas().limit(limits=1, user_api="blas")
    return lambda: limiter.restore_original_limits()


@cache
def _blas() -> ThreadpoolController:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


_TUNING, _ONE_BLAS_THREAD = _SharedChange(_tune_interpreter), _SharedChange(_limit_blas)


@contextmanager
def tuned_interpreter() -> Iterator[None]:
    """Pass the GIL on often, and look for garbage cycles seldom, for the length of the block."""
    _TUNING.begin()
    try:
        yield
    finally:
        _TUNING.end()


class BlasLimit:
    """One BLAS thread for each compute thread, while a world runs."""

    def __init__(self) -> None:
        self._imposed = False

    def impose(self) -> None:
        """Impose the limit, once."""
        if not self._imposed:
            self._imposed = True
            _ONE_BLAS_THREAD.begin()

    def lift(self) -> None:
        """Restore the number of threads, unless other worlds still need one."""
        if self._imposed:
            self._imposed = False
            _ONE_BLAS_THREAD.end()
