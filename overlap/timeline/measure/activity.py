"""Activity of ranks: what each rank did at every instant: computing, moving bytes, waiting and so on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from ..columnar import Int64s, Mask, Rows, SpanColumns, run_lengths, run_starts
from ..spans import Timeline
from .intervals import Merged, union
from .steps import RankWindow

COMPUTE, PROGRAM, WIRE, WAITING, QUEUED, COPY, IDLE = range(7)
"""Activities, by precedence. `PROGRAM`: a program keeps the event loop busy."""


@dataclass(frozen=True, slots=True, eq=False)
class ActivityPieces:
    """Columns of n pieces of ranks' time, sorted by rank and start."""

    rank: Int64s
    start_ns: Int64s
    end_ns: Int64s
    doing: NDArray[np.int8]  # `COMPUTE` to `IDLE`
    row: Rows  # row of the span in `Activity.columns`; -1 for `COPY` and `IDLE`

    def __len__(self) -> int:
        return len(self.rank)

    def take(self, which: Rows | Mask | slice) -> ActivityPieces:
        """Return some pieces: a mask keeps their order, row numbers give the order."""
        return ActivityPieces(
            self.rank[which], self.start_ns[which], self.end_ns[which], self.doing[which], self.row[which]
        )


class Activity:
    """Activity of every rank, in units of time. A unit is an interval of a rank within which no span begins or ends.

    Of several activities at once the first of this list counts: the rank computes, its event loop is kept busy, bytes
    move, an operation waits, an operation is queued, a device copies. Otherwise the rank is idle.

    Args:
        timeline: The run.
        windows: The measured windows, at least one. Units begin and end at the edges of windows, too.

    Attributes:
        windows: The measured windows.
        columns: The spans that are needed from the first to the last instant of the windows.
        doing: By unit, `COMPUTE` to `IDLE`.
        is_hidden: By unit, whether the rank computes while an operation is active.
        moves: By unit, whether bytes move, exposed or hidden.
        length_ns: By unit, its length; 0 between the last unit of a rank and the first of the next.
    """

    def __init__(self, timeline: Timeline, windows: Sequence[RankWindow]) -> None:
        self.windows = windows
        fields = [(window.rank, window.start_ns, window.end_ns) for window in windows]
        window_rank, window_begin_ns, window_end_ns = np.array(fields, np.int64).T
        first_ns, last_ns = int(window_begin_ns.min()), int(window_end_ns.max())
        near = timeline.columns.spans_near((first_ns, last_ns))
        columns = timeline.columns if near.all() else timeline.columns.take(near)
        self.columns: SpanColumns = columns
        compute, program, comm, copy = (
            np.flatnonzero(columns.is_kind(kind)) for kind in ("compute", "program", "comm", "copy")
        )
        comm = comm[np.argsort(columns.called_ns[comm], kind="stable")]  # the oldest first
        owner, begins_ns, ends_ns = columns.rank, columns.start_ns, columns.end_ns
        ranks = np.unique(np.concatenate([owner, window_rank]))
        # Edges of units by name, each as (ranks, instants): a unit ends where any of these begins or ends.
        edges: dict[str, tuple[Int64s, Int64s]] = {
            "computes": (owner[compute], begins_ns[compute]), "computed": (owner[compute], ends_ns[compute]),
            "program": (owner[program], begins_ns[program]), "program end": (owner[program], ends_ns[program]),
            "copies": (owner[copy], begins_ns[copy]), "copied": (owner[copy], ends_ns[copy]),
            "called": (owner[comm], columns.called_ns[comm]), "started": (owner[comm], begins_ns[comm]),
            "moves": (owner[comm], columns.moved_ns[comm]), "moved": (owner[comm], ends_ns[comm]),
            "window": (window_rank, window_begin_ns), "window end": (window_rank, window_end_ns),
            "first": (ranks, np.full(len(ranks), first_ns)), "last": (ranks, np.full(len(ranks), last_ns)),
        }  # fmt: skip
        rank, edge_ns = map(np.concatenate, zip(*edges.values(), strict=True))
        edge_ns = np.clip(edge_ns, first_ns, last_ns)
        order = np.lexsort((edge_ns, rank))
        firsts = run_starts(rank[order], edge_ns[order])
        begun = np.empty(len(order), np.intp)  # for each edge, the index of the unit that begins there
        begun[order] = np.repeat(np.arange(len(firsts)), run_lengths(firsts, len(order)))
        unit_at = dict(zip(edges, np.split(begun, np.cumsum([len(ns) for _, ns in edges.values()])), strict=False))
        self._rank, self._edge_ns = rank[order[firsts]], edge_ns[order[firsts]]
        self.length_ns: Int64s = np.where(np.diff(self._rank) == 0, np.diff(self._edge_ns), 0)
        self._cuts = unit_at["window"], unit_at["window end"]
        # By activity: its spans, those with precedence first, and for each its first unit and the unit after its last.
        self._owners: dict[int, tuple[Rows, Rows, Rows]] = {
            COMPUTE: (compute, unit_at["computes"], unit_at["computed"]),
            PROGRAM: (program, unit_at["program"], unit_at["program end"]),
            WIRE: (comm, unit_at["moves"], unit_at["moved"]), WAITING: (comm, unit_at["started"], unit_at["moves"]),
            QUEUED: (comm, unit_at["called"], unit_at["started"]),
        }  # fmt: skip
        covered = [self._covered_units(begin, stop) for _, begin, stop in self._owners.values()]
        covered.append(self._covered_units(unit_at["copies"], unit_at["copied"]))
        self.doing: NDArray[np.int8] = np.full(len(self.length_ns), IDLE, np.int8)
        # Activities with precedence have lower numbers, and are written last.
        for doing in range(COPY, -1, -1):
            self.doing[covered[doing]] = doing
        self.moves: Mask = covered[WIRE] & (self.doing != PROGRAM)
        self.is_hidden: Mask = (covered[WIRE] | covered[WAITING]) & (self.doing == COMPUTE)

    def _covered_units(self, begin: Rows, stop: Rows) -> Mask:
        """Return a mask of the units that are in any of the ranges from `begin[i]` up to, not including, `stop[i]`."""
        # +1 where a range begins, -1 where it ends: the running sum is the number of ranges over each unit.
        count = len(self.length_ns) + 1
        changes = np.bincount(begin, minlength=count) - np.bincount(stop, minlength=count)
        return np.cumsum(changes[:-1]) > 0

    def chosen_ns_by_window(self, chosen: Mask) -> Int64s:
        """Return, for each window, the nanoseconds of the chosen units inside it; `chosen` is a mask over units."""
        # Chosen time before each unit: the time in a window is the difference between its end and its start.
        before_ns = np.append(0, np.cumsum(np.where(chosen, self.length_ns, 0)))
        begin, stop = self._cuts
        found: Int64s = before_ns[stop] - before_ns[begin]
        return found

    def instants_in(self, window: RankWindow, chosen: Mask) -> Merged:
        """Return the chosen units inside one of the windows, as merged intervals; `chosen` is a mask over units."""
        first, stop = np.searchsorted(self._rank, [window.rank, window.rank + 1])
        first, stop = first + np.searchsorted(self._edge_ns[first:stop], [window.start_ns, window.end_ns])
        units = first + np.flatnonzero(chosen[first:stop])
        return union(self._edge_ns[units], self._edge_ns[units + 1])

    def pieces(self) -> ActivityPieces:
        """Return what ranks did, without gaps: neighbouring units with one activity and one span are one piece.

        Of several computes the one that began first counts, of several operations the oldest. A piece of `PROGRAM` has
        the span of the rank that kept the event loop busy.
        """
        row = np.full(len(self.doing), -1, np.intp)
        for doing, (rows, begin, stop) in self._owners.items():
            if doing in (COMPUTE, PROGRAM):
                order = np.lexsort((self.columns.end_ns[rows], self.columns.start_ns[rows]))
                rows, begin, stop = rows[order], begin[order], stop[order]
            real = begin < stop
            rows, units = rows[real], np.flatnonzero(self.doing == doing)
            row[units] = rows[_first_range_covering(begin[real], stop[real], len(row))[units]]
        keeps = self.doing == PROGRAM
        row[keeps] = _loop_keeper_rows(self.columns)[row[keeps]]
        units = np.flatnonzero(self.length_ns)
        firsts = run_starts(self._rank[units], self.doing[units], row[units])
        lasts = np.append(firsts[1:], len(units))[: len(firsts)] - 1
        first, last = units[firsts], units[lasts]
        return ActivityPieces(
            self._rank[first], self._edge_ns[first], self._edge_ns[last + 1], self.doing[first], row[first]
        )


