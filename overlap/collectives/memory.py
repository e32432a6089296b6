"""Fingerprints in place of data, and the memory of all ranks that holds them during a proof."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from .pattern import Ints
from .rules import Flags
from .schedule import Buffer, Schedule

Words: TypeAlias = NDArray[np.uint64]

# Odd multipliers with well mixed bits, from the last stage of splitmix64.
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_HALF = np.uint64(32)


def combine_order_sensitively(lower: Words, higher: Words) -> Words:
    """Return a stand-in for an ADD: a value that depends on operand order and parenthesisation.

    Args:
        lower: Operands of the lower ranks.
        higher: Operands of the higher ranks.
    """
    mixed: Words = lower * _MIX[0] + higher * _MIX[1]
    mixed ^= mixed >> _HALF
    return mixed


class Fingerprint:
    """Random inputs from which the right output of a schedule is known, to check the schedule.

    The input of a rank in a slot is `of_rank[rank] * of_slot[slot]`; sums wrap around at 64 bits.

    Args:
        schedule: The schedule to check.
        seed: Seed of the random numbers.

    Attributes:
        of_rank: (ranks,) The number of each rank.
        of_slot: (slots of IN,) The number of each slot.
        unwritten: The value of memory that nothing has been written to.
    """

    def __init__(self, schedule: Schedule, seed: int) -> None:
        self.schedule = schedule
        random = np.random.default_rng(seed)
        self.of_rank: NDArray[np.uint64] = random.integers(0, 2**64, schedule.size, np.uint64)
        self.of_slot: NDArray[np.uint64] = random.integers(0, 2**64, schedule.slots[0], np.uint64)
        self.unwritten: np.uint64 = random.integers(0, 2**64, dtype=np.uint64)

    def input_values(self, rank: Ints, slot: Ints) -> Words:
        """Return the input values: entry i is that of slot `slot[i]` of IN on rank `rank[i]`."""
        value: Words = self.of_rank[rank] * self.of_slot[slot]
        return value

    def expected_values(self, rank: Ints, slot: Ints) -> Words:
        """Return the value that slot `slot[i]` of OUT on rank `rank[i]` must have at the end.

        A slot beyond the end of OUT gets an arbitrary value: callers ignore it.
        """
        s, k = self.schedule, self.schedule.slots_per_block
        slot = np.minimum(slot, s.slots[1] - 1)
        if s.reduces:
            sums: Words = self.of_rank.sum(dtype=np.uint64) * self.of_slot
            values: Words = sums[rank * k + slot if s.collective == "reduce_scatter" else slot]
            return values
        if s.collective in ("all_gather", "gather"):
            return self.input_values(slot // k, slot % k)
        if s.collective == "all_to_all":
            return self.input_values(slot // k, rank * k + slot % k)
        if s.collective == "permute":
            return self._expected_permute_values(rank, slot)
        return self.input_values(np.full(1, s.root), rank * k + slot if s.collective == "scatter" else slot)

    def fold_in_order(self, rank: Ints, slot: Ints) -> Words:
        """Return the expected values of slots of OUT if the inputs of ranks 0, 1, 2, ... are combined in this order."""
        s = self.schedule
        slot = np.minimum(slot, s.slots[1] - 1)
        of_slot = self.of_slot[rank * s.slots_per_block + slot if s.collective == "reduce_scatter" else slot]
        total: Words = self.of_rank[0] * of_slot
        for other in self.of_rank[1:]:
            total = combine_order_sensitively(total, other * of_slot)
        return total

    def _expected_permute_values(self, rank: Ints, slot: Ints) -> Words:
        """Return the values that a permute delivers; `unwritten` on a rank that is no pair's destination."""
        source = np.full(self.schedule.size, -1)
        for src, dst in self.schedule.pairs:
            source[dst] = src
        return np.where(source[rank] < 0, self.unwritten, self.input_values(source[rank], slot))


Bases: TypeAlias = tuple[int, int, int]
"""First cells of IN, OUT and SCRATCH."""

# Cells handled at once where a whole buffer is walked through.
_CELLS_PER_PIECE = 1 << 15


@dataclass(frozen=True, slots=True)
class BufferPiece:
    """A contiguous piece of a buffer's memory. Columns have one entry for each cell."""

    cells: slice  # Cells of the piece, counted from the first cell of the buffer
    rank: Ints  # Rank that owns the cell
    slot: Ints  # Slot of the buffer that the cell holds
    real: Flags  # Whether this buffer has the slot: a shorter buffer leaves cells unused


