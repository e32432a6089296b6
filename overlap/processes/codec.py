"""Plain values of control messages: calls and errors, and texts and views cut so that they fit into one message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from traceback import format_exception, format_tb

import msgspec
from msgspec.structs import replace

from ..collectives.call import Call, uneven_call
from ..collectives.call import call as call_of
from ..collectives.kinds import Collective
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
from ..runtime.forms import dtype_of, pack_form, unpack_form
from ..waits.ends import End, RankView
from .messages import Difference, Failed, PlainCall, RankCause

# Limits of the views in one message, which stays well below its own limit: bytes, ranks, and ranks that a rank awaits.
_VIEWS_BYTES, _RANKS, _AWAITED = 48_000, 128, 16
LINE_BYTES = 500  # of a line in a message, in UTF-8
_LINES = 24


def pack_call(call: Call) -> PlainCall:
    """Return the plain values of a call."""
    dtype = None if call.dtype is None else str(call.dtype)
    shape = None if call.shape is None else list(call.shape)
    pairs, counts = list(call.pairs), list(call.counts)
    how = call.exact, call.shared, call.algorithm, pack_form(call.form)
    return call.kind.value, call.op, dtype, shape, call.size, call.root, pairs, counts, *how


def unpack_call(values: PlainCall) -> Call:
    """Return the call with these plain values.

    Raises:
        OverlapError: There is no such call.
    """
    kind, op, dtype, shape, size, root, pairs, counts, exact, shared, algorithm, form = values
    find = uneven_call if counts else call_of
    try:
        dtype_or_none = None if dtype is None else dtype_of(dtype)
        extent = None if shape is None else tuple(shape)
        return find(
            Collective(kind).value, op, dtype_or_none, extent, size, root, tuple(pairs), tuple(counts), exact, shared,
            algorithm, unpack_form(form),
        )  # fmt: skip
    except (TypeError, ValueError, OverlapError) as error:
        raise OverlapError(f"invalid call: {error}") from error


def pack_error(error: BaseException) -> dict[str, str]:
    """Return the fields of `Failed` that describe an error."""
    try:
        trace = "".join(format_exception(error))
    except Exception:  # an error whose text raises an error
        trace = "".join(format_tb(error.__traceback__))
    return {
        "kind": cut(type_name(error), LINE_BYTES),
        "text": cut(text_of(error)),
        "trace": cut(trace, last=True),
        "place": cut(where(error), LINE_BYTES),
    }


def unpack_error(event: Failed) -> RemoteError:
    """Return the error that an event describes."""
    return RemoteError(event.kind, event.text, trace=event.trace, place=event.place)


def pack_cause(error: BaseException, *, with_error: bool) -> Difference | RankCause:
    """Return the plain values of the error of an operation; `with_error` adds the error of the rank at fault."""
    if isinstance(error, CollectiveMismatchError):
        calls, sites = _cut_pair(error.calls), _cut_pair(error.call_sites)
        return Difference(name=cut(error.group, LINE_BYTES), seq=error.seq, ranks=error.ranks, calls=calls, sites=sites)
    fields = pack_error(error.__cause__ or error)
    return RankCause(
        rank=getattr(error, "culprit", 0),
        message=cut(text_of(error)),
        aborted=isinstance(error, GroupAbortedError),
        error=(fields["kind"], fields["text"], fields["trace"], fields["place"]) if with_error else None,
    )


def unpack_cause(cause: Difference | RankCause) -> Callable[[], OverlapError]:
    """Return a function that makes a new error of an operation that failed elsewhere."""
    if isinstance(cause, Difference):
        return partial(
            CollectiveMismatchError,
            group=cause.name,
            seq=cause.seq,
            ranks=cause.ranks,
            calls=cause.calls,
            call_sites=cause.sites,
        )
    if cause.error is None:
        return partial(GroupAbortedError if cause.aborted else PeerFailedError, cause.message, culprit=cause.rank)
    kind, text, trace, place = cause.error
    remote = RemoteError(kind, text, trace=trace, place=place)
    return partial(PeerFailedError.caused_by, remote, cause.message, culprit=cause.rank)


def _cut_pair(lines: Sequence[str]) -> tuple[str, str]:
    """Return two lines, each cut to `LINE_BYTES`."""
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


def cut_views(views: Sequence[RankView]) -> list[RankView]:
    """Return the views of the first ranks, with the operations in which they wait and with cut texts.

    Of a receive from any source the members are left out, unless they are few: none of them may be missed.
    """
    kept: list[RankView] = []
    for most_ends, limit_bytes in ((16, LINE_BYTES), (4, 100), (1, 30)):
        kept = [_cut_view(view, most_ends, limit_bytes) for view in views[:_RANKS]]
        if len(msgspec.msgpack.encode(kept)) <= _VIEWS_BYTES:
            break
    return kept


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
