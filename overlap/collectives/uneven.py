"""Tables for blocks of different sizes: the same transfers, with a place of its own for each block.

A table counts in slots of equal blocks. With `counts`, blocks differ in size, and the length of a slot follows from the
block that the slot holds a part of. The collective defines which block is where in IN, and in OUT at the end. A block
in transit through a rank (in SCRATCH, or in the place of another block in OUT) gets a place of its own in SCRATCH. The
new table is proved as all tables are. It contains no sizes, and serves all counts.

Cost: one pass over the table; SCRATCH has a block for each block that passes through the rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from ..errors import ScheduleError
from .hazards import cells_in_ranges
from .kinds import Collective, Counts, input_blocks, largest_row_count, result_blocks
from .pattern import Ints
from .placement import Floats
from .rules import phase_bounds
from .schedule import COLUMNS, Buffer, Op, Schedule
from .tablewriter import adjacent_runs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnevenSchedule(Schedule):
    """A schedule with blocks of different sizes.

    Blocks of a collective are numbered as `counts` lists them: by source rank (all-gather), by destination rank
    (reduce-scatter), or by both (all-to-all: source * size + destination).
    """

    held: tuple[tuple[int, ...], ...]  # `held[rank][i]`: number of the block that block i of SCRATCH holds on this rank

    def __repr__(self) -> str:
        return f"<UnevenSchedule {self.collective} {self.algorithm} ranks={self.size} rows={len(self)}>"


@dataclass(frozen=True, slots=True)
class _Cells:
    """The rows of a table cut into slots: columns with one entry for each slot that a row moves, in table order."""

    row: NDArray[np.intp]  # Row of the table
    sbuf: NDArray[np.uint8]  # Buffer read
    sslot: Ints  # Slot read
    dbuf: NDArray[np.uint8]  # Buffer written
    dslot: Ints  # Slot written

    def select(self, mask: NDArray[np.bool_]) -> _Cells:
        """Return the cells for which `mask` is true."""
        return _Cells(self.row[mask], self.sbuf[mask], self.sslot[mask], self.dbuf[mask], self.dslot[mask])


def make_uneven(schedule: Schedule) -> UnevenSchedule:
    """Return the table of a schedule for blocks of different sizes, without a proof.

    Args:
        schedule: A proved all-gather, reduce-scatter or all-to-all.

    Raises:
        ScheduleError: If a row adds one block to another, so that their sizes cannot differ.
    """
    sslot, row = cells_in_ranges(schedule.sslot, schedule.count)
    dslot, _ = cells_in_ranges(schedule.dslot, schedule.count)
    cells = _Cells(row, schedule.sbuf[row], sslot, schedule.dbuf[row], dslot)
    block = _find_moved_blocks(schedule, cells)
    read = block >= 0  # a cell with block -1 moves memory that was never written: leave it out
    cells, block = cells.select(read), block[read]
    new_cells, held = _assign_scratch(schedule, cells, block)
    return _make_uneven_table(schedule, new_cells, held)


def block_starts(schedule: UnevenSchedule, rank: int, counts: Counts, row: int) -> tuple[list[int], ...]:
    """Return for IN, OUT and SCRATCH of a rank the first element of each block, then the end of the last block twice.

    Blocks of 2 and 3 rows of 10 elements give [0, 20, 50, 50].

    Args:
        schedule: Schedule to carry out.
        rank: Group rank.
        counts: Rows of every block.
        row: Elements in a row.
    """
    kind, size = Collective(schedule.collective), schedule.size
    buffers: tuple[Sequence[int], ...] = (
        input_blocks(kind, size, rank), result_blocks(kind, size, rank), schedule.held[rank]
    )  # fmt: skip
    starts = [list(accumulate((counts[block] * row for block in held), initial=0)) for held in buffers]
    # The end twice: the end of an extent is computed as slot 0 of the following block, from that block's two bounds.
    return tuple([*buffer, buffer[-1]] for buffer in starts)


def row_lengths(schedule: UnevenSchedule, counts: Counts) -> Floats:
    """Return (rows,) the length of every row of a table, in units of a slot of the average block.

    The average is taken over the rank with the largest input or result: its length divided by `size`. A collective is
    priced by the bytes of that rank.

    Args:
        schedule: The table.
        counts: Rows of every block.
    """
    size, k = schedule.size, schedule.slots_per_block
    kind = Collective(schedule.collective)
    total_rows = largest_row_count(kind, (sum(counts),), counts, size)
    # Block -1, which fills up the lists of ranks with less SCRATCH than others, indexes the 0 at the end.
    block_rows = np.array([*counts, 0], np.float64)
    lengths = np.empty(len(schedule))
    blocks_of = (*_initial_and_final_blocks(schedule.collective, size), _pad_lists(schedule.held))
    for buffer, blocks in zip(Buffer, blocks_of, strict=True):
        into = np.flatnonzero(schedule.dbuf == buffer)
        rank, first, count = schedule.dst[into], schedule.dslot[into], schedule.count[into]
        slot_ends = np.cumsum(np.repeat(block_rows[blocks], k, axis=1), axis=1)  # (size, slots)
        bounds = np.concatenate([np.zeros((size, 1)), slot_ends], axis=1)
        lengths[into] = bounds[rank, first + count] - bounds[rank, first]
    return lengths * (size / total_rows)


def _pad_lists(held: tuple[tuple[int, ...], ...]) -> Ints:
    """Return (ranks, longest) the lists as one table, filled up with -1."""
    longest = max(map(len, held))
    return np.array([[*each, *[-1] * (longest - len(each))] for each in held], np.int64).reshape(len(held), longest)


def _initial_and_final_blocks(collective: str, size: int) -> tuple[Ints, Ints]:
    """Return two tables (ranks, blocks) of block numbers: the blocks that IN has at first, and OUT at the end."""
    kind, ranks = Collective(collective), range(size)
    given, got = ([blocks_of(kind, size, rank) for rank in ranks] for blocks_of in (input_blocks, result_blocks))
    return np.array(given, np.int64), np.array(got, np.int64)


def _find_moved_blocks(schedule: Schedule, cells: _Cells) -> Ints:
    """Return (cells,) the number of the block that each cell moves a part of; -1 if it moves unwritten memory.

    Raises `ScheduleError` if a row adds a part of one block to a part of another, so that their sizes cannot differ.
    """
    s, k = schedule, schedule.slots_per_block
    base, rank_slots = np.cumsum([0, *s.slots]), sum(s.slots)  # slots before each buffer, and of all three
    # Number of the block in each slot of each rank. It begins with the inputs; every phase then updates it.
    content: Ints = np.full((s.size, rank_slots), -1, np.int64)
    content[:, : s.slots[Buffer.IN]] = np.repeat(_initial_and_final_blocks(s.collective, s.size)[Buffer.IN], k, axis=1)
    content = content.reshape(-1)
    read = s.src[cells.row] * rank_slots + base[cells.sbuf] + cells.sslot
    write = s.dst[cells.row] * rank_slots + base[cells.dbuf] + cells.dslot
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
    """Give each block in transit through a rank a place in its SCRATCH; return the new cells and `UnevenSchedule.held`.

    Places are numbered in the order in which they are first written: blocks that travel together stay neighbours.
    `block` is the result of `_find_moved_blocks`.
    """
    dst, k = schedule.dst[cells.row], schedule.slots_per_block
    read_key = _make_transit_keys(schedule, schedule.src[cells.row], cells.sbuf, cells.sslot, block)
    write_key = _make_transit_keys(schedule, dst, cells.dbuf, cells.dslot, block)
    keys, first = np.unique(write_key, return_index=True)  # `first`: index of the first cell that writes this key
    keys, first = keys[keys >= 0], first[keys >= 0]
    owner = dst[first]  # rank of each key
    order = np.lexsort((first, owner))  # keys by rank, then by first write
    begins = np.searchsorted(owner[order], np.arange(schedule.size + 1))  # where each rank's keys begin in `order`
    position = np.empty(len(keys), np.int64)  # block of SCRATCH that each key gets, on its rank
    position[order] = np.arange(len(keys)) - begins[owner[order]]

    def move_to_scratch(key: Ints, buffer: NDArray[np.uint8], slot: Ints) -> tuple[NDArray[np.uint8], Ints]:
        """Return new buffers and slots: those in SCRATCH for cells with a key; unchanged ones for key -1."""
        moves, new_slot = key >= 0, slot.copy()
        new_slot[moves] = position[np.searchsorted(keys, key[moves])] * k + slot[moves] % k
        return np.where(moves, np.uint8(Buffer.SCRATCH), buffer), new_slot

    read, written = (
        move_to_scratch(read_key, cells.sbuf, cells.sslot),
        move_to_scratch(write_key, cells.dbuf, cells.dslot),
    )
    scratch_blocks = block[first[order]].tolist()
    held = tuple(tuple(scratch_blocks[start:stop]) for start, stop in pairwise(begins.tolist()))
    return _Cells(cells.row, *read, *written), held


def _make_transit_keys(
    schedule: Schedule, rank: NDArray[np.int32], buffer: NDArray[np.uint8], slot: Ints, block: Ints
) -> Ints:
    """Return (cells,) a number for each combination of rank, place and block in transit; -1 for other cells.

    A block is not in transit in IN, and in the place of OUT that the collective defines for it.
    """
    k, final_blocks = (
        schedule.slots_per_block,
        _initial_and_final_blocks(schedule.collective, schedule.size)[Buffer.OUT],
    )
    place, is_out = slot // k, buffer == Buffer.OUT
    is_final = is_out & (final_blocks[rank, np.where(is_out, place, 0)] == block)
    # Digits of a number in a mixed base: rank, buffer, place in the buffer, block.
    places, blocks = max(schedule.slots) // k, schedule.size**2
    key = ((rank.astype(np.int64) * len(Buffer) + buffer) * places + place) * blocks + block
    return np.where((buffer == Buffer.IN) | is_final, -1, key)


def _make_uneven_table(schedule: Schedule, cells: _Cells, held: tuple[tuple[int, ...], ...]) -> UnevenSchedule:
    """Return the table of these cells, where adjacent cells of one row of `schedule` become one new row."""
    first = adjacent_runs(cells.sslot, cells.dslot, same=(cells.row, cells.sbuf, cells.dbuf))
    # The columns of the old rows, except places and lengths.
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
