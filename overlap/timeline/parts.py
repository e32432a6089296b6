"""One process's part of a timeline as bytes: a block of columns for each rank, to be sent, kept, and merged.

A part is a block with the header, then one for each rank, ascending; a block is its length (4 bytes) and zlib's data.
Of a rank these are a header (msgpack: how many spans, and the texts and groups that its columns number) and the
columns, eight of 64 and eight of 32 bits. They take a seventh of the time of trace events to make; who reads them needs
memory for one rank at a time. Bytes from elsewhere are checked: nothing is taken on trust.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, TypeVar, cast

import msgpack
import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from .spans import Clock, CollectiveInfo, Kind, Span, Timeline

__all__ = ["Header", "Part", "pack_part"]

VERSION = 1
BLOCK_BYTES = 256 << 20
"""Of one rank, unpacked: 2.5 million spans. A recorder keeps 20,000 unless it is told otherwise."""

_KINDS: tuple[Kind, ...] = ("compute", "comm", "step", "program", "wires")
_NONE = np.iinfo(np.int64).min  # no step, or nobody knows when it was issued
_TIMES = ("start_ns", "end_ns", "issued_ns", "met_ns")
_WHOLES, _INDEXES = 8, 8  # columns of each width
_SPAN_BYTES = 8 * _WHOLES + 4 * _INDEXES

T = TypeVar("T")
_Group = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a part says of the run.

    Attributes:
        world_size: Ranks in the whole run.
        clock: "real" or "virtual".
        ranks: Those with spans in it, ascending.
        dropped: Spans that no longer fitted.
        meta: Free text about the run.
        offset_ns: What the common clock showed when that of the process showed 0; `Part.spans` adds it.
    """

    world_size: int
    clock: Clock
    ranks: Sequence[int]
    dropped: int = 0
    meta: dict[str, str] = field(default_factory=dict)
    offset_ns: int = 0


def pack_part(timeline: Timeline, *, offset_ns: int = 0) -> bytes:
    """Return the timeline as a part; `offset_ns` takes it to the common clock when it is read."""
    by_rank = timeline.by_rank()
    header = {
        "version": VERSION,
        "world_size": timeline.world_size,
        "clock": timeline.clock,
        "ranks": list(by_rank),
        "dropped": timeline.dropped,
        "meta": timeline.meta,
        "offset_ns": offset_ns,
    }
    return b"".join([_block(_packed(header)), *(_block(_columns(spans)) for spans in by_rank.values())])


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
        self.header = _header(_read_block(file))
        self._begin = file.tell()

    def spans(self) -> Iterator[list[Span]]:
        """Yield the spans of each rank, ascending, in their order, on the common clock.

        Raises:
            UsageError: The part is damaged.
        """
        at = self._begin
        for rank in self.header.ranks:
            self._file.seek(at)
            data = _read_block(self._file)
            at = self._file.tell()
            yield _spans(rank, data, self.header.offset_ns)


# -- blocks --------------------------------------------------------------------------------------------------------


def _block(data: bytes) -> bytes:
    packed = zlib.compress(data, 1)
    return len(packed).to_bytes(4, "big") + packed


def _packed(told: Mapping[str, object]) -> bytes:
    """Pack a header; names are the program's, and may have halves of characters, which no file can hold."""
    packed: bytes = msgpack.packb(told, unicode_errors="replace")
    return packed


def _read_block(file: BinaryIO) -> bytes:
    length_bytes = int.from_bytes(file.read(4), "big")
    if not 0 < length_bytes <= BLOCK_BYTES:
        raise UsageError(f"damaged part of a trace: a block of {length_bytes} bytes")
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(file.read(length_bytes), BLOCK_BYTES)
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


class _Table(dict[T, int]):
    """Numbers what it is asked for, in the order of the first asking."""

    def __missing__(self, item: T) -> int:
        self[item] = number = len(self)
        return number


_NO_INFO = CollectiveInfo(
    op="", algorithm="", group="", seq=0, nbytes=0, dtype="", issued_ns=0, met_ns=0, priority=0, call_site="",
    start_ns=0, end_ns=0,
)  # fmt: skip


