"""Packets and slots: the form of messages between two processes of one host."""

from __future__ import annotations

import struct
from enum import IntEnum

from transports.matching import MessageKind, ProtocolError

#: Messages up to this length travel in a packet. Longer ones are read where they lie, which takes a packet back.
EAGER_BYTES = 16 << 10

_COUNT = 8
#: The longest packet.
PACKET_BYTES = EAGER_BYTES + 8 * (_COUNT + 1)


class Kind(IntEnum):
    """What is said besides the kinds of `MessageKind`. An `OFFER` has two more fields here: where the message lies in
    its sender's memory, and how urgent it is. A `CHUNK` says in which slot it lies: number, offset, nbytes, slot."""

    BYE = 64  #: nothing more will come
    FREED = 65  #: slot: its chunk has been copied
    TOLD = 66  #: for somebody else in this process, see `MemoryLink.hear_told`


_HEADS = [struct.Struct(f"={1 + fields}Q") for fields in range(_COUNT + 1)]
_FIELDS = {
    MessageKind.EAGER: 4,
    MessageKind.OFFER: 7,
    MessageKind.ACCEPT: 1,
    MessageKind.REFUSE: 2,
    MessageKind.CHUNK: 4,
    MessageKind.TAKEN: 1,
    MessageKind.WITHDRAW: 1,
    MessageKind.WITHDRAWN: 1,
    MessageKind.CREDIT: 1,
    MessageKind.ABANDON: 1,
    Kind.BYE: 0,
    Kind.FREED: 1,
    Kind.TOLD: 3,
}
_HEAD_OF = {int(kind): _HEADS[fields] for kind, fields in _FIELDS.items()}


def pack(kind: int, *fields: int) -> bytes:
    """Return a packet, or the head of one with a payload."""
    return _HEADS[len(fields)].pack(kind, *fields)


def unpack(packet: memoryview) -> tuple[int, tuple[int, ...], memoryview]:
    """Return kind, fields and payload.

    Raises:
        ProtocolError: It is none.
    """
    if packet.nbytes < 8:
        raise ProtocolError(f"a packet of {packet.nbytes} bytes")
    (kind,) = _HEADS[0].unpack_from(packet)
    head = _HEAD_OF.get(kind)
    if head is None or packet.nbytes < head.size or (packet.nbytes > head.size and kind != MessageKind.EAGER):
        raise ProtocolError(f"a packet of kind {kind} with {packet.nbytes} bytes")
    return kind, head.unpack_from(packet)[1:], packet[head.size :]


#: Long messages are read, or copied, in pieces of this length. Measured on 64 MiB between two processes: 512 KiB to
#: 2 MiB are alike, 256 KiB takes longer.
SLOT_BYTES = 1 << 20
#: For each direction between two processes: one is filled while another is emptied.
SLOTS = 4


class Slots:
    """The slots of one direction, as who fills or empties them sees them.

    Args:
        memory: What they lie in; None: there are none, for nobody needs them.
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
