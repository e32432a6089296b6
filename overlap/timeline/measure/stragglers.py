"""Stragglers: ranks that come late to operations, or move their bytes slowly once all ranks are there.

A straggler cannot be seen in wall times, because a collective makes the wall times of its ranks equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..columnar import Int64s, SpanColumns, run_starts
from ..spans import Timeline
from .intervals import covered_ns
from .meetings import PAIRED, meetings
from .metrics import coverage, issued_in, windows_of
from .verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Number of collectives to which one rank came last, and all the waiting of other ranks that this caused."""

    rank: int
    collectives: int
    last: int
    caused_wait_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The cost of one rank to the others."""

    arrivals: Arrivals  # How often the rank was late
    exposed_ns: int  # How long others waited for it with nothing to compute, added up
    slow_ns: int  # How much longer its bytes moved than the bytes of the fastest rank of the same operation, added up
    doing: str  # compute that made it late, or its main activity while others waited for it, or ""


def arrivals(timeline: Timeline, *, step: int | None = None) -> list[Arrivals]:
    """Count how often each rank came last to a collective, and the waiting that this caused, rank by rank.

    A rank arrives when the operation becomes active there. A collective that only one rank recorded does not count.
    If all ranks arrive in the same nanosecond no rank is last; of several last ranks the lowest is named. With a step,
    those collectives count that ranks issued in it.

    Raises:
        UsageError: If the timeline is empty, or no rank recorded that step.
    """
    windows = windows_of(timeline, step)
    ranks = np.array(sorted(windows), np.int64)
    return _count_arrivals(ranks, timeline.columns.take(issued_in(timeline, windows, step)))


def _count_arrivals(ranks: Int64s, operations: SpanColumns) -> list[Arrivals]:
    """Return the arrivals of each rank at collectives; messages and those that one rank recorded do not count."""
    paired = [number for number, text in enumerate(operations.texts) if text in PAIRED]
    meeting, shared = _sort_by_meeting(operations.take(~np.isin(operations.op, paired)))
    firsts = run_starts(meeting)
    is_shared = np.diff(np.append(firsts, len(meeting))) > 1
    shared, meeting = shared.take(is_shared[meeting]), meeting[is_shared[meeting]]
    firsts = run_starts(meeting)
    counts = np.zeros((3, len(ranks)), np.int64)  # by rank: collectives, times last, waiting caused
    if len(firsts):
        begins = np.zeros(len(meeting), np.intp)
        begins[firsts] = 1
        meeting = np.cumsum(begins) - 1
        late_ns = np.maximum.reduceat(shared.start_ns, firsts)
        candidates = np.where(shared.start_ns == late_ns[meeting], shared.rank, np.iinfo(np.int64).max)
        late = np.searchsorted(ranks, np.minimum.reduceat(candidates, firsts))
        waited_ns = np.add.reduceat(late_ns[meeting] - shared.start_ns, firsts)
        np.add.at(counts[0], np.searchsorted(ranks, shared.rank), 1)
        np.add.at(counts[1], late, waited_ns > 0)
        np.add.at(counts[2], late, waited_ns)
    return [
        Arrivals(rank=rank, collectives=collectives, last=last, caused_wait_ns=wait_ns)
        for rank, collectives, last, wait_ns in zip(ranks.tolist(), *counts.tolist(), strict=True)
    ]


def straggler(counted: Sequence[Arrivals]) -> Arrivals | None:
    """Return the rank that others waited for longest, with its arrivals; None if none waited. Of equals, the lowest."""
    worst = max(counted, key=lambda one: (one.caused_wait_ns, -one.rank), default=None)
    return worst if worst and worst.caused_wait_ns else None


def stragglers(timeline: Timeline, verdict: Verdict, *, step: int | None = None) -> list[Straggler]:
    """Return all ranks, the most expensive for the others first; `verdict` is of the same step.

    Their operations are those that were issued in the step, and those of other steps for which a rank waited in it with
    nothing to compute, as the verdict counts.
    """
    ranks, operations = _step_operations(timeline, step)
    slow_ns = _slow_ns(ranks, operations)
    blamed = {rank: (ns, str(cause)) for rank, cause, ns in verdict.blamed() if rank is not None}
    result = []
    for one in _count_arrivals(ranks, operations):
        exposed_ns, doing = blamed.get(one.rank, (0, ""))
        result.append(Straggler(arrivals=one, exposed_ns=exposed_ns, slow_ns=slow_ns.get(one.rank, 0), doing=doing))
    return sorted(result, key=lambda one: (-one.exposed_ns, -one.slow_ns, one.arrivals.rank))


def _slow_ns(ranks: Int64s, operations: SpanColumns) -> dict[int, int]:
    """Return, by rank, how much longer its bytes moved than those of the fastest rank of each operation, added up."""
    meeting, operations = _sort_by_meeting(operations)
    if not len(meeting):
        return {}
    taken_ns = operations.end_ns - operations.met_ns
    slow_ns = np.zeros(len(ranks), np.int64)
    fastest_ns = np.minimum.reduceat(taken_ns, run_starts(meeting))[meeting]
    np.add.at(slow_ns, np.searchsorted(ranks, operations.rank), taken_ns - fastest_ns)
    return dict(zip(ranks.tolist(), slow_ns.tolist(), strict=True))


def _step_operations(timeline: Timeline, step: int | None) -> tuple[Int64s, SpanColumns]:
    """Return the ranks looked at, and the operations that they issued in the step or waited for in it."""
    windows, columns = windows_of(timeline, step), timeline.columns
    chosen = issued_in(timeline, windows, step)
    if step is not None:
        waited = np.zeros(len(columns), bool)
        rows = np.flatnonzero(columns.is_operation & ~chosen & (columns.start_ns < columns.met_ns))
        for cover in coverage(timeline, step=step) if len(rows) else ():
            mine = rows[columns.rank[rows] == cover.rank]
            waited[mine] = covered_ns(columns.start_ns[mine], columns.met_ns[mine], cover.waiting) > 0
        if waited.any():
            meeting = meetings(columns)
            chosen = chosen | np.isin(meeting, meeting[waited])
    return np.array(sorted(windows), np.int64), columns.take(chosen)


def _sort_by_meeting(operations: SpanColumns) -> tuple[Int64s, SpanColumns]:
    """Return operations sorted by meeting, and before them the meeting's number of each."""
    meeting = meetings(operations)
    order = np.argsort(meeting, kind="stable")
    return meeting[order], operations.take(order)
