"""Frames between two processes: a header of fixed form and a raw payload each. Pure.

::

    | checksum, 8 bytes | kind, 1 | payload length, 4 | payload's checksum, 8 | fields | payload |

The first checksum is of everything from the kind to the last field, so no length or field is believed that came
damaged; the payload's own one is zero where the sender has left it out. They find accidents, not attackers: for these
there is TLS.

Fields are unsigned integers of 4 or 8 bytes, and each kind of frame has exactly its own: its header is one `struct`.
So nothing in a header can nest or grow, and at most `HEADER_LIMIT_BYTES` of it are read before it is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import xxhash

from transports.matching.protocol import MessageKind, ProtocolError
from transports.signature import TEXT_BYTES

#: Messages up to this length travel at once, longer ones when the receiver has named their buffer. Copying this much
#: twice takes 20 us, asking first 80 us and more (measured one way: 64 KiB at once 50 us, 128 KiB after asking 200 us).
EAGER_BYTES = 64 << 10
#: Longer messages are cut in pieces of this length. At 1 GB/s a piece takes 0.5 ms: the longest wait of an urgent
#: message, and enough for a system call and a frame (20 us) to count for little.
CHUNK_BYTES = 512 << 10
#: Length of pieces inside one host, over a single connection: 0.5 ms at 4 GB/s. The 60 us of Python for each chunk
#: count there where processes share cores: all_reduce of 4 MiB among 4 on two takes 7 ms, in pieces of 512 KiB 8.9.
LOCAL_CHUNK_BYTES = 2 << 20
#: Messages up to this length follow their announcement unasked, at the cost of a copy if the receive is late.
PUSH_BYTES = 4 << 20
#: Sends up to this length end when the bytes have left: a copy is kept in case a connection loses them.
#: Measured over loopback TCP, 4 processes on 2 cores: a broadcast of 256 KiB that need not wait until three others have
#: woken up and received takes its root 1.3 ms, not 3.4.
KEPT_BYTES = 512 << 10

#: Checksum of a header or a payload: XXH3 of 64 bits. On the two cores of the measurements it takes 0.11 us of a header
#: and 14 us of a chunk, where CRC-32C takes 0.23 and 24 us, and CRC-32 of zlib 0.2 and 240 us.
checksum: Callable[[bytes | bytearray | memoryview], bytes] = xxhash.xxh3_64_digest
#: Stands in the header of a payload without a checksum.
UNCHECKED = bytes(8)

_CHECKSUM_BYTES = len(UNCHECKED)


#: The fields of each kind, as `struct` names them: Q has 8 bytes, I (a rank, the place of a signature, or the number of
#: a rail) has 4.
FIELDS: Mapping[int, str] = MappingProxyType(
    {
        MessageKind.EAGER: "QIIQI",
        MessageKind.OFFER: "QIIQQI",
        MessageKind.ACCEPT: "Q",
        MessageKind.REFUSE: "QQQ",
        MessageKind.CHUNK: "QQ",
        MessageKind.TAKEN: "Q",
        MessageKind.WITHDRAW: "Q",
        MessageKind.WITHDRAWN: "Q",
        MessageKind.CREDIT: "Q",
        MessageKind.ABANDON: "Q",
        MessageKind.PUSH: "QIIQQI",
        MessageKind.SIGNATURE: "QIQ",
        MessageKind.ALIVE: "Q",
        MessageKind.LOST: "IQ",
        MessageKind.BYE: "",
        MessageKind.PUSHED_CHUNK: "QIIQQIQ",
    }
)
_KINDS = len(MessageKind)  # asking an enumeration takes 1 us, for each frame
# without their checksum
_HEADERS = tuple(struct.Struct(f"<BI{_CHECKSUM_BYTES}s{FIELDS[kind]}") for kind in MessageKind)
#: The longest header of a frame.
HEADER_LIMIT_BYTES = _CHECKSUM_BYTES + max(header.size for header in _HEADERS)
_PAYLOAD_LIMITS_BYTES = tuple(
    {
        MessageKind.EAGER: EAGER_BYTES,
        MessageKind.CHUNK: LOCAL_CHUNK_BYTES,
        MessageKind.PUSHED_CHUNK: LOCAL_CHUNK_BYTES,
        MessageKind.REFUSE: TEXT_BYTES,
        MessageKind.SIGNATURE: TEXT_BYTES,
    }.get(kind, 0)
    for kind in MessageKind
)


class FrameError(ProtocolError):
    """Bytes that are no frame. Nothing after them can be parsed."""


class DamageError(FrameError):
    """Bytes that were damaged on the way."""


#: Kind, fields, where the payload begins, its length, its checksum: a frame whose header has arrived. A plain tuple,
#: because one is made for every small message, and a class of its own takes a microsecond.
Frame: TypeAlias = "tuple[int, list[int], int, int, bytes]"


def pack(kind: int, *fields: int, payload_bytes: int = 0, payload_checksum: bytes = UNCHECKED) -> bytes:
    """Return the header of a frame as bytes; the payload follows the header on the wire."""
    checked = _HEADERS[kind].pack(kind, payload_bytes, payload_checksum, *fields)
    return checksum(checked) + checked


def parse(buffer: bytearray, start: int, end: int) -> Frame | None:
    """Parse the frame that begins at `start`.

    Args:
        buffer: Holds the arrived bytes in `buffer[start:end]`.
        start: Offset of the frame.
        end: Offset of the end of the arrived bytes.

    Returns:
        The frame, or None if more of its header must arrive first.

    Raises:
        FrameError: The bytes are no frame, or a damaged one (`DamageError`).
    """
    checked_at = start + _CHECKSUM_BYTES
    if checked_at >= end:
        return None
    kind = buffer[checked_at]
    if kind >= _KINDS:
        raise FrameError(f"frame kind {kind} is unknown; kinds are 0 to {_KINDS - 1}")
    header = _HEADERS[kind]
    payload_at = checked_at + header.size
    if payload_at > end:
        return None
    if not buffer.startswith(checksum(buffer[checked_at:payload_at]), start):
        raise DamageError("frame header damaged: it does not match its checksum")
    _, payload_bytes, payload_checksum, *fields = header.unpack_from(buffer, checked_at)
    if payload_bytes > _PAYLOAD_LIMITS_BYTES[kind]:
        raise FrameError(
            f"{MessageKind(kind).name} frame of {payload_bytes} bytes, the limit is {_PAYLOAD_LIMITS_BYTES[kind]}; "
            "install the same overlap in every process"
        )
    return kind, fields, payload_at, payload_bytes, payload_checksum


def is_damaged(payload: memoryview, expected: bytes) -> bool:
    """Whether a payload differs from its checksum; never for a payload without a checksum."""
    return expected != UNCHECKED and checksum(payload) != expected
