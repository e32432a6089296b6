"""Sharing of frames among rails: no rail takes a frame that another one would deliver sooner. Pure.

A slow or congested rail would hold back the message whose chunk it takes, and the frames behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# A rate is measured over so long at least: a hundred packets of a link of 1 Gbit/s. A shorter transfer shows that a
# rail is no slower; one below the second bound shows only that a switch had room for it.
_WINDOW_S = 0.005
_SHORT_S = 0.001
# From so many waiting bytes on a rail counts as busy: the last packets of less are acknowledged late.
_BUSY_BYTES = 64 << 10
# Extra wait of small frames compared with the best rail, which may have no room for them now.
_SMALL_S = 0.001
# Rails count as equal up to this ratio of their measured rates, which vary by half.
_EQUAL = 3.0


class Standing(NamedTuple):
    """The rate and the backlog of a rail."""

    bytes_per_s: float  # Rate of recent deliveries; 0 if unknown
    waiting_bytes: int  # Bytes that are written and not acknowledged
    sure: bool = True  # Whether it was busy all that time; otherwise it may be faster

    def time_s(self, nbytes: float) -> float:
        """Return when so many more bytes would have arrived; 0 where the rate is unknown."""
        return (self.waiting_bytes + nbytes) / self.bytes_per_s if self.bytes_per_s else 0.0


class Pace:
    """Learns the rate of a rail from its deliveries while bytes waited on it."""

    def __init__(self) -> None:
        self._bytes_per_s, self._sure = 0.0, False
        self._begun: tuple[float, int, int] | None = None  # time, and the bytes written and delivered by then

    @property
    def measures(self) -> bool:
        """Whether bytes waited on the rail at the last look, so that another look soon tells more."""
        return self._begun is not None

    def standing(self, now_s: float, written_bytes: int, waiting_bytes: int) -> Standing:
        """Note the bytes that were written and those that wait; return the standing."""
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

    Never true for the fast rail with the least backlog, so one rail always takes the chunk.
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
