"""Dependencies between the steps of a rank: reads after writes, writes after reads, writes after writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .pattern import Ints
from .schedule import Buffer, Schedule


@dataclass(frozen=True, slots=True)
class Access:
    """Accesses to memory, either all reads or all writes, as columns with one entry for each access."""

    task: Ints  # Number of the step
    rank: Ints  # Rank that owns the memory
    buffer: NDArray[np.integer]  # Buffer of that rank
    slot: Ints  # First slot
    count: Ints  # Number of slots
    write: bool  # Whether all these accesses are writes; otherwise all are reads
    # Whether each write is a local copy onto its own source if buffers share memory. It changes nothing, so readers of
    # the source need not wait for it. None: no write is such a copy.
    copied: NDArray[np.bool_] | None = None


def cells_in_ranges(first: Ints, count: Ints) -> tuple[Ints, Ints]:
    """Return all cells of the ranges [first, first + count), and for each cell the index of its range.

    cells_in_ranges([4, 9], [2, 3]) returns [4, 5, 9, 10, 11] and [0, 0, 1, 1, 1].
    """
    if (count == 1).all():
        return first, np.arange(len(first))
    # Offset of a cell in its range: number of the cell among all, less the cells of the ranges before.
    owner = np.repeat(np.arange(len(first)), count)
    before = np.cumsum(count) - count
    return first[owner] + (np.arange(len(owner)) - before[owner]), owner


def cell_numbers(schedule: Schedule, rank: Ints, buffer: NDArray[np.integer], slot: Ints, *, shared: bool) -> Ints:
    """Return for each (rank, buffer, slot) a number: equal numbers mean the same memory.

    Args:
        schedule: The table.
        rank: (slots,) Rank that owns the slot.
        buffer: (slots,) Buffer of that rank.
        slot: (slots,) Slot of that buffer.
        shared: Whether buffers that an executor may overlay count as one memory: IN, OUT and SCRATCH block 0 where the
            collective works in place; OUT and SCRATCH block 0 where it reduces.
    """
    slots_in, slots_out, slots_scratch = schedule.slots
    bases = 0, slots_in, slots_in + slots_out
    if shared and schedule.in_place:
        bases = 0, 0, 0
    elif shared and schedule.reduces:
        bases = 0, slots_in, slots_in
    stride = slots_in + slots_out + slots_scratch
    memory: Ints = rank * np.int64(stride) + np.array(bases, np.int64)[buffer] + slot
    return memory


def find_waits(
    schedule: Schedule, row: Ints, queue: Ints, lanes: int, accesses: Sequence[Access]
) -> list[tuple[tuple[int, int], ...]]:
    """Return for each step the steps of other queues that it waits for.

    A lane is the number of a queue within its rank. A pair (lane, n) means: the first n steps of this lane of the
    step's own rank must have finished.

    Args:
        schedule: The table.
        row: (steps,) Table row of each step; steps are sorted by queue, then row.
        queue: (steps,) Number of the queue of each step, `rank * lanes + lane`.
        lanes: Queues of each rank.
        accesses: Everything that steps read and write.
    """
    lane = (queue % lanes).astype(np.int32)
    first = np.flatnonzero(np.diff(queue, prepend=-1))
    # Position of each step in its queue, from 1.
    nth = np.arange(len(queue)) - np.repeat(first, np.diff(np.append(first, len(queue)))) + 1
    cell, task, write, changes, of_input = _sort_accesses_by_cell(schedule, row, accesses)
    copies = bool((write & ~changes).any())
    # A number for each cell: cells are further apart than the largest position, as `_largest_earlier_values` requires.
    segment = np.cumsum(np.diff(cell, prepend=-1) != 0) * np.int64(len(row) + 2)
    waits: list[list[tuple[int, int]]] = [[] for _ in range(len(row))]
    for other_lane in np.unique(lane).tolist():
        done = np.where(lane[task] == other_lane, nth[task], 0)
        # A write waits for all earlier accesses of its cell in the other lane, a read for earlier writes.
        need = np.where(
            write, _largest_earlier_values(segment, done), _largest_earlier_values(segment, np.where(write, done, 0))
        )
        if copies:
            # A read of IN need not wait for a copy of the input onto itself.
            need = np.where(of_input, _largest_earlier_values(segment, np.where(changes, done, 0)), need)
        per_task = np.zeros(len(row), np.int64)
        np.maximum.at(per_task, task, np.where(lane[task] == other_lane, 0, need))
        # A queue works in order: a step waits only for more steps than the earlier steps of its queue wait for.
        fresh = per_task > _largest_earlier_values(queue * np.int64(len(row) + 2), per_task)
        for step, n in zip(np.flatnonzero(fresh).tolist(), per_task[fresh].tolist(), strict=True):
            waits[step].append((other_lane, n))
    return [tuple(w) for w in waits]


class _AccessHistory(NamedTuple):
    """Columns with one entry for each accessed cell, sorted by cell; accesses of one cell are in table order."""

    cell: Ints  # Number of the piece of memory
    task: Ints  # Number of the step
    write: NDArray[np.bool_]  # Whether the step writes it
    changes: NDArray[np.bool_]  # Whether it is a write that changes the cell even if buffers share memory
    input: NDArray[np.bool_]  # Whether it is a read of IN


def _sort_accesses_by_cell(schedule: Schedule, row: Ints, accesses: Sequence[Access]) -> _AccessHistory:
    """Return all accesses of cells, ordered by cell and then by row; `row` is the table row of each step."""
    columns: list[tuple[NDArray[np.generic], ...]] = []
    for access in accesses:
        first = cell_numbers(schedule, access.rank, access.buffer, access.slot, shared=True)
        cell, owner = cells_in_ranges(first, access.count)
        write = np.full(len(cell), access.write)
        changes = write if access.copied is None else ~access.copied[owner]
        columns.append((cell, access.task[owner], write, changes, ~write & (access.buffer[owner] == Buffer.IN)))
    timeline = _AccessHistory(*(np.concatenate(column) for column in zip(*columns, strict=True)))
    order = np.lexsort((row[timeline.task], timeline.cell))
    return _AccessHistory(*(column[order] for column in timeline))  # type: ignore[arg-type]


def _largest_earlier_values(segment: Ints, value: Ints) -> Ints:
    """Return for each entry the largest `value` among the earlier entries of its segment; 0 if there is none.

    Segments 10, 10, 10, 20 with values 3, 1, 5, 2 give 0, 3, 3, 0. Numbers of segments ascend, and two of them differ
    by more than the largest value. Values are 0 or more.
    """
    # A running maximum of segment + value forgets earlier segments: every sum of a later segment is larger.
    best = np.maximum.accumulate(segment + value)
    return np.maximum(np.concatenate([np.zeros(min(len(best), 1), np.int64), best[:-1]]) - segment, 0)
