"""Schedules in which messages go straight to where they are needed, in other orders than the mesh's."""

from __future__ import annotations

import numpy as np

from ..schedule import Buffer, Schedule
from ..tablewriter import Table
from .rank_order import others


def one_shot(size: int) -> Schedule:
    """Send one's whole vector to everybody; everybody adds up all of them, in the order of ranks.

    Cost: 1 step, and local additions; n (size - 1) bytes sent and added per rank, SCRATCH of size + 1 blocks.
    """
    table, ranks = Table(), np.arange(size, dtype=np.int32)
    src = ranks[None, :]
    dst = (src + np.arange(1, size, dtype=np.int32)[:, None]) % np.int32(size)
    # Block 0 may be the input's memory, so sums have a block of their own, and others' vectors lie in between.
    total = size
    table.move(0, src, dst, (Buffer.IN, 0), (Buffer.SCRATCH, others(src, dst)), group=src)
    for source in range(size):
        own = ranks == source
        block = np.where(own, 0, others(np.full(size, source), ranks))
        where = (np.where(own, Buffer.IN, Buffer.SCRATCH).astype(np.uint8), block)
        combine = table.move if source == 0 else table.add
        combine(source + 1, ranks, ranks, where, (Buffer.SCRATCH, total))
    table.move(size + 1, ranks, ranks, (Buffer.SCRATCH, total), (Buffer.OUT, 0))
    return table.build("all_reduce", "one_shot", size, scratch=size + 1)


def pairwise(size: int) -> Schedule:
    """Exchange with one rank after another, at distance 1, 2, ...

    Cost: size - 1 steps; n (size - 1) / size bytes per rank, to one rank at a time.
    """
    table, ranks = Table(), np.arange(size, dtype=np.int32)
    distance = np.arange(1, size, dtype=np.int32)[:, None]
    dst = (ranks + distance) % np.int32(size)
    table.move(0, ranks, ranks, (Buffer.IN, ranks), (Buffer.OUT, ranks))
    table.move(distance - 1, ranks, dst, (Buffer.IN, dst), (Buffer.OUT, ranks))
    return table.build("all_to_all", "pairwise", size)
