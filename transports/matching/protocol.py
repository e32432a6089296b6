"""The protocol of messages between two processes: kinds and limits, without their form on a wire."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias


class MessageKind(IntEnum):
    """The kinds of protocol messages. The comment of each kind lists its fields, unsigned integers.

    Announcements (`EAGER`, `PUSH`, `OFFER`) are numbered by the sending process, because they may overtake each other
    on the way. A `SIGNATURE` has a number of the same count; later announcements name the signature by its place in a
    table. All other kinds name a long message by the number of its announcement. A `PUSHED_CHUNK` repeats the fields of
    its `PUSH`, because it may arrive first.
    """

    EAGER = 0  #: number, src, dst, tag, place of the signature; the payload is the message
    OFFER = 1  #: number, src, dst, tag, nbytes, place: a long message waits to be accepted ("request to send")
    ACCEPT = 2  #: number: the receiver has a buffer for the message ("clear to send")
    REFUSE = 3  #: number, expected_bytes, fingerprint, text as payload: the receiver expects another length or call
    CHUNK = 4  #: number, offset; the payload belongs there
    TAKEN = 5  #: number: the whole message has arrived
    WITHDRAW = 6  #: number: the sender has cancelled the offer
    WITHDRAWN = 7  #: number: no receive had met the offer, and it is dropped
    CREDIT = 8  #: nbytes: ranks have received this many eager or pushed bytes, and the sender may send as many again
    ABANDON = 9  #: number: the sender has closed; the receive of the offer fails
    PUSH = 10  #: number, src, dst, tag, nbytes, place: a long message, whose `PUSHED_CHUNK`s follow unasked
    SIGNATURE = 11  #: number, place, fingerprint, text as payload: a signature that later announcements name by `place`
    # Frames of sockets about the connection itself, which no engine handles.
    ALIVE = 12  #: count: number of frames that have arrived on this rail
    LOST = 13  #: rail, count: the rail of that number is dead; `count` frames had arrived on it
    BYE = 14  #: the last frame of this rail
    PUSHED_CHUNK = 15  #: number, src, dst, tag, nbytes, place, offset; the payload belongs there


#: Length of the table in which a process keeps signatures of another one. A full table starts again from place 1.
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

    eager_bytes: int  # Messages up to this length leave with their announcement, in one frame
    chunk_bytes: int  # Longer messages are cut into chunks of this length
    # Chunks of messages that are longer than `eager_bytes`, and up to this length, follow their announcement without
    # being asked for, within the budget. 0: no chunks do.
    push_bytes: int = 0
    # Protocol messages arrive in the order in which they were sent. Otherwise announcements may overtake each other,
    # and pushed chunks the announcement of their message.
    ordered: bool = True
    # Most bytes of eager and pushed messages that wait at the other process for their receives. At this limit each
    # message is offered, and waits for its receive at the sender.
    budget_bytes: int = 16 << 20
    overhead_bytes: int = 256  # Counted in the budget for each message beyond its bytes, so that empty ones count, too
    # Most offers that wait here, together with announcements that came too early: more than any program has under way,
    # and few enough to bound the memory that a broken process can take.
    waiting: int = 1 << 20
    # A send of a long message ends when the receiver confirms it. Otherwise it ends when all chunks have left, see
    # `Outgoing.end_departed_send`.
    confirmed: bool = True
    # Messages up to this length are not confirmed: the transport keeps a copy while it may have to repeat them.
    kept_bytes: int = 0

    def confirms(self, nbytes: int) -> bool:
        """Whether the receiver confirms a long message of `nbytes`, so that its send ends only then."""
        return self.confirmed and nbytes > self.kept_bytes
