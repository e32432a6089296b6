"""Pieces of a segment that several ranks hold together, until the last of them has dropped its own.

Behind the bytes of such a piece lies a word for each rank, which it writes when it drops what it held: that takes no
message, and may happen in the midst of anything. The process whose memory it is looks there when it needs some.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from transports.shared_memory.heap import Heap

__all__ = ["Shelf", "leaver"]

_WORD_BYTES = 8


class Shelf:
    """What one process has lent to all.

    Args:
        memory: Of its segment.
        heap: What of that can be lent.
    """

    def __init__(self, memory: memoryview, heap: Heap) -> None:
        self._memory, self._heap = memory, heap
        self._lent: dict[int, memoryview] = {}  # by where it begins: the words

    def lend(self, nbytes: int, ranks: int) -> int | None:
        """Return where a piece begins that so many ranks hold from now on; None: there is no room."""
        self.take_back()
        first = _words_at(nbytes)
        start = self._heap.take(first + ranks * _WORD_BYTES)
        if start is not None:
            words = self._memory[start + first : start + first + ranks * _WORD_BYTES]
            words[:] = bytes(words.nbytes)
            self._lent[start] = words.cast("Q")
        return start

    def take(self, nbytes: int) -> int | None:
        """Return where a piece begins that this process alone gives back; None: there is no room."""
        start = self._heap.take(nbytes)
        if start is None and self.take_back():
            start = self._heap.take(nbytes)
        return start

    def take_back(self) -> int:
        """Take back what all have dropped, and return how many pieces those were."""
        dropped = [start for start, words in self._lent.items() if all(words)]
        for start in dropped:
            del self._lent[start]
            self._heap.give_back(start)
        return len(dropped)


def leaver(memory: memoryview, where: int, nbytes: int, position: int) -> Callable[[], None]:
    """Return what a rank calls when it has dropped a piece; in a fork of its process, that does nothing.

    Args:
        memory: The segment in which the piece lies.
        where: It begins.
        nbytes: Of what the ranks hold there.
        position: Of the rank among them.
    """
    first = where + _words_at(nbytes) + position * _WORD_BYTES
    word, process, present = memory[first : first + _WORD_BYTES].cast("Q"), os.getpid(), os.getpid

    def left() -> None:
        if present() == process:
            word[0] = 1

    return left


def _words_at(nbytes: int) -> int:
    return -(-nbytes // _WORD_BYTES) * _WORD_BYTES
