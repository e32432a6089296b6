"""Traces of other tools: take what is recognisably compute, communication or a step, and say so when nothing is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite

from ..errors import UsageError
from .backwards import ALL_BACKWARDS, forwards, left_out
from .events import Event, Json
from .kineto import from_kineto, is_kineto
from .neuron import from_neuron, is_neuron
from .oddities import LEFT_OUT
from .span import Kind, Span, span_order
from .spans import Timeline

_COMM_NAME = re.compile(r"(nccl|rccl|hccl|c10d::|gloo:)", re.IGNORECASE)
_COMM_CATEGORIES = frozenset({"comm", "communication", "collective", "nccl"})
_COMPUTE_CATEGORIES = frozenset({"compute", "kernel"})
_STEP_NAME = re.compile(r"ProfilerStep#(\d+)")


def from_foreign(events: Sequence[Event], document: Mapping[str, Json]) -> Timeline:
    """Read the events of a trace without our fields: PyTorch's profiler, Neuron's, or whoever names things alike.

    The profiler's file holds one rank, named in `distributedInfo`; elsewhere the pid is taken as the rank.

    Raises:
        UsageError: If no event is recognised, or a pid is not a number, naming what was looked for and what was there.
    """
    slices, backwards = forwards(complete(events), "dur")
    if is_neuron(document):
        found = from_neuron(document)
    elif is_kineto(document):
        found = from_kineto(slices, document)
    else:
        found = _from_others(slices)
    if found is None and backwards and not slices:
        raise ValueError(ALL_BACKWARDS)
    if found is None:
        counted = Counter(str(event.get("cat", "events without one")) for event in slices)
        seen = ", ".join(name for name, _ in counted.most_common(5))
        raise UsageError(
            "no compute or communication in it: looked for complete events (ph X, or B and E) of category "
            f"{', '.join(sorted(_COMPUTE_CATEGORIES | _COMM_CATEGORIES))}; it has {seen or 'no complete events'}"
        )
    if backwards:
        found.meta[LEFT_OUT] = left_out(backwards)
    return found


def complete(events: Sequence[Event]) -> list[Event]:
    """Return the complete events, those made of a begin and an end on one thread included."""
    slices = [event for event in events if event.get("ph") == "X"]
    open_on: dict[tuple[object, object], list[Event]] = {}
    for event in events:
        thread = open_on.setdefault((event.get("pid"), event.get("tid")), [])
        if event.get("ph") == "B":
            thread.append(event)
        elif event.get("ph") == "E" and thread:
            begun = thread.pop()
            begin, end = begun.get("ts"), event.get("ts")
            if isinstance(begin, int | float) and isinstance(end, int | float):
                slices.append({**begun, "ph": "X", "dur": end - begin})
    return slices


def _from_others(slices: Sequence[Event]) -> Timeline | None:
    spans = [span for event in slices if (span := _span(event, None)) is not None]
    if not any(span.kind != "step" for span in spans):
        return None
    world_size = max(span.rank for span in spans) + 1
    return Timeline(spans=sorted(spans, key=span_order), world_size=world_size, meta={"origin": "another tool"})


def _span(event: Event, rank: int | None) -> Span | None:
    name = str(event.get("name", ""))
    step = _STEP_NAME.fullmatch(name)
    kind: Kind | None = "step" if step else _kind(event, name)
    if kind is None:
        return None
    start_ns = _ns(event, "ts")
    return Span(
        rank=_pid(event) if rank is None else rank,
        kind=kind,
        lane=kind if kind != "comm" else f"comm {event.get('tid', '')}".strip(),
        name=name,
        start_ns=start_ns,
        end_ns=start_ns + _ns(event, "dur"),
        step=int(step[1]) if step else None,
    )


def _kind(event: Event, name: str) -> Kind | None:
    args = event.get("args")
    category = str(event.get("cat", "")).lower()
    named = isinstance(args, Mapping) and "Collective name" in args and category != "cpu_op"
    if category in _COMM_CATEGORIES or named:
        return "comm"
    if category in _COMPUTE_CATEGORIES:
        return "comm" if _COMM_NAME.match(name) else "compute"
    return None


def _ns(event: Event, field: str) -> int:
    value = event.get(field)
    if not isinstance(value, int | float) or not isfinite(value):
        raise ValueError(f"{field} is {value!r}, not a number of microseconds")
    return round(value * 1000)


def _pid(event: Event) -> int:
    pid = event.get("pid")
    if not isinstance(pid, int) or pid < 0:
        raise UsageError(f"pid {pid!r} is not a rank: neither our fields, nor distributedInfo, nor a number")
    return pid
