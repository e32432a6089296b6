"""System profiles of the Neuron tools.

Names, fields and units: aws-neuron-sdk, tools/neuron-explorer/profile-schema-reference.rst.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TypeAlias

from ...errors import UsageError
from ..recording import columns_from_spans
from ..span import Kind, Span
from ..spans import ORIGIN, Timeline
from .sections import without_backward_spans

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
_KINDS: dict[str, Kind] = {"nc_exec_running": "compute", "cc_running": "comm", "cc_exec_barrier": "comm"}


def neuron_timeline(events: Sequence[Json]) -> Timeline:
    """Return the timeline of the hardware events of a system profile. A rank is a `worker_gid`, or a NeuronCore.

    Events that end before they start are left out.

    Raises:
        UsageError: No event is compute or communication of a NeuronCore.
        ValueError: A field is no number, or all events end before they start.
    """
    numbered = [(number, event) for number, event in enumerate(events) if isinstance(event, Mapping)]
    known = [(number, event) for number, event in numbered if str(event.get("name")) in _KINDS]
    if not known:
        raise UsageError("no compute or communication of a NeuronCore in it; capture a step of the program")
    columns, facts = without_backward_spans(columns_from_spans([_read_span(*each) for each in known]))
    meta = {ORIGIN: "Neuron system profile", **facts}
    return Timeline.of_columns(columns, world_size=int(columns.rank.max()) + 1, meta=meta)


def _read_span(number: int, event: Mapping[str, Json]) -> Span:
    """Return the span of a hardware event; `number` is its index in the file, for errors (see `_read_ns`)."""
    kind = _KINDS[str(event["name"])]
    start_ns, length_ns = _read_ns(number, event, "timestamp"), _read_ns(number, event, "duration")
    return Span(
        rank=_read_rank(event), kind=kind, lane=kind, name=str(event["name"]), start_ns=start_ns,
        end_ns=start_ns + length_ns,
    )  # fmt: skip


def _read_rank(event: Mapping[str, Json]) -> int:
    """Return the rank of an event: the first of the fields `worker_gid`, `nc_idx`, `lnc_idx` that is a number, or 0."""
    for field in ("worker_gid", "nc_idx", "lnc_idx"):
        value = event.get(field)
        if value is not None and str(value).isdecimal():
            return int(str(value))
    return 0


def _read_ns(number: int, event: Mapping[str, Json], field: str) -> int:
    """Return a field of event `number` as whole nanoseconds; raises `ValueError` if it is no finite number."""
    value = event.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ValueError(f"event {number} ({event['name']!r}): {field} is {value!r}, not a number of nanoseconds")
    return round(value)
