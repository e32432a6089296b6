"""Announced messages and early chunks that no receive has met, their budget, and callbacks that hear of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn, TypeVar

from transports.buffers import BounceBuffers
from transports.matching.ends import Lane, Receive
from transports.matching.protocol import Limits, MessageKind, ProtocolError

_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class Arrival:
    """A message that is here before its receive: its bytes, the receive that collects them, or (neither) an offer."""

    number: int
    nbytes: int
    payload: bytes | None = None
    pushed: Receive | None = None
    turn: int = -1  # Among the messages of all processes that waited for a receive

    @property
    def whole(self) -> bool:
        """Whether all of it is here."""
        return self.payload is not None if self.pushed is None else not self.pushed.missing_bytes

    @property
    def held_bytes(self) -> int:
        """The memory that it takes."""
        return len(self.payload or b"") if self.pushed is None else self.nbytes


def pop(queues: dict[Lane, deque[_T]], lane: Lane) -> _T:
    """Take the first of a lane's queue, and forget the queue if that was all."""
    queue = queues[lane]
    one = queue.popleft()
    if not queue:
        del queues[lane]
    return one


def any_of(lane: Lane, free_bits: int) -> Lane:
    """Return the name of all lanes that differ in no more than some low bits of the tag."""
    src, dst, tag = lane
    return src, dst, tag >> free_bits


class Watchers:
    """Callbacks by lane, for messages that no receive waits for.

    Attributes:
        calls: The callbacks, by the free bits of the tag and `any_of` the lane; no entry is empty.
    """

    def __init__(self) -> None:
        self.calls: dict[int, dict[Lane, list[Callable[[], None]]]] = {}

    def add(self, lane: Lane, wake: Callable[[], None], free_bits: int = 0) -> None:
        """Call ``wake`` whenever a message of a lane has been announced that no receive waits for, and at the end.

        Args:
            lane: The lane.
            wake: The callback.
            free_bits: How many low bits of the tag may differ.
        """
        self.calls.setdefault(free_bits, {}).setdefault(any_of(lane, free_bits), []).append(wake)

    def remove(self, lane: Lane, wake: Callable[[], None], free_bits: int = 0) -> None:
        """Remove a callback that `add` added."""
        calls, lanes = self.calls[free_bits], any_of(lane, free_bits)
        calls[lanes].remove(wake)
        if not calls[lanes]:
            del calls[lanes]
        if not calls:
            del self.calls[free_bits]

    def wake(self, lane: Lane) -> None:
        """Call the callbacks of a lane."""
        for free_bits, calls in self.calls.items():
            for wake in calls.get(any_of(lane, free_bits), ()):
                wake()

    def wake_all(self) -> None:
        """Call all callbacks."""
        each = chain.from_iterable(calls.values() for calls in self.calls.values())
        for wake in tuple(chain.from_iterable(each)):
            wake()


class Overtaking:
    """Chunks that come before the announcement of their message; they wait in memory of their own.

    Args:
        limits: The limits of both sides; the budget also bounds the chunks that wait here.
        memory: For the chunks.
    """

    def __init__(self, limits: Limits, memory: BounceBuffers) -> None:
        self._limits, self._memory = limits, memory
        self._pieces: dict[int, dict[int, tuple[memoryview, int]]] = {}  # by number and offset: memory, and length
        self._whole: set[tuple[int, int]] = set()  # chunks that are all here
        self._left_bytes = limits.budget_bytes

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def has(self, number: int, offset: int) -> bool:
        """Whether a chunk waits here, or is on its way to here."""
        return offset in self._pieces.get(number, ())

    def place(self, number: int, offset: int, nbytes: int) -> memoryview:
        """Return the memory in which a chunk waits; one memory also if it comes again because its rail died half-way.

        Raises:
            ProtocolError: No message may have such a chunk unasked, or too many bytes wait already.
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
        """Return the length of a chunk."""
        return self._pieces[number][offset][1]

    def move(self, number: int, offset: int, place: memoryview) -> None:
        """Move a chunk into its place."""
        pieces = self._pieces[number]
        memory, nbytes = pieces.pop(offset)
        if not pieces:
            del self._pieces[number]
        self._whole.discard((number, offset))
        self._left_bytes += nbytes + self._limits.overhead_bytes
        place[:] = memory[:nbytes]
        self._memory.give_back(memory)

    def clear(self) -> None:
        """Forget all chunks."""
        self._pieces.clear()
        self._whole.clear()
        self._left_bytes = self._limits.budget_bytes


class Budget:
    """The bytes that have come unasked, and the part of them that the sender may use again.

    Args:
        limits: The limits of both sides.
        answer: Sends an answer to the other process.
    """

    def __init__(self, limits: Limits, answer: Callable[..., None]) -> None:
        self._answer = answer
        self._budget_bytes, self._overhead_bytes = limits.budget_bytes, limits.overhead_bytes
        self._used_bytes = 0  # as the other side sees it
        self._free_bytes = 0  # of these, received and not yet told to the sender
        self._tell_bytes = limits.budget_bytes // 4

    def spend(self, nbytes: int) -> None:
        """Count a message that has come.

        Raises:
            ProtocolError: The budget is exceeded.
        """
        self._used_bytes += nbytes + self._overhead_bytes
        if self._used_bytes > self._budget_bytes:
            self._refuse()

    def free(self, nbytes: int) -> None:
        """Count a message that has been received, and tell the sender now and then."""
        self._free_bytes += nbytes + self._overhead_bytes
        if self._free_bytes >= self._tell_bytes:
            self._tell()

    def pass_on(self, nbytes: int) -> None:
        """Count a message that is received as it comes.

        Raises:
            ProtocolError: The budget is exceeded.
        """
        cost_bytes = nbytes + self._overhead_bytes
        self._used_bytes += cost_bytes
        self._free_bytes += cost_bytes
        if self._used_bytes > self._budget_bytes:
            self._refuse()
        if self._free_bytes >= self._tell_bytes:
            self._tell()

    def _refuse(self) -> NoReturn:
        raise ProtocolError(f"more eager data than the agreed {self._budget_bytes} bytes")

    def _tell(self) -> None:
        self._used_bytes -= self._free_bytes
        self._answer(MessageKind.CREDIT, self._free_bytes)
        self._free_bytes = 0
