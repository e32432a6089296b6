"""Profiles: the events of one file of PyTorch's profiler (Kineto) as columns, read in pieces.

Events are typed structs, which the garbage collector does not visit. An event with fields of wrong types is read as far
as possible.
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
from ..columnar import IndexTable, Int64s, Mask, Rows
from .events import OF_OBJECT, EventReader
from .messages import CollectiveFields, collective_name, message_bytes
from .packed import naming_file_in_errors, open_unpacked

MAX_EVENTS = 1 << 25
"""Most events of one file, which take up to 4 GB of memory; 8 GiB of text have as many."""
_MESSAGE_EVENTS = 8  # an event's message takes as much memory as this many events
MAX_NAME_CHARS = 2_000
"""Characters of a name that are kept."""
MAX_RANKS = 10_000_000
_MOST_US, _MOST_BASE_NS = 3e15, 1 << 61  # the sum of two such times and the base has 63 bits of nanoseconds

KERNEL, COPY, SET, RUNTIME, OPERATOR, NOTE, PYTHON, DEVICE_NOTE = range(8)
"""Kinds of events. A copy or a set is of the device's memory; a note is a user's annotation."""

_MTIA = 8  # kind of events of MTIA's command processor until their names show the real kind: see `_build_profile`
_MTIA_ORDERS = frozenset({"event_wait", "event_record", "merge", "remote"})
_KINDS = {
    "kernel": KERNEL, "collective_comm": KERNEL, "privateuse1_kernel": KERNEL, "hpu_op": KERNEL,
    "mtia_ccp_events": _MTIA, "gpu_memcpy": COPY, "gpu_memset": SET, "cuda_runtime": RUNTIME,
    "cuda_driver": RUNTIME, "xpu_runtime": RUNTIME, "xpu_driver": RUNTIME, "mtia_runtime": RUNTIME,
    "privateuse1_runtime": RUNTIME, "privateuse1_driver": RUNTIME, "glow_runtime": RUNTIME, "cpu_op": OPERATOR,
    "user_annotation": NOTE, "python_function": PYTHON, "gpu_user_annotation": DEVICE_NOTE,
}  # fmt: skip

_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _ProfilerArgs(msgspec.Struct, gc=False):
    """Arguments of an event of PyTorch's profiler that are read, or None for a null."""

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
    """A profile's header, and the facts on the rank and the run in it."""

    path: str
    header: dict[str, Any]  # fields of the file next to its events

    @property
    def distributed_info(self) -> Mapping[str, Any]:
        """The header's part on the distributed run, or {} without one."""
        info = self.header.get("distributedInfo")
        return info if isinstance(info, dict) else {}

    @property
    def named_rank(self) -> int | None:
        """Rank that the file names, or None if it names none."""
        rank = self.distributed_info.get("rank")
        return rank if isinstance(rank, int) and rank >= 0 else None

    @property
    def rank(self) -> int:
        """Rank that the file names, or 0."""
        return self.named_rank or 0

    @property
    def world_size(self) -> int:
        """Number of ranks of the run; if the file does not name it, one more than the file's rank."""
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
        """Name of the first device, or "" if it is not known."""
        devices = self.header.get("deviceProperties")
        first = devices[0] if isinstance(devices, list) and devices else {}
        return str(first.get("name", "")) if isinstance(first, dict) else ""


