"""One look at a running world after another, each worth no more than a hundredth of the time between them."""

from __future__ import annotations

from time import process_time, time_ns

from .figures import WorldFigures, figures
from .worlds import RunningWorld

__all__ = ["MOST_SHARE", "Looks"]

MOST_SHARE = 0.01
"""Of one processor: a look that takes longer is followed by a longer pause."""

_NS = 10**9


class Looks:
    """Looks at a world.

    Args:
        world: Which.
        every_s: How often, if that is cheap enough; each look is at what happened in that time.
    """

    def __init__(self, world: RunningWorld, *, every_s: float) -> None:
        self._world, self._every_s = world, every_s
        self.pause_s = every_s

    def take(self) -> WorldFigures:
        """Return what its ranks did lately; `pause_s` says how long to wait before the next look."""
        begun_s = process_time()
        now_ns = time_ns()
        processes: dict[int, int] = {}
        seen = []
        for number, watched in enumerate(self._world.processes):
            for glance in watched.ranks():
                processes[glance.rank] = number
                seen.append((glance, watched.calls))
        window = now_ns - round(self._every_s * _NS), now_ns
        found = figures(seen, window, processes=processes)
        self.pause_s = max(self._every_s, (process_time() - begun_s) / MOST_SHARE)
        return found
