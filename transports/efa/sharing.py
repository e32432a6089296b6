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
    """Measured rate of a rail, and the bytes that wait on it."""

    bytes_per_s: float  # Rate of recent deliveries; 0 if unknown
    waiting_bytes: int  # Bytes that are written and not acknowledged
    sure: bool = True  # Whether the rail was busy during the measurement; otherwise it may be faster

    def arrival_time_s(self, nbytes: float) -> float:
        """Return the time in which the waiting bytes and `nbytes` more would arrive; 0 if the rate is unknown.

        >>> RailState(bytes_per_s=100.0, waiting_bytes=50).arrival_time_s(150)
        2.0
        """
        return (self.waiting_bytes + nbytes) / self.bytes_per_s if self.bytes_per_s else 0.0


class _Window(NamedTuple):
    """Start of a time over which a rate is measured."""

    start_s: float
    written_bytes: int  # Bytes that the system had taken by then
    delivered_bytes: int  # Bytes that had been acknowledged by then


class RailRate:
    """Measures the rate of a rail from its deliveries while bytes wait on it."""

    def __init__(self) -> None:
        self._bytes_per_s, self._sure = 0.0, False
        self._window: _Window | None = None

    @property
    def is_measuring(self) -> bool:
        """Whether bytes waited on the rail at the last sample, so that another sample soon is useful."""
        return self._window is not None

    def add_sample(self, now_s: float, written_bytes: int, waiting_bytes: int) -> RailState:
        """Return the rate of the rail and its waiting bytes, and remember this sample for later ones.

        Args:
            now_s: Seconds on a clock that does not go back.
            written_bytes: Bytes that the system has taken so far.
            waiting_bytes: How many of these bytes have not been acknowledged.
        """
        delivered_bytes, is_busy, window = written_bytes - waiting_bytes, waiting_bytes >= _BUSY_BYTES, self._window
        if window is not None and now_s - window.start_s >= (_WINDOW_S if is_busy else _SHORT_S):
            rate = (delivered_bytes - window.delivered_bytes) / (now_s - window.start_s)
            # Everything written before the window has been delivered, so the rail may have been empty for a while:
            # the measured rate is only a lower bound.
            if not is_busy or delivered_bytes >= window.written_bytes:
                self._bytes_per_s = max(self._bytes_per_s, rate)
            else:
                self._bytes_per_s = (self._bytes_per_s + rate) / 2 if self._sure else rate
                self._sure = True
            window = None
        self._window = (window or _Window(now_s, written_bytes, delivered_bytes)) if is_busy else None
        return RailState(self._bytes_per_s, waiting_bytes, self._sure)


def delays_chunk(rail: RailState, peers: Sequence[RailState], *, due_bytes: int, chunk_bytes: int) -> bool:
    """Whether a chunk would arrive later on a rail than on the other rails of its link, if those took all due bytes.

    False for at least one rail of a link, the fast one with the fewest waiting bytes, so that it takes the chunk.

    Args:
        rail: The rail that could take the chunk.
        peers: The other rails of the link.
        due_bytes: Bytes of long messages that could leave now.
        chunk_bytes: Length of a chunk.
    """
    nbytes = min(due_bytes, chunk_bytes)
    faster = _find_faster_rails(rail, peers)
    if not faster:
        # No peer is clearly faster. Among rails that are equally fast, the one with the fewest waiting bytes takes the
        # chunk; a difference of up to half a chunk does not count.
        equals = [peer.waiting_bytes for peer in peers if not _find_faster_rails(peer, (rail, *peers))]
        return rail.waiting_bytes > min(equals, default=rail.waiting_bytes) + nbytes // 2
    # the time that the faster peers need for all due bytes together, as if they were one rail
    together = RailState(sum(p.bytes_per_s for p in faster), sum(p.waiting_bytes for p in faster)).arrival_time_s(
        due_bytes
    )
    return rail.arrival_time_s(nbytes) > max(together, min(peer.arrival_time_s(nbytes) for peer in faster))


def delays_small_frame(rail: RailState, peers: Sequence[RailState]) -> bool:
    """Whether a small frame would arrive clearly later on a rail than on one of its peers."""
    faster = _find_faster_rails(rail, peers)
    return bool(faster) and rail.arrival_time_s(0) > min(peer.arrival_time_s(0) for peer in faster) + _EXTRA_WAIT_S


def _find_faster_rails(rail: RailState, peers: Sequence[RailState]) -> list[RailState]:
    """Return the peers that are clearly faster; none if the rate of the rail is unknown or unsure."""
    return [peer for peer in peers if rail.sure and peer.bytes_per_s > _EQUAL_RATIO * rail.bytes_per_s > 0]
