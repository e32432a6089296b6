"""Watch for stalls: reports once that nothing moves and which rank the others wait for, and ends hopeless worlds.

It compares the last span of each rank and its number of unfinished operations a few times before a stall is old enough
to be reported. No operation does anything for it.

Only certain deadlocks are ended after 300 s: a rank may wait for a program that hangs or that writes a checkpoint for
six minutes, which look alike, and no healthy run may be ended. Ranks of which each waits for
another, while none computes and no task of theirs waits for anything else, cannot be healthy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Protocol

from ...notice import notify
from .standing import Stall, Standing, find_stall

#: A step rarely takes longer, and nobody looks at a silent terminal for much longer without asking.
STALL_S = 10.0
#: Half of the ten minutes after which PyTorch gives up any wait, healthy or not; long enough to read the
#: report and come with a debugger.
HOPELESS_S = 300.0
#: Each report of a run doubles the patience before the next, up to this: a slow job is not to fill its log.
_MOST_PATIENT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StallLimits:
    """Limits of the time in which a world makes no progress."""

    tell_s: float = STALL_S  # Then it is told who waits for whom
    give_up_s: float | None = None  # Then the world is ended; None: after `HOPELESS_S`, and only if it can never go on


class Watched(Protocol):
    """A rank of this process, as its progress is seen."""

    def mark(self) -> tuple[object, int]:
        """Return an object that is another one after any progress, and a number that changes with it."""

    def standing(self, now_ns: int) -> Standing:
        """Say where the rank stands."""

    @property
    def has_unseen_error(self) -> bool:
        """Whether a rank of its process has an error that no task or thread was given."""


class Others(Protocol):
    """The other processes of a world, as its watches see them."""

    speaks: bool  # Whether this process is the one that tells the user

    def send_quiet(self, standings: Sequence[Standing]) -> None:
        """Let the others know which ranks here make no progress: all of them, each time that changes."""

    def quiet(self) -> Mapping[int, Standing]:
        """Return the standings that other processes have told, by rank."""

    def send_busy(self, rank: int, place: str) -> None:
        """Say that a rank here keeps the loop, and where, or with no place that it has let go; any thread."""

    async def standings(self, mine: Sequence[Standing]) -> list[Standing]:
        """Give other processes a moment to say where their ranks stood; return the standings of all known ranks."""


class StallWatch:
    """Watches the ranks of one process.

    Args:
        ranks: To be watched.
        limits: How long nothing may move.
        others: The other processes, if there are any.
        give_up: Ends the world; takes for how many seconds nothing has moved.
    """

    def __init__(
        self,
        ranks: Mapping[int, Watched],
        limits: StallLimits,
        others: Others | None,
        give_up: Callable[[float], None],
    ) -> None:
        self._ranks, self._limits, self._others, self._give_up = ranks, limits, others, give_up
        self._marks: dict[int, tuple[object, int]] = {}
        self._since_ns: dict[int, int] = {}  # when each mark was first seen
        self._said: frozenset[int] = frozenset()  # ranks of which the others know that they are quiet
        self._began_ns: int | None = None  # of the present stall
        self._told = False  # it was told
        self._patience_s = limits.tell_s

    @property
    def period_s(self) -> float:
        """Seconds between two looks."""
        return min(1.0, self._limits.tell_s / 10)

    def look(self) -> None:
        """Look once; the loop's thread only."""
        now_ns = perf_counter_ns()
        quiet = [rank for rank, watched in self._ranks.items() if self._is_quiet(rank, watched, now_ns)]
        if not quiet and not self._said and self._began_ns is None and self._others is None:
            return
        standings = {rank: self._ranks[rank].standing(now_ns) for rank in quiet}
        if self._others is not None:
            if frozenset(quiet) != self._said:
                self._said = frozenset(quiet)
                self._others.send_quiet(list(standings.values()))
            if not self._others.speaks:
                return
            standings = {**self._others.quiet(), **standings}
        self._judge(find_stall(standings), now_ns)

    def _is_quiet(self, rank: int, watched: Watched, now_ns: int) -> bool:
        mark, known = watched.mark(), self._marks.get(rank)
        if known is None or known[0] is not mark[0] or known[1] != mark[1]:
            self._marks[rank], self._since_ns[rank] = mark, now_ns
        # Where an error is known that nobody has awaited, a rank that waits for others is looked at soon.
        quiet_s = 2 * self.period_s if watched.has_unseen_error else self._limits.tell_s
        return now_ns - self._since_ns[rank] >= quiet_s * 1e9

    def _judge(self, stall: Stall | None, now_ns: int) -> None:
        if stall is None:
            self._goes_on(now_ns)
            return
        if stall.hopeless and stall.errors:  # none of them can go on, and this is why
            self._give_up(2 * self.period_s)
            return
        if self._began_ns is None:
            self._began_ns = now_ns - round(self._limits.tell_s * 1e9)
        quiet_s = (now_ns - self._began_ns) / 1e9
        limit_s = self._limits.give_up_s or (HOPELESS_S if stall.hopeless else None)
        come_s = 2 * self.period_s if self._others is not None else 0.0  # for the others to notice and say the same
        if not self._told and quiet_s >= self._patience_s + come_s:
            self._told = True
            head = f"no progress for {self._patience_s:g} s: {stall.sentence}"
            self._patience_s = min(2 * self._patience_s, _MOST_PATIENT * self._limits.tell_s)
            notify("\n  ".join([head, *stall.errors, *stall.table, _outlook(limit_s)]))
        if limit_s is not None and quiet_s >= limit_s:
            self._give_up(limit_s)

    def _goes_on(self, now_ns: int) -> None:
        if self._told and self._began_ns is not None:
            notify(f"goes on, after {(now_ns - self._began_ns) / 1e9:.0f} s without progress")
        self._told, self._began_ns = False, None


def _outlook(limit_s: float | None) -> str:
    if limit_s is None:
        return "the run waits on; Ctrl-C ends it, as --give-up SECONDS would"
    return f"the run is given up when that has lasted {limit_s:g} s (--give-up)"
