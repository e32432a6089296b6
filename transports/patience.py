"""Polling before sleeping: for how long, and on which core."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from time import perf_counter

# A thread that yields has its core back after 1 to 3 us where no other thread wants it, and later otherwise.
_SHARED_S = 50e-6
# Moving takes some 30 us, and is in vain where all cores are busy: it is tried again after this, and after twice as
# long each time, as long as cores are shared.
_FIRST_S, _LONGEST_S = 2e-3, 1.0
# After so long alone on a core the pauses start from the shortest again.
_FORGIVEN_S = 10 * _FIRST_S


def usable_cores() -> frozenset[int]:
    """Return the cores that the calling thread may use; where the system does not say, all cores."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return frozenset(range(os.cpu_count() or 1))


def leave_core() -> bool:
    """Move the calling thread to another usable core; True if there is one.

    It is bound to none: the scheduler may move it again at once.
    """
    try:
        allowed = os.sched_getaffinity(0)
        others = allowed - {_libc().sched_getcpu()}
        if not 0 < len(others) < len(allowed):
            return False
        os.sched_setaffinity(0, others)
        os.sched_setaffinity(0, allowed)
    except (OSError, AttributeError):  # not every system has that, or allows it
        return False
    return True


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class Crowding:
    """Leaves a core that turns out to be shared, unless that has not helped lately.

    Args:
        leave: Leaves the core.
        clock_s: Seconds on a clock that does not go back.
        shared_s: Other threads need a core if they run there for so long.
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

    def leave_if_shared(self, others_ran_s: float) -> bool:
        """Move this thread to another core if others have just run on its core for long; return whether it moved.

        Not if that was tried lately.
        """
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


# Waking another process takes 15 us and more, and being woken as long: a process looks for a moment before it sleeps.
# Measured on 2 processes that share memory, 8 bytes: 5 us with 50 us of that, 33 without (without a framework around
# it).
_LOOK_S = 50e-6
# The peer may need this core, or be busy for long. After `_TRIES` looks in vain only every `_PROBE`-th wait begins with
# a look.
_TRIES, _PROBE = 3, 16
#: A yield that takes longer shows that another thread needs the core, or the interpreter: their time slices are 3 and
#: 5 ms.
LONG_TURN_S = 1e-3
# After such a yield so many waits pass without a look: at 3 ms a slice, that costs 50 us of each wait.
_GIVEN_UP = 64


class Patience:
    """Decides how long to look before sleeping, by the success of recent looks.

    Args:
        look_s: How long, each time.
        crowding: Leaves cores that other threads need, too; None: the thread stays.
    """

    __slots__ = ("_crowding", "_failed", "_look_s", "_passed_over", "_probe")

    def __init__(self, look_s: float = _LOOK_S, crowding: Crowding | None = None) -> None:
        self._look_s, self._crowding = look_s, crowding
        self._failed = self._passed_over = 0
        self._probe = _PROBE

    def take(self) -> float:
        """Return how many seconds to poll now; `learn` or `give_up` follows unless that is 0."""
        if self._failed < _TRIES:
            return self._look_s
        self._passed_over = (self._passed_over + 1) % self._probe
        return 0.0 if self._passed_over else self._look_s

    def learn(self, *, came: bool) -> None:
        """Record whether the poll was successful."""
        self._failed, self._probe = (0 if came else self._failed + 1), _PROBE

    def leave_if_crowded(self, others_ran_s: float) -> bool:
        """Leave a core that other threads have just used for this long; True if polling should go on."""
        return self._crowding is not None and self._crowding.leave_if_shared(others_ran_s)

    def give_up(self) -> None:
        """Record that polling has held this process up."""
        self._failed, self._passed_over, self._probe = _TRIES, 0, _GIVEN_UP
