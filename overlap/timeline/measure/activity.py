"""Activity of ranks: whether a rank computed, ran its program, moved bytes or waited, at every instant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..columnar import Int64s, Mask, Rows, SpanColumns, run_starts
from ..spans import Timeline
from .intervals import Interval, Merged, complement, intersect_each, subtract, union
from .meetings import last_rows

COMPUTE, PROGRAM, WIRE, WAITING = range(4)


@dataclass(frozen=True, slots=True, eq=False)
class ActivityPieces:
    """Columns of n pieces of a rank's time: `doing` is `COMPUTE`, `PROGRAM`, `WIRE` or `WAITING`; `row` of a span."""

    start_ns: Int64s
    end_ns: Int64s
    doing: NDArray[np.int64]
    row: Rows

    def __len__(self) -> int:
        return len(self.row)

    def take(self, which: Rows | Mask) -> ActivityPieces:
        """Return some pieces: a mask keeps their order, row numbers give the order."""
        return ActivityPieces(self.start_ns[which], self.end_ns[which], self.doing[which], self.row[which])

    @classmethod
    def concatenate(cls, parts: Sequence[ActivityPieces]) -> ActivityPieces:
        """Return the pieces of several parts, one after the other."""
        columns = [(part.start_ns, part.end_ns, part.doing, part.row) for part in parts]
        start_ns, end_ns, doing, row = (np.concatenate(column) for column in zip(*columns, strict=True))
        return cls(start_ns, end_ns, doing, row)


class Activity:
    """Activity of every rank in a window, computed for each rank on first use.

    Args:
        timeline: The run.
        window: From when to when.

    Attributes:
        columns: The spans that matter to the window.
        last: For each of them, the row of the span whose rank came last to the operation; -1 where it is not known.
    """

    columns: SpanColumns

    def __init__(self, timeline: Timeline, window: Interval) -> None:
        near = timeline.columns.near(window)
        self.columns = columns = timeline.columns if near.all() else timeline.columns.take(near)
        self.last: Rows = last_rows(columns)
        inside = (columns.end_ns > window[0]) & (columns.start_ns < window[1])
        self._rows = columns.rows_by_rank(inside & ~columns.is_kind("step"))
        self._moved_ns, self._called_ns = columns.moved_ns, columns.called_ns
        self._keepers = keeper_rows(columns)
        self._pieces: dict[int, ActivityPieces] = {}

    def rows(self, rank: int) -> Rows:
        """Return the spans of a rank that are in the window."""
        return self._rows.get(rank, _NOTHING)

    def oldest_operations(self, rank: int, where: Merged) -> ActivityPieces:
        """Return, for each instant in `where`, the oldest operation that moves bytes, or else the oldest that waits."""
        return self._oldest_pieces(self.rows(rank), where)

    def pieces(self, rank: int) -> ActivityPieces:
        """Return all that a rank did, in order and without overlaps: a gap is time in which only its program can run.

        A rank computes before its event loop is kept, and that before it moves bytes, and moves bytes before it waits.
        """
        if rank not in self._pieces:
            self._pieces[rank] = self._rank_pieces(self.rows(rank))
        return self._pieces[rank]

    def _rank_pieces(self, rows: Rows) -> ActivityPieces:
        """Compute the pieces of a rank from the rows of its spans: compute, then kept loops, then operations."""
        columns = self.columns
        times = columns.start_ns, columns.end_ns
        compute = disjoint_pieces(*times, columns.of_kind("compute", rows), COMPUTE)
        program = disjoint_pieces(*times, columns.of_kind("program", rows), PROGRAM)
        at, start_ns, end_ns = intersect_each(program.start_ns, program.end_ns, complement(_union(compute)))
        local = ActivityPieces.concatenate(
            [compute, ActivityPieces(start_ns, end_ns, program.doing[at], self._keepers[program.row[at]])]
        )
        comm = columns.of_kind("comm", rows)
        active = union(columns.start_ns[comm], columns.end_ns[comm])
        pieces = ActivityPieces.concatenate([local, self._oldest_pieces(rows, subtract(active, _union(local)))])
        return pieces.take(np.argsort(pieces.start_ns, kind="stable"))

    def _oldest_pieces(self, rows: Rows, where: Merged) -> ActivityPieces:
        """Compute `oldest_operations` from the rows of a rank's spans, in pieces in which no operation changes."""
        columns = self.columns
        comm = columns.of_kind("comm", rows)
        comm = comm[columns.start_ns[comm] < columns.end_ns[comm]]
        comm = comm[np.argsort(columns.start_ns[comm], kind="stable")]
        if not len(comm) or not len(where):
            return NO_PIECES
        start_ns, end_ns, moved_ns = columns.start_ns[comm], columns.end_ns[comm], self._moved_ns[comm]
        by_age = np.argsort(self._called_ns[comm], kind="stable")
        instants = np.sort(np.concatenate([start_ns, moved_ns, end_ns, where.start_ns, where.end_ns]), kind="stable")
        instants = instants[np.append(True, instants[1:] != instants[:-1])]
        # Ranges of units (from an instant to the next), by age: the first that covers a unit is the oldest operation.
        starts, meets, ends = (np.searchsorted(instants, each[by_age]) for each in (start_ns, moved_ns, end_ns))
        moving, waiting = (
            _first_covering(meets, ends, len(instants) - 1),
            _first_covering(starts, meets, len(instants) - 1),
        )
        oldest = np.where(moving < len(comm), moving, waiting)  # index by age; len(comm) for none
        at = np.searchsorted(where.start_ns, instants[:-1], "right") - 1
        found = np.flatnonzero((at >= 0) & (instants[:-1] < where.end_ns[at]) & (oldest < len(comm)))
        doing = np.where(moving < len(comm), WIRE, WAITING)[found]
        return _merge_equal_neighbours(
            ActivityPieces(instants[found], instants[found + 1], doing, comm[by_age[oldest[found]]])
        )


