"""Control messages between the processes of a world, the frames in which they travel, and plain values in them.

A message is a tagged `msgspec.Struct` that msgpack carries as a list: its name, then its fields. A frame has the length
of the message, a checksum of the length, a checksum of the message (both XXH32), and the message, of at most
`FRAME_LIMIT_BYTES`. Decoding checks the checksums, the name, the number of fields and the type of each; no type nests
without bound. Anything else is a `MessageError`, and its sender is disconnected.

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

from transports.failures import REPORT_BUG
from transports.matching.protocol import BROKEN_PROTOCOL

from ..collectives.call import Call, CallKey, uneven_call
from ..collectives.call import call as call_of
from ..diagnostics import error_place
from ..errors import (
    CollectiveMismatchError,
    GroupAbortedError,
    OverlapError,
    PeerFailedError,
    RemoteError,
    error_text,
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

_HEAD = Struct("!III")  # length of the message, checksum of the length, checksum of the message

# Limits of the views in one message: their bytes, the number of viewed ranks, and the ranks that one rank waits for.
_VIEWS_BYTES, _RANKS, _AWAITED = 48_000, 128, 16
LINE_BYTES = 500  # longest line in a message, in UTF-8
_LINES = 24  # most lines in a message

S = TypeVar("S", bound=msgspec.Struct)


class MessageError(OverlapError):
    """Bytes that are no message, or a message that its sender must not send now."""


class DamagedFrameError(MessageError):
    """Bytes that are no frame, or a frame that was damaged on the way."""


CHECK_NETWORK = "check the network, and that only processes of this job connect to this port"


def broken_protocol_reason(what: str | MessageError) -> str:
    """Return the reason for the end of a connection over which something invalid has arrived.

    Args:
        what: Text that names the invalid message, or the error of its bytes.
    """
    return f"it sent {what}; {CHECK_NETWORK if isinstance(what, DamagedFrameError) else BROKEN_PROTOCOL}"


class Tagged(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=True):
    """Base class of messages. Encoded, a message is a list: the name of its class, then its fields."""


# -- between a member and the coordinator --------------------------------------------------------------------------


class Join(Tagged):
    """To the coordinator: request to join."""

    detail: str  # Settings that must be the same on all members, as text
    process: str  # Identity of the process of this member, see `kernel_facts.process_identity`


class Waiting(Tagged):
    """From the coordinator: not all have joined."""

    missing: list[int]  # Members that have not joined
    departed: list[int] = []  # Missing members that had joined, and whose connection has ended


class Ready(Tagged):
    """From the coordinator: all have joined."""

    process: str  # Identity of the process of the coordinator, see `kernel_facts.process_identity`


class Refused(Tagged):
    """From the coordinator: the receiver is not, or no longer, a member."""

    reason: str


class Contribution(Tagged):
    """To the coordinator: the part of one member in an exchange."""

    name: str  # Name of the exchange
    turn: int  # How many exchanges of this name came before
    blob: bytes  # The part


class Contributions(Tagged):
    """From the coordinator: parts of several members in an exchange, after all members have sent theirs."""

    name: str  # As in `Contribution`
    turn: int
    parts: list[tuple[int, bytes]]  # (member, part)


class Notice(Tagged):
    """To the coordinator: bytes for all other members."""

    body: bytes


class MemberNotice(Tagged):
    """From the coordinator: bytes of another member."""

    member: int
    body: bytes


class Ping(Tagged):
    """To the coordinator: a sign of life, and a question for the time."""

    sent_ns: int  # Time of the member's clock


class Pong(Tagged):
    """From the coordinator: the answer to a `Ping`."""

    sent_ns: int  # As in the `Ping`
    server_ns: int  # Time of the coordinator's clock


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
    """From the coordinator: the answer to a `Bye`, after which the receiver hangs up."""


# -- events of ranks -----------------------------------------------------------------------------------------------

#: Error as plain values: type, text, traceback, file and line.
PlainError: TypeAlias = tuple[str, str, str, str]


class Failed(Tagged):
    """A rank has ended the world."""

    culprit: int  # The rank
    error: PlainError  # Its error
    doing: list[str]  # Lines about its operations under way


class Finished(Tagged):
    """Counts of the operations that a rank has issued; the last such event says that its program has ended."""

    rank: int
    counts: list[tuple[int, int]]  # (id of a communicator or of a lane of messages, number of operations)
    uncounted: bool  # Whether the numbers of ids that are not listed are unknown; otherwise they are 0
    more: bool  # Whether the rank has not finished yet; further counts may follow


class Closing(Tagged):
    """A rank has closed its connection: it issues nothing more, and leaves once its own messages are received."""

    rank: int


class Waits(Tagged):
    """A rank waits in an operation. A call without a dtype asks for it; a rank that has it answers by such an event."""

    group: int  # Id of the group
    channel: int  # Id of the communicator
    members: str  # World ranks of the group, as text for `parse_rank_list`
    seq: int  # Number of the operation on the communicator
    rank: int  # The rank that waits
    call: CallKey  # Key of its call, without the form
    form: bytes  # Packed form of the call
    site: str  # Call site: file and line


class Difference(Tagged):
    """Two ranks have issued different operations."""

    name: str  # Name of the group
    seq: int  # Number of the operation
    ranks: tuple[int, int]  # The two ranks; the next two fields are in the same order
    calls: tuple[str, str]
    sites: tuple[str, str]


class RankCause(Tagged):
    """A rank cannot take part in an operation, or has aborted the group."""

    rank: int
    message: str  # The error message for other ranks
    aborted: bool  # Whether the rank has aborted the group
    error: PlainError | None  # The rank's own error; None: it is not sent


class OperationFailed(Tagged):
    """An operation has failed on all ranks of its group."""

    group: int  # This and the next three as in `Waits`; `channel` may also be a lane of messages, or the group itself
    channel: int
    members: str
    seq: int
    onwards: bool  # Whether all later operations fail as well
    cause: Difference | RankCause


class Busy(Tagged):
    """A rank keeps the event loop of its process from running, or no longer does."""

    rank: int
    place: str  # File and line; empty: it no longer does


class Quiet(Tagged):
    """The ranks of a process that make no progress."""

    views: list[RankView]  # Times in them count from the instant of sending: clocks of hosts may differ by hours


class Stopped(Tagged):
    """The views of the ranks of a process when they were stopped."""

    views: list[RankView]  # As in `Quiet`
    reason: str  # Why; the other processes stop their ranks for it, too. "": they do not


RankEvent: TypeAlias = Failed | Closing | Finished | Waits | OperationFailed | Busy | Quiet | Stopped
Message: TypeAlias = (
    Join | Waiting | Ready | Refused | Contribution | Contributions | Notice | MemberNotice | Ping | Pong | MemberLost
    | MemberLeft | Bye | Goodbye | RankEvent
)  # fmt: skip

# -- as bytes --------------------------------------------------------------------------------------------------------

_ENCODER = msgspec.msgpack.Encoder()
_MESSAGES: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode_frame(message: Message) -> bytes:
    """Encode a message as a frame.

    Raises:
        MessageError: The message is longer than a frame may be, or has a value that msgpack cannot encode.
    """
    data = encode_message(message)
    if len(data) > FRAME_LIMIT_BYTES:
        kind = type(message).__name__
        raise MessageError(f"a {kind} of {len(data)} bytes, the limit is {FRAME_LIMIT_BYTES}; {REPORT_BUG}")
    return add_frame_head(data)


def add_frame_head(data: bytes) -> bytes:
    """Return the frame of an encoded message: a head with the length and the checksums, then the message."""
    length_bytes = len(data)
    return _HEAD.pack(length_bytes, _length_checksum(length_bytes), xxhash.xxh32_intdigest(data)) + data


def _length_checksum(length_bytes: int) -> int:
    return xxhash.xxh32_intdigest(length_bytes.to_bytes(4, "big"))


def encode_message(message: Message) -> bytes:
    """Encode a message, without the head of a frame.

    Raises:
        MessageError: The message has a value that msgpack cannot encode; the error names its field.
    """
    try:
        return _ENCODER.encode(message)
    except UnicodeEncodeError:
        return _ENCODER.encode(escape_surrogates(message))
    except (TypeError, ValueError, OverflowError) as error:
        fields = " and ".join(filter(lambda name: not _is_encodable(getattr(message, name)), message.__struct_fields__))
        raise MessageError(
            f"a {type(message).__name__} cannot be sent: {fields}: {error}; this is a bug in overlap, please report it"
        ) from error


def _is_encodable(value: object) -> bool:
    try:
        _ENCODER.encode(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def escape_surrogates(message: S) -> S:
    """Return a message in whose text fields surrogates, as in names of files that are not UTF-8, are escaped."""
    texts = {name: text for name, text in msgspec.structs.asdict(message).items() if isinstance(text, str)}
    changes = {name: text.encode(errors="backslashreplace").decode() for name, text in texts.items()}
    return msgspec.structs.replace(message, **changes)


def decode_message(data: bytes) -> Message:
    """Decode a message from bytes of `encode_message`.

    Raises:
        MessageError: The bytes are no message.
    """
    try:
        return _MESSAGES.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"{len(data)} bytes that are no message of the control plane: {error}") from error


class FrameReader:
    """Decodes a stream of bytes into messages. It stores one incomplete frame at most."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes | bytearray) -> Iterator[Message]:
        """Add received bytes, and yield the messages that are complete now.

        Raises:
            MessageError: The bytes are no message; later bytes cannot be decoded.
        """
        self._data += data
        while len(self._data) >= _HEAD.size:
            length_bytes, check, expected = _HEAD.unpack_from(self._data)
            if check != _length_checksum(length_bytes):
                raise DamagedFrameError("bytes that are no frame, or were damaged on the way")
            if length_bytes > FRAME_LIMIT_BYTES:
                raise MessageError(f"a frame claims {length_bytes} bytes, the limit is {FRAME_LIMIT_BYTES}")
            end = _HEAD.size + length_bytes
            if len(self._data) < end:
                return
            frame = bytes(self._data[_HEAD.size : end])
            if xxhash.xxh32_intdigest(frame) != expected:
                raise DamagedFrameError(f"a frame of {length_bytes} bytes that was damaged on the way")
            del self._data[:end]
            yield decode_message(frame)


