"""The reference executor: a schedule carried out on real arrays, row by row, as its definition says."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from overlap.collectives.reduce import Array, Reducer, find_reducer
from overlap.collectives.schedule import Buffer, Op, Schedule, slot_bounds


def replay(schedule: Schedule, inputs: Sequence[Array], op: str = "sum") -> list[Array | None]:
    """Carry out a schedule, one Python statement a row: slow, and plain enough to be believed.

    Args:
        schedule: Any schedule.
        inputs: One flat array a rank, of `blocks[0] * B` elements; the root's decides where there is a root.
        op: One of `reduce.OPS`.

    Returns:
        One flat array of `blocks[1] * B` elements a rank; None on ranks without a result. Zeros where nothing arrived.
    """
    memory = _Memory(schedule, inputs, op)
    rows = range(len(schedule))
    local = schedule.src == schedule.dst
    for _, phase in groupby(rows, key=lambda row: (schedule.step[row], ~local[row])):
        memory.run_phase(list(phase))
    rootless = schedule.collective not in ("reduce", "gather")
    return [out if rootless or rank == schedule.root else None for rank, out in enumerate(memory.outputs)]


class _Memory:
    """The three buffers of every rank."""

    def __init__(self, schedule: Schedule, inputs: Sequence[Array], op: str) -> None:
        self.schedule = schedule
        self.block = inputs[schedule.root].size // schedule.blocks[0]
        self.reducer: Reducer | None = find_reducer(op, inputs[0].dtype) if schedule.reduces else None
        _, out, scratch = (blocks * self.block for blocks in schedule.blocks)
        wide = self.reducer.accumulator if self.reducer else inputs[0].dtype
        self.outputs = [np.zeros(out, inputs[0].dtype) for _ in range(schedule.size)]
        scratches = [np.zeros(scratch, wide) for _ in range(schedule.size)]
        self.buffers = (list(inputs), self.outputs, scratches)

    def run_phase(self, rows: list[int]) -> None:
        """Read for all rows, then write for all rows in order."""
        s = self.schedule
        read = [self._view(s.sbuf[i], s.src[i], s.sslot[i], s.count[i]).copy() for i in rows]
        for i, value in zip(rows, read, strict=True):
            self._write(i, value, self._view(s.dbuf[i], s.dst[i], s.dslot[i], s.count[i]))

    def _view(self, buffer: int, rank: int, slot: int, count: int) -> Array:
        k = self.schedule.slots_per_block
        start, _ = slot_bounds(int(slot), k, self.block)
        _, stop = slot_bounds(int(slot + count) - 1, k, self.block)
        return self.buffers[buffer][rank][start:stop]

    def _write(self, row: int, value: Array, target: Array) -> None:
        s = self.schedule
        if s.op[row] == Op.ADD:
            assert self.reducer is not None, f"row {row} reduces in {s.collective}"
            incoming = self.reducer.widen(value)
            first, second = (incoming, target) if s.src[row] < s.dst[row] else (target, incoming)
            target[...] = self.reducer.combine(first, second)
        elif self.reducer is not None and s.sbuf[row] == Buffer.SCRATCH and s.dbuf[row] == Buffer.OUT:
            self.reducer.finalise(value, target, s.size)
        else:
            target[...] = value
