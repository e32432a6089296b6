"""Views of the ranks of other processes, for reports of stalls and of stopped worlds. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..errors import OverlapError
from ..waits.ends import RankView, Seen
from .messages import Busy, Quiet, Stopped


class RemoteViews:
    """The last reported views of the ranks of each other process.

    Args:
        member: This process.
        placement: World ranks of each process.
    """

    def __init__(self, member: int, placement: Sequence[Sequence[int]]) -> None:
        self._member, self._placement = member, placement
        self._ranks = {rank for ranks in placement for rank in ranks}
        # by process
        self._quiet: dict[int, list[RankView]] = {}  # its ranks without progress
        self._busy: dict[int, Busy] = {}  # the rank that keeps its event loop
        self._stopped: dict[int, list[RankView]] = {}  # its ranks when it was stopped

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
                self._quiet[member] = self._check_views(member, event.views)
            case Stopped():
                self._stopped[member] = self._check_views(member, event.views)

    def _check_views(self, member: int, views: list[RankView]) -> list[RankView]:
        """Return the views, unless a rank in them belongs to another process or does not exist."""
        ranks = {rank for view in views for rank in (view.rank, *(end.rank for end in view.ends))}
        if not ranks <= set(self._placement[member]):
            raise OverlapError("it has the view of a rank that belongs to another process")
        ends = [end for view in views for end in view.ends]
        self.check_ranks(view.kept_by for view in views if view.kept_by is not None)
        self.check_ranks(rank for end in ends for rank in (*end.call.members, *(end.lacks or ())))
        return views

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

    def at_stop(self, views_here: Sequence[RankView], finished: Collection[int]) -> list[RankView]:
        """Return the views of all ranks when the world was stopped, by process.

        Args:
            views_here: Those of the ranks of this process.
            finished: Ranks that have finished.
        """
        known = {self._member: list(views_here), **self._stopped}
        members = range(len(self._placement))
        return [view for member in members for view in known.get(member) or self._assume_views(member, finished)]

    def without_progress(self, finished: Collection[int]) -> dict[int, RankView]:
        """Return the views of ranks without progress; `finished` are ranks that have finished."""
        known = {**self._quiet, **{member: self._assume_views(member, finished) for member in self._busy}}
        return {view.rank: view for views in known.values() for view in views}

    def _assume_views(self, member: int, finished: Collection[int]) -> list[RankView]:
        """Return the views of a process that has not reported them, as other reports suggest."""
        busy = self._busy.get(member)
        views = []
        for rank in self._placement[member]:
            if rank in finished:
                views.append(RankView(rank=rank, seen=Seen.LEFT))
            elif busy is not None:
                views.append(RankView(rank=rank, seen=Seen.ELSEWHERE, site=busy.place, kept_by=busy.rank))
            else:
                views.append(RankView(rank=rank, seen=Seen.NO_RECORD))
        return views
