"""Rows of a table prepared for the proof: one entry for each cell."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .memory import SlotLayout
from .pattern import Ints
from .rules import Flags
from .schedule import Op, Schedule

# Cells of local rows handled at once: their values stay in the second-level cache.
_PIECE_CELLS = 1 << 15

# Rows are regrouped if the longest has at most so many times as many cells as the average.
_MAX_SPREAD = 8


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of some phases, one entry a cell."""

    row: Ints  # Number of the row
    read: Ints  # Cell read, relative to the base of its buffer
    write: Ints  # Cell written
    sbuf: NDArray[np.uint8]  # Buffer read
    dbuf: NDArray[np.uint8]  # Buffer written
    add: Flags  # Whether the row reduces
    lower: Flags  # Whether its sender is the lower rank
    ends: list[int]  # Where phases begin, and the number of entries


def cut_local_phases(schedule: Schedule, bounds: Ints) -> tuple[Ints, Ints]:
    """Cut long phases of local rows between ranks, as local rows of different ranks are independent.

    Args:
        schedule: A schedule with at least one row.
        bounds: The rows at which phases begin, and the number of rows.

    Returns:
        Finer bounds, and the number of cells before each.
    """
    starts, cuts = bounds[:-1], [bounds]
    local = schedule.src[starts] == schedule.dst[starts]
    large = np.diff(_cells_before(schedule, bounds)) > _PIECE_CELLS
    for phase in np.flatnonzero(local & large).tolist():
        rows = slice(int(bounds[phase]), int(bounds[phase + 1]))
        rank = schedule.src[rows]
        # Cut only between ranks, where the rows so far fill another piece.
        if (rank[1:] >= rank[:-1]).all():
            piece = np.cumsum(schedule.count[rows], dtype=np.int64) // _PIECE_CELLS
            between = np.flatnonzero(rank[1:] != rank[:-1]) + 1
            fresh = np.diff(piece[between - 1], prepend=-1) > 0
            cuts.append(rows.start + between[fresh])
    finer = np.unique(np.concatenate(cuts))
    return finer, _cells_before(schedule, finer)


def _cells_before(schedule: Schedule, rows: Ints) -> Ints:
    """Return how many cells the table has before each of some rows. Most rows have one."""
    longer = np.flatnonzero(schedule.count != 1)
    # Each row has one cell, and longer rows the rest of their count.
    extra = np.append(0, np.cumsum(schedule.count[longer] - 1, dtype=np.int64))
    before: Ints = rows + extra[np.searchsorted(longer, rows)]
    return before


def expand_cells(schedule: Schedule, layout: SlotLayout, bounds: Ints) -> Batch:
    """Return the cells of some phases as columns; `bounds` has the first row of each, and the end of the last."""
    s, rows = schedule, slice(int(bounds[0]), int(bounds[-1]))
    src, dst, sbuf, dbuf, count = s.src[rows], s.dst[rows], s.sbuf[rows], s.dbuf[rows], s.count[rows]
    sslot, dslot, op, ends = s.sslot[rows], s.dslot[rows], s.op[rows], bounds - bounds[0]
    row = np.arange(rows.start, rows.stop, dtype=np.int32)
    if (count != 1).any():
        # Columns of rows become columns of cells: each row is repeated for its cells.
        owner, offset = _order_cells(count, regroup=len(ends) == 2 and bool(src[0] == dst[0]))
        ends = np.append(0, np.cumsum(count))[ends]
        src, dst, sslot, dslot, row = (column[owner] for column in (src, dst, sslot, dslot, row))
        sbuf, dbuf, op = (column[owner] for column in (sbuf, dbuf, op))
        sslot, dslot = sslot + offset, dslot + offset
    read, write = layout.locate(src, sslot), layout.locate(dst, dslot)
    return Batch(row, read, write, sbuf, dbuf, op == Op.ADD, src < dst, ends.tolist())


def _order_cells(count: NDArray[np.int32], *, regroup: bool) -> tuple[Ints, NDArray[np.int32]]:
    """Return for each cell its row, and its offset in the row.

    Cells are in the order of rows; where `regroup` allows it, in the order of offsets: many ranks that copy many slots
    touch nearby memory at one offset, and another page for every cell of one row.
    """
    longest = int(count.max())
    if regroup and longest * len(count) <= _MAX_SPREAD * int(count.sum(dtype=np.int64)):
        # A table (offset, row), read along its rows: first the first cell of every row, then the second.
        cell = np.flatnonzero(np.arange(longest, dtype=np.int32)[:, None] < count)
        offset = cell // len(count)
        return cell - offset * len(count), offset.astype(np.int32)
    owner = np.repeat(np.arange(len(count)), count)
    first = np.cumsum(count, dtype=np.int32) - count
    return owner, np.arange(len(owner), dtype=np.int32) - first[owner]
