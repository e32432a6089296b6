"""Slots of shared memory for long messages between processes that may not read each other's memory. Pure."""

from __future__ import annotations

from transports.matching import ProtocolError

#: Long messages are read, or copied, in pieces of this length. Measured on 64 MiB between two processes: 512 KiB to
#: 2 MiB are alike, 256 KiB takes longer.
SLOT_BYTES = 1 << 20
#: For each direction between two processes: one is filled while another is emptied.
SLOTS = 4


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
        if self._memory is None or not 0 <= slot < SLOTS or nbytes > SLOT_BYTES:
            raise ProtocolError(f"slot {slot} with {nbytes} bytes, of {SLOTS} with {SLOT_BYTES}")
        start = slot * SLOT_BYTES
        return self._memory[start : start + nbytes]

    def freed(self, slot: int) -> None:
        """Use a slot again.

        Raises:
            ProtocolError: It was not in use.
        """
        if self._memory is None or not 0 <= slot < SLOTS or slot in self._free:
            raise ProtocolError(f"slot {slot} is said to be free, but was not in use")
        self._free.append(slot)
