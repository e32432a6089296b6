"""Profiles: the events of one file of PyTorch's profiler (Kineto) as columns, read in pieces.

Events are typed structs that the garbage collector does not visit; one by one, they are read as leniently as possible.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import compress
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ..columnar import Table
from .events import OF_OBJECT, EventReader
from .messages import CollectiveFields, collective_name, message_bytes
from .packed import open_unpacked

MAX_EVENTS = 1 << 25
"""Most events of one file, which take up to 4 GB: 8 GiB of text have as many."""
_MESSAGE_EVENTS = 8  # events that take as much memory as the message of one
MAX_NAME_CHARS = 2_000
"""Characters of a name that are kept."""
MAX_RANKS = 10_000_000
_MOST_US, _MOST_BASE_NS = 3e15, 1 << 61  # the sum of two such times and the base has 63 bits of nanoseconds

KERNEL, COPY, SET, RUNTIME, OPERATOR, NOTE, PYTHON, DEVICE_NOTE = range(8)
"""Kinds of events. A copy or a set is of the device's memory; a note is a user's annotation."""

_MTIA = 8  # of the command processor of MTIA: computes, copies, and what only orders them
_MTIA_ORDERS = frozenset({"event_wait", "event_record", "merge", "remote"})
_KINDS = {
    "kernel": KERNEL, "collective_comm": KERNEL, "privateuse1_kernel": KERNEL, "hpu_op": KERNEL,
    "mtia_ccp_events": _MTIA, "gpu_memcpy": COPY, "gpu_memset": SET, "cuda_runtime": RUNTIME,
    "cuda_driver": RUNTIME, "xpu_runtime": RUNTIME, "xpu_driver": RUNTIME, "mtia_runtime": RUNTIME,
    "privateuse1_runtime": RUNTIME, "privateuse1_driver": RUNTIME, "glow_runtime": RUNTIME, "cpu_op": OPERATOR,
    "user_annotation": NOTE, "python_function": PYTHON, "gpu_user_annotation": DEVICE_NOTE,
}  # fmt: skip

Int64s = NDArray[np.int64]


_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _ProfilerArgs(msgspec.Struct, gc=False):
    """Arguments of an event of PyTorch's profiler that are read; None for a null."""

    correlation: _Int64 | None = -1
    sequence: _Int64 | None = msgspec.field(default=-1, name="Sequence number")
    op: str | None = msgspec.field(default=None, name="Collective name")
    in_count: int | None = msgspec.field(default=None, name="In msg nelems")
    out_count: int | None = msgspec.field(default=None, name="Out msg nelems")
    group_size: int | None = msgspec.field(default=None, name="Group size")
    dtype: str | None = None
    group: str | None = msgspec.field(default=None, name="Process Group Name")
    ranks: str | list[int] | None = msgspec.field(default=None, name="Process Group Ranks")
    seq: int | None = msgspec.field(default=None, name="Seq")
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input type")


class _ProfilerEvent(msgspec.Struct, gc=False):
    """Event of PyTorch's profiler; times are microseconds, and the names of the fields are Chrome's."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    ts: float = 0.0
    dur: float = 0.0
    args: _ProfilerArgs | None = None


_decode_one = msgspec.json.Decoder(_ProfilerEvent).decode


@dataclass(slots=True, kw_only=True)
class ProfiledRank:
    """The rank of a file, and the facts in the file's header."""

    path: str
    header: dict[str, Any]

    @property
    def distributed_info(self) -> Mapping[str, Any]:
        """The header's part on the run; {} without one."""
        info = self.header.get("distributedInfo")
        return info if isinstance(info, dict) else {}

    @property
    def named_rank(self) -> int | None:
        """Rank that the file names; None if it names none."""
        rank = self.distributed_info.get("rank")
        return rank if isinstance(rank, int) and rank >= 0 else None

    @property
    def rank(self) -> int:
        """Rank that the file names, or 0."""
        return self.named_rank or 0

    @property
    def world_size(self) -> int:
        """Number of ranks of the run, as far as the file shows it."""
        world = self.distributed_info.get("world_size")
        return max(world if isinstance(world, int) and world < MAX_RANKS else 1, self.rank + 1)

    @property
    def has_subgroups(self) -> bool:
        """Whether the job has groups of several, but not all, of its ranks."""
        groups = self.distributed_info.get("pg_config")
        sizes = [each.get("pg_size") for each in groups if isinstance(each, dict)] if isinstance(groups, list) else []
        return any(isinstance(size, int) and 1 < size < self.world_size for size in sizes)

    @property
    def device(self) -> str:
        """Name of the first device; "" if it is not known."""
        devices = self.header.get("deviceProperties")
        first = devices[0] if isinstance(devices, list) and devices else {}
        return str(first.get("name", "")) if isinstance(first, dict) else ""


