"""Reading of protobuf messages, as far as a Chakra trace needs it: fields by number.

Encoding: protobuf.dev/programming-guides/encoding; a file is a sequence of messages, each after its length
(mlcommons/chakra, src/third_party/utils/protolib.py).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

Value = int | bytes

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST = 10
"""Bytes of a varint of 64 bits."""


def messages(data: bytes) -> Iterator[bytes | None]:
    """Yield the messages of a file, up to the first of length 0; None at the end if the last one is cut off."""
    at = 0
    while at < len(data):
        try:
            length, begin = _varint(data, at)
        except IndexError:
            yield None
            return
        if not length:
            return
        if begin + length > len(data):
            yield None
            return
        yield data[begin : begin + length]
        at = begin + length


def fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """Yield number and value of each field: integers as they are, all others as bytes.

    Raises:
        ValueError: The bytes are no message.
    """
    at = 0
    try:
        while at < len(message):
            key, at = _varint(message, at)
            number, kind = key >> 3, key & 7
            if kind == _VARINT:
                value, at = _varint(message, at)
                yield number, value
                continue
            if kind == _BYTES:
                length, at = _varint(message, at)
            elif kind in (_FIXED64, _FIXED32):
                length = 8 if kind == _FIXED64 else 4
            else:
                raise ValueError(f"a field of kind {kind}, which there is none of")
            if at + length > len(message):
                raise ValueError(f"a field of {length} bytes in a message that has {len(message) - at} left")
            yield number, message[at : at + length]
            at += length
    except IndexError:
        raise ValueError("a number that ends with its message") from None


def numbers(value: Value) -> list[int]:
    """Return the numbers of a repeated field of integers, packed or not."""
    if isinstance(value, int):
        return [value]
    found, at = [], 0
    try:
        while at < len(value):
            number, at = _varint(value, at)
            found.append(number)
    except IndexError:
        raise ValueError("a list of numbers that is cut off") from None
    return found


def floating(value: bytes) -> float:
    """Return the floating-point number in four or eight bytes."""
    return float(struct.unpack("<d" if len(value) == 8 else "<f", value)[0])


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and where it ends; IndexError if the data end before it."""
    number = 0
    for place in range(_LONGEST):
        byte = data[at + place]
        number |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return number, at + place + 1
    raise ValueError("a number of more than 64 bits")
