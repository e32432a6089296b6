"""Signatures: short descriptions of calls that travel with messages and are compared where these meet their receives.

A wire knows nothing of calls: it compares fingerprints, and delivers texts for the errors of both ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

#: Longest text of a signature, in bytes; as in shared_memory/native/engine.h.
TEXT_BYTES = 88
#: The parts of a fingerprint: kind of the call, element type, shape. A part that is 0 is open: it agrees with any.
PARTS = 0xFFFFFF << 40, 0xFFFFF << 20, 0xFFFFF


class Signature(Protocol):
    """Description of a message by its sender or its receiver.

    Wires use the object as the key of dictionaries, so all messages of one call should pass the same object.
    """

    @property
    def fingerprint(self) -> int:
        """Unsigned integer of 64 bits, with the parts of `PARTS`."""

    @property
    def text(self) -> bytes:
        """Description of the call, at most `TEXT_BYTES` long; only errors and receives of any length read it."""

    def agrees(self, theirs: int) -> bool:
        """Whether the other end's fingerprint may be of the same call, see `fingerprints_agree`."""


def fingerprints_agree(first: int, second: int) -> bool:
    """Return whether each part of two fingerprints (see `PARTS`) is equal, or is 0 (open) on one side.

    >>> shape_2, shape_3, same_kind_any_shape = 1 << 40 | 2, 1 << 40 | 3, 1 << 40
    >>> fingerprints_agree(shape_2, shape_3), fingerprints_agree(shape_2, same_kind_any_shape)
    (False, True)
    """
    difference = first ^ second
    # a part differs only if it differs in a bit and is 0 on neither side
    return not difference or not any(difference & part and first & part and second & part for part in PARTS)


@dataclass(frozen=True, slots=True)
class PlainSignature:
    """A signature of bytes alone, such as the other end's.

    Attributes:
        fingerprint: Unsigned integer of 64 bits.
        text: The call in at most `TEXT_BYTES`.
    """

    fingerprint: int = 0
    text: bytes = b""

    def agrees(self, theirs: int) -> bool:
        """Whether another fingerprint may be of the same call, see `fingerprints_agree`."""
        return fingerprints_agree(self.fingerprint, theirs)


#: The signature of messages without one: it agrees with all.
OPEN_SIGNATURE = PlainSignature()
