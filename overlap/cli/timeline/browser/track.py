"""Tracks of the terminal browser: a run as lanes, the spans under the cursor, and the text that describes them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ....collectives.kinds import Collective
from ....errors import UsageError
from ....timeline.draw.lanes import ascii_lanes, block_lanes, stream_lane
from ....timeline.draw.theme import Piece
from ....timeline.measure.intervals import Interval, merge
from ....timeline.measure.meetings import last_rows
from ....timeline.measure.metrics import coverage
from ....timeline.measure.reasons import Cause, Reasons, reasons
from ....timeline.measure.verdict import Verdict, judge
from ....timeline.replay.machine import Machine
from ....timeline.span import CollectiveInfo, Kind, Span
from ....timeline.spans import Timeline
from ....units import format_bytes, format_ns, format_s, in_unit, unit_for

_ORDER: Mapping[Kind, int] = {"compute": 0, "comm": 1, "program": 2, "wires": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A row: the spans of one lane of a rank, in order of start."""

    rank: int
    kind: Kind
    name: str
    spans: tuple[Span, ...]
    starts_ns: tuple[int, ...]  # Of the spans
    longest_ns: int  # Length of the longest span

    @classmethod
    def of(cls, rank: int, kind: Kind, name: str, spans: Iterable[Span]) -> Lane:
        """Make a lane of spans in any order."""
        found = tuple(sorted(spans, key=lambda span: (span.start_ns, span.end_ns)))
        return cls(
            rank=rank, kind=kind, name=name, spans=found, starts_ns=tuple(span.start_ns for span in found),
            longest_ns=max(span.duration_ns for span in found),
        )  # fmt: skip

    def under(self, at_ns: int, wide_ns: int) -> list[Span]:
        """Return the spans in a stretch of time after an instant, the latest start first."""
        last = bisect_right(self.starts_ns, at_ns + max(wide_ns - 1, 0))
        first = bisect_left(self.starts_ns, at_ns - self.longest_ns)
        return [span for span in reversed(self.spans[first:last]) if max(span.end_ns, span.start_ns + 1) > at_ns]


class Track:
    """A run, or the part of it that is shown.

    Args:
        timeline: The run.
        title: Its name on the screen.
        origin_ns: The instant that counts as 0; by default the first.
        ranks: The ranks to show; all by default.

    Raises:
        UsageError: If the timeline is empty, or a rank is not in it.
    """

    timeline: Timeline
    title: str

    def __init__(
        self, timeline: Timeline, *, title: str, origin_ns: int | None = None, ranks: Iterable[int] | None = None
    ) -> None:
        self.timeline, self.title = timeline, title
        covers = coverage(timeline, ranks=ranks)
        self._covers = {cover.rank: cover for cover in covers}
        self._begin_ns, self._end_ns = covers[0].window
        self.origin_ns: int = self._begin_ns if origin_ns is None else origin_ns
        self.lanes: list[Lane] = self._lanes()

    def _lanes(self) -> list[Lane]:
        found: dict[tuple[int, Kind, str], list[Span]] = {}
        for span in self.timeline.spans:
            if span.rank in self._covers and span.kind in _ORDER:
                found.setdefault((span.rank, span.kind, span.lane), []).append(span)
        order = sorted(found, key=lambda key: (key[0], _ORDER[key[1]], key[2]))
        return [Lane.of(*key, found[key]) for key in order]

    @property
    def extent_ns(self) -> Interval:
        """First and last instant, counted from the origin."""
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
        """The verdict on the whole run."""
        return judge(self.timeline, list(self._covers.values()), self._reasons, step=None)

    @cached_property
    def _last(self) -> dict[int, int]:
        """The last rank of each operation, by the identity of a span."""
        rows = last_rows(self.timeline.columns)
        ranks = self.timeline.columns.rank[rows].tolist()
        known = zip(self.timeline.spans, rows.tolist(), ranks, strict=True)
        return {id(span): rank for span, row, rank in known if row >= 0}

    @cached_property
    def machine(self) -> Machine | None:
        """The machine that the run was recorded on; None if it is not known."""
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
        """Return the exposed time of an operation: waiting for a rank, and moving bytes."""
        cover = self._covers[span.rank].within((span.start_ns, span.end_ns)).breakdown()
        return cover.waiting_ns, cover.wire_ns


