"""Two-level tables of all-to-all, gather and scatter, in which every block has one destination.

Ranks are numbered node by node. A level is a table over the ranks of one node, or over nodes. A block of a level is
wide: it has several parts, one block of the collective for each rank of the other level. Between the levels blocks wait
in SCRATCH. So a few large messages cross between two nodes, over the adapters of all ranks.
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
_Cells: TypeAlias = Callable[[_Column, _Column], _Column]
"""A function (block of a level, part of the block) -> slot of the whole table, for arrays."""
_Homes: TypeAlias = Mapping[Buffer, tuple[Buffer, _Cells]]
"""For a buffer of the level's table: the buffer of the whole table that has its blocks, and their slots there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _WideLevel:
    """One level of a table."""

    table: Schedule  # Table over the ranks of the level
    width: int  # Parts of each block of the level: ranks of the other level
    homes: _Homes  # Positions of the level's blocks in the whole table


def all_to_all(inside: Schedule, between: Schedule) -> Schedule:
    """Return an all-to-all: inside its node, a block goes to the local rank of its destination; then to the node.

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
            # IN of this level is the caller's IN. OUT is the first `size` blocks of SCRATCH, from which the second
            # level reads. SCRATCH comes behind these blocks.
            Buffer.IN: (Buffer.IN, _slots_part_by_part(local_size)),
            Buffer.OUT: (Buffer.SCRATCH, _slots_part_by_part(local_size)),
            Buffer.SCRATCH: (Buffer.SCRATCH, _slots_block_by_block(nodes, size)),
        },
    )
    second = _WideLevel(
        table=between,
        width=local_size,
        homes={
            Buffer.IN: (Buffer.SCRATCH, _slots_block_by_block(local_size, 0)),
            Buffer.OUT: (Buffer.OUT, _slots_block_by_block(local_size, 0)),
            Buffer.SCRATCH: (Buffer.SCRATCH, _slots_block_by_block(local_size, size)),
        },
    )
    table = TableWriter()
    for node in range(nodes):
        _add_level_rows(table, first, node * local_size + np.arange(local_size), 0, 0)
    for local in range(local_size):
        _add_level_rows(table, second, np.arange(nodes) * local_size + local, inside.steps, inside.channels)
    scratch = size + max(inside.blocks[Buffer.SCRATCH] * nodes, between.blocks[Buffer.SCRATCH] * local_size)
    return table.build("all_to_all", "hierarchical", size, scratch=scratch)


def gather(inside: Schedule, between: Schedule) -> Schedule:
    """Return a gather: each rank of the root's node gathers from its local rank in all nodes; then the root gathers.

    Cost: the sum of the steps; n (nodes - 1) / (nodes local_size) bytes into each rank of the root's node, and
    n (local_size - 1) / local_size into the root.

    Args:
        inside: Gather over the ranks of a node, to the local rank of the root.
        between: Gather over nodes, to the root's node.
    """
    local_size, nodes = inside.size, between.size
    first, second = _make_rooted_levels(inside, between, near=Buffer.IN, far=Buffer.OUT)
    table = TableWriter()
    for local in range(local_size):
        _add_level_rows(table, second, np.arange(nodes) * local_size + local, 0, 0)
    _add_level_rows(table, first, between.root * local_size + np.arange(local_size), between.steps, between.channels)
    return _build_two_level_rooted(table, inside, between)


def scatter(inside: Schedule, between: Schedule) -> Schedule:
    """Return a scatter: in the root's node, a block goes to the local rank of its destination; then to the node.

    Cost: as `gather`, in the opposite direction.

    Args:
        inside: Scatter over the ranks of a node, from the local rank of the root.
        between: Scatter over nodes, from the root's node.
    """
    local_size, nodes = inside.size, between.size
    first, second = _make_rooted_levels(inside, between, near=Buffer.OUT, far=Buffer.IN)
    table = TableWriter()
    _add_level_rows(table, first, between.root * local_size + np.arange(local_size), 0, 0)
    for local in range(local_size):
        _add_level_rows(table, second, np.arange(nodes) * local_size + local, inside.steps, inside.channels)
    return _build_two_level_rooted(table, inside, between)


def _make_rooted_levels(
    inside: Schedule, between: Schedule, *, near: Buffer, far: Buffer
) -> tuple[_WideLevel, _WideLevel]:
    """Return the two levels of a gather or scatter: inside the root's node, and between nodes.

    `near` is the buffer that has one block on every rank: IN of a gather, OUT of a scatter. `far` has all, on the root.
    """
    local_size, nodes = inside.size, between.size
    first = _WideLevel(
        table=inside,
        width=nodes,
        homes={
            far: (far, _slots_part_by_part(local_size)),
            near: (Buffer.SCRATCH, _slots_block_by_block(nodes, 0)),
            Buffer.SCRATCH: (Buffer.SCRATCH, _slots_block_by_block(nodes, nodes)),
        },
    )
    second = _WideLevel(
        table=between,
        width=1,
        homes={
            far: (Buffer.SCRATCH, _slots_block_by_block(1, 0)),
            near: (near, _slots_block_by_block(1, 0)),
            Buffer.SCRATCH: (Buffer.SCRATCH, _slots_block_by_block(1, nodes)),
        },
    )
    return first, second


def _build_two_level_rooted(table: TableWriter, inside: Schedule, between: Schedule) -> Schedule:
    """Return the schedule of a gather or scatter on two levels, whose root is rank `inside.root` of the root's node."""
    nodes, size, root = between.size, inside.size * between.size, between.root * inside.size + inside.root
    # a block for each node, and behind them the scratch blocks of the level that needs more
    scratch = nodes + max(inside.blocks[Buffer.SCRATCH] * nodes, between.blocks[Buffer.SCRATCH])
    return table.build(inside.collective, "hierarchical", size, scratch=scratch, root=root)


