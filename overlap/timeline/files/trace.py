"""Trace files of overlap: a JSON array of Chrome events, one a line, which Perfetto opens whole or cut off.

* A **section** holds the spans of one process in one world. Its first event is the `Header`, metadata named "overlap";
  its last is a `TraceEnd`, named "end". A process that was killed has written no end.
* **Clock** events are between them: the offset of the common clock from the clock of the process, and its error.
  Readers interpolate. The instants in `args` are by the process's clock; `ts` is on the common clock, for viewers.
* One `X` event is one span. `pid` is the rank; a `tid` is a row of a lane, on which no two spans cross. `SpanArgs` has
  the fields that viewers do not need. Those at their default are left out.

Events are appended in any order: a row takes a span if its last span ended before. A file of several sections is the
concatenation of their arrays.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from ...errors import UsageError
from ...ranklist import format_rank_list
from ..columnar import INT32_COLUMNS, INT64_COLUMNS, KINDS, NONE, ROLES, SpanColumns
from ..span import Clock, Kind, Role
from ..spans import Timeline
from .packed import open_unpacked

VERSION = 2
"""Version of these files; a file with a higher one is refused."""
HEADER, CLOCK, END = "overlap", "clock", "end"
"""Names of the metadata events that viewers ignore."""
_LEVEL = 6  # of gzip: 9 takes 2.4 times as long for 4 % less (measured)
_COPY_BYTES = 1 << 20
_LAST_LINE_BYTES = 1 << 20  # longest event: one with an irregular list of thousands of ranks
_KIND_ORDER = {"compute": 0, "comm": 1, "copy": 2, "program": 3, "wires": 4, "step": 5}


class SpanArgs(msgspec.Struct, omit_defaults=True, gc=False):
    """Fields of a span that a Chrome event does not have: see `Span` and `CollectiveInfo`.

    A number that a span does not have is the object `NONE` itself, so that the encoder leaves it out. Only operations
    have `seq`.
    """

    start_ns: int
    end_ns: int = NONE  # `NONE`: `dur` of the event is exact, as it is below 52 days
    step: int = NONE
    issued_ns: int = NONE
    site: str = ""
    lane: str = ""  # "": the name of the kind
    role: Role | UnsetType = UNSET  # UNSET: "program" for computes and operations, "" for others
    seq: int = NONE
    nbytes: int = 0
    met_ns: int = NONE  # `NONE`: equal to the start
    awaited_ns: int = NONE
    priority: int = 0
    op: str = ""  # "": the name of the span
    algorithm: str = ""
    dtype: str = ""
    group: str = ""
    ranks: str = ""
    tag: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0


class SpanEvent(msgspec.Struct, tag="X", tag_field="ph", gc=False):
    """Event of a span. `ts` and `dur` are microseconds; `args` has the start to the nanosecond."""

    pid: int
    tid: int
    ts: float
    dur: float
    cat: Kind
    name: str
    args: SpanArgs


class NoteEvent(msgspec.Struct, tag="M", tag_field="ph", kw_only=True):
    """Event of metadata: for viewers, or with a `Header`, a `ClockAt` or a `TraceEnd` as its `args`."""

    name: str
    pid: int = 0
    tid: int | UnsetType = UNSET
    args: dict[str, Any] = {}


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """First event of a section: facts on the run and the process."""

    version: int = VERSION
    world_size: int  # Ranks in the whole run
    clock: Clock
    dropped: int = 0  # Spans that were overwritten in the recorders
    meta: dict[str, str] = {}  # Free text about the run
    process: int = 0  # Index of the process
    run: str = ""  # Equal in the files of one attempt of one job


class ClockAt(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement of the common clock by a process."""

    at_ns: int  # Instant by the process's clock
    offset_ns: int  # Add it to an instant of the process to get the common clock
    error_ns: int  # Largest error of the offset


class TraceEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that are known only at the end of a run; they replace the fields of the header."""

    dropped: int
    meta: dict[str, str]


class SectionWriter:
    """Encoder of the events of one section. Each text that it returns begins with the comma after the event before."""

    def __init__(self) -> None:
        # By (rank, kind, lane): [tid, end of the last span] of each row.
        self._rows: dict[tuple[int, int, str], list[list[int]]] = {}
        self._counts: dict[int, int] = {}  # by rank, the number of its rows

    def encode_note(self, name: str, content: Header | ClockAt | TraceEnd) -> bytes:
        """Return a metadata event as text; `name` is `HEADER`, `CLOCK` or `END`, as fits the content."""
        return b",\n" + _encode_event(NoteEvent(name=name, args=msgspec.to_builtins(content)))

    def encode_spans(self, columns: SpanColumns, *, offset_ns: int = 0) -> bytes:
        """Return the events of spans as JSON lines, each after a comma; b"" without spans.

        `offset_ns` is added to `ts`, for the common clock.
        """
        events: list[SpanEvent | NoteEvent] = []
        texts, groups = columns.texts, [(group.name, _listed(group.ranks), group.tag) for group in columns.groups]
        numbers = zip(*(getattr(columns, name).tolist() for name in _COLUMNS), strict=True)
        for rank, start_ns, end_ns, issued_ns, met_ns, seq, nbytes, priority, step, awaited_ns, *indexes in numbers:
            kind, lane, name, op, algorithm, dtype, site, group, role = indexes
            dur = (end_ns - start_ns) / 1000
            # The end is left out if `dur`, in microseconds, gives it exactly.
            end = NONE if round(dur * 1000) == end_ns - start_ns else end_ns
            own_lane = "" if texts[lane] == KINDS[kind] else texts[lane]
            own_role = UNSET if role == DEFAULT_ROLES[kind] else ROLES[role]
            # `NONE if x == NONE`: the encoder leaves out only the very object `NONE`, not an equal number
            in_step, issued = NONE if step == NONE else step, NONE if issued_ns == NONE else issued_ns
            if op < 0:
                args = SpanArgs(start_ns, end, in_step, issued, texts[site], own_lane, own_role)
            else:
                met, awaited = NONE if met_ns == start_ns else met_ns, NONE if awaited_ns == NONE else awaited_ns
                args = SpanArgs(
                    start_ns, end, in_step, issued, texts[site], own_lane, own_role, seq, nbytes, met, awaited,
                    priority, "" if op == name else texts[op], texts[algorithm], texts[dtype], *groups[group],
                )  # fmt: skip
            tid = self._find_free_row(events, rank, kind, texts[lane], start_ns, end_ns)
            events.append(SpanEvent(rank, tid, (start_ns + offset_ns) / 1000, dur, KINDS[kind], texts[name], args))
        try:
            lines = _ENCODER.encode_lines(events)
        except UnicodeEncodeError:  # a text has lone surrogates, which UTF-8 cannot encode
            lines = b"".join(_encode_event(event) + b"\n" for event in events)
        return b",\n" + lines[:-1].replace(b"\n", b",\n") if events else b""

    def _find_free_row(
        self, events: list[SpanEvent | NoteEvent], rank: int, kind: int, lane: str, start_ns: int, end_ns: int
    ) -> int:
        """Return the `tid` of the first row of a lane that is free at `start_ns`, taken until `end_ns`.

        If the row is new, events with its name for viewers are appended to `events`. `kind` is an index in `KINDS`.
        """
        rows = self._rows.setdefault((rank, kind, lane), [])
        for row in rows:
            if row[1] <= start_ns:
                row[1] = end_ns
                return row[0]
        tid = self._counts[rank] = self._counts.get(rank, 0) + 1
        rows.append([tid, end_ns])
        title = ("steps" if KINDS[kind] == "step" else lane) + (f" ({len(rows)})" if len(rows) > 1 else "")
        facts: dict[str, dict[str, object]] = {"process_name": {"name": f"rank {rank}"}} if tid == 1 else {}
        facts |= {"thread_name": {"name": title}, "thread_sort_index": {"sort_index": _KIND_ORDER[KINDS[kind]]}}
        events += [NoteEvent(name=name, pid=rank, tid=tid, args=args) for name, args in facts.items()]
        return tid


_COLUMNS = ("rank", *INT64_COLUMNS, *INT32_COLUMNS)
DEFAULT_ROLES = [ROLES.index("program" if kind in ("compute", "comm") else "") for kind in KINDS]
"""By kind of span: the index in `ROLES` that an event without a role has."""
_ENCODER = msgspec.json.Encoder()


def _encode_event(event: SpanEvent | NoteEvent) -> bytes:
    """Return JSON with sorted keys; lone surrogates, which UTF-8 cannot encode, become escapes."""
    try:
        return msgspec.json.encode(event, order="sorted")
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(event), sort_keys=True, separators=(",", ":")).encode()


_listed = lru_cache(maxsize=1024)(format_rank_list)


# -- files ---------------------------------------------------------------------------------------------------------


def write_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write a trace file, compressed if its name ends in `.gz`.

    A regular file appears whole or not at all; links are followed; a pipe or a device is written to. Equal timelines
    give equal bytes. Cost: 2 microseconds and 210 bytes a span.

    Raises:
        UsageError: The file cannot be written.
    """
    section, columns = SectionWriter(), timeline.columns
    header = Header(
        world_size=timeline.world_size, clock=timeline.clock, dropped=timeline.dropped, meta=timeline.meta
    )  # fmt: skip
    with _open_for_writing(path) as file:
        # Each text begins with ",\n"; the first event has "[\n" instead.
        file.write(b"[\n" + section.encode_note(HEADER, header)[2:])
        for first in range(0, len(columns), _PIECE_SPANS):
            file.write(section.encode_spans(columns.take(np.arange(first, min(first + _PIECE_SPANS, len(columns))))))
        file.write(section.encode_note(END, TraceEnd(dropped=timeline.dropped, meta=timeline.meta)) + ENDING)


