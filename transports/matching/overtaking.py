"""Chunks that came, or began to, before the message that they are a part of was announced."""

from __future__ import annotations

from collections.abc import Iterator

from transports.bounce import BounceBuffers
from transports.matching.protocol import Limits, ProtocolError


class Overtaking:
    """They wait in memory of their own until the announcement has said where they belong.

    Args:
        limits: What both sides have agreed on; the budget also bounds what waits here.
        memory: Where they wait.
    """

    def __init__(self, limits: Limits, memory: BounceBuffers) -> None:
        self._limits, self._memory = limits, memory
        self._pieces: dict[int, dict[int, tuple[memoryview, int]]] = {}  # by number and offset: memory, and length
        self._whole: set[tuple[int, int]] = set()  # those that are all here
        self._left_bytes = limits.budget_bytes

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def has(self, number: int, offset: int) -> bool:
        """Whether a chunk waits here, or is coming to here."""
        return offset in self._pieces.get(number, ())

    def place(self, number: int, offset: int, nbytes: int) -> memoryview:
        """Return where a chunk is to wait; the same place if it comes once more, for its rail died half-way.

        Raises:
            ProtocolError: No message may have it unasked, or too much waits already.
        """
        limits, pieces = self._limits, self._pieces.get(number, {})
        memory, length = pieces.get(offset) or (None, nbytes)
        if memory is None:
            charged_bytes = nbytes + limits.overhead_bytes
            if offset % limits.chunk_bytes or not 0 < nbytes <= min(limits.chunk_bytes, limits.push_bytes - offset):
                raise ProtocolError(f"message {number}, not announced yet, has no chunk of {nbytes} bytes at {offset}")
            if charged_bytes > self._left_bytes:
                raise ProtocolError(f"more unannounced data than the agreed {limits.budget_bytes} bytes")
            self._left_bytes -= charged_bytes
            memory = self._memory.take(limits.chunk_bytes)
            self._pieces.setdefault(number, pieces)[offset] = memory, nbytes
        elif length != nbytes or (number, offset) in self._whole:
            raise ProtocolError(f"the chunk of message {number} at {offset} has come twice")
        return memory[:nbytes]

    def filled(self, number: int, offset: int) -> None:
        """Note that a chunk is all here."""
        self._whole.add((number, offset))

    def whole(self, number: int) -> Iterator[int]:
        """Yield the offsets of the chunks of a message that are all here; each may be moved meanwhile."""
        yield from [offset for offset in self._pieces.get(number, ()) if (number, offset) in self._whole]

    def length(self, number: int, offset: int) -> int:
        """Return how long a chunk is."""
        return self._pieces[number][offset][1]

    def move(self, number: int, offset: int, place: memoryview) -> None:
        """Put a chunk where it belongs, and forget it here."""
        pieces = self._pieces[number]
        memory, nbytes = pieces.pop(offset)
        if not pieces:
            del self._pieces[number]
        self._whole.discard((number, offset))
        self._left_bytes += nbytes + self._limits.overhead_bytes
        place[:] = memory[:nbytes]
        self._memory.give_back(memory)

    def clear(self) -> None:
        """Forget them all."""
        self._pieces.clear()
        self._whole.clear()
        self._left_bytes = self._limits.budget_bytes
