"""Programs of single ranks: the queues of steps that the rank's CC-core works through.

Every channel has a queue of sends (number 2c) and one of receives and local rows (2c + 1). A queue is in table order,
so messages of one (src, dst, channel) match first in, first out, and the table itself is an order in which everything
can be carried out: no queue and no wait points forwards in it. That is why programs of a proved schedule cannot
deadlock, even when a send completes only once the receiver has taken the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..threads import paused_garbage_collector
from .fusion import Fused, find_fusable_copies
from .hazards import Access, cell_numbers, find_waits
from .pattern import Ints
from .schedule import Buffer, Op, Schedule


class StepKind(Enum):
    """Direction of a step: to a peer, from a peer, or local."""

    SEND = "send"
    RECV = "recv"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Extent:
    """Contiguous slots of a buffer."""

    buffer: Buffer
    slot: int  # First slot
    count: int  # Number of slots


class Step(NamedTuple):
    """One action of a rank."""

    kind: StepKind  # SEND, RECV or LOCAL
    op: Op  # Overwrite or reduce, at the receiving end
    peer: int  # Group rank of the other end; the own rank in a local step
    channel: int  # FIFO lane
    src: Extent  # Extent read, at the sending end (so that a receiver knows its dtype)
    dst: Extent  # Extent written, at the receiving end
    # First operand of a RECV or LOCAL with ADD: `dst := op(base, incoming)`, after a local copy of `base` into `dst`
    # was fused away. None: the operand is `dst` itself.
    base: Extent | None
    # (queue, n) pairs: the first n steps of that queue of this rank must have finished before this one starts.
    waits: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Program:
    """All steps of one rank."""

    rank: int  # Group rank
    # Queues of channel c: sends in `queues[2 * c]`, receives and local steps in `queues[2 * c + 1]`. Each runs in
    # order, independently of the others but for `Step.waits`.
    queues: tuple[tuple[Step, ...], ...]


def project(schedule: Schedule, rank: int) -> Program:
    """Return the program of one rank. Cost: O(rows) to find its rows, then only those."""
    return project_all(schedule, [rank])[0]


@paused_garbage_collector  # making many objects takes half the time then
def project_all(schedule: Schedule, ranks: Sequence[int] | None = None) -> list[Program]:
    """Return the programs of several ranks (by default all), sharing the work.

    Args:
        schedule: A proved schedule.
        ranks: Group ranks; the result is in their order.
    """
    selected = list(range(schedule.size)) if ranks is None else list(ranks)
    step_table = _make_step_table(schedule, selected)
    lanes = 2 * schedule.channels
    queues: list[list[tuple[Step, ...]]] = [[()] * lanes for _ in range(schedule.size)]
    steps = _make_steps(schedule, step_table, lanes)
    # Steps are sorted by queue: each range between two bounds is one queue.
    bounds = [0, *(np.flatnonzero(np.diff(step_table.queue)) + 1).tolist(), len(steps)]
    for start, stop in pairwise(bounds):
        if stop > start:
            rank, lane = divmod(int(step_table.queue[start]), lanes)
            queues[rank][lane] = tuple(steps[start:stop])
    return [Program(rank, tuple(queues[rank])) for rank in selected]


@dataclass(frozen=True, slots=True)
class _StepTable:
    """Steps as columns, one entry for each step, sorted by queue and then by row."""

    row: Ints  # Row of the table
    kind: Ints  # Index into `_KINDS`
    rank: Ints  # Rank that takes the step
    queue: Ints  # Number of the queue among those of all ranks: rank * queues per rank + queue of the rank
    fused: Fused  # Local copies that are left out, and the ADDs that read the source of such a copy


_KINDS = (StepKind.SEND, StepKind.RECV, StepKind.LOCAL)
_SEND, _RECV, _LOCAL = range(3)


def _make_step_table(schedule: Schedule, ranks: Sequence[int]) -> _StepTable:
    """Return the steps of these ranks: sends, receives and local moves, ordered by queue and row."""
    selected = np.zeros(schedule.size, np.bool_)
    selected[list(ranks)] = True
    fused = find_fusable_copies(schedule, selected)
    local = schedule.src == schedule.dst
    send = np.flatnonzero(selected[schedule.src] & ~local)
    recv = np.flatnonzero(selected[schedule.dst] & ~fused.dropped)
    row = np.concatenate([send, recv])
    kind = np.concatenate([np.full(len(send), _SEND), np.where(local[recv], _LOCAL, _RECV)])
    rank = np.concatenate([schedule.src[send], schedule.dst[recv]]).astype(np.int64)
    # Each rank has two queues for each channel: one of sends, one of receives and local moves.
    queue = rank * (2 * schedule.channels) + 2 * schedule.channel[row].astype(np.int64) + (kind != _SEND)
    order = np.lexsort((row, queue))
    return _StepTable(row[order], kind[order], rank[order], queue[order], fused)


def _list_accesses(schedule: Schedule, step_table: _StepTable) -> list[Access]:
    """Return all accesses to memory: sends and local steps read a source, receives and local steps write a target.

    An ADD whose first operand is another extent than its target (`Fused.base_buffer`) reads that extent, too.
    """
    row = step_table.row
    reads, writes = np.flatnonzero(step_table.kind != _RECV), np.flatnonzero(step_table.kind != _SEND)
    based = writes[step_table.fused.base_buffer[row[writes]] >= 0]
    base = step_table.fused.base_buffer[row[based]], step_table.fused.base_slot[row[based]]
    copies = _copies_onto_itself(schedule, step_table, writes)
    # Rows: steps, buffer and first slot of each access; whether these are writes; which of them copy onto themselves.
    sides = (
        (reads, schedule.sbuf[row[reads]], schedule.sslot[row[reads]], False, None),
        (based, *base, False, None),
        (writes, schedule.dbuf[row[writes]], schedule.dslot[row[writes]], True, copies),
    )
    return [
        Access(task, step_table.rank[task], buffer, slot, schedule.count[row[task]], write, copied)
        for task, buffer, slot, write, copied in sides
    ]


def _copies_onto_itself(schedule: Schedule, step_table: _StepTable, steps: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Return whether each of the `steps` is a local copy of a cell onto itself if buffers share memory."""
    row, rank = step_table.row[steps], step_table.rank[steps]
    source = cell_numbers(schedule, rank, schedule.sbuf[row], schedule.sslot[row], shared=True)
    target = cell_numbers(schedule, rank, schedule.dbuf[row], schedule.dslot[row], shared=True)
    copies: NDArray[np.bool_] = (step_table.kind[steps] == _LOCAL) & (schedule.op[row] == Op.MOVE) & (source == target)
    return copies


