"""What members of a world say to each other over their control connections; `frames` says how it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ..errors import OverlapError

__all__ = [
    "BLOB_LIMIT_BYTES",
    "Body",
    "Brought",
    "Bye",
    "Done",
    "Fetch",
    "Gathered",
    "Give",
    "Given",
    "Goodbye",
    "Join",
    "MemberLeft",
    "MemberLost",
    "Members",
    "Message",
    "MessageError",
    "Offer",
    "Offered",
    "Parts",
    "Piece",
    "Ping",
    "Pong",
    "Pull",
    "Ready",
    "Refused",
    "Tell",
    "Told",
    "Waiting",
]

#: Of the bytes that a message carries for its callers, which leaves room in a frame for the rest of it.
BLOB_LIMIT_BYTES = 48 * 1024

#: What `tell` carries: None, bools, numbers, text, bytes, and lists and dicts of them.
Body: TypeAlias = dict[str, object]
#: Members, each with what it gave.
Parts: TypeAlias = list[tuple[int, bytes]]
Members: TypeAlias = list[int]


class MessageError(OverlapError):
    """Bytes that are no message, or a message that its sender has no business to send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """To the hub: take me in. `detail` must be the same on all members."""

    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """From the hub: these have not joined."""

    missing: Members


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """From the hub: all have joined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """From the hub: you are not, or no longer, a member."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Give:
    """To the hub: my part of an exchange. `turn` counts the exchanges of this name."""

    name: str
    turn: int
    blob: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """From the hub: some members' parts of an exchange to which all have come."""

    name: str
    turn: int
    parts: Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """To the hub: how much I have for a gather."""

    name: str
    turn: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """From the hub to member 0: how much a member has for a gather."""

    member: int
    name: str
    turn: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """From member 0 to the hub: let a member send the next bytes of what it offered."""

    member: int
    name: str
    turn: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """From the hub: send the next bytes of what you offered, and no more."""

    name: str
    turn: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """To the hub: the next bytes of what I offered."""

    name: str
    turn: int
    blob: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """From the hub to member 0: what a member has sent for a gather."""

    member: int
    name: str
    turn: int
    blob: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """From member 0 to the hub: nothing more is wanted for a gather."""

    name: str
    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """From the hub: member 0 has what it wants."""

    name: str
    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """To the hub: let all others know."""

    body: Body


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """From the hub: what a member lets you know."""

    member: int
    body: Body


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """To the hub: a sign of life, and a question for the time."""

    sent_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    """From the hub: the same in return."""

    sent_ns: int
    hub_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLost:
    """From the hub: a member has gone without a goodbye."""

    member: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLeft:
    """From the hub: a member has said goodbye."""

    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    """To the hub: I leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """From the hub: you have left."""


Message: TypeAlias = (
    Join
    | Waiting
    | Ready
    | Refused
    | Give
    | Given
    | Offer
    | Offered
    | Fetch
    | Pull
    | Piece
    | Brought
    | Done
    | Gathered
    | Tell
    | Told
    | Ping
    | Pong
    | MemberLost
    | MemberLeft
    | Bye
    | Goodbye
)
