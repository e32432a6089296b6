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


def combine(lower: Words, higher: Words) -> Words:
    """Return a stand-in for an ADD: a value that depends on operand order and parenthesisation."""
    mixed: Words = lower * _MIX[0] + higher * _MIX[1]
    mixed ^= mixed >> _HALF
    return mixed


class Fingerprint:
    """The random numbers of one seed, and the results they must lead to."""

    def __init__(self, schedule: Schedule, seed: int) -> None:
        self.schedule = schedule
        random = np.random.default_rng(seed)
        self.of_rank: NDArray[np.uint64] = random.integers(0, 2**64, schedule.size, np.uint64)
        self.of_slot: NDArray[np.uint64] = random.integers(0, 2**64, schedule.slots[0], np.uint64)
        self.unwritten: np.uint64 = random.integers(0, 2**64, dtype=np.uint64)

    def initial(self, rank: Ints, slot: Ints) -> Words:
        """Return the value of input slots."""
        value: Words = self.of_rank[rank] * self.of_slot[slot]
        return value

    def expected_values(self, rank: Ints, slot: Ints) -> Words:
        """Return the values that output slots must have at the end; any value for slots that do not exist."""
        s, k = self.schedule, self.schedule.slots_per_block
        slot = np.minimum(slot, s.slots[1] - 1)
        if s.reduces:
            sums: Words = self._sums()[rank * k + slot if s.collective == "reduce_scatter" else slot]
            return sums
        if s.collective in ("all_gather", "gather"):
            return self.initial(slot // k, slot % k)
        if s.collective == "all_to_all":
            return self.initial(slot // k, rank * k + slot % k)
        if s.collective == "permute":
            return self._permute_values(rank, slot)
        return self.initial(np.full(1, s.root), rank * k + slot if s.collective == "scatter" else slot)

    def fold_in_order(self, rank: Ints, slot: Ints) -> Words:
        """Return the expected values of output slots, where each element is combined in the order of ranks."""
        s = self.schedule
        slot = np.minimum(slot, s.slots[1] - 1)
        # The fingerprint of an input is the product of a number for its rank and a number for its slot.
        of_slot = self.of_slot[rank * s.slots_per_block + slot if s.collective == "reduce_scatter" else slot]
        total: Words = self.of_rank[0] * of_slot
        for other in self.of_rank[1:]:
            total = combine(total, other * of_slot)
        return total

    def _sums(self) -> Words:
        sums: Words = self.of_rank.sum(dtype=np.uint64) * self.of_slot
        return sums

    def _permute_values(self, rank: Ints, slot: Ints) -> Words:
        """Return the values that a permute delivers; "unwritten" where a rank has no source."""
        source = np.full(self.schedule.size, -1)
        for src, dst in self.schedule.pairs:
            source[dst] = src
        return np.where(source[rank] < 0, self.unwritten, self.initial(source[rank], slot))


Bases: TypeAlias = tuple[int, int, int]

# Cells handled at once where a whole buffer is walked through.
_SWEEP_CELLS = 1 << 15


@dataclass(frozen=True, slots=True)
class Sweep:
    """A contiguous piece of a buffer's memory: the rank and slot of each cell, and whether it is a slot at all."""

    cells: slice
    rank: Ints
    slot: Ints
    real: Flags


class SlotLayout:
    """Positions of slots in memory: by (slot - rank) modulo the slots of the largest buffer, then by rank.

    In rings, where rank r handles slot r - t at step t, a step touches neighbouring cells. All buffers have the same
    inner layout and differ by a base only: `apart` gives each its own memory, `shared` overlays the buffers that an
    executor may overlay (see `Schedule.in_place`). `twin` is as `apart`: the same IN, but another OUT and SCRATCH.
    """

    size: int
    slots: tuple[int, int, int]

    def __init__(self, schedule: Schedule) -> None:
        self.size, self.slots = schedule.size, schedule.slots
        self.lines: int = max(1, *self.slots)
        # Bases of IN, OUT and SCRATCH: three regions apart, or regions shared as an executor may share them.
        stride = self.lines * self.size
        self.apart: Bases = (0, stride, 2 * stride)
        self.twin: Bases = (0, 3 * stride, 4 * stride)
        self.shared: Bases = self.apart
        if schedule.reduces:
            self.shared = (stride, 0, 0)
        if schedule.in_place:
            self.shared = (0, 0, 0)
        self._dtype: type[np.signedinteger] = np.int32 if 5 * stride < 2**31 else np.int64
        self._skew: Ints = (np.arange(self.size) % self.lines).astype(self._dtype)

    def cells(self, bases: Bases) -> int:
        """Return the number of cells of a layout."""
        return max(bases) + self.lines * self.size

    def locate(self, rank: Ints, slot: Ints) -> Ints:
        """Return the cells of slots, not counting the base of their buffer."""
        # The inverse of the skew: the line of a slot on a rank, wrapped to 0 ... lines - 1 without a division.
        line = slot - (rank if self.lines >= self.size else self._skew[rank])
        line = line.astype(self._dtype, copy=False)
        line += (line >> (8 * line.itemsize - 1)) & line.dtype.type(self.lines)
        line *= line.dtype.type(self.size)
        line += rank
        return line

    def sweep(self, buffer: Buffer) -> Iterator[Sweep]:
        """Yield all cells of a buffer in pieces, in the order of memory; cells count from the buffer's base."""
        ranks, skew = np.arange(self.size), self._skew.astype(np.intp)
        step = max(1, _SWEEP_CELLS // self.size)
        for start in range(0, self.lines, step):
            line = np.arange(start, min(start + step, self.lines))
            # A line has one slot of each rank, skewed by rank; slots beyond the last line wrap around.
            slot = (line[:, None] + skew).reshape(-1)
            slot -= (slot >= self.lines) * np.intp(self.lines)
            cells = slice(start * self.size, start * self.size + len(slot))
            yield Sweep(cells, np.tile(ranks, len(line)), slot, slot < self.slots[buffer])


class ReplayMemory:
    """Memory of all ranks during one replay of a schedule, with fingerprints in place of data.

    Args:
        layout: Positions of slots.
        bases: First cell of each buffer.
        prints: One fingerprint, or several that are carried side by side.
        twin: Leave room for a memory at the bases `layout.twin`, which `ordered_twin` returns.
    """

    bases: Bases
    prints: list[Fingerprint]
    ordered: bool

    def __init__(
        self,
        layout: SlotLayout,
        bases: Bases,
        prints: list[Fingerprint],
        *,
        twin: bool = False,
    ) -> None:
        self.bases, self.prints, self.ordered = bases, prints, False
        cells, start = layout.cells(layout.twin if twin else bases), bases[Buffer.IN]
        self.values: Words = np.empty((cells, len(prints)), np.uint64)
        stop = start + layout.lines * layout.size
        self._fill(layout, self.values[start:stop])
        for lane, fingerprint in enumerate(prints):
            self.values[:start, lane] = fingerprint.unwritten
            self.values[stop:, lane] = fingerprint.unwritten
        if len(prints) == 1:
            self.values = self.values.reshape(-1)

    def ordered_twin(self, layout: SlotLayout) -> ReplayMemory:
        """Return a memory that combines by a function of the operand order, instead of by adding.

        It shares this one's inputs, which no row can write.
        """
        twin = copy(self)
        twin.bases, twin.ordered = layout.twin, True
        return twin

    def _fill(self, layout: SlotLayout, inputs: Words) -> None:
        """Write the fingerprint of each rank and slot to the inputs, line after line."""
        lines, size = layout.lines, layout.size
        for lane, fingerprint in enumerate(self.prints):
            of_slot = np.zeros(lines, np.uint64)
            of_slot[: len(fingerprint.of_slot)] = fingerprint.of_slot
            # Line after line, the slots of ranks 0, 1, ... are consecutive.
            slots = sliding_window_view(np.resize(of_slot, lines + size), size)[:lines]
            target = inputs[:, lane].reshape(lines, size)
            np.multiply(slots, fingerprint.of_rank, out=target)

    def lane(self, index: int) -> Words:
        """Return the values of one fingerprint."""
        return self.values if self.values.ndim == 1 else self.values[:, index]

    def move(self, source: Ints, target: Ints) -> None:
        """Overwrite cells."""
        self.values[target] = self.values[source]

    def add(self, source: Ints, target: Ints, lower: Flags) -> None:
        """Reduce into different cells, the operand of the lower rank first.

        Args:
            source: Cells that are sent.
            target: Cells that are added to.
            lower: Whether the sender of each is the lower rank.
        """
        present, incoming = self.values[target], self.values[source]
        if self.ordered:
            self.values[target] = combine(np.where(lower, incoming, present), np.where(lower, present, incoming))
        else:
            self.values[target] = present + incoming
