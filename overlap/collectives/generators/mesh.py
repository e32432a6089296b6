"""Direct exchanges: every rank writes straight to every other rank.

Rows are ordered by distance: rank r sends to r + 1, r + 2, ... and receives from r - 1, r - 2, ..., so that sends and
receives meet pairwise. Read backwards it is the other way round: contributions are added up from r + 1, r + 2, ...
"""

from __future__ import annotations

import numpy as np

from ...errors import ScheduleError
from ..pattern import Pattern, edge_pattern, owners
from ..schedule import Buffer, Schedule
from ..tablewriter import TableWriter
from .rank_order import all_pairs, scratch_block


def mesh(size: int) -> Pattern:
    """Send the chunk of every rank to all others at once.

    Cost: 1 step each way, n (size - 1) / size bytes per rank. Fan-in: size - 1 messages meet at every rank.
    """
    src, dst = all_pairs(size)
    return edge_pattern(size, owners(size), 0, src, dst, src, group=src)


def star(size: int, root: int) -> Pattern:
    """Send the root's chunk to all others at once.

    Cost: 1 step, n (size - 1) bytes sent by the root.
    """
    others = (root + np.arange(1, size, dtype=np.int32)) % np.int32(size)
    return edge_pattern(size, np.array([root], np.int32), 0, root, others, 0, group=0)


def all_to_all(size: int) -> Schedule:
    """Send every block straight to its rank.

    Cost: 1 step, n (size - 1) / size bytes per rank.
    """
    table = TableWriter()
    ranks, (src, dst) = np.arange(size, dtype=np.int32), all_pairs(size)
    table.move(0, ranks, ranks, (Buffer.IN, ranks), (Buffer.OUT, ranks))
    table.move(0, src, dst, (Buffer.IN, dst), (Buffer.OUT, src))
    return table.build("all_to_all", "mesh", size)


def scatter(size: int, *, root: int = 0) -> Schedule:
    """Send every rank its block straight from the root.

    Cost: 1 step, n (size - 1) / size bytes sent by the root.
    """
    table = TableWriter()
    others = (root + np.arange(1, size, dtype=np.int32)) % np.int32(size)
    table.move(0, root, root, (Buffer.IN, root), (Buffer.OUT, 0))
    table.move(0, root, others, (Buffer.IN, others), (Buffer.OUT, 0))
    return table.build("scatter", "mesh", size, root=root)


def permute(size: int, *, pairs: tuple[tuple[int, int], ...] = ()) -> Schedule:
    """Send along each (src, dst) pair; a rank that is no pair's dst has an untouched output.

    Cost: 1 step, n bytes per rank.

    Raises:
        ScheduleError: If a rank is out of range, or appears twice as source or twice as destination.
    """
    for end, name in ((0, "source"), (1, "destination")):
        ranks = [pair[end] for pair in pairs]
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < size for rank in ranks):
            raise ScheduleError(f"pairs: each of the ranks 0..{size - 1} may be a {name} once, got {list(pairs)}")
    table = TableWriter()
    both = np.asarray(pairs, np.int32).reshape(-1, 2)
    table.move(0, both[:, 0], both[:, 1], (Buffer.IN, 0), (Buffer.OUT, 0))
    return table.build("permute", "mesh", size, pairs=tuple(pairs))


def one_shot(size: int) -> Schedule:
    """Send every whole vector to all other ranks; each rank adds up all vectors, in the order of ranks.

    Cost: 1 step, and local additions; n (size - 1) bytes sent and added per rank, SCRATCH of size + 1 blocks.
    """
    table, ranks = TableWriter(), np.arange(size, dtype=np.int32)
    src = ranks[None, :]
    dst = (src + np.arange(1, size, dtype=np.int32)[:, None]) % np.int32(size)
    # Block 0 may be the input's memory, so sums have a block of their own, and received vectors lie in between.
    total = size
    table.move(0, src, dst, (Buffer.IN, 0), (Buffer.SCRATCH, scratch_block(src, dst)), group=src)
    for source in range(size):
        own = ranks == source
        block = np.where(own, 0, scratch_block(np.full(size, source), ranks))
        where = (np.where(own, Buffer.IN, Buffer.SCRATCH).astype(np.uint8), block)
        combine = table.move if source == 0 else table.add
        combine(source + 1, ranks, ranks, where, (Buffer.SCRATCH, total))
    table.move(size + 1, ranks, ranks, (Buffer.SCRATCH, total), (Buffer.OUT, 0))
    return table.build("all_reduce", "one_shot", size, scratch=size + 1)


def pairwise(size: int) -> Schedule:
    """Exchange with one rank after another, at distance 1, 2, ...

    Cost: size - 1 steps; n (size - 1) / size bytes per rank, to one rank at a time.
    """
    table, ranks = TableWriter(), np.arange(size, dtype=np.int32)
    distance = np.arange(1, size, dtype=np.int32)[:, None]
    dst = (ranks + distance) % np.int32(size)
    table.move(0, ranks, ranks, (Buffer.IN, ranks), (Buffer.OUT, ranks))
    table.move(distance - 1, ranks, dst, (Buffer.IN, dst), (Buffer.OUT, ranks))
    return table.build("all_to_all", "pairwise", size)
