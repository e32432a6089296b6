"""Reports on traces of our own and of other tools: their verdict, and a change for each large loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import UsageError
from ..ranklist import named_ranks
from ..timeline.measure.metrics import Breakdown, breakdowns_by_step, median_step
from ..timeline.measure.verdict import Verdict, verdict_of
from ..timeline.spans import ORIGIN, STARVED, Timeline
from ..units import format_ns
from .advice import MAX_ADVICE, WORTH_SHARE
from .bounds import RankStep, gain
from .causes import COMM, COMPUTE, COPY, LOOP, OWN_WORDING, QUEUE, UNKNOWN, WAIT, WIRE, WORDING
from .oddities import oddities
from .report import Advice, Cause, Why, mean_costs

_AWAIT_LATE = "issue first and await at the end of the step: keep the futures in a list"
_CHANGES = {
    WAIT: "share its work out evenly, or look for what slows its host",
    WIRE: _AWAIT_LATE,
    COMM: _AWAIT_LATE,
    LOOP: "call it in a thread, trio.to_thread.run_sync in a nursery, and await that late",
    COPY: "copy in parallel with computes, on another stream of the device",
    QUEUE: "issue on another stream, rank.stream(...), or give it a larger window=",
}
"""Change of the program for each loss."""
_TORCH_CHANGES = {
    WIRE: "issue first and wait at the end of the step: async_op=True, and keep the works in a list",
    QUEUE: "issue fewer and larger operations",
}
"""Changes of programs of PyTorch, where there is another word for it."""
_LARGER = "join arrays before the call, or give DataParallel a larger bucket_bytes="
_LARGER_TORCH = "flatten tensors before the call, or give DistributedDataParallel a larger bucket_cap_mb="


def judge_timeline(timeline: Timeline, *, step: int | None = None) -> Why:
    """Return the report on a step of a timeline; without a step, on the median one, or on the whole run without steps.

    Raises:
        UsageError: No rank has recorded the step, or there is no span.
    """
    if step is not None and step not in timeline.steps():
        raise UsageError(f"why: no step {step} is recorded; leave out the step to have one chosen")
    return build_report(timeline, step=median_step(timeline) if step is None else step)


def build_report(timeline: Timeline, *, step: int | None) -> Why:
    """Return the report on a step of a timeline, or on the whole run if `step` is None."""
    verdict = verdict_of(timeline, step=step)
    rows = breakdowns_by_step(timeline)
    costs = {
        number: [(row.rank, _cost_by_cause(row, verdict)) for row in of_step if row.wall_ns]
        for number, of_step in rows.items()
    }
    mean_ns = mean_costs([cost for _, cost in costs.get(step, [])])
    total_ns = sum(mean_ns.values()) or 1
    wording = OWN_WORDING | ({UNKNOWN: WORDING[UNKNOWN]} if verdict.foreign else {})
    starved, ranks = _starved_advice(timeline), _rank_steps(timeline, rows.get(step, ()), verdict)
    return Why(
        verdict=sentence(timeline, verdict), origin=timeline.meta.get(ORIGIN, "overlap"), ranks=tuple(timeline.ranks()),
        world_size=timeline.world_size, step=step, step_ns=verdict.wall_ns,
        steps_ns={
            "all" if number is None else str(number): max((row.wall_ns for row in of_step), default=0)
            for number, of_step in rows.items()
        },
        causes=tuple(
            Cause(
                cause=cause, text=wording[cause], duration_ns=ns, share=ns / total_ns,
                places=_cause_places(verdict, cause)
            )
            for cause, ns in sorted(mean_ns.items(), key=lambda each: -each[1]) if ns
        ),
        advice=tuple([*([starved] if starved else []), *_advice(verdict, mean_ns, ranks)][:MAX_ADVICE]),
        undecided=tuple(filter(None, [oddities(timeline)])),
        costs=tuple(
            (rank, number, cause, ns)
            for number, of_step in costs.items()
            for rank, cost in of_step
            for cause, ns in cost.items()
        ),
    )  # fmt: skip


def sentence(timeline: Timeline, verdict: Verdict) -> str:
    """Return the sentence on a timeline: its verdict, after the first thing to repair if computes had no processor."""
    starved = _starved_advice(timeline)
    return f"{starved.evidence}: {starved.change}; {verdict}" if starved else str(verdict)


def _starved_advice(timeline: Timeline) -> Advice | None:
    """Return the advice for ranks whose computes had less than a core; None if none is known to."""
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


def _cost_by_cause(row: Breakdown, verdict: Verdict) -> dict[str, int]:
    """Return the costs of a rank by cause; they add up to its wall time."""
    exposed = {COMM: row.exposed_ns} if verdict.partial else {WAIT: row.waiting_ns, WIRE: row.wire_ns}
    costs = {
        COMPUTE: row.compute_ns,
        **exposed,
        LOOP: row.kept_ns,
        COPY: row.copy_ns,
        QUEUE: row.queued_ns,
        UNKNOWN: row.idle_ns,
    }
    return {cause: ns for cause, ns in costs.items() if ns}


def _cause_places(verdict: Verdict, cause: str) -> tuple[str, ...]:
    """Return at most three places of a cause from the verdict; none for causes without places."""
    if cause == WAIT:
        return tuple(f"rank {rank} ({did})" for rank, did, _ in verdict.blamed()[:3] if rank is not None)
    if cause in (WIRE, COMM):
        return tuple(str(each) for each, _ in verdict.moved()[:3])
    if cause in (LOOP, QUEUE):
        return tuple(str(each) for each in (verdict.kept if cause == LOOP else verdict.queues)[:3])
    return ()


def _rank_steps(timeline: Timeline, rows: Sequence[Breakdown], verdict: Verdict) -> list[RankStep]:
    """Return what the gains of a step rest on, for each of its ranks."""
    columns = timeline.columns
    moving = columns.is_operation & (columns.nbytes > 0)
    if verdict.step is not None:
        moving &= columns.step == verdict.step
    counts = dict(zip(*(each.tolist() for each in np.unique(columns.rank[moving], return_counts=True)), strict=True))
    return [
        RankStep(
            costs_ns=_cost_by_cause(row, verdict), transfer_ns=row.transfer_ns, operations=counts.get(row.rank, 0)
        )
        for row in rows if row.wall_ns
    ]  # fmt: skip


def _advice(verdict: Verdict, mean_ns: Mapping[str, int], ranks: Sequence[RankStep]) -> list[Advice]:
    """Return a change for each loss that is worth one, the largest first; none without steps or ranks."""
    if verdict.step is None or not verdict.ranks:
        return []
    total_ns = sum(mean_ns.values()) or 1
    changes = _CHANGES | (_TORCH_CHANGES if verdict.torch else {})
    if verdict.small is not None:
        changes = changes | dict.fromkeys((WIRE, QUEUE), _LARGER_TORCH if verdict.torch else _LARGER)
    items = []
    for cause, ns in sorted(mean_ns.items(), key=lambda each: -each[1]):
        if cause in changes and ns >= WORTH_SHARE * total_ns:
            places = _cause_places(verdict, cause)
            evidence = f"{OWN_WORDING[cause]}: {format_ns(ns)} of {format_ns(total_ns)}, mean of the ranks"
            change = gain(ranks, cause)
            items.append(Advice(
                cause=cause, change=changes[cause], place=places[0] if places else "", evidence=evidence,
                gain_ns=change.stays_ns, gain_most_ns=change.most_ns, gain_text=f"{change}",
            ))  # fmt: skip
    return items
