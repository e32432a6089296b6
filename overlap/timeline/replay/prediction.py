"""Predictions: verdicts on a recorded run and on its replay with changes; and advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import TypeAlias

import numpy as np

from ...errors import UsageError
from ...notice import notify
from ...units import figure, figure_unit, format_bytes, parse_bytes
from ..measure.critical_path import critical_path
from ..measure.metrics import breakdowns, median_step, windows_of
from ..spans import ORIGIN, Timeline
from ..why.verdict import Verdict, verdict_of
from .buckets import bucket_series, least_bytes
from .changes import Change, apply_changes, parse_change
from .graph import Graph, Node
from .inference import graph_of
from .machine import best_algorithm
from .simulation import run_graph
from .transfers import fit_transfers, transfer_bytes
from .updates import hold_ups


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
    timeline: Timeline  # timeline of the replay with the changes
    # Whether it holds only if programs await some operations later: those that share a bucket with a later gradient
    awaits_later: bool = False

    @property
    def gain_ns(self) -> int:
        """Time by which the changes make the step shorter; negative if it gets longer."""
        return self.replayed.wall_ns - self.predicted.wall_ns

    @property
    def gain_share(self) -> float:
        """Gain as part of the replayed step without changes; 0.0 for an empty step."""
        return self.gain_ns / self.replayed.wall_ns if self.replayed.wall_ns else 0.0

    def __str__(self) -> str:
        unit, unit_ns = figure_unit(self.measured.wall_ns)
        texts = [figure(ns, unit_ns) for ns in (self.measured.wall_ns, self.predicted.wall_ns)]
        between = f" ({span})" if (span := self.range_text(unit_ns)) else ""
        return (
            f"with {', '.join(change.text for change in self.changes)} a step would take {texts[1]} {unit}{between} "
            f"instead of {texts[0]} {unit}: {-self.gain_share:+.1%}{f'; {AWAITS_LATER}' if self.awaits_later else ''}"
        )

    def range_text(self, unit_ns: int) -> str:
        """Return text such as "from 3.1 to 3.4" for the bounds of the step in a unit; "" if both read the same."""
        least, most = (figure(ns, unit_ns) for ns in (self.least_ns, self.most_ns))
        return f"from {least} to {most}" if least != most else ""


AWAITS_LATER = "if the program awaits a gradient only once the last one of its bucket is there"


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
        graph = graph_of(timeline)
        alike = [fit for fit in fit_transfers(graph).values() if fit.sizes == 1]
        # Part of a transfer that may be latency, where a trace leaves that open. Of small ones nearly all is: at the
        # pace of their bytes a large one would take minutes
        shares = ((1.0,) if fit.latency_ns else (0.0, 1.0) for fit in alike)
        self.latency_shares: frozenset[float] = frozenset().union(*shares)
        self.replayed: Verdict = verdict_of(run_graph(graph, timeline, likely=True), step=self.step)

    def gain_ns(self, changes: Sequence[Change]) -> int:
        """Return by how much the step gets shorter, for a third of the work of a prediction.

        Raises:
            UsageError: If a change finds nothing to change.
        """
        return self.replayed.wall_ns - self.wall_ns(_changed_graph(self.timeline, changes), likely=True)

    def new_graph(self) -> Graph:
        """Return a new graph of the run without changes."""
        return graph_of(self.timeline)

    def wall_ns(self, graph: Graph, *, likely: bool) -> int:
        """Return how long the step takes in the replay of a changed graph, on the rank that takes longest."""
        windows = windows_of(run_graph(graph, self.timeline, likely=likely), self.step)
        return max(end_ns - start_ns for start_ns, end_ns in windows.values())


def predict(
    timeline: Timeline, changes: Sequence[Change], *, step: int | None = None, base: Baseline | None = None
) -> Prediction:
    """Return the verdicts on a run and on its replay with changes, and the bounds of the changed step.

    Args:
        timeline: The recorded run.
        changes: Applied together; their order does not matter, except among changes of one kind.
        step: The step to look at; None for the whole run, or its median step if it has steps.
        base: The baseline of this timeline and step, if it is known already.

    Raises:
        UsageError: If the timeline is empty, or a change finds nothing to change.
    """
    base = base or Baseline(timeline, step)
    measured, replayed, base_step = base.measured, base.replayed, base.step
    graph = _changed_graph(timeline, changes)
    careful = run_graph(graph, timeline, likely=True)
    others_ns = [base.wall_ns(graph, likely=False)]
    for share in () if graph.modelled else base.latency_shares:
        others_ns.append(base.wall_ns(_changed_graph(timeline, changes, latency_share=share), likely=True))
    predicted = verdict_of(careful, step=base_step)
    if graph.recut:
        predicted = replace(predicted, small=None)  # the spans are still those of the operations before
    off_ns = abs(replayed.wall_ns - measured.wall_ns)
    walls_ns = predicted.wall_ns, *others_ns
    return Prediction(
        changes=tuple(changes),
        measured=measured,
        replayed=replayed,
        predicted=predicted,
        least_ns=min(walls_ns) - off_ns,
        most_ns=max(walls_ns) + off_ns,
        timeline=careful,
        awaits_later=graph.recut and graph.awaits_later,
    )


def _changed_graph(timeline: Timeline, changes: Sequence[Change], *, latency_share: float | None = None) -> Graph:
    """Return the graph of a run after some changes; a latency share replaces what the trace leaves open."""
    graph = graph_of(timeline)
    graph.latency_share = latency_share
    apply_changes(graph, changes)
    return graph


_MAX_BUCKETS = 128
"""Buckets in a step at most: more are not tried, because each is a message that has to be started."""
_STEPS_AROUND = 4
"""Steps that are replayed before the shown one, and as many after it, at most."""
_MAX_SPANS = 20_000
"""Spans of the replayed steps together, at most: to infer and run these takes a second or two."""
_CLOSER_LOOK_FACTOR = 3
"""Time to predict a change, as a multiple of the time to try it: a prediction has up to three replays."""
MAX_PREDICTIONS = 5
"""Pieces of advice that are given at most."""
_WORTH_SHARE = 0.005
"""Part of a step: less is no gain."""
_SIZES = ("256KiB", "1MiB", "4MiB", "8MiB", "25MiB", "100MiB")
_WINDOWS = ("8", "2", "32")  # of those that are alike, the one that streams have by default
_COMPUTES = 1  # of the critical path, tried at half their time
_SHORT = frozenset({"float16", "bfloat16"})

Progress: TypeAlias = Callable[[int, int, str], object]
"""Takes how many pieces of work are done, how many there are, and what comes next."""


def advise(
    timeline: Timeline, *, step: int | None = None, progress: Progress | None = None, within_s: float = float("inf")
) -> list[Prediction]:
    """Try all kinds of changes and return the best predictions, the largest gain first.

    Args:
        timeline: The recorded run.
        step: The step to look at; None for the median one, or the whole run if it has no steps.
        progress: Told before each replay.
        within_s: Try no more changes after two thirds of this time, and do not begin to look closer at one that
            would end after all of it; the best one is looked at in any case.

    Raises:
        UsageError: If the timeline is empty.
    """
    report, begun_s = progress or (lambda done, total, what: None), monotonic()
    shown_step = median_step(timeline) if step is None else step
    timeline = neighbours(timeline, shown_step)
    report(0, 0, f"replaying {_name_steps(shown_step, timeline)} as it was")
    base = Baseline(timeline, shown_step)
    results: dict[str, tuple[int, Change, float]] = {}  # with how long it took to try
    candidates = list(_candidates(timeline, base))
    for number, change in enumerate(candidates):
        since_s = monotonic()
        if since_s - begun_s > within_s * 2 / 3:
            untried = ", ".join(candidate.text for candidate in candidates[number:])
            notify(f"after {within_s * 2 / 3:.0f} s, these are not tried; --what-if tries one: {untried}")
            break
        report(number, len(candidates) + MAX_PREDICTIONS, f"replaying it with {change.text}")
        with suppress(UsageError):  # the run has nothing of this kind to change
            gain_ns = base.gain_ns([change])
            kind = change.text.partition("=")[0]
            if gain_ns > _bound_ns(timeline, shown_step, kind):
                continue
            if gain_ns >= _WORTH_SHARE * base.replayed.wall_ns and (kind not in results or gain_ns > results[kind][0]):
                results[kind] = gain_ns, change, monotonic() - since_s
    best = sorted(results.values(), key=lambda candidate: (-candidate[0], candidate[1].text))[:MAX_PREDICTIONS]
    predictions: list[Prediction] = []
    for number, (_, change, tried_s) in enumerate(best):
        if predictions and monotonic() - begun_s + _CLOSER_LOOK_FACTOR * tried_s > within_s:
            untried = ", ".join(candidate.text for _, candidate, _ in best[number:])
            notify(
                f"after {monotonic() - begun_s:.0f} s, these gain less and are left out; --what-if tries one: {untried}"
            )
            break
        report(len(candidates) + number, len(candidates) + len(best), f"how sure the gain of {change.text} is")
        with suppress(UsageError):  # without probable waits it is undecidable
            predictions.append(predict(timeline, [change], base=base))
    return predictions


def _bound_ns(timeline: Timeline, step: int | None, kind: str) -> float:
    """Return the most that a change of some kind can gain.

    In traces of other tools, which show no awaits, replays may shorten more by a change of communication than was
    exposed: such a gain is not given.
    """
    if ORIGIN not in timeline.meta or kind.startswith(_NOT_OF_COMMUNICATION):
        return float("inf")
    return max(row.exposed_ns for row in breakdowns(timeline, step=step))


_NOT_OF_COMMUNICATION = ("compute", "stragglers", "loop", "ranks")


def _name_steps(step: int | None, timeline: Timeline) -> str:
    """Return the replayed steps and their number of spans as text."""
    spans = f"{len(timeline.spans):,} spans"
    if step is None:
        return f"the whole run ({spans})"
    others = len(timeline.steps()) - 1
    return f"step {step} and {others} other{'s' * (others != 1)} ({spans})" if others else f"step {step} ({spans})"


def neighbours(timeline: Timeline, step: int | None) -> Timeline:
    """Return the steps around one, as many as advice and predictions on it replay."""
    return steps_around(timeline, step, most_spans=_MAX_SPANS, steps=_STEPS_AROUND)


def steps_around(timeline: Timeline, step: int | None, *, most_spans: int, steps: int) -> Timeline:
    """Return the part of a long run around one step, because replays of all steps would take minutes.

    Args:
        timeline: The run.
        step: Is kept in any case; without it, all is.
        most_spans: As many steps before it and after it are kept as have so many spans altogether.
        steps: At most so many before it, and after it.
    """
    recorded, columns = timeline.steps(), timeline.columns
    if step not in recorded:
        return timeline
    spans = dict(zip(*(found.tolist() for found in np.unique(columns.step, return_counts=True)), strict=True))
    place, reach = recorded.index(step), min(steps, len(recorded))
    while True:
        first = max(min(place - reach, len(recorded) - 2 * reach - 1), 0)
        chosen_steps = recorded[first : first + 2 * reach + 1]
        if not reach or sum(spans[each] for each in chosen_steps) <= most_spans:
            break
        reach -= 1
    if len(chosen_steps) == len(recorded):
        return timeline
    inside = np.isin(columns.step, chosen_steps)
    window = columns.start_ns[inside].min(), columns.end_ns[inside].max()
    loops = columns.is_kind("program") & (columns.start_ns < window[1]) & (columns.end_ns > window[0])
    return replace(timeline, spans=timeline.chosen(inside | loops))


def _candidates(timeline: Timeline, base: Baseline) -> Iterator[Change]:
    """Yield the changes to try; changes of buckets come first where a step has many small operations."""
    kinds = (_bucket_candidates, _other_candidates) if base.measured.small else (_other_candidates, _bucket_candidates)
    for kind in kinds:
        yield from kind(timeline, base)


def _bucket_candidates(timeline: Timeline, base: Baseline) -> Iterator[Change]:
    """Yield changes of the bucket size, ascending, up to one bucket for each step; none without all-reduces."""
    graph = base.new_graph()
    if reduced := _largest_series(graph, base.step, timeline.ranks()[0]):
        total = sum(map(transfer_bytes, reduced))
        least = max(least_bytes(graph), total / _MAX_BUCKETS)
        for size in _SIZES:
            nbytes = parse_bytes(size, argument="size")
            if nbytes >= least:
                become = f"become{'s' * (len(reduced) == 1)} buckets in the order of the gradients"
                yield _described_change(f"bucket_bytes={size}", f"{_describe_all_reduces(reduced)} {become}")
            if nbytes >= total:
                return  # of all that are larger, a step has one bucket as well


def _other_candidates(timeline: Timeline, base: Baseline) -> Iterator[Change]:
    """Yield the changes to try that are not of buckets, some described by their cause in this run."""
    step, verdict = base.step, base.measured
    kept = verdict.kept
    late = [f"rank {rank} is late: {cause}" for rank, cause, _ in verdict.blamed() if rank is not None]
    yield _described_change("stragglers=none", late[0] if late else "")
    off = [f"rank {cause.rank} computes at {cause.call_site} beside the event loop" for cause in kept[:1]]
    yield _described_change("loop=free", off[0] if off else "")
    barriers = _barrier_line(timeline, step)
    yield _described_change("barriers=none", f"no rank waits at the barrier at {barriers}" if barriers else "")
    if not _in_pipeline(timeline, step):
        yield parse_change("awaits=late")
    if not verdict.torch:  # whose programs have no means of these
        held = hold_ups(base.new_graph())
        yield _described_change("updates=late", held[0].advice if held else "")
        yield parse_change("order=forward")
        yield parse_change("streams=apart")
    if (better := best_algorithm(timeline)) is not None:
        yield parse_change(f"algorithm={better}")
    if timeline.clock == "virtual":  # elsewhere, what operations take from each other is not known well enough
        for window in _WINDOWS:
            yield parse_change(f"window={window}")
    if not _moves_mostly_16_bit(timeline):
        yield parse_change("bytes=0.5x")
    longest: dict[str, int] = {}
    for link in critical_path(timeline, step=step):
        if link.doing == "compute" and "'" not in link.name:
            longest[link.name] = longest.get(link.name, 0) + link.duration_ns
    for name in sorted(longest, key=lambda name: (-longest[name], name))[:_COMPUTES]:
        yield parse_change(f"compute '{name}'=0.5x")


def _described_change(text: str, what: str) -> Change:
    """Return a change, described by `what` unless that is ""."""
    change = parse_change(text)
    return replace(change, what=what) if what else change


def _largest_series(graph: Graph, at: int | None, first: int) -> list[Node]:
    """Return the all-reduces of a rank in a step that could share buckets, of those that carry most bytes; or none."""
    every = (nodes for nodes in bucket_series(graph).values() if first in nodes[0].ranks)
    mine = (nodes for nodes in every if at is None or nodes[0].span.step == at)
    return max(mine, key=lambda nodes: sum(map(transfer_bytes, nodes)), default=[])


def _describe_all_reduces(nodes: Sequence[Node]) -> str:
    """Return text such as "32 all_reduces of 1 MiB at train.py:14": the mean size, or the largest if they differ."""
    sizes, places = [*map(transfer_bytes, nodes)], dict[str, int]()
    for node, nbytes in zip(nodes, sizes, strict=True):
        place = node.info.call_site if node.info else ""
        places[place] = places.get(place, 0) + nbytes
    alike, largest = max(sizes) < 2 * min(sizes), format_bytes(max(sizes))
    size = format_bytes(sum(sizes) // len(sizes)) if alike else f"up to {largest}"
    place = max(places, key=lambda place: places[place]) or "an unknown place"
    return f"{len(nodes):,} all_reduce{'s' * (len(nodes) != 1)} of {size} at {place}"


def _barrier_line(timeline: Timeline, at: int | None) -> str:
    """Return the line with most barriers of the first rank in a step, or in the whole run; "" without barriers."""
    mine = timeline.columns.is_kind("comm") & (timeline.columns.rank == timeline.ranks()[0])
    infos = [span.info for span in timeline.chosen(mine) if span.info and (at is None or span.step == at)]
    places = Counter(info.call_site or "an unknown place" for info in infos if info.op == "barrier")
    return places.most_common(1)[0][0] if places else ""


def _in_pipeline(timeline: Timeline, at: int | None) -> bool:
    """Whether a step has messages between the stages of a `Pipeline`, whose waits the program cannot move."""
    messages = timeline.chosen(timeline.columns.is_kind("comm"))
    return any(span.role == "stage" for span in messages if at is None or span.step == at)


def _moves_mostly_16_bit(timeline: Timeline) -> bool:
    """Whether at least half of the bytes already travel as 16-bit numbers."""
    columns = timeline.columns
    short = np.isin(columns.dtype, [number for number, text in enumerate(columns.texts) if text in _SHORT])
    return bool(columns.nbytes[short].sum() >= columns.nbytes.sum() / 2)
