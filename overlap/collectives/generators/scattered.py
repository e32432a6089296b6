"""Broadcasts as a scatter and then a gather, on one level or on two, so that every link carries a share.

On one level this is van de Geijn's broadcast: a scatter, then an all-gather. On two levels, the root's node scatters,
ranks of the same place in all nodes pass their parts on, and every node gathers. Backwards it is a reduce: every node
reduces and scatters, the parts are reduced between nodes, and the root's node gathers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...errors import ScheduleError
from ..hazards import cells_of
from ..pattern import Ints, Pattern, edge_pattern, flat_columns
from .along_rings import Rings, ring_scatter
from .tree import subtrees

SCATTERS = ("binomial", "mesh", "multi_ring")
"""Algorithms that scatter the parts of a broadcast."""


def scatter_all_gather(
    size: int, root: int, gather: Pattern, *, scatter: str = "binomial", rings: Rings | None = None
) -> Pattern:
    """Scatter the chunks, then gather them.

    Cost: ceil(log2(size)) steps, one, or the steps along rings, then the steps of `gather`; n (size - 1) / size bytes
    sent by the root, and as many by each rank at most. Source: Barnett and others, "Interprocessor collective
    communication library", 1994.

    Args:
        size: Ranks.
        root: Rank that has the data.
        gather: A pattern of all ranks in which each owns a chunk.
        scatter: "binomial", "mesh" or "multi_ring".
        rings: Rings of "multi_ring": sequences of devices, which are ranks; one in both directions by default.

    Raises:
        ScheduleError: If there is no such `scatter`.
    """
    alone = edge_pattern(1, np.zeros(1, np.int32), *(np.empty(0, np.int32),) * 4)
    return two_level_broadcast(root, alone, gather, scatter=scatter, rings=rings)


def two_level_broadcast(
    root: int, between: Pattern, inside: Pattern, *, scatter: str = "binomial", rings: Rings | None = None
) -> Pattern:
    """Scatter in the root's node, pass on between nodes, gather in every node.

    Cost: the sum of the steps; between nodes 1 / local_size of what a flat algorithm sends there.

    Args:
        root: Rank that has the data; ranks are numbered node by node.
        between: Pattern over nodes, in which the root's node owns everything.
        inside: Pattern over the ranks of one node, in which each owns a chunk.
        scatter: "binomial", "mesh" or "multi_ring".
        rings: Rings of one node for "multi_ring"; one in both directions by default.

    Raises:
        ScheduleError: If there is no such `scatter`.
    """
    if scatter not in SCATTERS:
        raise ScheduleError(f"scatter: expected one of {', '.join(SCATTERS)}, got {scatter!r}")
    backward = _scatter_and_gather(root, between.backward, inside.backward, scatter, rings)
    return replace(_scatter_and_gather(root, between, inside, scatter, rings), mate=backward)


def scatter_steps(size: int, scatter: str, root: int = 0, rings: Rings | None = None) -> int:
    """Return the number of steps in which a root scatters, or backwards gathers."""
    if scatter == "multi_ring":
        return ring_scatter(size, root, rings).steps
    return (size - 1).bit_length() if scatter == "binomial" else min(size - 1, 1)


def _scatter_and_gather(root: int, between: Pattern, inside: Pattern, scatter: str, rings: Rings | None) -> Pattern:
    """Return a broadcast on two levels: a scatter at the root, transfers between nodes, a gather in each node."""
    nodes, local_size = between.size, inside.size
    home, local_root = divmod(root, local_size)
    size, depth = nodes * local_size, inside.parts * len(between.owner)
    owner = np.full(local_size * depth, root, np.int32)
    start, lanes = scatter_steps(local_size, scatter, local_root, rings), int(between.channel.max(initial=0)) + 2
    first = _edges_in_root(home, local_root, local_size, depth, scatter, rings)
    middle = _edges_between_nodes(between, inside, local_root, start)
    last = _edges_inside_nodes(between, inside, local_root, start + (between.steps if nodes > 1 else 0), lanes)
    # Ranks of the root's node that passed a chunk on have it already: it need not come again.
    has = np.zeros((size, len(owner)), np.bool_)
    has[root] = True
    has[first[2], first[3]] = True
    needed = ~has[last[2], last[3]]
    columns = [np.concatenate([*three]) for three in zip(first, middle, [c[needed] for c in last], strict=True)]
    step, src, dst, chunk, channel, group = columns
    return edge_pattern(size, owner, step, src, dst, chunk, channel=channel, group=group)


def _edges_in_root(home: int, root: int, local_size: int, depth: int, scatter: str, rings: Rings | None) -> list[Ints]:
    """Return the edges inside the root's node. Chunks are in the order of ranks from the root on."""
    if scatter == "binomial":
        step, parent, child, count = subtrees(local_size)
        block = child
    elif scatter == "mesh":
        block = child = np.arange(1, local_size, dtype=np.int32)
        step, parent, count = 0 * child, 0 * child, np.ones_like(child)
    else:
        out = ring_scatter(local_size, root, rings)
        parent, child, block = ((rank - root) % local_size for rank in (out.src, out.dst, out.block))
        step, count = out.step, np.ones_like(child)
    # `depth` chunks for each block, in the order of ranks from the root on.
    chunk, row = cells_of(block * depth, count * depth)
    src, dst = (home * local_size + (end[row] + root) % local_size for end in (parent, child))
    return flat_columns(step[row], src, dst, chunk, 0, -1)


def _edges_between_nodes(between: Pattern, inside: Pattern, root: int, start: int) -> list[Ints]:
    """Return the edges between nodes: ranks of one local rank pass their own chunks on."""
    local_size, width = inside.size, len(between.owner)
    local = np.arange(local_size, dtype=np.int32)[:, None, None]
    part = np.arange(inside.parts, dtype=np.int32)
    # Axes: local rank, edge between nodes, part of the inner pattern.
    chunk = ((local - root) % local_size * inside.parts + part) * width + between.chunk[:, None]
    shared = between.group[:, None]
    group = np.where(shared >= 0, shared * local_size + local, -1)
    src, dst = (end[:, None] * local_size + local for end in (between.src, between.dst))
    return flat_columns(between.step[:, None] + start, src, dst, chunk, between.channel[:, None] + 1, group)


def _edges_inside_nodes(between: Pattern, inside: Pattern, root: int, start: int, lanes: int) -> list[Ints]:
    """Return the edges inside nodes: local ranks exchange the chunks that came to them."""
    local_size, width = inside.size, len(between.owner)
    node = np.arange(between.size, dtype=np.int32)[:, None, None]
    piece = np.arange(width, dtype=np.int32)
    part, owner = np.divmod(inside.chunk, np.int32(local_size))
    chunk = ((owner - root) % local_size * inside.parts + part)[:, None] * width + piece
    shared = inside.group[:, None]
    # Pipelined, the phases share steps, so they share no groups.
    above = (int(between.group.max(initial=-1)) + 1) * local_size
    group = np.where(shared >= 0, above + shared * between.size + node, -1)
    src, dst = (node * local_size + end[:, None] for end in (inside.src, inside.dst))
    return flat_columns(inside.step[:, None] + start, src, dst, chunk, inside.channel[:, None] + lanes, group)
