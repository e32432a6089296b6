"""Broadcasts as a scatter and then an all-gather, on one level or on two, so that every link carries a share.

On one level this is van de Geijn's broadcast. On two levels, the root's node scatters, every rank of it broadcasts its
chunks to the same local rank of all nodes, and every node does an all-gather. Backwards it is a reduce: every node does
a reduce-scatter, the chunks are reduced between nodes, and the root's node gathers.

The root's data is cut into `local_size * inside.parts * width` chunks, where `width` is the number of chunks of the
pattern between nodes. Chunks are ordered by local rank, counted from the root on, then by part, then by chunk of the
pattern between nodes (piece): `(((local_rank - root_place) % local_size) * inside.parts + part) * width + piece`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...errors import ScheduleError
from ..hazards import cells_in_ranges
from ..pattern import Ints, Pattern, edge_pattern, flatten_columns
from .along_rings import Rings, ring_scatter
from .tree import binomial_subtrees

SCATTERS = ("binomial", "mesh", "multi_ring")
"""Algorithms of the scatter in the root's node."""


def scatter_all_gather(root: int, gather: Pattern, *, scatter: str = "binomial", rings: Rings | None = None) -> Pattern:
    """Return a broadcast that scatters the root's chunks, then spreads them by an all-gather.

    Cost: ceil(log2(size)) steps ("binomial"), 1 step ("mesh") or those along the longest way ("multi_ring"), then the
    steps of `gather`; n (size - 1) / size bytes sent by the root, and at most as many again by each rank. Source:
    Barnett and others, "Interprocessor collective communication library", 1994.

    Args:
        root: Rank that has the data.
        gather: Pattern of an all-gather, in which every rank owns chunks.
        scatter: "binomial", "mesh" or "multi_ring".
        rings: Rings of "multi_ring": sequences of devices, which are sequences of ranks; one ring in both directions by
            default.

    Raises:
        ScheduleError: `scatter` is none of these names.
    """
    # A single node has no edges between nodes.
    alone = edge_pattern(1, np.zeros(1, np.int32), *(np.empty(0, np.int32),) * 4)
    return two_level_broadcast(root, alone, gather, scatter=scatter, rings=rings)


def two_level_broadcast(
    root: int, between: Pattern, inside: Pattern, *, scatter: str = "binomial", rings: Rings | None = None
) -> Pattern:
    """Return a broadcast on two levels: scatter in the root's node, broadcasts between nodes, all-gather in each node.

    Cost: the sum of the steps; each wire between nodes carries 1 / local_size of the bytes of a flat algorithm.

    Args:
        root: Rank that has the data; ranks are numbered node by node.
        between: Pattern over nodes, in which the root's node owns everything.
        inside: Pattern over the ranks of one node, in which each rank owns chunks.
        scatter: "binomial", "mesh" or "multi_ring".
        rings: Rings of one node for "multi_ring"; one ring in both directions by default.

    Raises:
        ScheduleError: `scatter` is none of these names.
    """
    if scatter not in SCATTERS:
        raise ScheduleError(f"scatter: expected one of {', '.join(SCATTERS)}, got {scatter!r}")
    backward = _broadcast_one_direction(root, between.backward, inside.backward, scatter, rings)
    return replace(_broadcast_one_direction(root, between, inside, scatter, rings), mate=backward)


def scatter_steps(size: int, scatter: str, root: int = 0, rings: Rings | None = None) -> int:
    """Return the number of steps of the scatter in the root's node.

    Args:
        size: Ranks of the node.
        scatter: One of `SCATTERS`.
        root: Local rank of the root.
        rings: Rings of "multi_ring"; None: the default of `ring_scatter`.
    """
    if scatter == "multi_ring":
        return ring_scatter(size, root, rings).steps
    return (size - 1).bit_length() if scatter == "binomial" else min(size - 1, 1)


