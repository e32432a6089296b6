"""Pipelining: a schedule cut in slices, each a stage behind the one before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .hazards import unroll
from .pattern import Ints
from .schedule import COLUMNS, Schedule
from .tablewriter import Table, adjacent_runs

Columns: TypeAlias = dict[str, NDArray[np.integer]]


def pipelined(schedule: Schedule, stages: Sequence[int], slices: int) -> Schedule:
    """Return the schedule on data cut in slices: while a slice is in one stage, the next one is in the stage before.

    Every stage gets channels of its own, so that stages over different links run side by side.

    Args:
        schedule: Any schedule.
        stages: The first step of each stage, ascending from 0.
        slices: How many, at least 1.
    """
    if slices == 1:
        return schedule
    starts = np.asarray(stages, np.int32)
    longest = int(np.diff(np.append(starts, schedule.steps)).max())
    k = schedule.slots_per_block
    cells = single_slots(schedule)
    stage = np.searchsorted(starts, cells["step"], side="right") - 1
    blocks = []
    for number in range(slices):
        rows = dict(cells)
        rows["step"] = (stage + number) * longest + cells["step"] - starts[stage]
        rows["channel"] = stage * schedule.channels + cells["channel"]
        for name in ("sslot", "dslot"):
            rows[name] = (cells[name] // k * slices + number) * k + cells[name] % k
        grouped = cells["group"] >= 0
        rows["group"] = np.where(grouped, cells["group"] * slices + number, -1)
        blocks.append(joined(rows))
    return rebuilt(schedule, blocks, slots_per_block=k * slices)


def rebuilt(schedule: Schedule, blocks: Sequence[Columns], *, slots_per_block: int) -> Schedule:
    """Return a schedule with the same header and other rows."""
    table = Table()
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


def single_slots(schedule: Schedule) -> Columns:
    """Return the rows as rows of one slot each."""
    columns: Columns = {name: getattr(schedule, name) for name in COLUMNS}
    if (schedule.count == 1).all():
        return columns
    sslot, row = unroll(schedule.sslot, schedule.count)
    dslot, _ = unroll(schedule.dslot, schedule.count)
    single = {name: column[row] for name, column in columns.items()}
    return {**single, "sslot": sslot, "dslot": dslot, "count": np.ones(len(row), np.int32)}


def joined(rows: Columns) -> Columns:
    """Return rows of one slot each with neighbours joined again."""
    fixed: tuple[Ints, ...] = tuple(
        np.asarray(rows[name], np.int64) for name in ("src", "dst", "step", "op", "sbuf", "dbuf", "channel", "group")
    )
    first = adjacent_runs(rows["sslot"], rows["dslot"], same=fixed)
    count = np.diff(np.append(first, len(rows["step"])))
    return {**{name: column[first] for name, column in rows.items()}, "count": count}
