"""The critical path: the chain of work and waiting, from rank to rank, that made a step as long as it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from ..spans import Timeline
from .activity import PROGRAM, WAITING, WIRE, Activity, ActivityPieces
from .meetings import last_arrival_rows
from .steps import keep_ranks_with_steps, rank_windows

Doing: TypeAlias = Literal["compute", "program", "wire", "waiting"]
_DOING: tuple[Doing, ...] = ("compute", "program", "wire", "waiting")  # in the order of `activity`'s numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class PathLink:
    """Part of the critical path: what one rank did from one instant to another."""

    rank: int
    start_ns: int
    end_ns: int
    doing: Doing  # "waiting": for an unknown rank; waits for known ranks are followed to these
    name: str  # name of the compute or operation, or ""
    call_site: str  # line that called it, or ""

    @property
    def duration_ns(self) -> int:
        """Length of this part of the path, in nanoseconds."""
        return self.end_ns - self.start_ns

    def __str__(self) -> str:
        at = f" at {self.call_site}" if self.call_site else ""
        names = {"compute": f"compute '{self.name}'", "wire": self.name, "waiting": f"waiting in {self.name}"}
        return names.get(self.doing, "program") + at


def critical_path(timeline: Timeline, *, step: int | None = None, ranks: Iterable[int] | None = None) -> list[PathLink]:
    """Return the critical path in order of time; its links follow each other, and fill the window of a rank.

    That is the rank that ends last. From there the path is followed backwards: from each piece of work of a rank to the
    piece before it, and from an operation to the rank that came last to it. Cost: one look at each link.

    Args:
        timeline: The run.
        step: A step index, or None for the whole run.
        ranks: World ranks to look at; None means all. Ranks that mark no steps, while others do, are left out.

    Raises:
        UsageError: The timeline is empty, no rank recorded the step, or `ranks` is empty or has one without spans.
    """
    windows = keep_ranks_with_steps(rank_windows(timeline, step=step, ranks=ranks))
    activity = Activity(timeline, windows)
    columns, last_of, busy = activity.columns, last_arrival_rows(activity.columns), activity.pieces()
    busy = busy.take(busy.doing <= WAITING)  # in the gaps between these pieces only the program can run

    def pieces_of_rank(rank: int) -> ActivityPieces:
        return busy.take(slice(*np.searchsorted(busy.rank, [rank, rank + 1])))

    busy_ns = {window.rank: int(pieces_of_rank(window.rank).end_ns.max(initial=0)) for window in windows}
    last = max(windows, key=lambda window: (window.end_ns, busy_ns[window.rank], -window.rank))
    path: list[PathLink] = []
    rank, at_ns, first_ns = last.rank, last.end_ns, last.start_ns
    visited_ranks: set[int] = set()  # ranks that wait at this instant, and that the path has left already
    while at_ns > first_ns:
        pieces = pieces_of_rank(rank)
        index, start_ns = _piece_before(pieces, at_ns, first_ns)
        if index is None:  # a gap: only the rank's program ran
            path.append(PathLink(rank=rank, start_ns=start_ns, end_ns=at_ns, doing="program", name="", call_site=""))
            at_ns, visited_ranks = start_ns, set()
            continue
        row, doing = int(pieces.row[index]), int(pieces.doing[index])
        last_rank = int(columns.rank[last_of[row]]) if last_of[row] >= 0 else rank
        # Go on at the same instant with the rank that this one waits for, unless that would close a circle.
        if doing == WAITING and last_rank != rank and last_rank not in visited_ranks:
            visited_ranks.add(rank)
            rank = last_rank
            continue
        name, site = columns.texts[columns.name[row]], columns.texts[columns.call_site[row]]
        if doing == PROGRAM:
            # The span is of the rank that kept the event loop busy; its name is the line that did.
            rank, name, site = int(columns.rank[row]), "", name
        path.append(
            PathLink(rank=rank, start_ns=start_ns, end_ns=at_ns, doing=_DOING[doing], name=name, call_site=site)
        )
        at_ns, visited_ranks = start_ns, set()
        # The bytes began to move when the last rank arrived: before that, the work of that rank counts.
        if doing == WIRE and start_ns <= columns.met_ns[row]:
            rank = last_rank
    return path[::-1]


def _piece_before(pieces: ActivityPieces, at_ns: int, first_ns: int) -> tuple[int | None, int]:
    """Return the index of the piece that was running just before `at_ns`, or None in a gap, and when that began.

    A begin before `first_ns`, the start of the path, is moved to it.
    """
    index = int(np.searchsorted(pieces.start_ns, at_ns, "left")) - 1
    if index < 0:
        return None, first_ns
    if pieces.end_ns[index] < at_ns:
        return None, max(int(pieces.end_ns[index]), first_ns)
    return index, max(int(pieces.start_ns[index]), first_ns)
