"""Patterns of spreading chunks: one description from which five collectives are made.

A pattern has a spanning tree for every chunk, rooted at the chunk's owner, with times on the edges. Read forwards, it
is an all-gather, or a broadcast when one rank owns everything. Read backwards, with edges reversed and MOVE replaced by
ADD, it is a reduce-scatter or a reduce: a rank passes its partial sum on once the sums of all its children have
arrived. An all-reduce is the backward reading followed by the forward reading. A fan-out, read backwards, is a fan-in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .schedule import Buffer, Schedule
from .tablewriter import Column, TableWriter, adjacent_runs

Ints: TypeAlias = NDArray[np.signedinteger]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pattern:
    """Edges along which chunks travel: columns with one entry for each transfer of one chunk over one edge."""

    size: int  # Ranks
    # (chunks,) the rank that has each chunk at the start. Where a collective gives every rank its own block, chunk
    # `part * size + rank` is part `part` of the block of `rank`.
    owner: Ints
    step: Ints  # (edges,) time, ascending from 0
    src: Ints  # Rank that passes the chunk on
    dst: Ints  # Rank that receives the chunk, for the first time
    chunk: Ints  # Number of the chunk
    channel: Ints  # FIFO lane
    group: Ints  # Edges with the same number >= 0 are one fan-out, which reads its source once; -1: no fan-out
    steps: int  # Number of steps, at least 1
    # (chunks,) the slot of each chunk in the buffers of an all-reduce; None: the number of the chunk.
    place: Ints | None = None
    # Pattern to read backwards in place of this one, so that both readings send in the same direction of a ring: the
    # pattern of the opposite direction. None: this pattern.
    mate: Pattern | None = None

    @property
    def parts(self) -> int:
        """Chunks that every rank owns, where all own the same number."""
        return len(self.owner) // self.size

    @property
    def backward(self) -> Pattern:
        """Pattern to read backwards: `mate`, or this pattern if it has none."""
        return self.mate or self


def owner_column(size: int, parts: int = 1) -> Ints:
    """Return the owner of each chunk if every rank owns `parts` of them: 0...size-1, `parts` times."""
    return np.tile(np.arange(size, dtype=np.int32), parts)


def flatten_columns(*columns: Ints | int) -> list[Ints]:
    """Broadcast columns against each other, and return them as flat columns of one length."""
    return [column.reshape(-1).astype(np.int32) for column in np.broadcast_arrays(*columns)]


def edge_pattern(
    size: int,
    owner: Ints,
    step: Column,
    src: Column,
    dst: Column,
    chunk: Column,
    *,
    channel: Column = 0,
    group: Column = -1,
) -> Pattern:
    """Make a pattern of edges in any order of steps. The columns from `step` on broadcast against each other.

    Args:
        size: Ranks.
        owner: (chunks,) The rank that has each chunk at the start.
        step: Time of each edge, from 0.
        src: Rank that passes a chunk on.
        dst: Rank that receives the chunk.
        chunk: Number of the chunk.
        channel: FIFO lane.
        group: Number of a fan-out, whose edges read their source once; -1: the edge is in no fan-out.
    """
    columns = np.broadcast_arrays(*(np.asarray(c, np.int32) for c in (step, src, dst, chunk, channel, group)))
    flat = [column.reshape(-1) for column in columns]
    when = flat[0]
    if (when[1:] < when[:-1]).any():
        order = np.argsort(when, kind="stable")
        flat = [column[order] for column in flat]
    when, src, dst, chunk, channel, group = flat
    return Pattern(
        size=size, owner=owner, step=when, src=src, dst=dst, chunk=chunk, channel=channel, group=group,
        steps=int(when[-1]) + 1 if len(when) else 1,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Edges:
    """Edges of a pattern, joined where their slots are adjacent: columns with one entry for each row of the table."""

    step: Ints
    src: Ints
    dst: Ints
    slot: Ints  # first slot
    flag: NDArray[np.bool_]  # argument of `_join_edges`, the same for all edges of a row
    count: Ints | int  # number of slots
    channel: Ints
    group: Ints


def _join_edges(pattern: Pattern, slots: Ints, flag: NDArray[np.bool_]) -> _Edges:
    """Join consecutive edges with the same ends, step, channel and `flag` whose chunks have adjacent `slots`."""
    p = pattern
    if not (p.src[1:] == p.src[:-1]).any():
        return _Edges(p.step, p.src, p.dst, slots, flag, 1, p.channel, p.group)
    first = adjacent_runs(slots, same=(p.src, p.dst, p.step, p.channel, p.group, flag.view(np.int8)))
    count = np.diff(np.append(first, len(slots)))
    step, src, dst, slot = p.step[first], p.src[first], p.dst[first], slots[first]
    return _Edges(step, src, dst, slot, flag[first], count, p.channel[first], p.group[first])


def _add_forward_rows(
    table: TableWriter, pattern: Pattern, slot: Ints, *, start: int, source: Buffer, block_slots: int | None = None
) -> None:
    """Add the forward reading: owners send from `source`, other ranks pass on the chunks in OUT.

    `slot` has the slot of each chunk in OUT. `block_slots` is the length of a block if `source` holds only the owner's
    block; None: `source` is laid out as OUT.
    """
    owner_sends = pattern.owner[pattern.chunk] == pattern.src
    edges = _join_edges(pattern, slot[pattern.chunk], owner_sends)  # `edges.flag`: whether the owner sends
    buffer = np.where(edges.flag, np.uint8(source), np.uint8(Buffer.OUT))
    sslot = edges.slot
    if block_slots is not None:  # `source` begins with the owner's block, OUT with that of rank 0
        sslot = np.where(edges.flag, edges.slot - edges.src * np.int32(block_slots), edges.slot)
    table.add_moves(
        edges.step + np.int32(start), edges.src, edges.dst, (buffer, sslot), (Buffer.OUT, edges.slot),
        count=edges.count, channel=edges.channel, group=edges.group,
    )  # fmt: skip


def _add_backward_rows(table: TableWriter, pattern: Pattern, slot: Ints) -> None:
    """Add the backward reading: leaves send from IN; inner ranks copy IN to SCRATCH, and add to the copy.

    The caller passes `Pattern.backward`. `slot` has the slot of each chunk in IN and SCRATCH.
    """
    slots = slot[pattern.chunk]
    # (ranks, slots): whether a rank adds up this slot, because it owns it or passes it on.
    inner = np.zeros((pattern.size, len(slot)), np.bool_)
    inner[pattern.src, slots] = True
    inner[pattern.owner, slot] = True
    _add_input_copies(table, inner)
    # An edge from `src` to `dst` becomes a message from `dst` to `src`, and the last step becomes the first.
    edges = _join_edges(pattern, slots, inner[pattern.dst, slots])
    source = np.where(edges.flag, np.int8(Buffer.SCRATCH), np.int8(Buffer.IN))
    columns = (edges.step, edges.dst, edges.src, edges.slot, edges.channel, edges.group, source)
    when, src, dst, cell, channel, group, source = _sort_last_step_first(columns)
    count = edges.count if isinstance(edges.count, int) else _sort_last_step_first((edges.step, edges.count))[1]
    step = np.int32(pattern.steps - 1) - when
    table.add_reductions(
        step, src, dst, (source, cell), (Buffer.SCRATCH, cell), count=count, channel=channel, group=group
    )


def _add_input_copies(table: TableWriter, inner: NDArray[np.bool_]) -> None:
    """Add local rows of step 0 that copy slots from IN to SCRATCH, where `inner` (ranks, slots) is true."""
    # With False added on both sides, a run of slots starts where the flag rises, and ends where it falls.
    framed = np.zeros((inner.shape[0], inner.shape[1] + 2), np.int8)
    framed[:, 1:-1] = inner
    change = np.diff(framed, axis=1)
    (rank, first), (_, last) = np.nonzero(change == 1), np.nonzero(change == -1)
    table.add_moves(0, rank, rank, (Buffer.IN, first), (Buffer.SCRATCH, first), count=last - first)


def _sort_last_step_first(columns: Sequence[Ints]) -> list[Ints]:
    """Return columns sorted by descending step, stably. The first column is the step, in ascending order."""
    step = columns[0]
    per_step = int(np.count_nonzero(step == step[0])) if len(step) else 1
    blocks = len(step) // per_step
    if blocks * per_step == len(step) and (step.reshape(blocks, per_step) == step[::per_step, None]).all():
        # Steps of equal length, such as a large ring's, need no sorting and no copy.
        return [column.reshape(blocks, per_step)[::-1] for column in columns]
    order = np.argsort(-step, kind="stable")
    return [column[order] for column in columns]


def _add_final_rows(table: TableWriter, step: int, owner: Ints, slot: Ints, target: Ints) -> None:
    """Add the local rows that finalise sums: owners move chunks from `slot` of SCRATCH to `target` of OUT."""
    order = np.lexsort((slot, owner))
    owner, slot, target = owner[order], slot[order], target[order]
    first = adjacent_runs(slot, target, same=(owner,))
    count = np.diff(np.append(first, len(slot)))
    cells = (Buffer.SCRATCH, slot[first]), (Buffer.OUT, target[first])
    table.add_moves(step, owner[first], owner[first], *cells, count=count)


def _slots_by_rank(pattern: Pattern) -> Ints:
    """Return the slot of each chunk in a buffer of blocks in rank order, each block part after part.

    With 2 ranks and 2 parts, chunks 0 to 3 (part 0 of ranks 0 and 1, then part 1) have slots 0, 2, 1, 3.
    """
    chunk = np.arange(len(pattern.owner), dtype=np.int32)
    return pattern.owner * np.int32(pattern.parts) + chunk // np.int32(pattern.size)


def all_gather(algorithm: str, pattern: Pattern) -> Schedule:
    """Return the all-gather of a pattern in which every rank owns one block: the forward reading."""
    table, k = TableWriter(), pattern.parts
    ranks = np.arange(pattern.size, dtype=np.int32)
    table.add_moves(0, ranks, ranks, (Buffer.IN, 0), (Buffer.OUT, ranks * k), count=k)
    _add_forward_rows(table, pattern, _slots_by_rank(pattern), start=0, source=Buffer.IN, block_slots=k)
    return table.build("all_gather", algorithm, pattern.size, slots_per_block=k)


def broadcast(algorithm: str, pattern: Pattern, root: int) -> Schedule:
    """Return the broadcast of a pattern in which the root owns every chunk: the forward reading."""
    table, k = TableWriter(), len(pattern.owner)
    table.add_moves(0, root, root, (Buffer.IN, 0), (Buffer.OUT, 0), count=k)
    _add_forward_rows(table, pattern, np.arange(k, dtype=np.int32), start=0, source=Buffer.IN)
    return table.build("broadcast", algorithm, pattern.size, slots_per_block=k, root=root)


def reduce_scatter(algorithm: str, pattern: Pattern) -> Schedule:
    """Return the reduce-scatter of a pattern in which every rank owns one block: the backward reading."""
    table, k, slot = TableWriter(), pattern.parts, _slots_by_rank(pattern)
    _add_backward_rows(table, pattern.backward, slot)
    _add_final_rows(table, pattern.steps, pattern.owner, slot, slot % k)
    return table.build("reduce_scatter", algorithm, pattern.size, slots_per_block=k, scratch=pattern.size)


def reduce(algorithm: str, pattern: Pattern, root: int) -> Schedule:
    """Return the reduce of a pattern in which the root owns every chunk: the backward reading."""
    table, k = TableWriter(), len(pattern.owner)
    slot = np.arange(k, dtype=np.int32)
    _add_backward_rows(table, pattern.backward, slot)
    _add_final_rows(table, pattern.steps, pattern.owner, slot, slot)
    return table.build("reduce", algorithm, pattern.size, slots_per_block=k, root=root, scratch=1)


def all_reduce(algorithm: str, pattern: Pattern) -> Schedule:
    """Return the all-reduce of a pattern: its backward reading adds chunks up at their owners, then its forward reading
    spreads the sums.

    A chunk has the same slot in IN, OUT and SCRATCH.
    """
    table, k = TableWriter(), len(pattern.owner)
    slot = np.arange(k, dtype=np.int32) if pattern.place is None else pattern.place
    _add_backward_rows(table, pattern.backward, slot)
    _add_final_rows(table, pattern.steps, pattern.owner, slot, slot)
    _add_forward_rows(table, pattern, slot, start=pattern.steps, source=Buffer.OUT)
    return table.build("all_reduce", algorithm, pattern.size, slots_per_block=k, scratch=1)