# -- plain values ----------------------------------------------------------------------------------------------------


def unpack_call(key: CallKey, form: bytes) -> Call:
    """Return the call with a key and a packed form, as in `Waits`.

    Raises:
        OverlapError: There is no such call.
    """
    find = uneven_call if key.counts else call_of
    try:
        dtype = None if key.dtype is None else dtype_of(key.dtype)
        # the third field of a key is the dtype, the last one the form
        return find(*key[:2], dtype, *key[3:-1], unpack_form(form))
    except (TypeError, ValueError, OverlapError) as error:
        raise OverlapError(f"invalid call: {error}") from error


def pack_error(error: BaseException) -> PlainError:
    """Return an error as plain values: name of its type, text, traceback, and file and line, each cut to a limit."""
    try:
        trace = "".join(format_exception(error))
    except Exception:  # an error whose text raises an error
        trace = "".join(format_tb(error.__traceback__))
    return (
        cut_text(type_name(error), LINE_BYTES),
        cut_text(error_text(error)),
        cut_text(trace, last=True),
        cut_text(error_place(error), LINE_BYTES),
    )


def unpack_error(values: PlainError) -> RemoteError:
    """Return the error of another process from the result of `pack_error`."""
    kind, text, trace, place = values
    return RemoteError(kind, text, trace=trace, place=place)


