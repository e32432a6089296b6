"""Reading our trace files, complete or cut off: the events of an array, and their columns. Each field is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, BinaryIO, cast

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from ...errors import UsageError
from ...ranklist import unlisted
from ..columnar import KINDS, NONE, ROLES, Int64s, SpanColumns, SpanGroup, Table
from ..span import Role
from ..spans import CUT, LEFT_OUT, Timeline
from .events import OF_ARRAY, EventReader
from .merge import CLOCK_ERROR, merged
from .trace import CLOCK, DEFAULT_ROLES, END, HEADER, VERSION, ClockAt, Header, SpanArgs, TraceEnd


class ReadArgs(SpanArgs, gc=False):
    """The fields of spans and of our metadata; a field that an event does not have is UNSET or at its default."""

    role: Role | UnsetType = UNSET
    tag: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0
    version: int | UnsetType = UNSET
    world_size: int | UnsetType = UNSET
    clock: str | UnsetType = UNSET
    dropped: int | UnsetType = UNSET
    meta: dict[str, str] | UnsetType = UNSET
    process: int | UnsetType = UNSET
    run: str | UnsetType = UNSET
    at_ns: int | UnsetType = UNSET
    offset_ns: int | UnsetType = UNSET
    error_ns: int | UnsetType = UNSET


class Event(msgspec.Struct, gc=False):
    """Event of a trace file of ours, as far as it is read; the names of the fields are Chrome's."""

    ph: str = ""
    pid: int | UnsetType = UNSET
    cat: str = ""
    dur: float = 0.0
    name: str | UnsetType = UNSET
    args: ReadArgs = msgspec.field(default_factory=ReadArgs)


class _TraceSection:
    """Spans of one process in one world, as they are read."""

    def __init__(self, header: Header) -> None:
        self.header, self.end = header, cast("TraceEnd | None", None)
        self.clocks: list[ClockAt] = []
        self.parts: list[SpanColumns] = []

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


