"""Packed spans: parts that processes send, streams that grow while a run lives, and the ends of trace files.

All three hold blocks of columns: zlib's data of a header (msgpack: how many spans, and the tables of texts and groups)
and the columns, nine of 64 and nine of 32 bits. A block takes a seventh of the time of trace events to make.

* A part is a header of the run, then one block for each rank, ascending, each after its length (4 bytes).
* A stream is `MAGIC`, the same header, then blocks of any ranks, each after its rank (8 bytes) and its length. A stream
  that ends in the middle of a block holds all blocks before.
* The end of a trace file repeats its spans, a block for each rank in base64, which load twenty times as fast as its
  events. Other tools ignore it. It counts only as long as the events before it are those that it was written with: it
  holds their digest.

Bytes from elsewhere are checked: nothing is taken on trust.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from binascii import Error as NoBase64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from mmap import mmap
from typing import Any, BinaryIO, TypeAlias

import msgpack
import msgspec
import numpy as np
import xxhash

from ...errors import UsageError
from ..columnar import INDEXES, KINDS, ROLES, TEXTS, WHOLES, SpanColumns, SpanGroup
from ..span import Clock
from ..spans import Timeline

Data: TypeAlias = bytes | mmap

MAGIC = b"OVSPANS1"
BLOCK_BYTES = 256 << 20
"""Of one rank, unpacked: 2.5 million spans. A recorder keeps 20,000 unless it is told otherwise."""
_VERSION = 3
_SPAN_BYTES = 8 * len(WHOLES) + 4 * len(INDEXES)
_END = b',"columns":'
_PIECE_BYTES = 1 << 24


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a part or a trace file belongs to."""

    version: int
    world_size: int  # Ranks in the whole run
    clock: Clock
    dropped: int  # Spans that no longer fitted
    meta: dict[str, str]  # Free text about the run
    ranks: tuple[int, ...] = ()  # Ranks with spans in a part, ascending
    offset_ns: int = 0  # time of the common clock when that of the process was 0; readers of a part add it

    @classmethod
    def of(cls, timeline: Timeline, *, offset_ns: int = 0) -> Header:
        """Return the header of a part that holds a timeline."""
        return cls(
            version=_VERSION, world_size=timeline.world_size, clock=timeline.clock, dropped=timeline.dropped,
            meta=timeline.meta, ranks=tuple(timeline.ranks()), offset_ns=offset_ns,
        )  # fmt: skip

    def timeline(self, columns: SpanColumns) -> Timeline:
        """Return the timeline of the run with these spans, which may be in any order."""
        return Timeline.of_columns(
            columns, world_size=self.world_size, clock=self.clock, dropped=self.dropped, meta=dict(self.meta)
        )


def checked_header(fields: object, *, version: int, origin: str) -> Header:
    """Return the header that was read.

    Raises:
        UsageError: A newer version than `version` has written it; the message begins with `origin`.
        msgspec.ValidationError: A field is missing or is not what it should be; it is named.
    """
    written = fields.get("version") if isinstance(fields, Mapping) else None
    if isinstance(written, int) and written > version:
        raise UsageError(f"{origin}a newer version (format {written}, this one reads up to {version}); update overlap")
    return msgspec.convert(fields, Header)


# -- parts ---------------------------------------------------------------------------------------------------------


def pack_part(timeline: Timeline, *, offset_ns: int = 0) -> bytes:
    """Return the timeline as a part; `offset_ns` takes it to the common clock when it is read."""
    blocks = [_measured(_deflated(columns)) for columns in timeline.columns.by_rank().values()]
    return b"".join([_packed_header(timeline, offset_ns), *blocks])


def _packed_header(timeline: Timeline, offset_ns: int) -> bytes:
    """Pack a header; names are the program's, and may have halves of characters, which no file can hold."""
    told = msgspec.structs.asdict(Header.of(timeline, offset_ns=offset_ns))
    return _measured(zlib.compress(msgpack.packb(told, unicode_errors="replace"), 1))