def _broadcast_one_direction(
    root: int, between: Pattern, inside: Pattern, scatter: str, rings: Rings | None
) -> Pattern:
    """Return the pattern of one direction of `two_level_broadcast`, which has the arguments; `mate` is not set."""
    nodes, local_size = between.size, inside.size
    root_node, root_place = divmod(root, local_size)
    size, chunks_per_rank = nodes * local_size, inside.parts * len(between.owner)
    owner = np.full(local_size * chunks_per_rank, root, np.int32)
    # The scatter has channel 0, the edges between nodes the following channels, the all-gather the rest.
    middle_step = scatter_steps(local_size, scatter, root_place, rings)
    last_channel = int(between.channel.max(initial=0)) + 2
    first = _edges_in_root_node(root_node, root_place, local_size, chunks_per_rank, scatter, rings)
    middle = _edges_between_nodes(between, inside, root_place, middle_step)
    last_step = middle_step + (between.steps if nodes > 1 else 0)
    last = _edges_inside_nodes(between, inside, root_place, last_step, last_channel)
    # The root, and ranks that passed a chunk on during the scatter, have the chunk already: leave out the edges of the
    # all-gather that would send it to them again.
    has = np.zeros((size, len(owner)), np.bool_)
    _, _, first_dst, first_chunk, *_ = first
    _, _, last_dst, last_chunk, *_ = last
    has[root] = has[first_dst, first_chunk] = True
    needed = ~has[last_dst, last_chunk]
    columns = [np.concatenate([*three]) for three in zip(first, middle, [c[needed] for c in last], strict=True)]
    step, src, dst, chunk, channel, group = columns
    return edge_pattern(size, owner, step, src, dst, chunk, channel=channel, group=group)


def _edges_in_root_node(
    root_node: int, root_place: int, local_size: int, chunks_per_rank: int, scatter: str, rings: Rings | None
) -> list[Ints]:
    """Return the edges of the scatter inside the root's node; columns as in `_edges_between_nodes`.

    The scatter brings `chunks_per_rank` chunks to each rank. `rings` are those of "multi_ring"; None: its default.
    """
    # Edges between local ranks counted from the root on: `parent` sends the chunks of `count` ranks to `child`, the
    # first of them for rank `block`.
    if scatter == "binomial":
        step, parent, child, count = binomial_subtrees(local_size)
        block = child
    elif scatter == "mesh":
        block = child = np.arange(1, local_size, dtype=np.int32)
        step, parent, count = 0 * child, 0 * child, np.ones_like(child)
    else:
        out = ring_scatter(local_size, root_place, rings)
        parent, child, block = ((rank - root_place) % local_size for rank in (out.src, out.dst, out.block))
        step, count = out.step, np.ones_like(child)
    # An edge for each chunk; `row` is the index of the message that carries it.
    chunk, row = cells_in_ranges(block * chunks_per_rank, count * chunks_per_rank)

    def to_group_rank(from_root: Ints) -> Ints:
        """Return group ranks of local ranks that are counted from the root on."""
        return root_node * local_size + (from_root + root_place) % local_size

    return flatten_columns(step[row], to_group_rank(parent[row]), to_group_rank(child[row]), chunk, 0, -1)


def _edges_between_nodes(between: Pattern, inside: Pattern, root: int, first_step: int) -> list[Ints]:
    """Return the edges between nodes: a copy of `between` for every local rank, for the chunks that it got.

    Columns are step, src, dst, chunk, channel and group; for the numbers of chunks, see the module's docstring. `root`
    is the local rank of the root.
    """
    local_size, width = inside.size, len(between.owner)
    local = np.arange(local_size, dtype=np.int32)[:, None, None]
    part = np.arange(inside.parts, dtype=np.int32)
    # Axes: local rank, edge between nodes, part of the inner pattern.
    chunk = ((local - root) % local_size * inside.parts + part) * width + between.chunk[:, None]
    shared = between.group[:, None]
    group = np.where(shared >= 0, shared * local_size + local, -1)
    src, dst = (end[:, None] * local_size + local for end in (between.src, between.dst))
    return flatten_columns(between.step[:, None] + first_step, src, dst, chunk, between.channel[:, None] + 1, group)


def _edges_inside_nodes(
    between: Pattern, inside: Pattern, root: int, first_step: int, first_channel: int
) -> list[Ints]:
    """Return the edges of the all-gather inside nodes: a copy of `inside` for every node.

    Columns as in `_edges_between_nodes`. `root` is the local rank of the root; channels begin at `first_channel`.
    """
    local_size, width = inside.size, len(between.owner)
    node = np.arange(between.size, dtype=np.int32)[:, None, None]
    piece = np.arange(width, dtype=np.int32)
    # Chunk `part * local_size + owner` of `inside` is part `part` of the data of local rank `owner`.
    part, owner = np.divmod(inside.chunk, np.int32(local_size))
    chunk = ((owner - root) % local_size * inside.parts + part)[:, None] * width + piece
    shared = inside.group[:, None]
    # In a pipeline two phases share a step, so these groups must differ from the groups between nodes, of which there
    # are `local_size` for each group of `between`. Each node has groups of its own.
    above = (int(between.group.max(initial=-1)) + 1) * local_size
    group = np.where(shared >= 0, above + shared * between.size + node, -1)
    src, dst = (node * local_size + end[:, None] for end in (inside.src, inside.dst))
    step, channel = inside.step[:, None] + first_step, inside.channel[:, None] + first_channel
    return flatten_columns(step, src, dst, chunk, channel, group)
