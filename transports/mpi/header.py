"""The headers that processes send each other ahead of bytes, and how they are read. Pure: neither MPI nor Trio.

A small message travels inside its header (EAGER). A large one is announced (ASK), asked for when a receive is there
(GRANT), and then sent on its own. All integers are little-endian and of fixed length.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import NamedTuple

__all__ = ["HEADER_BYTES", "RANK_LIMIT", "Header", "HeaderError", "Kind", "read"]

#: Names the protocol and its version; processes that run another one are told apart from garbage by nothing else.
MAGIC = b"oMP1"

#: Ranks are unsigned 32-bit integers in a header.
RANK_LIMIT = 2**32

# magic, kind, slot, src, dst, tag, number, nbytes, credit
_LAYOUT = Struct("<4sHHIIQQQQ")

HEADER_BYTES = _LAYOUT.size


class HeaderError(ValueError):
    """What came is no header of ours."""


class Kind(IntEnum):
    """What a header says.

    EAGER carries a message. ASK announces one; the answer is GRANT (send it, in this slot) or REFUSE (the receiver
    expects another length). WITHDRAW takes an ASK back; RECALL asks whether it may still be taken back, and RECALLED
    says that it has been. CREDIT only brings credit, as every header may. BYE is the last header of a process.
    """

    EAGER = 1
    ASK = 2
    GRANT = 3
    REFUSE = 4
    WITHDRAW = 5
    RECALL = 6
    RECALLED = 7
    CREDIT = 8
    BYE = 9


class Header(NamedTuple):
    """One header; a tuple, because one is made for every message.

    Attributes:
        kind: What it says.
        slot: GRANT: which of the receiver's slots the bytes go to.
        src: Sending rank of the message that this is about.
        dst: Its receiving rank.
        tag: Its tag.
        number: Its number among those that the sending process announced to the receiving process.
        nbytes: Its length; REFUSE: the length that was expected.
        credit: Bytes of eager messages that have been consumed since the last header.
    """

    kind: Kind
    slot: int = 0
    src: int = 0
    dst: int = 0
    tag: int = 0
    number: int = 0
    nbytes: int = 0
    credit: int = 0

    def pack(self, payload: memoryview | bytes = b"") -> bytes:
        """Return the header as bytes, followed by the payload of an EAGER message."""
        head = _LAYOUT.pack(MAGIC, *self)
        return b"".join((head, payload)) if self.kind is Kind.EAGER else head


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
    promised = header.nbytes if known is Kind.EAGER else 0
    if len(payload) != promised:
        raise HeaderError(f"{known.name} is followed by {len(payload)} bytes instead of {promised}")
    return header, payload


_KINDS = {int(kind): kind for kind in Kind}
