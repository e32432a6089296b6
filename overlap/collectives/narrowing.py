"""Schedules for one receiving rank, made from others: gather from all-gather or scatter, reduce from all-reduce.

Rows that the root's result does not need are dropped from the wider table. Only the root has an output, so the other
ranks use SCRATCH in its place. A reduce keeps all sums unfinished until the last step, in which the root finishes them.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from .schedule import COLUMNS, Buffer, Op, Schedule
from .tablewriter import TableWriter

WIDER = {"gather": "all_gather", "reduce": "all_reduce"}
"""Collectives with a result on one rank, and their counterparts with the same result on all."""


def backwards(scatter: Schedule) -> Schedule:
    """Return the gather that is a scatter read backwards: its messages the other way round, with IN and OUT exchanged.

    Cost: as many steps, messages and bytes as the scatter has.
    """
    local, turned = scatter.src == scatter.dst, np.array([Buffer.OUT, Buffer.IN, Buffer.SCRATCH], np.uint8)
    last = int(scatter.step[~local].max(initial=0))
    rows = {name: getattr(scatter, name) for name in COLUMNS}
    rows |= {"step": np.where(local, 0, last - scatter.step), "src": scatter.dst, "dst": scatter.src}
    rows |= {"sbuf": turned[scatter.dbuf], "sslot": scatter.dslot, "dbuf": turned[scatter.sbuf], "dslot": scatter.sslot}
    table = TableWriter()
    table.extend(rows)
    return table.build("gather", scatter.algorithm, scatter.size, scratch=scatter.blocks[2], root=scatter.root)


def narrow_to_root(wider: Schedule, root: int) -> Schedule:
    """Return the schedule that gives its result to one rank only.

    Args:
        wider: An all-gather or an all-reduce.
        root: The rank.

    Cost: no step takes longer than in the wider schedule, but a reduce has one more, of copies at the root.
    """
    collective = next(narrow for narrow, wide in WIDER.items() if wide == wider.collective)
    needed = _needed_rows(wider, root)
    columns = {name: getattr(wider, name)[needed].copy() for name in COLUMNS}
    first_slot = wider.slots[2]
    for rank, buffer, slot in (("src", "sbuf", "sslot"), ("dst", "dbuf", "dslot")):
        uses_out = columns[buffer] == Buffer.OUT
        if collective == "gather":
            uses_out &= columns[rank] != root
        columns[slot][uses_out] += first_slot
        columns[buffer][uses_out] = Buffer.SCRATCH
    if collective == "reduce":
        last = {
            "step": wider.steps, "op": Op.MOVE, "src": root, "dst": root, "sbuf": Buffer.SCRATCH, "sslot": first_slot,
            "dbuf": Buffer.OUT, "dslot": 0, "count": wider.slots[1], "channel": 0, "group": -1,
        }  # fmt: skip
        columns = {name: np.append(column, np.array(last[name], column.dtype)) for name, column in columns.items()}
    _, step = np.unique(columns["step"], return_inverse=True)
    columns["step"] = step.astype(np.int32)
    blocks = (wider.blocks[0], wider.blocks[1], wider.blocks[2] + wider.blocks[1])
    rest = {field.name: getattr(wider, field.name) for field in fields(wider)}
    return Schedule(**(rest | columns | {"collective": collective, "root": root, "blocks": blocks}))


def _needed_rows(wider: Schedule, root: int) -> NDArray[np.bool_]:
    """Return the rows that the root's result depends on, found from the last step backwards."""
    first = np.cumsum((0, *wider.slots))
    need = np.zeros((wider.size, first[-1]), np.bool_)
    need[root, first[Buffer.OUT] : first[Buffer.OUT] + wider.slots[1]] = True
    needed = np.zeros(len(wider), np.bool_)
    remote = wider.src != wider.dst
    phase = wider.step.astype(np.int64) * 2 + remote
    for rows in np.split(np.arange(len(wider)), np.flatnonzero(np.diff(phase)) + 1)[::-1]:
        into = {int(row): first[wider.dbuf[row]] + wider.dslot[row] for row in rows}
        useful = [row for row in into if need[wider.dst[row], into[row] : into[row] + wider.count[row]].any()]
        for row in useful:
            needed[row] = True
            if wider.op[row] == Op.MOVE:
                need[wider.dst[row], into[row] : into[row] + wider.count[row]] = False
        for row in useful:
            start = first[wider.sbuf[row]] + wider.sslot[row]
            need[wider.src[row], start : start + wider.count[row]] = True
    return needed
