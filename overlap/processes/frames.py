"""How messages are written as frames, and read from bytes that anybody may have sent.

A frame is four bytes of length, then at most `FRAME_LIMIT_BYTES` of msgpack: a list of the message's name and its
fields. The name must be known, the fields exactly those of the message, each of its type; anything else is a
`MessageError`, and whoever sent it is no longer listened to. Pure: no sockets here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import cast, get_args

import msgpack

from .messages import Body, Message, MessageError, Told

#: Of one frame without its length. msgpack can grow 73-fold when unpacked (measured: 1 MiB of empty maps), which makes
#: this 5 MB at the worst.
FRAME_LIMIT_BYTES = 64 * 1024

_LENGTH_BYTES = 4
_DEPTH_LIMIT = 16  # of what `tell` carries

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


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
    "Members": lambda value: isinstance(value, list) and all(type(member) is int for member in value),
    "Parts": _is_parts,
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
            raise MessageError(f"a {said[0]} whose {field.name} is not {field.type}")
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
