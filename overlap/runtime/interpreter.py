"""What a running world changes in the interpreter and its libraries, and puts back."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

__all__ = ["BlasLimit", "tuned"]

# CPython hands the GIL over every 5 ms; a compute thread in Python code then delays every tenth wake-up of the event
# loop by as much. At 0.5 ms the same test shows 13 us (measured).
SWITCH_INTERVAL_S = 0.0005


class BlasLimit:
    """One BLAS thread for each compute thread, while a world runs."""

    def __init__(self) -> None:
        self._limiter: object = None

    def impose(self) -> None:
        """Set it, once."""
        if self._limiter is None:
            self._limiter = _blas().limit(limits=1, user_api="blas")

    def lift(self) -> None:
        """Put back what was."""
        if self._limiter is not None:
            self._limiter.restore_original_limits()  # type: ignore[attr-defined]
            self._limiter = None


@cache
def _blas() -> ThreadpoolController:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


# The timeline keeps tuples, which makes CPython look for garbage cycles every 30 small collectives. Looking every
# 10,000 new objects instead takes 5 % off the latency of 8 bytes on 8 ranks (measured).
GC_THRESHOLD = 10_000


@contextmanager
def tuned() -> Iterator[None]:
    """Hand the GIL over often, and look for garbage cycles seldom, for the length of the block."""
    interval_s, (young, *older) = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(min(interval_s, SWITCH_INTERVAL_S))
    gc.set_threshold(max(young, GC_THRESHOLD) if young else 0, *older)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        gc.set_threshold(young, *older)
