"""Which core the calling thread runs on, and how it leaves one that others need, too.

Linux likes to put whoever is woken onto the core of whoever woke it. So two processes that send to each other may share
one core for seconds while another core idles, and the scheduler moves nobody who sleeps now and then.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from time import perf_counter

# Who lets others run has the core back after 1 to 3 us where nobody else wants it; what others do there takes longer.
_SHARED_S = 50e-6
# Moving takes some 30 us, and is in vain where all cores are busy: it is tried again after this, and after twice as
# long each time, as long as cores are shared.
_FIRST_S, _LONGEST_S = 2e-3, 1.0
# Whoever has had a core alone for so long starts anew.
_FORGIVEN_S = 10 * _FIRST_S


def usable() -> frozenset[int]:
    """Return the cores that the calling thread may use; where the system does not say, as many as there are."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return frozenset(range(os.cpu_count() or 1))


def leave_core() -> bool:
    """Let the calling thread go on at another core that it may use; True if there is one.

    It is bound to none: the scheduler may move it again at once.
    """
    try:
        allowed = os.sched_getaffinity(0)
        others = allowed - {_libc().sched_getcpu()}
        if not 0 < len(others) < len(allowed):
            return False
        os.sched_setaffinity(0, others)
        os.sched_setaffinity(0, allowed)
    except (OSError, AttributeError):  # not every system has that, and not every one allows it
        return False
    return True


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class Crowding:
    """Leaves a core that turns out to be shared, unless that has not helped lately.

    Args:
        leave: What leaves it.
        clock_s: Seconds on a clock that does not go back.
        shared_s: Others need a core if they run there for so long.
    """

    __slots__ = ("_clock_s", "_leave", "_left_s", "_pause_s", "_shared_s")

    def __init__(
        self,
        leave: Callable[[], bool] = leave_core,
        clock_s: Callable[[], float] = perf_counter,
        *,
        shared_s: float = _SHARED_S,
    ) -> None:
        self._leave, self._clock_s, self._shared_s = leave, clock_s, shared_s
        self._left_s, self._pause_s = clock_s() - _LONGEST_S, _FIRST_S

    def leaves(self, others_ran_s: float) -> bool:
        """Leave the core if others have just run there for so many seconds; True if it was left."""
        if others_ran_s < self._shared_s:
            return False
        now_s = self._clock_s()
        since_s = now_s - self._left_s
        if since_s < self._pause_s:
            return False
        calm = since_s > self._pause_s + _FORGIVEN_S
        self._pause_s = _FIRST_S if calm else min(2 * self._pause_s, _LONGEST_S)
        self._left_s = now_s
        return self._leave()
