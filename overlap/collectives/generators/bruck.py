"""Bruck's algorithms: logarithmic numbers of steps for any number of ranks.

Source: Bruck and others, "Efficient algorithms for all-to-all communications in multiport message-passing systems",
IEEE TPDS 8(11), 1997. Since a table may put a chunk anywhere, the rotations of the original are not needed.
"""

from __future__ import annotations

import numpy as np

from ..pattern import Ints, Pattern, owners, spread
from ..schedule import Buffer, Schedule
from ..tablewriter import Column, Table, adjacent_runs


def bruck(size: int) -> Pattern:
    """Send all one has to the rank at distance -1, -2, -4, ...

    Cost: ceil(log2(size)) steps; n (size - 1) / size bytes per rank.
    """
    rows = [np.empty((4, 0), np.int32)]
    ranks = np.arange(size, dtype=np.int32)[:, None]
    for step in range((size - 1).bit_length()):
        offset = np.arange(min(1 << step, size - (1 << step)), dtype=np.int32)
        # Ascending chunks, so that those which wrap around are neighbours as well.
        chunk = np.sort((ranks + offset) % size, axis=1)
        columns = np.broadcast_arrays(np.int32(step), ranks, (ranks - (1 << step)) % size, chunk)
        rows.append(np.stack([column.reshape(-1) for column in columns]))
    step, src, dst, chunk = np.concatenate(rows, axis=1)
    return spread(size, owners(size), step, src, dst, chunk)


def all_to_all(size: int) -> Schedule:
    """Send a block that has to go d ranks forward over the distances that are the binary digits of d.

    Blocks of a step are packed, sent as one message, and stay where they arrive until their next digit.

    Cost: ceil(log2(size)) steps; about (n / 2) log2(size) bytes sent and packed per rank.
    """
    table, ranks = Table(), np.arange(size, dtype=np.int32)[:, None]
    distance = np.arange(size, dtype=np.int32)
    steps = (size - 1).bit_length()
    pack = max([1, *(int((distance >> bit & 1).sum()) for bit in range(steps))])
    # Where each distance's block is: in IN at first, then in the area of the step in which it last arrived.
    arrived = np.full(size, -1)
    for bit in range(steps):
        moving = np.flatnonzero(distance >> bit & 1).astype(np.int32)
        at, place = arrived[moving], np.arange(len(moving), dtype=np.int32)
        slot = np.where(at < 0, (ranks + moving) % size, at)
        _local(table, bit, slot, np.where(at < 0, Buffer.IN, Buffer.SCRATCH), Buffer.SCRATCH, place)
        area = pack * (bit + 1)
        table.move(
            bit, ranks, (ranks + (1 << bit)) % size, (Buffer.SCRATCH, 0), (Buffer.SCRATCH, area), count=len(moving)
        )
        arrived[moving] = area + place
    slot = np.where(arrived < 0, (ranks + distance) % size, arrived)
    source = np.where(arrived < 0, Buffer.IN, Buffer.SCRATCH)
    _local(table, steps, slot, source, Buffer.OUT, (ranks - distance) % size)
    return table.build("all_to_all", "bruck", size, scratch=pack * (steps + 1))


def _local(table: Table, step: int, slot: Ints, source: Column, target: Buffer, place: Column) -> None:
    """Add local moves of single blocks, (size, blocks), joining neighbours."""
    rank = np.arange(len(slot), dtype=np.int32)[:, None]
    columns = np.broadcast_arrays(rank, np.asarray(source, np.uint8), slot, place)
    order = np.lexsort((columns[2].reshape(-1), columns[0].reshape(-1)))
    rank, buffer, slot, to = (column.reshape(-1)[order] for column in columns)
    first = adjacent_runs(slot, to, same=(rank, buffer))
    count = np.diff(np.append(first, len(slot)))
    table.move(
        step, rank[first], rank[first], (buffer[first].astype(np.uint8), slot[first]), (target, to[first]), count=count
    )
