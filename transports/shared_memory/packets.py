"""The form of what two processes of one host say to each other: packets of unsigned integers, and a payload.

A socket of packets keeps their bounds and their order. Both sides run on one machine, so its own byte order will do.
"""

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