def pack_cause(error: BaseException, *, with_error: bool) -> Difference | RankCause:
    """Return the error of an operation as plain values.

    Args:
        error: The error.
        with_error: Whether to include the error of the rank at fault, with its traceback.
    """
    if isinstance(error, CollectiveMismatchError):
        calls, sites = _cut_two_lines(error.calls), _cut_two_lines(error.call_sites)
        return Difference(
            name=cut_text(error.group, LINE_BYTES), seq=error.seq, ranks=error.ranks, calls=calls, sites=sites
        )
    return RankCause(
        rank=getattr(error, "culprit", 0),
        message=cut_text(error_text(error)),
        aborted=isinstance(error, GroupAbortedError),
        error=pack_error(error.__cause__ or error) if with_error else None,
    )


def unpack_cause(cause: Difference | RankCause) -> Callable[[], OverlapError]:
    """Return a function that makes, at each call, a new error of an operation from the result of `pack_cause`."""
    if isinstance(cause, Difference):
        return partial(
            CollectiveMismatchError, group=cause.name, seq=cause.seq, ranks=cause.ranks, calls=cause.calls,
            call_sites=cause.sites,
        )  # fmt: skip
    if cause.error is None:
        return partial(GroupAbortedError if cause.aborted else PeerFailedError, cause.message, culprit=cause.rank)
    return partial(PeerFailedError.caused_by, unpack_error(cause.error), cause.message, culprit=cause.rank)


