"""Ranks that make others wait: by coming late to operations, or by moving their bytes slowly once all are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ..draw.axis import figure, figure_unit
from ..draw.columns import columns
from ..span import Span
from ..spans import Timeline
from .intervals import Interval
from .meetings import PAIRED, Key, key_of
from .metrics import windows_of
from .verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """One rank."""

    rank: int  # Which
    collectives: int  # That it took part in
    last: int  # To how many of them it came last
    exposed_ns: int  # What others waited for it with nothing to compute, added up
    slow_ns: int  # How much longer its bytes moved than those of the fastest rank in the same operation, added up
    doing: str  # What it mostly did when it was waited for, or ""


def stragglers(timeline: Timeline, verdict: Verdict, *, step: int | None = None) -> list[Straggler]:
    """Return all ranks, those that cost others most first; `verdict` is of the same step."""
    slow_ns = _slow_ns(timeline, step)
    blamed = {rank: (ns, str(cause)) for rank, cause, ns in verdict.blamed() if rank is not None}
    told = [
        Straggler(
            rank=one.rank,
            collectives=one.collectives,
            last=one.last,
            exposed_ns=blamed.get(one.rank, (0, ""))[0],
            slow_ns=slow_ns.get(one.rank, 0),
            doing=blamed.get(one.rank, (0, ""))[1],
        )
        for one in arrivals(timeline, step=step)
    ]
    return sorted(told, key=lambda one: (-one.exposed_ns, -one.slow_ns, one.rank))


def _slow_ns(timeline: Timeline, step: int | None) -> dict[int, int]:
    windows = windows_of(timeline, step)
    moved: dict[Key, list[tuple[int, int]]] = {}
    hull = min(start for start, _ in windows.values()), max(end for _, end in windows.values())
    for span in timeline.near(hull):
        key = key_of(span)
        if key is not None and span.info and span.rank in windows:
            start_ns, end_ns = windows[span.rank]
            if start_ns <= span.start_ns < end_ns:
                moved.setdefault(key, []).append((span.rank, span.info.transfer_ns))
    slow: dict[int, int] = {}
    for members in moved.values():
        least_ns = min(ns for _, ns in members)
        for rank, ns in members:
            slow[rank] = slow.get(rank, 0) + ns - least_ns
    return slow


def stragglers_table(rows: Sequence[Straggler], *, width: int, rows_at_most: int = 10) -> list[str]:
    """Write the worst of them; the others are counted."""
    unit, unit_ns = figure_unit(max((max(row.exposed_ns, row.slow_ns) for row in rows), default=0))
    figures = [
        (
            str(row.rank),
            f"{row.last} of {row.collectives}",
            figure(row.exposed_ns, unit_ns),
            figure(row.slow_ns, unit_ns),
            row.doing,
        )
        for row in rows[:rows_at_most]
        if 20 * max(row.exposed_ns, row.slow_ns) >= unit_ns
    ]
    if not figures:
        return ["nobody was waited for, and nobody was slow"]
    heads = ("rank", "came last", f"waited for/{unit}", f"slow/{unit}", "it was at")
    rest = len(rows) - len(figures)
    lines = columns(heads, figures, width=width, words=[4])
    return lines + ([f"and {rest} others, for whom ranks waited less, or not at all"] if rest > 0 else [])


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """How often one rank came last to a collective, and the waiting of all others together that this caused."""

    rank: int
    collectives: int
    last: int
    caused_wait_ns: int


def arrivals(timeline: Timeline, *, step: int | None = None) -> list[Arrivals]:
    """Count who came last, rank by rank.

    A rank arrives when the operation becomes active there. Collectives are matched by group (name and, if recorded,
    ranks), stream and sequence number; those that only one rank recorded say nothing and are left out. When all arrive
    in the same nanosecond nobody was last; of several last ones the lowest rank is named. With a step, those count that
    become active inside the rank's window of that step.

    Raises:
        UsageError: If the timeline is empty, or nobody recorded that step.
    """
    windows = windows_of(timeline, step)
    collectives = dict.fromkeys(windows, 0)
    last, caused_ns = dict(collectives), dict(collectives)
    for members in _matched(timeline, windows):
        for span in members:
            collectives[span.rank] += 1
        late = max(members, key=lambda span: (span.start_ns, -span.rank))
        wait_ns = sum(late.start_ns - span.start_ns for span in members)
        last[late.rank] += wait_ns > 0
        caused_ns[late.rank] += wait_ns
    return [
        Arrivals(rank=rank, collectives=collectives[rank], last=last[rank], caused_wait_ns=caused_ns[rank])
        for rank in sorted(windows)
    ]


def straggler(counted: Sequence[Arrivals]) -> Arrivals | None:
    """The rank that cost the others most waiting, or None if nobody did. Of equals, the lowest rank."""
    worst = max(counted, key=lambda one: (one.caused_wait_ns, -one.rank), default=None)
    return worst if worst and worst.caused_wait_ns else None


def _matched(timeline: Timeline, windows: dict[int, Interval]) -> list[list[Span]]:
    def key(span: Span) -> tuple[str, tuple[int, ...], str, int]:
        return (span.info.group, span.info.ranks, span.lane, span.info.seq) if span.info else ("", (), "", -1)

    hull = min(start for start, _ in windows.values()), max(end for _, end in windows.values())
    seen = sorted((span for span in timeline.near(hull) if _counts(span, windows)), key=key)
    return [members for _, grouped in groupby(seen, key) if len(members := list(grouped)) > 1]


def _counts(span: Span, windows: dict[int, Interval]) -> bool:
    if span.info is None or span.info.op in PAIRED or span.rank not in windows:
        return False
    start_ns, end_ns = windows[span.rank]
    return start_ns <= span.start_ns < end_ns