_PIECE_SPANS = 10_000


@contextmanager
def _open_for_writing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file for writing in a block, through gzip if its name ends in `.gz`.

    A regular file is renamed when the block ends without an error. Raises `UsageError` if it cannot be written.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    is_device = os.path.exists(path) and not os.path.isfile(path)
    try:
        try:
            with open(path if is_device else temporary, "wb") as file:
                if Path(path).suffix != ".gz":
                    yield file
                else:
                    # The header of a gzip file holds a name and a time; without them equal timelines give equal files.
                    with gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0, compresslevel=_LEVEL) as packed:
                        yield packed  # type: ignore[misc]
            if not is_device:
                temporary.replace(target)
        finally:  # after an error, the temporary file still exists
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"trace: cannot write {path}: {error.strerror}; name another file") from error


def join_parts(parts: Sequence[Path], path: str | os.PathLike[str]) -> None:
    """Join the files of the processes of a run, whole or cut off, into one trace file, and remove them.

    A single complete file is the trace already, and is renamed, unless the trace is to be compressed.

    Args:
        parts: The files of the processes.
        path: The trace file. It is compressed if its name ends with ".gz".

    Raises:
        UsageError: The trace file cannot be written. The parts stay.
    """
    if len(parts) == 1 and Path(path).suffix != ".gz" and (not os.path.exists(path) or os.path.isfile(path)):
        (part,) = parts
        with suppress(OSError):  # on another file system
            if part.stat().st_size == _find_events_end(part) + len(ENDING):
                part.replace(os.path.realpath(path))
                return
    with _open_for_writing(path) as file:
        file.write(b"[\n")
        has_events = False
        for part in parts:
            for number, piece in enumerate(_read_event_text(part)):
                comma = b",\n" if has_events and not number else b""  # between the events of two files
                file.write(comma + piece)
                has_events = True
        file.write(ENDING)
    for part in parts:
        with suppress(OSError):
            part.unlink()


ENDING = b"\n]\n"
"""Text after the last event of a complete file."""


def _read_event_text(part: Path) -> Iterable[bytes]:
    """Yield the text of the complete events of a trace file of overlap, without the brackets of the array."""
    # The first two bytes are the bracket and a line break.
    left_bytes = _find_events_end(part) - 2
    with part.open("rb") as file:
        file.seek(2)
        while left_bytes > 0 and (piece := file.read(min(_COPY_BYTES, left_bytes))):
            left_bytes -= len(piece)
            yield piece


def _find_events_end(part: Path) -> int:
    """Return the number of bytes of a trace file of overlap up to the end of its last complete event."""
    size = part.stat().st_size
    with part.open("rb") as file:
        begin = max(0, size - _LAST_LINE_BYTES)
        file.seek(begin)
        tail = file.read()
    if tail.endswith(ENDING):
        return size - len(ENDING)
    tail = tail.rstrip(b",\n")
    # The last line is an event; if the file was cut off, it may be only the beginning of one.
    line = tail.rfind(b"\n") + 1
    with suppress(ValueError):
        json.loads(tail[line:])
        return begin + len(tail)
    return begin + len(tail[:line].rstrip(b",\n"))


def read_header(part: Path) -> Header:
    """Return the header of the first section of a trace file of overlap.

    Raises:
        OSError: The file cannot be read.
        UsageError: The file is no such trace.
    """
    with part.open("rb") as raw:
        file = open_unpacked(raw)
        file.readline(16)  # the line of the opening bracket
        line = file.readline(_LAST_LINE_BYTES)
    try:
        return msgspec.convert(json.loads(line.rstrip(b",\n"))["args"], Header)
    except (ValueError, TypeError, KeyError, EOFError) as error:
        raise UsageError(f"{part}: no trace of ours: {error}; name another file") from error
