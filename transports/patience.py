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
    """Move the calling thread to another usable core; False if there is none, or if the system does not allow it.

    The thread is not bound to the new core: the scheduler may move it again at once.
    """
    try:
        allowed = os.sched_getaffinity(0)
        others = allowed - {_libc().sched_getcpu()}
        if not 0 < len(others) < len(allowed):
            return False
        # without the present core in the set, the thread must move; then all cores are allowed again
        os.sched_setaffinity(0, others)
        os.sched_setaffinity(0, allowed)
    except (OSError, AttributeError):  # not every system has that, or allows it
        return False
    return True


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class Crowding:
    """Moves a polling thread away from a core that other threads need; less often while that does not help.

    Args:
        leave: Moves the calling thread to another core; returns whether it moved.
        clock_s: Returns the seconds on a clock that does not go back.
        shared_s: Other threads need a core if they run on it for at least this many seconds at once.
    """

    def __init__(
        self,
        leave: Callable[[], bool] = leave_core,
        clock_s: Callable[[], float] = perf_counter,
        *,
        shared_s: float = _SHARED_S,
    ) -> None:
        self._leave, self._clock_s, self._shared_s = leave, clock_s, shared_s
        # so long ago that the first move is not delayed
        self._left_s, self._pause_s = clock_s() - _LONGEST_S, _FIRST_S

    def leave_shared_core(self, others_ran_s: float) -> bool:
        """Move the calling thread to another core if other threads need this one; return whether it moved.

        If a move was tried shortly before, nothing happens, and the result is False.

        Args:
            others_ran_s: How many seconds other threads have just run on this core.
        """
        if others_ran_s < self._shared_s:
            return False
        now_s = self._clock_s()
        since_s = now_s - self._left_s
        if since_s < self._pause_s:
            return False
        # long after the pause the thread had the core to itself: the next pause is the shortest again
        had_core_alone = since_s > self._pause_s + _FORGIVEN_S
        self._pause_s = _FIRST_S if had_core_alone else min(2 * self._pause_s, _LONGEST_S)
        self._left_s = now_s
        return self._leave()


# The peer may need this core, or be busy for long. After `_TRIES` looks in vain only every `_PROBE`-th wait begins with
# a look.
_TRIES, _PROBE = 3, 16
#: A yield that takes longer shows that another thread needs the core, or the interpreter: their time slices are 3 and
#: 5 ms.
LONG_TURN_S = 1e-3
# After such a yield so many waits pass without a look: at 3 ms a slice, that costs 50 us of each wait.
_GIVEN_UP = 64


class Patience:
    """Decides for how long to poll before sleeping, by the success of recent polls.

    Each call of `next_poll_s` that returns more than 0 is followed by a poll, and then by `record_poll` or
    `pause_polling`.

    Polling saves the 15 us and more that it takes to wake a process. Measured for a message of 8 bytes between 2
    processes that share memory, without a framework around it: 5 us with polls of 50 us, 33 us without.

    Args:
        look_s: Duration of a poll in seconds.
        crowding: Moves the thread away from cores that other threads need; None: the thread stays.
    """

    def __init__(self, look_s: float, crowding: Crowding | None = None) -> None:
        self._look_s, self._crowding = look_s, crowding
        self._failed = self._passed_over = 0
        self._probe = _PROBE

    def next_poll_s(self) -> float:
        """Return how many seconds to poll now: the duration of a poll, or 0 if recent polls have failed."""
        if self._failed < _TRIES:
            return self._look_s
        # after failures only every `_probe`-th call polls, to see whether polling helps again
        self._passed_over = (self._passed_over + 1) % self._probe
        return 0.0 if self._passed_over else self._look_s

    def record_poll(self, *, came: bool) -> None:
        """Record the success of a poll: `came` if the awaited message came during it."""
        self._failed, self._probe = (0 if came else self._failed + 1), _PROBE

    def leave_crowded_core(self, others_ran_s: float) -> bool:
        """Move the thread to another core if others have just used this one for long; return whether it moved.

        If it moved, the poll may continue, because it holds up no other thread now.

        Args:
            others_ran_s: How many seconds other threads have just run on this core.
        """
        return self._crowding is not None and self._crowding.leave_shared_core(others_ran_s)

    def pause_polling(self) -> None:
        """Record that the poll has held up other threads, so that the next calls of `next_poll_s` return 0."""
        # as after many failures; only the `_GIVEN_UP`-th call polls again
        self._failed, self._passed_over, self._probe = _TRIES, 0, _GIVEN_UP
