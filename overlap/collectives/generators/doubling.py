"""Exchanges over doubling distances, in logarithmic numbers of steps."""

from __future__ import annotations

import numpy as np

from ..hazards import cells_in_ranges
from ..pattern import Ints, Pattern, edge_pattern, owner_column
from ..schedule import Buffer, Schedule
from ..tablewriter import Column, TableWriter, adjacent_runs


def halving_doubling(size: int) -> Pattern:
    """Return the all-gather by exchange over distances 1, 2, 4, ..., for any number of ranks.

    If `size` is no power of two, the largest power of two below it takes part. Each surplus rank is folded: it first
    sends its chunk to a neighbour that takes part, and gets the other chunks from this neighbour at the end.

    Cost: floor(log2(size)) steps, and 2 more if `size` is not a power of two; n (size - 1) / size bytes sent per rank,
    up to twice as much by a rank with a folded neighbour.
    """
    heads, cube = _exchanging_ranks(size)
    bounds = np.append(heads, size).astype(np.int32)
    # Head v (a rank that takes part) holds the chunks of ranks bounds[v] to bounds[v + 1] - 1: its own chunk, and that
    # of its folded neighbour, if it has one.
    folded = size > len(heads)
    # Rows are (step, src, dst, first chunk, end of chunks).
    rows: list[tuple[int, int, int, int, int]] = []
    extra = [int(h) + 1 for h, end in zip(heads, bounds[1:], strict=True) if end - h == 2]
    rows += [(0, e, e - 1, e, e + 1) for e in extra]
    for bit in range(cube):
        for v, head in enumerate(heads):
            # Before this step, head v has the chunks of 2**bit heads, from `low` on, and sends them all.
            low = v >> bit << bit
            span = bounds[low], bounds[low + (1 << bit)]
            rows.append((bit + folded, int(head), int(heads[v ^ (1 << bit)]), int(span[0]), int(span[1])))
    for e in extra:
        rows += [(cube + 1, e - 1, e, 0, e), (cube + 1, e - 1, e, e + 1, size)]
    table = np.asarray(rows, np.int32).reshape(-1, 5)
    chunk, row = cells_in_ranges(table[:, 3], table[:, 4] - table[:, 3])
    return edge_pattern(size, owner_column(size), table[row, 0], table[row, 1], table[row, 2], chunk)


def folded_halving_doubling(size: int) -> Pattern:
    """Return the exchange over distances 1, 2, 4, ... among a power of two of the ranks, which own all chunks.

    Each surplus rank owns nothing, and gets all chunks from a neighbour in the last step. Read backwards and then
    forwards, this is Rabenseifner's all-reduce. (If surplus ranks owned chunks, the sums of these chunks would travel
    to them and back in the middle.)

    Cost: floor(log2(size)) steps, and 1 more if `size` is not a power of two, each way; n (h - 1) / h bytes sent by a
    rank among h that take part, and n more to, or by, the others.
    """
    heads, cube = _exchanging_ranks(size)
    # Rows are (step, src, dst, first chunk, end of chunks): exchanges of heads, then the chunks of folded ranks.
    rows = [
        (bit, int(head), int(heads[v ^ (1 << bit)]), v >> bit << bit, (v >> bit << bit) + (1 << bit))
        for bit in range(cube)
        for v, head in enumerate(heads)
    ]
    rows += [(cube, 2 * extra, 2 * extra + 1, 0, len(heads)) for extra in range(size - len(heads))]
    table = np.asarray(rows, np.int32).reshape(-1, 5)
    chunk, row = cells_in_ranges(table[:, 3], table[:, 4] - table[:, 3])
    return edge_pattern(size, heads, table[row, 0], table[row, 1], table[row, 2], chunk)


def _exchanging_ranks(size: int) -> tuple[Ints, int]:
    """Return the ranks that take part in exchanges, a power of two of them, and the log2 of their number.

    Each stands for itself, or also for the next rank, which is folded into it. For 6 ranks: [0, 2, 4, 5] and 2, where 0
    stands for 0 and 1, and 2 for 2 and 3.
    """
    cube = size.bit_length() - 1
    heads = 1 << cube
    v = np.arange(heads, dtype=np.int32)
    return v + np.minimum(v, size - heads), cube


