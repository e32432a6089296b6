"""Tries what can be changed, and lists what would gain most."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np

from ...errors import UsageError
from ...units import parse_bytes
from ..axis import figure, figure_unit
from ..critical_path import critical_path
from ..metrics import median_step
from ..spans import Timeline
from .algorithms import best_algorithm
from .changes import Change, parse_change
from .prediction import Baseline, Prediction, predict

_BUCKETS_AT_MOST = 128
"""In a step: more are not tried, because each is a message that has to be started."""
_STEPS_AROUND = 4
"""Steps before the one that is looked at, and after it, that are replayed."""
BEST = 5
"""Pieces of advice that are given."""
_WORTH = 0.005
"""Of a step: less is no gain."""
_SIZES = ("256KiB", "1MiB", "4MiB", "25MiB", "100MiB")
_WINDOWS = ("8", "2", "32")  # of those that are alike, the one that streams have by default
_COMPUTES = 1  # of the critical path, tried at half their time

_HOW = {
    "stragglers": "share the work of the late rank out, or move it off the step",
    "awaits": "issue first and await at the end of the step: keep the futures in a list",
    "bucket_bytes": "DataParallel(..., bucket_bytes=...), or join arrays before all_reduce",
    "order": "order='forward', or a priority= that is lower for what forward needs first",
    "algorithm": "overlap run --algorithm NAME, or run(..., algorithm='NAME')",
    "streams": "stream=rank.stream(...), another name for each line that issues operations",
    "window": "rank.stream(name, window=NAME), or DataParallel(..., in_flight=NAME)",
    "bytes": "hook=hooks.bfloat16(), or another hook that sends less",
    "compute": "what half the time would bring there; the rest is up to you",
}


def advise(timeline: Timeline, *, step: int | None = None) -> list[Prediction]:
    """Return the best predictions of what can be changed, the largest gain first.

    Raises:
        UsageError: If the timeline is empty.
    """
    at = median_step(timeline) if step is None else step
    timeline = _around(timeline, at)
    base = Baseline(timeline, at)
    found: dict[str, tuple[int, Change]] = {}
    for change in _candidates(timeline, at):
        with suppress(UsageError):  # there is nothing of that kind to change
            gain_ns = base.gain_ns([change])
            kind = change.text.partition("=")[0]
            if gain_ns >= _WORTH * base.replayed.wall_ns and (kind not in found or gain_ns > found[kind][0]):
                found[kind] = gain_ns, change
    best = sorted(found.values(), key=lambda each: (-each[0], each[1].text))[:BEST]
    return [predict(timeline, [change], base=base) for _, change in best]


def _around(timeline: Timeline, step: int | None) -> Timeline:
    """Return the steps before and after one: to replay all of a long run for each change would take minutes."""
    steps = timeline.steps()
    if step not in steps or len(steps) <= 2 * _STEPS_AROUND + 1:
        return timeline
    place = min(max(steps.index(step), _STEPS_AROUND), len(steps) - 1 - _STEPS_AROUND)
    kept = steps[place - _STEPS_AROUND : place + _STEPS_AROUND + 1]
    return replace(timeline, spans=timeline.chosen(np.isin(timeline.columns.step, kept)))


def _candidates(timeline: Timeline, at: int | None) -> Iterator[Change]:
    yield parse_change("stragglers=none")
    yield parse_change("awaits=late")
    total = _reduced_bytes(timeline, at)
    for size in _SIZES:
        if parse_bytes(size, argument="size") * _BUCKETS_AT_MOST >= total:
            yield parse_change(f"bucket_bytes={size}")
    yield parse_change("order=forward")
    if (better := best_algorithm(timeline)) is not None:
        yield parse_change(f"algorithm={better}")
    yield parse_change("streams=apart")
    for window in _WINDOWS:
        yield parse_change(f"window={window}")
    yield parse_change("bytes=0.5x")
    longest: dict[str, int] = {}
    for link in critical_path(timeline, step=at):
        if link.doing == "compute" and "'" not in link.name:
            longest[link.name] = longest.get(link.name, 0) + link.duration_ns
    for name in sorted(longest, key=lambda name: (-longest[name], name))[:_COMPUTES]:
        yield parse_change(f"compute '{name}'=0.5x")


def _reduced_bytes(timeline: Timeline, at: int | None) -> int:
    """Return what a rank reduces in a step, or in all of the run."""
    spans = timeline.for_rank(timeline.ranks()[0])
    infos = [span.info for span in spans if span.info and (at is None or span.step == at)]
    return sum(info.nbytes for info in infos if info.op == "all_reduce")


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
