"""Graph of ranks that wait for ranks, and the culprits of a stall.

Pure. A world, or its flight records, give the standing of each rank: its waits, and the work that keeps it. Processes
send standings to each other; people read the sentences made here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...timeline.ranklist import listed

_SHOWN = 16  # lines of a table on a terminal; the culprit is in the sentence above it


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """State of one rank in a stall."""

    rank: int  # World rank
    lines: tuple[str, ...]  # Its unfinished operations, or the place of its program, as text
    awaits: tuple[int, ...] = ()  # World ranks that it waits for
    busy: str = ""  # Work that keeps it, as the end of "rank 2, ..."; empty if it only waits for ranks
    error: str = ""  # Its error that no task or thread was given, and the line of the error


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Ranks that wait for ranks without progress."""

    waiting: Sequence[int]  # Ranks that wait, ascending
    reached: Mapping[int, set[int]]  # By waiting rank: the ranks that it waits for, directly or not, itself included
    standings: Mapping[int, Standing]  # Standings of all of these

    @property
    def errors(self) -> list[str]:
        """A line for each of these ranks with an error that no task was given: the likely cause."""
        return [error_line(standing) for _, standing in sorted(self.standings.items()) if standing.error]

    @property
    def hopeless(self) -> bool:
        """Whether some of them can never go on: they wait for each other, and no work keeps any of them."""
        return bool(self.circle)

    @property
    def circle(self) -> list[int]:
        """Ranks that wait for each other and can never go on, ascending."""
        return next((sorted(ranks) for ranks in self.reached.values() if not any(map(self._is_busy, ranks))), [])

    @property
    def odd(self) -> list[int]:
        """Ranks that others wait for and that are busy: first the rank that most ranks wait for."""
        votes = Counter(other for rank, reached in self.reached.items() for other in reached if other != rank)
        busy = [rank for rank in sorted(votes) if self._is_busy(rank)]
        return sorted(busy, key=lambda rank: rank != max(busy, key=lambda candidate: (votes[candidate], -candidate)))

    @property
    def sentence(self) -> str:
        """Sentence with the waiting ranks, the rank that they wait for, and its work."""
        odd = self.odd
        if self.hopeless or not odd:
            circle = self.circle or sorted(self.reached[self.waiting[0]])
            never = "none of them can go on" if len(circle) > 1 else "cannot go on"
            return f"{_mutual_wait(circle)}, and {never}"
        busy = self.standings[odd[0]].busy
        alike = sorted(rank for rank in odd if self.standings[rank].busy == busy)
        others = [rank for rank in self.waiting if rank not in alike]
        if not others:
            return _mutual_wait(alike)
        verb = "waits" if len(others) == 1 else "wait"
        return f"{_rank_names(others)} {verb} for {_rank_names(alike)}, {busy}"

    @property
    def table(self) -> list[str]:
        """A line for each wait; ranks with the same line share it."""
        ranks: dict[tuple[str, ...], list[int]] = {}
        for rank, standing in sorted(self.standings.items()):
            ranks.setdefault(standing.lines, []).append(rank)
        lines = [f"{_rank_names(some)}: {line}" for shared, some in ranks.items() for line in shared]
        more = [f"and {len(lines) - _SHOWN} lines more"] if len(lines) > _SHOWN else []
        return [*lines[:_SHOWN], *more]

    def _is_busy(self, rank: int) -> bool:
        return bool(self.standings[rank].busy)


def find_stall(standings: Mapping[int, Standing]) -> Stall | None:
    """Find the ranks that wait, directly or not, only for ranks without progress for a long time.

    Args:
        standings: Standings of the ranks without progress; ranks that move are not among them.
    """
    reached = {rank: _reachable_ranks(rank, standings) for rank in sorted(standings) if standings[rank].awaits}
    waiting = {rank: ranks for rank, ranks in reached.items() if ranks is not None}
    if not waiting:
        return None
    concerned = set().union(*waiting.values())
    return Stall(
        waiting=list(waiting), reached=waiting, standings={rank: standings[rank] for rank in sorted(concerned)}
    )


def error_line(standing: Standing) -> str:
    """Return the line on an error that no task was given."""
    return f"rank {standing.rank} has an error that nobody has awaited: {standing.error}"


def report_lines(standings: Sequence[Standing]) -> list[str]:
    """Return a line for each error that no task was given, then each rank's operation and the ranks it waits for."""
    errors = [error_line(standing) for standing in standings if standing.error]
    return [*errors, *(f"rank {standing.rank}: {line}" for standing in standings for line in standing.lines)]


def _reachable_ranks(rank: int, standings: Mapping[int, Standing]) -> set[int] | None:
    """Return the ranks that a rank waits for, directly or not; None if one of them makes progress."""
    reached: set[int] = set()
    pending = [rank]
    while pending:
        other = pending.pop()
        if other not in standings:
            return None
        if other not in reached:
            reached.add(other)
            pending += standings[other].awaits
    return reached


def _rank_names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


def _mutual_wait(ranks: Sequence[int]) -> str:
    return f"{_rank_names(ranks)} {'wait for each other' if len(ranks) > 1 else 'waits for itself'}"
