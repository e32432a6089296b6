"""Predictions: the verdict on a recorded run beside that on its replay with changes; and advice on what to change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from ...errors import UsageError
from ...units import figure, figure_unit, parse_bytes
from ..measure.critical_path import critical_path
from ..measure.metrics import median_step
from ..measure.verdict import Verdict, verdict_of
from ..spans import Timeline
from .changes import Change, apply_changes, parse_change
from .graph import Graph
from .inference import graph_of
from .machine import best_algorithm
from .simulation import run_graph
from .transfers import fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A recorded run and its replay with changes."""

    changes: tuple[Change, ...]
    measured: Verdict  # On the recorded run
    replayed: Verdict  # On its replay without the changes, which shows how good the replay is
    predicted: Verdict  # On its replay with the changes, probable waits included
    # The shortest and the longest step, with and without probable waits, and whether or not the time of transfers
    # depends on their size where only one size was seen. Both allow for as much as the replay is off.
    least_ns: int
    most_ns: int
    timeline: Timeline  # Of the replay with the changes

    @property
    def gain_ns(self) -> int:
        """Time by which the step gets shorter."""
        return self.replayed.wall_ns - self.predicted.wall_ns

    @property
    def gain_share(self) -> float:
        """Gain as part of the step."""
        return self.gain_ns / self.replayed.wall_ns if self.replayed.wall_ns else 0.0

    def __str__(self) -> str:
        unit, unit_ns = figure_unit(self.measured.wall_ns)
        texts = [figure(ns, unit_ns) for ns in (self.measured.wall_ns, self.predicted.wall_ns)]
        span = [figure(ns, unit_ns) for ns in (self.least_ns, self.most_ns)]
        between = f" (from {span[0]} to {span[1]})" if span[0] != span[1] else ""
        return (
            f"with {', '.join(change.text for change in self.changes)} a step would take {texts[1]} {unit}{between} "
            f"instead of {texts[0]} {unit}: {-self.gain_share:+.1%}"
        )


class Baseline:
    """The verdicts that predictions of one run are compared with.

    Args:
        timeline: The recorded run.
        step: The step to look at; None for the median one, or the whole run if it has no steps.

    Raises:
        UsageError: If the timeline is empty.
    """

    def __init__(self, timeline: Timeline, step: int | None) -> None:
        self.timeline = timeline
        self.step: int | None = median_step(timeline) if step is None else step
        self.measured: Verdict = verdict_of(timeline, step=self.step)
        self.replayed: Verdict = verdict_of(run_graph(graph_of(timeline), timeline, likely=True), step=self.step)

    def gain_ns(self, changes: Sequence[Change]) -> int:
        """Return by how much the step gets shorter, for a third of the work of a prediction.

        Raises:
            UsageError: If a change finds nothing to change.
        """
        return self.replayed.wall_ns - self.judged(_changed(self.timeline, changes)).wall_ns

    def judged(self, graph: Graph, *, likely: bool = True) -> Verdict:
        """Return the verdict on the replay of a changed graph."""
        return verdict_of(run_graph(graph, self.timeline, likely=likely), step=self.step)


def predict(
    timeline: Timeline, changes: Sequence[Change], *, step: int | None = None, base: Baseline | None = None
) -> Prediction:
    """Replay a run with changes.

    Args:
        timeline: The recorded run.
        changes: Applied together; their order does not matter, except among changes of one kind.
        step: The step to look at; None for the whole run, or its median step if it has steps.
        base: The baseline of this timeline and step, if it is known already.

    Raises:
        UsageError: If the timeline is empty, or a change finds nothing to change.
    """
    base = base or Baseline(timeline, step)
    measured, replayed, at = base.measured, base.replayed, base.step
    graph = _changed(timeline, changes)
    careful = run_graph(graph, timeline, likely=True)
    others = [base.judged(graph, likely=False)]
    if not graph.modelled and any(fit.sizes == 1 for fit in fits(graph).values()):
        others.append(base.judged(_changed(timeline, changes, latency_share=1.0)))
    predicted = verdict_of(careful, step=at)
    off_ns = abs(replayed.wall_ns - measured.wall_ns)
    walls = predicted.wall_ns, *(other.wall_ns for other in others)
    return Prediction(
        changes=tuple(changes),
        measured=measured,
        replayed=replayed,
        predicted=predicted,
        least_ns=min(walls) - off_ns,
        most_ns=max(walls) + off_ns,
        timeline=careful,
    )


def _changed(timeline: Timeline, changes: Sequence[Change], *, latency_share: float = 0.0) -> Graph:
    graph = graph_of(timeline)
    graph.latency_share = latency_share
    apply_changes(graph, changes)
    return graph


_BUCKETS_AT_MOST = 128
"""Buckets in a step at most: more are not tried, because each is a message that has to be started."""
_STEPS_AROUND = 4
"""Steps that are replayed before the one that is looked at, and after it."""
BEST = 5
"""Pieces of advice that are given at most."""
_WORTH = 0.005
"""Part of a step: less is no gain."""
_SIZES = ("256KiB", "1MiB", "4MiB", "25MiB", "100MiB")
_WINDOWS = ("8", "2", "32")  # of those that are alike, the one that streams have by default
_COMPUTES = 1  # of the critical path, tried at half their time


def advise(timeline: Timeline, *, step: int | None = None) -> list[Prediction]:
    """Try all kinds of changes and return the best predictions, the largest gain first.

    Raises:
        UsageError: If the timeline is empty.
    """
    at = median_step(timeline) if step is None else step
    timeline = _around(timeline, at)
    base = Baseline(timeline, at)
    found: dict[str, tuple[int, Change]] = {}
    for change in _candidates(timeline, at):
        with suppress(UsageError):  # the run has nothing of this kind to change
            gain_ns = base.gain_ns([change])
            kind = change.text.partition("=")[0]
            if gain_ns >= _WORTH * base.replayed.wall_ns and (kind not in found or gain_ns > found[kind][0]):
                found[kind] = gain_ns, change
    best = sorted(found.values(), key=lambda each: (-each[0], each[1].text))[:BEST]
    return [predict(timeline, [change], base=base) for _, change in best]


def _around(timeline: Timeline, step: int | None) -> Timeline:
    """Return the steps around one: to replay all of a long run for each change would take minutes."""
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
    """Return the bytes that a rank reduces in a step, or in all of the run."""
    spans = timeline.for_rank(timeline.ranks()[0])
    infos = [span.info for span in spans if span.info and (at is None or span.step == at)]
    return sum(info.nbytes for info in infos if info.op == "all_reduce")
