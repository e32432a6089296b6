"""Trace files: Chrome trace-event JSON that Perfetto opens, and that reads back to the nanosecond."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from ...errors import UsageError
from ..columnar import SpanColumns
from ..spans import CUT, Timeline
from .decode import VERSION, Document, complete_part, file_header
from .events import Json, dump_json, rank_events
from .kineto import profile_timeline
from .merge import merged_columns, merged_header
from .neuron import from_neuron
from .packed import is_profile, may_be_own, open_unpacked, read_beginning, read_piece
from .parts import MAGIC, Header, Part, append_end, pack_end_block, read_end, read_stream
from .profile import read_profile

_PIECE_BYTES = 1 << 20
_LEVEL = 6  # of gzip: 9 takes 2.4 times as long for 4 % less (measured)

MAX_TEXT_BYTES = 256 << 20
"""Longest text of a packed file that must be parsed as a whole, in memory: one that is not ours, or was cut off."""


def write_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write a trace file, compressed if its name ends in `.gz`.

    A regular file appears whole or not at all; links are followed; a pipe or a device is written to. Equal timelines
    give equal bytes.

    Raises:
        UsageError: It cannot be written there.
    """
    _write_file(Header.of(timeline), timeline.columns.by_rank().values(), path)


def write_merged(parts: Sequence[Part], path: str | os.PathLike[str]) -> None:
    """Write the trace file of several parts of one run, a rank at a time; otherwise as `write_trace` does.

    Raises:
        UsageError: It cannot be written there, or they are not parts of one run.
    """
    _write_file(merged_header([part.header for part in parts]), merged_columns(parts), path)


def _write_file(header: Header, ranks: Iterable[SpanColumns], path: str | os.PathLike[str]) -> None:
    """Write a trace file by way of a temporary file in its folder, or directly into a pipe or device."""
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    pieces = _encode_file(header, ranks)
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # itself: what a link to a pipe names is no path
            with open(path, "wb") as file:
                _write_pieces(pieces, file, packed=Path(path).suffix == ".gz")
            return
        try:
            with open(temporary, "wb") as file:
                _write_pieces(pieces, file, packed=Path(path).suffix == ".gz")
            temporary.replace(target)
        finally:  # when it could not be, or was interrupted
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"trace: cannot write {path}: {error.strerror}; name another file") from error


def _write_pieces(pieces: Iterable[bytes], file: BinaryIO, *, packed: bool) -> None:
    """Write pieces of text into a file, through gzip if `packed`."""
    if not packed:
        file.writelines(pieces)
        return
    # The header of a gzip file holds a name and a time; without them equal timelines give equal files.
    with gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0, compresslevel=_LEVEL) as gz:
        gz.writelines(pieces)


def read_trace(path: str | os.PathLike[str]) -> Timeline:
    """Read a trace file: ours, one of PyTorch's profiler (a rank; `merged` joins them), or a system profile of Neuron.

    Of a file that was cut off, all complete events are taken; `meta` says so.

    Raises:
        UsageError: If the file is missing, damaged, unpacks to more than a trace does, or shows neither compute nor
            communication.
    """
    regular = os.path.isfile(path)
    begin = read_beginning(Path(path)) if regular else b""
    if is_profile(begin):
        return profile_timeline(read_profile(path))
    try:
        found = read_end(_pieces(path)) if may_be_own(begin) else None
        if found is None:
            data, is_complete = _read_text(path, regular=regular)
            if data[: len(MAGIC)] == MAGIC:
                return _stream_timeline(data)
            found = read_end([data]) if not regular else None
        if found is not None:
            return _timeline_from_columns(*found)
        timeline, cut = _parse_timeline(data, complete=is_complete)
        return replace(timeline, meta=timeline.meta | {CUT: "only what is complete"}) if cut else timeline
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; name a file that can be read") from error
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    except OverflowError as error:
        raise UsageError(
            f"{path}: damaged trace file: a number in it has more than 64 bits; record it again"
        ) from error
    except ValueError as error:
        raise UsageError(f"{path}: damaged trace file: {error}; record it again") from error


def _stream_timeline(data: bytes) -> Timeline:
    """Return the timeline of the stream that a process left when it was killed before it wrote its trace."""
    timeline = read_stream(data)
    if not timeline.spans:
        raise UsageError("the run was killed before it had recorded anything; run it again")
    return replace(timeline, meta=timeline.meta | {CUT: "what was recorded before the run was killed"})


