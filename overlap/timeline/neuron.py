"""System profiles of the Neuron tools as JSON: `trace_events` with times in nanoseconds.

Names, fields and units: aws-neuron-sdk, tools/neuron-explorer/profile-schema-reference.rst.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from .backwards import ALL_BACKWARDS, forwards, left_out
from .events import Json
from .oddities import LEFT_OUT
from .span import Kind, Span, span_order
from .spans import Timeline

_KINDS: dict[str, Kind] = {"nc_exec_running": "compute", "cc_running": "comm", "cc_exec_barrier": "comm"}


def is_neuron(document: Mapping[str, Json]) -> bool:
    """Whether it is a system profile."""
    return isinstance(document.get("trace_events"), list)


def from_neuron(document: Mapping[str, Json]) -> Timeline | None:
    """Read the hardware events of a system profile; None if it has none. A rank is a `worker_gid`, or a NeuronCore.

    Raises:
        ValueError: A field is no number, or all end before they start.
    """
    events = document.get("trace_events")
    known = [event for event in events if isinstance(event, Mapping)] if isinstance(events, list) else []
    known = [event for event in known if str(event.get("name", "")) in _KINDS]
    known, backwards = forwards(known, "duration")
    spans = [_span(event) for event in known]
    if backwards and not spans:
        raise ValueError(ALL_BACKWARDS)
    if not spans:
        return None
    world = max(span.rank for span in spans) + 1
    meta = {"origin": "Neuron system profile", **({LEFT_OUT: left_out(backwards)} if backwards else {})}
    return Timeline(spans=sorted(spans, key=span_order), world_size=world, meta=meta)


def _span(event: Mapping[str, Json]) -> Span:
    kind = _KINDS[str(event["name"])]
    start_ns, length_ns = _whole(event, "timestamp"), _whole(event, "duration")
    return Span(
        rank=_rank(event), kind=kind, lane=kind, name=str(event["name"]), start_ns=start_ns,
        end_ns=start_ns + length_ns,
    )  # fmt: skip


def _rank(event: Mapping[str, Json]) -> int:
    for field in ("worker_gid", "nc_idx", "lnc_idx"):
        value = event.get(field)
        if value is not None and str(value).isdecimal():
            return int(str(value))
    return 0


def _whole(event: Mapping[str, Json], field: str) -> int:
    value = event.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ValueError(f"{field} is {value!r}, not a number of nanoseconds")
    return round(value)
