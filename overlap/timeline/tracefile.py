"""Trace files: Chrome trace-event JSON that Perfetto opens, and that reads back to the nanosecond."""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, cast, get_args

from ..errors import UsageError
from .cut import complete_part
from .events import Event, Json, to_events
from .foreign import from_foreign
from .merge import merged_columns, merged_header
from .parts import Part
from .ranklist import unlisted
from .spans import Clock, CollectiveInfo, Kind, Span, Timeline, span_order

VERSION = 1
"""Version of our fields; a file with a higher one is refused."""

CUT = "cut"
"""In `meta` of what was read from a file that was cut off; what is there is complete."""

_PIECE_BYTES = 1 << 20
_LEVEL = 6  # of gzip: 9 takes 2.4 times as long for 4 % less (measured)

UNPACKED_BYTES = 64 << 20
UNPACKED_RATIO = 100
"""What a compressed file may unpack to: these bytes, or so many times its own; gzip packs traces 20 times, zeros 1,000
times."""


def write_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write a trace file, compressed if its name ends in `.gz`.

    A regular file appears whole or not at all; links are followed, and what is no file (a pipe, a device) is written
    to. Equal timelines give equal bytes.

    Raises:
        UsageError: If it cannot be written there.
    """
    header = _header(timeline.world_size, timeline.clock, timeline.dropped, timeline.meta)
    _write(header, timeline.by_rank().values(), path)


def write_merged(parts: Sequence[Part], path: str | os.PathLike[str]) -> None:
    """Write the trace file of several parts of one run, a rank at a time; otherwise as `write_trace` does.

    Raises:
        UsageError: If it cannot be written there, or they are not parts of one run.
    """
    found = merged_header([part.header for part in parts])
    spans = (list(columns.spans()) for columns in merged_columns(parts))
    _write(_header(found.world_size, found.clock, found.dropped, found.meta), spans, path)


def _write(header: Json, spans: Iterable[Sequence[Span]], path: str | os.PathLike[str]) -> None:
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    pieces = _encoded(header, spans)
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # itself: what a link to a pipe names is no path
            with open(path, "wb") as file:
                _put(pieces, file, packed=Path(path).suffix == ".gz")
            return
        try:
            with open(beside, "wb") as file:
                _put(pieces, file, packed=Path(path).suffix == ".gz")
            beside.replace(target)
        finally:  # when it could not be, or was interrupted
            with suppress(OSError):
                beside.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"trace: cannot write {path}: {error.strerror}") from error


def _put(pieces: Iterable[str], file: BinaryIO, *, packed: bool) -> None:
    if not packed:
        file.writelines(piece.encode() for piece in pieces)
        return
    # The header of a gzip file holds a name and a time; without them equal timelines give equal files.
    with gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0, compresslevel=_LEVEL) as gz:
        gz.writelines(piece.encode() for piece in pieces)


def read_trace(path: str | os.PathLike[str]) -> Timeline:
    """Read a trace file, ours or as much as can be understood of another tool's.

    From another tool's come complete events (`ph: X`, or `B` and `E`) that are recognisably compute, communication or a
    profiler step: those of PyTorch's profiler (each file is one rank; `merged` joins them), of Neuron's system
    profiles, or of whoever names categories alike. Of a file that was cut off comes what is complete; `meta` says so.

    Raises:
        UsageError: If the file is missing, damaged, unpacks to more than a trace does, or shows neither compute nor
            communication.
    """
    try:
        document, cut = _load(Path(path))
        timeline = _timeline(document)
        return replace(timeline, meta=timeline.meta | {CUT: "only what is complete"}) if cut else timeline
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{path}: damaged trace file: {error}") from error


def _timeline(document: Json) -> Timeline:
    if isinstance(document, list):
        document = {"traceEvents": document}
    events = document.get("traceEvents", document.get("trace_events")) if isinstance(document, dict) else None
    if not isinstance(document, dict) or not isinstance(events, list):
        raise UsageError("not a trace file: no list 'traceEvents' in it")
    known = [event for event in events if isinstance(event, dict)]
    if "overlap" in document:
        return _decode([event for event in known if event.get("ph") == "X"], document["overlap"])
    return from_foreign(known, document)


def _header(world_size: int, clock: Clock, dropped: int, meta: Mapping[str, str]) -> Json:
    return {"version": VERSION, "world_size": world_size, "clock": clock, "dropped": dropped, "meta": meta}


def _encoded(header: Json, spans: Iterable[Sequence[Span]]) -> Iterator[str]:
    """Yield the text of a trace file, in pieces of one rank."""
    yield f'{{"displayTimeUnit":"ns","overlap":{_dumps(header)},"traceEvents":[\n'
    between = ""
    for events in to_events(spans):
        yield between + _dumps(events)[1:-1]  # a line for each rank
        between = ",\n"
    yield "\n]}\n"


# One encoder, and not `json.dumps`, which makes a new one for each of a hundred thousand events.
_dumps = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False, check_circular=False).encode


def _load(path: Path) -> tuple[Json, bool]:
    """Return the document, and whether it is only what is complete of one that was cut off."""
    try:
        data, whole = path.read_bytes(), True
        if data[:2] == b"\x1f\x8b":
            data, whole = _unpacked(data)
    except (zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"damaged: {error}") from error
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}") from error
    try:
        return cast(Json, json.loads(data)), not whole
    except (ValueError, RecursionError) as error:
        if (part := complete_part(data.decode("utf-8", "ignore"))) is not None:
            return part, True
        raise UsageError(f"not JSON, or cut off before its first event: {error}") from error


def _unpacked(data: bytes) -> tuple[bytes, bool]:
    """Return what a compressed file holds as far as it goes, and whether that is all."""
    limit_bytes = max(UNPACKED_BYTES, UNPACKED_RATIO * len(data))
    text = bytearray()
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
        while len(text) <= limit_bytes:
            try:
                piece = packed.read1(_PIECE_BYTES)
            except EOFError:
                return bytes(text), False
            if not piece:
                return bytes(text), True
            text += piece
    told = f"its {len(data)} bytes unpack to more than {limit_bytes}, which no trace does"
    raise UsageError(f"{told}; if it is one, unpack it with gunzip first")


def _decode(slices: list[Event], header: Json) -> Timeline:
    if not isinstance(header, dict):
        raise ValueError("the field 'overlap' is not an object")
    if (version := _whole(header, "version")) > VERSION:
        raise UsageError(f"written by a newer version (format {version}, this one reads up to {VERSION})")
    if (clock := _text(header, "clock")) not in ("real", "virtual"):
        raise ValueError(f"unknown clock {clock!r}")
    meta = _object(header, "meta")
    return Timeline(
        spans=sorted((_span(event) for event in slices if event.get("cat") != "issue"), key=span_order),
        world_size=_whole(header, "world_size"),
        clock=cast(Clock, clock),
        dropped=_whole(header, "dropped"),
        meta={name: _text(meta, name) for name in meta},
    )


def _span(event: Event) -> Span:
    args = _object(event, "args")
    if (kind := _text(event, "cat")) not in get_args(Kind):
        raise ValueError(f"unknown category {kind!r}")
    start_ns, end_ns = _whole(args, "start_ns"), _whole(args, "end_ns")
    if end_ns < start_ns:
        raise ValueError(f"a span ends at {end_ns} ns, before it starts at {start_ns} ns")
    info = _info(args, start_ns, end_ns) if "seq" in args else None
    return Span(
        rank=_whole(event, "pid"),
        kind=cast(Kind, kind),
        lane=_text(args, "lane"),
        name=_text(event, "name"),
        start_ns=start_ns,
        end_ns=end_ns,
        info=info,
        step=_whole(args, "step") if "step" in args else None,
        call_site=_text(args, "call_site") if "call_site" in args and info is None else "",
        issued_ns=_whole(args, "issued_ns") if "issued_ns" in args and info is None else None,
    )


def _info(args: Event, start_ns: int, end_ns: int) -> CollectiveInfo:
    return CollectiveInfo(
        op=_text(args, "Collective name"),
        algorithm=_text(args, "algorithm"),
        group=_text(args, "Process Group Name"),
        seq=_whole(args, "seq"),
        nbytes=_whole(args, "nbytes"),
        dtype=_text(args, "dtype"),
        issued_ns=_whole(args, "issued_ns"),
        met_ns=_whole(args, "met_ns"),
        priority=_whole(args, "priority"),
        call_site=_text(args, "call_site"),
        start_ns=start_ns,
        end_ns=end_ns,
        ranks=unlisted(_text(args, "Process Group Ranks")) if "Process Group Ranks" in args else (),
    )


def _whole(fields: Event, name: str) -> int:
    if not isinstance(value := fields.get(name), int):
        raise ValueError(f"{name} is {value!r}, not an integer")
    return value


def _text(fields: Event, name: str) -> str:
    if not isinstance(value := fields.get(name), str):
        raise ValueError(f"{name} is {value!r}, not text")
    return value


def _object(fields: Event, name: str) -> Event:
    if not isinstance(value := fields.get(name), dict):
        raise ValueError(f"{name} is {value!r}, not an object")
    return value
