"""Layouts: positions of a program's slots in its arrays. Pure."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import chain

from ...collectives.program import Extent, Program, StepKind
from ...collectives.reduce import Array, Reducer
from ...collectives.schedule import Buffer
from .host_bytes import bytes_of


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """Positions of slots in buffers, and the reducer: the same in every operation of one call."""

    block: int  # Elements of a block
    slots: int  # Slots of a block, of equal length, the last ones clipped; slot s is in block s // slots
    reducer: Reducer | None  # None: nothing is reduced
    contributions: int  # Number of inputs in each result, by which a mean is divided

    def element_range(self, extent: Extent) -> tuple[int, int]:
        """Return the elements [start, stop) of an extent in the array of its buffer."""
        return self._slot_start(extent.buffer, extent.slot), self._slot_start(extent.buffer, extent.slot + extent.count)

    def _slot_start(self, buffer: Buffer, slot: int) -> int:
        """With blocks of 5 elements and 2 slots, slots begin at 0, 3, 5, 8, 10, ..."""
        block, index = divmod(slot, self.slots)
        return block * self.block + min(index * -(-self.block // self.slots), self.block)


@dataclass(frozen=True, slots=True)
class UnevenLayout(BufferLayout):
    """A layout with blocks of different sizes."""

    starts: tuple[list[int], ...]  # By buffer: first element of each block; see `uneven.block_starts`

    def _slot_start(self, buffer: Buffer, slot: int) -> int:
        """The length of slots depends on the block."""
        starts, (block, index) = self.starts[buffer], divmod(slot, self.slots)
        length = starts[block + 1] - starts[block]
        return starts[block] + min(index * -(-length // self.slots), length)


class Buffers:
    """The arrays of one operation for IN, OUT and SCRATCH, flat, with their layout."""

    __slots__ = ("_bytes", "arrays", "layout")
    arrays: tuple[Array, Array, Array]
    layout: BufferLayout

    def __init__(self, arrays: tuple[Array, Array, Array], layout: BufferLayout) -> None:
        self.arrays, self.layout = arrays, layout
        self._bytes: list[memoryview | None] = [None, None, None]  # the bytes of each array, made at the first use

    def view(self, extent: Extent) -> Array:
        """Return the elements of an extent, as a view of the buffer's array."""
        start, stop = self.layout.element_range(extent)
        return self.arrays[extent.buffer][start:stop]

    def bytes_of(self, buffer: int, part: slice) -> memoryview:
        """Return a range of the bytes of a buffer's array."""
        view = self._bytes[buffer]
        if view is None:
            view = self._bytes[buffer] = bytes_of(self.arrays[buffer])
        return view[part]


Runs = list[tuple[int, int]]  # (first slot, slot after the last) of each run of consecutive slots, ascending


@dataclass(frozen=True, slots=True)
class ThinLayout(BufferLayout):
    """A layout that has memory only for those slots of SCRATCH that the program uses, without gaps between them."""

    runs: Runs  # The slots of SCRATCH that have memory

    def scratch_elements(self) -> int:
        """Return the number of elements of SCRATCH."""
        return sum(map(self._run_length, self.runs))

    def _run_length(self, run: tuple[int, int]) -> int:
        """Return the number of elements."""
        first, stop = run
        return self._slot_start(Buffer.SCRATCH, stop) - self._slot_start(Buffer.SCRATCH, first)

    def element_range(self, extent: Extent) -> tuple[int, int]:
        """Return the elements [start, stop) of an extent in the array of its buffer."""
        start, stop = BufferLayout.element_range(self, extent)
        if extent.buffer is not Buffer.SCRATCH:
            return start, stop
        at = bisect_right(self.runs, (extent.slot + 1, 0)) - 1  # the last run that begins at the slot or before
        before = sum(map(self._run_length, self.runs[:at]))
        # The run begins behind the elements of earlier runs, not where it would with all slots.
        moved = before - self._slot_start(Buffer.SCRATCH, self.runs[at][0])
        return start + moved, stop + moved


def used_scratch_runs(program: Program) -> Runs:
    """Return the slots of SCRATCH that a rank's program reads or writes, as runs of consecutive slots."""
    slots = set[int]()
    for step in chain.from_iterable(program.queues):
        read = () if step.kind is StepKind.RECV else (step.src,)
        written = () if step.kind is StepKind.SEND else (step.dst, step.base)
        for extent in (*read, *written):
            if extent is not None and extent.buffer is Buffer.SCRATCH:
                slots.update(range(extent.slot, extent.slot + extent.count))
    firsts = sorted(slot for slot in slots if slot - 1 not in slots)
    stops = sorted(slot + 1 for slot in slots if slot + 1 not in slots)
    return list(zip(firsts, stops, strict=True))