def _timeline_from_columns(beginning: bytes, columns: SpanColumns) -> Timeline:
    """Return the timeline of columns, with the header from a trace file's text before its events."""
    fields = json.loads(beginning.rstrip().removesuffix(b'"traceEvents":').rstrip(b",") + b"}")
    return file_header(fields["overlap"]).timeline(columns)


def _encode_file(header: Header, ranks: Iterable[SpanColumns]) -> Iterator[bytes]:
    """Yield the text of a trace file: the header, the events of each rank, then its end."""
    at_end: list[tuple[int, str]] = []
    return append_end(_event_pieces(header, ranks, at_end), at_end)


def _event_pieces(header: Header, ranks: Iterable[SpanColumns], at_end: list[tuple[int, str]]) -> Iterator[bytes]:
    """Yield the header, then the events of each rank in one piece; add the end block of each rank to `at_end`."""
    fields: Json = {
        "version": VERSION, "world_size": header.world_size, "clock": header.clock, "dropped": header.dropped,
        "meta": header.meta,
    }  # fmt: skip
    yield f'{{"displayTimeUnit":"ns","overlap":{dump_json(fields)},"traceEvents":[\n'.encode()
    arrows, between = count(1), ""
    for columns in ranks:
        if len(columns):
            at_end.append(pack_end_block(columns))
            yield f"{between}{','.join(rank_events(columns, arrows))}".encode()  # a line for each rank
            between = ",\n"
    yield b"\n]"


def _pieces(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yield the text of a file, unpacked."""
    with open(path, "rb") as raw:
        file = open_unpacked(raw)
        while piece := read_piece(file, _PIECE_BYTES)[0]:
            yield piece


def _read_text(path: str | os.PathLike[str], *, regular: bool) -> tuple[bytes, bool]:
    """Return the text of a file, unpacked, and whether it is complete; raise UsageError for a packed one too large."""
    with open(path, "rb") as opened:
        raw = opened if regular else io.BytesIO(opened.read())  # a pipe is read only once
        file = open_unpacked(raw)
        if file is raw:
            return file.read(), True
        text, cut = read_piece(file, MAX_TEXT_BYTES + 1)
    if len(text) > MAX_TEXT_BYTES:
        raise UsageError(
            f"unpacks to more than {MAX_TEXT_BYTES >> 20} MiB, and has not the end of a trace of ours: "
            "if it is a trace, unpack it with gunzip first"
        )
    return text, not cut


def _parse_timeline(data: bytes, *, complete: bool) -> tuple[Timeline, bool]:
    """Return the timeline of JSON text, of ours or of Neuron, and whether the text was cut off."""
    if b'"overlap"' in data:  # of others nothing is known, so that they cannot be checked as they are decoded
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            document = _decoder.decode(data)
            if document.overlap is not None:
                return document.timeline(), not complete
    content, cut = _load_json(data, complete=complete)
    if isinstance(content, dict) and isinstance(hardware := content.get("trace_events"), list):
        return from_neuron(hardware), cut
    events = content.get("traceEvents") if isinstance(content, dict) and "overlap" in content else None
    if not isinstance(content, dict) or not isinstance(events, list):
        raise UsageError(
            "not a trace of overlap or of PyTorch's profiler, and no system profile of Neuron; name one of these"
        )
    known = [event for event in events if isinstance(event, dict)]
    return msgspec.convert(content | {"traceEvents": known}, Document).timeline(), cut


_decoder = msgspec.json.Decoder(Document)


def _load_json(data: bytes, *, complete: bool) -> tuple[Json, bool]:
    """Return parsed JSON, or its complete events if it was cut off, and whether it was cut off."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data[:4]:
        raise UsageError("is text in UTF-16 or UTF-32; write it again in UTF-8 (iconv -t UTF-8)")
    try:
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            return cast(Json, msgspec.json.decode(data)), not complete
        return cast(Json, json.loads(data)), not complete  # not strictly JSON, and yet what Python takes for it
    except RecursionError:
        raise UsageError("its values are nested too deeply for a trace; name another file") from None
    except ValueError as error:
        if (part := complete_part(data.decode("utf-8", "ignore"))) is not None:
            return part, True
        raise UsageError(f"not JSON, or cut off before its first event: {error}; record it again") from error
