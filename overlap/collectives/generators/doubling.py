"""Exchanges over doubling distances, in logarithmic numbers of steps."""

from __future__ import annotations

import numpy as np

from ..hazards import cells_of
from ..pattern import Ints, Pattern, edge_pattern, owners
from ..schedule import Buffer, Schedule
from ..tablewriter import Column, TableWriter, adjacent_runs


def halving_doubling(size: int) -> Pattern:
    """Exchange over doubling distances, for any number of ranks.

    Ranks beyond the largest power of two below `size` fold into a neighbour: they first send their chunk to it, and get
    the other chunks back at the end.

    Cost: floor(log2(size)) steps, and 2 more if `size` is not a power of two; n (size - 1) / size bytes sent per rank,
    up to twice as much by a rank with a folded neighbour.
    """
    heads, cube = _folded_ranks(size)
    bounds = np.append(heads, size).astype(np.int32)
    # Head v owns the chunks of the ranks bounds[v] to bounds[v + 1] - 1: its own, and that of its folded neighbour.
    folded = size > len(heads)
    # Rows are (step, src, dst, first chunk, end of chunks).
    rows: list[tuple[int, int, int, int, int]] = []
    extra = [int(h) + 1 for h, end in zip(heads, bounds[1:], strict=True) if end - h == 2]
    rows += [(0, e, e - 1, e, e + 1) for e in extra]
    for bit in range(cube):
        for v, head in enumerate(heads):
            # At this distance a head has the chunks of its aligned run of 2**bit heads, and sends them.
            low = v >> bit << bit
            span = bounds[low], bounds[low + (1 << bit)]
            rows.append((bit + folded, int(head), int(heads[v ^ (1 << bit)]), int(span[0]), int(span[1])))
    for e in extra:
        rows += [(cube + 1, e - 1, e, 0, e), (cube + 1, e - 1, e, e + 1, size)]
    table = np.asarray(rows, np.int32).reshape(-1, 5)
    chunk, row = cells_of(table[:, 3], table[:, 4] - table[:, 3])
    return edge_pattern(size, owners(size), table[row, 0], table[row, 1], table[row, 2], chunk)


def folded_halving_doubling(size: int) -> Pattern:
    """Exchange over doubling distances among the ranks of a power of two, which own everything.

    Each other rank folds into its neighbour, and gets all chunks from it. Read backwards and forwards this is
    Rabenseifner's all-reduce: a chunk owned by a folded rank would go there and back again in the middle.

    Cost: floor(log2(size)) steps, and 1 more if `size` is not a power of two, each way; n (h - 1) / h bytes sent by a
    rank among h that take part, and n more to, or by, the others.
    """
    heads, cube = _folded_ranks(size)
    # Rows are (step, src, dst, first chunk, end of chunks): exchanges of heads, then the chunks of folded ranks.
    rows = [
        (bit, int(head), int(heads[v ^ (1 << bit)]), v >> bit << bit, (v >> bit << bit) + (1 << bit))
        for bit in range(cube)
        for v, head in enumerate(heads)
    ]
    rows += [(cube, 2 * extra, 2 * extra + 1, 0, len(heads)) for extra in range(size - len(heads))]
    table = np.asarray(rows, np.int32).reshape(-1, 5)
    chunk, row = cells_of(table[:, 3], table[:, 4] - table[:, 3])
    return edge_pattern(size, heads, table[row, 0], table[row, 1], table[row, 2], chunk)


def _folded_ranks(size: int) -> tuple[Ints, int]:
    """Return the ranks that take part, as many as the largest power of two allows, and the log2 of their number.

    Each of them stands for 1 or 2 ranks.
    """
    cube = size.bit_length() - 1
    heads = 1 << cube
    v = np.arange(heads, dtype=np.int32)
    return v + np.minimum(v, size - heads), cube


