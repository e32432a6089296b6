"""Two-level tables of all-to-all, gather and scatter, in which every block has one destination.

Ranks are numbered node by node. A level is a table over the ranks of one node, or over nodes. Its blocks are wider: one
holds a block for each rank of the other level. Between the levels they wait in SCRATCH. So a few large messages cross
between two nodes, over the adapters of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...errors import ScheduleError
from ..pattern import Ints
from ..schedule import Buffer, Schedule
from ..slicing import join_rows, split_into_slots
from ..tablewriter import TableWriter

_Column: TypeAlias = NDArray[np.integer]
# Slot of a level's block (number, part of it).
_Cells: TypeAlias = Callable[[_Column, _Column], _Column]
_Homes: TypeAlias = Mapping[Buffer, tuple[Buffer, _Cells]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _WideLevel:
    """One level: its table, the width of its blocks, and their slots."""

    table: Schedule
    width: int
    homes: _Homes


def all_to_all(inside: Schedule, between: Schedule) -> Schedule:
    """Send blocks to the local rank of their destination inside each node; exchange between equal local ranks.

    Cost: the sum of the steps; n (local_size - 1) / local_size bytes inside, n (nodes - 1) / nodes between nodes.

    Args:
        inside: All-to-all over the ranks of a node.
        between: All-to-all over nodes.
    """
    local_size, nodes = inside.size, between.size
    size = local_size * nodes
    first = _WideLevel(
        table=inside,
        width=nodes,
        homes={
            Buffer.IN: (Buffer.IN, _node_by_node(local_size)),
            Buffer.OUT: (Buffer.SCRATCH, _node_by_node(local_size)),
            Buffer.SCRATCH: (Buffer.SCRATCH, _side_by_side(nodes, size)),
        },
    )
    second = _WideLevel(
        table=between,
        width=local_size,
        homes={
            Buffer.IN: (Buffer.SCRATCH, _side_by_side(local_size, 0)),
            Buffer.OUT: (Buffer.OUT, _side_by_side(local_size, 0)),
            Buffer.SCRATCH: (Buffer.SCRATCH, _side_by_side(local_size, size)),
        },
    )
    table = TableWriter()
    for node in range(nodes):
        _add_level(table, first, node * local_size + np.arange(local_size), 0, 0)
    for local in range(local_size):
        _add_level(table, second, np.arange(nodes) * local_size + local, inside.steps, inside.channels)
    scratch = size + max(inside.blocks[2] * nodes, between.blocks[2] * local_size)
    return table.build("all_to_all", "hierarchical", size, scratch=scratch)


def gather(inside: Schedule, between: Schedule) -> Schedule:
    """Gather blocks into the root's node, between equal local ranks; gather them there.

    Cost: the sum of the steps; n (nodes - 1) / (nodes local_size) bytes into each rank of the root's node, and
    n (local_size - 1) / local_size into the root.

    Args:
        inside: Gather over the ranks of a node, to the root's place.
        between: Gather over nodes, to the root's.
    """
    local_size, nodes = inside.size, between.size
    first, second = _rooted_levels(inside, between, near=Buffer.IN, far=Buffer.OUT)
    table = TableWriter()
    for local in range(local_size):
        _add_level(table, second, np.arange(nodes) * local_size + local, 0, 0)
    _add_level(table, first, between.root * local_size + np.arange(local_size), between.steps, between.channels)
    return _build_rooted(table, inside, between)


def scatter(inside: Schedule, between: Schedule) -> Schedule:
    """Scatter blocks in the root's node by the local rank of their destination; send them on between equal local ranks.

    Cost: as `gather`, the other way round.

    Args:
        inside: Scatter over the ranks of a node, from the root's place.
        between: Scatter over nodes, from the root's.
    """
    local_size, nodes = inside.size, between.size
    first, second = _rooted_levels(inside, between, near=Buffer.OUT, far=Buffer.IN)
    table = TableWriter()
    _add_level(table, first, between.root * local_size + np.arange(local_size), 0, 0)
    for local in range(local_size):
        _add_level(table, second, np.arange(nodes) * local_size + local, inside.steps, inside.channels)
    return _build_rooted(table, inside, between)


def _rooted_levels(inside: Schedule, between: Schedule, *, near: Buffer, far: Buffer) -> tuple[_WideLevel, _WideLevel]:
    """Return the levels of a gather or scatter: `near` has one block on every rank, `far` has all on the root."""
    local_size, nodes = inside.size, between.size
    first = _WideLevel(
        table=inside,
        width=nodes,
        homes={
            far: (far, _node_by_node(local_size)),
            near: (Buffer.SCRATCH, _side_by_side(nodes, 0)),
            Buffer.SCRATCH: (Buffer.SCRATCH, _side_by_side(nodes, nodes)),
        },
    )
    second = _WideLevel(
        table=between,
        width=1,
        homes={
            far: (Buffer.SCRATCH, _side_by_side(1, 0)),
            near: (near, _side_by_side(1, 0)),
            Buffer.SCRATCH: (Buffer.SCRATCH, _side_by_side(1, nodes)),
        },
    )
    return first, second


def _build_rooted(table: TableWriter, inside: Schedule, between: Schedule) -> Schedule:
    nodes, size, root = between.size, inside.size * between.size, between.root * inside.size + inside.root
    scratch = nodes + max(inside.blocks[2] * nodes, between.blocks[2])
    return table.build(inside.collective, "hierarchical", size, scratch=scratch, root=root)


def _side_by_side(width: int, start: int) -> _Cells:
    """Return a function of the slots of blocks, each with its parts next to each other."""
    return lambda block, part: start + block * width + part


def _node_by_node(local_size: int) -> _Cells:
    """Return a function of the slots of blocks, with the blocks of a part next to each other."""
    return lambda block, part: part * local_size + block


def _add_level(table: TableWriter, level: _WideLevel, ranks: Ints, step: int, channel: int) -> None:
    """Add the rows of a level between the given ranks; its steps and channels count from `step` and `channel`."""
    if level.table.slots_per_block != 1:
        raise ScheduleError(
            f"{level.table!r}: a level needs blocks of one slot, got {level.table.slots_per_block}: this is a bug in "
            "overlap, please report it"
        )
    rows, part = split_into_slots(level.table), np.arange(level.width, dtype=np.int32)
    # Each row moves `width` parts: repeat it, and number the parts.
    wide = {name: np.repeat(column, level.width) for name, column in rows.items()}
    inner = np.tile(part, len(rows["step"]))
    wide["src"], wide["dst"] = ranks[wide["src"]], ranks[wide["dst"]]
    wide["step"], wide["channel"] = wide["step"] + step, wide["channel"] + channel
    for buffer, slot in (("sbuf", "sslot"), ("dbuf", "dslot")):
        wide[buffer], wide[slot] = _move_cells(wide[buffer], wide[slot], inner, level.homes)
    table.extend(join_rows(wide))


def _move_cells(buffer: _Column, slot: _Column, part: Ints, homes: _Homes) -> tuple[_Column, _Column]:
    """Return buffers and slots after a move of some buffers to others, by functions of slot and part."""
    to_buffer, to_slot = buffer.copy(), slot.copy()
    for old, (new, cells) in homes.items():
        here = buffer == old
        to_buffer[here] = new
        to_slot[here] = cells(slot[here], part[here])
    return to_buffer, to_slot
