"""The headers that processes send each other ahead of bytes, and how they are read. Pure: neither MPI nor Trio.

A small message travels inside its header (EAGER). A large one is announced, accepted when a receive is there, and then
sent on its own; what that means is `transports.matching`'s. All integers are little-endian and of fixed length.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from transports.matching import MessageKind, ProtocolError

#: Names the protocol and its version; processes that run another one are told apart from garbage by nothing else.
MAGIC = b"oMP2"

# magic, kind, slot, src, dst, tag, number, nbytes
_LAYOUT = Struct("<4sHHIIQQQ")

HEADER_BYTES = _LAYOUT.size


class HeaderError(ProtocolError):
    """What came is no header of ours."""


class HeaderKind(IntEnum):
    """What a header says: something about a message, see `MessageKind`, or (BYE) that it is the last of a process."""

    EAGER = MessageKind.EAGER
    OFFER = MessageKind.OFFER
    ACCEPT = MessageKind.ACCEPT
    REFUSE = MessageKind.REFUSE
    TAKEN = MessageKind.TAKEN
    WITHDRAW = MessageKind.WITHDRAW
    WITHDRAWN = MessageKind.WITHDRAWN
    CREDIT = MessageKind.CREDIT
    ABANDON = MessageKind.ABANDON
    BYE = 12


class Header(NamedTuple):
    """One header; a tuple, because one is made for every message."""

    kind: HeaderKind  # What it says
    slot: int = 0  # ACCEPT: which of the receiver's slots the bytes go to
    src: int = 0  # EAGER, OFFER: sending rank
    dst: int = 0  # Its receiving rank
    tag: int = 0  # Its tag
    number: int = 0  # Of the announcement that this is, or is about
    nbytes: int = 0  # Length of the message; REFUSE: the length that was expected; CREDIT: what has been consumed

    def pack(self, payload: memoryview | bytes = b"") -> bytes:
        """Return the header as bytes, followed by the payload of an EAGER message."""
        head = _LAYOUT.pack(MAGIC, *self)
        return b"".join((head, payload)) if self.kind is HeaderKind.EAGER else head

    @property
    def fields(self) -> tuple[int, ...]:
        """What belongs to a `MessageKind` of the same name, in its order."""
        if self.kind is HeaderKind.EAGER:
            return self.number, self.src, self.dst, self.tag
        if self.kind is HeaderKind.OFFER:
            return self.number, self.src, self.dst, self.tag, self.nbytes
        if self.kind is HeaderKind.REFUSE:
            return self.number, self.nbytes
        return (self.nbytes if self.kind is HeaderKind.CREDIT else self.number,)


def header_of(kind: int, fields: tuple[int, ...], *, slot: int = 0, payload_bytes: int = 0) -> Header:
    """Return the header that says what a matching engine wants to say."""
    known = _KINDS[kind]
    if known is HeaderKind.EAGER or known is HeaderKind.OFFER:
        number, src, dst, tag, *nbytes = fields
        return Header(known, 0, src, dst, tag, number, nbytes[0] if nbytes else payload_bytes)
    if known is HeaderKind.CREDIT:
        return Header(known, nbytes=fields[0])
    return Header(known, slot, number=fields[0], nbytes=fields[1] if known is HeaderKind.REFUSE else 0)


def read(message: memoryview) -> tuple[Header, memoryview]:
    """Return the header and the payload behind it, which is a view of ``message``.

    Raises:
        HeaderError: Too short, another protocol, an unknown kind, or a payload that is not as long as the header says.
    """
    if len(message) < HEADER_BYTES:
        raise HeaderError(f"{len(message)} bytes are no header, which has {HEADER_BYTES}")
    magic, kind, *rest = _LAYOUT.unpack_from(message)
    if magic != MAGIC:
        raise HeaderError(f"a header starts with {MAGIC!r}, this one with {magic!r}")
    known = _KINDS.get(kind)
    if known is None:
        raise HeaderError(f"there is no header of kind {kind}")
    header, payload = Header(known, *rest), message[HEADER_BYTES:]
    promised = header.nbytes if known is HeaderKind.EAGER else 0
    if len(payload) != promised:
        raise HeaderError(f"{known.name} is followed by {len(payload)} bytes instead of {promised}")
    return header, payload


_KINDS = {int(kind): kind for kind in HeaderKind}
