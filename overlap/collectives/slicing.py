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
from .hazards import cells_in_ranges
from .pattern import Ints
from .proof import verify
from .schedule import COLUMNS, Buffer, Schedule
from .tablewriter import TableWriter, adjacent_runs

Columns: TypeAlias = dict[str, NDArray[np.integer]]


def pipeline_phases(schedule: Schedule, phases: Sequence[int], slices: int) -> Schedule:
    """Return the schedule on data cut in slices, which pass through the phases one behind the other.

    With 2 phases and 3 slices, the time is divided into 4 intervals: in the second one, slice 0 is in phase 1 and
    slice 1 in phase 0. Every phase gets channels of its own, so that phases over different links run in parallel.

    Args:
        schedule: The table.
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
        # Slice `number` is in phase p during interval p + number. All intervals are as long as the longest phase.
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
    """Return a schedule with other rows, but the collective, algorithm, size, root and blocks of `schedule`.

    Args:
        schedule: The schedule to take these values from.
        blocks: The new rows, in several parts; each part has the columns of a table by name.
        slots_per_block: Slots of a block in the new rows.
    """
    table = TableWriter()
    for block in blocks:
        table.extend(block)
    return table.build(
        schedule.collective,
        schedule.algorithm,
        schedule.size,
        slots_per_block=slots_per_block,
        scratch=schedule.blocks[Buffer.SCRATCH],
        root=schedule.root,
        pairs=schedule.pairs,
    )


def split_into_slots(schedule: Schedule) -> Columns:
    """Return the columns of a schedule's rows, cut into rows of one slot each."""
    columns: Columns = {name: getattr(schedule, name) for name in COLUMNS}
    if (schedule.count == 1).all():
        return columns
    sslot, row = cells_in_ranges(schedule.sslot, schedule.count)
    dslot, _ = cells_in_ranges(schedule.dslot, schedule.count)
    single = {name: column[row] for name, column in columns.items()}
    return {**single, "sslot": sslot, "dslot": dslot, "count": np.ones(len(row), np.int32)}


def join_rows(rows: Columns) -> Columns:
    """Join consecutive rows of one slot each to longer rows, where both their source and target slots are adjacent."""
    fixed: tuple[Ints, ...] = tuple(
        np.asarray(rows[name], np.int64) for name in ("src", "dst", "step", "op", "sbuf", "dbuf", "channel", "group")
    )
    first = adjacent_runs(rows["sslot"], rows["dslot"], same=fixed)
    count = np.diff(np.append(first, len(rows["step"])))
    return {**{name: column[first] for name, column in rows.items()}, "count": count}


#: Least length of a slice: a shorter slice costs more in frames and tasks than it gains. 2 ms of a link of 1 Gbit/s.
SLICE_BYTES = 256 << 10
#: While one slice is added and requested, the next is on the wire. Over that link 4 MiB take 38 ms in 4 or 8 slices
#: (41 to 43 in 2, 46 in one piece); eight times 4 MiB at once take 291 ms in 4 slices, and 301 ms in 8.
MOST_SLICES = 4
#: Greatest length of a slice: a longer slice is added from memory, not from a cache, and must be requested.
LONGEST_BYTES = 2 << 20


def longest_message_bytes(schedule: Schedule, nbytes: int) -> float:
    """Return the length of the longest message between ranks, in bytes.

    Args:
        schedule: The table.
        nbytes: Bytes of the whole vector: the larger one of a rank's input and output.
    """
    remote = schedule.count[schedule.src != schedule.dst]
    input_blocks, output_blocks, _ = schedule.blocks
    slots = max(input_blocks, output_blocks) * schedule.slots_per_block
    return float(remote.max() * nbytes / slots) if len(remote) else 0.0


def slice_count(schedule: Schedule, nbytes: int) -> int:
    """Return into how many slices to cut each message: 1 if messages are short, or if received data is not used again.

    Args:
        schedule: The table.
        nbytes: Bytes of the whole vector, see `longest_message_bytes`.
    """
    # Data of the only step of a schedule that does not reduce is neither passed on nor added.
    if schedule.steps < 2 and not schedule.reduces:
        return 1
    length = longest_message_bytes(schedule, nbytes)
    # At most `MOST_SLICES`, unless slices would be longer than `LONGEST_BYTES`.
    return max(1, min(MOST_SLICES, int(length / SLICE_BYTES)), int(length / LONGEST_BYTES))


def slice_long_messages(schedule: Schedule, nbytes: int) -> Schedule:
    """Return the schedule with long messages cut into slices, and prove it again; `schedule` if `slice_count` is 1.

    If rows of different lengths touch the same slots, their slices do not fit together: each row is then first split
    into rows of one slot.

    Args:
        schedule: The table.
        nbytes: Bytes of the whole vector, see `longest_message_bytes`.
    """
    result = slice_rows(schedule, slice_count(schedule, nbytes))
    if result is schedule:
        return schedule
    try:
        verify(result)
    except ScheduleError:  # rows of different lengths touch the same slots
        single = replace_rows(schedule, [split_into_slots(schedule)], slots_per_block=schedule.slots_per_block)
        result = slice_rows(single, slice_count(single, nbytes))
        verify(result)
    return result


def slice_rows(schedule: Schedule, slices: int) -> Schedule:
    """Return the schedule with every row cut in slices: all slices of a step come before those of the next step.

    Messages of a lane keep their order, so the first slice is received, reduced and passed on while the others follow.
    If rows of different lengths touch the same slots, the result may be wrong: callers must prove it.

    Cost: the same bytes, `slices` times as many messages and steps.
    """
    if slices == 1:
        return schedule
    blocks = [_rows_of_slice(schedule, number, slices) for number in range(slices)]
    return replace_rows(schedule, blocks, slots_per_block=schedule.slots_per_block * slices)


def _rows_of_slice(schedule: Schedule, number: int, slices: int) -> Columns:
    """Return the rows of slice `number` of `slices`, with its own steps, slots and groups; see `slice_rows`."""
    rows: Columns = {name: getattr(schedule, name) for name in COLUMNS}
    local = rows["src"] == rows["dst"]
    # A remote row of step s sends slice `number` in step s * slices + number. A local row of step s uses data that
    # arrived in step s - 1: it works on each slice one step after its arrival.
    rows["step"] = np.maximum(0, rows["step"] * slices + number - np.where(local, slices - 1, 0))
    # A row of `count` slots becomes `count * slices` new slots, of which each slice has `count`.
    for name in ("sslot", "dslot"):
        rows[name] = rows[name] * slices + number * rows["count"]
    rows["group"] = np.where(rows["group"] >= 0, rows["group"] * slices + number, -1)
    return rows
