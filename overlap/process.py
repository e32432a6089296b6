"""What a running world changes in the interpreter and its libraries, and puts back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

__all__ = ["BlasLimit", "short_switch_interval"]

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


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Hand the GIL over often for the length of the block."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_INTERVAL_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
