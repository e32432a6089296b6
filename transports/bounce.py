"""Bounce buffers: memory for long messages that are received without a place of their own, used again and again."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from transports.buffers import as_bytes

#: What is kept for later, at most. Fresh memory costs more than receiving into it: the system clears every page of it
#: at its first use (measured here: 0.25 GB/s into fresh memory, 4 GB/s into used memory).
KEEP_BYTES = 256 << 20


class BounceBuffers:
    """Lends memory by size, and takes it back without clearing it."""

    def __init__(self, keep_bytes: int = KEEP_BYTES) -> None:
        self._free: defaultdict[int, list[memoryview]] = defaultdict(list)
        self._left_bytes = keep_bytes

    def take(self, nbytes: int) -> memoryview:
        """Return a buffer of at least `nbytes`. The size is the receiver's own, never one that a peer has named."""
        size = _rounded(nbytes)
        free = self._free[size]
        if not free:
            return as_bytes(np.empty(size, np.uint8))
        self._left_bytes += size
        return free.pop()

    def give_back(self, buffer: memoryview) -> None:
        """Keep a buffer for the next one who needs its size, unless enough is kept."""
        if buffer.nbytes <= self._left_bytes:
            self._left_bytes -= buffer.nbytes
            self._free[buffer.nbytes].append(buffer)


def _rounded(nbytes: int) -> int:
    """Round up to a power of two, so that few sizes serve all; what nobody touches takes no memory."""
    return 1 << max(nbytes - 1, 0).bit_length()
