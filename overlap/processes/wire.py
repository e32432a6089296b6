"""Control messages between the processes of a world, the frames in which they travel, and plain values in them.

A message is a tagged `msgspec.Struct` that msgpack carries as a list: its name, then its fields. A frame is its length,
checksums (XXH32) of that and of the rest, and then at most `FRAME_LIMIT_BYTES` of message: a bit that flips on the way
makes no other message of it. Decoding checks the name, the number of fields and the type of each, and no type nests
without bound; anything else is a `MessageError`, and its sender is disconnected.

The first part has the messages between a member and the coordinator, which lives in the process of member 0. The second
part has the events of ranks: a `Notice` carries one to all other members, where `control` reads it. The last part has
calls and errors as plain values, and texts and views cut so that they fit into one message. Pure: no sockets here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from struct import Struct
from traceback import format_exception, format_tb
from typing import TypeAlias, TypeVar

import msgspec
import xxhash
from msgspec.structs import replace

from transports.matching.protocol import BROKEN_PROTOCOL

from ..collectives.call import Call, CallKey, uneven_call
from ..collectives.call import call as call_of
from ..diagnostics import where
from ..errors import (
    CollectiveMismatchError,
    GroupAbortedError,
    OverlapError,
    PeerFailedError,
    RemoteError,
    text_of,
    type_name,
)
from ..runtime.forms import dtype_of, unpack_form
from ..waits.ends import End, RankView

#: Longest frame, without its head.
FRAME_LIMIT_BYTES = 64 * 1024
#: Longest part of an exchange: the frame has room for the rest of the message.
BLOB_LIMIT_BYTES = 48 * 1024
#: Longest body of a notice.
BODY_LIMIT_BYTES = 60 * 1024

_HEAD = Struct("!III")  # length, its checksum, and that of the message

# Limits of the views in one message, which stays well below its own limit: bytes, ranks, and ranks that a rank awaits.
_VIEWS_BYTES, _RANKS, _AWAITED = 48_000, 128, 16
LINE_BYTES = 500  # of a line in a message, in UTF-8
_LINES = 24

S = TypeVar("S", bound=msgspec.Struct)


class MessageError(OverlapError):
    """Bytes that are no message, or a message that its sender must not send now."""


def broken_protocol(text: str) -> str:
    """Return the reason for the end of a connection over which such a message has arrived."""
    return f"it sent {text}; {BROKEN_PROTOCOL}"


class Tagged(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=True):
    """A message: a list of the name of its class, and its fields."""


# -- between a member and the coordinator --------------------------------------------------------------------------


class Join(Tagged):
    """To the coordinator: request to join."""

    detail: str  # Must be the same on all members
    process: str  # Names the process of this member


class Waiting(Tagged):
    """From the coordinator: not all have joined."""

    missing: list[int]  # Members that have not joined
    departed: list[int] = []  # Missing members that had joined, and left again


class Ready(Tagged):
    """From the coordinator: all have joined."""

    process: str  # Names the process of the coordinator


class Refused(Tagged):
    """From the coordinator: the receiver is not, or no longer, a member."""

    reason: str


class Contribution(Tagged):
    """To the coordinator: the part of one member in an exchange."""

    name: str
    turn: int  # Counts the exchanges of this name
    blob: bytes


class Contributions(Tagged):
    """From the coordinator: parts of several members in an exchange, once all members have sent theirs."""

    name: str
    turn: int
    parts: list[tuple[int, bytes]]


class Notice(Tagged):
    """To the coordinator: bytes for all other members."""

    body: bytes


class MemberNotice(Tagged):
    """From the coordinator: bytes of another member."""

    member: int
    body: bytes


class Ping(Tagged):
    """To the coordinator: a sign of life, and a question for the time."""

    sent_ns: int


class Pong(Tagged):
    """From the coordinator: the answer to a `Ping`."""

    sent_ns: int
    server_ns: int


class MemberLost(Tagged):
    """From the coordinator, and to the launcher: a member has ended without a goodbye."""

    member: int  # The lost member; with member 0 the control connection is lost, too
    reason: str


class MemberLeft(Tagged):
    """From the coordinator: a member has left with a goodbye."""

    member: int


class Bye(Tagged):
    """To the coordinator: the sender leaves the world."""


class Goodbye(Tagged):
    """From the coordinator: the receiver has left the world."""


# -- events of ranks -----------------------------------------------------------------------------------------------

#: Error as plain values: type, text, traceback, file and line.
PlainError: TypeAlias = tuple[str, str, str, str]


class Failed(Tagged):
    """A rank has ended the world."""

    culprit: int
    error: PlainError
    doing: list[str]  # Its operations under way


class Finished(Tagged):
    """A rank has finished its program; it has issued this number of operations on these communicators and lanes."""

    rank: int
    counts: list[tuple[int, int]]  # Of ids of communicators, and of lanes of messages
    uncounted: bool  # Whether others are unknown, rather than 0
    more: bool  # Whether more counts follow, and only then the rank has finished


class Closing(Tagged):
    """A rank has closed its connection: it receives no more, and leaves once its own messages are received."""

    rank: int


class Waits(Tagged):
    """A rank waits in an operation. Without a dtype it asks for that; a rank that has it answers by a message alike."""

    group: int  # Id of the group
    channel: int  # Id of the communicator
    members: str  # World ranks of the group, as a list of ranks
    seq: int
    rank: int
    call: CallKey  # Without its form
    form: bytes  # Packed form of the call
    site: str  # File and line


class Difference(Tagged):
    """Two ranks have issued different operations."""

    name: str  # Of the group
    seq: int
    ranks: tuple[int, int]
    calls: tuple[str, str]
    sites: tuple[str, str]


class RankCause(Tagged):
    """A rank cannot take part, or has aborted the group."""

    rank: int
    message: str
    aborted: bool
    error: PlainError | None  # Its own error


class OperationFailed(Tagged):
    """An operation has failed on all ranks of its group."""

    group: int  # These as in `Waits`; the channel may also be a lane of messages, or the group itself
    channel: int
    members: str
    seq: int
    onwards: bool  # Whether all later ones fail as well
    cause: Difference | RankCause


class Busy(Tagged):
    """A rank keeps the event loop of its process from running, or no longer does."""

    rank: int
    place: str  # File and line; empty: it no longer does


class Quiet(Tagged):
    """The ranks of a process that make no progress."""

    views: list[RankView]  # With times that count from the instant of sending: clocks of hosts may differ by hours


class Stopped(Tagged):
    """The views of the ranks of a process when they were stopped."""

    views: list[RankView]  # As in `Quiet`
    reason: str  # Ends the ranks of the other processes as well, unless it is empty


RankEvent: TypeAlias = Failed | Closing | Finished | Waits | OperationFailed | Busy | Quiet | Stopped
Message: TypeAlias = (
    Join | Waiting | Ready | Refused | Contribution | Contributions | Notice | MemberNotice | Ping | Pong | MemberLost
    | MemberLeft | Bye | Goodbye | RankEvent
)  # fmt: skip

# -- as bytes --------------------------------------------------------------------------------------------------------

_ENCODER = msgspec.msgpack.Encoder()
_MESSAGES: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Write a message as a frame.

    Raises:
        MessageError: It is longer than a frame may be, or has a value that msgpack cannot carry.
    """
    data = encode_body(message)
    if len(data) > FRAME_LIMIT_BYTES:
        raise MessageError(f"a {type(message).__name__} of {len(data)} bytes, the limit is {FRAME_LIMIT_BYTES}")
    return add_frame_head(data)


