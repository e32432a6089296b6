"""Memory that several processes map, and loans of its pieces."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """Memory without a name, of fixed size, that several processes map; it lasts as long as a process maps it.

    Attributes:
        nbytes: Size of the segment.
        view: Bytes of the segment, which is mapped as long as an object refers to them.
    """

    def __init__(self, mapped: mmap.mmap, fd: int) -> None:
        self.nbytes: int = len(mapped)
        self.view: memoryview[int] = memoryview(mapped)
        self._fd = fd

    @classmethod
    def make(cls, nbytes: int) -> Segment:
        """Return a new segment of this process.

        Raises:
            OSError: The system has too little memory, or no anonymous files.
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
    def from_descriptor(cls, fd: int) -> Segment:
        """Map a segment that another process has passed; the descriptor is closed.

        Raises:
            OSError: The segment cannot be mapped, or could shrink while it is used.
        """
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise OSError("the memory that was passed is not sealed")
            return cls(mmap.mmap(fd, os.fstat(fd).st_size), -1)
        finally:
            os.close(fd)

    def fileno(self) -> int:
        """Return the descriptor for other processes; only of an own segment, and before `close_descriptor`."""
        return self._fd

    def close_descriptor(self) -> None:
        """Close the descriptor, which every process has received. The mapping stays."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


_PAGE_BYTES = 4096


class Heap:
    """Allocator of pieces, rounded up to pages and to one of four sizes an octave, so that free pieces are used again.

    Args:
        start: Offset of the memory.
        stop: Offset of its end.
    """

    def __init__(self, start: int, stop: int) -> None:
        self._next, self._stop = start, stop
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._sizes: dict[int, int] = {}  # of the pieces in use, by start

    @property
    def used_bytes(self) -> int:
        """Bytes of the pieces in use."""
        return sum(self._sizes.values())

    def take(self, nbytes: int) -> int | None:
        """Return the start of a free piece of at least `nbytes`; None without room."""
        size = _piece_bytes(nbytes)
        if self._free[size]:
            start = self._free[size].pop()
        elif self._next + size <= self._stop:
            start, self._next = self._next, self._next + size
        else:
            return None
        self._sizes[start] = size
        return start

    def free(self, start: int) -> None:
        """Free a piece."""
        self._free[self._sizes.pop(start)].append(start)


def _piece_bytes(nbytes: int) -> int:
    """Return a length rounded up to pages, and to one of four sizes an octave."""
    nbytes = max(nbytes, _PAGE_BYTES)
    unit = max(_PAGE_BYTES, 1 << (nbytes - 1).bit_length() - 3)
    return -(-nbytes // unit) * unit


_WORD_BYTES = 8


class Shelf:
    """The loans of a segment. Any thread may take a piece and release one.

    A loan may belong to several ranks until the last of them has released it. Behind its bytes lies a word for each
    rank, which the rank writes when it releases its part: that takes no message, and may happen at any point of a
    program. The owner of the segment reads these words when it needs memory.

    Args:
        memory: Bytes of the segment.
        heap: Allocator of the part for loans.
    """

    def __init__(self, memory: memoryview, heap: Heap) -> None:
        self._memory, self._heap = memory, heap
        self._loans: dict[int, memoryview] = {}  # by start: the words
        self._released: deque[int] = deque()  # not freed yet, because `release` may interrupt any code
        self._lock = threading.Lock()

    def loan(self, nbytes: int, ranks: int) -> int | None:
        """Return the start of a piece on loan to a number of ranks; None without room."""
        first = _words_offset(nbytes)
        start = self.take(first + ranks * _WORD_BYTES)
        if start is not None:
            words = self._memory[start + first : start + first + ranks * _WORD_BYTES]
            words[:] = bytes(words.nbytes)
            with self._lock:
                self._loans[start] = words.cast("Q")
        return start

    def take(self, nbytes: int) -> int | None:
        """Return the start of a piece that this process itself releases; None without room."""
        with self._lock:
            self._free_released()
            return self._heap.take(nbytes)

    def release(self, start: int) -> None:
        """Release a piece of `take`; in any thread, and at any point of a program."""
        self._released.append(start)

    def _free_released(self) -> None:
        """Free released pieces, and loans that all ranks have released."""
        for start in [start for start, words in self._loans.items() if all(words)]:
            del self._loans[start]
            self._heap.free(start)
        while self._released:
            self._heap.free(self._released.popleft())


def make_releaser(memory: memoryview, start: int, nbytes: int, position: int) -> Callable[[], None]:
    """Return the function that releases a rank's part of a loan; it does nothing in a forked process.

    Args:
        memory: Bytes of the segment.
        start: Start of the loan.
        nbytes: Length of the loan without its words.
        position: Position of the rank in its group.
    """
    first = start + _words_offset(nbytes) + position * _WORD_BYTES
    word, process, present = memory[first : first + _WORD_BYTES].cast("Q"), os.getpid(), os.getpid

    def release() -> None:
        """Mark a rank's part of the loan as released."""
        if present() == process:
            word[0] = 1

    return release


def _words_offset(nbytes: int) -> int:
    return -(-nbytes // _WORD_BYTES) * _WORD_BYTES
