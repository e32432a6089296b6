"""HTML pages that stand alone: the verdict, and the spans of a timeline to zoom, search and look at."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from importlib.resources import files

from ..files.events import Json, assign_rows
from ..measure.intervals import Interval, Merged, clip, merge
from ..measure.metrics import windows_of
from ..span import Span
from ..spans import Timeline
from .theme import COMPUTE, EXPOSED, HIDDEN, WAITING

MAX_PAGE_SPANS = 200_000
"""More spans make a browser slow; the longest are kept, and the page says so."""


def page(timeline: Timeline, verdict: str, *, step: int | None = None, ranks: Iterable[int] | None = None) -> str:
    """Return the page as HTML: no file, font or script from elsewhere.

    Args:
        timeline: The run.
        verdict: Its verdict.
        step: The step to show; None for the whole run.
        ranks: The ranks to show; None for all.

    Raises:
        UsageError: If the timeline is empty, or no rank recorded that step.
    """
    data = json.dumps(page_data(timeline, step=step, ranks=ranks), separators=(",", ":"), allow_nan=False)
    title = "whole run" if step is None else f"step {step}"
    colours = {"compute": COMPUTE, "hidden": HIDDEN, "wire": EXPOSED, "waiting": WAITING}
    return (
        files(__package__)
        .joinpath("page.html")
        .read_text(encoding="utf-8")
        .replace("@TITLE@", html.escape(title))
        .replace("@VERDICT@", html.escape(verdict))
        .replace("@COLOURS@", json.dumps(colours))
        .replace("@DATA@", data.replace("<", "\\u003c"))
    )


def page_data(timeline: Timeline, *, step: int | None = None, ranks: Iterable[int] | None = None) -> Mapping[str, Json]:
    """Return the data of a page: lanes, and spans as [lane, kind, name, start, end, met, details, hidden].

    Times are nanoseconds after `origin_ns`; `met` is when the bytes of an operation began to move, and `hidden` are the
    intervals in which its rank computed meanwhile. Operations that cross share no lane.
    """
    windows = windows_of(timeline, step)
    chosen = set(windows) if ranks is None else set(windows) & set(ranks)
    first_ns = min(windows[rank][0] for rank in chosen) if chosen else 0
    last_ns = max(windows[rank][1] for rank in chosen) if chosen else 0
    selected = [
        span
        for span in timeline.spans
        if span.rank in chosen and span.kind != "step" and span.end_ns > first_ns and span.start_ns < last_ns
    ]
    left_out = max(len(selected) - MAX_PAGE_SPANS, 0)
    if left_out:
        selected = sorted(selected, key=lambda span: -span.duration_ns)[:MAX_PAGE_SPANS]
    lanes: dict[tuple[int, bool, str], list[Span]] = {}
    computed: dict[int, list[Interval]] = {}
    for span in selected:
        lanes.setdefault((span.rank, span.kind != "compute", span.lane), []).append(span)
        if span.kind == "compute":
            computed.setdefault(span.rank, []).append((span.start_ns, span.end_ns))
    busy, nothing = {rank: merge(intervals) for rank, intervals in computed.items()}, merge([])
    names: list[str] = []
    rows: list[list[Json]] = []
    for (rank, _, lane), spans in sorted(lanes.items()):
        spans.sort(key=lambda span: span.start_ns)
        row_numbers = assign_rows((span.start_ns, span.end_ns) for span in spans)
        for span, row in zip(spans, row_numbers, strict=True):
            rows.append(_span_row(span, len(names) + row, first_ns, busy.get(span.rank, nothing)))
        names += [f"{rank} {lane} ({row + 1})" if row else f"{rank} {lane}" for row in range(max(row_numbers) + 1)]
    return {
        "origin_ns": first_ns,
        "length_ns": last_ns - first_ns,
        "left_out": left_out,
        "lanes": names,
        "spans": rows,
    }


def _span_row(span: Span, lane: int, first_ns: int, busy: Merged) -> list[Json]:
    """Return a span's row of the page's data, as `page_data` describes it; `busy` is the rank's computing."""
    info = span.info
    details = f"at {span.call_site}" if span.call_site else ""
    if info is not None:
        details = (
            f"{info.op} #{info.seq} on {info.group}, {info.nbytes} bytes of {info.dtype or '?'}, "
            f"{info.algorithm or '?'}, at {info.call_site or '?'}; queued {info.queue_wait_ns} ns, "
            f"waited {info.last_rank_wait_ns} ns, moved {info.transfer_ns} ns"
        )
    beside = clip(busy, (span.start_ns, span.end_ns)) if span.kind == "comm" else []
    hidden: list[Json] = [[start_ns - first_ns, end_ns - first_ns] for start_ns, end_ns in beside]
    times: list[Json] = [span.start_ns - first_ns, span.end_ns - first_ns, span.moved_ns - first_ns]
    return [lane, span.kind, span.name, *times, details, hidden]
