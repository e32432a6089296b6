"""Trio's clock on virtual time: integer nanoseconds that only the kernel moves."""

from __future__ import annotations

import trio

# Trio cuts longer times to its own limit (a day); it never really waits, because the kernel wakes it.
_FOREVER_S = 1e9
# Relative error of a deadline that went through a few additions of doubles: an ulp is 2**-52.
_ROUNDING = 1 + 2**-50


class VirtualClock(trio.abc.Clock):
    """A clock that stands still between jumps. Only the kernel may jump.

    Trio's deadlines are doubles of seconds; the clock is exact. A deadline belongs to its nearest nanosecond: a sleep
    of 0.1 s ends after exactly 100,000,000 ns, whatever the sum of doubles says. That holds up to about fifty days.

    Attributes:
        now_ns: the present instant.
    """

    def __init__(self) -> None:
        self.now_ns: int = 0
        self._now_s = 0.0
        self._expire_s: float | None = None

    def __repr__(self) -> str:
        return f"<VirtualClock at {self.now_ns} ns>"

    def start_clock(self) -> None:
        """Do nothing: virtual time begins at 0."""

    def current_time(self) -> float:
        """Return the present in seconds, the double nearest to `now_ns`."""
        if self._expire_s is not None:
            expire_s, self._expire_s = self._expire_s, None
            return expire_s
        return self._now_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Return the time that Trio has to wait: none for a deadline that has passed, else until it is woken."""
        return 0 if deadline <= self._now_s else _FOREVER_S

    def nearest_ns(self, deadline_s: float) -> int:
        """Return the instant that a deadline belongs to: now, if its nearest nanosecond has passed."""
        return max(self.now_ns, round(deadline_s * 1e9))

    def jump(self, time_ns: int, *, expire: bool = False) -> None:
        """Move the clock to an instant.

        Args:
            time_ns: Not before now.
            expire: Whether deadlines belong to it. A double may lie a little after its instant; so the next look at
                the clock, which is Trio's search for expired deadlines, sees the end of the nanosecond.
        """
        assert time_ns >= self.now_ns, "time does not run backwards"
        self.now_ns, self._now_s = time_ns, time_ns / 1e9
        self._expire_s = (time_ns + 0.5) * _ROUNDING / 1e9 if expire else None
