"""Traces of PyTorch's profiler (Kineto): one file for each rank.

Where kernels are recorded, computes are kernels and communication is the kernels of the communication libraries; on a
CPU, computes are the outermost operators and communication is what gloo's threads do, or what our backend records from
the call of an operation to its end. Categories, fields and their
traps: pytorch/kineto, libkineto/src/output_json.cpp.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..span import CollectiveInfo, Kind, Span
from ..spans import ORIGIN, Timeline
from .events import Event, Json

_COMM_KERNEL = re.compile(r"nccl|rccl|hccl|.*(ncclKernel|ncclDevKernel)", re.IGNORECASE)
_ON_CPU = re.compile(r"(?:gloo|overlap):(\w+)")
_STEP = re.compile(r"ProfilerStep#(\d+)")
_WIDTHS = {
    "float": 4, "float32": 4, "double": 8, "float64": 8, "half": 2, "float16": 2, "c10::half": 2, "bfloat16": 2,
    "c10::bfloat16": 2, "int": 4, "int32": 4, "long": 8, "long int": 8, "int64": 8, "byte": 1, "unsigned char": 1,
    "char": 1, "bool": 1, "int8": 1, "uint8": 1, "int16": 2,
}  # fmt: skip
_OPS = {
    "allreduce": "all_reduce", "_allgather_base": "all_gather", "allgather": "all_gather", "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter", "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
}  # fmt: skip


def is_kineto(document: Mapping[str, Json]) -> bool:
    """Whether the profiler has written a document."""
    return any(name in document for name in ("distributedInfo", "baseTimeNanoseconds", "schemaVersion"))


def from_kineto(events: Sequence[Event], document: Mapping[str, Json]) -> Timeline | None:
    """Read the complete events of a file; None if they show neither compute nor communication."""
    rank, world = _place(document)
    base_ns = document.get("baseTimeNanoseconds")
    reader = _Reader(rank, world, base_ns if isinstance(base_ns, int) else 0)
    spans = [*reader.steps(events), *reader.computes(events), *reader.communication(events)]
    if not any(span.kind != "step" for span in spans):
        return None
    meta = {ORIGIN: "PyTorch profiler"}
    return Timeline(spans=spans, world_size=world, meta=meta)


def _place(document: Mapping[str, Json]) -> tuple[int, int]:
    info = document.get("distributedInfo")
    found = info if isinstance(info, Mapping) else {}
    rank, world = found.get("rank"), found.get("world_size")
    rank = rank if isinstance(rank, int) and rank >= 0 else 0
    return rank, max(world if isinstance(world, int) else 1, rank + 1)


class _Reader:
    """Turns events of one file into spans; numbers its collectives."""

    def __init__(self, rank: int, world: int, base_ns: int) -> None:
        self._rank, self._world, self._base_ns = rank, world, base_ns
        self._numbers: dict[tuple[str, str], int] = {}

    def steps(self, events: Iterable[Event]) -> Iterator[Span]:
        """Yield the profiler's steps, without their copies on the tracks of a GPU."""
        for event in events:
            match = _STEP.fullmatch(str(event.get("name", "")))
            if match and event.get("cat") == "user_annotation":
                yield self._span(event, "step", "step", match[0], step=int(match[1]))

    def computes(self, events: Sequence[Event]) -> Iterator[Span]:
        """Yield kernels, or where there are none the outermost operators."""
        kernels = [event for event in events if event.get("cat") == "kernel"]
        for event in kernels:
            if not _communicates(event):
                yield self._span(event, "compute", f"compute {event.get('tid', '')}".strip(), str(event.get("name")))
        if not kernels:
            yield from self._operators(events)

    def _operators(self, events: Sequence[Event]) -> Iterator[Span]:
        """Yield the operators that are inside no other of their thread; operators of c10d only enqueue or wait."""
        threads: dict[str, list[Span]] = {}
        for event in events:
            name = str(event.get("name", ""))
            if event.get("cat") == "cpu_op" and not name.startswith(("c10d::", "record_param_comms")):
                span = self._span(event, "compute", f"compute {event.get('tid', '')}".strip(), name)
                threads.setdefault(str(event.get("tid")), []).append(span)
        for spans in threads.values():
            spans.sort(key=lambda span: (span.start_ns, -span.end_ns))
            until_ns = spans[0].start_ns - 1
            for span in spans:
                if span.start_ns >= until_ns:
                    yield span
                    until_ns = span.end_ns

    def communication(self, events: Sequence[Event]) -> Iterator[Span]:
        """Yield collectives, numbered in their order, so that collectives of several ranks can be matched."""
        found, calls = [event for event in events if _communicates(event)], _Calls(events)
        for event in sorted(found, key=lambda event: _us(event, "ts")):
            cpu = _ON_CPU.fullmatch(str(event.get("name", "")))
            given = _args(calls.around(event) if cpu and _is_ours(event) else event)
            op = cpu[1] if cpu else str(given.get("Collective name", event.get("name", "")))
            # Streams of one collective have other numbers on other ranks: one lane, for they must be matched.
            span = self._span(event, "comm", "comm", op if cpu else str(event.get("name", "")))
            yield self._described(span, _OPS.get(op.lower(), op), given)

    def _described(self, span: Span, op: str, args: Mapping[str, Json]) -> Span:
        group = str(args.get("Process Group Name", "world"))
        number = self._numbers[op, group] = self._numbers.get((op, group), -1) + 1
        seq, dtype = args.get("Seq"), str(args.get("dtype", ""))
        info = CollectiveInfo(
            op=op, algorithm="", group=group, seq=seq if isinstance(seq, int) else number,
            nbytes=_nbytes(args), dtype=dtype, issued_ns=span.start_ns, met_ns=span.start_ns, priority=0, call_site="",
            start_ns=span.start_ns, end_ns=span.end_ns, ranks=self._ranks(args),
        )  # fmt: skip
        return replace(span, info=info)

    def _ranks(self, args: Mapping[str, Json]) -> tuple[int, ...]:
        listed = re.findall(r"\d+", str(args.get("Process Group Ranks", "")))
        return tuple(map(int, listed)) or tuple(range(self._world))

    def _span(self, event: Event, kind: Kind, lane: str, name: str, *, step: int | None = None) -> Span:
        start_ns = self._base_ns + round(_us(event, "ts") * 1000)
        length_ns = max(round(_us(event, "dur") * 1000), 0)
        return Span(
            rank=self._rank, kind=kind, lane=lane, name=name, start_ns=start_ns, end_ns=start_ns + length_ns, step=step
        )


