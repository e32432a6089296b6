"""Slicing and pipelining: data cut in pieces, so that later steps work on the first piece already.

A program sends chunks that it has received and reduced. With whole chunks, a wire would idle from the end of a message
until the receiver has added and forwarded it; with slices, the wire carries the next slice in that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import ScheduleError
from .hazards import cells_of
from .pattern import Ints
from .proof import verify
from .schedule import COLUMNS, Schedule
from .tablewriter import TableWriter, adjacent_runs

Columns: TypeAlias = dict[str, NDArray[np.integer]]


def pipeline_phases(schedule: Schedule, phases: Sequence[int], slices: int) -> Schedule:
    """Return the schedule on data cut in slices: while a slice is in one phase, the next one is in the phase before.

    Every phase gets channels of its own, so that phases over different links run side by side.

    Args:
        phases: The first step of each phase, ascending from 0.
        slices: Number of slices, at least 1.
    """
    if slices == 1:
        return schedule
    starts = np.asarray(phases, np.int32)
    longest = int(np.diff(np.append(starts, schedule.steps)).max())
    k = schedule.slots_per_block
    cells = split_into_slots(schedule)
    phase = np.searchsorted(starts, cells["step"], side="right") - 1
    blocks = []
    for number in range(slices):
        rows = dict(cells)
        # Slice `number` enters a phase one phase later than the slice before; every phase gets the longest time.
        rows["step"] = (phase + number) * longest + cells["step"] - starts[phase]
        rows["channel"] = phase * schedule.channels + cells["channel"]
        for name in ("sslot", "dslot"):
            # A block of k slots becomes `slices` blocks of k slots.
            rows[name] = (cells[name] // k * slices + number) * k + cells[name] % k
        grouped = cells["group"] >= 0
        rows["group"] = np.where(grouped, cells["group"] * slices + number, -1)
        blocks.append(join_rows(rows))
    return replace_rows(schedule, blocks, slots_per_block=k * slices)


def replace_rows(schedule: Schedule, blocks: Sequence[Columns], *, slots_per_block: int) -> Schedule:
    """Return a schedule with the same header and other rows."""
    table = TableWriter()
    for block in blocks:
        table.extend(block)
    return table.build(
        schedule.collective,
        schedule.algorithm,
        schedule.size,
        slots_per_block=slots_per_block,
        scratch=schedule.blocks[2],
        root=schedule.root,
        pairs=schedule.pairs,
    )


def split_into_slots(schedule: Schedule) -> Columns:
    """Return the rows of a schedule cut into rows of one slot each."""
    columns: Columns = {name: getattr(schedule, name) for name in COLUMNS}
    if (schedule.count == 1).all():
        return columns
    sslot, row = cells_of(schedule.sslot, schedule.count)
    dslot, _ = cells_of(schedule.dslot, schedule.count)
    single = {name: column[row] for name, column in columns.items()}
    return {**single, "sslot": sslot, "dslot": dslot, "count": np.ones(len(row), np.int32)}


def join_rows(rows: Columns) -> Columns:
    """Join rows of one slot each to longer rows, where they are neighbours at both ends."""
    fixed: tuple[Ints, ...] = tuple(
        np.asarray(rows[name], np.int64) for name in ("src", "dst", "step", "op", "sbuf", "dbuf", "channel", "group")
    )
    first = adjacent_runs(rows["sslot"], rows["dslot"], same=fixed)
    count = np.diff(np.append(first, len(rows["step"])))
    return {**{name: column[first] for name, column in rows.items()}, "count": count}


#: Least length of a slice: a shorter one is not worth its frames and its task. 2 ms of a link of 1 Gbit/s.
SLICE_BYTES = 256 << 10
#: While one slice is added and requested, the next is on the wire. Over that link 4 MiB take 38 ms in 4 or 8 slices
#: (41 to 43 in 2, 46 in one piece), and eight times 4 MiB at once 291 ms in 4, 301 in 8, which cost more CPU time.
MOST_SLICES = 4
#: Greatest length of a slice: a longer one is added from memory, not from a cache, and must be requested.
LONGEST_BYTES = 2 << 20


def message_bytes(schedule: Schedule, nbytes: int) -> float:
    """Return the length of the longest message between ranks.

    Args:
        nbytes: Bytes of the whole vector: the larger one of a rank's input and output.
    """
    remote = schedule.count[schedule.src != schedule.dst]
    slots = max(schedule.blocks[:2]) * schedule.slots_per_block
    return float(remote.max() * nbytes / slots) if len(remote) else 0.0


def slice_count(schedule: Schedule, nbytes: int) -> int:
    """Return the number of slices of a message: 1 if nothing follows from messages, or they are short."""
    if schedule.steps < 2 and not schedule.reduces:
        return 1
    length = message_bytes(schedule, nbytes)
    return max(1, min(MOST_SLICES, int(length / SLICE_BYTES)), int(length / LONGEST_BYTES))


def in_slices(schedule: Schedule, nbytes: int) -> Schedule:
    """Return the schedule with long messages cut into slices; the result is proved again.

    Args:
        nbytes: Bytes of the whole vector, see `message_bytes`.
    """
    result = slice_rows(schedule, slice_count(schedule, nbytes))
    if result is schedule:
        return schedule
    try:
        verify(result)
    except ScheduleError:  # rows of different lengths touch the same slots: a slice of one is not a slice of the other
        single = replace_rows(schedule, [split_into_slots(schedule)], slots_per_block=schedule.slots_per_block)
        result = slice_rows(single, slice_count(single, nbytes))
        verify(result)
    return result


def slice_rows(schedule: Schedule, slices: int) -> Schedule:
    """Return the schedule with every row cut in slices: a step's slices come before the next step's.

    Messages of a lane keep their order, so its first slice is received, reduced and passed on while the others follow.
    If rows of different lengths touch the same slots, the result may be wrong: prove it.
    Cost: the same bytes, `slices` times as many messages and steps.
    """
    if slices == 1:
        return schedule
    blocks = [_rows_of_slice(schedule, number, slices) for number in range(slices)]
    return replace_rows(schedule, blocks, slots_per_block=schedule.slots_per_block * slices)


def _rows_of_slice(schedule: Schedule, number: int, slices: int) -> Columns:
    """Return the rows of slice `number` of `slices`, with its own steps, slots and groups."""
    rows: Columns = {name: getattr(schedule, name) for name in COLUMNS}
    local = rows["src"] == rows["dst"]  # a local row works on each slice as soon as it arrives
    rows["step"] = np.maximum(0, rows["step"] * slices + number - np.where(local, slices - 1, 0))
    for name in ("sslot", "dslot"):  # `count` new slots of the `count * slices` that the row had become
        rows[name] = rows[name] * slices + number * rows["count"]
    rows["group"] = np.where(rows["group"] >= 0, rows["group"] * slices + number, -1)
    return rows