def _make_steps(schedule: Schedule, step_table: _StepTable, lanes: int) -> list[Step]:
    """Return the steps of the table, in their order; `lanes` is the number of queues of each rank."""
    row, kind = step_table.row, step_table.kind
    waits = find_waits(schedule, row, step_table.queue, lanes, _list_accesses(schedule, step_table))
    count = schedule.count[row]
    peer = np.where(kind == _SEND, schedule.dst[row], schedule.src[row])
    base = _shared_extents(step_table.fused.base_buffer[row], step_table.fused.base_slot[row], count)
    source = _shared_extents(schedule.sbuf[row], schedule.sslot[row], count)
    target = _shared_extents(schedule.dbuf[row], schedule.dslot[row], count)
    # The base matters at the receiving end only.
    base = [None if k == _SEND else extent for k, extent in zip(kind.tolist(), base, strict=True)]
    kinds, ops = [_KINDS[k] for k in kind.tolist()], [(Op.MOVE, Op.ADD)[o] for o in schedule.op[row].tolist()]
    ends = zip(source, target, base, strict=True)
    return [
        Step(k, o, p, c, s, d, b, w)
        for k, o, p, c, (s, d, b), w in zip(
            kinds, ops, peer.tolist(), schedule.channel[row].tolist(), ends, waits, strict=True
        )
    ]


def _shared_extents(buffer: NDArray[np.integer], slot: Ints, count: Ints) -> list[Extent | None]:
    """Return the extents of these columns, equal ones as one object; None where the buffer is -1."""
    extent_of: dict[tuple[int, int, int], Extent | None] = {}
    extents = []
    for key in zip(buffer.tolist(), slot.tolist(), count.tolist(), strict=True):
        if key not in extent_of:
            extent_of[key] = Extent(Buffer(key[0]), key[1], key[2]) if key[0] >= 0 else None
        extents.append(extent_of[key])
    return extents
