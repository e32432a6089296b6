"""Pieces of a segment, lent to whoever gives them back, or to several ranks until the last of them has dropped its own.

Behind the bytes of a piece that several ranks hold lies a word for each of them, which it writes when it drops what it
held: that takes no message, and may happen in the midst of anything. The process whose memory it is looks there when it
needs some.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

from transports.shared_memory.heap import Heap

_WORD_BYTES = 8


class Shelf:
    """What one process has lent. Any thread may take a piece and give one back.

    Args:
        memory: Of its segment.
        heap: What of that can be lent.
    """

    def __init__(self, memory: memoryview, heap: Heap) -> None:
        self._memory, self._heap = memory, heap
        self._lent: dict[int, memoryview] = {}  # by where it begins: the words
        self._returned: deque[int] = deque()  # not yet sorted in: that may happen in the midst of anything
        self._lock = threading.Lock()

    def lend(self, nbytes: int, ranks: int) -> int | None:
        """Return where a piece begins that so many ranks hold from now on; None: there is no room."""
        first = _words_at(nbytes)
        start = self.take(first + ranks * _WORD_BYTES)
        if start is not None:
            words = self._memory[start + first : start + first + ranks * _WORD_BYTES]
            words[:] = bytes(words.nbytes)
            with self._lock:
                self._lent[start] = words.cast("Q")
        return start

    def take(self, nbytes: int) -> int | None:
        """Return where a piece begins that this process alone gives back; None: there is no room."""
        with self._lock:
            self._sort_in()
            return self._heap.take(nbytes)

    def give_back(self, start: int) -> None:
        """Take a piece back; in any thread, and in the midst of anything."""
        self._returned.append(start)

    def _sort_in(self) -> None:
        """Let others use what has been given back, and what all have dropped."""
        for start in [start for start, words in self._lent.items() if all(words)]:
            del self._lent[start]
            self._heap.give_back(start)
        while self._returned:
            self._heap.give_back(self._returned.popleft())


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
