"""Traces of other tools than PyTorch's profiler: recognisable computes, communication and steps; Neuron's profiles.

Names, fields and units of Neuron's system profiles: aws-neuron-sdk,
tools/neuron-explorer/profile-schema-reference.rst.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TypeVar

from ...errors import UsageError
from ..span import Kind, Span
from ..spans import LEFT_OUT, ORIGIN, Timeline
from .events import Event, Json

_COMM_NAME = re.compile(r"(nccl|rccl|hccl|c10d::|gloo:)", re.IGNORECASE)
_COMM_CATEGORIES = frozenset({"comm", "communication", "collective", "nccl"})
_COMPUTE_CATEGORIES = frozenset({"compute", "kernel"})
_STEP_NAME = re.compile(r"ProfilerStep#(\d+)")


def from_foreign(events: Sequence[Event], document: Mapping[str, Json]) -> Timeline:
    """Read the events of a trace without our fields: of Neuron's profiler, or similar tools; a pid is the rank.

    Raises:
        UsageError: No event is recognised, or a pid is not a number; the message names what was expected and found.
    """
    slices, backwards = forwards(complete(events), "dur")
    found = from_neuron(document) if is_neuron(document) else _from_others(slices)
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
        found.meta[LEFT_OUT] = "; ".join(filter(None, [found.meta.get(LEFT_OUT), left_out(backwards)]))
    return found


def complete(events: Sequence[Event]) -> list[Event]:
    """Return the complete events, including pairs of a begin and an end on one thread."""
    slices = [event for event in events if event.get("ph") == "X"]
    open_on: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        thread = open_on.setdefault((str(event.get("pid")), str(event.get("tid"))), [])
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
    return Timeline(spans=spans, world_size=world_size, meta={ORIGIN: "another tool"})


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


ALL_BACKWARDS = "all of its events end before they start"

E = TypeVar("E", bound="Mapping[str, Json]")


def forwards(events: Sequence[E], duration: str) -> tuple[list[E], list[E]]:
    """Return the events whose duration is not negative, and the others: events that end before they start."""
    backwards = [event for event in events if isinstance(took := event.get(duration), int | float) and took < 0]
    gone = set(map(id, backwards))
    return [event for event in events if id(event) not in gone], backwards


def left_out(events: Sequence[Mapping[str, Json]]) -> str:
    """Return which events were left out, as text."""
    which = "1 event ends before it starts" if len(events) == 1 else f"{len(events)} events end before they start"
    return f"{which} ({'first: ' * (len(events) > 1)}'{events[0].get('name', '')}'): shown is the rest"


_NEURON_KINDS: dict[str, Kind] = {"nc_exec_running": "compute", "cc_running": "comm", "cc_exec_barrier": "comm"}


def is_neuron(document: Mapping[str, Json]) -> bool:
    """Whether a document is a system profile of the Neuron tools."""
    return isinstance(document.get("trace_events"), list)


def from_neuron(document: Mapping[str, Json]) -> Timeline | None:
    """Read the hardware events of a system profile; None if it has none. A rank is a `worker_gid`, or a NeuronCore.

    Raises:
        ValueError: A field is no number, or all events end before they start.
    """
    events = document.get("trace_events")
    known = [event for event in events if isinstance(event, Mapping)] if isinstance(events, list) else []
    known = [event for event in known if str(event.get("name", "")) in _NEURON_KINDS]
    known, backwards = forwards(known, "duration")
    spans = [_neuron_span(event) for event in known]
    if backwards and not spans:
        raise ValueError(ALL_BACKWARDS)
    if not spans:
        return None
    world = max(span.rank for span in spans) + 1
    meta = {ORIGIN: "Neuron system profile", **({LEFT_OUT: left_out(backwards)} if backwards else {})}
    return Timeline(spans=spans, world_size=world, meta=meta)


def _neuron_span(event: Mapping[str, Json]) -> Span:
    kind = _NEURON_KINDS[str(event["name"])]
    start_ns, length_ns = _neuron_ns(event, "timestamp"), _neuron_ns(event, "duration")
    return Span(
        rank=_neuron_rank(event), kind=kind, lane=kind, name=str(event["name"]), start_ns=start_ns,
        end_ns=start_ns + length_ns,
    )  # fmt: skip


def _neuron_rank(event: Mapping[str, Json]) -> int:
    for field in ("worker_gid", "nc_idx", "lnc_idx"):
        value = event.get(field)
        if value is not None and str(value).isdecimal():
            return int(str(value))
    return 0


def _neuron_ns(event: Mapping[str, Json], field: str) -> int:
    value = event.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ValueError(f"{field} is {value!r}, not a number of nanoseconds")
    return round(value)
