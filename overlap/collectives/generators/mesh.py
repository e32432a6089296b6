"""Direct exchanges: every rank writes straight to every other rank.

Rows are ordered by distance: rank r sends to r + 1, r + 2, ... and receives from r - 1, r - 2, ..., so that the sends
and receives of a rank proceed at the same pace. Read backwards, rank r adds up the data of r + 1, r + 2, ...
"""

from __future__ import annotations

import numpy as np

from ...errors import ScheduleError
from ..pattern import Pattern, edge_pattern, owner_column
from ..schedule import Buffer, Schedule
from ..tablewriter import TableWriter
from .rank_order import add_rank_order_rows, all_pairs, scratch_block


def mesh(size: int) -> Pattern:
    """Return the pattern in which every rank sends its chunk to all others in one step.

    Cost: 1 step each way, n (size - 1) / size bytes per rank. Fan-in: size - 1 messages arrive at every rank at once.
    """
    src, dst = all_pairs(size)
    return edge_pattern(size, owner_column(size), 0, src, dst, src, group=src)


def star(size: int, root: int) -> Pattern:
    """Return the pattern in which the root sends its chunk to all other ranks in one step.

    Cost: 1 step, n (size - 1) bytes sent by the root.
    """
    others = (root + np.arange(1, size, dtype=np.int32)) % np.int32(size)
    return edge_pattern(size, np.array([root], np.int32), 0, root, others, 0, group=0)


def all_to_all(size: int) -> Schedule:
    """Return the all-to-all in which every rank sends each block directly to its destination, in one step.

    Cost: 1 step, n (size - 1) / size bytes per rank.
    """
    table = TableWriter()
    ranks, (src, dst) = np.arange(size, dtype=np.int32), all_pairs(size)
    table.add_moves(0, ranks, ranks, (Buffer.IN, ranks), (Buffer.OUT, ranks))
    table.add_moves(0, src, dst, (Buffer.IN, dst), (Buffer.OUT, src))
    return table.build("all_to_all", "mesh", size)


def scatter(size: int, *, root: int = 0) -> Schedule:
    """Return the scatter in which the root sends every rank its block directly, in one step.

    Cost: 1 step, n (size - 1) / size bytes sent by the root.
    """
    table = TableWriter()
    others = (root + np.arange(1, size, dtype=np.int32)) % np.int32(size)
    table.add_moves(0, root, root, (Buffer.IN, root), (Buffer.OUT, 0))
    table.add_moves(0, root, others, (Buffer.IN, others), (Buffer.OUT, 0))
    return table.build("scatter", "mesh", size, root=root)


def permute(size: int, *, pairs: tuple[tuple[int, int], ...] = ()) -> Schedule:
    """Return the permute that sends from src to dst for each pair (src, dst).

    The OUT of a rank that is no pair's dst stays as it is.

    Cost: 1 step, n bytes per rank.

    Raises:
        ScheduleError: If a rank is out of range, or appears twice as source or twice as destination.

    Args:
        size: Ranks in the group.
        pairs: The pairs; none for a permute that moves nothing.
    """
    for end, name in ((0, "source"), (1, "destination")):
        ranks = [pair[end] for pair in pairs]
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < size for rank in ranks):
            raise ScheduleError(f"pairs: each of the ranks 0..{size - 1} may be a {name} once, got {list(pairs)}")
    table = TableWriter()
    both = np.asarray(pairs, np.int32).reshape(-1, 2)
    table.add_moves(0, both[:, 0], both[:, 1], (Buffer.IN, 0), (Buffer.OUT, 0))
    return table.build("permute", "mesh", size, pairs=tuple(pairs))


def one_shot(size: int) -> Schedule:
    """Return the all-reduce in which every rank sends its vector to all others, and adds up all in the order of ranks.

    Cost: 1 step, and local additions; n (size - 1) bytes sent and added per rank, SCRATCH of size + 1 blocks.
    """
    table, ranks, (src, dst) = TableWriter(), np.arange(size, dtype=np.int32), all_pairs(size)
    # SCRATCH: block 0 is unused, as it may be the input's memory; received vectors; the sum in the last block.
    total = (Buffer.SCRATCH, size)
    table.add_moves(0, src, dst, (Buffer.IN, 0), (Buffer.SCRATCH, scratch_block(src, dst)), group=src)
    nowhere = np.zeros(size, np.int32)
    add_rank_order_rows(table, size, own_slot=nowhere, per_block=1, within=nowhere, total=total)
    table.add_moves(size + 1, ranks, ranks, total, (Buffer.OUT, 0))
    return table.build("all_reduce", "one_shot", size, scratch=size + 1)


def pairwise(size: int) -> Schedule:
    """Return the all-to-all in which rank r sends to rank r + d and receives from r - d in step d - 1, d = 1, 2, ...

    Cost: size - 1 steps; n (size - 1) / size bytes per rank, to one rank at a time.
    """
    table, ranks = TableWriter(), np.arange(size, dtype=np.int32)
    distance = np.arange(1, size, dtype=np.int32)[:, None]
    dst = (ranks + distance) % np.int32(size)
    table.add_moves(0, ranks, ranks, (Buffer.IN, ranks), (Buffer.OUT, ranks))
    table.add_moves(distance - 1, ranks, dst, (Buffer.IN, dst), (Buffer.OUT, ranks))
    return table.build("all_to_all", "pairwise", size)
