"""Why communication was exposed: who was waited for, what that rank was doing, and which bytes were on the wire.

Every nanosecond of exposed communication has one cause, so causes add up to it exactly. While any operation moves bytes
the wire is the cause, and the oldest such operation stands for it; else the oldest operation that waits does, and the
cause is what the rank that came last to it was doing at that instant. If that rank was itself waiting, the cause is
further back, and is followed there.

Where a rank is late because it computes something that its victim does not compute, or takes longer for it, that is
what is told, even if it was on to something else by the time that it was waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from ..columnar import NONE, SpanColumns, Wholes
from ..spans import Timeline
from .activity import COMPUTE, NO_PIECES, PROGRAM, WAITING, WIRE, Activity, Pieces
from .intervals import Interval, counted
from .metrics import Coverage, coverage

Doing: TypeAlias = Literal["compute", "program", "wire", "unknown"]

_DOING: tuple[Doing, ...] = ("compute", "program", "wire", "unknown")
_UNKNOWN = 3

FOLLOWED = 16
"""Ranks of a chain in which each waits for the next, before it is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why communication was exposed on one rank, and for how long altogether."""

    victim: int  # The rank on which it was exposed
    rank: int | None  # Whom it waited for, in the end; None where bytes moved, or where nobody knows
    # What that rank did: it computed, it ran its program, or its own bytes moved. "wire" without a rank are the
    # victim's own bytes.
    doing: Doing
    name: str  # Of the compute or the operation; of a program, the operation that it had not come to
    call_site: str  # Where that was called, or ""
    duration_ns: int  # How long

    def __str__(self) -> str:
        """Say what was done, as in "compute 'tokenise' at train.py:31"."""
        at = f" at {self.call_site}" if self.call_site else ""
        if self.doing == "compute":
            return f"compute '{self.name}'{at}"
        if self.doing == "program":
            return f"its program{at}" if not self.name else f"its program, before {self.name}{at}"
        return f"{self.name}{at}" if self.name else "not recorded"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why communication was exposed on `victim` from `start_ns` to `end_ns`; the others as in a `Cause`."""

    victim: int
    start_ns: int
    end_ns: int
    rank: int | None
    doing: Doing
    name: str
    call_site: str


def causes(timeline: Timeline, *, step: int | None = None, ranks: Iterable[int] | None = None) -> list[Cause]:
    """Return the causes of all exposed communication, those that cost most first.

    Arguments and errors are those of `metrics.coverage`. Cost: a sort of the spans, and as many looks at what the last
    rank did as there are waits.
    """
    return causes_of(timeline, coverage(timeline, step=step, ranks=ranks))


def causes_of(timeline: Timeline, covers: Sequence[Coverage]) -> list[Cause]:
    """Do the same with what `coverage` has returned."""
    return reasons(timeline, covers).causes()


class Reasons(Sequence[Reason]):
    """Columns that look like a list of reasons, rank by rank and in order of time.

    Args:
        table: A row for each attribute of a `Reason`; `NONE` where there is no rank, texts and doings by number.
        texts: What the names and places number.
    """

    def __init__(self, table: Wholes, texts: Sequence[str]) -> None:
        self._table, self._texts = table, texts

    def __len__(self) -> int:
        return len(self._table[0])

    @overload
    def __getitem__(self, at: int) -> Reason: ...
    @overload
    def __getitem__(self, at: slice) -> Reasons: ...
    def __getitem__(self, at: int | slice) -> Reason | Reasons:
        if isinstance(at, slice):
            return Reasons(self._table[:, at], self._texts)
        return self._reason(*self._table[:, at].tolist())

    def __iter__(self) -> Iterator[Reason]:
        return (self._reason(*row) for row in self._table.T.tolist())

    def _reason(self, victim: int, start_ns: int, end_ns: int, rank: int, doing: int, name: int, site: int) -> Reason:
        whom = None if rank == NONE else rank
        return Reason(victim, start_ns, end_ns, whom, _DOING[doing], self._texts[name], self._texts[site])

    def causes(self) -> list[Cause]:
        """Add up the reasons of each rank that say the same, those that cost most first."""
        keys = self._table[[6, 5, 4, 3, 0]]
        order = np.lexsort(list(keys))
        firsts = np.flatnonzero(_differ(keys[:, order]))
        if not len(firsts):
            return []
        sums_ns = np.add.reduceat((self._table[2] - self._table[1])[order], firsts)
        by_first = np.argsort(order[firsts])  # causes that cost the same are told in order of time
        told = []
        for at, duration_ns in zip(order[firsts][by_first].tolist(), sums_ns[by_first].tolist(), strict=True):
            one = self[at]
            told.append(
                Cause(
                    victim=one.victim, rank=one.rank, doing=one.doing, name=one.name, call_site=one.call_site,
                    duration_ns=duration_ns,
                )
            )  # fmt: skip
        return sorted(told, key=lambda one: (-one.duration_ns, one.victim, str(one)))

    def waits(self) -> dict[int, Wholes]:
        """Return, by victim, a row for each time that it waited for a rank: from when, to when, and for whom."""
        waits = self._table[:4, self._table[3] != NONE]
        firsts = np.flatnonzero(_differ(waits[:1]))
        parts = np.split(waits[1:].T, firsts[1:])
        return dict(zip(waits[0, firsts].tolist(), parts, strict=False))


