"""Reading trace files of overlap, complete or cut off, into columns; each field is checked.

A file has a section for each process and world: see `trace`.
"""

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
from ..columnar import KINDS, NONE, ROLES, IndexTable, Int64s, SpanColumns, SpanGroup
from ..spans import CUT, LEFT_OUT, Timeline
from .events import OF_ARRAY, EventReader
from .merge import CLOCK_ERROR, merged
from .trace import CLOCK, DEFAULT_ROLES, END, HEADER, VERSION, ClockAt, Header, NoteEvent, SpanEvent, TraceEnd


class _TraceSection:
    """Section of a trace file that is being read: the spans of one process in one world."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.end: TraceEnd | None = None
        self.clocks: list[ClockAt] = []
        self.events: list[SpanEvent] = []
        self.parts: list[SpanColumns] = []
        self.left_out: list[SpanColumns] = []

    def decode_events(self) -> None:
        """Turn the events read since the last call into columns; spans that end before they start go to `left_out`."""
        columns = decode_columns(self.events)
        backwards = columns.start_ns > columns.end_ns
        self.events.clear()
        self.left_out.append(columns.take(backwards))
        self.parts.append(columns.take(~backwards))

    def make_timeline(self, clocks: Sequence[ClockAt]) -> Timeline:
        """Return the section on the clock that all processes share, with its error in `meta`.

        Without `clocks`, its instants are on that clock already.
        """
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
    """Read all sections of a trace file of overlap into one timeline. Memory holds one piece of its text.

    Spans that end before they start are left out; `meta` counts them under `LEFT_OUT`.

    Raises:
        ValueError: A field is missing or not what it should be, or all spans are left out.
        OverflowError: A number has more than 64 bits.
        UsageError: A later version has written the file, or nothing is in it.
    """
    sections = list[_TraceSection]()
    last: _TraceSection | None = None
    reader = EventReader[SpanEvent | NoteEvent](file, SpanEvent | NoteEvent, OF_ARRAY)
    for events in reader:
        for event in events:
            if isinstance(event, SpanEvent):
                if last is None:
                    raise ValueError(f"the span '{event.name}' of rank {event.pid} comes before the header")
                last.events.append(event)
            elif event.name == HEADER:
                last = _TraceSection(parse_header(event.args, VERSION))
                sections.append(last)
            elif last is not None and event.name == CLOCK:
                last.clocks.append(msgspec.convert(event.args, ClockAt))
            elif last is not None and event.name == END:
                last.end = msgspec.convert(event.args, TraceEnd)
        for section in sections:
            if section.events:
                section.decode_events()
    if not sections:
        raise UsageError("not JSON, or cut off before its first event; record it again")
    by_process: dict[int, list[_TraceSection]] = {}
    for section in sections:
        by_process.setdefault(section.header.process, []).append(section)
    timelines = [_timeline_of_process(of_process) for _, of_process in sorted(by_process.items())]
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


def parse_header(fields: object, version: int) -> Header:
    """Return a header from decoded fields.

    Raises:
        UsageError: The header is of a newer version than `version`.
        ValueError: A field is missing or is not what it should be; the message names it.
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


def _timeline_of_process(sections: Sequence[_TraceSection]) -> Timeline:
    """Return one timeline of the worlds that a process ran one after the other, all on the common clock."""
    # A process has one clock for all of its worlds. Its last world has the most measurements of the offset.
    timelines = [section.make_timeline(sections[-1].clocks) for section in sections]
    if len(timelines) == 1:
        return timelines[0]
    last, meta = timelines[-1], {key: value for timeline in timelines for key, value in timeline.meta.items()}
    columns = SpanColumns.concatenate(timeline.columns for timeline in timelines)
    dropped = sum(timeline.dropped for timeline in timelines)
    return Timeline.of_columns(columns, world_size=last.world_size, clock=last.clock, dropped=dropped, meta=meta)


def _on_common_clock(columns: SpanColumns, clocks: Sequence[ClockAt]) -> SpanColumns:
    """Return spans on the common clock; between the measured offsets in `clocks`, the offset is interpolated."""
    at_ns = np.array([clock.at_ns for clock in clocks], np.int64)
    offset_ns = np.array([clock.offset_ns for clock in clocks], np.int64)
    # A float holds the small drift exactly, but not the offset.
    drift_ns = (offset_ns - offset_ns[0]).astype(float)

    def to_common_clock(column: Int64s) -> Int64s:
        # `interp` takes the first offset before it, and the last offset after it.
        drift = np.interp((column - at_ns[0]).astype(float), (at_ns - at_ns[0]).astype(float), drift_ns)
        return cast(Int64s, column + offset_ns[0] + np.rint(drift).astype(np.int64))

    instants: dict[str, Any] = {
        "start_ns": to_common_clock(columns.start_ns),
        "end_ns": to_common_clock(columns.end_ns),
    }
    instants["met_ns"] = np.where(columns.is_operation, to_common_clock(columns.met_ns), columns.met_ns)
    for name in ("issued_ns", "awaited_ns"):
        column = getattr(columns, name)
        instants[name] = np.where(column == NONE, NONE, to_common_clock(np.where(column == NONE, 0, column)))
    return replace(columns, **instants)