def recursive_doubling_all_reduce(size: int) -> Schedule:
    """Exchange and add whole vectors over doubling distances.

    Each exchange reads one of two banks of SCRATCH and writes the other, since both partners send what the other is
    about to change. Ranks beyond the largest power of two below `size` give their vector to a neighbour and get the
    result.

    Cost: floor(log2(size)) steps, and 2 more if `size` is not a power of two; n bytes sent and added per rank and step.
    """
    table = TableWriter()
    heads, cube = _folded_ranks(size)
    pairs = np.arange(size - len(heads), dtype=np.int32) * 2
    # A rank with a folded neighbour starts from SCRATCH, the others straight from IN (but 1 rank has no other step).
    early = pairs if cube else heads
    first = int(len(early) > 0)
    table.move(0, early, early, (Buffer.IN, 0), (Buffer.SCRATCH, 0))
    table.add(0, pairs + 1, pairs, (Buffer.IN, 0), (Buffer.SCRATCH, 0))
    buffer = np.where(np.arange(len(heads)) < len(early), Buffer.SCRATCH, Buffer.IN).astype(np.uint8)
    bank = 0
    for bit in range(cube):
        peer = heads[np.arange(len(heads)) ^ (1 << bit)]
        table.move(first + bit, heads, heads, (buffer, bank), (Buffer.SCRATCH, 1 - bank))
        table.add(first + bit, heads, peer, (buffer, bank), (Buffer.SCRATCH, 1 - bank))
        buffer, bank = np.full(len(heads), Buffer.SCRATCH, np.uint8), 1 - bank
    table.move(first + cube, heads, heads, (buffer, bank), (Buffer.OUT, 0))
    table.move(first + cube, pairs, pairs + 1, (Buffer.OUT, 0), (Buffer.OUT, 0))
    return table.build("all_reduce", "recursive_doubling", size, scratch=2)


def bruck(size: int) -> Pattern:
    """Send all known chunks to the rank at distance -1, -2, -4, ...

    Cost: ceil(log2(size)) steps; n (size - 1) / size bytes per rank.
    """
    rows = [np.empty((4, 0), np.int32)]
    ranks = np.arange(size, dtype=np.int32)[:, None]
    for step in range((size - 1).bit_length()):
        offset = np.arange(min(1 << step, size - (1 << step)), dtype=np.int32)
        # Ascending chunks, so that chunks that wrap around are neighbours as well.
        chunk = np.sort((ranks + offset) % size, axis=1)
        columns = np.broadcast_arrays(np.int32(step), ranks, (ranks - (1 << step)) % size, chunk)
        rows.append(np.stack([column.reshape(-1) for column in columns]))
    step, src, dst, chunk = np.concatenate(rows, axis=1)
    return edge_pattern(size, owners(size), step, src, dst, chunk)


def all_to_all(size: int) -> Schedule:
    """Send a block that has to go d ranks forward over the distances that are the binary digits of d.

    Blocks of a step are packed, sent as one message, and stay where they arrive until their next digit.

    Cost: ceil(log2(size)) steps; about (n / 2) log2(size) bytes sent and packed per rank.
    """
    table, ranks = TableWriter(), np.arange(size, dtype=np.int32)[:, None]
    distance = np.arange(size, dtype=np.int32)
    steps = (size - 1).bit_length()
    pack = max([1, *(int((distance >> bit & 1).sum()) for bit in range(steps))])
    # Slot of the block of each distance: in IN at first (-1), then in the area of the step in which it last arrived.
    arrived = np.full(size, -1)
    for bit in range(steps):
        moving = np.flatnonzero(distance >> bit & 1).astype(np.int32)
        origin, packed = arrived[moving], np.arange(len(moving), dtype=np.int32)
        slot = np.where(origin < 0, (ranks + moving) % size, origin)
        _add_moves(table, bit, slot, np.where(origin < 0, Buffer.IN, Buffer.SCRATCH), Buffer.SCRATCH, packed)
        area = pack * (bit + 1)
        table.move(
            bit, ranks, (ranks + (1 << bit)) % size, (Buffer.SCRATCH, 0), (Buffer.SCRATCH, area), count=len(moving)
        )
        arrived[moving] = area + packed
    slot = np.where(arrived < 0, (ranks + distance) % size, arrived)
    source = np.where(arrived < 0, Buffer.IN, Buffer.SCRATCH)
    _add_moves(table, steps, slot, source, Buffer.OUT, (ranks - distance) % size)
    return table.build("all_to_all", "bruck", size, scratch=pack * (steps + 1))


def _add_moves(table: TableWriter, step: int, slot: Ints, source: Column, target: Buffer, target_slot: Column) -> None:
    """Add local moves of single blocks, (size, blocks), joining neighbours."""
    rank = np.arange(len(slot), dtype=np.int32)[:, None]
    columns = np.broadcast_arrays(rank, np.asarray(source, np.uint8), slot, target_slot)
    # Sort by rank and slot, so that blocks next to each other become one row.
    order = np.lexsort((columns[2].reshape(-1), columns[0].reshape(-1)))
    rank, buffer, slot, to = (column.reshape(-1)[order] for column in columns)
    first = adjacent_runs(slot, to, same=(rank, buffer))
    count = np.diff(np.append(first, len(slot)))
    table.move(
        step, rank[first], rank[first], (buffer[first].astype(np.uint8), slot[first]), (target, to[first]), count=count
    )
