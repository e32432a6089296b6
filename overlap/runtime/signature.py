"""Signatures of operations: the part of a call, and its line, that travels with every message.

A wire compares two fingerprints where a receive meets a message, and delivers the text to the end that must report a
disagreement. It knows neither format.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import TypeAlias

import numpy as np

from transports.matching.protocol import ProtocolError
from transports.signature import TEXT_BYTES, parts_agree

from ..collectives.call import Call, call, uneven_call
from ..collectives.kinds import BARRIER, Collective
from ..collectives.reduce import OPS
from ..errors import UsageError
from ..timeline.recording import call_site
from .forms import dtype_of

CodePlace: TypeAlias = tuple[CodeType, int]

# Widths of the three parts of a fingerprint, from the lowest bits up, as in `transports.signature`.
_SHAPE_BITS, _DATA_BITS, _CALL_BITS = 20, 20, 24

_EXACT, _SHARED, _OPEN, _FLAT, _CUT = 1, 2, 4, 8, 16

_KINDS = tuple(Collective)
_OPS = (None, *OPS)
_DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "float128", "complex64", "complex128", "complex256", "bfloat16", "float8_e3m4", "float8_e4m3",
    "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip

# Most bytes of a text before the name of the file, whose end should be readable.
_HEAD_BYTES = 64

# Signatures kept, by call and line; a program may pass other shapes each time.
_CACHED = 4096


@dataclass(frozen=True, eq=False)
class CallSignature:
    """A call and the line that issued it; `signature_of` returns one object for each call and line.

    Attributes:
        fingerprint: 64 bits that ranks compare: 24 of the kind, root, size, pairs, counts, options and algorithm; 20 of
            dtype, number of elements, operator and form; 20 of the shape. A rank that only receives, without an array,
            leaves the last two open; a message of plain memory leaves the shape open.
        text: At most `TEXT_BYTES` bytes, which `parse` reads.
        call: The call; None in a signature of another process whose call was too long for the text.
        what: The call as errors show it.
        site: "file:line" that issued it; of another process the end of that.
        flat: Whether the shape is open although the number of elements is known.
    """

    fingerprint: int
    call: Call | None
    what: str
    site: str
    flat: bool = False

    def agrees(self, theirs: int) -> bool:
        """Whether an operation with the fingerprint `theirs` may be the same one."""
        return parts_agree(self.fingerprint, theirs)

    @cached_property
    def text(self) -> bytes:
        """The signature as bytes: flags, kind, line, and the call, then the end of the file's name."""
        path, _, line = self.site.rpartition(":")
        head = _encode(self.call, self.flat) if self.call is not None else b""
        number = _varint(int(line) if line.isdecimal() else 0)
        if not head or len(head) + len(number) > _HEAD_BYTES:
            assert self.call is not None or self.what, "a signature describes its call"
            what = self.what.encode()[: _HEAD_BYTES - len(number) - 4]
            head = bytes((_CUT, 0, len(what))) + what
        file = (path or self.site).encode()
        return head + number + file[-(TEXT_BYTES - len(head) - len(number)) :]

    def __repr__(self) -> str:
        return f"<Signature {self.what} at {self.site}>"


_signatures: dict[tuple[Call, CodeType | str, int, bool], CallSignature] = {}


def signature_of(call: Call, place: CodePlace | str, *, flat: bool = False) -> CallSignature:
    """Return the signature of a call at a line, the same object as last time: training repeats a few.

    Args:
        call: The call.
        place: The program's line, as "file:line" or as a place in code.
        flat: Whether only dtype and number of elements must agree, as for messages of plain memory.
    """
    code, instruction = (place, 0) if isinstance(place, str) else place
    key = call, code, instruction, flat
    found = _signatures.get(key)
    if found is None:
        if len(_signatures) >= _CACHED:
            _signatures.clear()
        site = code if isinstance(code, str) else call_site(code, instruction)
        found = _signatures[key] = CallSignature(fingerprint(call, flat=flat), call, str(call), site, flat)
    return found


def fingerprint(call: Call, *, flat: bool = False) -> int:
    """Return the 64 bits that ranks compare; `flat` leaves the shape open. Cost: 8 microseconds."""
    key = call.key
    options = key.kind, key.size, key.root, key.pairs, key.counts, key.exact, key.shared, key.algorithm
    bits = _hash(options, _CALL_BITS) << (_SHAPE_BITS + _DATA_BITS)
    if call.dtype is None and call.kind is not BARRIER:
        return bits
    elements = None if key.shape is None else int(np.prod(key.shape, dtype=object))
    bits |= _hash((key.dtype, elements, key.op, key.form), _DATA_BITS) << _SHAPE_BITS
    return bits if flat else bits | _hash(key.shape, _SHAPE_BITS)