def _measured(packed: bytes) -> bytes:
    return len(packed).to_bytes(4, "big") + packed


class Part:
    """A part, read from a file as often as needed, a rank at a time.

    Args:
        file: Where it begins at `start`; the caller's.

    Raises:
        UsageError: It is none, or a newer version has written it.
    """

    def __init__(self, file: BinaryIO, *, start: int = 0) -> None:
        self._file = file
        file.seek(start)
        self.header: Header = _read_header(file)
        self._begin = file.tell()

    def columns(self) -> Iterator[SpanColumns]:
        """Yield the spans of each rank, ascending, in their order, on the common clock.

        Raises:
            UsageError: The part is damaged.
        """
        at = self._begin
        for rank in self.header.ranks:
            self._file.seek(at)
            data = _read_block(self._file)
            at = self._file.tell()
            yield _columns(rank, data).shifted(self.header.offset_ns)


def _read_header(file: BinaryIO) -> Header:
    try:
        told = msgpack.unpackb(_read_block(file))
        return checked_header(told, version=_VERSION, origin="part of a trace: of ")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise UsageError(f"damaged part of a trace: {error!r}; record it again") from error


def _read_block(file: BinaryIO) -> bytes:
    length_bytes = int.from_bytes(file.read(4), "big")
    if not 0 < length_bytes <= BLOCK_BYTES:
        raise UsageError(f"damaged part of a trace: a block of {length_bytes} bytes; record it again")
    return _inflated(file.read(length_bytes))


# -- streams -------------------------------------------------------------------------------------------------------


def begin_stream(timeline: Timeline, *, offset_ns: int = 0) -> bytes:
    """Return the beginning of a stream: the header of a run, and none of its spans."""
    return MAGIC + _packed_header(timeline, offset_ns)


def stream_block(columns: SpanColumns) -> bytes:
    """Return some spans of one rank, at least one, for a stream."""
    return int(columns.rank[0]).to_bytes(8, "big") + _measured(_deflated(columns.canonical(), errors="surrogatepass"))


def read_stream(data: bytes) -> Timeline:
    """Return the timeline of a stream, as far as it goes.

    Raises:
        UsageError: Not even its beginning is there, or it is damaged.
    """
    file = BytesIO(data[len(MAGIC) :])
    header = _read_header(file)
    return header.timeline(SpanColumns.joined(_stream_blocks(file)).shifted(header.offset_ns))


def _stream_blocks(file: BytesIO) -> Iterator[SpanColumns]:
    """Yield the blocks that are whole."""
    while len(head := file.read(12)) == 12:
        rank, length_bytes = int.from_bytes(head[:8], "big"), int.from_bytes(head[8:], "big")
        if len(packed := file.read(length_bytes)) < length_bytes:
            return
        if rank >= 1 << 31:
            raise UsageError(f"damaged part of a trace: rank {rank}; record it again")
        yield _columns(rank, _inflated(packed))


# -- ends of trace files -------------------------------------------------------------------------------------------


def with_end(pieces: Iterable[bytes], ranks: Sequence[tuple[int, str]]) -> Iterator[bytes]:
    """Yield the text of a trace file, then its end, before the last brace of the file.

    Args:
        pieces: The text before the end.
        ranks: `rank_at_end` of each rank, complete when all pieces have been taken.
    """
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
        yield piece
    yield b'%s{"digest":"%s","ranks":[' % (_END, digest.hexdigest().encode())
    yield ",".join(f'\n[{rank},"{text}"]' for rank, text in ranks).encode()
    yield b'\n],"version":%d}}\n' % _VERSION


def rank_at_end(columns: SpanColumns) -> tuple[int, str]:
    """Return the spans of one rank, at least one, for the end of a trace file."""
    return int(columns.rank[0]), b64encode(_deflated(columns.canonical(), errors="surrogatepass")).decode()


