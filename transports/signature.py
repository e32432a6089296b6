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
    """Description of a message by one of its ends.

    Wires keep dictionaries by the object, so one call has one object.
    """

    @property
    def fingerprint(self) -> int:
        """Unsigned integer of 64 bits, with the parts of `PARTS`."""

    @property
    def text(self) -> bytes:
        """The call in a few bytes, at most `TEXT_BYTES`; only errors and receives of any length read it."""

    def agrees(self, theirs: int) -> bool:
        """Whether the other end's fingerprint is of the same call, as `parts_agree` says."""


def parts_agree(first: int, second: int) -> bool:
    """Return whether every part of two fingerprints is equal, or open on one side."""
    difference = first ^ second
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
        """Whether another fingerprint is of the same call."""
        return parts_agree(self.fingerprint, theirs)


#: The signature of messages without one: it agrees with all.
OPEN_SIGNATURE = PlainSignature()
