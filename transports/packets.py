"""Packets: the form of messages on wires that keep the bounds and the order of packets. Pure.

A packet is a kind, as many unsigned integers as belong to it, all little-endian words of 8 bytes, and the payload of a
small message. The fields are those of `MessageKind`; a transport may add some, and kinds of its
own.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from transports.matching import MessageKind, ProtocolError

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
        magic: Four bytes in the first word of every packet, where nothing else refuses processes of another version.

    Attributes:
        head_bytes: The longest packet without its payload.
    """

    def __init__(self, fields: Mapping[int, int], *, magic: bytes = bytes(4)) -> None:
        kinds = _FIELDS | dict(fields)
        self._magic = int.from_bytes(magic, "little") << 32
        self._eager = self._magic | MessageKind.EAGER
        self._by_count = [struct.Struct(f"<{1 + count}Q") for count in range(max(kinds.values()) + 1)]
        self._heads = {self._magic | kind: self._by_count[count] for kind, count in kinds.items()}
        self.head_bytes: int = self._by_count[-1].size

    def pack(self, kind: int, *fields: int) -> bytes:
        """Return a packet without payload, or the head before a payload."""
        return self._by_count[len(fields)].pack(self._magic | kind, *fields)

    def unpack(self, packet: memoryview) -> tuple[int, tuple[int, ...], memoryview]:
        """Return kind, fields and payload, which is a view of the packet.

        Raises:
            ProtocolError: The packet is too short or too long, or has another magic or an unknown kind.
        """
        nbytes = packet.nbytes
        if nbytes < _WORD.size:
            raise ProtocolError(f"packet of {nbytes} bytes is shorter than its first word of {_WORD.size}")
        (word,) = _WORD.unpack_from(packet)
        head = self._heads.get(word)
        if head is None or nbytes < head.size or (nbytes > head.size and word != self._eager):
            raise self._refusal_error(packet, word)
        return word - self._magic, head.unpack_from(packet)[1:], packet[head.size :]

    def _refusal_error(self, packet: memoryview, word: int) -> ProtocolError:
        """Return the error of an invalid packet: another magic, or a wrong length for its kind."""
        if word >> 32 != self._magic >> 32:
            return ProtocolError(f"packet is marked {bytes(packet[4:8])!r}; install the same overlap in every process")
        return ProtocolError(f"packet of kind {word - self._magic} cannot have {packet.nbytes} bytes")


_WORD = struct.Struct("<Q")