def add_frame_head(data: bytes) -> bytes:
    """Return a frame: the encoded message behind a head with its length and checksums."""
    length_bytes = len(data)
    return _HEAD.pack(length_bytes, _length_checksum(length_bytes), xxhash.xxh32_intdigest(data)) + data


def _length_checksum(length_bytes: int) -> int:
    return xxhash.xxh32_intdigest(length_bytes.to_bytes(4, "big"))


def encode_body(message: Message) -> bytes:
    """Write a message without the head of a frame.

    Raises:
        MessageError: It has a value that msgpack cannot carry.
    """
    try:
        return _ENCODER.encode(message)
    except UnicodeEncodeError:
        return _ENCODER.encode(readable(message))
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(f"a {type(message).__name__} cannot be sent: {error}") from error


def readable(message: S) -> S:
    """Return the message with texts that can be encoded: names of files may have bytes that are no text."""
    texts = {name: text for name, text in msgspec.structs.asdict(message).items() if isinstance(text, str)}
    changes = {name: text.encode(errors="backslashreplace").decode() for name, text in texts.items()}
    return msgspec.structs.replace(message, **changes)


def decode(data: bytes) -> Message:
    """Read a message without the head of a frame.

    Raises:
        MessageError: It is none.
    """
    try:
        return _MESSAGES.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"{len(data)} bytes that are no message: {error}") from error


