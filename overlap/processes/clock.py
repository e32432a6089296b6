"""Offset between the clocks of this process and of member 0, with its error.

A ping leaves here at `sent_ns`, is answered with the coordinator's `server_ns`, and is back at `back_ns`. The
answer was written somewhere between, so coordinator time minus local time lies in
``server_ns - back_ns ... server_ns - sent_ns``: the middle is off by at most half the round trip, whatever the network
did. Pure: the caller sends, receives and reads the clocks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

#: How fast two clocks may drift apart. Crystal oscillators of computers keep within 50 parts per million of the truth;
#: there are two of them.
DRIFT_PPM = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """Offset of the coordinator's clock from the local one."""

    offset_ns: int  # Local ``perf_counter_ns() + offset_ns`` is member 0's ``perf_counter_ns()``,
    error_ns: int  # give or take this much


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSample:
    """One ping, and its answer."""

    sent_ns: int  # Local time when the ping left
    server_ns: int  # Coordinator time when it was answered
    back_ns: int  # Local time when the answer arrived

    def offset(self, now_ns: int) -> ClockOffset:
        """Return the offset by this sample at local time `now_ns`; its error grows with its age.

        >>> ClockSample(sent_ns=1000, server_ns=5010, back_ns=1020).offset(1020)
        ClockOffset(offset_ns=4000, error_ns=10)
        """
        drift_ns = -(-max(0, now_ns - self.back_ns) * DRIFT_PPM // 1_000_000)
        return ClockOffset(
            offset_ns=self.server_ns - (self.sent_ns + self.back_ns) // 2,
            error_ns=(self.back_ns - self.sent_ns + 1) // 2 + drift_ns,
        )


class CoordinatorClock:
    """Clock of the coordinator, by the last samples.

    A round trip that waited in a queue is longer than another one, so the shortest has the smallest error.
    """

    __slots__ = ("_samples",)

    def __init__(self, *, keep: int = 128) -> None:
        self._samples: deque[ClockSample] = deque(maxlen=keep)

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, sample: ClockSample) -> None:
        """Add a sample, and drop the oldest one if there are too many."""
        self._samples.append(sample)

    def offset(self, now_ns: int) -> ClockOffset:
        """Return the best estimate at local time `now_ns`; any thread.

        Raises:
            ValueError: There is no sample yet.
        """
        return min([sample.offset(now_ns) for sample in tuple(self._samples)], key=lambda offset: offset.error_ns)
