"""What members of a world say to each other over their control connections; `frames` says how it is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from ..errors import OverlapError

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
    """To the coordinator: take me in. `detail` must be the same on all members; `process` names this one's."""

    detail: str
    process: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """From the coordinator: these have not joined; of them `went` had, and went away again."""

    missing: Members
    went: Members = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """From the coordinator: all have joined. `process` names its own."""

    process: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """From the coordinator: you are not, or no longer, a member."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Give:
    """To the coordinator: my part of an exchange. `turn` counts the exchanges of this name."""

    name: str
    turn: int
    blob: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """From the coordinator: some members' parts of an exchange to which all have come."""

    name: str
    turn: int
    parts: Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """To the coordinator: how much I have for a gather."""

    name: str
    turn: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """From the coordinator to member 0: how much a member has for a gather."""

    member: int
    name: str
    turn: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """From member 0 to the coordinator: let a member send the next bytes of what it offered."""

    member: int
    name: str
    turn: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """From the coordinator: send the next bytes of what you offered, and no more."""

    name: str
    turn: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """To the coordinator: the next bytes of what I offered."""

    name: str
    turn: int
    blob: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """From the coordinator to member 0: what a member has sent for a gather."""

    member: int
    name: str
    turn: int
    blob: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """From member 0 to the coordinator: nothing more is wanted for a gather."""

    name: str
    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """From the coordinator: member 0 has what it wants."""

    name: str
    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """To the coordinator: let all others know."""

    body: Body


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """From the coordinator: what a member lets you know."""

    member: int
    body: Body


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """To the coordinator: a sign of life, and a question for the time."""

    sent_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    """From the coordinator: the same in return."""

    sent_ns: int
    server_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLost:
    """From the coordinator: a member has gone without a goodbye."""

    member: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLeft:
    """From the coordinator: a member has said goodbye."""

    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    """To the coordinator: I leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """From the coordinator: you have left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """To the coordinator, from a watcher, which is no member: what do the ranks do?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """From the coordinator: say what your ranks do, in so many bytes at most. `turn` counts such questions."""

    turn: int
    room_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Glimpse:
    """To the coordinator: what my ranks do, as `overlap.live.snapshot` writes it, and how long that took."""

    turn: int
    took_ns: int
    blob: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """To a watcher: what a member said of its ranks."""

    member: int
    blob: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """To a watcher: that was all. When it was asked, who did not answer, and how long to wait before the next look."""

    now_ns: int
    silent: Members
    pause_ms: int


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
    | Look
    | Glance
    | Glimpse
    | Seen
    | Looked
)
