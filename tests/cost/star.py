"""A network that is no machine's: every rank has one duplex port of a switch. For closed forms and oracles."""

import numpy as np
from numpy.typing import NDArray

from overlap.collectives.placement import Ints, Placement, Routes, Wires


class Star(Placement):
    """Ranks around a switch."""

    def __init__(self, size: int, *, latency_s: float, bytes_per_s: float) -> None:
        """Make a switch.

        Args:
            size: Ranks.
            latency_s: From any rank to any other.
            bytes_per_s: Of a port, each way.
        """
        self.size, self.device = size, np.arange(size, dtype=np.int64)
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s

    def routes(self, src: Ints, dst: Ints, far: NDArray[np.bool_] | None = None) -> Routes:
        """Return one way up and one way down for each message."""
        wire = np.stack([2 * np.asarray(src, np.int64), 2 * np.asarray(dst, np.int64) + 1], axis=1)
        return Routes(first=np.arange(0, wire.size + 1, 2), wire=wire.reshape(-1))

    def wires(self) -> Wires:
        """Return the figures of every port, up and down in turn."""
        return Wires(
            kind=np.full(2 * self.size, "ethernet"),
            latency_s=np.tile([self._latency_s, 0.0], self.size),
            bytes_per_s=np.full(2 * self.size, self._bytes_per_s),
        )

    def describe(self, wire: int) -> str:
        """Name a port and its direction."""
        rank, down = divmod(wire, 2)
        return f"switch -> rank {rank}" if down else f"rank {rank} -> switch"
