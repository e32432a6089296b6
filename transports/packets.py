"""Packets: the form of messages on wires that keep the bounds and the order of packets. Pure.

A packet is a kind, as many unsigned integers as belong to it, and the payload of a small message: all little-endian
words of 8 bytes, but for the payload. The fields are those of `MessageKind`; a transport may add some, and kinds of its
own.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from transports.matching import MessageKind, ProtocolError

_WORD_BYTES = 8
_FIELDS: dict[int, int] = {
    MessageKind.EAGER: 4,
    MessageKind.OFFER: 5,
    MessageKind.ACCEPT: 1,
    MessageKind.REFUSE: 2,
    MessageKind.TAKEN: 1,
    MessageKind.WITHDRAW: 1,
    MessageKind.WITHDRAWN: 1,
    MessageKind.CREDIT: 1,
    MessageKind.ABANDON: 1,
}


class Packets:
    """The packets of one transport.

    Args:
        fields: Number of fields of kinds that only this transport has, or that have more fields in it.
        magic: Four bytes that begin every packet, where nothing else refuses processes of another version.

    Attributes:
        head_bytes: The longest packet without its payload.
    """

    def __init__(self, fields: Mapping[int, int], *, magic: bytes = bytes(4)) -> None:
        self._magic = int.from_bytes(magic, "little")
        kinds = _FIELDS | dict(fields)
        self._heads = {int(kind): struct.Struct(f"<II{count}Q") for kind, count in kinds.items()}
        self.head_bytes = max(head.size for head in self._heads.values())

    def pack(self, kind: int, *fields: int) -> bytes:
        """Return a packet, or the head of one with a payload."""
        return self._heads[kind].pack(self._magic, kind, *fields)

    def unpack(self, packet: memoryview) -> tuple[int, tuple[int, ...], memoryview]:
        """Return kind, fields and payload, which is a view of the packet.

        Raises:
            ProtocolError: The packet is too short or too long, or has another magic or an unknown kind.
        """
        nbytes = packet.nbytes
        if nbytes < _WORD_BYTES:
            raise ProtocolError(f"a packet of {nbytes} bytes")
        magic, kind = _START.unpack_from(packet)
        head = self._heads.get(kind)
        if magic != self._magic:
            raise ProtocolError(f"a packet begins with {bytes(packet[:4])!r}, which no member of this version sends")
        if head is None or nbytes < head.size or (nbytes > head.size and kind != MessageKind.EAGER):
            raise ProtocolError(f"a packet of kind {kind} with {nbytes} bytes")
        return kind, head.unpack_from(packet)[2:], packet[head.size :]


_START = struct.Struct("<II")
