"""Signatures of operations: a fingerprint of the call, and a text with the call and its line, for every message.

Where a receive meets a message, the wire compares the fingerprints of both. If they differ, the text of the other side
goes into the error. The wire knows the format of neither.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import CodeType
from typing import TypeAlias

import numpy as np

from transports.matching.protocol import BROKEN_PROTOCOL, ProtocolError
from transports.signature import fingerprints_agree

from ..collectives.call import Call
from ..collectives.kinds import BARRIER
from ..timeline.recording import format_call_site

CodePlace: TypeAlias = tuple[CodeType, int]

# Widths of the three parts of a fingerprint, from the lowest bits up, as in `transports.signature`.
_SHAPE_BITS, _DATA_BITS, _CALL_BITS = 20, 20, 24

# Most signatures that are kept; a program may pass another shape each time.
_CACHED = 4096


@dataclass(frozen=True, eq=False)
class CallSignature:
    """A call and the line that issued it. `signature_of` returns one object for each call and line.

    Attributes:
        fingerprint: 64 bits that ranks compare, in three parts: a hash of 24 bits of the kind, root, size, pairs,
            counts, options and algorithm; one of 20 bits of dtype, number of elements, operator and form; one of 20
            bits of the shape. A part of 0 is open: it agrees with any. A rank that only receives, without an array,
            leaves the last two open; a flat message leaves the shape open.
        text: At most `TEXT_BYTES` bytes, which `parse_signature` reads.
        call: The call; None in a signature of another process whose call was too long for the text.
        what: The call as errors show it.
        site: "file:line" that issued it; of another process perhaps only the end of that.
        flat: Whether the shape is open although the number of elements is known.
        is_tree: Whether a tree is sent; set only in signatures of other processes.
    """

    fingerprint: int
    call: Call | None
    what: str
    site: str
    flat: bool = False
    is_tree: bool = False

    def agrees(self, theirs: int) -> bool:
        """Whether a call with the fingerprint `theirs` agrees with this one."""
        return fingerprints_agree(self.fingerprint, theirs)

    @cached_property
    def text(self) -> bytes:
        """The signature as bytes for another process; a long file name is cut at its beginning."""
        from .signature_text import encode_signature  # of use between processes only

        return encode_signature(self.call, self.what, self.site, flat=self.flat)

    def __repr__(self) -> str:
        return f"<Signature {self.what} at {self.site}>"


_signatures: dict[tuple[Call, CodeType | str, int, bool], CallSignature] = {}


def signature_of(call: Call, place: CodePlace | str, *, flat: bool = False) -> CallSignature:
    """Return the signature of a call at a line, from a cache if possible: training repeats a few calls.

    Args:
        call: The call.
        place: The program's line, as "file:line", or as a code object and an instruction.
        flat: Whether only dtype and number of elements must agree, not the shape.
    """
    code, instruction = (place, 0) if isinstance(place, str) else place
    key = call, code, instruction, flat
    found = _signatures.get(key)
    if found is None:
        if len(_signatures) >= _CACHED:
            _signatures.clear()
        site = code if isinstance(code, str) else format_call_site(code, instruction)
        found = _signatures[key] = CallSignature(fingerprint(call, flat=flat), call, str(call), site, flat)
    return found


def fingerprint(call: Call, *, flat: bool = False) -> int:
    """Return the fingerprint of a call (see `CallSignature`), with the shape open if `flat`.

    Cost: 8 microseconds.
    """
    key = call.key
    options = key.kind, key.size, key.root, key.pairs, key.counts, key.exact, key.shared, key.algorithm
    bits = _hash(options, _CALL_BITS) << (_SHAPE_BITS + _DATA_BITS)
    if call.dtype is None and call.kind is not BARRIER:
        return bits
    elements = None if key.shape is None else int(np.prod(key.shape, dtype=object))
    bits |= _hash((key.dtype, elements, key.op, key.form), _DATA_BITS) << _SHAPE_BITS
    return bits if flat else bits | _hash(key.shape, _SHAPE_BITS)


def _hash(values: object, bits: int) -> int:
    """Return a hash of `bits` bits, the same in every process, and never 0, which stands for "not compared"."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=4).digest()
    return (int.from_bytes(digest, "big") & ((1 << bits) - 1)) or 1


@lru_cache(maxsize=_CACHED)
def parse_signature(text: bytes, expected: int | None = None) -> CallSignature:
    """Return the signature that a message of another process carries.

    Args:
        text: Text of the signature, from the message.
        expected: Fingerprint from the message; None: the text is not checked against one.

    Raises:
        ProtocolError: If the text is cut, too long, of another version, or does not belong to the fingerprint.
    """
    from .signature_text import decode_signature  # of use between processes only

    try:
        call, what, site, flat, is_tree = decode_signature(text)
        bits = (expected or 0) if call is None else fingerprint(call, flat=flat)
        found = CallSignature(bits, call, what, site, flat, is_tree)
        if expected is not None and found.fingerprint != expected:
            raise ValueError(f"{found.what} has the fingerprint {found.fingerprint:016x}, not {expected:016x}")
    except Exception as error:  # any that the bytes of a peer can raise
        raise ProtocolError(f"the signature of a message is invalid: {error}; {BROKEN_PROTOCOL}") from error
    return found
