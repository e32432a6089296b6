"""One process's part of a timeline as bytes: a block of columns for each rank, to be sent, kept, and merged.

A part is a block with the header, then one for each rank, ascending; a block is its length (4 bytes) and zlib's data.
Of a rank these are a header (msgpack: how many spans, and the texts and groups that its columns number) and the
columns, nine of 64 and eight of 32 bits. They take a seventh of the time of trace events to make; who reads them needs
memory for one rank at a time. Bytes from elsewhere are checked: nothing is taken on trust.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from binascii import Error as NoBase64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from mmap import mmap
from typing import BinaryIO, TypeAlias

import msgpack
import numpy as np
import xxhash

from ...errors import UsageError
from ..columnar import INDEXES, KINDS, WHOLES, Group, SpanColumns
from ..span import Clock, Span
from ..spans import Timeline

VERSION = 2
BLOCK_BYTES = 256 << 20
"""Of one rank, unpacked: 2.5 million spans. A recorder keeps 20,000 unless it is told otherwise."""

_SPAN_BYTES = 8 * len(WHOLES) + 4 * len(INDEXES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a part says of the run."""

    world_size: int  # Ranks in the whole run
    clock: Clock  # "real" or "virtual"
    ranks: Sequence[int]  # Those with spans in it, ascending
    dropped: int = 0  # Spans that no longer fitted
    meta: dict[str, str] = field(default_factory=dict)  # Free text about the run
    offset_ns: int = 0  # What the common clock showed when that of the process showed 0; `Part.spans` adds it


def pack_part(timeline: Timeline, *, offset_ns: int = 0) -> bytes:
    """Return the timeline as a part; `offset_ns` takes it to the common clock when it is read."""
    by_rank = timeline.columns.by_rank()
    return b"".join(
        [header_block(timeline, offset_ns=offset_ns), *(_block(_told(columns)) for columns in by_rank.values())]
    )


def header_block(timeline: Timeline, *, offset_ns: int = 0) -> bytes:
    """Return what a part begins with."""
    header = {
        "version": VERSION,
        "world_size": timeline.world_size,
        "clock": timeline.clock,
        "ranks": timeline.ranks(),
        "dropped": timeline.dropped,
        "meta": timeline.meta,
        "offset_ns": offset_ns,
    }
    return _block(_packed(header))


def read_header(file: BinaryIO) -> Header:
    """Read it.

    Raises:
        UsageError: It is none, or a newer version has written it.
    """
    return _header(_read_block(file))


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
        self.header = read_header(file)
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
            yield _of_rank(rank, data, self.header.offset_ns)

    def spans(self) -> Iterator[list[Span]]:
        """Yield the same as spans; errors as for `columns`."""
        return (list(columns.spans()) for columns in self.columns())


# -- blocks --------------------------------------------------------------------------------------------------------


def _block(data: bytes) -> bytes:
    packed = zlib.compress(data, 1)
    return len(packed).to_bytes(4, "big") + packed


def _packed(told: Mapping[str, object], *, errors: str = "replace") -> bytes:
    """Pack a header; names are the program's, and may have halves of characters, which no file can hold."""
    packed: bytes = msgpack.packb(told, unicode_errors=errors)
    return packed


def _read_block(file: BinaryIO) -> bytes:
    length_bytes = int.from_bytes(file.read(4), "big")
    if not 0 < length_bytes <= BLOCK_BYTES:
        raise UsageError(f"damaged part of a trace: a block of {length_bytes} bytes")
    return _inflated(file.read(length_bytes))


def _inflated(packed: bytes) -> bytes:
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, BLOCK_BYTES)
    except zlib.error as error:
        raise UsageError(f"damaged part of a trace: {error}") from error
    if not unpacker.eof:
        raise UsageError("damaged part of a trace: cut off, or too long")
    return data


def _header(data: bytes) -> Header:
    try:
        told = msgpack.unpackb(data)
        if told["version"] > VERSION:
            raise UsageError(f"part of a trace: of a newer version ({told['version']}, this one reads up to {VERSION})")
        found = Header(**{name: told[name] for name in Header.__slots__})
        if found.clock not in ("real", "virtual") or not all(type(rank) is int for rank in found.ranks):
            raise ValueError("no clock, or no ranks")
        if not (type(found.world_size) is type(found.dropped) is type(found.offset_ns) is int):
            raise ValueError("no number where one belongs")
        if not all(type(text) is str for text in [*found.meta, *found.meta.values()]):
            raise ValueError("no text where one belongs")
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
        raise UsageError(f"damaged part of a trace: {error!r}") from error
    return found


# -- columns -------------------------------------------------------------------------------------------------------


def pack_columns(columns: SpanColumns) -> bytes:
    """Return the spans of one rank, compressed; equal ones give equal bytes, and all texts survive."""
    return zlib.compress(_told(columns.canonical(), errors="surrogatepass"), 1)


def unpack_columns(rank: int, data: bytes) -> SpanColumns:
    """Return the spans of a rank again; errors as for `Part.columns`."""
    return _of_rank(rank, _inflated(data), 0)


def _told(columns: SpanColumns, *, errors: str = "replace") -> bytes:
    columns = SpanColumns.joined([columns])  # its own texts only
    header = _packed({"count": len(columns), "texts": columns.texts, "groups": columns.groups}, errors=errors)
    whole, index = columns.whole.astype("<i8", copy=False), columns.index.astype("<i4", copy=False)
    return b"".join([len(header).to_bytes(4, "big"), header, whole.tobytes(), index.tobytes()])


