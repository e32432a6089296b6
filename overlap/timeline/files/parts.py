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
from ..columnar import INT32_COLUMNS, INT64_COLUMNS, KINDS, ROLES, TEXTS, SpanColumns, SpanGroup
from ..span import Clock
from ..spans import Timeline

Data: TypeAlias = bytes | mmap

MAGIC = b"OVSPANS1"
BLOCK_BYTES = 256 << 20
"""Bytes of an unpacked block of one rank, at most: 2.5 million spans. A recorder keeps 20,000 by default."""
_VERSION = 3
_SPAN_BYTES = 8 * len(INT64_COLUMNS) + 4 * len(INT32_COLUMNS)
_END_KEY = b',"columns":'
MAX_END_BYTES = 256 << 20
"""Longest end of a trace file: of some 30 million spans."""


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
    """Return a header from decoded fields, each checked.

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
    """Return the timeline as a part; readers add `offset_ns` to its instants to get the common clock."""
    blocks = [_with_length(_compress_columns(columns)) for columns in timeline.columns.by_rank().values()]
    return b"".join([_pack_header(timeline, offset_ns), *blocks])


def _pack_header(timeline: Timeline, offset_ns: int) -> bytes:
    """Return the header of a timeline, packed, after its length; lone surrogates in names become question marks."""
    fields = msgspec.structs.asdict(Header.of(timeline, offset_ns=offset_ns))
    return _with_length(zlib.compress(msgpack.packb(fields, unicode_errors="replace"), 1))


def _with_length(packed: bytes) -> bytes:
    """Return bytes after their length, 4 bytes in network order."""
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
            yield _unpack_columns(rank, data).shifted(self.header.offset_ns)


def _read_header(file: BinaryIO) -> Header:
    """Read the header of a part or a stream; raise UsageError if it is damaged or of a newer version."""
    try:
        fields = msgpack.unpackb(_read_block(file))
        return checked_header(fields, version=_VERSION, origin="part of a trace: of ")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise UsageError(f"damaged part of a trace: {error!r}; record it again") from error


def _read_block(file: BinaryIO) -> bytes:
    """Read a block after its length, decompressed; raise UsageError if it is damaged or larger than `BLOCK_BYTES`."""
    length_bytes = int.from_bytes(file.read(4), "big")
    if not 0 < length_bytes <= BLOCK_BYTES:
        raise UsageError(f"damaged part of a trace: a block of {length_bytes} bytes; record it again")
    return _decompress(file.read(length_bytes))


# -- streams -------------------------------------------------------------------------------------------------------


def begin_stream(timeline: Timeline, *, offset_ns: int = 0) -> bytes:
    """Return the beginning of a stream: the header of a run, and none of its spans."""
    return MAGIC + _pack_header(timeline, offset_ns)


def stream_block(columns: SpanColumns) -> bytes:
    """Return a block of a stream that holds spans of one rank; there must be at least one."""
    return int(columns.rank[0]).to_bytes(8, "big") + _with_length(
        _compress_columns(columns.with_sorted_tables(), errors="surrogatepass")
    )


def read_stream(data: bytes) -> Timeline:
    """Return the timeline of a stream, as far as it goes.

    Raises:
        UsageError: Not even its beginning is there, or it is damaged.
    """
    file = BytesIO(data[len(MAGIC) :])
    header = _read_header(file)
    return header.timeline(SpanColumns.concatenate(_stream_blocks(file)).shifted(header.offset_ns))


def _stream_blocks(file: BytesIO) -> Iterator[SpanColumns]:
    """Yield the columns of each complete block of a stream, and stop at the first that is cut off."""
    while len(head := file.read(12)) == 12:
        rank, length_bytes = int.from_bytes(head[:8], "big"), int.from_bytes(head[8:], "big")
        if len(packed := file.read(length_bytes)) < length_bytes:
            return
        if rank >= 1 << 31:
            raise UsageError(f"damaged part of a trace: rank {rank}; record it again")
        yield _unpack_columns(rank, _decompress(packed))


# -- ends of trace files -------------------------------------------------------------------------------------------


def append_end(pieces: Iterable[bytes], ranks: Sequence[tuple[int, str]]) -> Iterator[bytes]:
    """Yield the text of a trace file, then its end, before the last brace of the file.

    Args:
        pieces: The text before the end.
        ranks: `pack_end_block` of each rank, complete when all pieces have been taken.
    """
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
        yield piece
    yield b'%s{"digest":"%s","ranks":[' % (_END_KEY, digest.hexdigest().encode())
    yield ",".join(f'\n[{rank},"{text}"]' for rank, text in ranks).encode()
    yield b'\n],"version":%d}}\n' % _VERSION


def pack_end_block(columns: SpanColumns) -> tuple[int, str]:
    """Return the rank and its spans, packed as base64, for the end of a trace file; at least one span."""
    return int(columns.rank[0]), b64encode(
        _compress_columns(columns.with_sorted_tables(), errors="surrogatepass")
    ).decode()


def read_end(pieces: Iterable[bytes]) -> tuple[bytes, SpanColumns] | None:
    """Return a trace file's text up to its events, and all its spans; None if its end is missing or does not match.

    Memory holds a piece of the text, and its end. Cost: the digest of the file, and a tenth of a microsecond a span.

    Args:
        pieces: The text; the first one reaches into the events.
    """
    digest, expected, beginning, rest = xxhash.xxh3_128(), "", b"", bytearray()  # `rest` has not been digested
    for piece in pieces:
        beginning = beginning or piece[: piece.find(b"[")]
        start = max(1 if expected else 0, len(rest) - len(_END_KEY) + 1)
        rest += piece
        if (at := rest.rfind(_END_KEY, start)) >= 0:
            digest.update(memoryview(rest)[:at])
            expected, rest = digest.hexdigest(), rest[at:]
        elif not expected:
            digest.update(memoryview(rest)[: -len(_END_KEY)])
            rest = rest[-len(_END_KEY) :]
        elif len(rest) > MAX_END_BYTES:
            return None
    try:
        fields = json.loads(rest[len(_END_KEY) :].rstrip().removesuffix(b"}")) if expected else {}
        if fields["version"] != _VERSION or fields["digest"] != expected:
            return None
        blocks = ((rank, _decompress(b64decode(text, validate=True))) for rank, text in fields["ranks"])
        columns = SpanColumns.concatenate(_unpack_columns(rank, block) for rank, block in blocks)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, NoBase64, UsageError):
        return None
    return beginning, columns


# -- blocks --------------------------------------------------------------------------------------------------------


def _compress_columns(columns: SpanColumns, *, errors: str = "replace") -> bytes:
    """Return the spans of one rank as a block, compressed; equal canonical columns give equal bytes.

    With "surrogatepass" all texts survive. What processes send each other has none of their halves of characters.
    """
    columns = SpanColumns.concatenate([columns])  # its own texts only
    fields = {
        "count": len(columns),
        "texts": columns.texts,
        "groups": [group if group.tag else group[:2] for group in columns.groups],
    }
    header = msgpack.packb(fields, unicode_errors=errors)
    wholes = [getattr(columns, name).astype("<i8", copy=False).tobytes() for name in INT64_COLUMNS]
    indexes = [getattr(columns, name).astype("<i4", copy=False).tobytes() for name in INT32_COLUMNS]
    return zlib.compress(b"".join([_with_length(header), *wholes, *indexes]), 1)


def _decompress(packed: bytes) -> bytes:
    """Return the content of a compressed block; raise UsageError if it is damaged or larger than `BLOCK_BYTES`."""
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, BLOCK_BYTES)
    except zlib.error as error:
        raise UsageError(f"damaged part of a trace: {error}; record it again") from error
    if not unpacker.eof:
        raise UsageError("damaged part of a trace: cut off, or too long; record it again")
    return data


class _BlockHeader(msgspec.Struct):
    """Header of a block: the number of its spans, and the tables of its texts and groups."""

    count: int
    texts: list[str]
    groups: list[SpanGroup]


def _unpack_columns(rank: int, data: bytes) -> SpanColumns:
    """Return the columns of the spans of a rank from a block's content; raise UsageError if it is damaged."""
    try:
        end = 4 + int.from_bytes(data[:4], "big")
        block = msgspec.convert(msgpack.unpackb(data[4:end], unicode_errors="surrogatepass"), _BlockHeader)
        if block.count < 0 or len(data) - end != block.count * _SPAN_BYTES:
            raise ValueError("columns that do not fit")
        shapes = (len(INT64_COLUMNS), block.count), (len(INT32_COLUMNS), block.count)
        int64s = np.frombuffer(data, "<i8", len(INT64_COLUMNS) * block.count, end)
        int32s = np.frombuffer(data, "<i4", len(INT32_COLUMNS) * block.count, end + int64s.nbytes)
        table: list[Any] = [*int64s.reshape(shapes[0]), *int32s.reshape(shapes[1])]
        found = SpanColumns.from_table(rank, table, block.texts, block.groups)
        _check_indexes(found)
        return found
    except (ValueError, TypeError, IndexError, OverflowError, msgpack.UnpackException) as error:
        raise UsageError(f"damaged part of a trace: {error!r}; record it again") from error


def _check_indexes(columns: SpanColumns) -> None:
    """Raise IndexError if an index is not in its table, and ValueError if a span ends before it starts."""
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
