"""Schedules: one collective as a table of transfers between all ranks, independent of any byte size.

**Buffers.** Every rank has three: IN (the caller's input, never written), OUT (the result) and SCRATCH. A buffer is a
row of blocks of B elements, and each block is cut in `k = slots_per_block` slots, so that one table serves every size.
The unit of a block depends on the collective; `block_counts` returns the number of blocks of IN and OUT. For blocks
that differ in size, `uneven` gives each a place of its own in SCRATCH; the table stays one for every size.

**Values.** In collectives that reduce, SCRATCH holds partial results in the accumulator's dtype, and a local MOVE from
SCRATCH to OUT *finalises* them: it narrows the dtype, and divides for a mean. Every other MOVE copies; from IN to
SCRATCH it widens. ADD combines into SCRATCH only, the lower rank's operand first: `op(incoming, mine)` if src < dst,
else `op(mine, incoming)`. In collectives that only move data, SCRATCH has the dtype of the data.

**Time.** A step has two phases: first its local rows (src == dst), then its remote rows. Within a phase all reads
happen before all writes, except that rows of one fan-in group are applied one after another, in table order. So a
remote row sees what the local rows of its step wrote; a local row sees only remote writes of earlier steps. The proof
adds rules that make this order safe when ranks run at their own pace: see `overlap.collectives.proof`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Int16: TypeAlias = NDArray[np.int16]
Int32: TypeAlias = NDArray[np.int32]
UInt8: TypeAlias = NDArray[np.uint8]

REDUCING = ("all_reduce", "reduce_scatter", "reduce")
IN_RANK_ORDER = ("direct", "one_shot", "rank_order", "rank_chain")
"""Algorithms that reduce every element in the order of ranks, at any position; the proof checks the order."""
EXACT = ("all_reduce", "reduce_scatter")
"""Collectives that have an algorithm of `IN_RANK_ORDER` for every group."""
ROOTED = ("broadcast", "reduce", "gather", "scatter")
# Collectives whose result may overwrite the input: slot i of IN, of OUT and of SCRATCH block 0 are then one memory.
_IN_PLACE = ("all_reduce", "reduce", "broadcast")

COLUMNS: dict[str, type[np.integer]] = {
    "step": np.int32,
    "op": np.uint8,
    "src": np.int32,
    "dst": np.int32,
    "sbuf": np.uint8,
    "sslot": np.int32,
    "dbuf": np.uint8,
    "dslot": np.int32,
    "count": np.int32,
    "channel": np.int16,
    "group": np.int32,
}


class Buffer(IntEnum):
    """Memory of a rank that a slot belongs to."""

    IN = 0
    OUT = 1
    SCRATCH = 2


class Op(IntEnum):
    """Effect of a row on its target: overwrite it, or reduce into it."""

    MOVE = 0
    ADD = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """The transfers of one collective for all ranks, as structure-of-arrays.

    The columns are numpy arrays of equal length with one entry for each transfer. Rows are sorted by step, and the
    local rows of a step (src == dst) come before its remote rows. In every row `sslot % k == dslot % k`, so that both
    ends agree on the number of elements.
    """

    # "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter" or
    # "permute".
    collective: str
    algorithm: str  # Name of the generator
    size: int  # Ranks in the group
    root: int = 0  # Group rank of the root; 0 where the collective has none
    pairs: tuple[tuple[int, int], ...] = ()  # The (src, dst) pairs of a permute
    slots_per_block: int  # k
    blocks: tuple[int, int, int]  # Blocks of IN, OUT and SCRATCH on every rank
    step: Int32  # int32 (rows,); logical time
    op: UInt8  # uint8; an `Op`
    src: Int32  # int32; group rank that reads
    dst: Int32  # int32; group rank that writes; equal to `src` in a local row
    sbuf: UInt8  # uint8; the `Buffer` read
    sslot: Int32  # int32; first slot read
    dbuf: UInt8  # uint8; the `Buffer` written
    dslot: Int32  # int32; first slot written
    count: Int32  # int32; contiguous slots, at least 1
    channel: Int16  # int16; FIFO lane: rows of one (src, dst, channel) arrive in table order
    # int32; rows of a step with the same number >= 0 read their source once (fan-out), or are one reduction of several
    # inputs (fan-in); -1: neither.
    group: Int32

    def __len__(self) -> int:
        return len(self.step)

    def __repr__(self) -> str:
        return f"<Schedule {self.collective} {self.algorithm} ranks={self.size} steps={self.steps} rows={len(self)}>"

    @property
    def steps(self) -> int:
        """Number of steps, including steps that have only local rows."""
        return int(self.step[-1]) + 1 if len(self) else 0

    @property
    def channels(self) -> int:
        """Number of FIFO lanes between two ranks, at least 1."""
        return int(self.channel.max()) + 1 if len(self) else 1

    @property
    def slots(self) -> tuple[int, int, int]:
        """Slots of IN, OUT and SCRATCH on every rank."""
        blocks_in, blocks_out, blocks_scratch = self.blocks
        k = self.slots_per_block
        return blocks_in * k, blocks_out * k, blocks_scratch * k

    @property
    def reduces(self) -> bool:
        """Whether SCRATCH holds partial results that must be finalised."""
        return self.collective in REDUCING

    @property
    def in_place(self) -> bool:
        """Whether IN, OUT and the first block of SCRATCH may be the same memory.

        The proof then also replays the schedule with these three in one memory.
        """
        return self.collective in _IN_PLACE


def block_counts(collective: str, size: int) -> tuple[int, int]:
    """Return the numbers of blocks of a collective's input and output."""
    blocks_in = size if collective in ("reduce_scatter", "all_to_all", "scatter") else 1
    blocks_out = size if collective in ("all_gather", "all_to_all", "gather") else 1
    return blocks_in, blocks_out


def slot_bounds(slot: int, slots_per_block: int, block_elements: int) -> tuple[int, int]:
    """Return the elements [start, stop) of a buffer that a slot covers.

    Slots of a block have ceil(B / k) elements; the last slots are clipped and may be empty. With k = 4 and B = 5, the
    slots of block 0 are [0, 2), [2, 4), [4, 5) and [5, 5).

    Args:
        slot: Number of the slot.
        slots_per_block: Slots of a block.
        block_elements: Elements of a block, B.
    """
    block, index = divmod(slot, slots_per_block)
    per_slot = -(-block_elements // slots_per_block)
    start = block * block_elements
    return start + min(index * per_slot, block_elements), start + min((index + 1) * per_slot, block_elements)
