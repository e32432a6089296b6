"""One timeline of several: those of the processes of one run, brought onto one clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from ..errors import UsageError
from .spans import Span, Timeline, span_order

__all__ = ["merged", "shifted"]

_ERROR = "clock_error_ns"
"""In `Timeline.meta`: how far, at most, any instant of it may be from the common clock."""


def shifted(timeline: Timeline, *, offset_ns: int, error_ns: int) -> Timeline:
    """Return the timeline on another clock.

    Args:
        timeline: As a process recorded it.
        offset_ns: What the other clock showed when that of the process showed 0.
        error_ns: How far off that may be, at most; noted in `meta`.
    """
    spans = [_moved(span, offset_ns) for span in timeline.spans]
    return replace(timeline, spans=spans, meta=timeline.meta | {_ERROR: str(error_ns)})


def merged(parts: Sequence[Timeline]) -> Timeline:
    """Join the timelines of the processes of one run, all on one clock already.

    Each process knows only when its own ranks came to a collective; here it is known when the last of all did.

    Raises:
        UsageError: If they cannot be of one run: other world sizes or clocks, or a rank in two of them.
    """
    first, *rest = parts
    for part in rest:
        if (part.world_size, part.clock) != (first.world_size, first.clock):
            raise UsageError(
                f"not of one run: {first.world_size} ranks on the {first.clock} clock, "
                f"and {part.world_size} on the {part.clock} clock"
            )
    twice = [rank for part in parts for rank in part.ranks()]
    if len(set(twice)) < len(twice):
        again = next(rank for rank in twice if twice.count(rank) > 1)
        raise UsageError(f"not parts of one run: rank {again} is in two of them")
    errors = [int(part.meta[_ERROR]) for part in parts if _ERROR in part.meta]
    meta = first.meta | ({_ERROR: str(max(errors))} if errors else {})
    spans = _met([span for part in parts for span in part.spans])
    return Timeline(
        spans=sorted(spans, key=span_order),
        world_size=first.world_size,
        clock=first.clock,
        dropped=sum(part.dropped for part in parts),
        meta=meta,
    )


def _moved(span: Span, offset_ns: int) -> Span:
    info = span.info
    if info is not None:
        info = replace(
            info,
            issued_ns=info.issued_ns + offset_ns,
            met_ns=info.met_ns + offset_ns,
            start_ns=info.start_ns + offset_ns,
            end_ns=info.end_ns + offset_ns,
        )
    return replace(span, start_ns=span.start_ns + offset_ns, end_ns=span.end_ns + offset_ns, info=info)


def _met(spans: list[Span]) -> list[Span]:
    """Say of each collective when its last rank came, as far as all its ranks are here."""
    meetings: dict[tuple[object, ...], list[Span]] = defaultdict(list)
    for span in spans:
        if span.info is not None:
            meetings[_meeting(span)].append(span)
    last_ns = {
        key: max(span.start_ns for span in ends)
        for key, ends in meetings.items()
        if ends[0].info is not None and len(ends) == len(ends[0].info.ranks)
    }
    return [_met_at(span, last_ns.get(_meeting(span)) if span.info is not None else None) for span in spans]


def _meeting(span: Span) -> tuple[object, ...]:
    info = span.info
    return () if info is None else (info.group, info.ranks, span.lane, info.op, info.seq)


def _met_at(span: Span, met_ns: int | None) -> Span:
    if span.info is None or met_ns is None:
        return span
    # Nobody ends before the last has come; where clocks say so, they are off by less than their error.
    return replace(span, info=replace(span.info, met_ns=min(met_ns, span.end_ns)))