def _of_rank(rank: int, data: bytes, offset_ns: int) -> SpanColumns:
    try:
        end = 4 + int.from_bytes(data[:4], "big")
        told = msgpack.unpackb(data[4:end], unicode_errors="surrogatepass")
        count, texts = told["count"], told["texts"]
        groups = [(name, tuple(ranks)) for name, ranks in told["groups"]]
        if type(count) is not int or len(data) - end != count * _SPAN_BYTES or not _are_texts_and_groups(texts, groups):
            raise ValueError("columns that do not fit")
        return _checked(rank, count, data[end:], texts, groups).shifted(offset_ns)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, msgpack.UnpackException) as error:
        raise UsageError(f"damaged part of a trace: {error!r}") from error


def _are_texts_and_groups(texts: list[object], groups: Iterable[tuple[object, tuple[object, ...]]]) -> bool:
    return all(type(text) is str for text in texts) and all(
        type(name) is str and all(type(rank) is int for rank in ranks) for name, ranks in groups
    )


def _checked(rank: int, count: int, data: bytes, texts: list[str], groups: list[Group]) -> SpanColumns:
    whole = np.frombuffer(data, "<i8", len(WHOLES) * count).reshape(len(WHOLES), count).astype(np.int64)
    index = np.frombuffer(data, "<i4", len(INDEXES) * count, 8 * len(WHOLES) * count)
    index = index.reshape(len(INDEXES), count).astype(np.int32)
    if count:
        if index[:3].min() < 0 or index[4:].min() < 0 or (whole[0] > whole[1]).any():
            raise ValueError("an index below 0, or a span that ends before it starts")
        if index[0].max() >= len(KINDS) or index[1:7].max() >= len(texts) or index[7].max() >= len(groups):
            raise IndexError("an index beyond what it numbers")
    rank_of = np.full(count, rank, np.int64)
    return SpanColumns(texts=tuple(texts), groups=tuple(groups), rank=rank_of, whole=whole, index=index)


MAGIC = b"OVSPANS1"
_HEAD_BYTES = 12  # of a block: the rank, and the length


def begun(timeline: Timeline, *, offset_ns: int = 0) -> bytes:
    """Return the beginning of a file: what a timeline says of the run, and none of its spans."""
    return MAGIC + header_block(timeline, offset_ns=offset_ns)


def block(columns: SpanColumns) -> bytes:
    """Return some spans of one rank, one at least."""
    data = pack_columns(columns)
    return int(columns.rank[0]).to_bytes(8, "big") + len(data).to_bytes(4, "big") + data


def grown(data: bytes) -> tuple[Timeline, bool]:
    """Return the timeline of a file, as far as it goes, and whether it ends with a block.

    Raises:
        UsageError: Not even its beginning is there, or it is damaged.
    """
    file = BytesIO(data[len(MAGIC) :])
    header = read_header(file)
    rest = file.read()
    found = list(_blocks(rest))
    whole = sum(taken for taken, _ in found) == len(rest)
    columns = SpanColumns.joined(columns for _, columns in found).shifted(header.offset_ns)
    timeline = Timeline.of_columns(
        columns, world_size=header.world_size, clock=header.clock, dropped=header.dropped, meta=dict(header.meta)
    )
    return timeline, whole


def _blocks(data: bytes) -> Iterator[tuple[int, SpanColumns]]:
    """Yield the blocks that are whole, each with its length in bytes."""
    at = 0
    while at + _HEAD_BYTES <= len(data):
        rank = int.from_bytes(data[at : at + 8], "big")
        length_bytes = int.from_bytes(data[at + 8 : at + _HEAD_BYTES], "big")
        end = at + _HEAD_BYTES + length_bytes
        if end > len(data):
            return
        if rank >= 1 << 31:
            raise UsageError(f"damaged part of a trace: rank {rank}")
        yield end - at, unpack_columns(rank, data[at + _HEAD_BYTES : end])
        at = end


Data: TypeAlias = bytes | mmap

_BEGIN = ',"columns":'
_VERSION = 2
_PIECE_BYTES = 1 << 24


class Tail:
    """Makes the end of a file that is being written, from what goes into it before."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self._ranks: list[tuple[int, str]] = []

    def passed(self, pieces: Iterable[str]) -> Iterator[str]:
        """Yield the text of the file, all before its end, and take note of it."""
        for piece in pieces:
            self._digest.update(piece.encode())
            yield piece

    def add(self, columns: SpanColumns) -> None:
        """Take the spans of a rank, one at least."""
        self._ranks.append((int(columns.rank[0]), b64encode(pack_columns(columns)).decode()))

    def text(self) -> Iterator[str]:
        """Yield what comes before the last brace of the file; a line for each rank."""
        yield f'{_BEGIN}{{"digest":"{self._digest.hexdigest()}","ranks":['
        between = "\n"
        for rank, text in self._ranks:
            yield f'{between}[{rank},"{text}"]'
            between = ",\n"
        yield f'\n],"version":{_VERSION}}}'


def columns_at_end(data: Data) -> tuple[bytes, SpanColumns] | None:
    """Return the file's beginning up to its events, and all its spans; None if its end does not say so.

    Cost: the digest of the file, and a tenth of a microsecond a span.
    """
    at = data.rfind(_BEGIN.encode())
    try:
        told = json.loads(data[at + len(_BEGIN) :].rstrip().removesuffix(b"}")) if at >= 0 else {}
        if told["version"] != _VERSION or told["digest"] != _digest(data, at):
            return None
        columns = SpanColumns.joined(
            unpack_columns(rank, b64decode(text, validate=True)) for rank, text in told["ranks"]
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, NoBase64, UsageError):
        return None
    return bytes(data[: data.find(b"[")]), columns


def _digest(data: Data, end: int) -> str:
    digest = xxhash.xxh3_128()
    for at in range(0, end, _PIECE_BYTES):
        digest.update(data[at : min(at + _PIECE_BYTES, end)])
    return digest.hexdigest()
