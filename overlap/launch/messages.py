"""What members of a world say to each other over their control connections, and how it is written.

A frame is four bytes of length, then at most `FRAME_LIMIT_BYTES` of msgpack: a list of the message's name and its
fields. The name must be known, the fields exactly those of the message, each of its type; anything else is a
`MessageError`, and whoever sent it is no longer listened to. Pure: no sockets here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TypeAlias, cast

import msgpack

from ..errors import OverlapError

__all__ = [
    "BLOB_LIMIT_BYTES",
    "FRAME_LIMIT_BYTES",
    "Body",
    "Bye",
    "FrameReader",
    "Gathered",
    "Give",
    "Given",
    "Goodbye",
    "Join",
    "MemberLeft",
    "MemberLost",
    "Message",
    "MessageError",
    "Offer",
    "Piece",
    "Ping",
    "Pong",
    "Ready",
    "Refused",
    "Tell",
    "Told",
    "Verdict",
    "Waiting",
    "check_body",
    "decode",
    "encode",
]

#: Of one frame without its length. msgpack can grow 73-fold when unpacked (measured: 1 MiB of empty maps), which makes
#: this 5 MB at the worst.
FRAME_LIMIT_BYTES = 64 * 1024
#: Of the bytes that a message carries for its callers, which leaves room for the rest of it.
BLOB_LIMIT_BYTES = 48 * 1024

_LENGTH_BYTES = 4
_DEPTH_LIMIT = 16

#: What `tell` carries: None, bools, numbers, text, bytes, and lists and dicts of them, `_DEPTH_LIMIT` deep at most.
Body: TypeAlias = dict[str, object]
_Parts: TypeAlias = list[tuple[int, bytes]]
_Members: TypeAlias = list[int]


class MessageError(OverlapError):
    """Bytes that are no message, or a message that its sender has no business to send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """To the hub: take me in. `detail` must be the same on all members."""

    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """From the hub: these have not joined."""

    missing: _Members


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """From the hub: all have joined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """From the hub: you are not, or no longer, a member."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Give:
    """To the hub: my part of an exchange. `turn` counts the exchanges of this name."""

    name: str
    turn: int
    blob: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """From the hub: some members' parts of an exchange to which all have come."""

    name: str
    turn: int
    parts: _Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """To the hub: how much I have for a gather."""

    name: str
    turn: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """From the hub, once all have offered: send your pieces, or why not."""

    name: str
    turn: int
    refusal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """To the hub: the next bytes of what I offered."""

    name: str
    turn: int
    blob: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """From the hub: everybody's bytes are there."""

    name: str
    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """To the hub: let all others know."""

    body: Body


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """From the hub: what a member lets you know."""

    member: int
    body: Body


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """To the hub: a sign of life, and a question for the time."""

    sent_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    """From the hub: the same in return."""

    sent_ns: int
    hub_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLost:
    """From the hub: a member has gone without a goodbye."""

    member: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLeft:
    """From the hub: a member has said goodbye."""

    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    """To the hub: I leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """From the hub: you have left."""


Message: TypeAlias = (
    Join
    | Waiting
    | Ready
    | Refused
    | Give
    | Given
    | Offer
    | Verdict
    | Piece
    | Gathered
    | Tell
    | Told
    | Ping
    | Pong
    | MemberLost
    | MemberLeft
    | Bye
    | Goodbye
)
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in Message.__args__}


def _is_parts(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(part, list) and len(part) == 2 and type(part[0]) is int and type(part[1]) is bytes for part in value
    )


def _is_plain(value: object, depth: int = 0) -> bool:
    if isinstance(value, dict | list) and depth < _DEPTH_LIMIT:
        keys_are_text = isinstance(value, list) or all(type(key) is str for key in value)
        items = value if isinstance(value, list) else value.values()
        return keys_are_text and all(_is_plain(item, depth + 1) for item in items)
    return value is None or type(value) in (bool, int, float, str, bytes)


# By the annotation of a field, which is the one place where its type is written.
_CHECKS: dict[str, Callable[[object], bool]] = {
    "str": lambda value: type(value) is str,
    "int": lambda value: type(value) is int,
    "bytes": lambda value: type(value) is bytes,
    "Body": lambda value: isinstance(value, dict) and _is_plain(value),
    "_Members": lambda value: isinstance(value, list) and all(type(member) is int for member in value),
    "_Parts": _is_parts,
}


def check_body(body: Body) -> None:
    """Make sure that others will be able to read what they are told.

    Raises:
        MessageError: They will not.
    """
    if not _is_plain(body):
        raise MessageError("only None, bools, numbers, text, bytes, and lists and dicts of these, can be told")
    encode(Told(member=2**32, body=body))


def encode(message: Message) -> bytes:
    """Write a message as a frame.

    Raises:
        MessageError: It is longer than a frame may be, or holds what msgpack cannot carry.
    """
    said = [type(message).__name__, *(getattr(message, field.name) for field in fields(message))]
    try:
        data: bytes = msgpack.packb(said, unicode_errors="backslashreplace")
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(f"a {said[0]} cannot be sent: {error}") from error
    if len(data) > FRAME_LIMIT_BYTES:
        raise MessageError(f"a {said[0]} of {len(data)} bytes, the limit is {FRAME_LIMIT_BYTES}")
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


def decode(data: bytes) -> Message:
    """Read a frame without its length.

    Raises:
        MessageError: It is no message.
    """
    try:
        said = msgpack.unpackb(data)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise MessageError(f"{len(data)} bytes that are not msgpack ({str(error) or type(error).__name__})") from error
    if not isinstance(said, list) or not said or type(said[0]) is not str or said[0] not in _KINDS:
        raise MessageError(f"{len(data)} bytes that are none of {', '.join(_KINDS)}")
    kind, values = _KINDS[said[0]], said[1:]
    expected = fields(kind)
    if len(values) != len(expected):
        raise MessageError(f"a {said[0]} with {len(values)} fields, it has {len(expected)}")
    for field, value in zip(expected, values, strict=True):
        if not _CHECKS[cast("str", field.type)](value):
            raise MessageError(f"a {said[0]} whose {field.name} is not {str(field.type).lstrip('_')}")
    return kind(**{field.name: value for field, value in zip(expected, values, strict=True)})


class FrameReader:
    """Cuts a stream of bytes into messages; keeps at most one frame that is not complete."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes | bytearray) -> Iterator[Message]:
        """Take in bytes as they come, and yield the messages that are complete.

        Raises:
            MessageError: What came is no message; nothing after it can be read.
        """
        self._data += data
        while len(self._data) >= _LENGTH_BYTES:
            length_bytes = int.from_bytes(self._data[:_LENGTH_BYTES], "big")
            if length_bytes > FRAME_LIMIT_BYTES:
                raise MessageError(f"a frame claims {length_bytes} bytes, the limit is {FRAME_LIMIT_BYTES}")
            end = _LENGTH_BYTES + length_bytes
            if len(self._data) < end:
                return
            frame = bytes(self._data[_LENGTH_BYTES:end])
            del self._data[:end]
            yield decode(frame)
