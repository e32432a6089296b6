"""What each rank did at every instant: it computes before it moves bytes, and moves bytes before it waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..columnar import SpanColumns, Wholes
from ..span import Span
from ..spans import Timeline
from .intervals import Interval, Merged, inside, outside, subtract, union
from .meetings import Last, last_rows

Doing: TypeAlias = Literal["compute", "program", "wire", "waiting"]
Rows: TypeAlias = NDArray[np.intp]

COMPUTE, PROGRAM, WIRE, WAITING = range(4)
_DOING: tuple[Doing, ...] = ("compute", "program", "wire", "waiting")


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank did from one instant to another."""

    start_ns: int
    end_ns: int
    doing: Doing
    span: Span
    row: int  # of the span in the columns of the activity


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """n pieces as columns; `doing` is one of the numbers above, `row` that of the span in the columns."""

    start_ns: Wholes
    end_ns: Wholes
    doing: NDArray[np.int64]
    row: Rows

    def __len__(self) -> int:
        return len(self.row)

    def take(self, which: Rows | NDArray[np.bool_]) -> Pieces:
        """Return those of a mask, or of their numbers."""
        return Pieces(self.start_ns[which], self.end_ns[which], self.doing[which], self.row[which])

    @classmethod
    def joined(cls, parts: Sequence[Pieces]) -> Pieces:
        """Return those of several, one after the other."""
        columns = [(part.start_ns, part.end_ns, part.doing, part.row) for part in parts]
        start_ns, end_ns, doing, row = (np.concatenate(column) for column in zip(*columns, strict=True))
        return cls(start_ns, end_ns, doing, row)


class Activity:
    """What every rank did in a window, as far as somebody asks.

    Args:
        timeline: The run.
        window: From when to when.

    Attributes:
        columns: The spans that matter to the window; no text and no group is numbered twice.
        last: For each of them, the number of the span of the rank that came last to it; -1 where that is not known.
    """

    def __init__(self, timeline: Timeline, window: Interval) -> None:
        near = timeline.columns.near(window)
        self._timeline, self._numbers = timeline, np.flatnonzero(near)
        columns = timeline.columns if near.all() else timeline.columns.take(near)
        if len(set(columns.texts)) < len(columns.texts) or len(set(columns.groups)) < len(columns.groups):
            columns = SpanColumns.joined([columns])
        self.columns = columns
        self.last = last_rows(columns)
        does = columns.is_kind("compute") | columns.is_kind("comm") | columns.is_kind("program")
        self._rows = columns.rows_by_rank(does & (columns.end_ns > window[0]) & (columns.start_ns < window[1]))
        self._pieces: dict[int, Pieces] = {}
        self._made: dict[int, tuple[list[int], list[Piece]]] = {}

    def last_of(self, piece: Piece) -> Last | None:
        """Return who came last to an operation, if that is known."""
        row = int(self.last[piece.row])
        if row < 0:
            return None
        columns = self.columns
        return Last(int(columns.rank[row]), int(columns.start_ns[row]), columns.texts[columns.index[6, row]])

    def oldest(self, rank: int, where: Merged) -> Pieces:
        """Return for every instant in `where` the oldest operation that moves bytes, or else the oldest that waits."""
        return _oldest(self.columns, self._rows.get(rank, _NOTHING), where)

    def pieces(self, rank: int) -> Pieces:
        """Return all that a rank did, in order and without overlaps.

        Where there is nothing only its program can have run.
        """
        if rank not in self._pieces:
            self._pieces[rank] = _activity(self.columns, self._rows.get(rank, _NOTHING))
        return self._pieces[rank]

    def of(self, rank: int) -> tuple[list[int], list[Piece]]:
        """Return the same with the spans themselves, and when each begins. Cost: some microseconds each, once."""
        if rank not in self._made:
            pieces = self.pieces(rank)
            rows, at = np.unique(pieces.row, return_inverse=True)
            wanted = np.zeros(len(self._timeline.columns), bool)
            wanted[self._numbers[rows]] = True
            spans = self._timeline.chosen(wanted)
            starts = pieces.start_ns.tolist()
            told = zip(
                starts, pieces.end_ns.tolist(), pieces.doing.tolist(), at.tolist(), pieces.row.tolist(), strict=True
            )
            made = [Piece(start_ns, end_ns, _DOING[doing], spans[at], row) for start_ns, end_ns, doing, at, row in told]
            self._made[rank] = starts, made
        return self._made[rank]


_NOTHING: Rows = np.zeros(0, np.intp)
NO_PIECES = Pieces(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), _NOTHING)


