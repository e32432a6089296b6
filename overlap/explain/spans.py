"""Pieces of time of timelines: what each rank did, and for a wait, what the late rank did.

If a rank has several exposed operations, its time goes to the oldest one that moves bytes; if none does, to the oldest
one that waits for its last rank. A wait has the call site of what the late rank did at that time. But if the late rank
has spent longer on some compute than the waiting rank, and that made it late, the wait has the call site of that
compute, even if the late rank did something else during the wait.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..timeline.columnar import Int64s, Rows, SpanColumns, run_lengths, run_starts
from ..timeline.measure.activity import PROGRAM, WAITING, Activity
from ..timeline.measure.meetings import last_arrival_rows
from .causes import COMPUTE, COPY, LOOP, NAMES, QUEUE, UNKNOWN, WAIT, WIRE
from .pieces import Pieces
from .sites import CallSite

_CAUSES = np.array([NAMES.index(cause) for cause in (COMPUTE, LOOP, WIRE, WAIT, QUEUE, COPY, UNKNOWN)], np.int8)
"""Index of the cause in `causes.NAMES`, by the number that `activity` gives to what a rank does."""


def pieces_of_spans(activity: Activity) -> Pieces:
    """Return the pieces of ranks in the windows of an activity. Cost: a sort of its spans."""
    columns, windows = activity.columns, activity.windows
    pieces, site = _all_pieces(activity)
    # For waits that others follow, a late rank with only queued operations did something unknown.
    queued = pieces.is_cause(QUEUE)
    every = replace(
        pieces, cause=np.where(queued, NAMES.index(UNKNOWN), pieces.cause), site=np.where(queued, -1, pieces.site)
    )
    # The start of each rank's window, by rank; ranks without a window have the earliest start.
    ranks = [window.rank for window in windows]  # some may have no span
    begun_ns = np.full(max(int(columns.rank.max(initial=0)), *ranks) + 1, min(window.start_ns for window in windows))
    begun_ns[ranks] = [window.start_ns for window in windows]
    others, waits = pieces.cut_to_rank_windows({window.rank: window[2:] for window in windows}).follow_waits(every)
    return Pieces.concatenate([others, _blame_longer_computes(waits, columns, site, begun_ns)])


def _all_pieces(activity: Activity) -> tuple[Pieces, Rows]:
    """Return all pieces of all ranks, and for each span the index of its call site."""
    columns, did = activity.columns, activity.pieces()
    sites, site = _span_sites(columns)
    # For each piece of an operation: the span of the rank that came last to it.
    last = np.where(did.row >= 0, last_arrival_rows(columns)[did.row], -1)
    awaited = np.where(last >= 0, columns.rank[last], did.rank)
    late = np.where((did.doing == WAITING) & (awaited != did.rank), awaited, -1)
    # A wait has the call site of the operation on the late rank.
    shown = np.where(late >= 0, last, did.row)
    late = np.where(did.doing == PROGRAM, columns.rank[did.row], late)
    return Pieces(
        sites=sites, rank=did.rank, start_ns=did.start_ns, end_ns=did.end_ns, cause=_CAUSES[did.doing], late=late,
        site=np.where(shown >= 0, site[shown], -1), did=np.full(len(did), -1, np.int8),
    ), site  # fmt: skip


def _span_sites(columns: SpanColumns) -> tuple[tuple[CallSite, ...], Rows]:
    """Return distinct call sites, and for each span the index of its call site.

    The span of a program that keeps the event loop busy has the operator "rank 3", the rank that keeps it.
    """
    compute, program = columns.is_kind("compute"), columns.is_kind("program")
    name, line = np.where(program, columns.rank, columns.name), np.where(program, columns.name, columns.call_site)
    most = max(len(columns.texts), int(columns.rank.max(initial=0))) + 1
    key = ((name * most + line) * 2 + compute) * 2 + program
    _, first, site = np.unique(key, return_index=True, return_inverse=True)
    found = zip(*(column[first].tolist() for column in (name, line, compute, program)), strict=True)
    texts = columns.texts
    sites = []
    for name, line, computes, keeps in found:
        operator = f"rank {name}" if keeps else texts[name]
        frames = (texts[line],) if texts[line] else ()
        sites.append(CallSite(operator=f"'{operator}'" if computes else operator, frames=frames))
    return tuple(sites), site


def _blame_longer_computes(waits: Pieces, columns: SpanColumns, site: Rows, begun_ns: Int64s) -> Pieces:
    """Replace the call site of waits for a computing rank by that of the compute that made the rank late.

    A compute made the rank late if, by the end of the wait, the rank has spent more time on it than the waiting rank
    (the victim) has, by at least half of the time that the victim has waited for the rank so far. If this holds for the
    present call site, it stays. Computes before `begun_ns` of their rank do not count.
    """
    rows = np.flatnonzero(waits.did == NAMES.index(COMPUTE))
    rows = rows[np.lexsort((waits.late[rows], waits.rank[rows]))]
    if not len(rows):
        return waits
    rank, victim, end_ns = waits.late[rows], waits.rank[rows], waits.end_ns[rows]
    firsts = run_starts(victim, rank)
    # Time that the victim has waited for the rank by the end of each wait: a running sum for each pair of ranks.
    waited_ns = np.cumsum(end_ns - waits.start_ns[rows])
    before_ns = np.append(0, waited_ns)[firsts]
    waited_ns -= np.repeat(before_ns, run_lengths(firsts, len(rows)))
    own_ns, most_ns, longest = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64), waits.site[rows]
    computes = np.flatnonzero(columns.is_kind("compute"))
    for number in np.unique(site[computes]).tolist():
        spans = columns.take(computes[site[computes] == number])
        more_ns = run_ns_until(spans, begun_ns, rank, end_ns) - run_ns_until(spans, begun_ns, victim, end_ns)
        is_own, is_more = waits.site[rows] == number, more_ns > most_ns
        own_ns[is_own], most_ns[is_more], longest[is_more] = more_ns[is_own], more_ns[is_more], number
    late = (2 * own_ns < waited_ns) & (2 * most_ns >= waited_ns)
    named = waits.site.copy()
    named[rows[late]] = longest[late]
    return replace(waits, site=named)


def run_ns_until(spans: SpanColumns, begun_ns: Int64s, rank: Int64s, now_ns: Int64s) -> Int64s:
    """Return, for each question, how many nanoseconds spans had run on a rank by an instant.

    Args:
        spans: The spans.
        begun_ns: By rank, the instant from which on time counts.
        rank: Rank of each question.
        now_ns: Instant of each question.
    """
    start_ns = np.maximum(spans.start_ns, begun_ns[spans.rank])
    ranks = np.concatenate([spans.rank, spans.rank, rank])
    times_ns = np.concatenate([start_ns, np.maximum(spans.end_ns, start_ns), now_ns]) - begun_ns.min()
    # Starts add a running span, ends remove one. By an instant, n running spans have run n * instant - sum of starts.
    running = np.repeat([1, -1, 0], [len(spans), len(spans), len(rank)])
    order = np.lexsort((times_ns, ranks))
    moments_ns = np.cumsum((running * times_ns)[order])
    firsts = run_starts(ranks[order])
    before_ns = np.repeat(np.append(0, moments_ns)[firsts], run_lengths(firsts, len(order)))
    found: Int64s = np.empty_like(times_ns)
    found[order] = np.cumsum(running[order]) * times_ns[order] - (moments_ns - before_ns)
    return found[2 * len(spans) :]
