"""Brute force: carry out a table on vectors that count how often each input block of each rank has come in."""

from itertools import groupby

import numpy as np

from overlap.collectives import Buffer, Op, Schedule

Counts = np.ndarray


def count(schedule: Schedule) -> Counts:
    """Return (size, slots of OUT, size, blocks of IN) counts; a slot never written counts 100 of everything."""
    s, k = schedule, schedule.slots_per_block
    origins = (s.size, s.blocks[0])
    buffers = [np.full((s.size, slots, *origins), 100, np.uint16) for slots in s.slots]
    buffers[Buffer.IN][:] = 0
    for rank in range(s.size):
        for slot in range(s.slots[0]):
            buffers[Buffer.IN][rank, slot, rank, slot // k] = 1
    columns = (s.op, s.src, s.dst, s.sbuf, s.sslot, s.dbuf, s.dslot, s.count)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    key = list(zip(s.step.tolist(), (s.src != s.dst).tolist(), strict=True))
    for _, phase in groupby(range(len(s)), key=key.__getitem__):
        phase_rows = [rows[row] for row in phase]
        read = [buffers[sbuf][src, at : at + n].copy() for _, src, _, sbuf, at, _, _, n in phase_rows]
        for (op, _, dst, _, _, dbuf, at, n), incoming in zip(phase_rows, read, strict=True):
            target = buffers[dbuf][dst, at : at + n]
            target[...] = target + incoming if op == Op.ADD else incoming
    return buffers[Buffer.OUT]


def definition(schedule: Schedule) -> Counts:
    """Return what `count` must return."""
    s, k = schedule, schedule.slots_per_block
    want = np.zeros((s.size, s.slots[1], s.size, s.blocks[0]), np.uint16)
    sources = {dst: src for src, dst in s.pairs}
    for rank in range(s.size):
        for slot in range(s.slots[1]):
            cell = want[rank, slot]
            if s.collective in ("all_reduce", "reduce"):
                cell[:, 0] = 1
            elif s.collective == "reduce_scatter":
                cell[:, rank] = 1
            elif s.collective in ("all_gather", "gather"):
                cell[slot // k, 0] = 1
            elif s.collective == "all_to_all":
                cell[slot // k, rank] = 1
            elif s.collective == "broadcast":
                cell[s.root, 0] = 1
            elif s.collective == "scatter":
                cell[s.root, rank] = 1
            elif rank in sources:
                cell[sources[rank], 0] = 1
            else:
                cell[:] = 100
    return want


def is_right(schedule: Schedule) -> bool:
    got, want = count(schedule), definition(schedule)
    if schedule.collective in ("reduce", "gather"):
        got, want = got[schedule.root], want[schedule.root]
    return bool(np.array_equal(got, want))
