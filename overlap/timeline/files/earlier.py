"""Trace files of earlier versions: a JSON object with our header, and Chrome events with Kineto's names of fields."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import msgspec

from ...errors import UsageError
from ..columnar import SpanColumns
from ..span import Role
from ..spans import CUT, LEFT_OUT, Timeline
from .sections import Event, ReadArgs, checked_header, complete_events, decode_columns, describe_left_out, load_json

VERSION = 1
"""Version of this form."""
_EVENTS_BEGIN = re.compile(r'"traceEvents"\s*:\s*\[')


class _Args(ReadArgs, gc=False):
    """Fields of an event, of which some had other names."""

    op: str = msgspec.field(default="", name="Collective name")
    group: str = msgspec.field(default="", name="Process Group Name")
    ranks: str = msgspec.field(default="", name="Process Group Ranks")
    site: str = msgspec.field(default="", name="call_site")
    role: Role = ""


class _EarlierEvent(Event, gc=False):
    args: _Args = msgspec.field(default_factory=_Args)


class _Document(msgspec.Struct):
    overlap: Any
    events: list[_EarlierEvent] = msgspec.field(name="traceEvents")


def earlier_timeline(data: bytes, *, complete: bool) -> Timeline:
    """Return the timeline of a file of version 1, of its complete events if it was cut off.

    Raises:
        ValueError: A field is missing or not what it should be; it is named.
        OverflowError: A number has more than 64 bits.
        UsageError: A later version has written it, or it has no event.
    """
    try:
        document = msgspec.json.decode(data, type=_Document)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        content, complete = _load_complete_part(data, complete=complete)
        document = msgspec.convert(content, _Document)
    header = checked_header(document.overlap, VERSION)
    columns = decode_columns([event for event in document.events if event.ph == "X" and event.cat != "issue"])
    backwards = columns.start_ns > columns.end_ns
    meta = header.meta if complete else header.meta | {CUT: "only what is complete"}
    if backwards.any():
        if backwards.all():
            raise ValueError("all of its spans end before they start")
        meta |= {LEFT_OUT: describe_left_out(columns.take(backwards))}
    spans: SpanColumns = columns.take(~backwards)
    return Timeline.of_columns(
        spans, world_size=header.world_size, clock=header.clock, dropped=header.dropped, meta=meta
    )  # fmt: skip


def _load_complete_part(data: bytes, *, complete: bool) -> tuple[Any, bool]:
    """Return the parsed document, or its header and its complete events; and whether it is complete."""
    try:
        return load_json(data), complete
    except UsageError as error:
        text = data.decode("utf-8", "ignore")
        if (match := _EVENTS_BEGIN.search(text)) is None:
            raise
        with suppress(ValueError):
            header = json.loads(text[: match.start()].rstrip().removesuffix(",") + "}")
            if events := complete_events(text[match.end() :]):
                return header | {"traceEvents": events}, False
        raise error
