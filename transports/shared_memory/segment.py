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
    """Memory without a name, of fixed size, that several processes map; it lasts as long as any process maps it.

    Args:
        mapped: The bytes of the segment, mapped in this process.
        fd: Descriptor of the segment, to be passed to other processes; -1: it is not passed on.

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
        """Create a segment of `nbytes`.

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
                raise OSError(
                    "its process could shrink it while it is used, as it has no seals (memfd_create, F_ADD_SEALS); "
                    "install the same overlap in every process, and let the sandbox, if there is one, allow seals"
                )
            return cls(mmap.mmap(fd, os.fstat(fd).st_size), -1)
        finally:
            os.close(fd)

    def fileno(self) -> int:
        """Return the descriptor for other processes; -1 if another process made the segment or it is closed already."""
        return self._fd

    def close_descriptor(self) -> None:
        """Close the descriptor, which every process has received. The mapping stays."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


_PAGE_BYTES = 4096


class Heap:
    """Allocator of pieces of a segment. Pieces have few sizes, so that free ones can be used again (`_piece_bytes`).

    Args:
        start: Offset in the segment at which the memory for pieces begins.
        stop: Offset at which it ends.
    """

    def __init__(self, start: int, stop: int) -> None:
        self._next, self._stop = start, stop
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # by size: offsets of free pieces
        self._sizes: dict[int, int] = {}  # sizes of the pieces in use, by offset

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a piece of at least `nbytes`, which is in use from now on; None if no room is left."""
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
        """Free the piece that `allocate` returned with this offset."""
        # used again for pieces of the same size only: neighbouring pieces are not joined
        self._free[self._sizes.pop(start)].append(start)


def _piece_bytes(nbytes: int) -> int:
    """Return a length rounded up to whole pages, and to one of four sizes between two powers of two.

    Between 64 and 128 KiB, for example, the sizes are 80, 96, 112 and 128 KiB.
    """
    nbytes = max(nbytes, _PAGE_BYTES)
    unit = max(_PAGE_BYTES, 1 << (nbytes - 1).bit_length() - 3)
    return -(-nbytes // unit) * unit


_WORD_BYTES = 8  # of the word behind a loan that a rank sets to 1 when it releases its part


class LoanPool:
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
        self._loans: dict[int, memoryview] = {}  # by offset of a loan: the words of its ranks
        self._released: deque[int] = deque()  # released pieces, not freed yet: `release` may interrupt any code
        self._lock = threading.Lock()

    def loan(self, nbytes: int, ranks: int) -> int | None:
        """Loan a piece of `nbytes` to a number of ranks, and return its offset; None if no room is left.

        Each rank releases its part by a function of `make_releaser`.
        """
        first = _words_offset(nbytes)
        start = self.allocate(first + ranks * _WORD_BYTES)
        if start is not None:
            words = self._memory[start + first : start + first + ranks * _WORD_BYTES]
            words[:] = bytes(words.nbytes)
            with self._lock:
                self._loans[start] = words.cast("Q")
        return start

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a piece of `nbytes` that this process itself releases; None if no room is left."""
        with self._lock:
            self._free_released()
            return self._heap.allocate(nbytes)

    def release(self, start: int) -> None:
        """Release the piece that `allocate` returned with this offset; in any thread, and at any point of a program."""
        self._released.append(start)

    def _free_released(self) -> None:
        """Free released pieces, and loans that all ranks have released."""
        for start in [start for start, words in self._loans.items() if all(words)]:
            del self._loans[start]
            self._heap.free(start)
        while self._released:
            self._heap.free(self._released.popleft())


def make_releaser(memory: memoryview, start: int, nbytes: int, position: int) -> Callable[[], None]:
    """Return the function that releases a rank's part of a loan of `LoanPool.loan`, unless it runs in a fork.

    Behind the bytes of the loan there is a word of 8 bytes for each rank. The function sets the rank's word to 1.

    Args:
        memory: Bytes of the segment.
        start: Offset of the loan.
        nbytes: Length of the loan, without the words behind it.
        position: Position of the rank in its group.
    """
    first = start + _words_offset(nbytes) + position * _WORD_BYTES
    # A forked process shares the memory, and must not release a loan that its parent still reads: its id differs.
    word, pid = memory[first : first + _WORD_BYTES].cast("Q"), os.getpid()
    getpid = os.getpid  # kept here: `release` may be called while the interpreter ends

    def release() -> None:
        if getpid() == pid:
            word[0] = 1

    return release


def _words_offset(nbytes: int) -> int:
    """Return the offset, from the start of a loan of `nbytes`, of the words behind it: `nbytes` rounded up to 8."""
    return -(-nbytes // _WORD_BYTES) * _WORD_BYTES
