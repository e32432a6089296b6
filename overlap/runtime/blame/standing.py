"""Graph of ranks that wait for ranks, and the ranks to blame for a stall.

Pure. A world, or the flight records of one, say what each rank waits for and what keeps it; processes tell it to each
other; people read the sentences that are made of it here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...timeline.ranklist import listed

_SHOWN = 16  # lines of a table on a terminal; the odd one out stands above it


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where one rank stands."""

    rank: int  # World rank
    lines: tuple[str, ...]  # What it has not finished, or where its program is, for people to read
    awaits: tuple[int, ...] = ()  # World ranks that it waits for
    busy: str = ""  # What keeps it, as the end of "rank 2, ..."; empty if nothing but other ranks does
    error: str = ""  # An error of it that no task or thread was given, and its line


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Ranks that wait for ranks of which nothing comes."""

    waiting: Sequence[int]  # Ranks that wait, ascending
    reached: Mapping[int, set[int]]  # For whom each of them waits, directly or not, itself included
    standings: Mapping[int, Standing]  # Of all of these

    @property
    def errors(self) -> list[str]:
        """A line for each of these ranks that has an error which nobody was given: the likely cause."""
        return [error_line(standing) for _, standing in sorted(self.standings.items()) if standing.error]

    @property
    def hopeless(self) -> bool:
        """Whether some of them can never go on: they wait for each other, and nothing else keeps any of them."""
        return bool(self.circle)

    @property
    def circle(self) -> list[int]:
        """Ranks that wait for each other and can never go on, ascending."""
        return next((sorted(each) for each in self.reached.values() if not any(map(self._is_kept, each))), [])

    @property
    def odd(self) -> list[int]:
        """Ranks that others wait for and that something else keeps: first the rank that most ranks wait for."""
        votes = Counter(each for rank, reached in self.reached.items() for each in reached if each != rank)
        kept = [rank for rank in sorted(votes) if self._is_kept(rank)]
        return sorted(kept, key=lambda rank: rank != max(kept, key=lambda one: (votes[one], -one)))

    @property
    def sentence(self) -> str:
        """Which rank they wait for, and what that rank does instead."""
        odd = self.odd
        if self.hopeless or not odd:
            circle = self.circle or sorted(self.reached[self.waiting[0]])
            never = "none of them can go on" if len(circle) > 1 else "cannot go on"
            return f"{_each_other(circle)}, and {never}"
        busy = self.standings[odd[0]].busy
        alike = sorted(rank for rank in odd if self.standings[rank].busy == busy)
        others = [rank for rank in self.waiting if rank not in alike]
        if not others:
            return _each_other(alike)
        verb = "waits" if len(others) == 1 else "wait"
        return f"{_name(others)} {verb} for {_name(alike)}, {busy}"

    @property
    def table(self) -> list[str]:
        """A line for each thing that they wait for; ranks of which the same is to be said share it."""
        ranks: dict[tuple[str, ...], list[int]] = {}
        for rank, standing in sorted(self.standings.items()):
            ranks.setdefault(standing.lines, []).append(rank)
        lines = [f"{_name(some)}: {line}" for told, some in ranks.items() for line in told]
        more = [f"and {len(lines) - _SHOWN} lines more"] if len(lines) > _SHOWN else []
        return [*lines[:_SHOWN], *more]

    def _is_kept(self, rank: int) -> bool:
        return bool(self.standings[rank].busy)


def find_stall(standings: Mapping[int, Standing]) -> Stall | None:
    """Find the ranks that wait, directly or not, only for ranks of which nothing has come for long.

    Args:
        standings: Of the ranks without progress; those that move are not among them.
    """
    reached = {rank: _reached(rank, standings) for rank in sorted(standings) if standings[rank].awaits}
    waiting = {rank: each for rank, each in reached.items() if each is not None}
    if not waiting:
        return None
    concerned = set().union(*waiting.values())
    return Stall(
        waiting=list(waiting), reached=waiting, standings={rank: standings[rank] for rank in sorted(concerned)}
    )


def error_line(standing: Standing) -> str:
    """Return the line on an error of a rank that nobody was given."""
    return f"rank {standing.rank} has an error that nobody has awaited: {standing.error}"


def report_lines(standings: Sequence[Standing]) -> list[str]:
    """Return a line for each error that nobody was given, then for each rank what it waits in and for which ranks."""
    errors = [error_line(standing) for standing in standings if standing.error]
    return [*errors, *(f"rank {standing.rank}: {line}" for standing in standings for line in standing.lines)]


def _reached(rank: int, standings: Mapping[int, Standing]) -> set[int] | None:
    """Return the ranks for which a rank waits, those for which they wait, and so on; None if one of them moves."""
    reached: set[int] = set()
    ahead = [rank]
    while ahead:
        each = ahead.pop()
        if each not in standings:
            return None
        if each not in reached:
            reached.add(each)
            ahead += standings[each].awaits
    return reached


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


def _each_other(ranks: Sequence[int]) -> str:
    return f"{_name(ranks)} {'wait for each other' if len(ranks) > 1 else 'waits for itself'}"
