"""Oddities of a timeline: spans that cannot be true, and how reports treat them."""

from __future__ import annotations

import numpy as np

from ..timeline.columnar import NONE, SpanColumns
from ..timeline.spans import LEFT_OUT, ORIGIN, Timeline


def describe_oddities(timeline: Timeline) -> str:
    """Return the faults of a timeline in one line, with how reports treat them; "" without faults."""
    columns, ours = timeline.columns, ORIGIN not in timeline.meta
    faults = [timeline.meta.get(LEFT_OUT, "")]
    if ours:  # in traces of other tools, computes may overlap: they are many kernels
        faults += [_describe_overlapping_computes(columns), _describe_early_starts(columns)]
    if columns.rank.size and timeline.world_size <= int(columns.rank.max()):
        faults.append(f"the file says {timeline.world_size} ranks, and has rank {columns.rank.max()}; all are shown")
    return "; ".join(filter(None, faults))


def _describe_overlapping_computes(columns: SpanColumns) -> str:
    """Return a text on computes of one stream of a rank that overlap, though only one can run at a time; "" if none."""
    issued = columns.is_kind("compute") & (columns.issued_ns != NONE)
    compute = columns.take(issued & (columns.end_ns > columns.start_ns))
    thread = compute.rank * len(compute.texts) + compute.lane
    order = np.argsort(thread, kind="stable")  # within a thread they stay in order of start
    thread, start_ns, end_ns = thread[order], compute.start_ns[order], compute.end_ns[order]
    overlapping = np.flatnonzero((thread[1:] == thread[:-1]) & (start_ns[1:] < end_ns[:-1]))
    if not len(overlapping):
        return ""
    # The example is the later span of the first pair.
    (span,) = compute.take(order[overlapping[:1] + 1]).spans()
    verb = "begins" if len(overlapping) == 1 else "begin"
    return (
        f"{_span_count(len(overlapping))} on a lane of computes {verb} before the one before has ended "
        f"(first: '{span.name}' of rank {span.rank} on '{span.lane}'), which counts once"
    )


def _describe_early_starts(columns: SpanColumns) -> str:
    """Return a text on spans that begin before the call that issued them; "" if none do."""
    called = (columns.issued_ns != NONE) & (columns.issued_ns > columns.start_ns)
    if not (count := int(called.sum())):
        return ""
    (span,) = columns.take(np.flatnonzero(called)[:1]).spans()
    verbs = ("begins before it was", "it is") if count == 1 else ("begin before they were", "they are")
    return (
        f"{_span_count(count)} {verbs[0]} called (first: '{span.name}' of rank {span.rank}): a clock went back; "
        f"{verbs[1]} shown as not queued"
    )


def _span_count(count: int) -> str:
    return f"{count} span{'s' * (count != 1)}"
