"""Tables for blocks of different sizes: the same transfers, with a place of its own for each block.

A table counts in slots of equal blocks. With `counts`, blocks differ, and a slot's length is that of the block whose
part it holds. IN and OUT are cut as the caller cuts them, so there it is known. Elsewhere (in SCRATCH, and where OUT is
used for blocks that do not stay there) the block is followed through the table once, and gets a place of its own in
SCRATCH. The outcome is a table like any other: it is proved like any other, knows no sizes, and serves all counts.

Cost: one pass over the table; SCRATCH has as many blocks as ever pass through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from ..errors import ScheduleError
from .hazards import cells_of
from .kinds import Collective, Counts, blocks_given, blocks_got, whole_rows
from .pattern import Ints
from .placement import Floats
from .rules import phase_bounds
from .schedule import COLUMNS, Buffer, Op, Schedule


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnevenSchedule(Schedule):
    """A schedule with blocks of different sizes.

    Blocks of a collective are numbered as `counts` lists them: by the rank that gives it (all-gather), that gets it
    (reduce-scatter), or by both (all-to-all: source * size + destination).
    """

    held: tuple[tuple[int, ...], ...]  # By rank: number of the block in each block of SCRATCH

    def __repr__(self) -> str:
        return f"<UnevenSchedule {self.collective} {self.algorithm} ranks={self.size} rows={len(self)}>"


@dataclass(frozen=True, slots=True)
class _Cells:
    """A table slot by slot: (cells,) each, in the order of its rows."""

    row: NDArray[np.intp]
    sbuf: NDArray[np.uint8]
    sslot: Ints
    dbuf: NDArray[np.uint8]
    dslot: Ints

    def select(self, mask: NDArray[np.bool_]) -> _Cells:
        """Return the cells of a mask."""
        return _Cells(self.row[mask], self.sbuf[mask], self.sslot[mask], self.dbuf[mask], self.dslot[mask])


def make_uneven(schedule: Schedule) -> UnevenSchedule:
    """Return the table of a schedule for blocks of different sizes, without a proof.

    Args:
        schedule: A proved all-gather, reduce-scatter or all-to-all.

    Raises:
        ScheduleError: If a row adds one block to another, so that their sizes cannot differ.
    """
    cells = _expand_cells(schedule)
    block = _follow_blocks(schedule, cells)
    read = block >= 0  # no row reads the other cells
    cells, block = cells.select(read), block[read]
    new_cells, held = _assign_scratch(schedule, cells, block)
    return _join_cells(schedule, new_cells, held)


def block_starts(schedule: UnevenSchedule, rank: int, counts: Counts, row: int) -> tuple[list[int], ...]:
    """Return the first element of every block of IN, OUT and SCRATCH of a rank, and the end of the last one twice.

    Args:
        schedule: Schedule to carry out.
        counts: Rows of every block.
        row: Elements in a row.
    """
    kind, size = Collective(schedule.collective), schedule.size
    buffers: tuple[Sequence[int], ...] = (
        blocks_given(kind, size, rank), blocks_got(kind, size, rank), schedule.held[rank]
    )  # fmt: skip
    starts = [list(accumulate((counts[block] * row for block in held), initial=0)) for held in buffers]
    return tuple([*buffer, buffer[-1]] for buffer in starts)


def row_lengths(schedule: UnevenSchedule, counts: Counts) -> Floats:
    """Return (rows,) the length of every row of a table, in slots of the average block.

    The average is that of the rank that has most: its `size` blocks are the bytes that a collective is priced by.
    """
    size, k = schedule.size, schedule.slots_per_block
    kind = Collective(schedule.collective)
    total_rows = whole_rows(kind, (sum(counts),), counts, size)
    block_rows = np.array([*counts, 0], np.float64)  # block -1 is none: where a rank has less SCRATCH than others
    lengths = np.empty(len(schedule))
    blocks_of = (*_natural_blocks(schedule.collective, size), _pad_lists(schedule.held))
    for buffer, blocks in zip(Buffer, blocks_of, strict=True):
        into = np.flatnonzero(schedule.dbuf == buffer)
        rank, first, count = schedule.dst[into], schedule.dslot[into], schedule.count[into]
        slot_ends = np.cumsum(np.repeat(block_rows[blocks], k, axis=1), axis=1)  # (size, slots)
        bounds = np.concatenate([np.zeros((size, 1)), slot_ends], axis=1)
        lengths[into] = bounds[rank, first + count] - bounds[rank, first]
    return lengths * (size / total_rows)


def _pad_lists(held: tuple[tuple[int, ...], ...]) -> Ints:
    """Return lists of different lengths as one table, filled up with -1."""
    longest = max(map(len, held))
    return np.array([[*each, *[-1] * (longest - len(each))] for each in held], np.int64).reshape(len(held), longest)


def _natural_blocks(collective: str, size: int) -> tuple[Ints, Ints]:
    """Return (size, blocks) numbers of the blocks of every rank: in IN at first, and in OUT at the end."""
    kind, ranks = Collective(collective), range(size)
    given, got = ([blocks_of(kind, size, rank) for rank in ranks] for blocks_of in (blocks_given, blocks_got))
    return np.array(given, np.int64), np.array(got, np.int64)


def _expand_cells(schedule: Schedule) -> _Cells:
    """Return each cell that a row of the schedule reads and writes, row after row."""
    sslot, row = cells_of(schedule.sslot, schedule.count)
    dslot, _ = cells_of(schedule.dslot, schedule.count)
    return _Cells(row, schedule.sbuf[row], sslot, schedule.dbuf[row], dslot)


def _follow_blocks(schedule: Schedule, cells: _Cells) -> Ints:
    """Return the number of the block that each cell moves a part of, -1 for none, row after row."""
    s, k = schedule, schedule.slots_per_block
    base = np.cumsum([0, *s.slots])
    # Block in each slot of each rank: the inputs at first, then what the phases write.
    content = np.full((s.size, base[-1]), -1, np.int64)
    content[:, : base[1]] = np.repeat(_natural_blocks(s.collective, s.size)[0], k, axis=1)
    content = content.reshape(-1)
    read = s.src[cells.row] * base[-1] + base[cells.sbuf] + cells.sslot
    write = s.dst[cells.row] * base[-1] + base[cells.dbuf] + cells.dslot
    adds = s.op[cells.row] == Op.ADD
    cell_block = np.empty(len(cells.row), np.int64)
    for start, stop in pairwise(np.searchsorted(cells.row, phase_bounds(s)).tolist()):
        part = slice(start, stop)
        cell_block[part] = content[read[part]]
        if (adds[part] & (content[write[part]] != cell_block[part])).any():
            raise ScheduleError(
                f"{s!r} reduces parts of different blocks into one: blocks cannot differ in size; "
                "pass equal counts or choose another algorithm"
            )
        content[write[part]] = cell_block[part]
    return cell_block


def _assign_scratch(schedule: Schedule, cells: _Cells, block: Ints) -> tuple[_Cells, tuple[tuple[int, ...], ...]]:
    """Give each block a place of its own in SCRATCH, except in IN and in its final place in OUT.

    Places are numbered in the order in which they are first written: blocks that travel together stay neighbours.
    """
    s, k = schedule, schedule.slots_per_block
    slots, blocks = max(s.slots), s.size * s.size

    def key(rank: NDArray[np.int32], buffer: NDArray[np.uint8], slot: Ints) -> Ints:
        """Return one number for each rank, buffer, place in it and block."""
        # Digits of a number in a mixed base: rank, buffer, place in the buffer, block.
        return ((rank.astype(np.int64) * 3 + buffer) * (slots // k) + slot // k) * blocks + block

    stays = _natural_blocks(s.collective, s.size)[1]

    def passing(rank: NDArray[np.int32], buffer: NDArray[np.uint8], slot: Ints) -> NDArray[np.bool_]:
        """Return the cells whose block is on this rank in between only: in SCRATCH, or in OUT but of another rank."""
        in_out = np.where(buffer == Buffer.OUT, slot // k, 0)
        passes: NDArray[np.bool_] = (buffer == Buffer.SCRATCH) | (
            (buffer == Buffer.OUT) & (stays[rank, in_out] != block)
        )
        return passes

    src, dst = s.src[cells.row], s.dst[cells.row]
    written, read = passing(dst, cells.dbuf, cells.dslot), passing(src, cells.sbuf, cells.sslot)
    write_key, read_key = key(dst, cells.dbuf, cells.dslot), key(src, cells.sbuf, cells.sslot)
    keys, first = np.unique(write_key[written], return_index=True)
    owner = dst[written][first]
    order = np.lexsort((first, owner))
    begins = np.searchsorted(owner[order], np.arange(s.size + 1))
    position = np.empty(len(keys), np.int64)
    position[order] = np.arange(len(keys)) - begins[owner[order]]
    scratch_blocks = (keys % blocks)[order]

    def new_slots(lookup: Ints, mask: NDArray[np.bool_], slot: Ints) -> Ints:
        """Return the slots of `mask` in their new places in SCRATCH, the others as they are."""
        target = slot.copy()
        target[mask] = position[np.searchsorted(keys, lookup[mask])] * k + slot[mask] % k
        return target

    scratch = np.uint8(Buffer.SCRATCH)
    new_cells = _Cells(
        cells.row,
        np.where(read, scratch, cells.sbuf),
        new_slots(read_key, read, cells.sslot),
        np.where(written, scratch, cells.dbuf),
        new_slots(write_key, written, cells.dslot),
    )
    return new_cells, tuple(tuple(scratch_blocks[start:stop].tolist()) for start, stop in pairwise(begins.tolist()))


def _join_cells(schedule: Schedule, cells: _Cells, held: tuple[tuple[int, ...], ...]) -> UnevenSchedule:
    """Join cells to rows again, where they are neighbours at both ends."""
    # Whether a cell goes on where the one before ends: same row and buffers, next slots.
    again = np.ones(max(len(cells.row) - 1, 0), np.bool_)
    for column, step in ((cells.row, 0), (cells.sbuf, 0), (cells.dbuf, 0), (cells.sslot, 1), (cells.dslot, 1)):
        again &= np.diff(column.astype(np.int64)) == step
    first = np.flatnonzero(np.append(True, ~again)) if len(cells.row) else np.zeros(0, np.intp)
    columns = {name: getattr(schedule, name)[cells.row[first]] for name in COLUMNS}
    columns |= {"sbuf": cells.sbuf[first], "dbuf": cells.dbuf[first]}
    columns |= {"sslot": cells.sslot[first].astype(np.int32), "dslot": cells.dslot[first].astype(np.int32)}
    columns["count"] = np.diff(np.append(first, len(cells.row))).astype(np.int32)
    return UnevenSchedule(
        collective=schedule.collective,
        algorithm=schedule.algorithm,
        size=schedule.size,
        slots_per_block=schedule.slots_per_block,
        blocks=(*schedule.blocks[:2], max(map(len, held))),
        held=held,
        **columns,
    )
