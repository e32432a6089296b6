"""Pieces of time of timelines: what each rank did, and for a wait, what the rank did that it was for.

While any operation moves bytes, the oldest such operation has the time; else the oldest operation that waits for its
last rank. A wait is followed to what that rank did. Where a rank is late because it computed something that its victim
does not compute, or took longer for it, that compute is named, even if the rank did something else by the time that it
was waited for.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..timeline.columnar import Int64s, Rows, SpanColumns, run_starts
from ..timeline.measure.activity import PROGRAM, WAITING, Activity
from ..timeline.measure.meetings import last_rows
from .causes import COMPUTE, COPY, LOOP, NAMES, QUEUE, UNKNOWN, WAIT, WIRE
from .pieces import Pieces
from .sites import CallSite

_CAUSES = np.array([NAMES.index(cause) for cause in (COMPUTE, LOOP, WIRE, WAIT, QUEUE, COPY, UNKNOWN)], np.int8)
"""Causes in the order in which `activity` numbers what a rank does."""


def pieces_of_spans(activity: Activity) -> Pieces:
    """Return the pieces of ranks in the windows of an activity. Cost: a sort of its spans."""
    columns, windows = activity.columns, activity.windows
    pieces, site = _all_pieces(activity)
    queued = pieces.is_cause(QUEUE)  # an operation that a late rank has called says nothing of what the rank did
    every = replace(
        pieces, cause=np.where(queued, NAMES.index(UNKNOWN), pieces.cause), site=np.where(queued, -1, pieces.site)
    )
    begun_ns = np.full(int(columns.rank.max(initial=0)) + 1, min(window.start_ns for window in windows))
    begun_ns[[window.rank for window in windows]] = [window.start_ns for window in windows]
    others, waits = pieces.within({window.rank: window[2:] for window in windows}).follow_waits(every)
    return Pieces.concatenate([others, _name_excess(waits, columns, site, begun_ns)])


def _all_pieces(activity: Activity) -> tuple[Pieces, Rows]:
    """Return all pieces of all ranks, and the call site of each span; a program by itself is of unknown cause."""
    columns, did = activity.columns, activity.pieces()
    sites, site = _span_sites(columns)
    last = np.where(did.row >= 0, last_rows(columns)[did.row], -1)
    awaited = np.where(last >= 0, columns.rank[last], did.rank)
    late = np.where((did.doing == WAITING) & (awaited != did.rank), awaited, -1)
    shown = np.where(late >= 0, last, did.row)
    late = np.where(did.doing == PROGRAM, columns.rank[did.row], late)
    return Pieces(
        sites=sites, rank=did.rank, start_ns=did.start_ns, end_ns=did.end_ns, cause=_CAUSES[did.doing], late=late,
        site=np.where(shown >= 0, site[shown], -1), did=np.full(len(did), -1, np.int8),
    ), site  # fmt: skip


def _span_sites(columns: SpanColumns) -> tuple[tuple[CallSite, ...], Rows]:
    """Return call sites, and for each span the index of its own; a kept loop has the rank that keeps it."""
    compute, program = columns.is_kind("compute"), columns.is_kind("program")
    name, line = np.where(program, columns.rank, columns.name), np.where(program, columns.name, columns.call_site)
    most = max(len(columns.texts), int(columns.rank.max(initial=0))) + 1
    key = ((name * most + line) * 2 + compute) * 2 + program
    _, first, site = np.unique(key, return_index=True, return_inverse=True)
    found = zip(*(column[first].tolist() for column in (name, line, compute, program)), strict=True)
    texts = columns.texts
    sites = tuple(
        CallSite(
            operator=f"rank {name}" if keeps else f"'{texts[name]}'" if computes else texts[name],
            frames=(texts[line],) if texts[line] else (),
        )
        for name, line, computes, keeps in found
    )
    return sites, site


def _name_excess(waits: Pieces, columns: SpanColumns, site: Rows, begun_ns: Int64s) -> Pieces:
    """Replace the compute named for a wait by the one that made the rank late, where that is another compute.

    A compute makes a rank late if the rank has spent more time on it than the victim by the end of a wait, and at least
    half of all that the victim has waited for the rank by then. What runs later, or in a window before, does not count.
    """
    rows = np.flatnonzero(waits.did == NAMES.index(COMPUTE))
    rows = rows[np.lexsort((waits.late[rows], waits.rank[rows]))]
    if not len(rows):
        return waits
    rank, victim, end_ns = waits.late[rows], waits.rank[rows], waits.end_ns[rows]
    firsts = run_starts(victim, rank)
    # What the victim has waited for the rank by the end of each wait: a running sum within each pair of ranks.
    waited_ns = np.cumsum(end_ns - waits.start_ns[rows])
    before_ns = np.append(0, waited_ns)[firsts]
    waited_ns -= np.repeat(before_ns, np.diff(np.append(firsts, len(rows))))
    own_ns, most_ns, longest = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64), waits.site[rows]
    computes = np.flatnonzero(columns.is_kind("compute"))
    for number in np.unique(site[computes]).tolist():
        spans = columns.take(computes[site[computes] == number])
        more_ns = spent_ns(spans, begun_ns, rank, end_ns) - spent_ns(spans, begun_ns, victim, end_ns)
        is_own, is_more = waits.site[rows] == number, more_ns > most_ns
        own_ns[is_own], most_ns[is_more], longest[is_more] = more_ns[is_own], more_ns[is_more], number
    late = (2 * own_ns < waited_ns) & (2 * most_ns >= waited_ns)
    named = waits.site.copy()
    named[rows[late]] = longest[late]
    return replace(waits, site=named)


def spent_ns(spans: SpanColumns, begun_ns: Int64s, rank: Int64s, now_ns: Int64s) -> Int64s:
    """Return how long spans had run on each of `rank` by each of `now_ns`, since an instant `begun_ns` of each rank."""
    start_ns = np.maximum(spans.start_ns, begun_ns[spans.rank])
    ranks = np.concatenate([spans.rank, spans.rank, rank])
    times_ns = np.concatenate([start_ns, np.maximum(spans.end_ns, start_ns), now_ns]) - begun_ns.min()
    # Starts add a running span, ends remove one. By an instant, n running spans have run n * instant - sum of starts.
    running = np.repeat([1, -1, 0], [len(spans), len(spans), len(rank)])
    order = np.lexsort((times_ns, ranks))
    moments_ns = np.cumsum((running * times_ns)[order])
    firsts = run_starts(ranks[order])
    before_ns = np.repeat(np.append(0, moments_ns)[firsts], np.diff(np.append(firsts, len(order))))
    found: Int64s = np.empty_like(times_ns)
    found[order] = np.cumsum(running[order]) * times_ns[order] - (moments_ns - before_ns)
    until_now: Int64s = found[2 * len(spans) :]
    return until_now
