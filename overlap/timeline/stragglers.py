"""Ranks that make others wait: by coming late to operations, or by moving their bytes slowly once all are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .axis import figure, figure_unit
from .columns import columns
from .lateness import arrivals
from .meetings import Key, key_of
from .metrics import windows_of
from .spans import Timeline
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