@dataclass(slots=True, kw_only=True)
class RankProfile(ProfiledRank):
    """Events of one rank as columns, sorted by start. A row is an event; instants are by the host's clock, in ns."""

    kind: NDArray[np.int8]  # `KERNEL` to `DEVICE_NOTE`
    name: NDArray[np.int32]  # index in `names`
    start_ns: Int64s
    end_ns: Int64s
    thread: NDArray[np.int32]  # index in `threads`
    correlation: Int64s  # number that a launch and its work on the device share; -1 without one
    sequence: Int64s  # number that a forward operator and its backward share; -1 without one
    names: list[str]
    threads: list[tuple[object, object]]  # (process or device, thread or stream)
    messages: dict[int, CollectiveFields] = field(default_factory=dict)  # of collectives, by row
    backwards: int = 0  # events that end before they start: left out
    unreadable: int = 0  # events with a field of another type: left out
    cut: bool = False  # whether the file ends within its events

    def rows_of_kinds(self, *kinds: int) -> Rows:
        """Return the rows of events of some kinds (`KERNEL` to `DEVICE_NOTE`), in order of start."""
        return np.flatnonzero(np.isin(self.kind, kinds))

    def names_matching(self, pattern: re.Pattern[str]) -> Mask:
        """Return a mask over `names`: the names in which a pattern is found."""
        return np.fromiter((bool(pattern.search(name)) for name in self.names), bool, len(self.names))

    def name_matches(self, rows: Rows, pattern: re.Pattern[str]) -> Mask:
        """Return a mask over `rows`: the events in whose name a pattern is found."""
        return self.names_matching(pattern)[self.name[rows]]

    def rows_matching(self, rows: Rows, pattern: re.Pattern[str]) -> Rows:
        """Return those of `rows` in whose name a pattern is found."""
        return rows[self.name_matches(rows, pattern)]

    def rows_on_thread(self, rows: Rows, thread: int) -> Rows:
        """Return those of `rows` whose events are on a thread, an index in `threads`."""
        is_own: Mask = self.thread[rows] == thread
        return rows[is_own]

    def threads_of(self, rows: Rows) -> list[int]:
        """Return the threads of the events in some rows, as indexes in `threads`, ascending."""
        found: list[int] = np.flatnonzero(np.bincount(self.thread[rows])).tolist()
        return found

    def lengths_ns(self, rows: Rows) -> Int64s:
        """Return the length of the event of each row, in nanoseconds."""
        return self.end_ns[rows] - self.start_ns[rows]


class _NameNumbers(IndexTable[str]):
    """Numbers names in the order of their first look-up; longer ones are cut at `MAX_NAME_CHARS` characters."""

    def __missing__(self, item: str) -> int:
        return super().__missing__(item) if len(item) <= MAX_NAME_CHARS else self[item[:MAX_NAME_CHARS]]


@dataclass(slots=True)
class _ColumnBuilder:
    """Columns of a `RankProfile` in the order of the file, which grow by a piece of events at a time."""

    names: _NameNumbers = field(default_factory=_NameNumbers)
    threads: IndexTable[tuple[object, object]] = field(default_factory=IndexTable[tuple[object, object]])
    pieces: list[list[NDArray[Any]]] = field(default_factory=list)
    messages: dict[int, CollectiveFields] = field(default_factory=dict)
    count: int = 0
    backwards: int = 0
    unreadable: int = 0

    def add_events(self, events: list[_ProfilerEvent]) -> None:
        """Append the events of known kinds; count those with bad times in `backwards` and `unreadable`."""
        kind_of = _KINDS.get
        kind = np.array([kind_of(event.cat, -1) if event.ph == "X" else -1 for event in events], np.int8)
        chosen = list(compress(events, (kind >= 0).tolist()))
        kind = kind[kind >= 0]
        times_us = np.array([[event.ts for event in chosen], [event.dur for event in chosen]], np.float64)
        # A length below 0, or a time that does not fit into 63 bits of nanoseconds, is not usable.
        is_whole = (times_us[1] >= 0) & (np.abs(times_us) < _MOST_US).all(axis=0)
        if not is_whole.all():
            self.backwards += (backwards := int((times_us[1] < 0).sum()))
            self.unreadable += int((~is_whole).sum()) - backwards
            chosen, kind, times_us = list(compress(chosen, is_whole.tolist())), kind[is_whole], times_us[:, is_whole]
        names, threads = self.names, self.threads
        name = np.array([names[event.name] for event in chosen], np.int32)
        start_ns = np.rint(times_us[0] * 1000).astype(np.int64)
        correlation, sequence = np.full((2, len(chosen)), -1, np.int64)
        has_args = kind != PYTHON  # functions, which are most events of a file, have no arguments of interest
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
            # The name of a c10d call or a gloo event is its operation; it counts if it has a tensor.
            if fields.op is not None or (fields.dims and chosen[row].name.startswith(("gloo:", "c10d::")))
        }
        self.count += len(chosen)


