"""Settings of the interpreter and its libraries that running worlds change, and restore when the last of them ends."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING

from ..threads import SharedChange

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

# CPython lets threads take turns with the GIL every 5 ms. With a compute thread in Python code, that delayed every
# tenth wake-up of the event loop by 5 ms; with turns of 0.5 ms the delay was 13 us (measured).
SWITCH_INTERVAL_S = 0.0005

# The timeline keeps tuples, so that CPython looks for garbage cycles every 30 small collectives. With a look only every
# 10,000 new objects, the latency of 8 bytes on 8 ranks is 5 % shorter (measured).
GC_THRESHOLD = 10_000


def _take_short_turns() -> Callable[[], None]:
    """Let threads switch more often; return a function that restores the interval."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(min(interval_s, SWITCH_INTERVAL_S))
    return partial(sys.setswitchinterval, interval_s)


@cache
def _blas_controller() -> ThreadpoolController:
    """Return the controller of the loaded BLAS libraries. It is kept, because to find them takes milliseconds."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


_SHORT_TURNS = SharedChange(_take_short_turns)
_ONE_BLAS_THREAD = SharedChange(lambda: _blas_controller().limit(limits=1, user_api="blas").restore_original_limits)


class _CollectionInterval:
    """Number of new objects between two garbage collections: the largest that a block wants, or the program's own."""

    def __init__(self) -> None:
        self._lock, self._wanted, self._own = threading.RLock(), list[int](), gc.get_threshold()

    @contextmanager
    def at_least(self, objects: int) -> Iterator[None]:
        """Collect garbage after so many new objects at the earliest, while the block runs."""
        with self._lock:
            if not self._wanted:
                self._own = gc.get_threshold()
            self._wanted.append(objects)
            self._set()
        try:
            yield
        finally:
            with self._lock:
                self._wanted.remove(objects)
                self._set()

    def _set(self) -> None:
        young, *older = self._own
        gc.set_threshold(max([young, *self._wanted]) if young else 0, *older)  # 0: the program has switched it off


collection_interval: _CollectionInterval = _CollectionInterval()


@contextmanager
def tuned_interpreter() -> Iterator[None]:
    """Let threads switch often, and collect garbage seldom, while the block runs."""
    with _SHORT_TURNS, collection_interval.at_least(GC_THRESHOLD):
        yield


class BlasLimit:
    """Limits BLAS to one thread for each compute thread, while a world runs."""

    def __init__(self) -> None:
        self._imposed = False

    def impose(self) -> None:
        """Impose the limit, unless this world has done so already. On the loop's thread only."""
        if not self._imposed:
            self._imposed = True
            _ONE_BLAS_THREAD.__enter__()

    def lift(self) -> None:
        """Restore the number of BLAS threads, unless other worlds still need the limit."""
        if self._imposed:
            self._imposed = False
            _ONE_BLAS_THREAD.__exit__()