def _columns(spans: list[Span]) -> bytes:
    infos = [span.info or _NO_INFO for span in spans]
    texts, groups = _Table[str](), _Table[_Group]()
    wholes = [
        [span.start_ns for span in spans],
        [span.end_ns for span in spans],
        [_issued_ns(span) for span in spans],
        [info.met_ns for info in infos],
        [info.seq for info in infos],
        [info.nbytes for info in infos],
        [info.priority for info in infos],
        [_NONE if span.step is None else span.step for span in spans],
    ]
    indexes = [
        [_KINDS.index(span.kind) for span in spans],
        [texts[span.lane] for span in spans],
        [texts[span.name] for span in spans],
        [-1 if info is _NO_INFO else texts[info.op] for info in infos],
        [texts[info.algorithm] for info in infos],
        [texts[info.dtype] for info in infos],
        [texts[span.info.call_site if span.info else span.call_site] for span in spans],
        [groups[info.group, info.ranks] for info in infos],
    ]
    header = _packed({"count": len(spans), "texts": list(texts), "groups": list(groups)})
    return b"".join(
        [len(header).to_bytes(4, "big"), header]
        + [np.array(column, "<i8").tobytes() for column in wholes]
        + [np.array(column, "<i4").tobytes() for column in indexes]
    )


def _issued_ns(span: Span) -> int:
    if span.info:
        return span.info.issued_ns
    return _NONE if span.issued_ns is None else span.issued_ns


def _spans(rank: int, data: bytes, offset_ns: int) -> list[Span]:
    try:
        end = 4 + int.from_bytes(data[:4], "big")
        told = msgpack.unpackb(data[4:end])
        count, texts = told["count"], told["texts"]
        groups = [(name, tuple(ranks)) for name, ranks in told["groups"]]
        if type(count) is not int or len(data) - end != count * _SPAN_BYTES or not _are_texts_and_groups(texts, groups):
            raise ValueError("columns that do not fit")
        return list(_rows(rank, count, data[end:], texts, groups, offset_ns))
    except (ValueError, TypeError, KeyError, IndexError, msgpack.UnpackException) as error:
        raise UsageError(f"damaged part of a trace: {error!r}") from error


def _are_texts_and_groups(texts: list[object], groups: Iterable[tuple[object, tuple[object, ...]]]) -> bool:
    return all(type(text) is str for text in texts) and all(
        type(name) is str and all(type(rank) is int for rank in ranks) for name, ranks in groups
    )


def _rows(rank: int, count: int, data: bytes, texts: list[str], groups: list[_Group], offset_ns: int) -> Iterator[Span]:
    wide = np.frombuffer(data, "<i8", _WHOLES * count).reshape(_WHOLES, count).copy()
    narrow: NDArray[np.int32] = np.frombuffer(data, "<i4", _INDEXES * count, 8 * _WHOLES * count)
    narrow = narrow.reshape(_INDEXES, count)
    if count and (narrow[:3].min() < 0 or narrow[4:].min() < 0 or (wide[0] > wide[1]).any()):
        raise ValueError("an index below 0, or a span that ends before it starts")
    wide[: len(_TIMES)] += np.where(wide[: len(_TIMES)] == _NONE, 0, offset_ns)
    for whole, index in zip(wide.T.tolist(), narrow.T.tolist(), strict=True):
        start_ns, end_ns, issued_ns, met_ns, seq, nbytes, priority, step = whole
        kind, lane, name, op, algorithm, dtype, call_site, group = index
        info = None
        if op >= 0:
            info = CollectiveInfo(
                op=texts[op], algorithm=texts[algorithm], group=groups[group][0], seq=seq, nbytes=nbytes,
                dtype=texts[dtype], issued_ns=issued_ns, met_ns=met_ns, priority=priority, call_site=texts[call_site],
                start_ns=start_ns, end_ns=end_ns, ranks=groups[group][1],
            )  # fmt: skip
        yield Span(
            rank=rank, kind=_KINDS[kind], lane=texts[lane], name=texts[name], start_ns=start_ns, end_ns=end_ns,
            info=info, step=None if step == _NONE else cast(int, step), call_site="" if info else texts[call_site],
            issued_ns=None if info or issued_ns == _NONE else issued_ns,
        )  # fmt: skip
