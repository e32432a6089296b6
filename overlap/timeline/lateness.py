"""Who made the others wait: the straggler cannot be seen in wall times, because a collective makes them equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from .intervals import Interval
from .meetings import PAIRED
from .metrics import windows_of
from .span import Span
from .spans import Timeline


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