def _differ(rows: Wholes) -> NDArray[np.bool_]:
    """Whether each column is the first, or differs from that before it."""
    return np.append(np.ones(min(rows.shape[1], 1), bool), (rows[:, 1:] != rows[:, :-1]).any(axis=0))


def reasons(timeline: Timeline, covers: Sequence[Coverage]) -> Reasons:
    """Return, rank by rank, why communication is exposed at every instant at which it is, in order."""
    if not covers:
        return Reasons(np.zeros((7, 0), np.int64), ())
    window = min(cover.window[0] for cover in covers), max(cover.window[1] for cover in covers)
    activity = Activity(timeline, window)
    search = _Search(activity)
    search.run(covers)
    return _with_excess(search.found(), [*activity.columns.texts, ""], Excess(activity.columns, window))


def _with_excess(table: Wholes, texts: Sequence[str], excess: Excess) -> Reasons:
    """Name the compute that makes a rank late instead of the one that it was at."""
    numbers: Mapping[str, int] = {text: number for number, text in enumerate(texts)}
    of = np.flatnonzero((table[4] == COMPUTE) & (table[3] != NONE))
    of = of[np.lexsort((table[3, of], table[0, of]))]
    firsts = np.flatnonzero(_differ(table[[0, 3]][:, of]))
    for which in np.split(of, firsts[1:]) if len(of) else ():
        name, site, ns = excess.most(int(table[0, which[0]]), int(table[3, which[0]]))
        if 2 * ns >= int((table[2, which] - table[1, which]).sum()):
            table[5, which], table[6, which] = numbers[name], numbers[site]
    return Reasons(table, texts)


@dataclass(frozen=True, slots=True, eq=False)
class _Waits:
    """Waits as columns: whose they are (by place), in which operation, and which ranks led there, the victim first."""

    place: NDArray[np.intp]
    start_ns: Wholes
    end_ns: Wholes
    row: NDArray[np.intp]
    passed: Wholes  # n, depth

    def take(self, which: NDArray[np.bool_] | NDArray[np.intp]) -> _Waits:
        return _Waits(self.place[which], self.start_ns[which], self.end_ns[which], self.row[which], self.passed[which])