@dataclass(slots=True, kw_only=True)
class RankProfile(ProfiledRank):
    """Events of one rank, sorted by start; times are nanoseconds of the clock of the host, rows are events."""

    kind: NDArray[np.int8]
    name: NDArray[np.int32]  # index in `names`
    start_ns: Int64s
    end_ns: Int64s
    thread: NDArray[np.int32]  # index in `threads`
    correlation: Int64s  # of a launch and its work on the device; -1 without one
    sequence: Int64s  # of a forward operator and its backward; -1 without one
    names: list[str]
    threads: list[tuple[object, object]]  # (process or device, thread or stream)
    messages: dict[int, CollectiveFields] = field(default_factory=dict)  # by row
    backwards: int = 0  # events that end before they start: left out
    unreadable: int = 0  # events with a field of another type: left out
    cut: bool = False  # whether the file ends within its events

    def rows(self, *kinds: int) -> NDArray[np.intp]:
        """Return the rows of some kinds of events, in order of start."""
        return np.flatnonzero(np.isin(self.kind, kinds))

    def names_matching(self, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
        """Return a mask over `names`: whether the pattern is found in each name."""
        return np.fromiter((bool(pattern.search(name)) for name in self.names), bool, len(self.names))

    def matches(self, rows: NDArray[np.intp], pattern: re.Pattern[str]) -> NDArray[np.bool_]:
        """Return a mask over some rows: whether the pattern is found in the name of each."""
        return self.names_matching(pattern)[self.name[rows]]

    def named(self, rows: NDArray[np.intp], pattern: re.Pattern[str]) -> NDArray[np.intp]:
        """Return the rows among some whose names the pattern is found in."""
        return rows[self.matches(rows, pattern)]


class _NameNumbers(Table[str]):
    """Numbers of names, which are cut at `MAX_NAME_CHARS` characters."""

    def __missing__(self, item: str) -> int:
        return super().__missing__(item) if len(item) <= MAX_NAME_CHARS else self[item[:MAX_NAME_CHARS]]


@dataclass(slots=True)
class _ColumnBuilder:
    """Columns that grow by a piece at a time."""

    names: _NameNumbers = field(default_factory=_NameNumbers)
    threads: Table[tuple[object, object]] = field(default_factory=Table[tuple[object, object]])
    pieces: list[list[NDArray[Any]]] = field(default_factory=list)
    messages: dict[int, CollectiveFields] = field(default_factory=dict)
    count: int = 0
    backwards: int = 0
    unreadable: int = 0

    def add(self, events: list[_ProfilerEvent]) -> None:
        """Append the complete events of known kinds; count those left out by reason."""
        kind_of = _KINDS.get
        kind = np.array([kind_of(event.cat, -1) if event.ph == "X" else -1 for event in events], np.int8)
        chosen = list(compress(events, (kind >= 0).tolist()))
        kind = kind[kind >= 0]
        times_us = np.array([[event.ts for event in chosen], [event.dur for event in chosen]], np.float64)
        is_whole = (times_us[1] >= 0) & (np.abs(times_us) < _MOST_US).all(axis=0)
        if not is_whole.all():
            self.backwards += (backwards := int((times_us[1] < 0).sum()))
            self.unreadable += int((~is_whole).sum()) - backwards
            chosen, kind, times_us = list(compress(chosen, is_whole.tolist())), kind[is_whole], times_us[:, is_whole]
        names, threads = self.names, self.threads
        name = np.array([names[event.name] for event in chosen], np.int32)
        start_ns = np.rint(times_us[0] * 1000).astype(np.int64)
        correlation, sequence = np.full((2, len(chosen)), -1, np.int64)
        has_args = kind != PYTHON  # functions, which are most of a file, have none that count
        rows = np.flatnonzero(has_args).tolist()
        args = [event.args or _NO_ARGS for event in compress(chosen, has_args.tolist())]
        correlation[has_args] = [-1 if fields.correlation is None else fields.correlation for fields in args]
        sequence[has_args] = [-1 if fields.sequence is None else fields.sequence for fields in args]
        end_ns = start_ns + np.rint(times_us[1] * 1000).astype(np.int64)
        thread = np.array([threads[event.pid, event.tid] for event in chosen], np.int32)
        self.pieces.append([kind, name, start_ns, end_ns, thread, correlation, sequence])
        self.messages |= {
            self.count + row: _build_message(chosen[row].name, fields)
            for row, fields in zip(rows, args, strict=True)
            if fields.op is not None or (fields.dims and chosen[row].name.startswith(("gloo:", "c10d::")))
        }
        self.count += len(chosen)


_NO_ARGS = _ProfilerArgs()


def _build_message(name: str, args: _ProfilerArgs) -> CollectiveFields:
    """Return the message that an event's arguments describe; without its operation there, the event's name has it."""
    ranks = args.ranks if isinstance(args.ranks, list) else re.findall(r"\d+", args.ranks or "")
    dims, types = (msgspec.json.decode(each) if each else None for each in (args.dims, args.types))
    return CollectiveFields(
        op=collective_name(args.op if args.op is not None else name.partition(":")[2]),
        group=args.group or "",
        group_size=args.group_size or 0,
        ranks=tuple(map(int, ranks)),
        nbytes=message_bytes((args.in_count, args.out_count), args.dtype or "", dims, types),
        dtype=args.dtype or "",
        seq=args.seq,
    )


def read_profile(path: str | os.PathLike[str]) -> RankProfile:
    """Read a file of PyTorch's profiler, packed or not; memory holds its columns and one piece of its text.

    Raises:
        UsageError: It cannot be read, or is no such file.
    """
    try:
        with open(path, "rb") as raw:
            reader, columns = _ProfileReader(open_unpacked(raw), _ProfilerEvent, OF_OBJECT), _ColumnBuilder()
            for events in reader:
                columns.add(events)
                if columns.count + _MESSAGE_EVENTS * len(columns.messages) > MAX_EVENTS:
                    raise UsageError(f"more than {MAX_EVENTS:,} events; record fewer steps")
            columns.unreadable += reader.unreadable
            return _build_profile(str(path), reader.fields, columns, cut=not reader.is_complete)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}; name a file that can be read") from error
    except (OverflowError, FloatingPointError) as error:
        raise UsageError(
            f"{path}: damaged trace file: a number in it has more than 64 bits; record it again"
        ) from error