def recursive_doubling_all_reduce(size: int) -> Schedule:
    """Return the all-reduce that exchanges and adds whole vectors over distances 1, 2, 4, ...

    Each exchange reads one of two blocks of SCRATCH (banks) and writes the other, as a rank sends its old sum while it
    forms the new one. If `size` is no power of two, each surplus rank gives its vector to a neighbour, and gets the
    result from it.

    Cost: floor(log2(size)) steps, and 2 more if `size` is not a power of two; n bytes sent and added per rank and step.
    """
    table = TableWriter()
    heads, cube = _exchanging_ranks(size)
    pairs = np.arange(size - len(heads), dtype=np.int32) * 2
    # A head with a folded neighbour first adds the neighbour's vector in SCRATCH; the others start from IN. A single
    # rank has no exchanges: it copies IN to SCRATCH, from where the last move takes its result.
    early = pairs if cube else heads
    first = int(len(early) > 0)
    table.add_moves(0, early, early, (Buffer.IN, 0), (Buffer.SCRATCH, 0))
    table.add_reductions(0, pairs + 1, pairs, (Buffer.IN, 0), (Buffer.SCRATCH, 0))
    buffer = np.where(np.arange(len(heads)) < len(early), Buffer.SCRATCH, Buffer.IN).astype(np.uint8)
    bank = 0
    for bit in range(cube):
        # The head whose number differs in this bit.
        peer = heads[np.arange(len(heads)) ^ (1 << bit)]
        table.add_moves(first + bit, heads, heads, (buffer, bank), (Buffer.SCRATCH, 1 - bank))
        table.add_reductions(first + bit, heads, peer, (buffer, bank), (Buffer.SCRATCH, 1 - bank))
        buffer, bank = np.full(len(heads), Buffer.SCRATCH, np.uint8), 1 - bank
    table.add_moves(first + cube, heads, heads, (buffer, bank), (Buffer.OUT, 0))
    table.add_moves(first + cube, pairs, pairs + 1, (Buffer.OUT, 0), (Buffer.OUT, 0))
    return table.build("all_reduce", "recursive_doubling", size, scratch=2)


def bruck(size: int) -> Pattern:
    """Return Bruck's all-gather: in step t, send the chunks received so far to the rank 2**t places before.

    Cost: ceil(log2(size)) steps; n (size - 1) / size bytes per rank.
    """
    rows = [np.empty((4, 0), np.int32)]
    ranks = np.arange(size, dtype=np.int32)[:, None]
    for step in range((size - 1).bit_length()):
        offset = np.arange(min(1 << step, size - (1 << step)), dtype=np.int32)
        # Sorted, so that adjacent chunks become one row even where the numbers wrap around from the last rank to 0.
        chunk = np.sort((ranks + offset) % size, axis=1)
        columns = np.broadcast_arrays(np.int32(step), ranks, (ranks - (1 << step)) % size, chunk)
        rows.append(np.stack([column.reshape(-1) for column in columns]))
    step, src, dst, chunk = np.concatenate(rows, axis=1)
    return edge_pattern(size, owner_column(size), step, src, dst, chunk)


def bruck_all_to_all(size: int) -> Schedule:
    """Return Bruck's all-to-all: a block for the rank d places on travels by the powers of two that add up to d.

    A block with d = 5 goes 1 rank on in step 0, and 4 ranks on in step 2. The blocks that a rank sends in a step are
    packed into one message, and stay where they arrive until they travel again.

    Cost: ceil(log2(size)) steps; about (n / 2) log2(size) bytes sent and packed per rank.
    """
    table, ranks = TableWriter(), np.arange(size, dtype=np.int32)[:, None]
    distance = np.arange(size, dtype=np.int32)
    steps = (size - 1).bit_length()
    # Largest number of blocks in a message. SCRATCH has areas of `pack` blocks: area 0 to pack messages in, and area
    # bit + 1 for the blocks that arrive in step `bit`.
    pack = max([1, *(int((distance >> bit & 1).sum()) for bit in range(steps))])
    # By distance: slot of SCRATCH in which the block last arrived; -1: the block is still in IN.
    arrived = np.full(size, -1)
    for bit in range(steps):
        moving = np.flatnonzero(distance >> bit & 1).astype(np.int32)
        origin, packed = arrived[moving], np.arange(len(moving), dtype=np.int32)
        slot = np.where(origin < 0, (ranks + moving) % size, origin)
        _add_block_moves(table, bit, slot, np.where(origin < 0, Buffer.IN, Buffer.SCRATCH), Buffer.SCRATCH, packed)
        area = pack * (bit + 1)
        table.add_moves(
            bit, ranks, (ranks + (1 << bit)) % size, (Buffer.SCRATCH, 0), (Buffer.SCRATCH, area), count=len(moving)
        )
        arrived[moving] = area + packed
    slot = np.where(arrived < 0, (ranks + distance) % size, arrived)
    source = np.where(arrived < 0, Buffer.IN, Buffer.SCRATCH)
    _add_block_moves(table, steps, slot, source, Buffer.OUT, (ranks - distance) % size)
    return table.build("all_to_all", "bruck", size, scratch=pack * (steps + 1))


def _add_block_moves(
    table: TableWriter, step: int, slot: Ints, source: Column, target: Buffer, target_slot: Column
) -> None:
    """Add local moves of single blocks. Moves with adjacent sources and targets become one row.

    `slot` (size, blocks) has the slot of each block on each rank; `source` and `target_slot` broadcast against it.
    """
    rank = np.arange(len(slot), dtype=np.int32)[:, None]
    columns = np.broadcast_arrays(rank, np.asarray(source, np.uint8), slot, target_slot)
    # Sort by rank and slot, so that blocks next to each other become one row.
    order = np.lexsort((columns[2].reshape(-1), columns[0].reshape(-1)))
    rank, buffer, slot, to = (column.reshape(-1)[order] for column in columns)
    first = adjacent_runs(slot, to, same=(rank, buffer))
    count = np.diff(np.append(first, len(slot)))
    table.add_moves(
        step, rank[first], rank[first], (buffer[first].astype(np.uint8), slot[first]), (target, to[first]), count=count
    )
