"""Activity of ranks: whether a rank computed, ran its program, moved bytes or waited, at every instant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..columnar import Int64s, Mask, Rows, SpanColumns, run_starts
from ..spans import Timeline
from .intervals import Merged, union
from .steps import RankWindow

COMPUTE, PROGRAM, WIRE, WAITING, QUEUED, COPY, IDLE = range(7)


@dataclass(frozen=True, slots=True, eq=False)
class ActivityPieces:
    """Columns of n pieces of ranks' time, sorted by rank and start: `doing` is `COMPUTE` to `IDLE`; `row` of a span."""

    rank: Int64s
    start_ns: Int64s
    end_ns: Int64s
    doing: NDArray[np.int8]
    row: Rows  # -1 for `COPY` and `IDLE`

    def __len__(self) -> int:
        return len(self.rank)

    def take(self, which: Rows | Mask | slice) -> ActivityPieces:
        """Return some pieces: a mask keeps their order, row numbers give the order."""
        return ActivityPieces(
            self.rank[which], self.start_ns[which], self.end_ns[which], self.doing[which], self.row[which]
        )


class Activity:
    """Activity of every rank while some ranks are measured, in units of time: inside of one nothing begins or ends.

    A rank computes before its event loop is kept, and that before it moves bytes, and moves bytes before it waits; in
    time without any of these, an operation is queued, or else a device copies, or else the rank is idle.

    Args:
        timeline: The run.
        windows: What is measured, at least one; units begin and end at their edges, too.

    Attributes:
        windows: As given.
        columns: The spans that matter from the first to the last instant of the windows.
        doing: `COMPUTE` to `IDLE`, for each unit.
        is_hidden: Whether an operation is active while the rank computes, for each unit.
        moves: Whether bytes move, exposed or not, for each unit.
        length_ns: Length of each unit; 0 where one rank ends and the next begins.
    """

    def __init__(self, timeline: Timeline, windows: Sequence[RankWindow]) -> None:
        self.windows = windows
        cut = np.array([(one.rank, one.start_ns, one.end_ns) for one in windows], np.int64).T
        window = int(cut[1].min()), int(cut[2].max())
        near = timeline.columns.near(window)
        columns = timeline.columns if near.all() else timeline.columns.take(near)
        self.columns: SpanColumns = columns
        compute, program, comm, copy = (
            np.flatnonzero(columns.is_kind(kind)) for kind in ("compute", "program", "comm", "copy")
        )
        comm = comm[np.argsort(columns.called_ns[comm], kind="stable")]  # the oldest first
        owner, begins_ns, ends_ns = columns.rank, columns.start_ns, columns.end_ns
        ranks = np.unique(np.concatenate([owner, cut[0]]))
        # Edges of units by name: ranks, and instants at which something of them begins or ends.
        edges: dict[str, tuple[Int64s, Int64s]] = {
            "computes": (owner[compute], begins_ns[compute]), "computed": (owner[compute], ends_ns[compute]),
            "program": (owner[program], begins_ns[program]), "program end": (owner[program], ends_ns[program]),
            "copies": (owner[copy], begins_ns[copy]), "copied": (owner[copy], ends_ns[copy]),
            "called": (owner[comm], columns.called_ns[comm]), "started": (owner[comm], begins_ns[comm]),
            "moves": (owner[comm], columns.moved_ns[comm]), "moved": (owner[comm], ends_ns[comm]),
            "window": (cut[0], cut[1]), "window end": (cut[0], cut[2]),
            "first": (ranks, np.full(len(ranks), window[0])), "last": (ranks, np.full(len(ranks), window[1])),
        }  # fmt: skip
        rank = np.concatenate([each for each, _ in edges.values()])
        edge_ns = np.clip(np.concatenate([each for _, each in edges.values()]), *window)
        order = np.lexsort((edge_ns, rank))
        firsts = run_starts(rank[order], edge_ns[order])
        begun = np.empty(len(order), np.intp)  # unit that begins at each edge
        begun[order] = np.repeat(np.arange(len(firsts)), np.diff(np.append(firsts, len(order))))
        unit_at = dict(zip(edges, np.split(begun, np.cumsum([len(each) for each, _ in edges.values()])), strict=False))
        self._rank, self._edge_ns = rank[order[firsts]], edge_ns[order[firsts]]
        self.length_ns: Int64s = np.where(
            self._rank[1:] == self._rank[:-1], self._edge_ns[1:] - self._edge_ns[:-1], 0
        )  # fmt: skip
        self._cuts = unit_at["window"], unit_at["window end"]
        # By activity: the spans that may own a unit, the first one before others, and their units.
        self._owners: dict[int, tuple[Rows, Rows, Rows]] = {
            COMPUTE: (compute, unit_at["computes"], unit_at["computed"]),
            PROGRAM: (program, unit_at["program"], unit_at["program end"]),
            WIRE: (comm, unit_at["moves"], unit_at["moved"]), WAITING: (comm, unit_at["started"], unit_at["moves"]),
            QUEUED: (comm, unit_at["called"], unit_at["started"]),
        }  # fmt: skip
        covered = [self._covered_units(begin, stop) for _, begin, stop in self._owners.values()]
        covered.append(self._covered_units(unit_at["copies"], unit_at["copied"]))
        self.doing: NDArray[np.int8] = np.full(len(self.length_ns), IDLE, np.int8)
        for doing in range(COPY, -1, -1):
            self.doing[covered[doing]] = doing
        self.moves: Mask = covered[WIRE] & (self.doing != PROGRAM)
        self.is_hidden: Mask = (covered[WIRE] | covered[WAITING]) & (self.doing == COMPUTE)

    def _covered_units(self, begin: Rows, stop: Rows) -> Mask:
        """Return a mask over units: those that a range from unit `begin` up to `stop` has."""
        count = len(self.length_ns) + 1
        changes = np.bincount(begin, minlength=count) - np.bincount(stop, minlength=count)
        return np.cumsum(changes[:-1]) > 0

    def in_windows(self, chosen: Mask) -> Int64s:
        """Return how much time chosen units take, in nanoseconds, in each window."""
        before_ns = np.append(0, np.cumsum(np.where(chosen, self.length_ns, 0)))
        begin, stop = self._cuts
        found: Int64s = before_ns[stop] - before_ns[begin]
        return found

    def cover(self, window: RankWindow, chosen: Mask) -> Merged:
        """Return the instants of a rank's chosen units inside one of the windows."""
        first, stop = np.searchsorted(self._rank, [window.rank, window.rank + 1])
        first, stop = first + np.searchsorted(self._edge_ns[first:stop], [window.start_ns, window.end_ns])
        units = first + np.flatnonzero(chosen[first:stop])
        return union(self._edge_ns[units], self._edge_ns[units + 1])

    def pieces(self) -> ActivityPieces:
        """Return all that ranks did, without gaps: of several spans, a piece has the first compute or oldest operation.

        The row of a kept event loop is that of the rank that kept it.
        """
        row = np.full(len(self.doing), -1, np.intp)
        for doing, (rows, begin, stop) in self._owners.items():
            if doing in (COMPUTE, PROGRAM):
                order = np.lexsort((self.columns.end_ns[rows], self.columns.start_ns[rows]))
                rows, begin, stop = rows[order], begin[order], stop[order]
            real = begin < stop
            rows, units = rows[real], np.flatnonzero(self.doing == doing)
            row[units] = rows[_first_covering(begin[real], stop[real], len(row))[units]]
        keeps = self.doing == PROGRAM
        row[keeps] = _keeper_rows(self.columns)[row[keeps]]
        units = np.flatnonzero(self.length_ns)
        firsts = run_starts(self._rank[units], self.doing[units], row[units])
        lasts = np.append(firsts[1:], len(units))[: len(firsts)] - 1
        first, last = units[firsts], units[lasts]
        return ActivityPieces(
            self._rank[first], self._edge_ns[first], self._edge_ns[last + 1], self.doing[first], row[first]
        )


def _keeper_rows(columns: SpanColumns) -> Rows:
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
