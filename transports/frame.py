"""What travels between two processes: frames, each a fixed prefix, a msgpack header and raw payload. Pure.

::

    | checksum, 8 bytes | header length, 2 | payload length, 4 | payload's checksum, 8 | header | payload |

The first checksum is of everything from itself to the end of the header, so no length or field is believed that came
damaged; the payload's own one is zero where the sender has left it out. They find accidents, not attackers: for these
there is TLS.

A header is a msgpack array [kind, *fields] of unsigned integers, at most `HEADER_LIMIT_BYTES` long, and each kind of
frame has exactly its fields. So a hostile header can neither nest nor grow: what is read of it before it is refused is
64 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Annotated, TypeAlias

import msgspec
import xxhash

from transports.matching.protocol import MessageKind, ProtocolError

__all__ = [
    "CHUNK_BYTES",
    "EAGER_BYTES",
    "HEADER_LIMIT_BYTES",
    "KEPT_BYTES",
    "LIMITS",
    "LOCAL_CHUNK_BYTES",
    "PREFIX_BYTES",
    "PUSH_BYTES",
    "UNCHECKED",
    "Frame",
    "FrameError",
    "FrameKind",
    "checksum",
    "damaged",
    "pack",
    "parse",
]

#: Messages up to this length travel at once, longer ones when the receiver has named their place. Copying this much
#: twice takes 20 us, asking first 80 us and more (measured one way: 64 KiB at once 50 us, 128 KiB after asking 200 us).
EAGER_BYTES = 64 << 10
#: Longer messages are cut in pieces of this length. At 1 GB/s it takes 0.5 ms: what something urgent waits at most,
#: and enough for a system call and a frame (20 us) to count for little.
CHUNK_BYTES = 512 << 10
#: The same inside one host, over a single connection: 0.5 ms at 4 GB/s. What a chunk costs in Python, 60 us, counts
#: there where processes share cores: all_reduce of 4 MiB among 4 on two takes 7 ms, in pieces of 512 KiB 8.9.
LOCAL_CHUNK_BYTES = 2 << 20
#: Messages up to this length follow their announcement unasked. One that comes before its receive is copied once more.
PUSH_BYTES = 4 << 20
#: Messages up to this length have been sent when they have left: a copy is kept of what a connection may have lost.
#: Measured over loopback TCP, 4 processes on 2 cores: a broadcast of 256 KiB that need not wait until three others have
#: woken up and received takes its root 1.3 ms, not 3.4.
KEPT_BYTES = 512 << 10
#: The longest header that this version writes has 43 bytes.
HEADER_LIMIT_BYTES = 64

#: Of a header or a payload: XXH3 of 64 bits. On the two cores of the measurements it takes 0.11 us of a header and
#: 14 us of a chunk, where CRC-32C takes 0.23 and 24 us, and CRC-32 of zlib 0.2 and 240 us.
checksum = xxhash.xxh3_64_digest
#: In place of a payload's checksum: there is none.
UNCHECKED = bytes(8)

_CHECKSUM_BYTES = len(UNCHECKED)
_LENGTHS = struct.Struct("<HI8s")
PREFIX_BYTES = _CHECKSUM_BYTES + _LENGTHS.size


class FrameKind(IntEnum):
    """What a frame says: something about messages, see `MessageKind`, or about the connection that it comes on."""

    EAGER = MessageKind.EAGER
    OFFER = MessageKind.OFFER
    ACCEPT = MessageKind.ACCEPT
    REFUSE = MessageKind.REFUSE
    CHUNK = MessageKind.CHUNK
    TAKEN = MessageKind.TAKEN
    WITHDRAW = MessageKind.WITHDRAW
    WITHDRAWN = MessageKind.WITHDRAWN
    CREDIT = MessageKind.CREDIT
    ABANDON = MessageKind.ABANDON
    PUSH = MessageKind.PUSH
    ALIVE = 11  #: count of frames that have arrived on this rail
    LOST = 12  #: rail, count: that rail is dead; so many frames had arrived on it
    BYE = 13  #: nothing more will come on this rail


_U64, _RANK, _SIZE, _RAIL = 2**64, 2**32, 2**63, 2**32

#: What the fields of each kind are below.
LIMITS: Mapping[int, tuple[int, ...]] = MappingProxyType(
    {
        FrameKind.EAGER: (_U64, _RANK, _RANK, _U64),
        FrameKind.OFFER: (_U64, _RANK, _RANK, _U64, _SIZE),
        FrameKind.ACCEPT: (_U64,),
        FrameKind.REFUSE: (_U64, _SIZE),
        FrameKind.CHUNK: (_U64, _SIZE),
        FrameKind.TAKEN: (_U64,),
        FrameKind.WITHDRAW: (_U64,),
        FrameKind.WITHDRAWN: (_U64,),
        FrameKind.CREDIT: (_SIZE,),
        FrameKind.ABANDON: (_U64,),
        FrameKind.PUSH: (_U64, _RANK, _RANK, _U64, _SIZE),
        FrameKind.ALIVE: (_U64,),
        FrameKind.LOST: (_RAIL, _U64),
        FrameKind.BYE: (),
    }
)
_KINDS = len(FrameKind)  # asking an enumeration takes 1 us, for each frame
_FIELD_COUNTS = tuple(len(LIMITS[kind]) for kind in FrameKind)
# Place in the header and limit of every field that msgpack itself does not limit: it knows no larger integers.
_NARROW = tuple(
    tuple((place, limit) for place, limit in enumerate(LIMITS[kind], 1) if limit < _U64) for kind in FrameKind
)
_PAYLOAD_LIMITS_BYTES = tuple(
    {FrameKind.EAGER: EAGER_BYTES, FrameKind.CHUNK: LOCAL_CHUNK_BYTES}.get(kind, 0) for kind in FrameKind
)


class FrameError(ProtocolError):
    """Bytes that no frame begins with. Nothing after them can be understood."""


#: Kind, fields, where the payload begins, its length, its checksum: a frame whose header has arrived. A plain tuple,
#: because one is made for every small message, and a class of its own takes a microsecond.
Frame: TypeAlias = "tuple[int, list[int], int, int, bytes]"

# Packing a header does not let go of the interpreter, so all threads may share one encoder; making one takes longer
# than using it.
_pack_header = msgspec.msgpack.Encoder().encode
_unpack_header = msgspec.msgpack.Decoder(list[Annotated[int, msgspec.Meta(ge=0)]]).decode
_SHORT_ARRAY = 0x90  # what a msgpack array of up to 15 elements begins with; the others claim a length of 2 or 4 bytes


def pack(kind: int, *fields: int, payload_bytes: int = 0, payload_checksum: bytes = UNCHECKED) -> bytes:
    """Pack prefix and header of a frame; the payload follows them on the wire."""
    header = _pack_header((kind, *fields))
    checked = _LENGTHS.pack(len(header), payload_bytes, payload_checksum) + header
    return checksum(checked) + checked


def parse(buffer: bytearray, start: int, end: int) -> Frame | None:
    """Understand the frame that begins at `start`.

    Args:
        buffer: What has arrived lies in `buffer[start:end]`.
        start: Where the frame begins.
        end: What lies from here on means nothing.

    Returns:
        The frame, or None if more of its header must arrive first.

    Raises:
        FrameError: This is no frame, or one that came damaged.
    """
    if end - start < PREFIX_BYTES:
        return None
    checked_at = start + _CHECKSUM_BYTES
    header_bytes, payload_bytes, payload_checksum = _LENGTHS.unpack_from(buffer, checked_at)
    if header_bytes > HEADER_LIMIT_BYTES:
        raise FrameError(f"a header claims {header_bytes} bytes, the limit is {HEADER_LIMIT_BYTES}")
    if payload_bytes > LOCAL_CHUNK_BYTES:
        raise FrameError(f"a payload claims {payload_bytes} bytes, the limit is {LOCAL_CHUNK_BYTES}")
    header_at = start + PREFIX_BYTES
    payload_at = header_at + header_bytes
    if payload_at > end:
        return None
    if checksum(buffer[checked_at:payload_at]) != buffer[start:checked_at]:
        raise FrameError("a header came damaged: it does not match its checksum")
    header = _understood(buffer[header_at:payload_at])
    kind = _checked(header, payload_bytes)
    del header[0]
    return kind, header, payload_at, payload_bytes, payload_checksum


def damaged(payload: memoryview, expected: bytes) -> bool:
    """Whether a payload does not match its checksum, if it has one."""
    return expected != UNCHECKED and checksum(payload) != expected


def _understood(header: bytearray) -> list[int]:
    if not header or header[0] & 0xF0 != _SHORT_ARRAY:
        raise FrameError("a header is no short msgpack array")
    try:
        return _unpack_header(header)
    except msgspec.DecodeError as error:
        raise FrameError(f"a header is no msgpack array of unsigned integers: {error}") from error


def _checked(header: list[int], payload_bytes: int) -> int:
    """Return the kind of a header in which everything is as it must be."""
    if not header or header[0] >= _KINDS:
        raise FrameError("a header does not begin with a known kind")
    kind = header[0]
    if len(header) != _FIELD_COUNTS[kind] + 1:
        raise FrameError(f"{FrameKind(kind).name} has {_FIELD_COUNTS[kind]} fields, not {len(header) - 1}")
    for place, limit in _NARROW[kind]:
        if header[place] >= limit:
            raise FrameError(f"a field of {FrameKind(kind).name} is not in 0 ... {limit - 1}")
    if payload_bytes > _PAYLOAD_LIMITS_BYTES[kind]:
        raise FrameError(f"{FrameKind(kind).name} carries {payload_bytes} bytes")
    return kind