class SlotLayout:
    """Positions of slots in one array of cells, which holds the buffers of all ranks.

    A buffer is a table of `lines` lines (the slots of the largest buffer) with one cell for each rank. Slot s of rank r
    is in line (s - r) modulo `lines`. With 2 ranks and 2 slots, line 0 holds slot 0 of rank 0 and slot 1 of rank 1;
    line 1 holds slot 1 of rank 0 and slot 0 of rank 1. In a ring rank r handles slot r - t at step t, so that a step
    touches neighbouring cells.

    All buffers have this inner layout, and differ in their first cell: `apart` gives each its own memory, `shared`
    overlays the buffers that an executor may overlay (see `Schedule.in_place`). `second` has the IN of `apart`, and
    another OUT and SCRATCH.
    """

    size: int  # Ranks
    slots: tuple[int, int, int]  # Slots of IN, OUT and SCRATCH on every rank

    def __init__(self, schedule: Schedule) -> None:
        self.size, self.slots = schedule.size, schedule.slots
        self.lines: int = max(1, *self.slots)
        # Cells of one buffer on all ranks.
        stride = self.lines * self.size
        self.apart: Bases = (0, stride, 2 * stride)
        self.second: Bases = (0, 3 * stride, 4 * stride)
        self.shared: Bases = self.apart
        if schedule.reduces:
            self.shared = (stride, 0, 0)
        if schedule.in_place:
            self.shared = (0, 0, 0)
        self._dtype: type[np.signedinteger] = np.int32 if 5 * stride < 2**31 else np.int64
        self._skew: Ints = (np.arange(self.size) % self.lines).astype(self._dtype)

    def cell_count(self, bases: Bases) -> int:
        """Return the number of cells of a memory whose buffers begin at `bases`."""
        return max(bases) + self.lines * self.size

    def find_cells(self, rank: Ints, slot: Ints) -> Ints:
        """Return the cell of slot `slot[i]` on rank `rank[i]`, counted from the first cell of the slot's buffer."""
        # The inverse of the skew: the line of a slot on a rank, wrapped to 0 ... lines - 1 without a division.
        line = slot - (rank if self.lines >= self.size else self._skew[rank])
        line = line.astype(self._dtype, copy=False)
        # The shift gives -1, all bits set, for negative numbers, and 0 for others: only those get a whole turn.
        line += (line >> (8 * line.itemsize - 1)) & line.dtype.type(self.lines)
        line *= line.dtype.type(self.size)
        line += rank
        return line

    def buffer_pieces(self, buffer: Buffer) -> Iterator[BufferPiece]:
        """Yield all cells of a buffer in pieces, in the order of memory."""
        ranks, skew = np.arange(self.size), self._skew.astype(np.intp)
        step = max(1, _CELLS_PER_PIECE // self.size)
        for start in range(0, self.lines, step):
            line = np.arange(start, min(start + step, self.lines))
            # A line has one slot of each rank, skewed by rank; slots beyond the last line wrap around.
            slot = (line[:, None] + skew).reshape(-1)
            slot -= (slot >= self.lines) * np.intp(self.lines)
            cells = slice(start * self.size, start * self.size + len(slot))
            yield BufferPiece(cells, np.tile(ranks, len(line)), slot, slot < self.slots[buffer])


class ReplayMemory:
    """Memory of all ranks during one replay of a schedule, with fingerprints in place of data.

    Args:
        layout: Positions of slots.
        bases: First cell of each buffer.
        prints: One fingerprint, or several that are carried side by side.
        room_for_copy: Leave room for the memory at the bases `layout.second` that `order_sensitive_copy` returns.
    """

    bases: Bases
    prints: list[Fingerprint]
    ordered: bool  # Whether ADD combines by `combine_order_sensitively`, which depends on the order of operands

    def __init__(
        self,
        layout: SlotLayout,
        bases: Bases,
        prints: list[Fingerprint],
        *,
        room_for_copy: bool = False,
    ) -> None:
        self.bases, self.prints, self.ordered = bases, prints, False
        cells = layout.cell_count(layout.second if room_for_copy else bases)
        self.values: Words = np.empty((cells, len(prints)), np.uint64)  # a column for each fingerprint
        inputs = slice(bases[Buffer.IN], bases[Buffer.IN] + layout.lines * layout.size)
        self._write_inputs(layout, self.values[inputs])
        for column, fingerprint in enumerate(prints):  # the cells before the inputs, and those behind them
            self.values[: inputs.start, column] = fingerprint.unwritten
            self.values[inputs.stop :, column] = fingerprint.unwritten
        if len(prints) == 1:
            self.values = self.values.reshape(-1)

    def order_sensitive_copy(self, layout: SlotLayout) -> ReplayMemory:
        """Return a second memory in which a + b and b + a differ, so that a replay detects the order of operands.

        It combines with `combine_order_sensitively` instead of by adding, and shares this one's inputs, which no row
        can write.
        """
        second = copy(self)
        second.bases, second.ordered = layout.second, True
        return second

    def _write_inputs(self, layout: SlotLayout, inputs: Words) -> None:
        """Write the input values of all ranks and slots, line after line; `inputs` has a column per fingerprint."""
        lines, size = layout.lines, layout.size
        for column, fingerprint in enumerate(self.prints):
            of_slot = np.zeros(lines, np.uint64)
            of_slot[: len(fingerprint.of_slot)] = fingerprint.of_slot
            # Line after line, the slots of ranks 0, 1, ... are consecutive.
            slots = sliding_window_view(np.resize(of_slot, lines + size), size)[:lines]
            target = inputs[:, column].reshape(lines, size)
            np.multiply(slots, fingerprint.of_rank, out=target)

    def cell_values(self, print_index: int) -> Words:
        """Return the value of every cell in the replay with the fingerprint `prints[print_index]`."""
        return self.values if self.values.ndim == 1 else self.values[:, print_index]

    def move(self, source: Ints, target: Ints) -> None:
        """Overwrite the `target` cells with the values that the `source` cells have before the call."""
        self.values[target] = self.values[source]

    def add(self, source: Ints, target: Ints, lower: Flags) -> None:
        """Reduce into different cells, the operand of the lower rank first.

        Args:
            source: (transfers,) Cells that are sent.
            target: (transfers,) Cells that are added to; no cell appears twice.
            lower: (transfers,) Whether the sender has a lower rank than the receiver.
        """
        present, incoming = self.values[target], self.values[source]
        if self.ordered:
            self.values[target] = combine_order_sensitively(
                np.where(lower, incoming, present), np.where(lower, present, incoming)
            )
        else:
            self.values[target] = present + incoming