def _hash(values: object, bits: int) -> int:
    """Return a hash of plain values that is the same in every process, and never 0, which is open."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=4).digest()
    return (int.from_bytes(digest, "big") & ((1 << bits) - 1)) or 1


def _varint(value: int) -> bytes:
    """Return a number from 0 as bytes of 7 bits, the lowest first; all but the last have the highest bit set."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _encode(call: Call, flat: bool) -> bytes:
    """Return a call as bytes, without its line; empty if a part of it has no code."""
    key = call.key
    dtype = key.dtype or _DTYPES[0]
    if dtype not in _DTYPES or key.op not in _OPS or max(map(len, (key.pairs, key.counts, key.shape or ()))) > 64:
        return b""
    flags = key.exact * _EXACT | key.shared * _SHARED | (key.shape is None) * _OPEN | flat * _FLAT
    algorithm, form = (key.algorithm or "").encode(), key.form.encode()
    return b"".join(
        (
            bytes((flags, _KINDS.index(call.kind), _DTYPES.index(dtype), _OPS.index(key.op))),
            *map(_varint, (key.size, key.root)),
            *_list(key.shape or ()),
            *_list([rank for pair in key.pairs for rank in pair]),
            *_list(key.counts),
            _varint(len(algorithm)),
            algorithm,
            _varint(len(form)),
            form,
        )
    )


def _list(numbers: object) -> list[bytes]:
    """Return numbers as bytes, after their count."""
    values = list(numbers)  # type: ignore[call-overload]
    return [_varint(len(values)), *map(_varint, values)]


class _SignatureReader:
    """Reads a text from its start; it never reads past the end."""

    def __init__(self, text: bytes) -> None:
        self._text, self._at = text, 0

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        if count > len(self._text) - self._at:
            raise ValueError(f"it ends after {len(self._text)} bytes, and {count} more are due at {self._at}")
        self._at += count
        return self._text[self._at - count : self._at]

    def number(self) -> int:
        """Return the next number."""
        value = shift = 0
        while True:
            (byte,) = self.take(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("it has a number of more than 64 bits")

    def numbers(self) -> tuple[int, ...]:
        """Return the next list."""
        return tuple(self.number() for _ in range(min(self.number(), TEXT_BYTES)))

    def choice(self, known: tuple[str | None, ...]) -> str | None:
        """Return the entry of `known` with the number in the next byte."""
        (index,) = self.take(1)
        if index >= len(known):
            raise ValueError(f"it has the code {index}, and only {len(known)} are known")
        return known[index]

    def rest(self) -> bytes:
        """Return all that is left."""
        return self.take(len(self._text) - self._at)


def parse(text: bytes, expected: int | None = None) -> CallSignature:
    """Return the signature that a message of another process carries.

    Args:
        text: The bytes that came with it.
        expected: The fingerprint that came with it.

    Raises:
        ProtocolError: If the text is cut, too long, of another version, or does not belong to the fingerprint.
    """
    try:
        found = _parse(bytes(text), expected)
        if expected is not None and found.fingerprint != expected:
            raise ValueError(f"{found.what} has the fingerprint {found.fingerprint:016x}, not {expected:016x}")
    except (ValueError, TypeError, AttributeError, UsageError) as error:
        raise ProtocolError(f"the signature of a message is invalid: {error}") from error
    return found


def _parse(text: bytes, expected: int | None) -> CallSignature:
    if len(text) > TEXT_BYTES:
        raise ValueError(f"it has {len(text)} bytes, and {TEXT_BYTES} are the most")
    reader = _SignatureReader(text)
    flags, kind = reader.take(2)
    if flags & _CUT:
        found, what = None, f"{reader.take(reader.number()).decode(errors='ignore')} ..."
    else:
        if kind >= len(_KINDS):
            raise ValueError(f"it has the kind {kind}, and only {len(_KINDS)} are known")
        found = _parse_call(reader, flags, _KINDS[kind])
        what = str(found)
    line = reader.number()
    site = f"{reader.rest().decode(errors='ignore')}:{line}"
    flat = bool(flags & _FLAT)
    bits = (expected or 0) if found is None else fingerprint(found, flat=flat)
    return CallSignature(bits, found, what, site, flat)


def _parse_call(reader: _SignatureReader, flags: int, kind: Collective) -> Call:
    """Return the call that follows the flags and the kind."""
    dtype, op = reader.choice(_DTYPES), reader.choice(_OPS)
    size, root = reader.number(), reader.number()
    shape, flat_pairs, counts = reader.numbers(), reader.numbers(), reader.numbers()
    algorithm = reader.take(reader.number()).decode()
    form = reader.take(reader.number()).decode()
    if len(flat_pairs) % 2:
        raise ValueError("it has a rank without its pair")
    is_open = bool(flags & _OPEN)
    return (uneven_call if counts else call)(
        kind.text,
        op,
        None if is_open else dtype_of(str(dtype)),
        None if is_open else shape,
        size,
        root,
        tuple(zip(flat_pairs[::2], flat_pairs[1::2], strict=True)),
        counts,
        bool(flags & _EXACT),
        bool(flags & _SHARED),
        algorithm or None,
        form,
    )
