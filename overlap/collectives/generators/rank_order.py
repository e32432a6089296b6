"""Reductions that combine every element in the order of ranks, for `exact=True`.

A ring begins each chunk at another rank, a tree adds pairs, a mesh begins at the neighbour: where the cuts between
chunks fall changes the order of additions, and with it the last bits. Here element i is ((x0[i] + x1[i]) + x2[i]) + ...
whatever its place, as in memory that all ranks share.
"""

from __future__ import annotations

import numpy as np

from ..pattern import Ints, Pattern, edge_pattern
from ..schedule import Buffer, Schedule
from ..tablewriter import TableWriter

ONLY_FOR_ORDER = ("rank_order", "rank_chain")
"""Algorithms that are candidates only if the order or the algorithm itself is requested."""


def all_reduce(size: int) -> Schedule:
    """Send every rank its piece; add up all copies of a piece; send the sum to all ranks.

    Cost: 2 steps, and local additions; 2 n (size - 1) / size bytes per rank, as a ring, but to all ranks; SCRATCH of
    about n bytes.
    """
    table, ranks = TableWriter(), np.arange(size, dtype=np.int32)
    end = _add_reduction(table, size, per_block=size, within=ranks, out=ranks)
    src, dst = all_pairs(size)
    table.move(end, src, dst, (Buffer.OUT, src), (Buffer.OUT, src), group=src)
    return table.build("all_reduce", "rank_order", size, slots_per_block=size, scratch=size + 1)


def reduce_scatter(size: int) -> Schedule:
    """Send every rank its block; add up all copies of a block.

    Cost: 1 step, and local additions; n (size - 1) / size bytes per rank; SCRATCH of about n bytes.
    """
    table, nowhere = TableWriter(), np.zeros(size, np.int32)
    _add_reduction(table, size, per_block=1, within=nowhere, out=nowhere)
    return table.build("reduce_scatter", "rank_order", size, scratch=size + 1)


def chain(size: int, *, slices: int = 8) -> Pattern:
    """Pass slice after slice from the last rank down to the first: read backwards, sums grow from the first rank on.

    Cost: size - 2 + slices steps of n / slices bytes each way; n bytes each way over every link between neighbours,
    however many ranks a node has.
    """
    v = np.arange(size - 1, dtype=np.int32)
    slice_ = np.arange(slices, dtype=np.int32)[:, None]
    owner = np.full(slices, size - 1, np.int32)
    return edge_pattern(size, owner, v + slice_, np.int32(size - 1) - v, np.int32(size - 2) - v, slice_)


def _add_reduction(table: TableWriter, size: int, *, per_block: int, within: Ints, out: Ints) -> int:
    """Add the rows by which each rank adds up its piece; return the first step after them.

    Args:
        table: Table to extend.
        size: Ranks.
        per_block: Slots of a block.
        within: (size,) Slot of each rank's piece within its block.
        out: (size,) Slot of each rank's sum in OUT.
    """
    ranks = np.arange(size, dtype=np.int32)
    src, dst = all_pairs(size)
    # Block 0 may be the input's memory, so sums have a block of their own, and received pieces lie in between.
    total = (Buffer.SCRATCH, size * per_block + within)
    there = scratch_block(src, dst) * per_block + np.broadcast_to(within, (size,))[dst]
    table.move(0, src, dst, (Buffer.IN, dst), (Buffer.SCRATCH, there))
    for source in range(size):
        own = ranks == source
        place = np.where(own, ranks, scratch_block(np.full(size, source), ranks) * per_block + within).astype(np.int32)
        where = (np.where(own, Buffer.IN, Buffer.SCRATCH).astype(np.uint8), place)
        combine = table.move if source == 0 else table.add
        combine(source + 1, ranks, ranks, where, total)
    table.move(size + 1, ranks, ranks, total, (Buffer.OUT, out))
    return size + 2


def all_pairs(size: int) -> tuple[Ints, Ints]:
    """Return (size - 1, size) senders and receivers, nearest first."""
    src = np.arange(size, dtype=np.int32)[None, :]
    dst = (src + np.arange(1, size, dtype=np.int32)[:, None]) % np.int32(size)
    return np.broadcast_to(src, dst.shape), dst


def scratch_block(src: Ints, dst: Ints) -> Ints:
    """Return the block of SCRATCH at `dst` for the data of `src`: 1, 2, ... in the order of ranks without `dst`."""
    return np.where(src < dst, src + 1, src).astype(np.int32)
