"""The critical path: the chain of work and waiting, from rank to rank, that made a step as long as it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from ..spans import Timeline
from .activity import PROGRAM, WAITING, WIRE, Activity, ActivityPieces
from .meetings import last_rows
from .steps import of_steps, rank_windows

Doing: TypeAlias = Literal["compute", "program", "wire", "waiting"]
_DOING: tuple[Doing, ...] = ("compute", "program", "wire", "waiting")  # as `activity` numbers it


@dataclass(frozen=True, slots=True, kw_only=True)
class PathLink:
    """Part of the path: the activity of one rank from one instant to another."""

    rank: int
    start_ns: int
    end_ns: int
    doing: Doing  # "waiting" is for a rank that is not known
    name: str  # compute or operation, or ""; `call_site` is the line that called it
    call_site: str

    @property
    def duration_ns(self) -> int:
        """Length of this part of the path, in nanoseconds."""
        return self.end_ns - self.start_ns

    def __str__(self) -> str:
        at = f" at {self.call_site}" if self.call_site else ""
        names = {"compute": f"compute '{self.name}'", "wire": self.name, "waiting": f"waiting in {self.name}"}
        return names.get(self.doing, "program") + at


def critical_path(timeline: Timeline, *, step: int | None = None, ranks: Iterable[int] | None = None) -> list[PathLink]:
    """Return the path in order of time; its links follow each other and fill the window of the rank that ends last.

    The path is followed backwards: from an operation to the rank that came last to it, and there from each piece of
    work to the piece before it. Arguments and errors are those of `rank_windows`. Cost: one look at each link.
    """
    windows = of_steps(rank_windows(timeline, step=step, ranks=ranks))
    activity = Activity(timeline, windows)
    columns, last_of, busy = activity.columns, last_rows(activity.columns), activity.pieces()
    busy = busy.take(busy.doing <= WAITING)  # in the gaps only the program can run

    def pieces_of(rank: int) -> ActivityPieces:
        """Return all that a rank did."""
        return busy.take(slice(*np.searchsorted(busy.rank, [rank, rank + 1])))

    busy_ns = {window.rank: int(pieces_of(window.rank).end_ns.max(initial=0)) for window in windows}
    last = max(windows, key=lambda window: (window.end_ns, busy_ns[window.rank], -window.rank))
    path: list[PathLink] = []
    rank, at_ns, first_ns = last.rank, last.end_ns, last.start_ns
    visited_ranks: set[int] = set()
    while at_ns > first_ns:
        pieces = pieces_of(rank)
        index = int(np.searchsorted(pieces.start_ns, at_ns, "left")) - 1
        if index < 0 or pieces.end_ns[index] < at_ns:
            start_ns = first_ns if index < 0 else max(int(pieces.end_ns[index]), first_ns)
            path.append(PathLink(rank=rank, start_ns=start_ns, end_ns=at_ns, doing="program", name="", call_site=""))
            at_ns, visited_ranks = start_ns, set()
            continue
        row, doing = int(pieces.row[index]), int(pieces.doing[index])
        last_rank = int(columns.rank[last_of[row]]) if last_of[row] >= 0 else rank
        if doing == WAITING and last_rank != rank and last_rank not in visited_ranks:
            visited_ranks.add(rank)
            rank = last_rank
            continue
        start_ns = max(int(pieces.start_ns[index]), first_ns)
        name, site = columns.texts[columns.name[row]], columns.texts[columns.call_site[row]]
        if doing == PROGRAM:  # of the rank that kept the event loop
            rank, name, site = int(columns.rank[row]), "", name
        path.append(
            PathLink(rank=rank, start_ns=start_ns, end_ns=at_ns, doing=_DOING[doing], name=name, call_site=site)
        )
        at_ns, visited_ranks = start_ns, set()
        if doing == WIRE and start_ns <= columns.met_ns[row]:
            rank = last_rank
    return path[::-1]
