"""Trio's clock on virtual time: integer nanoseconds that only the kernel moves."""

from __future__ import annotations

import trio

# Trio reduces longer waits to its own limit (a day); it never really waits, because the kernel wakes it.
_FOREVER_S = 1e9
# Allowance for the error of a deadline after a few additions of doubles, whose relative precision is 2**-52.
_ROUNDING = 1 + 2**-50


class VirtualClock(trio.abc.Clock):
    """A clock that stands still between jumps. Only the kernel may jump.

    The clock counts integer nanoseconds; Trio's deadlines are seconds, as floats. A deadline is rounded to the nearest
    nanosecond: a sleep of 0.1 s ends after exactly 100,000,000 ns. That holds up to about fifty days.

    Attributes:
        now_ns: The present instant.
    """

    def __init__(self) -> None:
        self.now_ns: int = 0
        self._now_s = 0.0
        self._expire_s: float | None = None  # result of the next `current_time`, after a jump to a deadline

    def __repr__(self) -> str:
        return f"<VirtualClock at {self.now_ns} ns>"

    def start_clock(self) -> None:
        """Do nothing: virtual time begins at 0."""

    def current_time(self) -> float:
        """Return the present in seconds.

        The first call after `jump_to(expire=True)` is Trio's search for expired deadlines. It gets the end of the
        present nanosecond, so that all deadlines that are rounded to it have passed.
        """
        if self._expire_s is not None:
            expire_s, self._expire_s = self._expire_s, None
            return expire_s
        return self._now_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Return the seconds that Trio may sleep: 0 for a deadline that has passed, else until the kernel wakes it."""
        return 0 if deadline <= self._now_s else _FOREVER_S

    def deadline_instant_ns(self, deadline_s: float) -> int:
        """Return a deadline as an instant: rounded to nanoseconds, and not before now."""
        return max(self.now_ns, round(deadline_s * 1e9))

    def jump_to(self, time_ns: int, *, expire: bool = False) -> None:
        """Move the clock to an instant.

        Args:
            time_ns: The instant, not before now.
            expire: Whether Trio's deadlines are due at the instant. As a float, a deadline may lie a little after it;
                so the next call of `current_time` returns the end of the nanosecond.
        """
        assert time_ns >= self.now_ns, "time does not run backwards"
        self.now_ns, self._now_s = time_ns, time_ns / 1e9
        self._expire_s = (time_ns + 0.5) * _ROUNDING / 1e9 if expire else None
