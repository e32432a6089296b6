"""One run as rows of lanes: what is in each, and what lies under an instant."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ....errors import UsageError
from ....timeline.draw.lanes import ascii_lanes, block_lanes, stream_lane
from ....timeline.draw.theme import Piece
from ....timeline.measure.intervals import Interval, merge
from ....timeline.measure.meetings import last_rows
from ....timeline.measure.metrics import coverage
from ....timeline.measure.reasons import Cause, Reasons, reasons
from ....timeline.measure.verdict import Verdict, judge
from ....timeline.replay.machine import Machine
from ....timeline.span import Kind, Span
from ....timeline.spans import Timeline

_ORDER: Mapping[Kind, int] = {"compute": 0, "comm": 1, "program": 2, "wires": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A row: the spans of one lane of a rank, in order of start."""

    rank: int  # Whose
    kind: Kind  # Of its spans
    name: str  # Of the lane
    spans: tuple[Span, ...]  # All of them
    starts_ns: tuple[int, ...]  # When each begins
    longest_ns: int  # How long the longest of them is

    @classmethod
    def of(cls, rank: int, kind: Kind, name: str, spans: Iterable[Span]) -> Lane:
        """Make a lane of spans in any order."""
        found = tuple(sorted(spans, key=lambda span: (span.start_ns, span.end_ns)))
        return cls(
            rank=rank, kind=kind, name=name, spans=found, starts_ns=tuple(span.start_ns for span in found),
            longest_ns=max(span.duration_ns for span in found),
        )  # fmt: skip

    def under(self, at_ns: int, wide_ns: int) -> list[Span]:
        """Return the spans at an instant, or in so much after it; those that began last first."""
        last = bisect_right(self.starts_ns, at_ns + max(wide_ns - 1, 0))
        first = bisect_left(self.starts_ns, at_ns - self.longest_ns)
        return [span for span in reversed(self.spans[first:last]) if max(span.end_ns, span.start_ns + 1) > at_ns]


class Track:
    """A run, or the part of it that is shown.

    Args:
        timeline: The run.
        title: What it is called.
        origin_ns: The instant that counts as 0; by default its first.
        ranks: To show; all by default.

    Raises:
        UsageError: If the timeline is empty, or a rank is not in it.
    """

    def __init__(
        self, timeline: Timeline, *, title: str, origin_ns: int | None = None, ranks: Iterable[int] | None = None
    ) -> None:
        self.timeline, self.title = timeline, title
        covers = coverage(timeline, ranks=ranks)
        self._covers = {cover.rank: cover for cover in covers}
        self._begin_ns, self._end_ns = covers[0].window
        self.origin_ns = self._begin_ns if origin_ns is None else origin_ns
        self.lanes = self._lanes()

    def _lanes(self) -> list[Lane]:
        found: dict[tuple[int, Kind, str], list[Span]] = {}
        for span in self.timeline.spans:
            if span.rank in self._covers and span.kind in _ORDER:
                found.setdefault((span.rank, span.kind, span.lane), []).append(span)
        order = sorted(found, key=lambda key: (key[0], _ORDER[key[1]], key[2]))
        return [Lane.of(*key, found[key]) for key in order]

    @property
    def extent_ns(self) -> Interval:
        """From where to where it goes, counted from its origin."""
        return self._begin_ns - self.origin_ns, self._end_ns - self.origin_ns

    def drawn(self, lane: Lane, window_ns: Interval, cells: int, *, ascii: bool) -> list[Piece]:
        """Draw a lane in a window that is counted from the origin."""
        window = window_ns[0] + self.origin_ns, window_ns[1] + self.origin_ns
        cover = self._covers[lane.rank].within(window)
        if lane.kind != "comm":
            busy = merge(self._clipped(lane, window)) if lane.kind != "compute" else cover.compute
            alone = replace(cover, compute=busy)
            drawn = ascii_lanes(alone, window, cells) if ascii else block_lanes(alone, window, cells, color=True)
            return drawn[0]
        active = merge(self._clipped(lane, window))
        return stream_lane(active, cover, window, cells, ascii=ascii, color=not ascii)

    def _clipped(self, lane: Lane, window: Interval) -> list[Interval]:
        shown = lane.under(window[0], window[1] - window[0])
        return [(max(span.start_ns, window[0]), min(span.end_ns, window[1])) for span in shown]

    # -- why ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _reasons(self) -> Reasons:
        return reasons(self.timeline, list(self._covers.values()))

    @cached_property
    def verdict(self) -> Verdict:
        """What it comes to."""
        return judge([cover.breakdown() for cover in self._covers.values()], self._reasons.causes(), step=None)

    @cached_property
    def _last(self) -> dict[int, int]:
        """The last rank of each operation, by the identity of a span."""
        rows = last_rows(self.timeline.columns)
        ranks = self.timeline.columns.rank[rows].tolist()
        known = zip(self.timeline.spans, rows.tolist(), ranks, strict=True)
        return {id(span): rank for span, row, rank in known if row >= 0}

    @cached_property
    def machine(self) -> Machine | None:
        """The machine that it was recorded on; None if nobody can tell."""
        try:
            return Machine(self.timeline.meta, self.timeline.world_size)
        except UsageError:
            return None

    def last_to(self, span: Span) -> int | None:
        """Return the rank that came last to an operation."""
        return self._last.get(id(span))

    def cause_of(self, span: Span) -> Cause | None:
        """Return why an operation waited for a rank while nothing was computed, for the longest part of that time."""
        found = self._reasons.within((span.start_ns, span.end_ns), span.rank)
        return next((cause for cause in found if cause.rank is not None), None)

    def exposed(self, span: Span) -> tuple[int, int]:
        """Return how long an operation had nothing computed beside it: waiting for a rank, and moving bytes."""
        cover = self._covers[span.rank].within((span.start_ns, span.end_ns)).breakdown()
        return cover.waiting_ns, cover.wire_ns
