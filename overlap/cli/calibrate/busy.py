"""Processors that other programs keep busy, looked at while this one rests."""

from __future__ import annotations

import time
from pathlib import Path

_STAT = Path("/proc/stat")
_REST_S = 0.5
# Columns of the line of all processors: user, nice, system, idle, iowait, and more that count as busy.
_IDLE = slice(3, 5)


class Busyness:
    """Mean share of all processors that others used, over some looks."""

    def __init__(self, cores: int, *, stat: Path = _STAT) -> None:
        """Begin without a look.

        Args:
            cores: Processors of this computer.
            stat: The system's counters.
        """
        self._cores, self._stat = cores, stat
        self._shares: list[float] = []

    def look(self) -> None:
        """Sleep for half a second, and count the busy cores; nothing where the system has no such counters."""
        before = self._read_counters()
        time.sleep(_REST_S)
        after = self._read_counters()
        if before is None or after is None or sum(after) <= sum(before):
            return
        passed = [late - early for late, early in zip(after, before, strict=True)]
        self._shares.append(1 - sum(passed[_IDLE]) / sum(passed))

    @property
    def cores(self) -> float:
        """Processors that others used, on average; 0 if nothing is known."""
        return self._cores * sum(self._shares) / len(self._shares) if self._shares else 0.0

    @property
    def factor(self) -> float:
        """Factor by which a program that needs all processors may take longer: it has only the rest of them."""
        return self._cores / max(self._cores - self.cores, 1 / self._cores)

    def _read_counters(self) -> list[int] | None:
        """Return the ticks that all processors spent in each state since the start; None without such counters."""
        try:
            first = self._stat.read_text().split("\n", 1)[0]
        except OSError:
            return None
        name, *counters = first.split()
        return [int(each) for each in counters[:8]] if name == "cpu" else None
