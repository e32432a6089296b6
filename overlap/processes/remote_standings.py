"""Standings of the ranks of other processes, for reports of stalls and of stopped worlds. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..errors import OverlapError
from ..runtime.blame.standing import Standing
from .messages import Busy, Quiet, Stopped


class RemoteStandings:
    """The last reported standings of the ranks of each other process.

    Args:
        member: This process.
        placement: World ranks of each process.
    """

    def __init__(self, member: int, placement: Sequence[Sequence[int]]) -> None:
        self._member, self._placement = member, placement
        self._ranks = {rank for ranks in placement for rank in ranks}
        # by process
        self._quiet: dict[int, list[Standing]] = {}  # its ranks without progress
        self._busy: dict[int, Busy] = {}  # the rank that keeps its event loop
        self._stopped: dict[int, list[Standing]] = {}  # its ranks when it was stopped

    def apply(self, member: int, event: Busy | Quiet | Stopped) -> None:
        """Store the report of a process.

        Raises:
            OverlapError: It is about ranks of another process, or that do not exist.
        """
        match event:
            case Busy(place=""):
                self._busy.pop(member, None)
            case Busy():
                self._busy[member] = event
            case Quiet():
                self._quiet[member] = self._check_standings(member, event.standings)
            case Stopped():
                self._stopped[member] = self._check_standings(member, event.standings)

    def _check_standings(self, member: int, standings: list[Standing]) -> list[Standing]:
        """Return the standings, unless a rank in them belongs to another process or does not exist."""
        if any(standing.rank not in self._placement[member] for standing in standings):
            raise OverlapError("it has the standing of a rank that belongs to another process")
        self.check_ranks(rank for standing in standings for rank in standing.awaits)
        return standings

    def check_ranks(self, ranks: Iterable[int]) -> None:
        """Refuse ranks that do not exist.

        Raises:
            OverlapError: One of them does not.
        """
        if unknown := [rank for rank in ranks if rank not in self._ranks]:
            raise OverlapError(f"it is about rank {unknown[0]}, and there are {len(self._ranks)} ranks")

    @property
    def all_stopped(self) -> bool:
        """Whether all other processes have reported their stop."""
        return len(self._stopped) >= len(self._placement) - 1

    def at_stop(self, standings_here: Sequence[Standing], finished: Collection[int]) -> list[Standing]:
        """Return the standings of all ranks when the world was stopped, by process.

        Args:
            standings_here: Those of the ranks of this process.
            finished: Ranks that have finished.
        """
        known = {self._member: list(standings_here), **self._stopped}
        members = range(len(self._placement))
        return [
            standing for member in members for standing in known.get(member) or self._assume_standings(member, finished)
        ]

    def without_progress(self, finished: Collection[int]) -> dict[int, Standing]:
        """Return the standings of ranks without progress; `finished` are ranks that have finished."""
        known = {**self._quiet, **{member: self._assume_standings(member, finished) for member in self._busy}}
        return {standing.rank: standing for standings in known.values() for standing in standings}

    def _assume_standings(self, member: int, finished: Collection[int]) -> list[Standing]:
        """Return the standings of a process that has not reported them, as other reports suggest."""
        busy = self._busy.get(member)
        standings = []
        for rank in self._placement[member]:
            line, clause = "its process does not answer", "whose process does not answer"
            if rank in finished:
                line, clause = "has finished", "which has finished"
            elif busy is not None and rank == busy.rank:
                line = f"keeps its event loop busy at {busy.place}"
                clause = f"which {line}"
            elif busy is not None:
                keeper = f"event loop is kept busy by rank {busy.rank} at {busy.place}"
                line, clause = f"its {keeper}", f"whose {keeper}"
            standings.append(Standing(rank=rank, lines=(line,), busy=clause))
        return standings
