"""Reductions that combine every element in the order of ranks, for `exact=True`.

With other algorithms the order of additions depends on the chunk: a ring begins each chunk at another rank, a tree adds
pairs, a mesh begins at the neighbour. So the last bits of an element depend on its position. Here element i is
((x0[i] + x1[i]) + x2[i]) + ... at every position, as ranks that share memory compute it.
"""

from __future__ import annotations

import numpy as np

from ..pattern import Ints, Pattern, edge_pattern
from ..schedule import Buffer, Schedule
from ..tablewriter import Cells, TableWriter

ONLY_FOR_ORDER = ("rank_order", "rank_chain")
"""Algorithms that are candidates only if a caller requests the order of ranks, or the algorithm by name."""


def all_reduce(size: int) -> Schedule:
    """Return an all-reduce: rank r adds up piece r of all vectors in the order of ranks, and sends the sum to all.

    Cost: 2 steps, and local additions; 2 n (size - 1) / size bytes per rank, as a ring, but to all ranks; SCRATCH of
    about n bytes.
    """
    table, ranks = TableWriter(), np.arange(size, dtype=np.int32)
    end = _add_reduction_rows(table, size, per_block=size, within=ranks, out=ranks)
    src, dst = all_pairs(size)
    table.add_moves(end, src, dst, (Buffer.OUT, src), (Buffer.OUT, src), group=src)
    return table.build("all_reduce", "rank_order", size, slots_per_block=size, scratch=size + 1)


def reduce_scatter(size: int) -> Schedule:
    """Return a reduce-scatter: rank r receives block r of all inputs, and adds the blocks up in the order of ranks.

    Cost: 1 step, and local additions; n (size - 1) / size bytes per rank; SCRATCH of about n bytes.
    """
    table, nowhere = TableWriter(), np.zeros(size, np.int32)
    _add_reduction_rows(table, size, per_block=1, within=nowhere, out=nowhere)
    return table.build("reduce_scatter", "rank_order", size, scratch=size + 1)


def chain(size: int, *, slices: int = 8) -> Pattern:
    """Return the pattern that passes slices from the last rank down to rank 0; backwards, sums grow from rank 0 up.

    Cost: size - 2 + slices steps of n / slices bytes each way; n bytes each way over every link between neighbours,
    however many ranks a node has.
    """
    v = np.arange(size - 1, dtype=np.int32)
    slice_ = np.arange(slices, dtype=np.int32)[:, None]
    owner = np.full(slices, size - 1, np.int32)
    return edge_pattern(size, owner, v + slice_, np.int32(size - 1) - v, np.int32(size - 2) - v, slice_)


def _add_reduction_rows(table: TableWriter, size: int, *, per_block: int, within: Ints, out: Ints) -> int:
    """Add the rows by which rank r receives slot r of IN from all ranks and adds the pieces up; return the next step.

    Rank r uses slot `within[r]` of the blocks of SCRATCH for its pieces, and slot `out[r]` of OUT for its sum.
    """
    ranks = np.arange(size, dtype=np.int32)
    src, dst = all_pairs(size)
    # SCRATCH: block 0 is unused, as it may be the input's memory; received pieces; the sum in the last block.
    total = (Buffer.SCRATCH, size * per_block + within)
    there = scratch_block(src, dst) * per_block + np.broadcast_to(within, (size,))[dst]
    table.add_moves(0, src, dst, (Buffer.IN, dst), (Buffer.SCRATCH, there))
    add_rank_order_rows(table, size, own_slot=ranks, per_block=per_block, within=within, total=total)
    table.add_moves(size + 1, ranks, ranks, total, (Buffer.OUT, out))
    return size + 2


def add_rank_order_rows(
    table: TableWriter, size: int, *, own_slot: Ints, per_block: int, within: Ints, total: Cells
) -> None:
    """Add the rows by which each rank adds up the data of ranks 0, 1, ..., in steps 1 to `size`.

    Args:
        table: Table to extend.
        size: Ranks.
        own_slot: (size,) Slot of each rank's own data in IN.
        per_block: Slots of a block of SCRATCH; each block has the data of one other rank.
        within: (size,) Slot, within a block of SCRATCH, that each rank uses.
        total: Buffer and slot of each rank's sum.
    """
    ranks = np.arange(size, dtype=np.int32)
    for source in range(size):
        own = ranks == source
        received = scratch_block(np.full(size, source), ranks) * per_block + within
        where = (np.where(own, Buffer.IN, Buffer.SCRATCH).astype(np.uint8), np.where(own, own_slot, received))
        combine = table.add_moves if source == 0 else table.add_reductions
        combine(source + 1, ranks, ranks, where, total)


def all_pairs(size: int) -> tuple[Ints, Ints]:
    """Return all (sender, receiver) pairs as two tables (size - 1, size): row d - 1 has the pairs r -> r + d."""
    src = np.arange(size, dtype=np.int32)[None, :]
    dst = (src + np.arange(1, size, dtype=np.int32)[:, None]) % np.int32(size)
    return np.broadcast_to(src, dst.shape), dst


def scratch_block(src: Ints, dst: Ints) -> Ints:
    """Return the block of SCRATCH in which `dst` receives the data of `src`.

    Blocks 1, 2, ... are for the other ranks in their order: on rank 1, block 1 is for rank 0 and block 2 for rank 2.
    """
    return np.where(src < dst, src + 1, src).astype(np.int32)
