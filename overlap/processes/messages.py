"""Control messages between the processes of a world, and the frames in which they travel.

A message is a tagged `msgspec.Struct` that msgpack carries as a list: its name, then its fields. A frame is its length,
checksums (XXH32) of that and of the rest, and then at most `FRAME_LIMIT_BYTES` of message: a bit that flips on the way
makes no other message of it. Decoding checks the name, the number of fields and the type of each, and no type nests
without bound; anything else is a `MessageError`, and its sender is disconnected.

The first part has the messages between a member and the coordinator, which lives in the process of member 0. The second
part has the events of ranks: a `Notice` carries one to all other members, where `control_plane` reads it. Pure: no
sockets here.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import TypeAlias, TypeVar

import msgspec
import xxhash

from transports.matching.protocol import BROKEN_PROTOCOL

from ..errors import OverlapError
from ..waits.ends import RankView

#: Longest frame, without its head.
FRAME_LIMIT_BYTES = 64 * 1024
#: Longest part of an exchange: the frame has room for the rest of the message.
BLOB_LIMIT_BYTES = 48 * 1024
#: Longest body of a notice.
BODY_LIMIT_BYTES = 60 * 1024

_HEAD = Struct("!III")  # length, its checksum, and that of the message

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")


class MessageError(OverlapError):
    """Bytes that are no message, or a message that its sender must not send now."""


def broken_protocol(text: str) -> str:
    """Return the reason for the end of a connection over which such a message has arrived."""
    return f"it sent {text}; {BROKEN_PROTOCOL}"


class Tagged(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=True):
    """A message: a list of the name of its class, and its fields."""


# -- between a member and the coordinator --------------------------------------------------------------------------


class Join(Tagged):
    """To the coordinator: request to join."""

    detail: str  # Must be the same on all members
    process: str  # Names the process of this member


class Waiting(Tagged):
    """From the coordinator: not all have joined."""

    missing: list[int]  # Members that have not joined
    departed: list[int] = []  # Missing members that had joined, and left again


class Ready(Tagged):
    """From the coordinator: all have joined."""

    process: str  # Names the process of the coordinator


class Refused(Tagged):
    """From the coordinator: the receiver is not, or no longer, a member."""

    reason: str


class Contribution(Tagged):
    """To the coordinator: the part of one member in an exchange."""

    name: str
    turn: int  # Counts the exchanges of this name
    blob: bytes


class Contributions(Tagged):
    """From the coordinator: parts of several members in an exchange, once all members have sent theirs."""

    name: str
    turn: int
    parts: list[tuple[int, bytes]]


class Notice(Tagged):
    """To the coordinator: bytes for all other members."""

    body: bytes


class MemberNotice(Tagged):
    """From the coordinator: bytes of another member."""

    member: int
    body: bytes


class Ping(Tagged):
    """To the coordinator: a sign of life, and a question for the time."""

    sent_ns: int


class Pong(Tagged):
    """From the coordinator: the answer to a `Ping`."""

    sent_ns: int
    server_ns: int


class MemberLost(Tagged):
    """From the coordinator, and to the launcher: a member has ended without a goodbye."""

    member: int  # The lost member; with member 0 the control connection is lost, too
    reason: str


class MemberLeft(Tagged):
    """From the coordinator: a member has left with a goodbye."""

    member: int


class Bye(Tagged):
    """To the coordinator: the sender leaves the world."""


class Goodbye(Tagged):
    """From the coordinator: the receiver has left the world."""


Message: TypeAlias = (
    Join | Waiting | Ready | Refused | Contribution | Contributions | Notice | MemberNotice | Ping | Pong | MemberLost
    | MemberLeft | Bye | Goodbye
)  # fmt: skip


# -- events of ranks -----------------------------------------------------------------------------------------------

#: Call as plain values: kind, op, dtype, shape, size, root, pairs, counts, exact, shared, algorithm, packed form.
PlainCall: TypeAlias = tuple[
    str, str | None, str | None, list[int] | None, int, int, list[tuple[int, int]], list[int], bool, bool, str | None,
    bytes,
]  # fmt: skip


class Failed(Tagged):
    """A rank has ended the world."""

    culprit: int
    kind: str  # Type of its error
    text: str
    trace: str
    place: str  # File and line
    doing: list[str]  # Its operations under way


class Finished(Tagged):
    """A rank has finished its program; it has issued this number of operations on these communicators and lanes."""

    rank: int
    counts: list[tuple[int, int]]  # Of ids of communicators, and of lanes of messages
    uncounted: bool  # Whether others are unknown, rather than 0
    more: bool  # Whether more counts follow, and only then the rank has finished


class Closing(Tagged):
    """A rank has closed its connection: it receives no more, and leaves once its own messages are received."""

    rank: int


class Waits(Tagged):
    """A rank waits in an operation. Without a dtype it asks for that; a rank that has it answers by a message alike."""

    group: int  # Id of the group
    channel: int  # Id of the communicator
    members: str  # World ranks of the group, as a list of ranks
    seq: int
    rank: int
    call: PlainCall
    site: str  # File and line


class Difference(Tagged):
    """Two ranks have issued different operations."""

    name: str  # Of the group
    seq: int
    ranks: tuple[int, int]
    calls: tuple[str, str]
    sites: tuple[str, str]


class RankCause(Tagged):
    """A rank cannot take part, or has aborted the group."""

    rank: int
    message: str
    aborted: bool
    error: tuple[str, str, str, str] | None  # Its own error, as `Failed` describes one: kind, text, trace, place


class OperationFailed(Tagged):
    """An operation has failed on all ranks of its group."""

    group: int  # These as in `Waits`; the channel may also be a lane of messages, or the group itself
    channel: int
    members: str
    seq: int
    onwards: bool  # Whether all later ones fail as well
    cause: Difference | RankCause


class Busy(Tagged):
    """A rank keeps the event loop of its process from running, or no longer does."""

    rank: int
    place: str  # File and line; empty: it no longer does


class Quiet(Tagged):
    """The ranks of a process that make no progress."""

    views: list[RankView]


class Stopped(Tagged):
    """The views of the ranks of a process when they were stopped."""

    views: list[RankView]
    reason: str  # Ends the ranks of the other processes as well, unless it is empty


RankEvent: TypeAlias = (
    Failed | Closing | Finished | Waits | OperationFailed | Busy | Quiet | Stopped
)  # fmt: skip

# -- as bytes --------------------------------------------------------------------------------------------------------

_ENCODER = msgspec.msgpack.Encoder()
_MESSAGES: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_EVENTS: msgspec.msgpack.Decoder[RankEvent] = msgspec.msgpack.Decoder(RankEvent)


def encode(message: Message) -> bytes:
    """Write a message as a frame.

    Raises:
        MessageError: It is longer than a frame may be, or has a value that msgpack cannot carry.
    """
    data = encode_event(message)
    if len(data) > FRAME_LIMIT_BYTES:
        raise MessageError(f"a {type(message).__name__} of {len(data)} bytes, the limit is {FRAME_LIMIT_BYTES}")
    return add_frame_head(data)


def add_frame_head(data: bytes) -> bytes:
    """Return a frame: the encoded message behind a head with its length and checksums."""
    length_bytes = len(data)
    return _HEAD.pack(length_bytes, _length_checksum(length_bytes), xxhash.xxh32_intdigest(data)) + data


def _length_checksum(length_bytes: int) -> int:
    return xxhash.xxh32_intdigest(length_bytes.to_bytes(4, "big"))


def encode_event(message: Message | RankEvent) -> bytes:
    """Write a message without the head of a frame.

    Raises:
        MessageError: It has a value that msgpack cannot carry.
    """
    try:
        return _ENCODER.encode(message)
    except UnicodeEncodeError:
        return _ENCODER.encode(readable(message))
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(f"a {type(message).__name__} cannot be sent: {error}") from error


def readable(message: S) -> S:
    """Return the message with texts that can be encoded: names of files may have bytes that are no text."""
    texts = {name: text for name, text in msgspec.structs.asdict(message).items() if isinstance(text, str)}
    changes = {name: text.encode(errors="backslashreplace").decode() for name, text in texts.items()}
    return msgspec.structs.replace(message, **changes)


def decode(data: bytes) -> Message:
    """Read a frame without its head.

    Raises:
        MessageError: It is no message.
    """
    return _decode_with(_MESSAGES, data)


def decode_event(data: bytes) -> RankEvent:
    """Read an event of the ranks of another process.

    Raises:
        MessageError: It is no event that this version knows.
    """
    return _decode_with(_EVENTS, data)


def _decode_with(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    """Decode bytes; bytes that the decoder refuses raise a `MessageError`."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"{len(data)} bytes that are no message: {error}") from error


class FrameReader:
    """Cuts a stream of bytes into messages; stores at most one incomplete frame."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes | bytearray) -> Iterator[Message]:
        """Add received bytes, and yield the messages that are complete.

        Raises:
            MessageError: The bytes are no message; nothing after them can be read.
        """
        self._data += data
        while len(self._data) >= _HEAD.size:
            length_bytes, check, expected = _HEAD.unpack_from(self._data)
            if check != _length_checksum(length_bytes):
                raise MessageError("bytes that are no frame, or were damaged on the way")
            if length_bytes > FRAME_LIMIT_BYTES:
                raise MessageError(f"a frame claims {length_bytes} bytes, the limit is {FRAME_LIMIT_BYTES}")
            end = _HEAD.size + length_bytes
            if len(self._data) < end:
                return
            frame = bytes(self._data[_HEAD.size : end])
            if xxhash.xxh32_intdigest(frame) != expected:
                raise MessageError(f"a frame of {length_bytes} bytes that was damaged on the way")
            del self._data[:end]
            yield decode(frame)
