"""The protocol of messages between two processes: kinds and limits, without their form on a wire."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias


class MessageKind(IntEnum):
    """The kinds of protocol messages, with the unsigned integers that belong to each.

    Announcements (`EAGER`, `PUSH`, `OFFER`) are numbered by the sending process, because they may overtake each other
    on the way. A `SIGNATURE` has such a number, too: later announcements name it by its place in a table. All other
    kinds name a long message by its number. A `PUSHED_CHUNK` may arrive before its `PUSH`, which it repeats.
    """

    EAGER = 0  #: number, src, dst, tag, place of the signature; the payload is the message
    OFFER = 1  #: number, src, dst, tag, nbytes, place: a long message waits to be accepted ("request to send")
    ACCEPT = 2  #: number: the buffer for it is known ("clear to send")
    REFUSE = 3  #: number, expected_bytes, fingerprint, text as payload: the receiver expects another length or call
    CHUNK = 4  #: number, offset; the payload belongs there
    TAKEN = 5  #: number: the whole message has arrived
    WITHDRAW = 6  #: number: the sender was cancelled
    WITHDRAWN = 7  #: number: the cancellation was in time
    CREDIT = 8  #: nbytes: ranks have received this much eager data, and the sender may send as much again
    ABANDON = 9  #: number: the sender has closed; the receive of the offer fails
    PUSH = 10  #: number, src, dst, tag, nbytes, place: a long message, whose `PUSHED_CHUNK`s follow unasked
    SIGNATURE = 11  #: number, place, fingerprint, text as payload: of later announcements
    # Frames of sockets about the connection itself, which no engine handles.
    ALIVE = 12  #: count of frames that have arrived on this rail
    LOST = 13  #: rail, count: that rail is dead; this many frames had arrived on it
    BYE = 14  #: the last frame of this rail
    PUSHED_CHUNK = 15  #: number, src, dst, tag, nbytes, place, offset; the payload belongs there


#: Signatures of one process that the other one keeps; a place is below. Then the table begins anew.
PLACES = 4096

#: MessageKind, fields, payload. A plain tuple: one is made for every small message that queues.
Message: TypeAlias = "tuple[MessageKind, tuple[int, ...], memoryview | None]"


#: Advice after the message of a `ProtocolError` that a user sees.
BROKEN_PROTOCOL = "if all processes run one version of overlap, this is a bug in overlap, please report it"


class ProtocolError(ValueError):
    """A breach of the protocol by the other process, whose later bytes cannot be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits that both processes have agreed on."""

    eager_bytes: int  # Messages up to this length travel at once, longer ones when they have a buffer
    chunk_bytes: int  # Longer messages are cut in pieces of this length
    # Messages that are longer than eager ones and up to this length follow their announcement unasked, as far as the
    # budget goes. 0: none do.
    push_bytes: int = 0
    # Protocol messages arrive in the order in which they were sent. Otherwise announcements may overtake each other,
    # and pushed chunks the announcement of their message.
    ordered: bool = True
    # Unreceived data of one process at the other; at this limit the sender has to ask before each message.
    budget_bytes: int = 16 << 20
    overhead_bytes: int = 256  # Cost of a waiting message beyond its bytes, so that empty ones are not free either
    # Offers that may wait here, and announcements that may be early: more than any program has under way, and few
    # enough to bound the memory that a broken process can take.
    waiting: int = 1 << 20
    # A send of a long message ends when the receiver confirms it. Otherwise it ends when all chunks have left, see
    # `Outgoing.end_departed`.
    confirmed: bool = True
    # Messages up to this length are not confirmed: the transport keeps a copy as long as it may have to repeat them.
    kept_bytes: int = 0

    def confirms(self, nbytes: int) -> bool:
        """Whether the receiver confirms a long message."""
        return self.confirmed and nbytes > self.kept_bytes
