"""Ends of operations, and views of ranks: all that is known of a world in which ranks wait."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeAlias

from msgspec import Struct, convert
from msgspec.structs import astuple

from ..ranklist import parse_rank_list


class EndState(Enum):
    """State of one rank's end of an operation."""

    QUEUED = "queued"  #: Behind other operations of its rank: it has not arrived
    BLOCKED = "blocked"  #: Its input does not exist yet: it has not arrived
    WAITING = "waiting"  #: It has arrived, and waits for the other ends
    MOVING = "moving"  #: Its bytes move; or it is a function that runs
    DONE = "done"
    FAILED = "failed"
    UNKNOWN = "unknown"  #: It has not ended, and counts as arrived


class Seen(Enum):
    """State of a rank's program."""

    WAITS = "waits"  #: As its ends say
    GOES_ON = "goes on"  #: It has moved since the last look, or computes
    ELSEWHERE = "elsewhere"  #: Its program is in code of its own
    LEFT = "left"  #: Its program has finished
    ENDED = "ended"  #: Its process has ended, without a word
    NO_RECORD = "no record"


class CallRecord(Struct, frozen=True, kw_only=True, array_like=True):
    """The facts that all operations of one call at one line share."""

    op: str  # Such as "all_reduce", "send", "recv", "compute", "task"
    site: str = ""  # Line of the program, such as "train.py:41"; "" if unknown
    name: str = ""  # Name given by the caller; the call that a message is a part of
    key: str = ""  # Names the place where its ends meet, the same on all ranks
    group: str = ""  # Name of the group, for people
    # World ranks; (source, destination) of a message; () if the source does not know, and if all others may send
    members: tuple[int, ...] = ()
    form: str = ""  # Arguments that ranks must agree on, such as "float32 (4,), op='sum'"; "" if unknown
    nbytes: int = 0
    tag: int = 0  # Tag of a message
    any_source: bool = False  # Whether a receive takes the message of any member

    @property
    def is_message(self) -> bool:
        """Whether it is one end of a message."""
        return self.op in ("send", "recv")

    @property
    def meets(self) -> bool:
        """Whether it has ends on other ranks: a function of the program has none."""
        return self.op not in ("compute", "task")

    @property
    def peer(self) -> int | None:
        """World rank at the other end of a message; None for any source, and for collectives."""
        if not self.is_message or self.any_source or len(self.members) < 2:
            return None
        return self.members[self.op == "send"]


def call_of(fields: Mapping[str, object]) -> CallRecord:
    """Return the call of an operation of ours from the fields of its flight record.

    Raises:
        TypeError, ValueError, msgspec.MsgspecError: A field is wrong.
    """
    op, name, members = fields["op"], fields["name"], fields.get("members")
    values = {
        **fields,
        "name": "" if name == op else name,
        "members": parse_rank_list(str(members)) if members else (),
        "form": form_of(str(fields.get("form", ""))),
    }
    return convert(astuple(CallRecord(**values)), CallRecord)  # type: ignore[arg-type]


def form_of(text: str) -> str:
    """Return the arguments of a call of ours, such as "all_reduce(float32 (4,), op='sum')"; "" without an array."""
    form = text.partition("(")[2].removesuffix(")")
    return "" if form.startswith("None") else form


class End(Struct, frozen=True, kw_only=True, array_like=True):
    """One rank's end of one operation. Instants are nanoseconds since 1970."""

    rank: int  # World rank
    call: CallRecord
    seq: int = 0  # Its number where its ends meet
    state: EndState = EndState.UNKNOWN
    issued_ns: int = 0
    begun_ns: int | None = None
    done_ns: int | None = None
    step: int | None = None  # The step in which it was issued
    awaited: bool | None = None  # Whether its program waits for it now; None if unknown
    lacks: tuple[int, ...] | None = None  # Members that the source knows to be absent; None: see the other ends

    @property
    def is_open(self) -> bool:
        """Whether it has not ended well."""
        return self.state is not EndState.DONE

    @property
    def has_arrived(self) -> bool:
        """Whether its rank has come to it with an input."""
        return self.state not in (EndState.QUEUED, EndState.BLOCKED)

    @property
    def meeting(self) -> Meeting:
        """Place and number at which its ends meet."""
        return self.call.key, self.seq


Meeting: TypeAlias = tuple[str, int]


class RankView(Struct, frozen=True, kw_only=True, array_like=True):
    """All that is known of one rank."""

    rank: int  # World rank
    seen: Seen = Seen.WAITS
    ends: tuple[End, ...] = ()  # In the order of issue
    site: str = ""  # Lines at which its program is, if that is not in an operation
    error: str = ""  # Its own error, with its line; while it runs, one that no task or thread was given
    step: int | None = None  # The step that it is in
    process: int = -1  # Index of its process; -1 if unknown
    pid: int = 0
    host: str = ""
    how: str = ""  # How its process ended, as a verb
    may_end: bool = False  # Whether a deadline or a cancel scope may end its wait
    kept_by: int | None = None  # The rank that keeps its event loop busy, at `site`
    unrecorded: str = ""  # What its source does not record, such as "messages of gloo"

    @property
    def running(self) -> End | None:
        """The function that the rank runs: of several that have begun, the last."""
        begun = [end for end in self.ends if not end.call.meets and end.state is EndState.MOVING]
        return max(begun, key=lambda end: end.begun_ns or 0, default=None)