def _loop_keeper_rows(columns: SpanColumns) -> Rows:
    """Return, for each span, the row of the span of the rank that kept the event loop busy; for other spans their row.

    When a rank keeps a loop busy, each rank of the process gets a span with the same instants and name. Only that of
    the rank itself is on the lane "program".
    """
    keeper = np.arange(len(columns))
    rows = np.flatnonzero(columns.is_kind("program"))
    is_keeper = [columns.texts[number] == "program" for number in columns.lane[rows].tolist()]
    fields = (columns.start_ns[rows], columns.end_ns[rows], columns.name[rows])
    turns = list(zip(*(field.tolist() for field in fields), strict=True))
    keeper_of_turn = dict(zip(compress(turns, is_keeper), compress(rows.tolist(), is_keeper), strict=True))
    keeper[rows] = [keeper_of_turn.get(turn, row) for turn, row in zip(turns, rows.tolist(), strict=True)]
    return keeper


def _first_range_covering(begin: Rows, end: Rows, units: int) -> Rows:
    """Return, for each unit, the index of the first of n ranges that contains it, or n if none does.

    Ranges 2-5 and 0-3 (ends not included) over 6 units give [1, 1, 0, 0, 0, 2]. Each range is covered by two ranges
    whose length is a power of two, which are split into halves, level by level. Cost: the number of units times the
    logarithm of the longest range.
    """
    power = np.frexp(end - begin)[1] - 1
    first = np.full(units, len(begin), np.intp)
    for exponent in range(int(power.max(initial=-1)), -1, -1):
        length = 1 << exponent
        # A range of 2 * length at unit u becomes two ranges of `length`, at u and at u + length.
        halves = first.copy()
        np.minimum(halves[length:], first[: units - length], out=halves[length:])
        (which,) = np.nonzero(power == exponent)
        np.minimum.at(halves, begin[which], which)
        np.minimum.at(halves, end[which] - length, which)
        first = halves
    return first
