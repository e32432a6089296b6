"""The critical path: what, one after the other on whichever rank, made the step as long as it is."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..draw.axis import figure, figure_unit
from ..draw.columns import columns
from ..spans import Timeline
from .activity import Activity, Piece
from .meetings import Last
from .metrics import coverage


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A part of the path: what a rank did from one instant to another, which nothing else could have shortened."""

    rank: int  # Which
    start_ns: int  # From when
    end_ns: int  # To when
    # It computed, moved bytes, waited for somebody who is not known, or ran its program.
    doing: Literal["compute", "wire", "waiting", "program"]
    name: str  # Of the compute or operation, or ""; `call_site` is where that was called
    call_site: str

    @property
    def duration_ns(self) -> int:
        """How long."""
        return self.end_ns - self.start_ns

    def __str__(self) -> str:
        at = f" at {self.call_site}" if self.call_site else ""
        names = {"compute": f"compute '{self.name}'", "wire": self.name, "waiting": f"waiting in {self.name}"}
        return names.get(self.doing, "program") + at


def critical_path(timeline: Timeline, *, step: int | None = None, ranks: Iterable[int] | None = None) -> list[Link]:
    """Return the path in order of time; its links follow each other and fill the window of the rank that ends last.

    It is walked backwards: from an operation to the rank that came last to it, and there from what that did to what it
    did before. Arguments and errors are those of `metrics.coverage`. Cost: one look at each link.
    """
    covers = coverage(timeline, step=step, ranks=ranks)
    window = min(cover.window[0] for cover in covers), max(cover.window[1] for cover in covers)
    activity = Activity(timeline, window)
    last = max(covers, key=lambda cover: (cover.window[1], _busy_until(activity, cover.rank), -cover.rank))
    path: list[Link] = []
    rank, at_ns, first_ns = last.rank, last.window[1], last.window[0]
    passed: set[int] = set()
    while at_ns > first_ns:
        piece = _before(activity, rank, at_ns)
        if piece is None or piece.end_ns < at_ns:
            start_ns = first_ns if piece is None else max(piece.end_ns, first_ns)
            path.append(_link(rank, start_ns, at_ns, None))
            at_ns, passed = start_ns, set()
            continue
        further = _further(activity, piece, rank)
        if piece.doing == "waiting" and further is not None and further.rank not in passed:
            passed.add(rank)
            rank = further.rank
            continue
        start_ns = max(piece.start_ns, first_ns)
        path.append(_link(rank, start_ns, at_ns, piece))
        at_ns, passed = start_ns, set()
        info = piece.span.info
        if piece.doing == "wire" and further is not None and info is not None and start_ns <= info.met_ns:
            rank = further.rank
    return path[::-1]


def _busy_until(activity: Activity, rank: int) -> int:
    _, pieces = activity.of(rank)
    return pieces[-1].end_ns if pieces else 0


def _before(activity: Activity, rank: int, at_ns: int) -> Piece | None:
    """Return what the rank did last before an instant."""
    starts, pieces = activity.of(rank)
    index = bisect_left(starts, at_ns) - 1
    if index < 0:
        return None
    piece = pieces[index]
    return piece if piece.end_ns <= at_ns else Piece(piece.start_ns, at_ns, piece.doing, piece.span, piece.row)


def _further(activity: Activity, piece: Piece, rank: int) -> Last | None:
    last = activity.last_of(piece) if piece.span.kind == "comm" else None
    return None if last is None or last.rank == rank else last


def _link(rank: int, start_ns: int, end_ns: int, piece: Piece | None) -> Link:
    if piece is None:
        return Link(rank=rank, start_ns=start_ns, end_ns=end_ns, doing="program", name="", call_site="")
    span = piece.span
    name, site = (span.name, span.info.call_site if span.info else span.call_site)
    if piece.doing == "program":
        name, site = "", span.name
    return Link(rank=rank, start_ns=start_ns, end_ns=end_ns, doing=piece.doing, name=name, call_site=site)


def critical_path_table(path: Sequence[Link], *, width: int, rows_at_most: int = 12) -> list[str]:
    """Write what the path is made of, the longest first."""
    found: dict[tuple[int, str], tuple[int, int]] = {}
    for link in path:
        ns, times = found.get((link.rank, str(link)), (0, 0))
        found[link.rank, str(link)] = ns + link.duration_ns, times + 1
    total_ns = sum(link.duration_ns for link in path)
    unit, unit_ns = figure_unit(total_ns)
    ordered = sorted(found.items(), key=lambda item: (-item[1][0], item[0]))
    figures = [
        (what, str(rank), figure(ns, unit_ns), f"{ns / max(total_ns, 1):.0%}", str(times))
        for (rank, what), (ns, times) in ordered[:rows_at_most]
    ]
    lines = columns(("on the critical path", "rank", unit, "share", "times"), figures, width=width, words=[0])
    rest_ns = sum(ns for _, (ns, _) in ordered[rows_at_most:])
    return lines + ([f"and {len(ordered) - rows_at_most} more, {figure(rest_ns, unit_ns)} {unit}"] if rest_ns else [])