class _Search:
    """Looks behind all waits at once, a rank further with each pass."""

    def __init__(self, activity: Activity) -> None:
        self._activity, self._columns = activity, activity.columns
        self._none = len(activity.columns.texts)  # the number of no text
        self._told: list[tuple[NDArray[np.intp], Wholes]] = []

    def run(self, covers: Sequence[Coverage]) -> None:
        """Find the reasons for what is exposed on each rank."""
        parts = [self._activity.oldest(cover.rank, cover.exposed) for cover in covers]
        place = np.repeat(np.arange(len(covers)), [len(part) for part in parts])
        victims = np.array([cover.rank for cover in covers], np.int64)
        pieces = Pieces.joined(parts)
        waits = _Waits(place, pieces.start_ns, pieces.end_ns, pieces.row, victims[place][:, None])
        moves = pieces.doing == WIRE
        self._tell_of(waits.take(moves), NONE, WIRE)
        waits = waits.take(~moves)
        while len(waits.row):
            waits = self._behind(waits)

    def found(self) -> Wholes:
        """Return what has been found, rank by rank, in order of time."""
        places, table = (np.concatenate(parts, axis=-1) for parts in zip(*self._told, strict=True))
        return np.ascontiguousarray(table[:, np.lexsort((table[1], places))])

    def _behind(self, waits: _Waits) -> _Waits:
        """Tell what is behind waits; return those of the last ranks that are to be followed."""
        last = self._activity.last[waits.row]
        rank = self._columns.rank[last]
        known = (last >= 0) & (waits.passed != rank[:, None]).all(axis=1)
        self._tell_of(waits.take(~known), NONE, _UNKNOWN)
        waits, last, rank = waits.take(known), last[known], rank[known]
        at, under = self._between(rank, waits)
        of, whom, site = waits.take(at), rank[at], self._columns.index[6, last]
        self._tell_gaps(waits, rank, site, at, under)
        name, place = self._columns.index[2, under.row], self._columns.index[6, under.row]
        busy = (under.doing == COMPUTE) | (under.doing == WIRE)
        self._tell(of, under, busy, whom, under.doing, name, place)
        self._tell(of, under, under.doing == PROGRAM, whom, PROGRAM, self._none, name)
        passed = np.concatenate([of.passed, whom[:, None]], axis=1)
        further = self._activity.last[under.row]
        follows = (further >= 0) & (passed != self._columns.rank[further][:, None]).all(axis=1)
        follows &= (under.doing == WAITING) & (passed.shape[1] < FOLLOWED)
        # whatever the others wait for, that waits for it
        stuck = (under.doing == WAITING) & ~follows
        self._tell(of, under, stuck, whom, PROGRAM, self._columns.index[2, of.row], site[at])
        return _Waits(of.place, under.start_ns, under.end_ns, under.row, passed).take(follows)

    def _between(self, rank: Wholes, waits: _Waits) -> tuple[NDArray[np.intp], Pieces]:
        """Return what ranks did during waits, in order, and before it the number of the wait."""
        by_rank = np.argsort(rank, kind="stable")
        firsts = np.flatnonzero(_differ(rank[None, by_rank]))
        ats, parts = [np.zeros(0, np.intp)], [NO_PIECES]
        for which in np.split(by_rank, firsts[1:]) if len(rank) else ():
            pieces = self._activity.pieces(int(rank[which[0]]))
            start_ns, end_ns = waits.start_ns[which], waits.end_ns[which]
            first = np.searchsorted(pieces.end_ns, start_ns, "right")
            at, number = counted(first, np.searchsorted(pieces.start_ns, end_ns, "left"))
            part = pieces.take(number)
            begun_ns, ended_ns = np.maximum(part.start_ns, start_ns[at]), np.minimum(part.end_ns, end_ns[at])
            ats.append(which[at])
            parts.append(Pieces(begun_ns, ended_ns, part.doing, part.row))
        at, under = np.concatenate(ats), Pieces.joined(parts)
        order = np.lexsort((under.start_ns, at))
        return at[order], under.take(order)

    def _tell_gaps(
        self, waits: _Waits, rank: Wholes, site: NDArray[np.int32], at: NDArray[np.intp], under: Pieces
    ) -> None:
        """Tell of where the last ranks did nothing: only their programs can have run."""
        every = np.arange(len(rank))
        of = np.concatenate([every, at])
        start_ns = np.concatenate([waits.start_ns, under.end_ns])  # of the wait, and of what comes after each piece
        order = np.argsort(of, kind="stable")
        of, start_ns = of[order], start_ns[order]
        end_ns = waits.end_ns[of]
        same = of[1:] == of[:-1]
        begun_ns = np.concatenate([waits.start_ns, under.start_ns])[order]
        end_ns[:-1] = np.where(same, begun_ns[1:], end_ns[:-1])
        gaps = Pieces(start_ns, end_ns, np.full(len(of), PROGRAM), waits.row[of])
        name = self._columns.index[2, gaps.row]
        self._tell(waits.take(of), gaps, start_ns < end_ns, rank[of], PROGRAM, name, site[of])

    def _tell_of(self, waits: _Waits, rank: int, doing: int) -> None:
        """Tell of operations as such."""
        pieces = Pieces(waits.start_ns, waits.end_ns, np.full(len(waits.row), doing), waits.row)
        name, site = self._columns.index[2, waits.row], self._columns.index[6, waits.row]
        self._tell(waits, pieces, np.ones(len(waits.row), bool), rank, doing, name, site)

    def _tell(self, of: _Waits, pieces: Pieces, which: NDArray[np.bool_], *told: NDArray[np.integer] | int) -> None:
        """Take down some pieces of waits: whom, doing what, name and place."""
        columns = (of.passed[:, 0], pieces.start_ns, pieces.end_ns, *told)
        table = np.array([np.broadcast_to(column, which.shape)[which] for column in columns], np.int64)
        self._told.append((of.place[which], table))


class Excess:
    """The compute of all ranks inside a window, by name and place.

    Args:
        spans: Of the ranks, of any kind.
        window: From when to when.
    """

    def __init__(self, spans: SpanColumns, window: Interval) -> None:
        self._totals: dict[int, dict[tuple[str, str], int]] = {}
        inside_ns = np.minimum(spans.end_ns, window[1]) - np.maximum(spans.start_ns, window[0])
        computed = np.flatnonzero(spans.is_kind("compute") & (inside_ns > 0))
        names, sites = spans.index[2][computed], spans.index[6][computed]
        keys = [sites, names, spans.rank[computed]]
        order = np.lexsort(keys)
        begins = np.ones(len(order), bool)
        begins[1:] = np.any([key[order][1:] != key[order][:-1] for key in keys], axis=0)
        firsts = np.flatnonzero(begins)
        if not len(firsts):
            return
        sums_ns = np.add.reduceat(inside_ns[computed[order]], firsts)
        told = (key[order][firsts].tolist() for key in keys)
        for site, name, rank, ns in zip(*told, sums_ns.tolist(), strict=True):
            self._totals.setdefault(rank, {})[spans.texts[name], spans.texts[site]] = ns

    def most(self, victim: int, rank: int) -> tuple[str, str, int]:
        """Return name and place of what `rank` computes longer than `victim` by most, and by how much."""
        mine: Mapping[tuple[str, str], int] = self._totals.get(victim, {})
        more = {key: ns - mine.get(key, 0) for key, ns in self._totals.get(rank, {}).items()}
        name, site = max(more, key=lambda key: (more[key], key), default=("", ""))
        return name, site, more.get((name, site), 0)