class _ProfileReader(EventReader[_ProfilerEvent]):
    """Reader that leaves out what is not readable, and counts it."""

    is_strict = False
    unreadable = 0

    def convert(self, items: list[object]) -> list[_ProfilerEvent]:
        events = [event for item in items if (event := _decode_leniently(item)) is not None]
        self.unreadable += len(items) - len(events)
        return events


def _decode_leniently(item: object) -> _ProfilerEvent | None:
    """Return an event with its readable fields, without arguments if these are not readable; None if it is no event."""
    if not isinstance(item, Mapping):
        return None
    without = {name: value for name, value in item.items() if name != "args"}
    for encode, fields in (
        (msgspec.json.encode, item),
        (_with_whole_characters, item),
        (msgspec.json.encode, without),
    ):
        try:
            return _decode_one(encode(fields))
        except (ValueError, TypeError, OverflowError):  # errors of types, halves of characters, numbers without a bound
            continue
    return None


def _with_whole_characters(fields: Mapping[str, object]) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace")


def _build_profile(path: str, header: dict[str, Any], columns: _ColumnBuilder, *, cut: bool) -> RankProfile:
    """Return the profile of all events, sorted by start, the longest first; raise UsageError if there are none."""
    parts = [list(part) for part in zip(*columns.pieces, strict=True)]
    columns.pieces.clear()  # so that memory holds one column twice, not all
    joined_columns: list[NDArray[Any]] = [np.concatenate(parts.pop(0)) for _ in range(len(parts))]
    if not columns.count:
        raise UsageError("no event of PyTorch's profiler in it" + " before it was cut off; record it again" * cut)
    order = np.lexsort((-joined_columns[3], joined_columns[2]))
    position = np.empty(len(order), np.intp)
    position[order] = np.arange(len(order))
    kind, name, start_ns, end_ns, thread, correlation, sequence = (
        joined_columns.pop(0)[order] for _ in range(len(joined_columns))
    )
    if (mtia := kind == _MTIA).any():
        does = [
            DEVICE_NOTE if text in _MTIA_ORDERS else COPY if text.startswith("dma_") else KERNEL
            for text in columns.names
        ]
        kind[mtia] = np.array(does, np.int8)[name[mtia]]
    base_ns = header.get("baseTimeNanoseconds")
    if isinstance(base_ns, int) and 0 <= base_ns < _MOST_BASE_NS:
        start_ns += base_ns
        end_ns += base_ns
    return RankProfile(
        path=path, header=header, kind=kind, name=name, start_ns=start_ns, end_ns=end_ns, thread=thread,
        correlation=correlation, sequence=sequence, names=list(columns.names),
        threads=list(columns.threads), messages={int(position[row]): part for row, part in columns.messages.items()},
        backwards=columns.backwards, unreadable=columns.unreadable, cut=cut,
    )  # fmt: skip
