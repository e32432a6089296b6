"""Sharing of frames among rails: no rail takes a frame that another rail would deliver sooner. Pure.

A slow or congested rail would hold back the message whose chunk it takes, and the frames behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Shortest time over which a rate is measured: a hundred packets of a link of 1 Gbit/s. A shorter transfer shows that a
# rail is no slower; one below the second bound shows only that a switch had room for it.
_WINDOW_S = 0.005
_SHORT_S = 0.001
# Waiting bytes from which a rail counts as busy: the last packets of fewer are acknowledged late.
_BUSY_BYTES = 64 << 10
# Extra wait of small frames compared with the best rail, which may have no room for them now.
_EXTRA_WAIT_S = 0.001
# Rails count as equal up to this ratio of their measured rates, which vary by half.
_EQUAL_RATIO = 3.0


class RailState(NamedTuple):
    """The rate and the backlog of a rail."""

    bytes_per_s: float  # Rate of recent deliveries; 0 if unknown
    waiting_bytes: int  # Bytes that are written and not acknowledged
    sure: bool = True  # Whether the rail was busy during the measurement; otherwise it may be faster

    def time_s(self, nbytes: float) -> float:
        """Return the time until `nbytes` more would have arrived; 0 if the rate is unknown."""
        return (self.waiting_bytes + nbytes) / self.bytes_per_s if self.bytes_per_s else 0.0


class RailRate:
    """Measures the rate of a rail from its deliveries while bytes wait on it."""

    def __init__(self) -> None:
        self._bytes_per_s, self._sure = 0.0, False
        self._window_start: tuple[float, int, int] | None = None  # time, and the bytes written and delivered by then

    @property
    def measures(self) -> bool:
        """Whether bytes waited on the rail at the last sample, so that another sample soon is useful."""
        return self._window_start is not None

    def sample(self, now_s: float, written_bytes: int, waiting_bytes: int) -> RailState:
        """Take a sample of the written and the waiting bytes; return rate and backlog."""
        delivered = written_bytes - waiting_bytes
        if waiting_bytes < _BUSY_BYTES:
            if self._window_start is not None and now_s - self._window_start[0] >= _SHORT_S:
                start_s, _, delivered_before = self._window_start
                self._bytes_per_s = max(self._bytes_per_s, (delivered - delivered_before) / (now_s - start_s))
            self._window_start = None
        elif self._window_start is None:
            self._window_start = now_s, written_bytes, delivered
        elif now_s - self._window_start[0] >= _WINDOW_S:
            self._update_rate(now_s, delivered, *self._window_start)
            self._window_start = now_s, written_bytes, delivered
        return RailState(self._bytes_per_s, waiting_bytes, self._sure)

    def _update_rate(
        self, now_s: float, delivered: int, start_s: float, written_before: int, delivered_before: int
    ) -> None:
        """Update the rate from one window of deliveries; a window that emptied the rail can only raise it."""
        rate = (delivered - delivered_before) / (now_s - start_s)
        if delivered >= written_before:
            self._bytes_per_s = max(self._bytes_per_s, rate)
        else:
            self._bytes_per_s = (self._bytes_per_s + rate) / 2 if self._sure else rate
            self._sure = True


def delays_chunk(rail: RailState, peers: Sequence[RailState], *, due_bytes: int, chunk_bytes: int) -> bool:
    """Whether a chunk would arrive later on a rail than on its peers, if they took all due bytes.

    Never true for the fast rail with the least backlog, so one rail always takes the chunk.
    """
    nbytes = min(due_bytes, chunk_bytes)
    faster = _faster(rail, peers)
    if not faster:
        equals = [peer.waiting_bytes for peer in peers if not _faster(peer, (rail, *peers))]
        return rail.waiting_bytes > min(equals, default=rail.waiting_bytes) + nbytes // 2
    together = RailState(sum(p.bytes_per_s for p in faster), sum(p.waiting_bytes for p in faster)).time_s(due_bytes)
    return rail.time_s(nbytes) > max(together, min(peer.time_s(nbytes) for peer in faster))


def delays_small_frame(rail: RailState, peers: Sequence[RailState]) -> bool:
    """Whether a small frame would arrive clearly later on a rail than on one of its peers."""
    faster = _faster(rail, peers)
    return bool(faster) and rail.time_s(0) > min(peer.time_s(0) for peer in faster) + _EXTRA_WAIT_S


def _faster(rail: RailState, peers: Sequence[RailState]) -> list[RailState]:
    """Return the peers that are clearly faster than a rail, if its rate is known."""
    return [peer for peer in peers if rail.sure and peer.bytes_per_s > _EQUAL_RATIO * rail.bytes_per_s > 0]
