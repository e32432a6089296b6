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
    """Reads or writes of steps: columns, with one entry for each access."""

    task: Ints  # Number of the step
    rank: Ints  # Rank that owns the memory
    buffer: NDArray[np.integer]  # Buffer of that rank
    slot: Ints  # First slot
    count: Ints  # Slots
    write: bool  # Whether these are writes, else reads
    # Whether each write is a local copy onto its own source if buffers share memory. It changes nothing, so readers of
    # the source need not wait for it. None: no write is.
    copied: NDArray[np.bool_] | None = None


def cells_of(first: Ints, count: Ints) -> tuple[Ints, Ints]:
    """Return all cells of the ranges [first, first + count), and for each cell the index of its range."""
    if (count == 1).all():
        return first, np.arange(len(first))
    # Number the cells of all ranges from 0, and subtract the cells of the ranges before.
    owner = np.repeat(np.arange(len(first)), count)
    before = np.cumsum(count) - count
    return first[owner] + (np.arange(len(owner)) - before[owner]), owner


def cell_numbers(schedule: Schedule, rank: Ints, buffer: NDArray[np.integer], slot: Ints, *, shared: bool) -> Ints:
    """Return one number for each piece of memory.

    With `shared`, buffers that an executor may put in one memory are one: IN, OUT and SCRATCH block 0 where the
    collective works in place, OUT and SCRATCH block 0 wherever it reduces.
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
    """Return by step the lanes that it waits for, each with the number of that lane's first steps.

    Args:
        row: Table row of each step; steps are sorted by queue, then row.
        queue: Number of the queue of each step, `rank * lanes + lane`.
        lanes: Queues per rank.
        accesses: Everything that steps read and write.
    """
    lane = (queue % lanes).astype(np.int32)
    first = np.flatnonzero(np.diff(queue, prepend=-1))
    # The position of each step in its queue, from 1.
    nth = np.arange(len(queue)) - np.repeat(first, np.diff(np.append(first, len(queue)))) + 1
    cell, task, write, changes, of_input = _order_accesses(schedule, row, accesses)
    copies = bool((write & ~changes).any())
    segment = np.cumsum(np.diff(cell, prepend=-1) != 0) * np.int64(len(row) + 2)
    waits: list[list[tuple[int, int]]] = [[] for _ in range(len(row))]
    for other_lane in np.unique(lane).tolist():
        done = np.where(lane[task] == other_lane, nth[task], 0)
        # A write waits for all earlier accesses of its cell in the other lane, a read for earlier writes.
        need = np.where(write, _largest_before(segment, done), _largest_before(segment, np.where(write, done, 0)))
        if copies:
            need = np.where(of_input, _largest_before(segment, np.where(changes, done, 0)), need)
        per_task = np.zeros(len(row), np.int64)
        np.maximum.at(per_task, task, np.where(lane[task] == other_lane, 0, need))
        # A queue works in order: a step need not wait again for what an earlier one has waited for.
        fresh = per_task > _largest_before(queue * np.int64(len(row) + 2), per_task)
        for step, n in zip(np.flatnonzero(fresh).tolist(), per_task[fresh].tolist(), strict=True):
            waits[step].append((other_lane, n))
    return [tuple(w) for w in waits]


class _AccessHistory(NamedTuple):
    """All accesses cell by cell, accesses of a cell in table order."""

    cell: Ints  # Number of the piece of memory
    task: Ints  # Number of the step
    write: NDArray[np.bool_]  # Whether the step writes it
    changes: NDArray[np.bool_]  # Whether the write changes it even if all buffers share memory
    input: NDArray[np.bool_]  # Whether the step reads the input


def _order_accesses(schedule: Schedule, row: Ints, accesses: Sequence[Access]) -> _AccessHistory:
    """Return all accesses of cells, ordered by cell and then by row."""
    columns: list[tuple[NDArray[np.generic], ...]] = []
    for access in accesses:
        first = cell_numbers(schedule, access.rank, access.buffer, access.slot, shared=True)
        cell, owner = cells_of(first, access.count)
        write = np.full(len(cell), access.write)
        changes = write if access.copied is None else ~access.copied[owner]
        columns.append((cell, access.task[owner], write, changes, ~write & (access.buffer[owner] == Buffer.IN)))
    timeline = _AccessHistory(*(np.concatenate(column) for column in zip(*columns, strict=True)))
    order = np.lexsort((row[timeline.task], timeline.cell))
    return _AccessHistory(*(column[order] for column in timeline))  # type: ignore[arg-type]


def _largest_before(segment: Ints, value: Ints) -> Ints:
    """Return by access the largest earlier `value` of its segment, else 0; segments are further apart than values."""
    # A running maximum: the numbers of a segment are larger than all of the segments before it.
    best = np.maximum.accumulate(segment + value)
    return np.maximum(np.concatenate([np.zeros(min(len(best), 1), np.int64), best[:-1]]) - segment, 0)