class _Calls:
    """Calls of c10d's operators, which say how large an operation of ours is, and among which ranks."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._by_thread: dict[object, list[Event]] = {}
        for event in events:
            if str(event.get("name", "")).startswith("c10d::"):
                self._by_thread.setdefault(event.get("tid"), []).append(event)
        for calls in self._by_thread.values():
            calls.sort(key=lambda call: _us(call, "ts"))

    def around(self, event: Event) -> Event:
        """Return the call in which the record of an operation begins, or the record if there is none."""
        calls, begin_us = self._by_thread.get(event.get("tid"), []), _us(event, "ts")
        place = bisect_right(calls, begin_us, key=lambda call: _us(call, "ts"))
        if place and begin_us <= _us(calls[place - 1], "ts") + _us(calls[place - 1], "dur"):
            return calls[place - 1]
        return event


def _is_ours(event: Event) -> bool:
    return str(event.get("name", "")).startswith("overlap:")


def _args(event: Event) -> Mapping[str, Json]:
    args = event.get("args")
    return args if isinstance(args, Mapping) else {}


def _communicates(event: Event) -> bool:
    args, category = event.get("args"), event.get("cat")
    if category == "user_annotation":  # nccl's are the time to enqueue; those of gloo and ours are the transfer
        return bool(_ON_CPU.fullmatch(str(event.get("name", ""))))
    named = isinstance(args, Mapping) and "Collective name" in args
    return category in ("kernel", "collective_comm") and bool(named or _COMM_KERNEL.match(str(event.get("name", ""))))


def _nbytes(args: Mapping[str, Json]) -> int:
    """Return the larger of the bytes that go in and that come out."""
    counts = [n for name in ("In msg nelems", "Out msg nelems") if isinstance(n := args.get(name), int)]
    if counts:
        return max(counts) * _WIDTHS.get(str(args.get("dtype", "")).lower(), 4)
    dims, types = args.get("Input Dims"), args.get("Input type")
    total = 0
    if isinstance(dims, list) and isinstance(types, list):
        for shape, dtype in zip(dims, types, strict=False):
            count = 1
            for extent in shape if isinstance(shape, list) else ():
                count *= extent if isinstance(extent, int) else 0
            total += count * _WIDTHS.get(str(dtype).lower(), 4) if shape else 0
    return total


def _us(event: Event, field: str) -> float:
    value = event.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{field} is {value!r}, not a number of microseconds")
    return value