def read_end(data: Data) -> tuple[bytes, SpanColumns] | None:
    """Return a trace file's beginning up to its events, and all its spans; None if its end does not say so.

    Cost: the digest of the file, and a tenth of a microsecond a span.
    """
    at = data.rfind(_END)
    try:
        told = json.loads(data[at + len(_END) :].rstrip().removesuffix(b"}")) if at >= 0 else {}
        if told["version"] != _VERSION or told["digest"] != _digest(data, at):
            return None
        blocks = ((rank, _inflated(b64decode(text, validate=True))) for rank, text in told["ranks"])
        columns = SpanColumns.joined(_columns(rank, block) for rank, block in blocks)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, NoBase64, UsageError):
        return None
    return bytes(data[: data.find(b"[")]), columns


def _digest(data: Data, end: int) -> str:
    digest = xxhash.xxh3_128()
    for at in range(0, end, _PIECE_BYTES):
        digest.update(data[at : min(at + _PIECE_BYTES, end)])
    return digest.hexdigest()


# -- blocks --------------------------------------------------------------------------------------------------------


def _deflated(columns: SpanColumns, *, errors: str = "replace") -> bytes:
    """Return the spans of one rank, compressed; equal canonical columns give equal bytes.

    With "surrogatepass" all texts survive. What processes send each other has none of their halves of characters.
    """
    columns = SpanColumns.joined([columns])  # its own texts only
    told = {
        "count": len(columns),
        "texts": columns.texts,
        "groups": [group if group.tag else group[:2] for group in columns.groups],
    }
    header = msgpack.packb(told, unicode_errors=errors)
    wholes = [getattr(columns, name).astype("<i8", copy=False).tobytes() for name in WHOLES]
    indexes = [getattr(columns, name).astype("<i4", copy=False).tobytes() for name in INDEXES]
    return zlib.compress(b"".join([_measured(header), *wholes, *indexes]), 1)


def _inflated(packed: bytes) -> bytes:
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, BLOCK_BYTES)
    except zlib.error as error:
        raise UsageError(f"damaged part of a trace: {error}; record it again") from error
    if not unpacker.eof:
        raise UsageError("damaged part of a trace: cut off, or too long; record it again")
    return data


class _BlockHeader(msgspec.Struct):
    count: int
    texts: list[str]
    groups: list[SpanGroup]


def _columns(rank: int, data: bytes) -> SpanColumns:
    """Return the spans of a rank that a block holds."""
    try:
        end = 4 + int.from_bytes(data[:4], "big")
        block = msgspec.convert(msgpack.unpackb(data[4:end], unicode_errors="surrogatepass"), _BlockHeader)
        if block.count < 0 or len(data) - end != block.count * _SPAN_BYTES:
            raise ValueError("columns that do not fit")
        wholes = np.frombuffer(data, "<i8", len(WHOLES) * block.count, end).reshape(len(WHOLES), block.count)
        indexes = np.frombuffer(data, "<i4", len(INDEXES) * block.count, end + wholes.nbytes)
        table: list[Any] = [*wholes, *indexes.reshape(len(INDEXES), block.count)]
        found = SpanColumns.of_table(rank, table, block.texts, block.groups)
        _check(found)
        return found
    except (ValueError, TypeError, IndexError, OverflowError, msgpack.UnpackException) as error:
        raise UsageError(f"damaged part of a trace: {error!r}; record it again") from error


def _check(columns: SpanColumns) -> None:
    if not len(columns):
        return
    limits = {"kind": len(KINDS), "role": len(ROLES), "group": len(columns.groups)} | dict.fromkeys(
        TEXTS, len(columns.texts)
    )
    for name, limit in limits.items():
        numbers = getattr(columns, name)
        if numbers.min() < (-1 if name == "op" else 0) or numbers.max() >= limit:
            raise IndexError(f"an index in column {name!r} that its table does not have")
    if (columns.start_ns > columns.end_ns).any():
        raise ValueError("a span that ends before it starts")