_NO_ARGS = _ProfilerArgs()


def _build_message(name: str, args: _ProfilerArgs) -> CollectiveFields:
    """Return the collective that an event's arguments describe.

    Without an operation in the arguments, it is the part of the event's name after ":", as in "gloo:all_reduce".
    """
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
    """Read a file of PyTorch's profiler, compressed or not. Memory holds its columns and one piece of its text.

    Raises:
        UsageError: The file cannot be read, is no such file, or has too many events.
    """
    with naming_file_in_errors(path), open(path, "rb") as raw:
        reader, columns = _ProfileReader(open_unpacked(raw), _ProfilerEvent, OF_OBJECT), _ColumnBuilder()
        for events in reader:
            columns.add_events(events)
            if columns.count + _MESSAGE_EVENTS * len(columns.messages) > MAX_EVENTS:
                raise UsageError(f"more than {MAX_EVENTS:,} events; record fewer steps")
        columns.unreadable += reader.unreadable
        return _build_profile(str(path), reader.fields, columns, cut=not reader.is_complete)


class _ProfileReader(EventReader[_ProfilerEvent]):
    """Reader that leaves out events that cannot be read, and counts them in `unreadable`."""

    is_strict = False
    unreadable = 0

    def convert_items(self, items: list[object]) -> list[_ProfilerEvent]:
        """Return the events that can be read, and count the others in `unreadable`."""
        events = [event for item in items if (event := _decode_leniently(item)) is not None]
        self.unreadable += len(items) - len(events)
        return events


def _decode_leniently(item: object) -> _ProfilerEvent | None:
    """Return an event from parsed JSON; without its arguments if these cannot be read; None if it is no event."""
    if not isinstance(item, Mapping):
        return None
    without = {name: value for name, value in item.items() if name != "args"}
    for encode, fields in (
        (msgspec.json.encode, item),
        (_to_json_bytes, item),
        (msgspec.json.encode, without),
    ):
        try:
            return _decode_one(encode(fields))
        except (ValueError, TypeError, OverflowError):  # errors of types, halves of characters, numbers without a bound
            continue
    return None


def _to_json_bytes(fields: Mapping[str, object]) -> bytes:
    """Return fields as UTF-8 JSON; lone surrogates, which UTF-8 cannot encode, become "?"."""
    return json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace")


def _build_profile(path: str, header: dict[str, Any], columns: _ColumnBuilder, *, cut: bool) -> RankProfile:
    """Return the profile of all events, sorted by start; of events that start together, the longest comes first.

    The pieces are removed from `columns`. `cut`: the file ends within its events. Raises `UsageError` if there is none.
    """
    parts = [list(part) for part in zip(*columns.pieces, strict=True)]  # for each column, its pieces
    # Pieces are freed as soon as they are joined or sorted, so that memory holds one column twice, not all.
    columns.pieces.clear()
    joined_columns: list[NDArray[Any]] = [np.concatenate(parts.pop(0)) for _ in range(len(parts))]
    if not columns.count:
        raise UsageError("no event of PyTorch's profiler in it" + " before it was cut off; record it again" * cut)
    _, _, starts_ns, ends_ns, *_ = joined_columns
    order = np.lexsort((-ends_ns, starts_ns))  # the last key counts most
    del starts_ns, ends_ns
    position = np.empty(len(order), np.intp)  # row after sorting, by position in the file
    position[order] = np.arange(len(order))
    kind, name, start_ns, end_ns, thread, correlation, sequence = (
        joined_columns.pop(0)[order] for _ in range(len(joined_columns))
    )
    if (is_mtia := kind == _MTIA).any():  # the kind of such an event follows from its name
        works = [COPY if text.startswith("dma_") else KERNEL for text in columns.names]
        kinds = [DEVICE_NOTE if text in _MTIA_ORDERS else work for text, work in zip(columns.names, works, strict=True)]
        kind[is_mtia] = np.array(kinds, np.int8)[name[is_mtia]]
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
