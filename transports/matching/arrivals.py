"""Announced messages and early chunks without a receive, and their budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from transports.buffers import BounceBuffers
from transports.matching.ends import Lane, Receive
from transports.matching.protocol import Limits, MessageKind, ProtocolError
from transports.signature import OPEN_SIGNATURE, PlainSignature

_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class Arrival:
    """A message without a receive: its bytes, the placeholder receive that collects them, or (neither) an offer."""

    number: int
    nbytes: int
    payload: bytes | None = None
    pushed: Receive | None = None
    signature: PlainSignature = OPEN_SIGNATURE
    place: int = 0  # Of its signature in the table of the sender
    since_ns: int = 0  # Time of the announcement, which orders messages of all processes without a receive

    @property
    def whole(self) -> bool:
        """Whether the whole message has arrived."""
        return self.payload is not None if self.pushed is None else not self.pushed.missing_bytes


def pop_first(queues: dict[Lane, deque[_T]], lane: Lane) -> _T:
    """Return the first entry of a lane's queue, and remove it; an empty queue is dropped."""
    queue = queues[lane]
    first = queue.popleft()
    if not queue:
        del queues[lane]
    return first


class Overtaking:
    """Chunks that arrive before the announcement of their message, in memory of their own.

    Args:
        limits: The limits of both sides; the budget also bounds the chunks that wait here.
        memory: Buffers of the chunks.
    """

    def __init__(self, limits: Limits, memory: BounceBuffers) -> None:
        self._limits, self._memory = limits, memory
        self._pieces: dict[int, dict[int, tuple[memoryview, int]]] = {}  # by number and offset: memory, and length
        self._whole: set[tuple[int, int]] = set()  # complete chunks
        self._room_bytes = limits.budget_bytes

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def has_chunk(self, number: int, offset: int) -> bool:
        """Whether memory is reserved here for a chunk."""
        return offset in self._pieces.get(number, ())

    def chunk_memory(self, number: int, offset: int, nbytes: int) -> memoryview:
        """Return the memory of a chunk; the same memory if the chunk is sent again after the loss of its rail.

        Raises:
            ProtocolError: No pushed message can have such a chunk, or the budget is exceeded.
        """
        limits, pieces = self._limits, self._pieces.get(number, {})
        memory, length = pieces.get(offset) or (None, nbytes)
        if memory is None:
            charged_bytes = nbytes + limits.overhead_bytes
            if offset % limits.chunk_bytes or not 0 < nbytes <= min(limits.chunk_bytes, limits.push_bytes - offset):
                raise ProtocolError(
                    f"message {number}, not announced yet, cannot have a chunk of {nbytes} bytes at {offset}"
                )
            if charged_bytes > self._room_bytes:
                raise ProtocolError(f"peer sent more unannounced data than the agreed {limits.budget_bytes} bytes")
            self._room_bytes -= charged_bytes
            memory = self._memory.take(limits.chunk_bytes)
            self._pieces.setdefault(number, pieces)[offset] = memory, nbytes
        elif length != nbytes or (number, offset) in self._whole:
            raise ProtocolError(f"peer sent the chunk of message {number} at {offset} twice")
        return memory[:nbytes]

    def mark_complete(self, number: int, offset: int) -> None:
        """Record that all bytes of a chunk have arrived."""
        self._whole.add((number, offset))

    def complete_offsets(self, number: int) -> Iterator[int]:
        """Yield the offsets of the complete chunks of a message; the caller may move a chunk before the next one."""
        yield from [offset for offset in self._pieces.get(number, ()) if (number, offset) in self._whole]

    def chunk_bytes(self, number: int, offset: int) -> int:
        """Return the length of a chunk."""
        return self._pieces[number][offset][1]

    def move_chunk(self, number: int, offset: int, place: memoryview) -> None:
        """Copy a chunk into the buffer of its message, and free its memory here."""
        pieces = self._pieces[number]
        memory, nbytes = pieces.pop(offset)
        if not pieces:
            del self._pieces[number]
        self._whole.discard((number, offset))
        self._room_bytes += nbytes + self._limits.overhead_bytes
        place[:] = memory[:nbytes]
        self._memory.release(memory)

    def clear(self) -> None:
        """Drop all chunks."""
        self._pieces.clear()
        self._whole.clear()
        self._room_bytes = self._limits.budget_bytes


class Budget:
    """The credit of the other process: bytes that it sent unasked, and bytes that ranks have received since.

    Args:
        limits: The limits of both sides.
        answer: Sends an answer to the other process.
    """

    def __init__(self, limits: Limits, answer: Callable[..., None]) -> None:
        self._answer = answer
        self._budget_bytes, self._overhead_bytes = limits.budget_bytes, limits.overhead_bytes
        self._used_bytes = 0  # as the other side sees it
        self._free_bytes = 0  # received by ranks, and not yet returned to the sender as credit
        self._report_bytes = limits.budget_bytes // 4

    def spend(self, nbytes: int) -> None:
        """Count a message that arrived and waits for its receive.

        Raises:
            ProtocolError: The budget is exceeded.
        """
        self._used_bytes += nbytes + self._overhead_bytes
        if self._used_bytes > self._budget_bytes:
            raise ProtocolError(f"peer sent more eager data than the agreed {self._budget_bytes} bytes")

    def free(self, nbytes: int) -> None:
        """Count a waiting message that a rank has received; send credit from a quarter of the budget on."""
        self._free_bytes += nbytes + self._overhead_bytes
        if self._free_bytes >= self._report_bytes:
            self._used_bytes -= self._free_bytes
            self._answer(MessageKind.CREDIT, self._free_bytes)
            self._free_bytes = 0
