"""One timeline of several: those of the processes of one run, brought onto one clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from ..errors import UsageError
from .meetings import Key, number_of
from .parts import Header, Part
from .spans import Span, Timeline, span_order

__all__ = ["merged", "merged_header", "merged_spans", "on_clock"]

_ERROR = "clock_error_ns"
"""In `meta`: how far, at most, any instant may be from the common clock."""


def on_clock(timeline: Timeline, *, error_ns: int) -> Timeline:
    """Note how far off, at most, the common clock may be to which the timeline will be taken."""
    return replace(timeline, meta=timeline.meta | {_ERROR: str(error_ns)})


def merged(timelines: Sequence[Timeline]) -> Timeline:
    """Join the timelines of the processes of one run, all on one clock already.

    Each process knows only when its own ranks came to a collective; here it is known when the last of all did.

    Raises:
        UsageError: If they cannot be of one run: other world sizes or clocks, or a rank in two of them.
    """
    header = merged_header([_header(timeline) for timeline in timelines])
    meetings = _Meetings()
    for timeline in timelines:
        meetings.note(timeline.spans)
    spans = [span for timeline in timelines for span in meetings.settled(timeline.spans)]
    return Timeline(
        spans=sorted(spans, key=span_order),
        world_size=header.world_size,
        clock=header.clock,
        dropped=header.dropped,
        meta=header.meta,
    )


def merged_spans(parts: Sequence[Part]) -> Iterator[list[Span]]:
    """Yield what `merged` would give, rank by rank; each part is read twice, and memory holds one rank at a time.

    Raises:
        UsageError: If they cannot be of one run, or one is damaged.
    """
    merged_header([part.header for part in parts])
    meetings = _Meetings()
    for part in parts:
        for spans in part.spans():
            meetings.note(spans)
    for part in sorted(parts, key=lambda part: list(part.header.ranks)):
        for spans in part.spans():
            yield list(meetings.settled(spans))


def merged_header(headers: Sequence[Header]) -> Header:
    """Return what can be said of all of them together.

    Raises:
        UsageError: If they cannot be of one run.
    """
    first, *rest = headers
    for other in rest:
        if (other.world_size, other.clock) != (first.world_size, first.clock):
            raise UsageError(
                f"not of one run: {first.world_size} ranks on the {first.clock} clock, "
                f"and {other.world_size} on the {other.clock} clock"
            )
    ranks = sorted(rank for header in headers for rank in header.ranks)
    for rank, following in pairwise(ranks):
        if rank == following:
            raise UsageError(f"not parts of one run: rank {rank} is in two of them")
    errors = [int(header.meta[_ERROR]) for header in headers if _ERROR in header.meta]
    return Header(
        world_size=first.world_size,
        clock=first.clock,
        ranks=ranks,
        dropped=sum(header.dropped for header in headers),
        meta=first.meta | ({_ERROR: str(max(errors))} if errors else {}),
    )


def _header(timeline: Timeline) -> Header:
    return Header(
        world_size=timeline.world_size,
        clock=timeline.clock,
        ranks=timeline.ranks(),
        dropped=timeline.dropped,
        meta=timeline.meta,
    )


class _Meetings:
    """When the last rank came to each collective, as far as all its ranks are known."""

    def __init__(self) -> None:
        self._came: dict[Key, tuple[int, int]] = {}  # how many, and when the last of them

    def note(self, spans: Iterable[Span]) -> None:
        """Take note of who came when."""
        for span in spans:
            if (key := number_of(span)) is not None:
                came, last_ns = self._came.get(key, (0, span.start_ns))
                self._came[key] = came + 1, max(last_ns, span.start_ns)

    def settled(self, spans: Iterable[Span]) -> Iterator[Span]:
        """Yield the spans with what is known now."""
        for span in spans:
            info = span.info
            number = number_of(span)
            came, last_ns = (0, 0) if number is None else self._came[number]
            if info is None or came != len(info.ranks):
                yield span
            else:  # nobody ends before the last has come; where clocks say so, they are off by less than their error
                yield replace(span, info=replace(info, met_ns=min(last_ns, span.end_ns)))
