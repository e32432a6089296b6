"""Reading our trace files, complete or cut off: the events of an array, and their columns. Each field is checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, BinaryIO, cast

import msgspec
import numpy as np
from msgspec import UNSET

from ...errors import UsageError
from ...ranklist import parse_rank_list
from ..columnar import KINDS, NONE, ROLES, Int64s, SpanColumns, SpanGroup, Table
from ..spans import CUT, LEFT_OUT, Timeline
from .events import OF_ARRAY, EventReader
from .merge import CLOCK_ERROR, merged
from .trace import CLOCK, DEFAULT_ROLES, END, HEADER, VERSION, ClockAt, Header, NoteEvent, SpanEvent, TraceEnd


class _TraceSection:
    """Spans of one process in one world, as they are read."""

    def __init__(self, header: Header) -> None:
        self.header, self.end = header, cast("TraceEnd | None", None)
        self.clocks: list[ClockAt] = []
        self.events: list[SpanEvent] = []
        self.parts: list[SpanColumns] = []
        self.left_out: list[SpanColumns] = []

    def decode(self) -> None:
        """Turn the spans that were read since the last call into columns."""
        columns = decode_columns(self.events)
        backwards = columns.start_ns > columns.end_ns
        self.events.clear()
        self.left_out.append(columns.take(backwards))
        self.parts.append(columns.take(~backwards))

    def timeline(self, clocks: Sequence[ClockAt]) -> Timeline:
        """Return the timeline on the common clock, with the largest error of the clock."""
        columns, meta = SpanColumns.concatenate(self.parts), dict(self.end.meta if self.end else self.header.meta)
        if clocks:
            columns = _on_common_clock(columns, clocks)
            meta[CLOCK_ERROR] = str(max(clock.error_ns for clock in clocks))
        if self.end is None:
            meta[CUT] = "what was recorded before the run was killed" if self.header.run else "only what is complete"
        dropped = self.end.dropped if self.end else self.header.dropped
        return Timeline.of_columns(
            columns, world_size=self.header.world_size, clock=self.header.clock, dropped=dropped, meta=meta
        )


def read_sections(file: BinaryIO) -> Timeline:
    """Return the timeline of all sections of a file of ours, from the beginning of its text; memory holds a piece.

    Spans that end before they start are left out, and `meta` says so.

    Raises:
        ValueError: A field is missing or not what it should be, or all spans are left out.
        OverflowError: A number has more than 64 bits.
        UsageError: A later version has written it, or nothing is in it.
    """
    sections, last = list[_TraceSection](), cast("_TraceSection | None", None)
    reader = EventReader[SpanEvent | NoteEvent](file, SpanEvent | NoteEvent, OF_ARRAY)
    for events in reader:
        for event in events:
            if isinstance(event, SpanEvent):
                if last is None:
                    raise ValueError("a span before the header")
                last.events.append(event)
            elif event.name == HEADER:
                last = _TraceSection(checked_header(event.args, VERSION))
                sections.append(last)
            elif last is not None and event.name == CLOCK:
                last.clocks.append(msgspec.convert(event.args, ClockAt))
            elif last is not None and event.name == END:
                last.end = msgspec.convert(event.args, TraceEnd)
        for section in sections:
            if section.events:
                section.decode()
    if not sections:
        raise UsageError("not JSON, or cut off before its first event; record it again")
    by_process: dict[int, list[_TraceSection]] = {}
    for section in sections:
        by_process.setdefault(section.header.process, []).append(section)
    timelines = [_in_sequence(of_process) for _, of_process in sorted(by_process.items())]
    found = timelines[0] if len(timelines) == 1 else merged(timelines)
    meta = found.meta if reader.is_complete else {CUT: "only what is complete"} | found.meta
    left_out = SpanColumns.concatenate(columns for section in sections for columns in section.left_out)
    if len(left_out):
        if not len(found.columns):
            raise ValueError("all of its spans end before they start")
        meta |= {LEFT_OUT: _describe_left_out(left_out)}
    if CUT in meta and not len(found.columns) and not reader.is_complete:
        raise UsageError("the run was killed before it had recorded anything; run it again")
    return replace(found, meta=meta)


def checked_header(fields: object, version: int) -> Header:
    """Return a header from decoded fields.

    Raises:
        UsageError: A newer version than `version` has written it.
        msgspec.ValidationError: A field is missing or is not what it should be; it is named.
    """
    if not isinstance(fields, Mapping):
        raise ValueError("the field 'overlap' is not an object")
    written = fields.get("version")
    if isinstance(written, int) and written > version:
        raise UsageError(
            f"written by a newer version (format {written}, this one reads up to {version}); update overlap"
        )
    if "version" not in fields:
        raise ValueError("Object missing required field `version`")
    return msgspec.convert(fields, Header)


def _in_sequence(sections: Sequence[_TraceSection]) -> Timeline:
    """Return one timeline of the worlds of a process, on the common clock of the last one."""
    timelines = [section.timeline(sections[-1].clocks) for section in sections]
    if len(timelines) == 1:
        return timelines[0]
    last, meta = timelines[-1], {key: value for timeline in timelines for key, value in timeline.meta.items()}
    columns = SpanColumns.concatenate(timeline.columns for timeline in timelines)
    dropped = sum(timeline.dropped for timeline in timelines)
    return Timeline.of_columns(columns, world_size=last.world_size, clock=last.clock, dropped=dropped, meta=meta)


def _on_common_clock(columns: SpanColumns, clocks: Sequence[ClockAt]) -> SpanColumns:
    """Return columns on the common clock; offsets between those of `clocks` are interpolated."""
    at_ns = np.array([clock.at_ns for clock in clocks], np.int64)
    offset_ns = np.array([clock.offset_ns for clock in clocks], np.int64)
    drift_ns = (offset_ns - offset_ns[0]).astype(float)  # floats hold the drift exactly, and not the offset

    def moved(column: Int64s) -> Int64s:
        drift = np.interp((column - at_ns[0]).astype(float), (at_ns - at_ns[0]).astype(float), drift_ns)
        return cast(Int64s, column + offset_ns[0] + np.rint(drift).astype(np.int64))

    instants: dict[str, Any] = {"start_ns": moved(columns.start_ns), "end_ns": moved(columns.end_ns)}
    instants["met_ns"] = np.where(columns.is_operation, moved(columns.met_ns), columns.met_ns)
    for name in ("issued_ns", "awaited_ns"):
        column = getattr(columns, name)
        instants[name] = np.where(column == NONE, NONE, moved(np.where(column == NONE, 0, column)))
    return replace(columns, **instants)


_NUMBERS = ("start_ns", "end_ns", "met_ns", "seq", "nbytes", "priority", "step", "issued_ns", "awaited_ns")
_ROLE_NUMBERS: dict[object, int] = {UNSET: -1, **{role: number for number, role in enumerate(ROLES)}}


def decode_columns(events: Sequence[SpanEvent]) -> SpanColumns:
    """Return the columns of events of spans, one row each, in their order.

    Raises:
        ValueError: An operation has no instant of its call.
        OverflowError: A number has more than 64 bits.
    """
    args, kinds = [event.args for event in events], [event.cat for event in events]
    texts, groups = Table[str](), Table[tuple[str, str, int]]()
    texts[""], groups["", "", 0]
    numbers: dict[str, Iterable[int]] = {name: map(attrgetter(name), args) for name in _NUMBERS} | {
        "rank": [event.pid for event in events],
        "kind": map(KINDS.index, kinds),
        "role": [_ROLE_NUMBERS[each.role] for each in args],
        "name": [texts[event.name] for event in events],
        "lane": [texts[each.lane or kind] for each, kind in zip(args, kinds, strict=True)],
        "op": [texts[each.op or event.name] for each, event in zip(args, events, strict=True)],
        "group": [groups[each.group, each.ranks, each.tag] for each in args],
        "algorithm": [texts[each.algorithm] for each in args],
        "dtype": [texts[each.dtype] for each in args],
        "call_site": [texts[each.site] for each in args],
    }
    columns = {name: np.fromiter(column, np.int64, len(args)) for name, column in numbers.items()}
    start_ns, is_operation = columns["start_ns"], columns["seq"] != NONE
    if (is_operation & (columns["issued_ns"] == NONE)).any():
        raise ValueError("an operation has no 'issued_ns'")
    dur_ns = np.array([round(event.dur * 1000) for event in events], np.int64)
    known_groups = Table[SpanGroup]()  # one group may be listed in several ways
    index = [known_groups[SpanGroup(name, parse_rank_list(ranks) if ranks else (), tag)] for name, ranks, tag in groups]
    columns |= {
        "end_ns": np.where(columns["end_ns"] == NONE, start_ns + dur_ns, columns["end_ns"]),
        "met_ns": np.where(is_operation, np.where(columns["met_ns"] == NONE, start_ns, columns["met_ns"]), 0),
        "seq": np.where(is_operation, columns["seq"], 0),
        "op": np.where(is_operation, columns["op"], -1),
        "role": np.where(columns["role"] < 0, np.array(DEFAULT_ROLES)[columns["kind"]], columns["role"]),
        "group": np.array(index)[columns["group"]],
    }
    return SpanColumns.from_named(columns, texts, known_groups)


def without_backwards(columns: SpanColumns) -> tuple[SpanColumns, dict[str, str]]:
    """Return spans without those that end before they start, and a fact for `meta` on these.

    Raises:
        ValueError: No span is left.
    """
    backwards = columns.start_ns > columns.end_ns
    if not backwards.any():
        return columns, {}
    if backwards.all():
        raise ValueError("all of its spans end before they start")
    return columns.take(~backwards), {LEFT_OUT: _describe_left_out(columns.take(backwards))}


def _describe_left_out(columns: SpanColumns) -> str:
    """Return text that counts the spans left out because they end before they start, and names the first."""
    many = len(columns) > 1
    which = f"{len(columns)} spans end before they start" if many else "1 span ends before it starts"
    name = columns.texts[columns.name[0]]
    return f"{which} ({'first: ' * many}'{name}' of rank {columns.rank[0]}): shown is the rest"