_NOTHING: Rows = np.zeros(0, np.intp)
NO_PIECES = ActivityPieces(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), _NOTHING)


def keeper_rows(columns: SpanColumns) -> Rows:
    """Return, for each span, the row of the span of the rank that kept the event loop; its own row for other spans.

    One turn of a loop has a span on each rank of the process, on the lane "program" of the rank that kept it.
    """
    keeper = np.arange(len(columns))
    rows = np.flatnonzero(columns.is_kind("program"))
    lane = np.array([columns.texts[number] == "program" for number in columns.lane[rows].tolist()], bool)
    turns = zip(
        columns.start_ns[rows].tolist(), columns.end_ns[rows].tolist(), columns.name[rows].tolist(), strict=True
    )
    keys = list(turns)
    keeper_of_turn = {key: row for key, row, mine in zip(keys, rows.tolist(), lane.tolist(), strict=True) if mine}
    keeper[rows] = [keeper_of_turn.get(key, row) for key, row in zip(keys, rows.tolist(), strict=True)]
    return keeper


def _union(pieces: ActivityPieces) -> Merged:
    """Return the instants that pieces cover."""
    return union(pieces.start_ns, pieces.end_ns)


def disjoint_pieces(start_ns: Int64s, end_ns: Int64s, rows: Rows, doing: int) -> ActivityPieces:
    """Return pieces of spans, in order of start, each cut where a span before it ends; covered spans have none.

    Args:
        start_ns: Start of each span.
        end_ns: End of each span.
        rows: The spans.
        doing: Activity of all of them.
    """
    rows = rows[np.lexsort((end_ns[rows], start_ns[rows]))]
    start_ns, end_ns = start_ns[rows], end_ns[rows]
    start_ns[1:] = np.maximum(start_ns[1:], np.maximum.accumulate(end_ns)[:-1])
    return ActivityPieces(start_ns, end_ns, np.full(len(rows), doing), rows).take(start_ns < end_ns)


def _first_covering(begin: Rows, end: Rows, units: int) -> Rows:
    """Return, for each unit, the first of n ranges of units that contains it; n where none does.

    Two ranges whose length is a power of two cover each range; such a range is split into halves, level by level.
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


def _merge_equal_neighbours(pieces: ActivityPieces) -> ActivityPieces:
    """Join pieces that touch, with the same activity of the same span."""
    begins = np.append(True, pieces.start_ns[1:] != pieces.end_ns[:-1])[: len(pieces)]
    begins[run_starts(pieces.doing, pieces.row)] = True
    ends = np.append(begins[1:], True)[: len(pieces)]
    return ActivityPieces(pieces.start_ns[begins], pieces.end_ns[ends], pieces.doing[begins], pieces.row[begins])