class FrameReader:
    """Cuts a stream of bytes into messages; stores at most one incomplete frame."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes | bytearray) -> Iterator[Message]:
        """Add received bytes, and yield the messages that are complete.

        Raises:
            MessageError: The bytes are no message; nothing after them can be read.
        """
        self._data += data
        while len(self._data) >= _HEAD.size:
            length_bytes, check, expected = _HEAD.unpack_from(self._data)
            if check != _length_checksum(length_bytes):
                raise MessageError("bytes that are no frame, or were damaged on the way")
            if length_bytes > FRAME_LIMIT_BYTES:
                raise MessageError(f"a frame claims {length_bytes} bytes, the limit is {FRAME_LIMIT_BYTES}")
            end = _HEAD.size + length_bytes
            if len(self._data) < end:
                return
            frame = bytes(self._data[_HEAD.size : end])
            if xxhash.xxh32_intdigest(frame) != expected:
                raise MessageError(f"a frame of {length_bytes} bytes that was damaged on the way")
            del self._data[:end]
            yield decode(frame)


# -- plain values ----------------------------------------------------------------------------------------------------


def unpack_call(key: CallKey, form: bytes) -> Call:
    """Return the call with this key and packed form.

    Raises:
        OverlapError: There is no such call.
    """
    find = uneven_call if key.counts else call_of
    try:
        dtype = None if key.dtype is None else dtype_of(key.dtype)
        return find(*key[:2], dtype, *key[3:-1], unpack_form(form))
    except (TypeError, ValueError, OverlapError) as error:
        raise OverlapError(f"invalid call: {error}") from error


def pack_error(error: BaseException) -> PlainError:
    """Return the plain values of an error."""
    try:
        trace = "".join(format_exception(error))
    except Exception:  # an error whose text raises an error
        trace = "".join(format_tb(error.__traceback__))
    return cut(type_name(error), LINE_BYTES), cut(text_of(error)), cut(trace, last=True), cut(where(error), LINE_BYTES)


def unpack_error(values: PlainError) -> RemoteError:
    """Return the error with these plain values."""
    kind, text, trace, place = values
    return RemoteError(kind, text, trace=trace, place=place)


def pack_cause(error: BaseException, *, with_error: bool) -> Difference | RankCause:
    """Return the plain values of the error of an operation; `with_error` adds the error of the rank at fault."""
    if isinstance(error, CollectiveMismatchError):
        calls, sites = _cut_pair(error.calls), _cut_pair(error.call_sites)
        return Difference(name=cut(error.group, LINE_BYTES), seq=error.seq, ranks=error.ranks, calls=calls, sites=sites)
    return RankCause(
        rank=getattr(error, "culprit", 0),
        message=cut(text_of(error)),
        aborted=isinstance(error, GroupAbortedError),
        error=pack_error(error.__cause__ or error) if with_error else None,
    )


def unpack_cause(cause: Difference | RankCause) -> Callable[[], OverlapError]:
    """Return a function that makes a new error of an operation that failed elsewhere."""
    if isinstance(cause, Difference):
        return partial(
            CollectiveMismatchError, group=cause.name, seq=cause.seq, ranks=cause.ranks, calls=cause.calls,
            call_sites=cause.sites,
        )  # fmt: skip
    if cause.error is None:
        return partial(GroupAbortedError if cause.aborted else PeerFailedError, cause.message, culprit=cause.rank)
    return partial(PeerFailedError.caused_by, unpack_error(cause.error), cause.message, culprit=cause.rank)


def _cut_pair(lines: Sequence[str]) -> tuple[str, str]:
    first, second = lines
    return cut(first, LINE_BYTES), cut(second, LINE_BYTES)


def cut(text: str, limit_bytes: int = 8_000, *, last: bool = False) -> str:
    """Return the first or the last part of a text that takes at most `limit_bytes` in UTF-8."""
    encoded = text.encode(errors="replace")
    return (encoded[-limit_bytes:] if last else encoded[:limit_bytes]).decode(errors="ignore")


def cut_lines(lines: Sequence[str]) -> list[str]:
    """Return the first lines, each cut, and the number of further ones."""
    first = [cut(line, LINE_BYTES) for line in lines[:_LINES]]
    return first if len(lines) <= _LINES else [*first, f"and {len(lines) - _LINES} lines more"]


def cut_views(views: Sequence[RankView], now_ns: int) -> list[RankView]:
    """Return the views of the first ranks, shortened to fit a frame.

    Only operations in which ranks wait stay, texts are cut, and times count from now.

    Of a receive from any source the members are left out, unless they are few: none of them may be missed.
    """
    kept: list[RankView] = []
    for most_ends, limit_bytes in ((16, LINE_BYTES), (4, 100), (1, 30)):
        kept = [_cut_view(view, most_ends, limit_bytes) for view in views[:_RANKS]]
        if len(msgspec.msgpack.encode(kept)) <= _VIEWS_BYTES:
            break
    return shift_views(kept, -now_ns)


def shift_views(views: Sequence[RankView], by_ns: int) -> list[RankView]:
    """Return views with the known times of their ends moved."""

    def moved(end: End) -> End:
        times = {name: getattr(end, name) for name in ("issued_ns", "begun_ns", "done_ns")}
        return replace(end, **{name: time_ns + by_ns for name, time_ns in times.items() if time_ns})

    return [replace(view, ends=tuple(map(moved, view.ends))) for view in views]


def _cut_view(view: RankView, most_ends: int, limit_bytes: int) -> RankView:
    first = sorted(view.ends, key=lambda end: not (end.awaited and end.has_arrived))[:most_ends]
    may_end = view.may_end or len(first) < len(view.ends)  # another process cannot know at what else it has arrived
    texts = {name: cut(getattr(view, name), limit_bytes) for name in ("site", "error", "host", "how")}
    return replace(view, ends=tuple(_cut_end(end, limit_bytes) for end in first), may_end=may_end, **texts)


def _cut_end(end: End, limit_bytes: int) -> End:
    call = end.call
    texts = {name: cut(getattr(call, name), limit_bytes) for name in ("op", "site", "name", "key", "group")}
    members = call.members if call.is_message and len(call.members) <= _AWAITED else ()
    lacks = None if end.lacks is None else end.lacks[:_AWAITED]
    return replace(end, call=replace(call, members=members, form="", **texts), lacks=lacks)