class Sections:
    """All sections of a file of ours.

    Args:
        file: Its text, at the beginning.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._sections: list[_TraceSection] = []
        self._left_out: list[SpanColumns] = []
        reader = EventReader(file, Event, OF_ARRAY)
        for events in reader:
            self._add(events)
        self._is_complete = reader.is_complete

    def timeline(self) -> Timeline:
        """Return the timeline of all sections; spans that end before they start are left out, and `meta` says so."""
        if not self._sections:
            raise UsageError("not JSON, or cut off before its first event; record it again")
        by_process: dict[int, list[_TraceSection]] = {}
        for section in self._sections:
            by_process.setdefault(section.header.process, []).append(section)
        timelines = [_in_sequence(sections) for _, sections in sorted(by_process.items())]
        found = timelines[0] if len(timelines) == 1 else merged(timelines)
        meta = found.meta if self._is_complete else {CUT: "only what is complete"} | found.meta
        if left_out := [columns for columns in self._left_out if len(columns)]:
            if not len(found.columns):
                raise ValueError("all of its spans end before they start")
            meta |= {LEFT_OUT: describe_left_out(SpanColumns.concatenate(left_out))}
        if CUT in meta and not len(found.columns) and not self._is_complete:
            raise UsageError("the run was killed before it had recorded anything; run it again")
        return replace(found, meta=meta)

    def _add(self, events: list[Event]) -> None:
        """Add events to the sections that they belong to."""
        begin = 0
        for at, event in enumerate(events):
            if event.ph == "M" and event.name in (HEADER, CLOCK, END):
                self._add_spans(events[begin:at])
                begin = at
                self._add_note(event)
        self._add_spans(events[begin:])

    def _add_note(self, event: Event) -> None:
        """Begin a section, or add the facts of a metadata event to the last one."""
        fields = {name: value for name in event.args.__struct_fields__ if (value := getattr(event.args, name)) != UNSET}
        if event.name == HEADER:
            self._sections.append(_TraceSection(checked_header(fields, VERSION)))
        elif self._sections and event.name == CLOCK:
            self._sections[-1].clocks.append(msgspec.convert(fields, ClockAt))
        elif self._sections:
            self._sections[-1].end = msgspec.convert(fields, TraceEnd)

    def _add_spans(self, events: list[Event]) -> None:
        """Add spans to the last section."""
        spans = [event for event in events if event.ph == "X"]
        if not spans:
            return
        if not self._sections:
            raise ValueError("a span before the header")
        columns = decode_columns(spans)
        backwards = columns.start_ns > columns.end_ns
        self._left_out.append(columns.take(backwards))
        self._sections[-1].parts.append(columns.take(~backwards))


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


# -- columns -------------------------------------------------------------------------------------------------------


def decode_columns(events: Sequence[Event]) -> SpanColumns:
    """Return the columns of events of spans, one row each, in their order; errors as for `_check_fields`."""
    args = [event.args for event in events]
    _check_fields(events, args)
    texts, groups = Table[str](), Table[tuple[str, str, int]]()
    texts[""], groups["", "", 0]
    kinds = [_KIND_NUMBERS[event.cat] for event in events]
    numbers: dict[str, list[Any]] = {
        "rank": [event.pid for event in events],
        "kind": kinds,
        "role": [
            DEFAULT_ROLES[kind] if each.role is UNSET else _ROLE_NUMBERS[each.role]
            for each, kind in zip(args, kinds, strict=True)
        ],
        "name": [texts[event.name] for event in events],  # type: ignore[index]
        "lane": [texts[each.lane or event.cat] for each, event in zip(args, events, strict=True)],
        "op": [
            -1 if each.seq is UNSET else texts[each.op or event.name]  # type: ignore[index]
            for each, event in zip(args, events, strict=True)
        ],
        "met_ns": [0 if each.seq is UNSET else each.start_ns if each.met_ns is UNSET else each.met_ns for each in args],
        "seq": [0 if each.seq is UNSET else each.seq for each in args],
        "group": [groups[each.group, each.ranks, each.tag] for each in args],
        "algorithm": [texts[each.algorithm] for each in args],
        "dtype": [texts[each.dtype] for each in args],
        "call_site": [texts[each.site] for each in args],
    }
    numbers["end_ns"] = [
        each.start_ns + round(event.dur * 1000) if each.end_ns is UNSET else each.end_ns  # type: ignore[operator]
        for each, event in zip(args, events, strict=True)
    ]
    for name in ("start_ns", "nbytes", "priority"):
        numbers[name] = [getattr(each, name) for each in args]
    for name in ("step", "issued_ns", "awaited_ns"):
        numbers[name] = [NONE if (number := getattr(each, name)) is UNSET else number for each in args]
    columns = {name: np.array(column, np.int64) for name, column in numbers.items()}
    known_groups = Table[SpanGroup]()  # one group may be listed in several ways
    index = [known_groups[SpanGroup(name, unlisted(ranks) if ranks else (), tag)] for name, ranks, tag in groups]
    columns["group"] = np.array(index)[columns["group"]]
    return SpanColumns.from_named(columns, texts, known_groups)


_KIND_NUMBERS: dict[str, int] = {kind: number for number, kind in enumerate(KINDS)}
_ROLE_NUMBERS: dict[str, int] = {role: number for number, role in enumerate(ROLES)}


def _check_fields(events: Sequence[Event], args: Sequence[ReadArgs]) -> None:
    """Refuse events of unknown kinds, and spans and operations that lack a field.

    Raises:
        ValueError: One does; the field is named.
    """
    if unknown := {event.cat for event in events} - _KIND_NUMBERS.keys():
        raise ValueError(f"unknown category {min(unknown)!r}")
    for name, owners in {"pid": events, "name": events, "start_ns": args}.items():
        if any(getattr(owner, name) is UNSET for owner in cast(Sequence[object], owners)):
            raise ValueError(f"a span has no {name}")
    if any(each.issued_ns is UNSET for each in args if each.seq is not UNSET):
        raise ValueError("an operation has no 'issued_ns'")


def describe_left_out(columns: SpanColumns) -> str:
    """Return text that counts the spans left out because they end before they start, and names the first."""
    many = len(columns) > 1
    which = f"{len(columns)} spans end before they start" if many else "1 span ends before it starts"
    name = columns.texts[columns.name[0]]
    return f"{which} ({'first: ' * many}'{name}' of rank {columns.rank[0]}): shown is the rest"
