"""Signatures of operations: the part of a call, and its line, that travels with every message.

A wire compares two fingerprints where a receive meets a message, and delivers the text to the end that must report a
disagreement. It knows neither format.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Annotated, TypeAlias

import msgspec
import numpy as np

from transports.matching.protocol import ProtocolError
from transports.signature import TEXT_BYTES, parts_agree

from ..collectives.call import Call, call, uneven_call
from ..collectives.kinds import BARRIER, Collective
from ..timeline.recording import call_site
from .forms import dtype_of

CodePlace: TypeAlias = tuple[CodeType, int]

# Widths of the three parts of a fingerprint, from the lowest bits up, as in `transports.signature`.
_SHAPE_BITS, _DATA_BITS, _CALL_BITS = 20, 20, 24

_KINDS = tuple(Collective)

# Most bytes of a text before the name of the file, whose end should be readable.
_HEAD_BYTES = 64

# Signatures kept, by call and line; a program may pass other shapes each time.
_CACHED = 4096


_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _SignatureText(msgspec.Struct, array_like=True):
    """A signature as it travels."""

    kind: _Number  # Index of the collective
    flat: bool
    what: str  # Beginning of the call as errors show it, if all of it is too long; then no other value counts
    line: _Number
    size: _Number = 0
    root: _Number = 0
    dtype: str | None = None
    shape: tuple[_Number, ...] | None = None
    op: str | None = None
    exact: bool = False
    shared: bool = False
    algorithm: str | None = None
    blocks: tuple[tuple[tuple[_Number, _Number], ...], tuple[_Number, ...]] = ((), ())  # Pairs and counts
    form: str = ""
    file: str = ""  # End of the name of the file


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
        """The signature as bytes, with the end of the file's name."""
        path, _, line = self.site.rpartition(":")
        number, key = int(line) if line.isdecimal() else 0, None if self.call is None else self.call.key
        text = _SignatureText(0, self.flat, self.what.encode()[: _HEAD_BYTES - 24].decode(errors="ignore"), number)
        if key is not None and self.call is not None:
            whole = _SignatureText(
                _KINDS.index(self.call.kind), self.flat, "", number, key.size, key.root, key.dtype, key.shape, key.op,
                key.exact, key.shared, key.algorithm, (key.pairs, key.counts), key.form,
            )  # fmt: skip
            text = whole if len(msgspec.msgpack.encode(whole)) <= _HEAD_BYTES else text
        room = TEXT_BYTES - len(msgspec.msgpack.encode(text)) - 1
        text.file = (path or self.site).encode()[-room:].decode(errors="ignore")
        return msgspec.msgpack.encode(text)

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
    except Exception as error:  # any that the bytes of a peer can raise
        raise ProtocolError(f"the signature of a message is invalid: {error}") from error
    return found


def _parse(text: bytes, expected: int | None) -> CallSignature:
    if len(text) > TEXT_BYTES:
        raise ValueError(f"it has {len(text)} bytes, and {TEXT_BYTES} are the most")
    read = msgspec.msgpack.decode(text, type=_SignatureText)
    site = f"{read.file}:{read.line}"
    if read.what:
        return CallSignature(expected or 0, None, f"{read.what} ...", site, read.flat)
    if read.kind >= len(_KINDS):
        raise ValueError(f"it has the kind {read.kind}, and only {len(_KINDS)} are known")
    pairs, counts = read.blocks
    dtype = None if read.dtype is None else dtype_of(read.dtype)
    found = (uneven_call if counts else call)(
        _KINDS[read.kind].text, read.op, dtype, read.shape, read.size, read.root, pairs, counts, read.exact,
        read.shared, read.algorithm, read.form,
    )  # fmt: skip
    return CallSignature(fingerprint(found, flat=read.flat), found, str(found), site, read.flat)
