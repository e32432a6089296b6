"""What is said of the span under the cursor."""

from __future__ import annotations

from ....collectives.kinds import Collective
from ....timeline.draw.axis import in_unit, unit_for
from ....timeline.span import CollectiveInfo, Span
from ....units import format_bytes, format_ns
from .track import Lane, Track


def details(track: Track, lane: Lane, at_ns: int, spans: list[Span]) -> list[str]:
    """Describe the first of the spans under the cursor, which is at `at_ns`: a line for each matter."""
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
    return f"{name}; the planner's choice is {best.algorithm}, in {format_ns(best.predicted_s * 1e9)}"


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
    return "" if taken is None else f"; predicted {format_ns(taken.alone_s * 1e9)} alone"


def _exposure(track: Track, span: Span) -> str:
    waiting_ns, wire_ns = track.exposed(span)
    if not waiting_ns and not wire_ns:
        return "hidden: its rank computed all the time"
    told = [format_ns(each) for each in (waiting_ns + wire_ns, waiting_ns, wire_ns)]
    return f"exposed {told[0]}: waiting {told[1]}, on the wire {told[2]}"