def _cut_two_lines(lines: Sequence[str]) -> tuple[str, str]:
    first, second = lines
    return cut_text(first, LINE_BYTES), cut_text(second, LINE_BYTES)


def cut_text(text: str, limit_bytes: int = 8_000, *, last: bool = False) -> str:
    """Return the beginning of a text, of at most `limit_bytes` in UTF-8; with `last`, the end of the text."""
    encoded = text.encode(errors="replace")
    return (encoded[-limit_bytes:] if last else encoded[:limit_bytes]).decode(errors="ignore")


def cut_lines(lines: Sequence[str]) -> list[str]:
    """Return the first `_LINES` lines, each cut, and a line with the number of further ones, if there are any."""
    first = [cut_text(line, LINE_BYTES) for line in lines[:_LINES]]
    return first if len(lines) <= _LINES else [*first, f"and {len(lines) - _LINES} lines more"]


def cut_views(views: Sequence[RankView], now_ns: int) -> list[RankView]:
    """Return the views of the first `_RANKS` ranks, shortened to fit into a frame, with times that count from `now_ns`.

    The ends of operations in which ranks wait are kept first. Texts are cut, and members of groups are left out, except
    the sources of a receive if they are few.
    """
    # fewer ends of each rank and shorter texts, until the views fit; the last attempt is sent in any case
    for most_ends, limit_bytes in ((16, LINE_BYTES), (4, 100), (1, 30)):
        kept = [_cut_view(view, most_ends, limit_bytes) for view in views[:_RANKS]]
        if len(msgspec.msgpack.encode(kept)) <= _VIEWS_BYTES:
            break
    return shift_views(kept, -now_ns)


def shift_views(views: Sequence[RankView], by_ns: int) -> list[RankView]:
    """Return views with `by_ns` added to the issued, begun and done times of every operation; unknown (0) stays 0."""

    def shift_end(end: End) -> End:
        times = {name: getattr(end, name) for name in ("issued_ns", "begun_ns", "done_ns")}
        return replace(end, **{name: time_ns + by_ns for name, time_ns in times.items() if time_ns})

    return [replace(view, ends=tuple(map(shift_end, view.ends))) for view in views]


def _cut_view(view: RankView, most_ends: int, limit_bytes: int) -> RankView:
    """Keep at most `most_ends` ends, those in which the rank waits before others."""
    # False sorts before True: operations that the rank awaits, and at which it has arrived, come first
    first = sorted(view.ends, key=lambda end: not (end.awaited and end.has_arrived))[:most_ends]
    # if ends were left out, the receiver cannot judge where the rank has not arrived
    may_end = view.may_end or len(first) < len(view.ends)
    texts = {name: cut_text(getattr(view, name), limit_bytes) for name in ("site", "error", "host", "how")}
    return replace(view, ends=tuple(_cut_end(end, limit_bytes) for end in first), may_end=may_end, **texts)


def _cut_end(end: End, limit_bytes: int) -> End:
    """Cut the texts. Members are left out, except the ranks of a message if they are few."""
    call = end.call
    texts = {name: cut_text(getattr(call, name), limit_bytes) for name in ("op", "site", "name", "key", "group")}
    members = call.members if call.is_message and len(call.members) <= _AWAITED else ()
    lacks = None if end.lacks is None else end.lacks[:_AWAITED]
    return replace(end, call=replace(call, members=members, form="", **texts), lacks=lacks)
