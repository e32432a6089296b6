"""Traces of PyTorch's profiler (Kineto): one file for each rank.

Where events of a device are recorded, computes are its kernels, communication is the kernels of the communication
libraries, and a step is what was launched in it, from its first event on the device to that of the next step: the host
is ahead of its device, often by more than a step. On a CPU, computes are the outermost operators and
communication is what gloo's threads do, or what our backend records from the call of an operation to its end.
Categories, fields and their traps: pytorch/kineto, libkineto/src/output_json.cpp.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from ..span import CollectiveInfo, Kind, Span
from ..spans import LEFT_OUT, ORIGIN, Timeline
from .events import Event, Json

COMM_KERNEL = re.compile(  # NCCL, RCCL, oneCCL; symmetric memory of PyTorch, NVSHMEM, DeepEP; kernels of vLLM, TensorRT
    r"(void )?(nccl|rccl|hccl|oneccl|nvshmem|mscclpp)|.*(ncclKernel|ncclDevKernel|multimem_|(one|two)_shot_all_reduce|"
    r"deep_ep::|nvshmem|cross_device_reduce|allreduce_fusion|quick_?reduce)",
    re.IGNORECASE,
)
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


def collective_name(name: str) -> str:
    """Return the usual name of a collective that a library names in its own way."""
    return _OPS.get(name.lower(), name)


def is_kineto(document: Mapping[str, Json]) -> bool:
    """Whether the profiler has written a document."""
    return any(name in document for name in ("distributedInfo", "baseTimeNanoseconds", "schemaVersion"))


def from_kineto(events: Sequence[Event], document: Mapping[str, Json]) -> Timeline | None:
    """Read the complete events of a file; None if they show neither compute nor communication."""
    rank, world = _place(document)
    base_ns = document.get("baseTimeNanoseconds")
    reader = _Reader(rank, world, base_ns if isinstance(base_ns, int) else 0)
    device = [event for event in events if _is_kernel(event)]
    spans = [*reader.steps(events, device), *reader.computes(events, device), *reader.communication(events)]
    if not any(span.kind != "step" for span in spans):
        return None
    meta = {ORIGIN: "PyTorch profiler"}
    if not device and document.get("deviceProperties"):
        meta[LEFT_OUT] = "no kernel of its device is recorded: computes are operators of the host"
    elif device and (copies := sum(event.get("cat") in ("gpu_memcpy", "gpu_memset") for event in events)):
        meta[LEFT_OUT] = f"{copies} copies and sets of memory are not shown and count as idle: `overlap why` has them"
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

    def steps(self, events: Sequence[Event], device: Sequence[Event]) -> Iterator[Span]:
        """Yield the profiler's steps: on a device, those of which it has done something."""
        host: dict[int, Event] = {}
        marked: dict[int, tuple[float, float]] = {}  # on the device, by the profiler
        for event in events:
            match = _STEP.fullmatch(str(event.get("name", "")))
            if match and event.get("cat") == "user_annotation":
                host[int(match[1])] = event
            elif match and event.get("cat") == "gpu_user_annotation":
                start_us, end_us = _interval(event)  # a device has a mark on each stream
                first_us, last_us = marked.get(int(match[1]), (start_us, end_us))
                marked[int(match[1])] = min(first_us, start_us), max(last_us, end_us)
        found = increasing(marked or _launched(host, events, device)) if device else {}
        for step, (start_us, end_us) in (found or {step: _interval(event) for step, event in host.items()}).items():
            event = {"ts": start_us, "dur": end_us - start_us}
            yield self._span(event, "step", "step", f"ProfilerStep#{step}", step=step)

    def computes(self, events: Sequence[Event], device: Sequence[Event]) -> Iterator[Span]:
        """Yield kernels, or where there are none the outermost operators."""
        for event in device:
            if not _communicates(event):
                yield self._span(event, "compute", f"compute {event.get('tid', '')}".strip(), str(event.get("name")))
        if not device:
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
            yield self._described(span, collective_name(op), given)

    def _described(self, span: Span, op: str, args: Mapping[str, Json]) -> Span:
        group = str(args.get("Process Group Name", "world"))
        number = self._numbers[op, group] = self._numbers.get((op, group), -1) + 1
        seq, dtype = args.get("Seq"), str(args.get("dtype", ""))
        info = CollectiveInfo(
            op=op, algorithm="", group=group, seq=seq if isinstance(seq, int) else number,
            nbytes=bytes_of(args), dtype=dtype, issued_ns=span.start_ns, met_ns=span.start_ns, priority=0, call_site="",
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


def _launched(
    host: Mapping[int, Event], events: Iterable[Event], device: Iterable[Event]
) -> dict[int, tuple[float, float]]:
    """Return the first begin and the last end of what was launched on the device in each step of the host."""
    launches = {
        _args(event).get("correlation"): _us(event, "ts")
        for event in events
        if str(event.get("cat")).endswith(("_runtime", "_driver"))
    }
    steps = sorted((*_interval(event), step) for step, event in host.items())
    found: dict[int, tuple[float, float]] = {}
    for event in device:
        at_us = launches.get(_args(event).get("correlation"))
        place = -1 if at_us is None else bisect_right(steps, at_us, key=lambda step: step[0]) - 1
        if at_us is not None and place >= 0 and at_us < steps[place][1]:
            step, (start_us, end_us) = steps[place][2], _interval(event)
            first_us, last_us = found.get(step, (start_us, end_us))
            found[step] = min(first_us, start_us), max(last_us, end_us)
    return found


T = TypeVar("T", int, float)


def increasing(steps: Mapping[int, tuple[T, T]]) -> dict[int, tuple[T, T]]:
    """Return intervals of steps, each of which ends where the next begins; none if they are out of order."""
    numbers = sorted(steps)
    begins = [steps[number][0] for number in numbers]
    if begins != sorted(begins):
        return {}
    following = {number: steps[number + 1][0] for number in numbers if number + 1 in steps}
    return {number: (steps[number][0], following.get(number, steps[number][1])) for number in numbers}


def _interval(event: Event) -> tuple[float, float]:
    return _us(event, "ts"), _us(event, "ts") + _us(event, "dur")


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


def _is_kernel(event: Event) -> bool:
    """Whether a device computed or communicated; engines of MTIA have events for what they do besides, too."""
    return event.get("cat") == "kernel" or (event.get("cat") == "mtia_ccp_events" and event.get("name") == "pe_exe")


def _communicates(event: Event) -> bool:
    args, category = event.get("args"), event.get("cat")
    if category == "user_annotation":  # nccl's are the time to enqueue; those of gloo and ours are the transfer
        return bool(_ON_CPU.fullmatch(str(event.get("name", ""))))
    named = isinstance(args, Mapping) and "Collective name" in args
    return category in ("kernel", "collective_comm") and bool(named or COMM_KERNEL.match(str(event.get("name", ""))))


def bytes_of(args: Mapping[str, Json]) -> int:
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
