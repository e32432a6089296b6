"""Tries what can be changed, and lists what would gain most."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import suppress

from ...errors import UsageError
from ..axis import figure, figure_unit
from ..critical_path import critical_path
from ..metrics import median_step
from ..spans import Timeline
from .algorithms import best_algorithm
from .changes import Change, parse_change
from .prediction import Prediction, predict

__all__ = ["advice_text", "advise"]

BEST = 5
"""Pieces of advice that are given."""
_WORTH = 0.005
"""Of a step: less is no gain."""
_SIZES = ("256KiB", "1MiB", "4MiB", "25MiB", "100MiB")
_COMPUTES = 1  # of the critical path, tried at half their time

_HOW = {
    "stragglers": "share the work of the late rank out, or move it off the step",
    "awaits": "issue first and await at the end of the step: keep the futures in a list",
    "bucket_bytes": "DataParallel(..., bucket_bytes=...), or join arrays before all_reduce",
    "order": "order='forward', or a priority= that is lower for what forward needs first",
    "algorithm": "overlap run --algorithm NAME, or run(..., algorithm='NAME')",
    "bytes": "hook=hooks.bfloat16(), or another hook that sends less",
    "compute": "what half the time would bring there; the rest is up to you",
}


def advise(timeline: Timeline, *, step: int | None = None) -> list[Prediction]:
    """Return the best predictions of what can be changed, the largest gain first.

    Raises:
        UsageError: If the timeline is empty.
    """
    found: dict[str, Prediction] = {}
    for change in _candidates(timeline, step):
        with suppress(UsageError):  # there is nothing of that kind to change
            one = predict(timeline, [change], step=step)
            kind = change.text.partition("=")[0]
            if one.gain_share >= _WORTH and (kind not in found or one.gain_ns > found[kind].gain_ns):
                found[kind] = one
    return sorted(found.values(), key=lambda one: (-one.gain_ns, one.changes[0].text))[:BEST]


def _candidates(timeline: Timeline, step: int | None) -> Iterator[Change]:
    yield parse_change("stragglers=none")
    yield parse_change("awaits=late")
    for size in _SIZES:
        yield parse_change(f"bucket_bytes={size}")
    yield parse_change("order=forward")
    if (better := best_algorithm(timeline)) is not None:
        yield parse_change(f"algorithm={better}")
    yield parse_change("bytes=0.5x")
    at = median_step(timeline) if step is None else step
    longest: dict[str, int] = {}
    for link in critical_path(timeline, step=at):
        if link.doing == "compute" and "'" not in link.name:
            longest[link.name] = longest.get(link.name, 0) + link.duration_ns
    for name in sorted(longest, key=lambda name: (-longest[name], name))[:_COMPUTES]:
        yield parse_change(f"compute '{name}'=0.5x")


def advice_text(found: list[Prediction], *, width: int) -> list[str]:
    """Write the advice: what to change, what it would bring, and how; and what to ask next."""
    if not found:
        return ["nothing that was tried would make the step shorter by half a percent"]
    unit, unit_ns = figure_unit(found[0].measured.wall_ns)
    lines = [f"the step takes {figure(found[0].measured.wall_ns, unit_ns)} {unit}; it would take"]
    for number, one in enumerate(found, 1):
        change = one.changes[0]
        kind, _, value = change.text.partition("=")
        how = _HOW[kind.split(" ")[0]].replace("NAME", value)
        head = f"{number}. {figure(one.predicted.wall_ns, unit_ns)} {unit} ({-one.gain_share:+.1%})  {change.text}: "
        lines += textwrap.wrap(head + f"{change.what}; {how}", width, subsequent_indent="   ")
    return lines
