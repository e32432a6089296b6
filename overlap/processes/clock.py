"""Offset between the clocks of this process and of member 0, the coordinator, and the error of that offset.

A ping leaves this process at `sent_ns`. The coordinator answers it at `server_ns` of its own clock, and the answer is
back at `back_ns`. The answer was written between the two local times. So coordinator time minus local time lies in
``server_ns - back_ns ... server_ns - sent_ns``: the middle is off by at most half the round trip. Pure: the caller
sends, receives and reads the clocks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

#: How fast two clocks may drift apart, in parts per million. The oscillator of a computer is off by 50 at most; there
#: are two of them.
DRIFT_PPM = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """Offset of the coordinator's clock from the local one."""

    offset_ns: int  # Local ``perf_counter_ns() + offset_ns`` is member 0's ``perf_counter_ns()``
    error_ns: int  # Largest error of the offset, in either direction


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSample:
    """One ping, and its answer."""

    sent_ns: int  # Local time at which the ping left
    server_ns: int  # Coordinator time at which the ping was answered
    back_ns: int  # Local time at which the answer arrived

    def offset_at(self, now_ns: int) -> ClockOffset:
        """Return the offset by this sample at local time `now_ns`; its error grows with the age of the sample.

        >>> ClockSample(sent_ns=1000, server_ns=5010, back_ns=1020).offset_at(1020)
        ClockOffset(offset_ns=4000, error_ns=10)
        """
        # both parts of the error are rounded up
        drift_ns = -(-max(0, now_ns - self.back_ns) * DRIFT_PPM // 1_000_000)
        offset_ns = self.server_ns - (self.sent_ns + self.back_ns) // 2
        return ClockOffset(offset_ns=offset_ns, error_ns=(self.back_ns - self.sent_ns + 1) // 2 + drift_ns)


class CoordinatorClock:
    """Estimates the coordinator's clock from the last samples.

    The sample with the shortest round trip has the smallest error, because it has not waited in a queue.

    Args:
        keep: Number of samples that are kept.
    """

    def __init__(self, *, keep: int = 128) -> None:
        self._samples: deque[ClockSample] = deque(maxlen=keep)

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, sample: ClockSample) -> None:
        """Add a sample, and drop the oldest one if there are too many."""
        self._samples.append(sample)

    def best_offset_at(self, now_ns: int) -> ClockOffset:
        """Return the offset with the smallest error at local time `now_ns`. Any thread may call it.

        Raises:
            ValueError: There is no sample yet.
        """
        return min([sample.offset_at(now_ns) for sample in tuple(self._samples)], key=lambda offset: offset.error_ns)
