"""Reasons for exposed communication: the rank that was waited for, its activity, and the bytes on the wire.

Every nanosecond of exposed communication has one cause, so causes add up to it exactly. While any operation moves bytes
the wire is the cause, and the oldest such operation stands for it; else the oldest operation that waits does, and the
cause is what the rank that came last to it was doing at that instant. If that rank was itself waiting, the cause is
further back, and is followed there.

Where a rank is late because it computed something that its victim does not compute, or took longer for it, that compute
is named, even if the rank did something else by the time that it was waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..columnar import NONE, Int64s, Mask, Rows, SpanColumns, run_starts
from ..spans import Timeline
from .activity import COMPUTE, NO_PIECES, PROGRAM, WAITING, WIRE, Activity, ActivityPieces, keeper_rows
from .intervals import Interval, covered_ns, expand_ranges, intersect_each
from .metrics import Coverage, coverage

Doing: TypeAlias = Literal["compute", "program", "wire", "unknown"]

_DOING: tuple[Doing, ...] = ("compute", "program", "wire", "unknown")
_UNKNOWN = 3

MAX_CHAIN_RANKS = 16
"""Longest chain of ranks, each waiting for the next, that is followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why communication was exposed on one rank, and for how long altogether."""

    victim: int  # The rank on which it was exposed
    rank: int | None  # The rank that it waited for in the end; None where bytes moved, or where it is not known
    # Activity of that rank: it computed, it ran its program, or its own bytes moved. "wire" without a rank are the
    # victim's own bytes.
    doing: Doing
    name: str  # compute or operation; of a program, the operation that it had not come to
    call_site: str  # Where that was called, or ""
    duration_ns: int

    def __str__(self) -> str:
        """Return the activity as text: "compute 'tokenise' at train.py:31"."""
        at = f" at {self.call_site}" if self.call_site else ""
        if self.doing == "compute":
            return f"compute '{self.name}'{at}"
        if self.doing == "program":
            return f"its program{at}" if not self.name else f"its program, before {self.name}{at}"
        return f"{self.name}{at}" if self.name else "not recorded"


def causes(timeline: Timeline, *, step: int | None = None, ranks: Iterable[int] | None = None) -> list[Reason]:
    """Return the causes of all exposed communication, the most expensive first.

    Arguments and errors are those of `metrics.coverage`. Cost: a sort of the spans, and as many looks at what the last
    rank did as there are waits.
    """
    return reasons(timeline, coverage(timeline, step=step, ranks=ranks)).causes()


def kept_loops(timeline: Timeline, covers: Sequence[Coverage]) -> list[Reason]:
    """Return the ranks that kept event loops, with victim, line and total time of each, the longest first."""
    columns = timeline.columns
    rows = np.flatnonzero(columns.is_kind("program"))
    keeper = keeper_rows(columns)[rows]
    sums: dict[tuple[int, int, int], int] = {}
    for cover in covers if len(rows) else ():
        mine = np.flatnonzero((columns.rank[rows] == cover.rank) & (columns.start_ns[rows] < columns.end_ns[rows]))
        at, start_ns, end_ns = intersect_each(columns.start_ns[rows[mine]], columns.end_ns[rows[mine]], cover.kept)
        for row, ns in zip(keeper[mine[at]].tolist(), (end_ns - start_ns).tolist(), strict=True):
            key = cover.rank, int(columns.rank[row]), int(columns.name[row])
            sums[key] = sums.get(key, 0) + ns
    causes = [
        Reason(victim=victim, rank=rank, doing="program", name="", call_site=columns.texts[place], duration_ns=ns)
        for (victim, rank, place), ns in sums.items()
    ]
    return sorted(causes, key=lambda one: (-one.duration_ns, one.victim, str(one)))


def queues(timeline: Timeline, covers: Sequence[Coverage]) -> list[Reason]:
    """Return the operations queued on some ranks while nothing was busy, with their total times, the longest first.

    While several were queued, each of them counts.
    """
    columns = timeline.columns
    rows = np.flatnonzero(columns.is_kind("comm") & (columns.called_ns < columns.start_ns))
    sums: dict[tuple[int, int, int], int] = {}
    for cover in covers if len(rows) else ():
        mine = rows[columns.rank[rows] == cover.rank]
        waited_ns = covered_ns(columns.called_ns[mine], columns.start_ns[mine], cover.queued)
        for row, ns in zip(mine[waited_ns > 0].tolist(), waited_ns[waited_ns > 0].tolist(), strict=True):
            key = cover.rank, int(columns.name[row]), int(columns.call_site[row])
            sums[key] = sums.get(key, 0) + ns
    causes = [
        Reason(
            victim=victim, rank=None, doing="wire", name=columns.texts[name], call_site=columns.texts[place],
            duration_ns=ns,
        )
        for (victim, name, place), ns in sums.items()
    ]  # fmt: skip
    return sorted(causes, key=lambda one: (-one.duration_ns, one.victim, str(one)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reasons:
    """Columns of n stretches of exposed communication, each of one cause, rank by rank and in order of time."""

    texts: Sequence[str]  # The table of names and places
    victim: Int64s
    start_ns: Int64s
    end_ns: Int64s
    rank: Int64s  # `NONE` as `Reason.rank` is None
    doing: Int64s  # Index into the values of `Doing`
    name: Int64s
    call_site: Int64s

    def __len__(self) -> int:
        return len(self.victim)

    def causes(self) -> list[Reason]:
        """Return the sums of the stretches of each rank that have one cause, the most expensive first."""
        keys = self.call_site, self.name, self.doing, self.rank, self.victim
        order = np.lexsort(keys)
        firsts = run_starts(*(key[order] for key in keys))
        if not len(firsts):
            return []
        sums_ns = np.add.reduceat((self.end_ns - self.start_ns)[order], firsts)
        by_first = np.argsort(order[firsts])  # causes that cost the same come in order of time
        found = map(self._reason_at, order[firsts][by_first].tolist(), sums_ns[by_first].tolist())
        return sorted(found, key=lambda one: (-one.duration_ns, one.victim, str(one)))

    def within(self, window: Interval, victim: int) -> list[Reason]:
        """Return the causes on one rank in a window, the most expensive first."""
        start_ns, end_ns = np.maximum(self.start_ns, window[0]), np.minimum(self.end_ns, window[1])
        which = (self.victim == victim) & (start_ns < end_ns)
        return replace(self._select(which), start_ns=start_ns[which], end_ns=end_ns[which]).causes()

    def waits(self) -> dict[int, Int64s]:
        """Return, by victim, a row for each of its waits for a rank: start, end and awaited rank."""
        found = self._select(self.rank != NONE)
        rows = np.stack([found.start_ns, found.end_ns, found.rank], axis=1)
        firsts = run_starts(found.victim)
        return dict(zip(found.victim[firsts].tolist(), np.split(rows, firsts[1:]), strict=False))

    def _select(self, which: Mask | Rows) -> Reasons:
        """Return some stretches: a mask keeps their order, row numbers give the order."""
        return Reasons(texts=self.texts, **{name: getattr(self, name)[which] for name in _COLUMNS})

    def _reason_at(self, row: int, duration_ns: int) -> Reason:
        """Return the reason of one stretch, with a duration that several stretches may share."""
        return Reason(
            victim=int(self.victim[row]),
            rank=None if self.rank[row] == NONE else int(self.rank[row]),
            doing=_DOING[self.doing[row]],
            name=self.texts[self.name[row]],
            call_site=self.texts[self.call_site[row]],
            duration_ns=duration_ns,
        )


_COLUMNS = ("victim", "start_ns", "end_ns", "rank", "doing", "name", "call_site")


def reasons(timeline: Timeline, covers: Sequence[Coverage]) -> Reasons:
    """Return the stretches of exposed communication on some ranks, each with its reason."""
    if not covers:
        return Reasons(texts=(), **{name: np.zeros(0, np.int64) for name in _COLUMNS})
    window = min(cover.window[0] for cover in covers), max(cover.window[1] for cover in covers)
    activity = Activity(timeline, window)
    search = _ReasonSearch(activity)
    search.follow_waits(covers)
    found = search.collect()
    _name_excess(found, activity.columns, covers, window[0])
    return found


def _name_excess(stretches: Reasons, columns: SpanColumns, covers: Sequence[Coverage], first_ns: int) -> None:
    """Replace the compute named for a wait by the one that made the rank late, where that is another compute.

    A compute makes a rank late if the rank has spent more time on it than the victim by the end of a wait, and at least
    half of all that the victim has waited for the rank by then. What runs later, or in a window before, does not count.
    """
    rows = np.flatnonzero((stretches.doing == COMPUTE) & (stretches.rank != NONE))
    rows = rows[np.lexsort((stretches.rank[rows], stretches.victim[rows]))]
    if not len(rows):
        return
    rank, victim, end_ns = stretches.rank[rows], stretches.victim[rows], stretches.end_ns[rows]
    firsts = run_starts(victim, rank)
    # What the victim has waited for the rank by the end of each wait: a running sum within each pair of ranks.
    waited_ns = np.cumsum(end_ns - stretches.start_ns[rows])
    before_ns = np.append(0, waited_ns)[firsts]
    waited_ns -= np.repeat(before_ns, np.diff(np.append(firsts, len(rows))))
    begun_ns = np.full(int(columns.rank.max()) + 1, first_ns)
    begun_ns[[cover.rank for cover in covers]] = [cover.window[0] for cover in covers]
    named = np.stack([stretches.name[rows], stretches.call_site[rows]])
    own_ns, most_ns, longest = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64), named.copy()
    for computes in _group_computes(columns.take(columns.is_kind("compute"))):
        more_ns = spent_ns(computes, begun_ns, rank, end_ns) - spent_ns(computes, begun_ns, victim, end_ns)
        key = np.array([[computes.name[0]], [computes.call_site[0]]])
        is_own, is_more = (named == key).all(axis=0), more_ns > most_ns
        own_ns[is_own], most_ns[is_more], longest[:, is_more] = more_ns[is_own], more_ns[is_more], key
    late = (2 * own_ns < waited_ns) & (2 * most_ns >= waited_ns)
    stretches.name[rows[late]], stretches.call_site[rows[late]] = longest[:, late]


def _group_computes(spans: SpanColumns) -> list[SpanColumns]:
    """Divide spans by name and call site, sorted by these texts."""
    order = np.lexsort((spans.call_site, spans.name))
    firsts = run_starts(spans.name[order], spans.call_site[order])
    parts = map(spans.take, np.split(order, firsts[1:]))
    return sorted(parts, key=lambda part: (part.texts[part.name[0]], part.texts[part.call_site[0]]))


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


@dataclass(frozen=True, slots=True, eq=False)
class _Waits:
    """Columns of waits: victim's index in `covers`, interval, operation's row, and ranks passed, the victim first."""

    place: Rows
    start_ns: Int64s
    end_ns: Int64s
    row: Rows
    passed: Int64s  # n, depth

    def take(self, which: Mask | Rows) -> _Waits:
        """Return some waits: a mask keeps their order, row numbers give the order."""
        return _Waits(self.place[which], self.start_ns[which], self.end_ns[which], self.row[which], self.passed[which])


class _ReasonSearch:
    """Follows all waits at once, one rank further with each pass."""

    def __init__(self, activity: Activity) -> None:
        self._activity, self._columns = activity, activity.columns
        self._no_text = len(activity.columns.texts)  # the number of no text
        self._stretches: list[tuple[Int64s | Rows, ...]] = []  # place of the victim, then `_COLUMNS`

    def follow_waits(self, covers: Sequence[Coverage]) -> None:
        """Find the reasons for exposed communication on each rank: follow its waits until none is left."""
        parts = [self._activity.oldest_operations(cover.rank, cover.exposed) for cover in covers]
        place = np.repeat(np.arange(len(covers)), [len(part) for part in parts])
        victims = np.array([cover.rank for cover in covers], np.int64)
        pieces = ActivityPieces.concatenate(parts)
        waits = _Waits(place, pieces.start_ns, pieces.end_ns, pieces.row, victims[place][:, None])
        moves = pieces.doing == WIRE
        self._add_operations(waits.take(moves), WIRE)
        waits = waits.take(~moves)
        while len(waits.row):
            waits = self._follow_once(waits)

    def collect(self) -> Reasons:
        """Return all reasons found, sorted by rank in the order of `covers`, then by time."""
        place, *columns = (np.concatenate(parts) for parts in zip(*self._stretches, strict=True))
        order = np.lexsort((columns[1], place))
        named = {name: column[order] for name, column in zip(_COLUMNS, columns, strict=True)}
        return Reasons(texts=[*self._columns.texts, ""], **named)

    def _follow_once(self, waits: _Waits) -> _Waits:
        """Add the reasons behind waits; return the waits of the awaited ranks, which remain to be followed."""
        last = self._activity.last[waits.row]
        rank = self._columns.rank[last]
        known = (last >= 0) & (waits.passed != rank[:, None]).all(axis=1)
        self._add_operations(waits.take(~known), _UNKNOWN)
        waits, last, rank = waits.take(known), last[known], rank[known]
        index, pieces = self._activity_during(rank, waits)
        followed, awaited = waits.take(index), rank[index]
        self._add_gaps(waits, last, index, pieces)
        name, place = self._columns.name[pieces.row], self._columns.call_site[pieces.row]
        busy = (pieces.doing == COMPUTE) | (pieces.doing == WIRE)
        self._add_stretches(followed, pieces, busy, awaited, pieces.doing, name, place)
        self._add_stretches(
            followed, pieces, pieces.doing == PROGRAM, self._columns.rank[pieces.row], PROGRAM, self._no_text, name
        )
        passed_ranks = np.concatenate([followed.passed, awaited[:, None]], axis=1)
        further = self._activity.last[pieces.row]
        follows = (further >= 0) & (passed_ranks != self._columns.rank[further][:, None]).all(axis=1)
        follows &= (pieces.doing == WAITING) & (passed_ranks.shape[1] < MAX_CHAIN_RANKS)
        # in a circle of ranks that wait for each other, or in a long chain
        stuck = (pieces.doing == WAITING) & ~follows
        name, place = self._columns.name[last[index]], self._columns.call_site[last[index]]
        self._add_stretches(followed, pieces, stuck, awaited, PROGRAM, name, place)
        return _Waits(followed.place, pieces.start_ns, pieces.end_ns, pieces.row, passed_ranks).take(follows)

    def _activity_during(self, rank: Int64s, waits: _Waits) -> tuple[Rows, ActivityPieces]:
        """Return the activity of ranks during waits, wait by wait, and before it the index of each piece's wait."""
        by_rank = np.argsort(rank, kind="stable")
        firsts = run_starts(rank[by_rank])
        ats, parts = [np.zeros(0, np.intp)], [NO_PIECES]
        # Rank by rank: its pieces that touch each wait for it, clipped to the wait.
        for which in np.split(by_rank, firsts[1:]) if len(rank) else ():
            pieces = self._activity.pieces(int(rank[which[0]]))
            start_ns, end_ns = waits.start_ns[which], waits.end_ns[which]
            first = np.searchsorted(pieces.end_ns, start_ns, "right")
            index, number = expand_ranges(first, np.searchsorted(pieces.start_ns, end_ns, "left"))
            part = pieces.take(number)
            begun_ns, ended_ns = np.maximum(part.start_ns, start_ns[index]), np.minimum(part.end_ns, end_ns[index])
            ats.append(which[index])
            parts.append(ActivityPieces(begun_ns, ended_ns, part.doing, part.row))
        index, clipped = np.concatenate(ats), ActivityPieces.concatenate(parts)
        order = np.lexsort((clipped.start_ns, index))
        return index[order], clipped.take(order)

    def _add_gaps(self, waits: _Waits, last: Rows, at: Rows, pieces: ActivityPieces) -> None:
        """Add the time in which awaited ranks did nothing: only their programs can have run, up to their own calls."""
        every = np.arange(len(last))
        index = np.concatenate([every, at])
        start_ns = np.concatenate([waits.start_ns, pieces.end_ns])  # of the wait, and of what comes after each piece
        # Sorted by wait, each gap lasts until the next piece of its wait begins, and the last one until the wait ends.
        order = np.argsort(index, kind="stable")
        index, start_ns = index[order], start_ns[order]
        end_ns = waits.end_ns[index]
        same = index[1:] == index[:-1]
        begun_ns = np.concatenate([waits.start_ns, pieces.start_ns])[order]
        end_ns[:-1] = np.where(same, begun_ns[1:], end_ns[:-1])
        gaps = ActivityPieces(start_ns, end_ns, np.full(len(index), PROGRAM), last[index])
        late_rank, name, site = (getattr(self._columns, each)[gaps.row] for each in ("rank", "name", "call_site"))
        self._add_stretches(waits.take(index), gaps, start_ns < end_ns, late_rank, PROGRAM, name, site)

    def _add_operations(self, waits: _Waits, doing: int) -> None:
        """Add operations that are themselves the reason: bytes that move, or waits for an unknown rank."""
        pieces = ActivityPieces(waits.start_ns, waits.end_ns, np.full(len(waits.row), doing), waits.row)
        name, site = self._columns.name[waits.row], self._columns.call_site[waits.row]
        self._add_stretches(waits, pieces, np.ones(len(waits.row), bool), NONE, doing, name, site)

    def _add_stretches(
        self, waits: _Waits, pieces: ActivityPieces, which: Mask, *columns: NDArray[np.integer] | int
    ) -> None:
        """Add the pieces that a mask selects, one for each wait; `columns` are rank, doing, name and call site."""
        values = (waits.passed[:, 0], pieces.start_ns, pieces.end_ns, *columns)
        selected = (np.broadcast_to(np.asarray(column, np.int64), which.shape)[which] for column in values)
        self._stretches.append((waits.place[which], *selected))