_NUMBERS = ("start_ns", "end_ns", "met_ns", "seq", "nbytes", "priority", "step", "issued_ns", "awaited_ns")
_TEXTS = attrgetter("lane", "role", "op", "algorithm", "dtype", "group", "ranks", "tag", "site")
_ROLE_NUMBERS: dict[object, int] = {UNSET: -1, **{role: number for number, role in enumerate(ROLES)}}


def decode_columns(events: Sequence[SpanEvent]) -> SpanColumns:
    """Return spans as columns from their events, in the order of the events.

    Args:
        events: Events as `trace.SpanEvent` describes them, or of an earlier version.

    Raises:
        ValueError: An operation has no `issued_ns`, the instant of its call.
        OverflowError: A number has more than 64 bits.
    """
    args, kinds = [event.args for event in events], [event.cat for event in events]
    texts, groups, alike = IndexTable[str](), IndexTable[tuple[str, str, int]](), IndexTable[tuple[object, ...]]()
    # Looking up a new key adds it: index 0 becomes "" and no group.
    texts[""], groups["", "", 0]
    numbers: dict[str, Iterable[int]] = {name: map(attrgetter(name), args) for name in _NUMBERS} | {
        "rank": [event.pid for event in events],
        "name": [texts[event.name] for event in events],
        "alike": map(alike.__getitem__, zip(kinds, map(_TEXTS, args), strict=True)),
    }
    columns = {name: np.fromiter(column, np.int64, len(args)) for name, column in numbers.items()}
    # Most spans differ from others only in their numbers: decode the texts of one span of each kind.
    kind_of_span = columns.pop("alike")
    firsts = [events[row] for row in np.unique(kind_of_span, return_index=True)[1].tolist()]
    of_firsts = {
        "kind": [KINDS.index(event.cat) for event in firsts],
        "role": [_ROLE_NUMBERS[event.args.role] for event in firsts],
        "lane": [texts[event.args.lane or event.cat] for event in firsts],
        "op": [texts[event.args.op] for event in firsts],
        "group": [groups[event.args.group, event.args.ranks, event.args.tag] for event in firsts],
        "algorithm": [texts[event.args.algorithm] for event in firsts],
        "dtype": [texts[event.args.dtype] for event in firsts],
        "call_site": [texts[event.args.site] for event in firsts],
    }
    columns |= {name: np.array(column, np.int64)[kind_of_span] for name, column in of_firsts.items()}
    start_ns, is_operation = columns["start_ns"], columns["seq"] != NONE
    if (unissued := is_operation & (columns["issued_ns"] == NONE)).any():
        raise _unissued_error(events[int(unissued.argmax())])
    # `dur` is microseconds
    dur_ns = np.array([round(event.dur * 1000) for event in events], np.int64)
    known_groups = IndexTable[SpanGroup]()  # one group may be listed in several ways
    index = [known_groups[SpanGroup(name, parse_rank_list(ranks) if ranks else (), tag)] for name, ranks, tag in groups]
    columns |= {
        "end_ns": np.where(columns["end_ns"] == NONE, start_ns + dur_ns, columns["end_ns"]),
        "met_ns": np.where(is_operation, np.where(columns["met_ns"] == NONE, start_ns, columns["met_ns"]), 0),
        "seq": np.where(is_operation, columns["seq"], 0),
        "op": np.where(is_operation, np.where(columns["op"] == 0, columns["name"], columns["op"]), -1),
        "role": np.where(columns["role"] < 0, np.array(DEFAULT_ROLES)[columns["kind"]], columns["role"]),
        "group": np.array(index)[columns["group"]],
    }
    return SpanColumns.from_named(columns, texts, known_groups)


def _unissued_error(event: SpanEvent) -> ValueError:
    """Return the error of an operation without the instant of its call."""
    fields = event.args
    operation = f"operation #{fields.seq} '{event.name}' of rank {event.pid} in group '{fields.group}'"
    return ValueError(f"{operation}, which starts at {fields.start_ns} ns, has no 'issued_ns'")


def without_backward_spans(columns: SpanColumns) -> tuple[SpanColumns, dict[str, str]]:
    """Leave out spans that end before they start.

    Returns:
        The other spans, and an entry for `meta` that counts those left out, or {} if there were none.

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
    """Return a text on spans that are left out because they end before they start: their number, and the first."""
    many = len(columns) > 1
    which = f"{len(columns)} spans end before they start" if many else "1 span ends before it starts"
    name = columns.texts[columns.name[0]]
    return f"{which} ({'first: ' * many}'{name}' of rank {columns.rank[0]}): shown is the rest"