def details(track: Track, lane: Lane, at_ns: int, spans: list[Span]) -> list[str]:
    """Describe the first of the spans under the cursor, which is at `at_ns`, in several lines."""
    head = f"rank {lane.rank} {lane.name} at {_at(at_ns)}"
    if not spans:
        return [f"{head}: nothing"]
    span = spans[0]
    more = f" (and {len(spans) - 1} more here)" if len(spans) > 1 else ""
    step = "" if span.step is None else f", step {span.step}"
    first = (
        f"{head}: {span.name}{step}, {format_ns(span.duration_ns)} from {_at(span.start_ns - track.origin_ns)}{more}"
    )
    if span.info is None:
        place = f"called at {span.call_site}" if span.call_site else ""
        waited_ns = None if span.issued_ns is None else span.start_ns - span.issued_ns
        told = f"begun {format_ns(waited_ns)} after its call" if waited_ns is not None and waited_ns >= 0 else ""
        return [first, *(line for line in (", ".join(filter(None, (place, told))),) if line)]
    return [first, *_operation(track, span, span.info)]


def _at(at_ns: int) -> str:
    name, unit_ns = unit_for(max(abs(at_ns), 1))
    return f"{'-' if at_ns < 0 else ''}{in_unit(abs(at_ns), unit_ns)} {name}"


def _operation(track: Track, span: Span, info: CollectiveInfo) -> list[str]:
    place = f" at {info.call_site}" if info.call_site else ""
    ranks = f" of {len(info.ranks)} ranks" if info.ranks else ""
    size = f"{format_bytes(info.nbytes)} {info.dtype}".strip()
    return [
        f"{info.op} #{info.seq} on {info.group}{ranks}, {size}, priority {info.priority}{place}",
        f"queued {format_ns(info.queue_wait_ns)}; waited {format_ns(info.last_rank_wait_ns)}{_whom(track, span, info)}",
        f"moved bytes for {format_ns(info.transfer_ns)}{_speed(info)}{_predicted(track, info)}",
        _exposure(track, span),
        _why(track, info),
    ]


def _why(track: Track, info: CollectiveInfo) -> str:
    name = info.algorithm or "an algorithm that is not recorded"
    best = None if track.machine is None else track.machine.planned(info, None)
    if best is None:
        return name
    if best.algorithm == info.algorithm:
        return f"{name}, the best here: {best.reason}"
    return f"{name}; the planner's choice is {best.algorithm}, in {format_s(best.predicted_s)}"


def _whom(track: Track, span: Span, info: CollectiveInfo) -> str:
    last, reason = track.last_to(span), track.cause_of(span)
    if not info.last_rank_wait_ns:
        return ""
    if reason is not None and reason.doing in ("compute", "program"):
        did = f"compute '{reason.name}'" if reason.doing == "compute" else "its program"
        return f" for rank {reason.rank} ({did}{f' at {reason.call_site}' if reason.call_site else ''})"
    return "" if last is None or last == span.rank else f" for rank {last}"


def _speed(info: CollectiveInfo) -> str:
    if not info.transfer_ns or not info.nbytes:
        return ""
    algbw = info.nbytes / info.transfer_ns  # bytes per nanosecond are GB/s
    kinds = {each.text: each for each in Collective}
    factor = kinds[info.op].bus_factor(len(info.ranks)) if info.op in kinds and info.ranks else 1.0
    return f": algbw {algbw:.3g} GB/s, busbw {algbw * factor:.3g} GB/s"


def _predicted(track: Track, info: CollectiveInfo) -> str:
    taken = None if track.machine is None or not info.algorithm else track.machine.taken(info, info.algorithm)
    return "" if taken is None else f"; predicted {format_s(taken.alone_s)} alone"


def _exposure(track: Track, span: Span) -> str:
    waiting_ns, wire_ns = track.exposed(span)
    if not waiting_ns and not wire_ns:
        return "hidden: its rank computed all the time"
    told = [format_ns(each) for each in (waiting_ns + wire_ns, waiting_ns, wire_ns)]
    return f"exposed {told[0]}: waiting {told[1]}, on the wire {told[2]}"
