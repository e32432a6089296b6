"""Fusion of local copies into the reduction that follows: `copy x into s; add m to s` becomes `s := x + m`.

Generators write the plain form, which has one meaning per row. Programs use the fused form, which reads the caller's
input in place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .hazards import cell_numbers, cells_in_ranges
from .pattern import Ints
from .schedule import Buffer, Op, Schedule

Flags = NDArray[np.bool_]
_NONE = np.iinfo(np.int64).max


class Fused(NamedTuple):
    """Result of a fusion: one entry for each row of the table."""

    dropped: Flags  # Whether the row is a local copy that need not be made
    base_buffer: Ints  # Buffer of an ADD's first operand; -1: the operand is the ADD's own target
    base_slot: Ints  # First slot of that operand; meaningless where `base_buffer` is -1


class _Links(NamedTuple):
    """Columns with one entry for each cell that a local copy fills and whose next access is an ADD into it."""

    copy: Ints  # Row of the copy
    add: Ints  # Row of the ADD
    shift: Ints  # One number for the copy's source buffer and for source slot - target slot


def find_fusable_copies(schedule: Schedule, selected: Flags) -> Fused:
    """Find copies into SCRATCH that are not needed, as the next ADD can read the copy's source itself.

    Args:
        schedule: The table.
        selected: (size,) Whether to look at each rank; no copy of another rank is dropped.
    """
    rows = len(schedule)
    base_buffer, base_slot = np.full(rows, -1, np.int8), np.zeros(rows, np.int32)
    copies = (schedule.src == schedule.dst) & (schedule.op == Op.MOVE) & (schedule.dbuf == Buffer.SCRATCH)
    copies &= selected[schedule.src]
    if not copies.any():
        return Fused(copies, base_buffer, base_slot)
    links, blocked = _link_copies_to_adds(schedule, selected, copies)
    dropped, fusable = _choose_copies_to_drop(schedule, links, copies & ~blocked)
    chosen = fusable[links.add]
    add, copy = links.add[chosen], links.copy[chosen]
    base_buffer[add] = schedule.sbuf[copy]
    # All cells of the ADD have one shift, so any of its links gives the offset.
    base_slot[add] = schedule.dslot[add] + (schedule.sslot[copy] - schedule.dslot[copy])
    return Fused(dropped, base_buffer, base_slot)


def _link_copies_to_adds(schedule: Schedule, selected: Flags, copies: Flags) -> tuple[_Links, Flags]:
    """Return the cells that a local copy fills and an ADD touches next, and (rows,) which copies must be made.

    A copy must be made if a row other than the ADD reads it, or if its source changes before the ADD. `selected`
    (size,) says which ranks to look at, `copies` (rows,) which rows are local copies into SCRATCH.
    """
    cell, row, write = _list_scratch_accesses(schedule, selected)
    # Accesses are sorted by cell: `follows` says whether the next access is to the same cell.
    follows = np.append(cell[1:] == cell[:-1], False)
    is_copy = write & copies[row]
    next_row = np.append(row[1:], 0)
    next_writes = np.append(write[1:], False)
    add_next = follows & next_writes & (schedule.op[next_row] == Op.ADD)
    blocked = np.zeros(len(schedule), np.bool_)
    blocked[row[is_copy & follows & ~next_writes]] = True
    # A copied cell is linked if an ADD into it comes next.
    chosen = is_copy & add_next
    copy, add = row[chosen], next_row[chosen]
    source = _find_copied_cells(schedule, copy, cell[chosen])
    blocked[copy[_find_overwritten_sources(schedule, source, copy, add)]] = True
    # An ADD can read the sources of its copies if all have one buffer and one distance: make one number of both.
    stride = np.int64(1) << 33
    shift = schedule.sbuf[copy] * stride + (schedule.sslot[copy].astype(np.int64) - schedule.dslot[copy])
    return _Links(copy, add, shift), blocked


def _list_scratch_accesses(schedule: Schedule, selected: Flags) -> tuple[Ints, Ints, Flags]:
    """Return all accesses to SCRATCH as columns: cell, row, whether it writes. Sorted by cell, then in table order."""
    parts: list[tuple[Ints, Ints, Flags]] = []
    for rank, buffer, slot, reads_or_writes in (
        (schedule.src, schedule.sbuf, schedule.sslot, False),
        (schedule.dst, schedule.dbuf, schedule.dslot, True),
    ):
        rows = np.flatnonzero((buffer == Buffer.SCRATCH) & selected[rank])
        first = cell_numbers(schedule, rank[rows], buffer[rows], slot[rows], shared=False)
        cell, owner = cells_in_ranges(first, schedule.count[rows])
        parts.append((cell, rows[owner], np.full(len(cell), reads_or_writes)))
    # Reads by senders first, then writes at receivers: one column for each item.
    cell, row, write = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((row, cell))
    return cell[order], row[order], write[order]


def _find_copied_cells(schedule: Schedule, copy: Ints, cell: Ints) -> tuple[Ints, Ints]:
    """Return for each linked copy the cell that it reads and the one that it writes, where buffers share memory.

    `cell` has the cells in SCRATCH that the copies write, numbered for buffers that share no memory.
    """
    target = cell_numbers(schedule, schedule.dst[copy], schedule.dbuf[copy], schedule.dslot[copy], shared=False)
    offset = cell - target
    ends = (schedule.src, schedule.sbuf, schedule.sslot), (schedule.dst, schedule.dbuf, schedule.dslot)
    source, written = (cell_numbers(schedule, r[copy], b[copy], s[copy] + offset, shared=True) for r, b, s in ends)
    return source, written


def _find_overwritten_sources(schedule: Schedule, cells: tuple[Ints, Ints], copy: Ints, add: Ints) -> Flags:
    """Return (links,) whether the source of the copy changes before the ADD, or while the ADD writes another cell.

    `cells` are those of `_find_copied_cells`; `copy` and `add` are the rows of each link.
    """
    source, target = cells
    rows = np.flatnonzero(np.isin(schedule.dst, schedule.dst[copy]))
    first = cell_numbers(schedule, schedule.dst[rows], schedule.dbuf[rows], schedule.dslot[rows], shared=True)
    cell, owner = cells_in_ranges(first, schedule.count[rows])
    span = np.int64(len(schedule) + 1)
    # Key of a write: cell * span + row. Bisection finds the first write to a cell after a row.
    written = np.sort(cell * span + rows[owner])
    at = np.searchsorted(written, source * span + copy, side="right")
    following = np.append(written, _NONE)[at] - source * span
    changed: Flags = (following < add) | ((following == add) & (source != target))
    return changed


def _choose_copies_to_drop(schedule: Schedule, links: _Links, candidates: Flags) -> tuple[Flags, Flags]:
    """Return (rows,) which copies to drop, and (rows,) which ADDs read the sources of these copies.

    An ADD needs all its copies dropped, and a copy all its ADDs: candidates are removed until nothing changes.
    """
    rows = len(schedule)
    while True:
        # An ADD is fusable if each of its slots has a copy that may be dropped, and all copies have the same shift.
        alive = candidates[links.copy]
        linked = np.bincount(links.add[alive], minlength=rows)
        low, high = np.full(rows, _NONE), np.full(rows, -_NONE)
        np.minimum.at(low, links.add[alive], links.shift[alive])
        np.maximum.at(high, links.add[alive], links.shift[alive])
        fusable = (linked == schedule.count) & (low == high)
        doomed = links.copy[~fusable[links.add]]
        if not candidates[doomed].any():
            return candidates, fusable
        candidates = candidates.copy()
        candidates[doomed] = False
