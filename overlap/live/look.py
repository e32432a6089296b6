"""One look at a running world after another, each worth no more than a hundredth of the time between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import process_time
from typing import Protocol

from ..flight.glance import CallWords, RankGlance
from .figures import Place, WorldFigures, figures

MOST_SHARE = 0.01
"""Of one processor: a look that takes longer is followed by a longer pause."""

_NS = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at a world."""

    now_ns: int  # When
    # Where each is, its ranks and its calls.
    processes: Sequence[tuple[Place, Sequence[RankGlance], Mapping[int, CallWords]]]
    pause_s: float = 0.0  # How long to wait before the next look at least


class World(Protocol):
    """A world that runs, here or elsewhere."""

    @property
    def job(self) -> str:
        """Its name."""

    @property
    def script(self) -> str:
        """The program."""

    @property
    def size(self) -> int:
        """Ranks."""

    @property
    def where(self) -> str:
        """Its processes, for people to read."""

    @property
    def age_s(self) -> float:
        """For how long it has run."""

    @property
    def lives(self) -> bool:
        """Whether it runs."""

    def look(self) -> Look:
        """Look at it once."""


class Looks:
    """Looks at a world.

    Args:
        world: Which.
        every_s: How often, if that is cheap enough; each look is at what happened in that time.
    """

    def __init__(self, world: World, *, every_s: float) -> None:
        self._world, self._every_s = world, every_s
        self.pause_s = every_s
        self._is_first = True

    def take(self) -> WorldFigures:
        """Return what its ranks did lately; `pause_s` says how long to wait before the next look."""
        begun_s = process_time()
        look = self._world.look()
        places = {glance.rank: place for place, ranks, _ in look.processes for glance in ranks}
        seen = [(glance, calls) for _, ranks, calls in look.processes for glance in ranks]
        found = figures(seen, (look.now_ns - round(self._every_s * _NS), look.now_ns), places=places)
        spent_s = 0.0 if self._is_first else process_time() - begun_s  # the first one loads what the others have
        self.pause_s, self._is_first = max(self._every_s, look.pause_s, spent_s / MOST_SHARE), False
        return found
