"""Reports on traces of our own and of other tools: their verdict, and advice from replays."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic

from ...errors import UsageError
from ..files.merge import merged
from ..files.tracefile import read_trace
from ..measure.metrics import Breakdown, breakdowns, median_step
from ..ranklist import named_ranks
from ..replay.prediction import Prediction, advise, neighbours, predict
from ..spans import ORIGIN, STARVED, Timeline
from .advice import MAX_ADVICE, MIN_STEPS, WORTH_SHARE, bound_gains
from .causes import COMM, COMPUTE, COPY, LOOP, QUEUE, UNKNOWN, WAIT, WIRE, WORDING
from .oddities import oddities
from .report import Advice, Cause, Why, mean_costs
from .verdict import Verdict, verdict_of

ADVICE_S = 20.0
"""Time for replays."""
REPLAYED_STEPS = 5
"""Steps that are replayed at most for the range of a gain."""
REPLAY_ERROR_SHARE = 0.05
"""Largest error of a replay as part of a step, against changed programs in virtual time (tests: test_replay)."""

_WORDING = WORDING | {
    COPY: "copies and sets of memory", QUEUE: "operations are queued, and nothing runs",
    UNKNOWN: "idle: nothing runs, and nothing is queued",
}  # fmt: skip


_CAUSES = {"compute": COMPUTE, "stragglers": WAIT, "barriers": WAIT, "loop": LOOP}
"""Causes that changes reduce, by their beginnings; all others reduce exposed communication."""


def judge_timeline(files: Sequence[Path], *, step: int | None = None) -> Why:
    """Return the report on the trace files of one run.

    Raises:
        UsageError: They cannot be read, or are not of one run.
    """
    timelines = [read_trace(file) for file in files]
    timeline = timelines[0] if len(timelines) == 1 else merged(timelines)
    if step is not None and step not in timeline.steps():
        raise UsageError(f"why: no step {step} is recorded; leave out the step to have one chosen")
    return build_report(timeline, step=median_step(timeline) if step is None else step)


def build_report(timeline: Timeline, *, step: int | None) -> Why:
    """Return the report on a step of a timeline, or on the whole run if `step` is None."""
    verdict = verdict_of(timeline, step=step)
    steps: list[int | None] = [*timeline.steps()] or [None]
    rows = {number: breakdowns(timeline, step=number) for number in steps}
    costs = {
        number: [(row.rank, _cost_by_cause(row, verdict)) for row in of_step if row.wall_ns]
        for number, of_step in rows.items()
    }
    mean_ns = mean_costs([cost for _, cost in costs.get(step, [])])
    total_ns = sum(mean_ns.values()) or 1
    wording = _WORDING | ({UNKNOWN: WORDING[UNKNOWN]} if verdict.foreign else {})
    starved = _starved_advice(timeline)
    first = "" if starved is None else f"{starved.evidence}: {starved.change}; "
    return Why(
        verdict=f"{first}{verdict}", origin=timeline.meta.get(ORIGIN, "overlap"), ranks=tuple(timeline.ranks()),
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
        advice=tuple([*([starved] if starved else []), *_replay_advice(timeline, verdict)][:MAX_ADVICE]),
        undecided=tuple(filter(None, [oddities(timeline)])),
        costs=tuple(
            (rank, number, cause, ns)
            for number, of_step in costs.items()
            for rank, cost in of_step
            for cause, ns in cost.items()
        ),
    )  # fmt: skip


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


def _replay_advice(timeline: Timeline, verdict: Verdict) -> list[Advice]:
    """Return the changes whose replays gain enough, as advice; none without steps or ranks."""
    if verdict.step is None or not verdict.ranks:
        return []
    items, begun_s = [], monotonic()
    for prediction in advise(timeline, step=verdict.step, within_s=ADVICE_S)[:MAX_ADVICE]:
        if prediction.gain_share >= WORTH_SHARE:
            text = prediction.changes[0].text
            change = f'{prediction.changes[0].what}: `--what-if "{text}"` of `overlap timeline` shows it'
            cause = next((cause for kind, cause in _CAUSES.items() if text.startswith(kind)), WIRE)
            least, most, gain_text = _gain_bounds(timeline, prediction, verdict.step, until_s=begun_s + ADVICE_S)
            items.append(Advice(
                cause=cause, change=change, place="", evidence=str(prediction),
                gain_least_ns=least, gain_most_ns=most, gain_text=gain_text,
            ))  # fmt: skip
    return items


def _gain_bounds(
    timeline: Timeline, first: Prediction, step: int, *, until_s: float
) -> tuple[int | None, int | None, str]:
    """Return the bounds of a change's gain, from replays of several steps, and their text; None, None for one step."""
    replays = [first]
    other_steps = sorted(
        set(timeline.steps()[1:]) - {step}, key=lambda prediction: (abs(prediction - step), prediction)
    )  # the first is cold
    for other_step in other_steps[: REPLAYED_STEPS - 1]:
        if monotonic() > until_s:
            break
        with suppress(UsageError):  # that step has nothing to change
            replays.append(predict(neighbours(timeline, other_step), first.changes, step=other_step))
    walls = [prediction.measured.wall_ns for prediction in replays]
    if len(replays) < MIN_STEPS:
        return None, None, f"not given: one step is recorded, which would be shorter by {first.gain_share:.0%}"
    off_ns = round(REPLAY_ERROR_SHARE * max(walls))
    least = min(prediction.measured.wall_ns - prediction.most_ns for prediction in replays) - off_ns
    most = max(prediction.measured.wall_ns - prediction.least_ns for prediction in replays) + off_ns
    return bound_gains([least, most], walls)
