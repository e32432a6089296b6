"""The memory of all ranks as flat arrays of fingerprints, where regular schedules touch contiguous pieces."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .fingerprint import Fingerprint, Words, combine
from .pattern import Ints
from .rules import Flags
from .schedule import Buffer, Schedule

Bases: TypeAlias = tuple[int, int, int]

# Cells handled at once where a whole buffer is walked through.
_SWEEP_CELLS = 1 << 15


@dataclass(frozen=True, slots=True)
class Sweep:
    """A contiguous piece of a buffer's memory: which rank's which slot each cell is, where it is one at all."""

    cells: slice
    rank: Ints
    slot: Ints
    real: Flags


class Layout:
    """Where slots are: by (slot - rank) modulo the slots of the largest buffer, then by rank.

    In rings, where rank r handles slot r - t at step t, a step touches neighbouring cells. All buffers have the same
    inner layout and differ by a base only: `apart` gives each its own memory, `shared` puts those in one that an
    executor may put in one (see `Schedule.in_place`). `twin` is as `apart`: the same IN, but another OUT and SCRATCH.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.size, self.slots = schedule.size, schedule.slots
        self.lines = max(1, *self.slots)
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
        """Return how many cells a layout has."""
        return max(bases) + self.lines * self.size

    def locate(self, rank: Ints, slot: Ints) -> Ints:
        """Return the cells of slots, not counting the base of their buffer."""
        line = slot - (rank if self.lines >= self.size else self._skew[rank])
        line = line.astype(self._dtype, copy=False)
        line += (line >> (8 * line.itemsize - 1)) & line.dtype.type(self.lines)
        line *= line.dtype.type(self.size)
        line += rank
        return line

    def sweep(self, buffer: Buffer) -> Iterator[Sweep]:
        """Yield all cells of a buffer in the order of memory, relative to its base."""
        ranks, skew = np.arange(self.size), self._skew.astype(np.intp)
        step = max(1, _SWEEP_CELLS // self.size)
        for start in range(0, self.lines, step):
            line = np.arange(start, min(start + step, self.lines))
            slot = (line[:, None] + skew).reshape(-1)
            slot -= (slot >= self.lines) * np.intp(self.lines)
            cells = slice(start * self.size, start * self.size + len(slot))
            yield Sweep(cells, np.tile(ranks, len(line)), slot, slot < self.slots[buffer])


class Memory:
    """The values of one replay.

    Args:
        layout: Where slots are.
        bases: Where buffers are.
        prints: One fingerprint, or several that are carried side by side.
        twin: Leave room for a memory at the bases `layout.twin`, which `ordered_twin` returns.
    """

    def __init__(
        self,
        layout: Layout,
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

    def ordered_twin(self, layout: Layout) -> Memory:
        """Return a memory that combines by a function that tells operand order apart, instead of by adding.

        It shares this one's inputs, which no row can write.
        """
        twin = copy(self)
        twin.bases, twin.ordered = layout.twin, True
        return twin

    def _fill(self, layout: Layout, inputs: Words) -> None:
        lines, size = layout.lines, layout.size
        for lane, fingerprint in enumerate(self.prints):
            of_slot = np.zeros(lines, np.uint64)
            of_slot[: len(fingerprint.of_slot)] = fingerprint.of_slot
            # Line after line, the slots of ranks 0, 1, ... are consecutive.
            slots = sliding_window_view(np.resize(of_slot, lines + size), size)[:lines]
            target = inputs[:, lane].reshape(lines, size)
            np.multiply(slots, fingerprint.of_rank, out=target)

    def lane(self, which: int) -> Words:
        """Return the values of one fingerprint."""
        return self.values if self.values.ndim == 1 else self.values[:, which]

    def move(self, source: slice | Ints, target: slice | Ints) -> None:
        """Overwrite cells."""
        self.values[target] = self.values[source]

    def add(self, source: slice | Ints, target: slice | Ints, lower: bool | Flags) -> None:
        """Reduce into cells, the operand of the lower rank first; `lower` says whether the sender is that rank."""
        mine, incoming = self.values[target], self.values[source]
        if not self.ordered:
            mine += incoming
            if not isinstance(target, slice):
                self.values[target] = mine
        elif isinstance(lower, bool):
            self.values[target] = combine(incoming, mine) if lower else combine(mine, incoming)
        else:
            self.values[target] = combine(np.where(lower, incoming, mine), np.where(lower, mine, incoming))
