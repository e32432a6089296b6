"""Facts on timelines: traces of overlap, and of other tools except PyTorch's profiler."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from ..errors import UsageError
from ..ranklist import named_ranks
from ..timeline.columnar import Mask, SpanColumns
from ..timeline.measure.activity import Activity
from ..timeline.measure.metrics import Breakdown, breakdowns_by_step, measure_windows
from ..timeline.measure.operations import sum_operations_in_windows
from ..timeline.measure.steps import issued_in_step, keep_ranks_with_steps, median_step, rank_windows
from ..timeline.spans import CUT, ORIGIN, STARVED, Timeline
from .advice import MANY_CALLS
from .bounds import RankStep
from .causes import COMM, COMPUTE, COPY, LOOP, QUEUE, UNKNOWN, WAIT, WIRE
from .facts import Facts
from .judgement import explain_facts
from .oddities import describe_oddities
from .pieces import Pieces
from .ranks import Traffic, late_ranks
from .report import Advice, Why
from .spans import pieces_of_spans


def explain_timeline(timeline: Timeline, *, step: int | None = None) -> Why:
    """Return the report on a step of a timeline.

    Args:
        timeline: The run.
        step: The step; None: the median one, or the whole run if no steps are recorded.

    Raises:
        UsageError: No rank has recorded the step, or there is no span.
    """
    if step is not None and step not in timeline.steps():
        raise UsageError(f"why: no step {step} is recorded; leave out the step to have one chosen")
    shown = median_step(timeline) if step is None else step
    activity = Activity(timeline, keep_ranks_with_steps(rank_windows(timeline, step=shown)))
    return explain_facts(timeline_facts(timeline, activity, pieces_of_spans(activity), step=shown, whole=True))


def timeline_facts(
    timeline: Timeline, activity: Activity, pieces: Pieces, *, step: int | None, whole: bool = False
) -> Facts:
    """Return the facts on a step of a timeline, or on the whole run if `step` is None.

    Args:
        timeline: The run.
        activity: What its ranks do in the windows of the step. Ranks without steps do not count if others have them.
        pieces: The pieces of the ranks that count.
        step: The step; None: the whole run.
        whole: Whether the facts are for a whole report, with the times of all steps, or only for the sentence.
    """
    counted = keep_ranks_with_steps(activity.windows)
    shown = {row.rank: row for row in keep_ranks_with_steps(measure_windows(activity))}
    steps = breakdowns_by_step(timeline) if whole else {}
    every = {number: {row.rank: row for row in rows if row.rank in shown} for number, rows in steps.items()}
    every[step] = shown
    issued = issued_in_step(timeline, counted, step)
    last_ns = _last_operation_exposed_ns(timeline.columns, issued, pieces)
    # The sentence alone needs the operations only if there are many: then it may advise to join them.
    has_traffic = whole or (step is not None and int(issued.sum()) >= MANY_CALLS * len(counted))
    foreign = ORIGIN in timeline.meta
    # Ranks are missing, so it is unknown when they arrived at operations.
    partial = foreign and len(timeline.ranks()) < timeline.world_size
    costs = {}
    for at, rows in every.items():
        costs[at] = {
            rank: RankStep(costs_ns=_cost_by_cause(row, partial=partial), transfer_ns=row.transfer_ns)
            for rank, row in rows.items() if row.wall_ns
        }  # fmt: skip
    # The last operation is measured only for the shown step.
    costs[step] = {rank: replace(each, last_ns=last_ns[rank]) for rank, each in costs[step].items()}
    sites = pieces.sites_by_cause()
    if partial:
        sites[COMM] = [*sites.pop(WIRE, ()), *sites.pop(WAIT, ())]
    return Facts(
        origin=timeline.meta.get(ORIGIN, "overlap"), world_size=timeline.world_size, step=step,
        walls_ns={at: max((row.wall_ns for row in rows.values()), default=0) for at, rows in every.items()},
        costs=costs,
        sites=sites, late_by_step={step: late_ranks(pieces, step)},
        traffic=_traffic_by_line(timeline, activity) if has_traffic else (),
        communicates=any(row.comm_ns for row in shown.values()), ours=not foreign,
        hideable_ns=None if step is None else _hideable_ns(timeline.columns, activity, pieces),
        torch="torch" in timeline.meta, first=_starved_advice(timeline), cut=CUT in timeline.meta,
        unknown="other ranks are not in the trace" if partial else "",
        undecided=[*filter(None, [describe_oddities(timeline)]), *_hidden_question(timeline, shown)],
    )  # fmt: skip


def _hidden_question(timeline: Timeline, rows: dict[int, Breakdown]) -> list[str]:
    """Return the question what was hidden, in a list, if communication is recorded and no compute; otherwise []."""
    if any(row.compute_ns for row in rows.values()) or not any(row.comm_ns for row in rows.values()):
        return []
    how = "; overlap.torch.record(model, optimizer) records that of modules" if "torch" in timeline.meta else ""
    return [f"what was hidden, as no compute is recorded{how}"]


def _starved_advice(timeline: Timeline) -> Advice | None:
    """Return the advice for ranks whose computes had less than a core, or None if no such rank is recorded."""
    # Such as "0:0.25 3:0.4": rank 3 had no processor for 40 % of its computing time.
    shares = dict(each.split(":", 1) for each in timeline.meta.get(STARVED, "").split())
    if not shares:
        return None
    ranks, most = sorted(map(int, shares)), max(map(float, shares.values()))
    evidence = (
        f"computes of {named_ranks(ranks)} had less than a core: for up to {most:.0%} of their "
        "time they could run and had no processor"
    )
    return Advice(
        cause=COMPUTE, change="first run fewer ranks, threads or other programs on this machine", place="",
        evidence=evidence, gain_text="not decidable: times with a core for each rank are not recorded",
    )  # fmt: skip


def _cost_by_cause(row: Breakdown, *, partial: bool) -> dict[str, int]:
    """Return the nanoseconds of a rank by cause, without causes of 0; they add up to the wall time.

    With `partial`, ranks are missing, and exposed time is not divided into waiting and wire.
    """
    exposed = {COMM: row.exposed_ns} if partial else {WAIT: row.waiting_ns, WIRE: row.wire_ns}
    costs = {COMPUTE: row.compute_ns} | exposed
    costs |= {LOOP: row.kept_ns, COPY: row.copy_ns, QUEUE: row.queued_ns, UNKNOWN: row.idle_ns}
    return {cause: ns for cause, ns in costs.items() if ns}


def _last_operation_exposed_ns(columns: SpanColumns, issued: Mask, pieces: Pieces) -> Counter[int]:
    """Count, by rank, the exposed nanoseconds in which bytes of its last operation moved; 0 for ranks without one.

    Operations without bytes do not count.
    """
    called_ns, moved_ns, found = columns.called_ns, columns.moved_ns, Counter[int]()
    for rank, rows in columns.rows_by_rank(issued & (columns.nbytes > 0)).items():
        # The operation that was called last; of several called at once, the one that ended last.
        last = rows[np.lexsort((columns.end_ns[rows], called_ns[rows]))[-1]]
        moving = pieces.cut_to_rank_window(rank, (int(moved_ns[last]), int(columns.end_ns[last])))
        found[rank] = moving.cost_by_cause().get(WIRE, 0)
    return found


def _hideable_ns(columns: SpanColumns, activity: Activity, pieces: Pieces) -> int | None:
    """Return how much exposed transfer time the computes that were issued after it could hide, averaged over the ranks.

    None if no compute is recorded. Cost: a sort of the computes and of the exposed transfers.
    """
    computes, windows = columns.is_kind("compute"), {each.rank: each for each in activity.windows}
    if not computes.any():
        return None
    by_rank, called_ns, hideable_ns = columns.rows_by_rank(computes), columns.called_ns, 0
    for rank, exposed in pieces.take(pieces.is_cause(COMM, WIRE)).by_rank():
        rows = by_rank.get(rank, np.empty(0, np.int64))
        starts_ns = columns.start_ns[rows]
        rows = rows[(windows[rank].start_ns <= starts_ns) & (starts_ns < windows[rank].end_ns)]
        rows = rows[np.argsort(called_ns[rows])]
        later_ns = np.cumsum((columns.end_ns[rows] - columns.start_ns[rows])[::-1])[::-1]
        exposed_ns = np.append(0, np.cumsum(exposed.lengths_ns))
        before_ns = exposed_ns[np.searchsorted(exposed.end_ns, called_ns[rows], side="right")]
        hideable_ns += int(np.minimum(later_ns, before_ns).max(initial=0))
    return round(hideable_ns / len(windows))


def _traffic_by_line(timeline: Timeline, activity: Activity) -> list[Traffic]:
    """Return the traffic of a step by operation and line, averaged over the ranks that count, most exposed first."""
    ranks = len(activity.windows)
    return [
        Traffic(
            op=f"{row.op} at {row.call_site}" if row.call_site else row.op, group="", group_size=row.ranks,
            calls=round(row.count / ranks), nbytes=row.nbytes // ranks, total_ns=row.transfer_ns // ranks,
            exposed_ns=row.exposed_ns // ranks, algorithm_gb_s=row.algbw_bytes_per_s / 1e9,
            bus_gb_s=row.busbw_bytes_per_s / 1e9, link_gb_s=None, waits_at_least_ns=0,
        )
        for row in sum_operations_in_windows(timeline, activity)
    ]  # fmt: skip
