"""Layouts: the places of a program's slots in its arrays. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from ...collectives.program import Extent, Program, StepKind
from ...collectives.reduce import Array, Reducer
from ...collectives.schedule import Buffer
from .host_bytes import bytes_of


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """Places of slots, and the reduction of their contents: the same in every operation of one call.

    A block of `block` elements is cut in `slots` equal slots, the last ones clipped; slot s lies in block s // slots.
    """

    block: int
    slots: int
    reducer: Reducer | None
    contributions: int

    def bounds(self, extent: Extent) -> tuple[int, int]:
        """Return the first element of an extent, and the one after its last."""
        return self._offset(extent.slot), self._offset(extent.slot + extent.count)

    def _offset(self, slot: int) -> int:
        """Return the first element of a slot; slots of a block are equally long, but for the last."""
        block, index = divmod(slot, self.slots)
        return block * self.block + min(index * -(-self.block // self.slots), self.block)


@dataclass(frozen=True, slots=True)
class UnevenLayout(BufferLayout):
    """A layout with blocks of different sizes: `starts` has the first element of each (see `block_starts`)."""

    starts: tuple[list[int], ...]

    def bounds(self, extent: Extent) -> tuple[int, int]:
        """Return the first element of an extent, and the one after its last."""
        starts, slot = self.starts[extent.buffer], extent.slot
        return self._start(starts, slot), self._start(starts, slot + extent.count)

    def _start(self, starts: list[int], slot: int) -> int:
        """Return the first element of a slot, of blocks of different lengths."""
        block, index = divmod(slot, self.slots)
        length = starts[block + 1] - starts[block]
        return starts[block] + min(index * -(-length // self.slots), length)


class Buffers:
    """The arrays of one call, flat, indexed by `Buffer`, with their layout."""

    __slots__ = ("_bytes", "arrays", "layout")
    arrays: tuple[Array, Array, Array]
    layout: BufferLayout

    def __init__(self, arrays: tuple[Array, Array, Array], layout: BufferLayout) -> None:
        self.arrays, self.layout = arrays, layout
        self._bytes: list[memoryview | None] = [None, None, None]  # bytes of the arrays, once they are used

    def view(self, extent: Extent) -> Array:
        """Return the elements of an extent: one contiguous range."""
        start, stop = self.layout.bounds(extent)
        return self.arrays[extent.buffer][start:stop]

    def bytes_of(self, buffer: int, part: slice) -> memoryview:
        """Return some of the bytes of an array."""
        view = self._bytes[buffer]
        if view is None:
            view = self._bytes[buffer] = bytes_of(self.arrays[buffer])
        return view[part]


Runs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ThinLayout(BufferLayout):
    """A layout in which only some slots of SCRATCH exist, one behind the other: `runs` has their (first, stop)."""

    runs: Runs

    def elements(self) -> int:
        """Return the number of elements of SCRATCH."""
        return sum(self._offset(stop) - self._offset(first) for first, stop in self.runs)

    def bounds(self, extent: Extent) -> tuple[int, int]:
        """Return the first element of an extent, and the one after its last."""
        start, stop = BufferLayout.bounds(self, extent)
        if extent.buffer is not Buffer.SCRATCH:
            return start, stop
        at = bisect_right(self.runs, (extent.slot + 1, 0)) - 1
        before = sum(self._offset(stop) - self._offset(first) for first, stop in self.runs[:at])
        moved = before - self._offset(self.runs[at][0])
        return start + moved, stop + moved


def scratch_runs(program: Program) -> Runs:
    """Return the slots of SCRATCH that a rank's program reads or writes, as (first, stop) of runs."""
    slots = sorted(
        {slot for extent in _scratch_extents(program) for slot in range(extent.slot, extent.slot + extent.count)}
    )
    runs: Runs = []
    for slot in slots:
        if runs and runs[-1][1] == slot:
            runs[-1] = (runs[-1][0], slot + 1)
        else:
            runs.append((slot, slot + 1))
    return runs


def _scratch_extents(program: Program) -> Iterator[Extent]:
    """Yield the extents of scratch memory that a program reads or writes."""
    for queue in program.queues:
        for step in queue:
            extents = (step.src,) if step.kind is StepKind.SEND else (step.dst, step.base)
            for extent in (*extents, step.src) if step.kind is StepKind.LOCAL else extents:
                if extent is not None and extent.buffer is Buffer.SCRATCH:
                    yield extent
