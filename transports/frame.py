"""What travels between two processes: frames, each a fixed prefix, a msgpack header and raw payload. Pure.

::

    | header length, 2 bytes | payload length, 4 bytes | header: msgpack array [kind, *fields] | payload |

A header is an array of unsigned integers, at most `HEADER_LIMIT_BYTES` long, and each kind of frame has exactly its
fields. So a hostile header can neither nest nor grow: what is read of it before it is refused is 64 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import TypeAlias

import msgpack

from transports.matching.protocol import MessageKind, ProtocolError

__all__ = [
    "CHUNK_BYTES",
    "EAGER_BYTES",
    "HEADER_LIMIT_BYTES",
    "LIMITS",
    "PREFIX_BYTES",
    "Frame",
    "FrameError",
    "FrameKind",
    "pack",
    "parse",
]

#: Messages up to this length travel at once, longer ones when the receiver has named their place. Copying this much
#: twice takes 20 us, asking first 80 us and more (measured one way: 64 KiB at once 50 us, 128 KiB after asking 200 us).
EAGER_BYTES = 64 << 10
#: Longer messages are cut in pieces of this length. At 3 GB/s it takes 0.2 ms: what something urgent waits at most,
#: and enough for a system call and a frame (20 us) to count for little.
CHUNK_BYTES = 512 << 10
#: The longest header that this version writes has 43 bytes.
HEADER_LIMIT_BYTES = 64

_PREFIX = struct.Struct("<HI")
PREFIX_BYTES = _PREFIX.size


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
    ALIVE = 10  #: count of frames that have arrived on this rail
    LOST = 11  #: rail, count: that rail is dead; so many frames had arrived on it
    BYE = 12  #: nothing more will come on this rail


_U64, _RANK, _SIZE, _RAIL = 2**64, 2**32, 2**63, 2**16

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
        FrameKind.ALIVE: (_U64,),
        FrameKind.LOST: (_RAIL, _U64),
        FrameKind.BYE: (),
    }
)
# The same with the kind itself in front, as a header has it.
_HEADER_LIMITS = tuple((len(FrameKind), *LIMITS[kind]) for kind in FrameKind)
_PAYLOAD_LIMITS_BYTES = tuple(
    {FrameKind.EAGER: EAGER_BYTES, FrameKind.CHUNK: CHUNK_BYTES}.get(kind, 0) for kind in FrameKind
)


class FrameError(ProtocolError):
    """Bytes that no frame begins with. Nothing after them can be understood."""


#: Kind, fields, where the payload begins, its length: a frame whose header has arrived. A plain tuple, because one is
#: made for every small message, and a class of its own takes a microsecond.
Frame: TypeAlias = "tuple[int, list[int], int, int]"

# Packing a header does not let go of the interpreter, so all threads may share one packer; making one takes longer
# than using it.
_pack_header = msgpack.Packer().pack


def pack(kind: int, *fields: int, payload_bytes: int = 0) -> bytes:
    """Pack prefix and header of a frame; the payload follows them on the wire."""
    header: bytes = _pack_header((kind, *fields))
    return _PREFIX.pack(len(header), payload_bytes) + header


def parse(buffer: bytearray, start: int, end: int) -> Frame | None:
    """Understand the frame that begins at `start`.

    Args:
        buffer: What has arrived lies in `buffer[start:end]`.
        start: Where the frame begins.
        end: What lies from here on means nothing.

    Returns:
        The frame, or None if more of its header must arrive first.

    Raises:
        FrameError: This is no frame.
    """
    if end - start < PREFIX_BYTES:
        return None
    header_bytes, payload_bytes = _PREFIX.unpack_from(buffer, start)
    if header_bytes > HEADER_LIMIT_BYTES:
        raise FrameError(f"a header claims {header_bytes} bytes, the limit is {HEADER_LIMIT_BYTES}")
    if payload_bytes > CHUNK_BYTES:
        raise FrameError(f"a payload claims {payload_bytes} bytes, the limit is {CHUNK_BYTES}")
    payload_at = start + PREFIX_BYTES + header_bytes
    if payload_at > end:
        return None
    try:
        header = msgpack.unpackb(buffer[start + PREFIX_BYTES : payload_at], raw=True)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise FrameError(f"a header is not msgpack: {error!r}") from error
    kind = _checked(header, payload_bytes)
    del header[0]
    return kind, header, payload_at, payload_bytes


def _checked(header: object, payload_bytes: int) -> int:
    """Return the kind of a header in which everything is as it must be."""
    if type(header) is not list or not header or type(header[0]) is not int or header[0] not in LIMITS:
        raise FrameError("a header is no array that begins with a known kind")
    kind: int = header[0]
    limits = _HEADER_LIMITS[kind]
    if len(header) != len(limits):
        raise FrameError(f"{FrameKind(kind).name} has {len(limits) - 1} fields, not {len(header) - 1}")
    for field, limit in zip(header, limits, strict=True):
        if type(field) is not int or not 0 <= field < limit:
            raise FrameError(f"a field of {FrameKind(kind).name} is not in 0 ... {limit - 1}")
    if payload_bytes > _PAYLOAD_LIMITS_BYTES[kind]:
        raise FrameError(f"{FrameKind(kind).name} carries {payload_bytes} bytes")
    return kind
