"""Slots of shared memory: for whole messages, and for pieces where processes may not read each other's memory. Pure."""

from __future__ import annotations

from transports.matching import ProtocolError
from transports.shared_memory.ordering import FENCED, keep_order

#: Long messages are read, or copied, in pieces of this length. Measured on 64 MiB between two processes: 512 KiB to
#: 2 MiB are alike, 256 KiB takes longer.
SLOT_BYTES = 1 << 20
#: For each direction between two processes: one is filled while another is emptied.
SLOTS = 4


def _part(memory: memoryview | None, slot: int, nbytes: int) -> memoryview:
    """Return the first bytes of a slot.

    Raises:
        ProtocolError: There is none.
    """
    if memory is None or not 0 <= slot < SLOTS or not 0 <= nbytes <= SLOT_BYTES:
        raise ProtocolError(f"slot {slot} with {nbytes} bytes, of {SLOTS} with {SLOT_BYTES}")
    start = slot * SLOT_BYTES
    return memory[start : start + nbytes]


class Places:
    """The slots of one direction where each holds a whole message, as seen by one of the two processes.

    No packet tells that a slot has been emptied: a word of each says whether it is full.

    Args:
        memory: The slots.
        full: The words.
    """

    def __init__(self, memory: memoryview, full: memoryview) -> None:
        self._memory, self._full = memory, full

    def put(self, message: memoryview) -> int | None:
        """Copy a message into an empty slot, and return which; None: it is too long, or all slots are full."""
        if message.nbytes > SLOT_BYTES:
            return None
        for slot in range(SLOTS):  # the first one is the likeliest to be in a cache
            if not self._full[slot]:
                if not FENCED:
                    keep_order()
                self.view(slot, message.nbytes)[:] = message
                self._full[slot] = 1
                return slot
        return None

    def view(self, slot: int, nbytes: int) -> memoryview:
        """Return a message.

        Raises:
            ProtocolError: There is no such slot.
        """
        return _part(self._memory, slot, nbytes)

    def emptied(self, slot: int) -> None:
        """Let the other process use a slot again."""
        if not FENCED:
            keep_order()
        self._full[slot] = 0


class Slots:
    """The slots of one direction, as seen by the process that fills or empties them.

    Args:
        memory: Their memory; None: there are no slots, because none are needed.
    """

    def __init__(self, memory: memoryview | None) -> None:
        self._memory = memory
        self._free = [] if memory is None else list(range(SLOTS))

    @property
    def free(self) -> bool:
        """Whether there is room for another piece."""
        return bool(self._free)

    def fill(self, piece: memoryview) -> int:
        """Copy a piece into a slot and return which."""
        slot = self._free.pop()
        self.view(slot, piece.nbytes)[:] = piece
        return slot

    def view(self, slot: int, nbytes: int) -> memoryview:
        """Return the bytes of a slot.

        Raises:
            ProtocolError: There is none.
        """
        return _part(self._memory, slot, nbytes)

    def freed(self, slot: int) -> None:
        """Use a slot again.

        Raises:
            ProtocolError: It was not in use.
        """
        if self._memory is None or not 0 <= slot < SLOTS or slot in self._free:
            raise ProtocolError(f"slot {slot} is said to be free, but was not in use")
        self._free.append(slot)