def _slots_block_by_block(width: int, start: int) -> _Cells:
    """Return the slots of a layout block by block: slot of part p of block b is `start + b * width + p`."""
    return lambda block, part: start + block * width + part


def _slots_part_by_part(local_size: int) -> _Cells:
    """Return the slots of a layout part by part (node by node): slot of part p of block b is `p * local_size + b`."""
    return lambda block, part: part * local_size + block


def _add_level_rows(table: TableWriter, level: _WideLevel, ranks: Ints, step: int, channel: int) -> None:
    """Add the rows of a level, whose rank i is `ranks[i]` of the whole table, from `step` and `channel` on.

    Raises `ScheduleError` if the level's table cuts blocks into slots, which is a bug.
    """
    # A block of the level becomes `width` slots, so it must be a single slot in the level's table.
    if level.table.slots_per_block != 1:
        raise ScheduleError(
            f"{level.table!r}: a level needs blocks of one slot, got {level.table.slots_per_block}: this is a bug in "
            "overlap, please report it"
        )
    rows, part = split_into_slots(level.table), np.arange(level.width, dtype=np.int32)
    # Make `width` rows of each row, one for each part.
    wide = {name: np.repeat(column, level.width) for name, column in rows.items()}
    inner = np.tile(part, len(rows["step"]))
    wide["src"], wide["dst"] = ranks[wide["src"]], ranks[wide["dst"]]
    wide["step"], wide["channel"] = wide["step"] + step, wide["channel"] + channel
    for buffer, slot in (("sbuf", "sslot"), ("dbuf", "dslot")):
        wide[buffer], wide[slot] = _to_table_positions(wide[buffer], wide[slot], inner, level.homes)
    table.extend(join_rows(wide))


def _to_table_positions(buffer: _Column, slot: _Column, part: Ints, homes: _Homes) -> tuple[_Column, _Column]:
    """Translate (buffer, slot) of a level's table to (buffer, slot) of the whole table, row by row.

    A slot of a level is the number of a block. A buffer that is missing in `homes` stays as it is.
    """
    to_buffer, to_slot = buffer.copy(), slot.copy()
    for old, (new, cells) in homes.items():
        here = buffer == old
        to_buffer[here] = new
        to_slot[here] = cells(slot[here], part[here])
    return to_buffer, to_slot
