"""Two-level patterns: inside nodes, and between ranks of the same place in different nodes.

Rank `node * local_size + local_rank`. Going out, chunks first cross to the same place in every node, then spread inside
the nodes; coming back is the reverse. So an all-reduce reduces inside each node, exchanges 1 / local_size of the data
between nodes, and spreads inside again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...errors import ScheduleError
from ..pattern import Ints, Pattern, edge_pattern, flat_columns, owners
from ..schedule import COLUMNS, Buffer, Schedule
from ..slicing import replace_rows
from .torus import squarest


def node_count(size: int, nodes: int | None) -> int:
    """Return the number of nodes, by default the smaller of the two factors of `size` that differ least.

    Raises:
        ScheduleError: If nodes would have different numbers of ranks.
    """
    count = squarest(size)[1] if nodes is None else nodes
    if count < 1 or size % count:
        raise ScheduleError(f"{size} ranks cannot be shared equally by {count} nodes; choose a multiple of {count}")
    return count


def compose(inter: Pattern, intra: Pattern) -> Pattern:
    """Return the pattern over all ranks that runs `inter` between nodes and then `intra` inside them.

    Cost: the sum of the steps; inter moves 1 / local_size of the bytes that a flat algorithm moves between nodes.
    """
    return replace(_compose(inter, intra), mate=_compose(inter.backward, intra.backward))


def _compose(inter: Pattern, intra: Pattern) -> Pattern:
    """Return the pattern of two levels: chunks go between nodes first, then inside every node."""
    nodes, local_size = inter.size, intra.size
    size, parts = nodes * local_size, inter.parts * intra.parts
    lanes = int(inter.channel.max(initial=0)) + 1
    outer, inner = _edges_between_nodes(inter, intra), _edges_inside_nodes(inter, intra, lanes)
    columns = [np.concatenate(pair) for pair in zip(outer, inner, strict=True)]
    step, src, dst, chunk, channel, group = columns
    pattern = edge_pattern(size, owners(size, parts), step, src, dst, chunk, channel=channel, group=group)
    node, local = pattern.owner // local_size, pattern.owner % local_size
    part = np.arange(size * parts, dtype=np.int32) // size
    # Slots contiguous in each message between ranks of a node, and between two nodes.
    place = ((local * parts + part) * nodes + node).astype(np.int32)
    return replace(pattern, steps=inter.steps + intra.steps, place=place)


def _edges_between_nodes(inter: Pattern, intra: Pattern) -> list[Ints]:
    """Return the edges between nodes, for every local rank and every part that the inner level will need."""
    local_size, size = intra.size, inter.size * intra.size
    local = np.arange(local_size, dtype=np.int32)[:, None, None]
    minor = np.arange(intra.parts, dtype=np.int32)[:, None]
    # Axes: local rank, minor part, edge of the outer pattern.
    major, owner = np.divmod(inter.chunk, np.int32(inter.size))
    chunk = (major * intra.parts + minor) * size + owner * local_size + local
    group = np.where(inter.group >= 0, (inter.group * local_size + local) * intra.parts + minor, -1)
    src, dst = inter.src * local_size + local, inter.dst * local_size + local
    return flat_columns(inter.step, src, dst, chunk, inter.channel, group)


def _edges_inside_nodes(inter: Pattern, intra: Pattern, lanes: int) -> list[Ints]:
    """Return the edges inside each node, for the chunks that came from every node."""
    local_size, size = intra.size, inter.size * intra.size
    node = np.arange(inter.size, dtype=np.int32)[:, None, None, None]
    major = np.arange(inter.parts, dtype=np.int32)[:, None]
    origin = np.arange(inter.size, dtype=np.int32)
    # Axes: node, edge of the inner pattern, major part, node of origin.
    minor, owner = np.divmod(intra.chunk[:, None, None], np.int32(local_size))
    chunk = (major * intra.parts + minor) * size + origin * local_size + owner
    shared = intra.group[:, None, None]
    group = np.where(shared >= 0, shared * inter.size + node, -1)
    src, dst = (node * local_size + end[:, None, None] for end in (intra.src, intra.dst))
    step, channel = intra.step[:, None, None] + inter.steps, intra.channel[:, None, None] + lanes
    return flat_columns(step, src, dst, chunk, channel, group)


def with_inner(flat: Schedule, inter: Schedule, local_size: int) -> Schedule:
    """Return an all-reduce on two levels: `inter` runs between nodes, in the middle of `flat` inside each node.

    Args:
        flat: All-reduce of one node; its middle is the step that finalises the sums.
        inter: All-reduce over nodes, of any algorithm: it starts from the first one's SCRATCH instead of from IN.
        local_size: Ranks of a node.
    """
    nodes, k = inter.size, inter.slots_per_block
    sums = (flat.src == flat.dst) & (flat.dbuf == Buffer.OUT)
    middle = int(flat.step[sums][0])
    blocks = []
    for node in range(nodes):
        # A copy of the inner schedule for each node, with room in the middle for the steps of the outer one.
        rows = {name: getattr(flat, name)[~sums] for name in COLUMNS}
        late = rows["step"] >= middle
        lanes = np.where(late, inter.channels + flat.channels, 0)
        moved = {"step": rows["step"] + late * inter.steps, "channel": rows["channel"] + lanes}
        ends = {"src": rows["src"] + node * local_size, "dst": rows["dst"] + node * local_size}
        slots = {name: rows[name] * k for name in ("sslot", "dslot", "count")}
        grouped = {"group": np.where(rows["group"] >= 0, rows["group"] * nodes + node, -1)}
        blocks.append({**rows, **moved, **ends, **slots, **grouped})
    blocks += _inter_node_rows(flat, inter, sums, middle, local_size)
    whole = replace_rows(flat, blocks, slots_per_block=flat.slots_per_block * k)
    scratch = max(flat.blocks[2], inter.blocks[2])
    return replace(whole, size=nodes * local_size, blocks=(1, 1, scratch), algorithm="hierarchical")


def _inter_node_rows(
    flat: Schedule, inter: Schedule, sums: Ints, middle: int, local_size: int
) -> list[dict[str, Ints]]:
    """Return the rows between nodes: one copy for each run of chunks that one rank of a node has summed."""
    k, width = inter.slots_per_block, flat.slots_per_block
    source = inter.sbuf == Buffer.IN
    # Sums are in SCRATCH already, in the slots to which the inter-node schedule would copy its input.
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
