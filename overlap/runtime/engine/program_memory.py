"""The memory that a program works on: its arrays, and where the slots that its steps speak of lie in them."""

from __future__ import annotations

from dataclasses import dataclass

from ...collectives.program import Extent
from ...collectives.reduce import Array, Reducer
from .host_bytes import bytes_of


@dataclass(frozen=True, slots=True)
class Layout:
    """Where slots lie, and how what is in them is reduced: the same in every call of one collective.

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
        block, index = divmod(slot, self.slots)
        return block * self.block + min(index * -(-self.block // self.slots), self.block)


@dataclass(frozen=True, slots=True)
class UnevenLayout(Layout):
    """The same with blocks of different sizes: `starts` says where those of each buffer begin (see `block_starts`)."""

    starts: tuple[list[int], ...]

    def bounds(self, extent: Extent) -> tuple[int, int]:
        """Return the first element of an extent, and the one after its last."""
        starts, slot = self.starts[extent.buffer], extent.slot
        return self._start(starts, slot), self._start(starts, slot + extent.count)

    def _start(self, starts: list[int], slot: int) -> int:
        block, index = divmod(slot, self.slots)
        length = starts[block + 1] - starts[block]
        return starts[block] + min(index * -(-length // self.slots), length)


class Buffers:
    """The arrays of one call, flat, indexed by `Buffer`, with their layout."""

    __slots__ = ("_bytes", "arrays", "layout")

    def __init__(self, arrays: tuple[Array, Array, Array], layout: Layout) -> None:
        self.arrays, self.layout = arrays, layout
        self._bytes: list[memoryview | None] = [None, None, None]  # of the arrays, once they have been asked for

    def view(self, extent: Extent) -> Array:
        """Return the elements of an extent: one contiguous range."""
        start, stop = self.layout.bounds(extent)
        return self.arrays[extent.buffer][start:stop]

    def bytes_of(self, buffer: int, part: slice) -> memoryview:
        """Return some of the bytes of an array."""
        whole = self._bytes[buffer]
        if whole is None:
            whole = self._bytes[buffer] = bytes_of(self.arrays[buffer])
        return whole[part]
