"""Pieces of time of timelines: what each rank did, and for a wait, what the rank did that it was for.

While any operation moves bytes, the oldest such operation has the time; else the oldest operation that waits for its
last rank. A wait is followed to what that rank did. Where a rank is late because it computed something that its victim
does not compute, or took longer for it, that compute is named, even if the rank did something else by the time that it
was waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..timeline.columnar import Int64s, Rows, SpanColumns, run_starts
from ..timeline.measure.activity import NO_PIECES as NO_ACTIVITY
from ..timeline.measure.activity import PROGRAM, WAITING, Activity, ActivityPieces, disjoint_pieces
from ..timeline.measure.intervals import Interval, Merged, intersect, intersect_each, subtract, union
from ..timeline.measure.metrics import Coverage
from ..timeline.spans import Timeline
from .causes import COMPUTE, COPY, LOOP, NAMES, QUEUE, UNKNOWN, WAIT, WIRE
from .pieces import NO_PIECES, Pieces
from .places import ProgramPlace

_CAUSES = np.array([NAMES.index(cause) for cause in (COMPUTE, LOOP, WIRE, WAIT)], np.int8)
"""Causes in the order in which `activity` numbers what a rank does."""


def pieces_of_spans(timeline: Timeline, covers: Sequence[Coverage]) -> Pieces:
    """Return the pieces of some ranks, each inside its window. Cost: a sort of the spans of these windows."""
    windows = {cover.rank: cover.window for cover in covers}
    window = min(low for low, _ in windows.values()), max(high for _, high in windows.values())
    if window[0] >= window[1]:
        return NO_PIECES
    activity = Activity(timeline, window)
    columns = activity.columns
    places, place = _places(columns)
    ranks: list[int] = np.unique(columns.rank).tolist()
    pieces = Pieces.concatenate([_rank_pieces(activity, rank, window, places, place) for rank in ranks])
    begun_ns = np.full(ranks[-1] + 1, window[0])
    begun_ns[list(windows)] = [low for low, _ in windows.values()]
    followed = pieces.within(windows).follow_waits(pieces, lambda waits: _name_excess(waits, columns, place, begun_ns))
    operations, called_ns = columns.rows_by_rank(columns.is_kind("comm")), columns.called_ns
    queues = {rank: disjoint_pieces(called_ns, columns.start_ns, rows, WAITING) for rank, rows in operations.items()}
    parts = [_divide_idle(followed, cover, queues.get(cover.rank, NO_ACTIVITY), place) for cover in covers]
    return Pieces.concatenate(parts)


def _places(columns: SpanColumns) -> tuple[tuple[ProgramPlace, ...], Rows]:
    """Return the places of spans, and for each span the index of its own; a kept loop has the rank that keeps it."""
    compute, program = columns.is_kind("compute"), columns.is_kind("program")
    name, site = np.where(program, columns.rank, columns.name), np.where(program, columns.name, columns.call_site)
    most = max(len(columns.texts), int(columns.rank.max(initial=0))) + 1
    key = ((name * most + site) * 2 + compute) * 2 + program
    _, first, place = np.unique(key, return_index=True, return_inverse=True)
    found = zip(*(column[first].tolist() for column in (name, site, compute, program)), strict=True)
    texts = columns.texts
    places = tuple(
        ProgramPlace(
            operator=f"rank {name}" if keeps else f"'{texts[name]}'" if computes else texts[name],
            frames=(texts[site],) if texts[site] else (),
        )
        for name, site, computes, keeps in found
    )
    return places, place


def _rank_pieces(
    activity: Activity, rank: int, window: Interval, places: tuple[ProgramPlace, ...], place: Rows
) -> Pieces:
    """Return all pieces of a rank in a window; what its program did by itself is of unknown cause."""
    columns, busy = activity.columns, activity.pieces(rank)
    last = activity.last[busy.row]
    awaited = np.where(last >= 0, columns.rank[last], rank)
    waits, keeps = busy.doing == WAITING, busy.doing == PROGRAM
    late = np.where(waits & (awaited != rank), awaited, np.where(keeps, columns.rank[busy.row], -1))
    shown = np.where(waits & (late >= 0), last, busy.row)
    rest = subtract(Merged(*np.array([window]).T), union(busy.start_ns, busy.end_ns))
    copies = columns.of_kind("copy", activity.rows(rank))
    copied = intersect(rest, union(columns.start_ns[copies], columns.end_ns[copies]))
    idle = subtract(rest, copied)
    return Pieces.concatenate([
        Pieces.of(places, rank, busy.start_ns, busy.end_ns, _CAUSES[busy.doing], place=place[shown], late=late),
        Pieces.of(places, rank, copied.start_ns, copied.end_ns, COPY),
        Pieces.of(places, rank, idle.start_ns, idle.end_ns, UNKNOWN),
    ])  # fmt: skip


def _divide_idle(pieces: Pieces, cover: Coverage, queue: ActivityPieces, place: Rows) -> Pieces:
    """Return the pieces of one rank in which idle time is queued where an operation was, the first one that was."""
    mine = pieces.of_rank(cover.rank, cover.window)
    idle = mine.is_cause(UNKNOWN, COPY)
    queued, rest = mine.take(idle).split(cover.queued)
    if not len(queued):
        return mine
    row, start_ns, end_ns = intersect_each(queue.start_ns, queue.end_ns, union(queued.start_ns, queued.end_ns))
    found = Pieces.of(mine.places, cover.rank, start_ns, end_ns, QUEUE, place=place[queue.row[row]])
    return Pieces.concatenate([mine.take(~idle), rest, found])


def _name_excess(waits: Pieces, columns: SpanColumns, place: Rows, begun_ns: Int64s) -> Pieces:
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
    own_ns, most_ns, longest = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64), waits.place[rows]
    computes = np.flatnonzero(columns.is_kind("compute"))
    for number in np.unique(place[computes]).tolist():
        spans = columns.take(computes[place[computes] == number])
        more_ns = spent_ns(spans, begun_ns, rank, end_ns) - spent_ns(spans, begun_ns, victim, end_ns)
        is_own, is_more = waits.place[rows] == number, more_ns > most_ns
        own_ns[is_own], most_ns[is_more], longest[is_more] = more_ns[is_own], more_ns[is_more], number
    late = (2 * own_ns < waited_ns) & (2 * most_ns >= waited_ns)
    named = waits.place.copy()
    named[rows[late]] = longest[late]
    return replace(waits, place=named)


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
