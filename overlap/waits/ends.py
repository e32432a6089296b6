"""Ends of operations, and views of ranks: all that is known of a world in which ranks wait.

An end is one rank's side of an operation: an `all_reduce` of four ranks has four ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeAlias

from msgspec import Struct, convert
from msgspec.structs import astuple

from ..ranklist import parse_rank_list


class EndState(Enum):
    """State of one rank's end of an operation, its side of it."""

    QUEUED = "queued"  #: Behind other operations of its rank: it has not arrived
    BLOCKED = "blocked"  #: Its input does not exist yet: it has not arrived
    WAITING = "waiting"  #: It has arrived, and waits for the ends of other ranks
    MOVING = "moving"  #: Its bytes move; or it is a function that runs
    DONE = "done"
    FAILED = "failed"
    UNKNOWN = "unknown"  #: The source does not record the state: it has not ended, and counts as arrived


class Seen(Enum):
    """State of a rank's program."""

    WAITS = "waits"  #: It waits in the operations that its view lists
    GOES_ON = "goes on"  #: It has moved since the last look, or computes
    ELSEWHERE = "elsewhere"  #: It runs code that is no operation of overlap
    LEFT = "left"  #: It has finished
    ENDED = "ended"  #: Its process has ended without a report
    NO_RECORD = "no record"


class CallRecord(Struct, frozen=True, kw_only=True, array_like=True):
    """The facts that all operations of one call at one line share."""

    op: str  # Such as "all_reduce", "send", "recv", "compute", "task"
    site: str = ""  # Line of the program, such as "train.py:41"; "" if unknown
    name: str = ""  # Name given by the caller; for a message that is a part of another call, that call
    key: str = ""  # Identifies the group or the messages that `End.seq` counts in, the same on all ranks
    group: str = ""  # Name of the group, for people
    # World ranks; for a message (source, destination); () if unknown, and for a receive from any rank of the world
    members: tuple[int, ...] = ()
    form: str = ""  # Arguments that ranks must agree on, such as "float32 (4,), op='sum'"; "" if unknown
    nbytes: int = 0
    tag: int = 0  # Tag of a message
    any_source: bool = False  # Whether a receive takes the message of any member
    variant: str = ""  # Number of the group among those of equal ranks, and the stream, as text; "" of messages

    @property
    def is_message(self) -> bool:
        """Whether the call is one end of a message."""
        return self.op in ("send", "recv")

    @property
    def meets(self) -> bool:
        """Whether the call has ends on other ranks, unlike a function of the program."""
        return self.op not in ("compute", "task")

    @property
    def peer(self) -> int | None:
        """World rank at the other end of a message; None for any source, for collectives, and if it is unknown."""
        if not self.is_message or self.any_source or len(self.members) < 2:
            return None
        # The other end is the destination, item 1, for a send, and the source, item 0, for a receive.
        return self.members[self.op == "send"]


def parse_call_fields(fields: Mapping[str, object]) -> CallRecord:
    """Return the call in the fields of a flight record that Overlap has written.

    Args:
        fields: Fields of `CallRecord` as JSON has them: `members` is a list of ranks as text, `form` the whole call.

    Raises:
        KeyError: There is no "op" or no "name".
        TypeError, ValueError, msgspec.MsgspecError: A field is unknown or wrong.
    """
    op, name, members = fields["op"], fields["name"], fields.get("members")
    values = {
        **fields,
        "name": "" if name == op else name,
        "members": parse_rank_list(str(members)) if members else (),
        "form": parse_call_form(str(fields.get("form", ""))),
    }
    # The constructor of a Struct does not check types; `convert` does, from the array that this Struct is encoded as.
    return convert(astuple(CallRecord(**values)), CallRecord)  # type: ignore[arg-type]


def parse_call_form(text: str) -> str:
    """Return the arguments in the text of a call, or "" if the call has no array.

    "all_reduce(float32 (4,), op='sum')" gives "float32 (4,), op='sum'"; "barrier(None)" gives "".
    """
    form = text.partition("(")[2].removesuffix(")")
    return "" if form.startswith("None") else form


class End(Struct, frozen=True, kw_only=True, array_like=True):
    """One rank's end of one operation: its side of it. Instants are nanoseconds since 1970."""

    rank: int  # World rank
    call: CallRecord
    seq: int = 0  # Number of the operation under `call.key`, the same for all ends of it
    state: EndState = EndState.UNKNOWN
    issued_ns: int = 0
    begun_ns: int | None = None
    done_ns: int | None = None
    step: int | None = None  # The step in which it was issued
    awaited: bool | None = None  # Whether the rank's program awaits the operation now; None if unknown
    lacks: tuple[int, ...] | None = None  # Members that have not arrived, as the source says; None: it does not say

    @property
    def is_open(self) -> bool:
        """Whether the operation has not ended well: it is under way, its state is unknown, or it has failed."""
        return self.state is not EndState.DONE

    @property
    def has_arrived(self) -> bool:
        """Whether the rank has arrived at the operation, with its input."""
        return self.state not in (EndState.QUEUED, EndState.BLOCKED)

    @property
    def meeting(self) -> Meeting:
        """Key and number, which all ends of this operation have in common."""
        return self.call.key, self.seq


Meeting: TypeAlias = tuple[str, int]


class RankView(Struct, frozen=True, kw_only=True, array_like=True):
    """All that is known of one rank."""

    rank: int  # World rank
    seen: Seen = Seen.WAITS
    ends: tuple[End, ...] = ()  # In the order of issue
    site: str = ""  # Lines at which its program is, if that is not in an operation
    error: str = ""  # Error that began in this rank, with its line; while the rank runs, one that nobody has awaited
    step: int | None = None  # The step that it is in
    process: int = -1  # Index of its process; -1 if unknown
    pid: int = 0
    host: str = ""
    how: str = ""  # How its process ended, as a verb phrase, such as "ended without a word: killed, or by os._exit"
    may_end: bool = False  # Whether a deadline or a cancel scope may end its wait
    kept_by: int | None = None  # The rank that keeps the event loop of this rank busy, at `site`
    unrecorded: str = ""  # What its source does not record, such as "messages of gloo"

    @property
    def running_function(self) -> End | None:
        """The compute or task that the rank runs, or None. If several have begun, the one that began last."""
        # A function meets no other rank, and is in the state `MOVING` while it runs.
        begun = [end for end in self.ends if not end.call.meets and end.state is EndState.MOVING]
        return max(begun, key=lambda end: end.begun_ns or 0, default=None)