def _activity(columns: SpanColumns, rows: Rows) -> Pieces:
    """Return what a rank did, without overlaps, in order: it computes before it moves bytes before it waits."""
    compute = _disjoint(columns, columns.of_kind("compute", rows), COMPUTE)
    program = _disjoint(columns, columns.of_kind("program", rows), PROGRAM)
    comm = columns.of_kind("comm", rows)
    active = union(columns.start_ns[comm], columns.end_ns[comm])
    moved = _oldest(columns, rows, subtract(active, union(compute.start_ns, compute.end_ns)))
    known = Pieces.joined([compute, moved])
    at, start_ns, end_ns = inside(program.start_ns, program.end_ns, outside(union(known.start_ns, known.end_ns)))
    found = Pieces.joined([known, Pieces(start_ns, end_ns, program.doing[at], program.row[at])])
    return found.take(np.argsort(found.start_ns, kind="stable"))


def _disjoint(columns: SpanColumns, rows: Rows, doing: int) -> Pieces:
    """Return spans in order, each from where those before it have ended."""
    rows = rows[np.lexsort((columns.end_ns[rows], columns.start_ns[rows]))]
    start_ns, end_ns = columns.start_ns[rows], columns.end_ns[rows]
    start_ns[1:] = np.maximum(start_ns[1:], np.maximum.accumulate(end_ns)[:-1])
    return Pieces(start_ns, end_ns, np.full(len(rows), doing), rows).take(start_ns < end_ns)


def _oldest(columns: SpanColumns, rows: Rows, where: Merged) -> Pieces:
    """Return for every instant in `where` the oldest operation that moves bytes, or else the oldest that waits."""
    comm = columns.of_kind("comm", rows)
    comm = comm[columns.start_ns[comm] < columns.end_ns[comm]]
    comm = comm[np.argsort(columns.start_ns[comm], kind="stable")]
    if not len(comm) or not len(where):
        return NO_PIECES
    known, start_ns, end_ns = columns.index[3, comm] >= 0, columns.start_ns[comm], columns.end_ns[comm]
    # when bytes began to move; in time that went back, at least inside the span
    met_ns = np.where(known, np.clip(columns.met_ns[comm], start_ns, end_ns), start_ns)
    by_age = np.argsort(np.where(known, columns.issued_ns[comm], start_ns), kind="stable")
    instants = np.sort(np.concatenate([start_ns, met_ns, end_ns, where.start_ns, where.end_ns]), kind="stable")
    instants = instants[np.append(True, instants[1:] != instants[:-1])]
    starts, meets, ends = (np.searchsorted(instants, each[by_age]) for each in (start_ns, met_ns, end_ns))
    moving, waiting = _first(meets, ends, len(instants) - 1), _first(starts, meets, len(instants) - 1)
    who = np.where(moving < len(comm), moving, waiting)
    of = np.searchsorted(where.start_ns, instants[:-1], "right") - 1
    found = np.flatnonzero((of >= 0) & (instants[:-1] < where.end_ns[of]) & (who < len(comm)))
    doing = np.where(moving < len(comm), WIRE, WAITING)[found]
    return _joined(Pieces(instants[found], instants[found + 1], doing, comm[by_age[who[found]]]))


def _first(begin: Rows, end: Rows, units: int) -> Rows:
    """Return, for each of so many units, which of n ranges of units is the first that has it; n where none has.

    A range is covered by two whose length is a power of two; what holds for one of those holds for both its halves.
    Cost: the units, times the logarithm of the longest range.
    """
    power = np.frexp(end - begin)[1] - 1
    first = np.full(units, len(begin), np.intp)
    for exponent in range(int(power.max(initial=-1)), -1, -1):
        length = 1 << exponent
        halves = first.copy()
        np.minimum(halves[length:], first[: units - length], out=halves[length:])
        (which,) = np.nonzero(power == exponent)
        np.minimum.at(halves, begin[which], which)
        np.minimum.at(halves, end[which] - length, which)
        first = halves
    return first


def _joined(pieces: Pieces) -> Pieces:
    """Join those that follow each other and are of one span and alike."""
    begins, ends = np.ones(len(pieces), bool), np.ones(len(pieces), bool)
    begins[1:] = (
        (pieces.start_ns[1:] != pieces.end_ns[:-1])
        | (pieces.doing[1:] != pieces.doing[:-1])
        | (pieces.row[1:] != pieces.row[:-1])
    )
    ends[:-1] = begins[1:]
    return Pieces(pieces.start_ns[begins], pieces.end_ns[ends], pieces.doing[begins], pieces.row[begins])
