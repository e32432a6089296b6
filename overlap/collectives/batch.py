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

# Cells are ordered by offset only if the longest row has at most this many times the cells of the average row.
_MAX_SPREAD = 8


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of consecutive phases, as columns with one entry for each cell that a row moves."""

    row: Ints  # Number of the row
    read: Ints  # Cell read, counted from the first cell of its buffer
    write: Ints  # Cell written, counted in the same way
    sbuf: NDArray[np.uint8]  # Buffer read
    dbuf: NDArray[np.uint8]  # Buffer written
    add: Flags  # Whether the row reduces
    lower: Flags  # Whether the row's sender has a lower rank than its receiver
    ends: list[int]  # First entry of each phase, then the number of entries: phase i is ends[i] to ends[i + 1] - 1


def cut_local_phases(schedule: Schedule, bounds: Ints) -> tuple[Ints, Ints]:
    """Cut long phases of local rows into shorter ones, between the rows of two ranks.

    Local rows of different ranks are independent, so the cut changes no result, and columns stay in the cache.

    Args:
        schedule: A schedule with at least one row.
        bounds: First row of each phase, then the number of rows.

    Returns:
        The bounds with the cuts added, and for each bound the number of cells that the rows before it move.
    """
    starts, cuts = bounds[:-1], [bounds]
    local = schedule.src[starts] == schedule.dst[starts]
    large = np.diff(_count_cells_before(schedule, bounds)) > _PIECE_CELLS
    for phase in np.flatnonzero(local & large).tolist():
        rows = slice(int(bounds[phase]), int(bounds[phase + 1]))
        rank = schedule.src[rows]
        # Between two ranks, cut where the rows since the last cut fill a piece.
        if (rank[1:] >= rank[:-1]).all():
            piece = np.cumsum(schedule.count[rows], dtype=np.int64) // _PIECE_CELLS
            between = np.flatnonzero(rank[1:] != rank[:-1]) + 1
            fresh = np.diff(piece[between - 1], prepend=-1) > 0
            cuts.append(rows.start + between[fresh])
    finer = np.unique(np.concatenate(cuts))
    return finer, _count_cells_before(schedule, finer)


def _count_cells_before(schedule: Schedule, rows: Ints) -> Ints:
    """Return for each of these rows how many cells all rows before it move."""
    longer = np.flatnonzero(schedule.count != 1)
    # Most rows move one cell: count the rows, and add the further cells of longer rows.
    extra = np.append(0, np.cumsum(schedule.count[longer] - 1, dtype=np.int64))
    before: Ints = rows + extra[np.searchsorted(longer, rows)]
    return before


def expand_cells(schedule: Schedule, layout: SlotLayout, bounds: Ints) -> Batch:
    """Return the rows of consecutive phases as columns, with one entry for each cell.

    Args:
        schedule: The table.
        layout: Positions of the table's slots in memory.
        bounds: First row of each phase, then the end of the last phase.
    """
    s, rows = schedule, slice(int(bounds[0]), int(bounds[-1]))
    src, dst, sbuf, dbuf, count = s.src[rows], s.dst[rows], s.sbuf[rows], s.dbuf[rows], s.count[rows]
    sslot, dslot, op, ends = s.sslot[rows], s.dslot[rows], s.op[rows], bounds - bounds[0]
    row = np.arange(rows.start, rows.stop, dtype=np.int32)
    if (count != 1).any():
        # Columns of rows become columns of cells: each row is repeated for its cells.
        # A single phase of local rows may be regrouped, as all its reads happen before its writes.
        owner, offset = _order_cells(count, regroup=len(ends) == 2 and bool(src[0] == dst[0]))
        # Phases end behind the cells of their last rows.
        ends = np.append(0, np.cumsum(count))[ends]
        src, dst, sslot, dslot, row = (column[owner] for column in (src, dst, sslot, dslot, row))
        sbuf, dbuf, op = (column[owner] for column in (sbuf, dbuf, op))
        sslot, dslot = sslot + offset, dslot + offset
    read, write = layout.find_cells(src, sslot), layout.find_cells(dst, dslot)
    return Batch(row, read, write, sbuf, dbuf, op == Op.ADD, src < dst, ends.tolist())


def _order_cells(count: NDArray[np.int32], *, regroup: bool) -> tuple[Ints, NDArray[np.int32]]:
    """Return two columns with one entry for each cell of some rows: the index of its row, and its offset in the row.

    For rows of 2 and 1 cells, row by row: (0, 0, 1) and (0, 1, 0). By offset: (0, 1, 0) and (0, 0, 1). At one offset
    many ranks touch nearby memory, while the cells of one row are in different pages.

    Args:
        count: (rows,) Cells of each row.
        regroup: Whether the order of cells is free; they are then ordered by offset if rows are of similar length.
    """
    longest = int(count.max())
    if regroup and longest * len(count) <= _MAX_SPREAD * int(count.sum(dtype=np.int64)):
        # The numbers offset * rows + row of all cells: first the first cells of all rows, then the second cells.
        cell = np.flatnonzero(np.arange(longest, dtype=np.int32)[:, None] < count)
        offset = cell // len(count)
        return cell - offset * len(count), offset.astype(np.int32)
    owner = np.repeat(np.arange(len(count)), count)
    first = np.cumsum(count, dtype=np.int32) - count
    return owner, np.arange(len(owner), dtype=np.int32) - first[owner]
