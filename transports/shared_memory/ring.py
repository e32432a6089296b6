"""Rings: packets from one process to another, in memory that both map. Neither side makes a system call for one.

The writer counts the bytes it has written, the reader those it has read; each count has one writer. A packet lies in
one piece, behind a word with its length, and begins at a multiple of 8 bytes. Where it does not fit before the end of
the memory, a mark takes the rest of the memory, and the packet begins anew.
"""

from __future__ import annotations

from transports.matching import ProtocolError
from transports.shared_memory.ordering import FENCED, fence, keep_order

#: Memory of the packets from one process to another: room for some fifteen of the longest.
RING_BYTES = 1 << 20

_WORD = 8
# The counts lie in cache lines of their own: by index of the word.
_WRITTEN, _READ, _FULL, _SPARE = 0, 8, 16, 24
_HEAD_BYTES = 256
_ROOM = RING_BYTES - _HEAD_BYTES
_REST = (1 << 64) - 1  # stands for a length: the packet begins anew


def spare_words(memory: memoryview) -> memoryview:
    """Return words of a ring's memory that belong to no packet, for other news between the two processes."""
    return memory[:_HEAD_BYTES].cast("Q")[_SPARE:]


class OutRing:
    """The end of a ring to which packets are written.

    Args:
        memory: `RING_BYTES` of zeros, which the reader maps as well.
    """

    __slots__ = ("_bytes", "_lengths", "_read", "_words", "_written")

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[:_HEAD_BYTES].cast("Q")
        self._bytes = memory[_HEAD_BYTES:]
        self._lengths = self._bytes.cast("Q")
        self._written = self._read = 0

    def write(self, head: bytes, payload: bytes | memoryview = b"") -> bool:
        """Write a packet of two parts; False, with nothing written, if there is no room."""
        nbytes = len(head) + len(payload)
        taken = (nbytes + 2 * _WORD - 1) & -_WORD
        at = self._written % _ROOM
        skipped = _ROOM - at if taken > _ROOM - at else 0
        if self._written + skipped + taken - self._read > _ROOM:
            self._read = self._words[_READ]
            if not 0 <= self._written + skipped + taken - self._read <= _ROOM:
                return False
        if skipped:
            self._lengths[at // _WORD] = _REST
            at = 0
        self._lengths[at // _WORD] = nbytes
        first = at + _WORD
        middle = first + len(head)
        self._bytes[first:middle] = head
        if payload:
            self._bytes[middle : first + nbytes] = payload
        if not FENCED:
            keep_order()
        self._written += skipped + taken
        self._words[_WRITTEN] = self._written
        return True

    @property
    def drained(self) -> bool:
        """Whether packets have been read since there was no room for one."""
        return self._words[_READ] != self._read

    def say_full(self, full: bool) -> None:
        """Let the reader know whether this process waits for room."""
        self._words[_FULL] = full


class InRing:
    """The end of a ring from which packets are read.

    Args:
        memory: As for the other end.
    """

    __slots__ = ("_bytes", "_lengths", "_next", "_read", "_words")

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[:_HEAD_BYTES].cast("Q")
        self._bytes = memory[_HEAD_BYTES:]
        self._lengths = self._bytes.cast("Q")
        self._read = self._next = 0

    @property
    def waits(self) -> bool:
        """Whether there is a packet."""
        return self._words[_WRITTEN] != self._read

    def peek(self) -> memoryview | None:
        """Return the oldest packet, which stays where it is until `drop`; None if there is none.

        Raises:
            ProtocolError: The other process has written nonsense.
        """
        left = self._words[_WRITTEN] - self._read
        if not left:
            return None
        if not FENCED:
            keep_order()
        at = self._read % _ROOM
        nbytes = self._lengths[at // _WORD]
        if nbytes == _REST:
            left -= _ROOM - at
            self._read += _ROOM - at
            at, nbytes = 0, self._lengths[0]
        taken = (nbytes + 2 * _WORD - 1) & -_WORD
        if not 0 < taken <= left <= _ROOM or at + taken > _ROOM:
            raise ProtocolError(f"a packet of {nbytes} bytes, where {left} are new")
        self._next = self._read + taken
        return self._bytes[at + _WORD : at + _WORD + nbytes]

    def drop(self) -> None:
        """Let the oldest packet's place be used again."""
        if not FENCED:
            keep_order()
        self._read = self._words[_READ] = self._next

    @property
    def wanted(self) -> bool:
        """Whether the other process waits for room, of which it may not know yet."""
        fence()  # either the writer sees the room, or this process sees that the writer waits for it
        return bool(self._words[_FULL])
