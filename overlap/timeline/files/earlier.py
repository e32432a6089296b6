"""Trace files of version 1: a JSON object with a header of overlap, and Chrome events with Kineto's names of fields."""

from __future__ import annotations

from typing import BinaryIO, Literal, cast

import msgspec

from ..columnar import NONE
from ..span import Kind, Role
from ..spans import CUT, Timeline
from .events import OF_OBJECT, EventReader
from .sections import decode_columns, parse_header, without_backward_spans
from .trace import SpanArgs, SpanEvent

VERSION = 1
"""Version of the files that this module reads."""


class _Args(SpanArgs, gc=False):
    """Fields of an event in version 1, some under other names than today."""

    start_ns: int = NONE
    op: str = msgspec.field(default="", name="Collective name")
    group: str = msgspec.field(default="", name="Process Group Name")
    ranks: str = msgspec.field(default="", name="Process Group Ranks")
    site: str = msgspec.field(default="", name="call_site")
    role: Role = ""


class _EarlierEvent(msgspec.Struct, gc=False):
    """Event of a span, or of category "issue", which only viewers need."""

    ph: str = ""
    pid: int = 0
    cat: Kind | Literal["issue"] = "issue"
    dur: float = 0.0
    name: str = ""
    args: _Args = msgspec.field(default_factory=_Args)


def read_earlier_timeline(file: BinaryIO) -> Timeline:
    """Read a trace file of version 1; if it was cut off, its complete events.

    Raises:
        ValueError: A field is missing or not what it should be; the message names it.
        OverflowError: A number has more than 64 bits.
        UsageError: A later version has written the file, or it has no event.
    """
    reader = EventReader[_EarlierEvent](file, _EarlierEvent, OF_OBJECT)
    events = [event for piece in reader for event in piece if event.ph == "X" and event.cat != "issue"]
    header = parse_header(reader.fields.get("overlap"), VERSION)
    columns = decode_columns(cast("list[SpanEvent]", events))
    if (lacks_start := columns.start_ns == NONE).any():
        number = int(lacks_start.argmax())
        raise ValueError(f"span {number} ({events[number].name!r}; spans count from 0) has no start_ns")
    columns, facts = without_backward_spans(columns)
    facts |= {} if reader.is_complete else {CUT: "only what is complete"}
    return Timeline.of_columns(
        columns, world_size=header.world_size, clock=header.clock, dropped=header.dropped, meta=header.meta | facts
    )
