"""Measured and predicted beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..axis import figure, figure_unit
from ..columns import columns
from ..metrics import median_step
from ..spans import Timeline
from ..verdict import Verdict, verdict_of
from .changes import Change, applied
from .graph import Graph
from .inference import graph_of
from .simulation import run_graph
from .wires import fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What would come of a change."""

    changes: tuple[Change, ...]  # What is different
    measured: Verdict  # The verdict of the run
    replayed: Verdict  # That of its replay without the changes: how good the replay is
    predicted: Verdict  # That of the replay with them, in which what is likely to be waited for is waited for
    # The shortest step, whether only that is waited for which was seen to be waited for, or also what is likely to be;
    # and whether what transfers of one size take depends on the size or not.
    least_ns: int
    most_ns: int  # The longest; both allow for as much as the replay is off
    timeline: Timeline  # Of the replay with the changes

    @property
    def gain_ns(self) -> int:
        """How much shorter the step gets."""
        return self.replayed.wall_ns - self.predicted.wall_ns

    @property
    def gain_share(self) -> float:
        """The same as part of the step."""
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
    """What predictions of one run are held against.

    Args:
        timeline: What was measured.
        step: The step to look at; None for the median one, or the whole run if it has no steps.

    Raises:
        UsageError: If the timeline is empty.
    """

    def __init__(self, timeline: Timeline, step: int | None) -> None:
        self.timeline = timeline
        self.step = median_step(timeline) if step is None else step
        self.measured = verdict_of(timeline, step=self.step)
        self.replayed = verdict_of(run_graph(graph_of(timeline), timeline, likely=True), step=self.step)

    def gain_ns(self, changes: Sequence[Change]) -> int:
        """Return how much shorter the step gets: a third of the work of a prediction.

        Raises:
            UsageError: If a change finds nothing to change.
        """
        return self.replayed.wall_ns - self.judged(_changed(self.timeline, changes)).wall_ns

    def judged(self, graph: Graph, *, likely: bool = True) -> Verdict:
        """Replay a changed graph and say what it comes to."""
        return verdict_of(run_graph(graph, self.timeline, likely=likely), step=self.step)


def predict(
    timeline: Timeline, changes: Sequence[Change], *, step: int | None = None, base: Baseline | None = None
) -> Prediction:
    """Replay a run with changes.

    Args:
        timeline: What was measured.
        changes: What is to be different.
        step: The step to look at; None for the whole run, or its median step if it has steps.
        base: Of this timeline and step, if it is known already.

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
    applied(graph, changes)
    return graph


def prediction_table(one: Prediction, *, width: int) -> list[str]:
    """Write the step and the means of the ranks, as measured, replayed and predicted."""
    unit, unit_ns = figure_unit(one.measured.wall_ns)
    verdicts = (one.measured, one.replayed, one.predicted)
    rows = [("step", *(figure(verdict.wall_ns, unit_ns) for verdict in verdicts))]
    for text, name in (("compute", "compute_ns"), ("waiting for ranks", "waiting_ns"), ("on the wire", "wire_ns")):
        rows.append((text, *(figure(getattr(v, name) / max(v.ranks, 1), unit_ns) for v in verdicts)))
    heads = (f"mean of a rank/{unit}", "measured", "replayed", "predicted")
    return columns(heads, rows, width=width, words=[0])
