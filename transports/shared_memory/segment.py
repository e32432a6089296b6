"""Memory that several processes map, and the pieces of it that a process lends."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """Memory that several processes map, without a name, of fixed size; it lasts as long as a process maps it.

    Attributes:
        nbytes: Its size.
        mapped: The mapping; it lasts as long as anything refers to it.
        view: Its bytes.
    """

    def __init__(self, mapped: mmap.mmap, fd: int) -> None:
        self.nbytes: int = len(mapped)
        self.mapped = mapped
        self.view: memoryview[int] = memoryview(mapped)
        self._fd = fd

    @classmethod
    def make(cls, nbytes: int) -> Segment:
        """Make a segment of this process.

        Raises:
            OSError: The system does not give so much, or has no such memory.
        """
        fd = os.memfd_create("overlap", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(mmap.mmap(fd, nbytes), fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def of_another(cls, fd: int) -> Segment:
        """Map a segment that another process has passed; the descriptor is closed.

        Raises:
            OSError: It cannot be mapped, or could shrink while it is used.
        """
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise OSError("the memory that was passed is not sealed")
            return cls(mmap.mmap(fd, os.fstat(fd).st_size), -1)
        finally:
            os.close(fd)

    def fileno(self) -> int:
        """Return the descriptor, to be passed on; only of this process's own segment, and before `passed`."""
        return self._fd

    def passed(self) -> None:
        """Close the descriptor, which every process has got. The mapping stays."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


_PAGE_BYTES = 4096


class Heap:
    """Lends pieces by size, rounded up to pages and to one of four sizes an octave, so that others fit there later.

    Args:
        start: Where the memory begins.
        stop: Where it ends.

    Attributes:
        lent_bytes: Bytes that are lent.
    """

    def __init__(self, start: int, stop: int) -> None:
        self.lent_bytes: int = 0
        self._next, self._stop = start, stop
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._sizes: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """Return the start of a piece; None if there is no room."""
        size = _size_for(nbytes)
        if self._free[size]:
            start = self._free[size].pop()
        elif self._next + size <= self._stop:
            start, self._next = self._next, self._next + size
        else:
            return None
        self._sizes[start] = size
        self.lent_bytes += size
        return start

    def give_back(self, start: int) -> int:
        """Take a piece back, and return its size."""
        size = self._sizes.pop(start)
        self._free[size].append(start)
        self.lent_bytes -= size
        return size


def _size_for(nbytes: int) -> int:
    least = max(nbytes, _PAGE_BYTES)
    unit = max(_PAGE_BYTES, 1 << (least - 1).bit_length() - 3)
    return -(-least // unit) * unit


_WORD_BYTES = 8


class Shelf:
    """The lent pieces of a segment. Any thread may take a piece and give one back.

    A piece may belong to several ranks until the last of them has dropped it. Behind its bytes lies a word for each
    rank, which the rank writes when it drops its part: that takes no message, and may happen at any point of a program.
    The owner of the segment reads these words when it needs memory.

    Args:
        memory: Of the segment.
        heap: The part of it that can be lent.
    """

    def __init__(self, memory: memoryview, heap: Heap) -> None:
        self._memory, self._heap = memory, heap
        self._lent: dict[int, memoryview] = {}  # by start: the words
        self._returned: deque[int] = deque()  # not yet given back to the heap: `give_back` may interrupt anything
        self._lock = threading.Lock()

    def lend(self, nbytes: int, ranks: int) -> int | None:
        """Return the start of a piece that so many ranks hold from now on; None: there is no room."""
        first = _words_at(nbytes)
        start = self.take(first + ranks * _WORD_BYTES)
        if start is not None:
            words = self._memory[start + first : start + first + ranks * _WORD_BYTES]
            words[:] = bytes(words.nbytes)
            with self._lock:
                self._lent[start] = words.cast("Q")
        return start

    def take(self, nbytes: int) -> int | None:
        """Return the start of a piece that this process alone gives back; None: there is no room."""
        with self._lock:
            self._sort_in()
            return self._heap.take(nbytes)

    def give_back(self, start: int) -> None:
        """Take a piece back; in any thread, and at any point of a program."""
        self._returned.append(start)

    def _sort_in(self) -> None:
        """Give returned pieces, and those that all ranks have dropped, back to the heap."""
        for start in [start for start, words in self._lent.items() if all(words)]:
            del self._lent[start]
            self._heap.give_back(start)
        while self._returned:
            self._heap.give_back(self._returned.popleft())


def leaver(memory: memoryview, where: int, nbytes: int, position: int) -> Callable[[], None]:
    """Return the function that drops a rank's part of a piece; in a fork of its process, it does nothing.

    Args:
        memory: The segment in which the piece lies.
        where: Start of the piece.
        nbytes: Length of the piece without its words.
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
