"""Frames between two processes: a header of fixed form and a raw payload each. Pure.

::

    | checksum, 8 bytes | kind, 1 | payload length, 4 | payload's checksum, 8 | fields | payload |

The first checksum covers everything from the kind to the last field, so a damaged length or field is never used. The
checksum of the payload is zero if the sender has left it out. Checksums find accidents, not attackers; TLS keeps those
out.

Fields are unsigned integers of 4 or 8 bytes. Each kind of frame has its own fields, in one `struct`. So nothing in a
header can nest or grow, and at most `HEADER_LIMIT_BYTES` are read before a wrong header is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import TypeAlias

import xxhash

from transports.matching.protocol import Limits, MessageKind, ProtocolError
from transports.signature import TEXT_BYTES

#: Messages up to this length leave at once, in one frame. Copying 64 KiB twice takes 20 us; asking the receiver first
#: takes 80 us and more (measured one way: 64 KiB at once 50 us, 128 KiB after asking 200 us).
EAGER_BYTES = 64 << 10
#: Longer messages are cut into chunks of this length. At 1 GB/s a chunk takes 0.5 ms: the longest wait of an urgent
#: message, and long enough for a system call and a frame (20 us) to count for little.
CHUNK_BYTES = 512 << 10
#: Length of chunks inside one host, over a single connection: 0.5 ms at 4 GB/s. Python takes 60 us for each chunk,
#: which counts if processes share cores: an all_reduce of 4 MiB among 4 processes on 2 cores takes 7 ms with these
#: chunks, and 8.9 ms with chunks of 512 KiB.
LOCAL_CHUNK_BYTES = 2 << 20
#: Chunks of messages up to this length follow the announcement without being asked for, at the cost of a copy if the
#: receive is late.
PUSH_BYTES = 4 << 20
#: Sends up to this length end when the bytes have left: a copy is kept in case a connection loses them.
#: Measured over loopback TCP, 4 processes on 2 cores: a broadcast of 256 KiB that need not wait until three others have
#: woken up and received takes its root 1.3 ms, not 3.4.
KEPT_BYTES = 512 << 10
#: The limits of several connections, fixed by the version of the handshake. Slices of a collective are pushed unasked:
#: a request would wait behind 4 ms of chunks each way over 1 Gbit/s, while the wires would be idle.
LIMITS = Limits(
    eager_bytes=EAGER_BYTES, chunk_bytes=CHUNK_BYTES, push_bytes=PUSH_BYTES, ordered=False, kept_bytes=KEPT_BYTES
)

#: Checksum of a header or a payload: XXH3 of 64 bits. Measured, it takes 0.11 us for a header and 14 us for a chunk;
#: CRC-32C takes 0.23 and 24 us, CRC-32 of zlib 0.2 and 240 us.
checksum: Callable[[bytes | bytearray | memoryview], bytes] = xxhash.xxh3_64_digest
#: Stands in the header of a payload without a checksum.
UNCHECKED = bytes(8)

_CHECKSUM_BYTES = len(UNCHECKED)


#: The fields of each kind, as `struct` names them: Q has 8 bytes, I (a rank, the place of a signature, or the number of
#: a rail) has 4.
FIELDS: Mapping[int, str] = {
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
_KINDS = len(MessageKind)  # asking an enumeration takes 1 us, for each frame
# by kind: everything of a header behind its checksum
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


#: Advice after the message of a `FrameError` that another version may have caused.
SAME_OVERLAP = "install the same overlap in every process"


class FrameError(ProtocolError):
    """Bytes that are no frame. Nothing after them can be parsed."""


class DamageError(FrameError):
    """Bytes that were damaged on the way."""


#: A frame whose header has arrived: (kind, fields, offset of the payload in the buffer, length of the payload, checksum
#: of the payload). A plain tuple, because one is made for every small message, and a class of its own takes 1 us.
Frame: TypeAlias = "tuple[int, list[int], int, int, bytes]"


def pack(kind: int, *fields: int, payload_bytes: int = 0, payload_checksum: bytes = UNCHECKED) -> bytes:
    """Return the header of a frame as bytes, without the payload, which the caller transmits behind it.

    Args:
        kind: Kind of the frame, a `MessageKind`.
        fields: The fields of this kind, see `MessageKind` and `FIELDS`.
        payload_bytes: Length of the payload; 0: there is none.
        payload_checksum: `checksum` of the payload; `UNCHECKED`: it is not checked.
    """
    checked = _HEADERS[kind].pack(kind, payload_bytes, payload_checksum, *fields)
    return checksum(checked) + checked


def parse(buffer: bytearray, start: int, end: int) -> Frame | None:
    """Parse the frame that begins at `start`.

    Args:
        buffer: Holds the arrived bytes in `buffer[start:end]`.
        start: Offset of the frame.
        end: Offset of the end of the arrived bytes.

    Returns:
        The frame, whose payload may not have arrived yet. None if more of the header must arrive first.

    Raises:
        FrameError: The bytes are no frame, or a damaged one (`DamageError`).
    """
    checked_at = start + _CHECKSUM_BYTES
    if checked_at >= end:
        return None
    kind = buffer[checked_at]
    if kind >= _KINDS:
        raise FrameError(f"frame kind {kind} is unknown; kinds are 0 to {_KINDS - 1}; {SAME_OVERLAP}")
    header = _HEADERS[kind]
    payload_at = checked_at + header.size
    if payload_at > end:
        return None
    # the checksum, at `start`, comes right before the bytes that it covers
    if not buffer.startswith(checksum(buffer[checked_at:payload_at]), start):
        raise DamageError("frame header damaged: it does not match its checksum")
    _, payload_bytes, payload_checksum, *fields = header.unpack_from(buffer, checked_at)
    if payload_bytes > _PAYLOAD_LIMITS_BYTES[kind]:
        name, limit_bytes = MessageKind(kind).name, _PAYLOAD_LIMITS_BYTES[kind]
        raise FrameError(f"{name} frame of {payload_bytes} bytes, the limit is {limit_bytes}; {SAME_OVERLAP}")
    return kind, fields, payload_at, payload_bytes, payload_checksum


def is_damaged(payload: memoryview, expected: bytes) -> bool:
    """Whether a payload does not match the checksum of its header; False if the header has none (`UNCHECKED`)."""
    return expected != UNCHECKED and checksum(payload) != expected
