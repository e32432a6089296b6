"""The protocol of messages between two processes: kinds and limits, without their form on a wire."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias


class MessageKind(IntEnum):
    """The kinds of protocol messages, with the unsigned integers that belong to each.

    Announcements (`EAGER`, `PUSH`, `OFFER`) are numbered by the sending process, because they may overtake each other
    on the way. All other kinds name a long message by its number.
    """

    EAGER = 0  #: number, src, dst, tag; the payload is the message
    OFFER = 1  #: number, src, dst, tag, nbytes: a long message waits to be accepted ("request to send")
    ACCEPT = 2  #: number: the place for it is known ("clear to send")
    REFUSE = 3  #: number, expected_bytes: the receiver wanted another length
    CHUNK = 4  #: number, offset; the payload belongs there
    TAKEN = 5  #: number: all of it has arrived
    WITHDRAW = 6  #: number: the sender was cancelled
    WITHDRAWN = 7  #: number: in time, nobody had accepted it
    CREDIT = 8  #: nbytes: so much eager data has been received by ranks and may be followed by more
    ABANDON = 9  #: number: the sender has closed; a receiver that has accepted the offer waits in vain
    PUSH = 10  #: number, src, dst, tag, nbytes: a long message, whose chunks follow unasked


#: MessageKind, fields, payload (EAGER only). A plain tuple: one is made for every small message that queues.
Message: TypeAlias = "tuple[MessageKind, tuple[int, ...], memoryview | None]"


class ProtocolError(ValueError):
    """The other process breaks the protocol. Nothing after that can be understood."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits that both processes have agreed on."""

    eager_bytes: int  # Messages up to this length travel at once, longer ones when the receiver has named their place
    chunk_bytes: int  # Longer ones are cut in pieces of this length
    # Messages that are longer than eager ones and up to this length follow their announcement unasked, as far as the
    # budget goes. 0: none do.
    push_bytes: int = 0
    # Protocol messages arrive in the order in which they were sent. Otherwise announcements may overtake each other,
    # and chunks the announcement of their message.
    ordered: bool = True
    # Data that one process may have lying unreceived at the other, before it must ask for each further message.
    budget_bytes: int = 16 << 20
    overhead_bytes: int = 256  # Cost of a waiting message beyond its bytes, so that empty ones are not free either
    # Offers that may wait here, and announcements that may be early: more than any program has under way, and few
    # enough to bound the memory that a broken process can take.
    waiting: int = 1 << 20
    places: int | None = None  # How many long messages may be under way to one process at once; None: any number
    # A long message has been sent when the receiver has confirmed all of it. Otherwise it has been sent when it has
    # left, see `Outgoing.departed`.
    confirmed: bool = True
    # Messages up to this length are not confirmed: the transport keeps a copy as long as it may have to repeat them.
    kept_bytes: int = 0

    def confirms(self, nbytes: int) -> bool:
        """Whether the receiver confirms a long message."""
        return self.confirmed and nbytes > self.kept_bytes
