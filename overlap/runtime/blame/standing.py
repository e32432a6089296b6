"""Where each rank stands: what it waits for, on whom, and what keeps it. Who is to blame for a stall follows from that.

Pure: a world fills it in, processes tell it to each other, and people read what is made of it here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Ranks that wait for ranks of which nothing comes."""

    waiting: Sequence[int]  # Those that wait, ascending
    reached: Mapping[int, set[int]]  # For whom each of them waits, directly or not, itself included
    standings: Mapping[int, Standing]  # Of all of these

    @property
    def hopeless(self) -> bool:
        """Whether some of them can never go on: they wait for each other, and nothing else keeps any of them."""
        return any(not any(self.standings[each].busy for each in reached) for reached in self.reached.values())

    @property
    def sentence(self) -> str:
        """For whom they wait, and what that one does instead."""
        votes = Counter(each for rank, reached in self.reached.items() for each in reached if each != rank)
        kept = [rank for rank in sorted(votes) if self.standings[rank].busy]
        if not kept or self.hopeless:
            cycle = next((each for each in self.reached.values() if self._cannot(each)), self.reached[self.waiting[0]])
            return f"{_name(sorted(cycle))} wait for each other, and none of them can go on"
        odd = max(kept, key=lambda rank: (votes[rank], -rank))
        alike = [rank for rank in kept if self.standings[rank].busy == self.standings[odd].busy]
        others = [rank for rank in self.waiting if rank not in alike]
        verb = "waits" if len(others) == 1 else "wait"
        return f"{_name(others)} {verb} for {_name(alike)}, {self.standings[odd].busy}"

    @property
    def table(self) -> list[str]:
        """A line for each thing that they wait for; ranks of which the same is to be said share it."""
        ranks: dict[tuple[str, ...], list[int]] = {}
        for rank, standing in sorted(self.standings.items()):
            ranks.setdefault(standing.lines, []).append(rank)
        lines = [f"{_name(some)}: {line}" for told, some in ranks.items() for line in told]
        more = [f"and {len(lines) - _SHOWN} lines more"] if len(lines) > _SHOWN else []
        return [*lines[:_SHOWN], *more]

    def _cannot(self, reached: Iterable[int]) -> bool:
        return not any(self.standings[each].busy for each in reached)


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


def report_lines(standings: Iterable[Standing]) -> list[str]:
    """Say of each rank what it waits for and on whom, one line each."""
    return [f"rank {standing.rank}: {line}" for standing in standings for line in standing.lines]


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
