"""Two-level patterns: one inside nodes, and one between ranks of the same local rank in different nodes.

A rank has the number `node * local_size + local_rank`. Read forwards, chunks first cross to the same local rank of
every node, then spread inside the nodes; backwards is the reverse. So an all-reduce reduces inside each node, exchanges
1 / local_size of the data between nodes, and spreads inside again.

Both patterns may cut the data of a rank into parts; together they cut it into `inter.parts * intra.parts` parts. Chunk
`(outer_part * intra.parts + inner_part) * size + rank` is the part (outer_part, inner_part) of the data of `rank`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...errors import ScheduleError
from ..pattern import Ints, Pattern, edge_pattern, flatten_columns, owner_column
from ..schedule import COLUMNS, Buffer, Schedule
from ..slicing import replace_rows
from .torus import squarest_sides


def node_count(size: int, nodes: int | None) -> int:
    """Return `nodes`, or a default: the smaller of the two factors of `size` that differ least (3 of 12 = 4 * 3).

    Raises:
        ScheduleError: Nodes would have different numbers of ranks.
    """
    count = squarest_sides(size)[1] if nodes is None else nodes
    if count < 1 or size % count:
        raise ScheduleError(f"{size} ranks cannot be shared equally by {count} nodes; choose a multiple of {count}")
    return count


def compose_two_levels(inter: Pattern, intra: Pattern) -> Pattern:
    """Return the pattern over all ranks that runs `inter` between nodes and then `intra` inside them.

    Cost: the sum of the steps; inter moves 1 / local_size of the bytes that a flat algorithm moves between nodes.
    """
    return replace(_compose_one_direction(inter, intra), mate=_compose_one_direction(inter.backward, intra.backward))


def _compose_one_direction(inter: Pattern, intra: Pattern) -> Pattern:
    """Return the pattern of two levels: chunks go between nodes first, then inside every node."""
    nodes, local_size = inter.size, intra.size
    size, parts = nodes * local_size, inter.parts * intra.parts
    first_channel = int(inter.channel.max(initial=0)) + 1
    outer, inner = _edges_between_nodes(inter, intra), _edges_inside_nodes(inter, intra, first_channel)
    columns = [np.concatenate(pair) for pair in zip(outer, inner, strict=True)]
    step, src, dst, chunk, channel, group = columns
    pattern = edge_pattern(size, owner_column(size, parts), step, src, dst, chunk, channel=channel, group=group)
    node, local = pattern.owner // local_size, pattern.owner % local_size
    part = np.arange(size * parts, dtype=np.int32) // size
    # Order of slots: local rank, part, node. So the chunks of a message inside a node have adjacent slots, and so do
    # those of a message between two nodes.
    place = ((local * parts + part) * nodes + node).astype(np.int32)
    return replace(pattern, steps=inter.steps + intra.steps, place=place)


def _edges_between_nodes(inter: Pattern, intra: Pattern) -> list[Ints]:
    """Return the edges between nodes: a copy of the edges of `inter` for every local rank and every part of `intra`.

    Columns are step, src, dst, chunk, channel and group; for the numbers of chunks, see the module's docstring.
    """
    local_size, size = intra.size, inter.size * intra.size
    local = np.arange(local_size, dtype=np.int32)[:, None, None]
    inner_part = np.arange(intra.parts, dtype=np.int32)[:, None]
    # Axes of the arrays: local rank, inner part, edge of `inter`.
    outer_part, owner_node = np.divmod(inter.chunk, np.int32(inter.size))
    chunk = (outer_part * intra.parts + inner_part) * size + owner_node * local_size + local
    # Each copy of the edges has groups of its own.
    group = np.where(inter.group >= 0, (inter.group * local_size + local) * intra.parts + inner_part, -1)
    src, dst = inter.src * local_size + local, inter.dst * local_size + local
    return flatten_columns(inter.step, src, dst, chunk, inter.channel, group)


def _edges_inside_nodes(inter: Pattern, intra: Pattern, first_channel: int) -> list[Ints]:
    """Return the edges inside nodes: each node spreads the chunks that its ranks have from every node.

    Columns: see `_edges_between_nodes`, whose edges use the channels below `first_channel`.
    """
    local_size, size = intra.size, inter.size * intra.size
    node = np.arange(inter.size, dtype=np.int32)[:, None, None, None]
    outer_part = np.arange(inter.parts, dtype=np.int32)[:, None]
    owner_node = np.arange(inter.size, dtype=np.int32)
    # Axes of the arrays: node, edge of `intra`, outer part, node of the chunk's owner.
    inner_part, owner_local = np.divmod(intra.chunk[:, None, None], np.int32(local_size))
    chunk = (outer_part * intra.parts + inner_part) * size + owner_node * local_size + owner_local
    # Each node has groups of its own.
    shared = intra.group[:, None, None]
    group = np.where(shared >= 0, shared * inter.size + node, -1)
    src, dst = (node * local_size + end[:, None, None] for end in (intra.src, intra.dst))
    step, channel = intra.step[:, None, None] + inter.steps, intra.channel[:, None, None] + first_channel
    return flatten_columns(step, src, dst, chunk, channel, group)


def insert_inter_node_schedule(flat: Schedule, inter: Schedule, local_size: int) -> Schedule:
    """Return an all-reduce on two levels: `inter` runs between nodes, in the middle of `flat` inside each node.

    Args:
        flat: All-reduce of one node. Its middle is the step that finalises the sums; `inter` replaces these rows.
        inter: All-reduce over nodes, of any algorithm. It reads the sums of `flat` in SCRATCH where it would read IN.
        local_size: Ranks of a node.
    """
    nodes, k = inter.size, inter.slots_per_block
    sums = (flat.src == flat.dst) & (flat.dbuf == Buffer.OUT)
    middle = int(flat.step[sums][0])
    blocks = []
    for node in range(nodes):
        # A copy of `flat` for each node, with a gap in the middle for the steps of `inter`.
        rows = {name: getattr(flat, name)[~sums] for name in COLUMNS}
        # Steps from the middle on come after the steps between nodes.
        late = rows["step"] >= middle
        lanes = np.where(late, inter.channels + flat.channels, 0)
        moved = {"step": rows["step"] + late * inter.steps, "channel": rows["channel"] + lanes}
        ends = {"src": rows["src"] + node * local_size, "dst": rows["dst"] + node * local_size}
        slots = {name: rows[name] * k for name in ("sslot", "dslot", "count")}
        grouped = {"group": np.where(rows["group"] >= 0, rows["group"] * nodes + node, -1)}
        blocks.append({**rows, **moved, **ends, **slots, **grouped})
    blocks += _inter_node_rows(flat, inter, sums, middle, local_size)
    whole = replace_rows(flat, blocks, slots_per_block=flat.slots_per_block * k)
    scratch = max(flat.blocks[Buffer.SCRATCH], inter.blocks[Buffer.SCRATCH])
    return replace(whole, size=nodes * local_size, blocks=(1, 1, scratch), algorithm="hierarchical")


def _inter_node_rows(
    flat: Schedule, inter: Schedule, sums: Ints, middle: int, local_size: int
) -> list[dict[str, Ints]]:
    """Return the rows between nodes, as columns by name: a copy of `inter` for each chunk that a rank has summed.

    `sums` says which rows of `flat` finalise sums; the new rows begin at step `middle`.
    """
    k, width = inter.slots_per_block, flat.slots_per_block
    source = inter.sbuf == Buffer.IN
    # Leave out the rows that copy IN to SCRATCH: the sums are there already.
    needless = source & (inter.src == inter.dst) & (inter.dbuf == Buffer.SCRATCH) & (inter.dslot == inter.sslot)
    rows = {name: getattr(inter, name)[~needless] for name in COLUMNS}
    blocks = []
    runs = (flat.src[sums].tolist(), flat.sslot[sums].tolist(), flat.count[sums].tolist())
    for local, first, count in zip(*runs, strict=True):
        for chunk in range(first, first + count):
            slots = {n: (rows[n] // k * width + chunk) * k + rows[n] % k for n in ("sslot", "dslot")}
            ends = {n: rows[n] * local_size + local for n in ("src", "dst")}
            buffers = {"sbuf": np.where(rows["sbuf"] == Buffer.IN, Buffer.SCRATCH, rows["sbuf"])}
            times = {"step": rows["step"] + middle, "channel": rows["channel"] + flat.channels}
            grouped = {"group": np.where(rows["group"] >= 0, rows["group"] * width + chunk, -1)}
            blocks.append({**rows, **slots, **ends, **buffers, **times, **grouped})
    return blocks
