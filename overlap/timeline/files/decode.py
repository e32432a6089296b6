"""Reading the events of our own trace files, complete or cut off, into columns; each field is checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from ..columnar import KINDS, NONE, ROLES, SpanColumns, SpanGroup, Table
from ..ranklist import unlisted
from ..span import Role
from ..spans import LEFT_OUT, Timeline
from .events import Json
from .parts import Header, checked_header

VERSION = 1
"""Version of our fields; a file with a higher one is refused."""

_KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
_ROLE_NUMBERS = {role: number for number, role in enumerate(ROLES)}
_OPERATION_FIELDS = (
    "seq", "nbytes", "met_ns", "priority", "algorithm", "dtype", "op", "group", "issued_ns", "call_site",
)  # fmt: skip
"""Fields that every operation has."""


class _EventArgs(msgspec.Struct):
    """The fields of all kinds of events; a field that an event does not have is UNSET."""

    start_ns: int | UnsetType = UNSET
    end_ns: int | UnsetType = UNSET
    lane: str | UnsetType = UNSET
    step: int | UnsetType = UNSET
    issued_ns: int | UnsetType = UNSET
    call_site: str | UnsetType = UNSET
    role: Role = ""
    seq: int | UnsetType = UNSET
    nbytes: int | UnsetType = UNSET
    met_ns: int | UnsetType = UNSET
    priority: int | UnsetType = UNSET
    awaited_ns: int | UnsetType = UNSET
    algorithm: str | UnsetType = UNSET
    dtype: str | UnsetType = UNSET
    op: str | UnsetType = msgspec.field(default=UNSET, name="Collective name")
    group: str | UnsetType = msgspec.field(default=UNSET, name="Process Group Name")
    ranks: str | UnsetType = msgspec.field(default=UNSET, name="Process Group Ranks")
    tag: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0


class _Event(msgspec.Struct):
    """Event of a trace file of ours, as far as it is read; the names of the fields are Chrome's."""

    ph: str = ""
    pid: int | UnsetType = UNSET
    cat: str = ""
    name: str | UnsetType = UNSET
    args: _EventArgs = msgspec.field(default_factory=_EventArgs)


class Document(msgspec.Struct):
    """A trace file of ours."""

    overlap: Any = None  # The header; None in a file of another tool
    events: list[_Event] = msgspec.field(default_factory=list, name="traceEvents")

    def timeline(self) -> Timeline:
        """Return the timeline. Spans that end before they start are left out; `meta` says so.

        Raises:
            ValueError: A field is missing or not what it should be; it is named.
            OverflowError: A number has more than 64 bits.
            UsageError: A newer version has written it.
        """
        header = file_header(self.overlap)
        events = [event for event in self.events if event.ph == "X" and event.cat != "issue"]
        columns = _decode_columns(events)
        backwards = columns.start_ns > columns.end_ns
        timeline = header.timeline(columns.take(~backwards))
        if backwards.any():
            if backwards.all():
                raise ValueError("all of its spans end before they start")
            timeline.meta[LEFT_OUT] = _describe_left_out(columns.take(backwards))
        return timeline


def file_header(fields: Json) -> Header:
    """Return the checked header of a trace file from its field 'overlap'; errors as for `checked_header`."""
    if not isinstance(fields, Mapping):
        raise ValueError("the field 'overlap' is not an object")
    return checked_header(fields, version=VERSION, origin="written by ")


def _describe_left_out(columns: SpanColumns) -> str:
    """Return text that counts the spans left out because they end before they start, and names the first."""
    many = len(columns) > 1
    which = f"{len(columns)} spans end before they start" if many else "1 span ends before it starts"
    name = columns.texts[columns.name[0]]
    return f"{which} ({'first: ' * many}'{name}' of rank {columns.rank[0]}): shown is the rest"


def _decode_columns(events: Sequence[_Event]) -> SpanColumns:
    """Return the columns of decoded events, one row each, in their order; errors as for `_check_fields`."""
    args = [event.args for event in events]
    is_operation = [fields.seq is not UNSET for fields in args]
    _check_fields(events, [fields for fields in args if fields.seq is not UNSET])
    texts, groups = Table[str](), Table[tuple[str, str | UnsetType, int]]()
    texts[""], groups["", UNSET, 0]
    numbers: dict[str, list[Any]] = {
        "rank": [event.pid for event in events],
        "kind": [_KIND_NUMBERS[cast(Any, event.cat)] for event in events],
        "role": [_ROLE_NUMBERS[fields.role] for fields in args],
        "name": [texts[event.name or ""] for event in events],
        "op": [texts[fields.op or ""] if has else -1 for fields, has in zip(args, is_operation, strict=True)],
        "group": [groups[fields.group or "", fields.ranks, fields.tag] for fields in args],
    }
    for name in ("start_ns", "end_ns", "seq", "nbytes", "met_ns", "priority"):
        numbers[name] = [getattr(fields, name) or 0 for fields in args]
    for name in ("step", "issued_ns", "awaited_ns"):
        numbers[name] = [NONE if (number := getattr(fields, name)) is UNSET else number for fields in args]
    for name in ("lane", "algorithm", "dtype", "call_site"):
        numbers[name] = [texts[getattr(fields, name) or ""] for fields in args]
    columns = {name: np.array(column, np.int64) for name, column in numbers.items()}
    known_groups = Table[SpanGroup]()  # one group may be listed in several ways
    columns["group"] = np.array([known_groups[_decode_group(*group)] for group in groups])[columns["group"]]
    return SpanColumns.from_named(columns, texts, known_groups)


def _decode_group(name: str, ranks: str | UnsetType, tag: int) -> SpanGroup:
    return SpanGroup(name, () if ranks is UNSET else unlisted(ranks), tag)


def _check_fields(events: Sequence[_Event], operations: Sequence[_EventArgs]) -> None:
    """Refuse events of unknown kinds, and spans and operations that lack a field.

    Raises:
        ValueError: One does; the field is named.
    """
    if unknown := {event.cat for event in events} - _KIND_NUMBERS.keys():
        raise ValueError(f"unknown category {min(unknown)!r}")
    args = [event.args for event in events]
    for name, owners in {"pid": events, "name": events, **dict.fromkeys(("start_ns", "end_ns", "lane"), args)}.items():
        if any(getattr(owner, name) is UNSET for owner in cast(Sequence[object], owners)):
            raise ValueError(f"a span has no {name}")
    names = {field.name: field.encode_name for field in msgspec.structs.fields(_EventArgs)}
    for name in _OPERATION_FIELDS:
        if any(getattr(each, name) is UNSET for each in operations):
            raise ValueError(f"an operation has no {names[name]!r}")


_BEGIN = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")


def complete_part(text: str) -> Json | None:
    """Return the document of a text that was cut off, with its complete events; None if it has none, or no header."""
    match = _BEGIN.search(text)
    if match is None:
        return None
    try:
        header = json.loads(text[: match.start()].rstrip().removesuffix(",") + "}")
    except ValueError:
        return None
    events: list[Json] = []
    decoder, at = json.JSONDecoder(), match.end()
    while True:
        at = cast("re.Match[str]", _BETWEEN.match(text, at)).end()
        try:
            event, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            break
        events.append(event)
    return {**header, "traceEvents": events} if events else None
