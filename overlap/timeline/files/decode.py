"""From the events of our own trace files back to spans, each field checked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict, cast, get_args

from ...errors import UsageError
from ..measure.oddities import LEFT_OUT
from ..ranklist import unlisted
from ..span import Clock, CollectiveInfo, Kind, Span, span_order
from ..spans import Timeline
from .events import Event, Json

VERSION = 1
"""Version of our fields; a file with a higher one is refused."""

LIMIT = 1 << 63


def decoded(slices: Iterable[Event], header: Json) -> Timeline:
    """Return the timeline of the events with a length, and of what the file says of the run.

    Spans that end before they start are left out; `meta` says so.

    Raises:
        ValueError: A field is not what it should be; it is named.
        UsageError: A newer version has written it.
    """
    found = [_span(event) for event in slices if event.get("cat") != "issue"]
    spans = sorted((span for span in found if span.start_ns <= span.end_ns), key=span_order)
    said = known(header)
    if backwards := [span for span in found if span.start_ns > span.end_ns]:
        if not spans:
            raise ValueError("all of its spans end before they start")
        said["meta"][LEFT_OUT] = _left_out(backwards)
    return Timeline(spans=spans, **said)


def _left_out(spans: Sequence[Span]) -> str:
    """Say which spans were not taken because a clock went back."""
    many, first = len(spans) > 1, spans[0]
    which = f"{len(spans)} spans end before they start" if many else "1 span ends before it starts"
    return f"{which} ({'first: ' * many}'{first.name}' of rank {first.rank}): shown is the rest"


class Known(TypedDict):
    """What the file says of the run, by the names of a timeline's arguments."""

    world_size: int
    clock: Clock
    dropped: int
    meta: dict[str, str]


def known(header: Json) -> Known:
    """Return what the header says, checked; errors as for `decoded`."""
    if not isinstance(header, dict):
        raise ValueError("the field 'overlap' is not an object")
    if (version := _whole(header, "version")) > VERSION:
        raise UsageError(f"written by a newer version (format {version}, this one reads up to {VERSION})")
    if (clock := _text(header, "clock")) not in ("real", "virtual"):
        raise ValueError(f"unknown clock {clock!r}")
    meta = _object(header, "meta")
    return {
        "world_size": _whole(header, "world_size"),
        "clock": cast(Clock, clock),
        "dropped": _whole(header, "dropped"),
        "meta": {name: _text(meta, name) for name in meta},
    }


def _span(event: Event) -> Span:
    args = _object(event, "args")
    if (kind := _text(event, "cat")) not in get_args(Kind):
        raise ValueError(f"unknown category {kind!r}")
    start_ns, end_ns = _whole(args, "start_ns"), _whole(args, "end_ns")
    info = _info(args, start_ns, end_ns) if "seq" in args else None
    return Span(
        rank=_whole(event, "pid"),
        kind=cast(Kind, kind),
        lane=_text(args, "lane"),
        name=_text(event, "name"),
        start_ns=start_ns,
        end_ns=end_ns,
        info=info,
        step=_whole(args, "step") if "step" in args else None,
        call_site=_text(args, "call_site") if "call_site" in args and info is None else "",
        issued_ns=_whole(args, "issued_ns") if "issued_ns" in args and info is None else None,
    )


def _info(args: Event, start_ns: int, end_ns: int) -> CollectiveInfo:
    return CollectiveInfo(
        op=_text(args, "Collective name"),
        algorithm=_text(args, "algorithm"),
        group=_text(args, "Process Group Name"),
        seq=_whole(args, "seq"),
        nbytes=_whole(args, "nbytes"),
        dtype=_text(args, "dtype"),
        issued_ns=_whole(args, "issued_ns"),
        met_ns=_whole(args, "met_ns"),
        priority=_whole(args, "priority"),
        call_site=_text(args, "call_site"),
        start_ns=start_ns,
        end_ns=end_ns,
        awaited_ns=_whole(args, "awaited_ns") if "awaited_ns" in args else None,
        ranks=unlisted(_text(args, "Process Group Ranks")) if "Process Group Ranks" in args else (),
    )


def _whole(fields: Event, name: str) -> int:
    if not isinstance(value := fields.get(name), int):
        raise ValueError(f"{name} is {value!r}, not an integer")
    if not -LIMIT < value < LIMIT:
        raise ValueError(f"{name} is {value}, which has more than 64 bits")
    return value


def _text(fields: Event, name: str) -> str:
    if not isinstance(value := fields.get(name), str):
        raise ValueError(f"{name} is {value!r}, not text")
    return value


def _object(fields: Event, name: str) -> Event:
    if not isinstance(value := fields.get(name), dict):
        raise ValueError(f"{name} is {value!r}, not an object")
    return value


_BEGIN = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")


def complete_part(text: str) -> Json | None:
    """Return the document with the events that are whole; None if not even its beginning is.

    An array that only lacks its end, as tools leave it that append events to a file, is whole.
    """
    match = _BEGIN.search(text)
    start = match.end() if match else len(text) - len(text.lstrip()) + 1
    if match is None and not text.lstrip().startswith("["):
        return None
    header: Json = {}
    if match:
        try:
            header = json.loads(text[: match.start()].rstrip().removesuffix(",") + "}")
        except ValueError:
            return None
    events: list[Json] = []
    decoder, at = json.JSONDecoder(), start
    while True:
        at = cast("re.Match[str]", _BETWEEN.match(text, at)).end()
        try:
            event, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            break
        events.append(event)
    if not events:
        return None
    return {**cast("Mapping[str, Json]", header), "traceEvents": cast("Sequence[Json]", events)}
