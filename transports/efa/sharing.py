"""Which rail takes what: none takes what another one would bring sooner. Pure.

A rail that is slow, or congested, would hold back the message whose chunk it takes, and frames that stand behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# A rate is measured over so long at least: a hundred packets of a link of 1 Gbit/s. What was over sooner shows that a
# rail is no slower; in less time than the second, only that a switch had room for it.
_WINDOW_S = 0.005
_SHORT_S = 0.001
# What waits is busy work only from here on: the last packets of less are acknowledged late.
_BUSY_BYTES = 64 << 10
# Small frames may wait so much longer than on the best rail, which may not have room for them now.
_SMALL_S = 0.001
# Rails count as equal up to this ratio of what was measured of them, which varies by half.
_EQUAL = 3.0


class Standing(NamedTuple):
    """How a rail does."""

    bytes_per_s: float  # What it has delivered lately; 0 if nobody knows
    waiting_bytes: int  # Written, and not acknowledged
    sure: bool = True  # It was busy all that time; otherwise it may be faster

    def time_s(self, nbytes: float) -> float:
        """Return when so much more would have arrived; at once where nobody knows."""
        return (self.waiting_bytes + nbytes) / self.bytes_per_s if self.bytes_per_s else 0.0


class Pace:
    """Learns how fast a rail is, from what it has delivered while something waited on it."""

    def __init__(self) -> None:
        self._bytes_per_s, self._sure = 0.0, False
        self._begun: tuple[float, int, int] | None = None  # when; what had been written, and delivered

    @property
    def measures(self) -> bool:
        """Whether something waited on it when it was last looked at; looking again soon tells more."""
        return self._begun is not None

    def standing(self, now_s: float, written_bytes: int, waiting_bytes: int) -> Standing:
        """Take note of how much has been written and how much of it waits; say what follows."""
        delivered = written_bytes - waiting_bytes
        if waiting_bytes < _BUSY_BYTES:
            if self._begun is not None and now_s - self._begun[0] >= _SHORT_S:
                begun_s, _, delivered_before = self._begun
                self._bytes_per_s = max(self._bytes_per_s, (delivered - delivered_before) / (now_s - begun_s))
            self._begun = None
        elif self._begun is None:
            self._begun = now_s, written_bytes, delivered
        elif now_s - self._begun[0] >= _WINDOW_S:
            self._learn(now_s, delivered, *self._begun)
            self._begun = now_s, written_bytes, delivered
        return Standing(self._bytes_per_s, waiting_bytes, self._sure)

    def _learn(self, now_s: float, delivered: int, begun_s: float, written_before: int, delivered_before: int) -> None:
        """Take a sample; where all that had been written was delivered, only that the rail is no slower."""
        rate = (delivered - delivered_before) / (now_s - begun_s)
        if delivered >= written_before:
            self._bytes_per_s = max(self._bytes_per_s, rate)
        else:
            self._bytes_per_s = (self._bytes_per_s + rate) / 2 if self._sure else rate
            self._sure = True


def holds_back(mine: Standing, others: Sequence[Standing], *, due_bytes: int, chunk_bytes: int) -> bool:
    """Whether a chunk would arrive later on a rail than on the others, if they took all that is due.

    Never so for that one of the fast rails on which least waits: somebody takes it.
    """
    nbytes = min(due_bytes, chunk_bytes)
    known = _faster(mine, others)
    if not known:
        equals = [other.waiting_bytes for other in others if not _faster(other, (mine, *others))]
        return mine.waiting_bytes > min(equals, default=mine.waiting_bytes) + nbytes // 2
    together = Standing(sum(o.bytes_per_s for o in known), sum(o.waiting_bytes for o in known)).time_s(due_bytes)
    return mine.time_s(nbytes) > max(together, min(other.time_s(nbytes) for other in known))


def holds_up(mine: Standing, others: Sequence[Standing]) -> bool:
    """Whether a small frame would arrive clearly later on a rail than on another one."""
    known = _faster(mine, others)
    return bool(known) and mine.time_s(0) > min(other.time_s(0) for other in known) + _SMALL_S


def _faster(mine: Standing, others: Sequence[Standing]) -> list[Standing]:
    """Return the rails that are clearly faster, if this one's rate is known."""
    return [other for other in others if mine.sure and other.bytes_per_s > _EQUAL * mine.bytes_per_s > 0]
