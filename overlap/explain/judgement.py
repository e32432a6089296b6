"""The judgement on a job's profiles: which step is shown, its causes, and the sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise

from ..errors import UsageError
from ..ranklist import listed, named_ranks
from ..timeline.measure.intervals import clip, merge
from ..units import figure, figure_unit, format_bytes, format_ns
from .advice import MIN_STEPS, WORTH_SHARE, Facts, advice, is_launch_bound
from .causes import ALLOCATOR, COMM, COMPUTE, DATA, LAUNCH, PYTHON, STARTUP, SYNC, UNKNOWN, WAIT, WIRE, WORDING
from .places import top_places
from .rank import RankReport
from .ranks import LateRank, MatchedRanks, link_gb_s, sum_traffic
from .report import Cause, Why, mean_costs, median_length_step

LONGER_FACTOR = 1.5
"""Steps that take so many times the length of the shown one are named."""
BUSY_SHARE = 0.8
"""A device that computes for this part of a step is the limit."""
_LARGE_CLASS = 0.3
"""Part of the time of kernels from which on their kind is named."""
_UNDECIDED = 0.05
"""Part of a time from which on an open question is worth a sentence."""


def judge(reports: Sequence[RankReport], *, step: int | None = None) -> Why:
    """Return the report on the profiles of a job: verdict, causes, advice and open questions.

    Args:
        reports: One of each rank.
        step: The step to show; None for the median one by its longest rank.

    Raises:
        UsageError: Two are of the same rank, or no rank recorded the step.
    """
    reports = sorted(reports, key=lambda report: report.rank)
    _check_same_run(reports)
    ranks = MatchedRanks(reports=list(reports))
    ranks.divide_exposed()
    every = {number for report in reports for number in report.windows}
    common = {number for number in every if all(number in report.windows for report in reports)} or every
    walls = {
        number: max(
            high - low for report in reports if number in report.windows for low, high in [report.windows[number]]
        )
        for number in common
    }
    shown_step = median_length_step(walls) if step is None else step
    if shown_step not in walls:
        raise UsageError(f"why: no step {step} is recorded; recorded are {listed(sorted(map(_step_order, walls)))}")
    if not walls[shown_step]:
        raise UsageError(f"why: {reports[0].path}: what it records takes no time; leave it out")
    facts = _collect_facts(reports, ranks, shown_step, sorted(walls, key=_step_order))
    costs = facts.steps[shown_step]
    causes = _sorted_causes(reports, facts, costs)
    missing = ranks.missing
    undecided = [*_open_questions(facts, missing), *dict.fromkeys(note for report in reports for note in report.notes)]
    return Why(
        verdict=_verdict_sentence(facts, causes, walls[shown_step], missing, ranks.notes), origin="PyTorch profiler",
        ranks=tuple(report.rank for report in reports), world_size=max(report.world_size for report in reports),
        step=shown_step, step_ns=walls[shown_step],
        steps_ns={_step_name(number): walls[number] for number in sorted(walls, key=_step_order)},
        causes=tuple(causes), advice=tuple(advice(facts)), undecided=tuple(undecided),
        notes=(*ranks.notes, *_longer_steps_note(facts, walls)),
        traffic=tuple(asdict(each) for each in facts.traffic),
        costs=tuple(
            (report.rank, number, cause, ns)
            for report in reports
            for number, found in report.costs_ns.items()
            for cause, ns in found.items()
        ),
    )  # fmt: skip


def _step_order(step: int | None) -> int:
    """Return the sort key of a step; the whole recording, None, comes first."""
    return -1 if step is None else step


def _step_name(step: int | None) -> str:
    return "all" if step is None else str(step)


def _check_same_run(reports: Sequence[RankReport]) -> None:
    """Raise UsageError if two sorted reports are of one rank, or reports name different world sizes."""
    for one, other in pairwise(reports):
        if one.rank == other.rank:
            raise UsageError(
                f"why: {one.path} and {other.path} are both of rank {one.rank}: name the files of one run, or give "
                "the folder of one"
            )
    worlds = {report.world_size for report in reports}
    if len(worlds) > 1 and min(worlds) > 1:
        raise UsageError(
            f"why: the files are of different runs: world sizes {', '.join(map(str, sorted(worlds)))}; "
            "name the files of one run"
        )


def _collect_facts(
    reports: Sequence[RankReport], ranks: MatchedRanks, shown_step: int | None, steps: Sequence[int | None]
) -> Facts:
    """Return the facts for advice: costs of all steps and ranks, and those of the rank that lost most in the step."""
    having = [report for report in reports if shown_step in report.windows]
    worst = max(having, key=lambda report: _own_loss_ns(report, shown_step))
    exposed = clip(merge(worst.exposed), worst.windows[shown_step])
    late = [late for late in ranks.late.values() if late.step == shown_step]
    last = {
        at: max((each for each in ranks.late.values() if each.step == at), key=lambda each: each.waited_ns)
        for at in {each.step for each in ranks.late.values()}
    }
    of_ranks = {step: [report.costs_ns[step] for report in reports if step in report.costs_ns] for step in steps}
    return Facts(
        report=worst, step=shown_step, places=worst.places[shown_step], late=late, last=last,
        steps={step: mean_costs(costs) for step, costs in of_ranks.items()}, ranks=of_ranks,
        traffic=sum_traffic(
            [call for call in worst.calls if call.step == shown_step], exposed,
            link_gb_s(worst.device, worst.world_size),
        ),
    )  # fmt: skip


def _own_loss_ns(report: RankReport, step: int | None) -> int:
    """Return the time of a step that a rank lost by its own fault: not by waiting for others."""
    return sum(ns for cause, ns in report.costs_ns[step].items() if cause not in (COMPUTE, COMM, WAIT))


def _sorted_causes(reports: Sequence[RankReport], facts: Facts, costs: Mapping[str, int]) -> list[Cause]:
    """Return the causes of the shown step, the largest first, each with its share and its most expensive places."""
    total_ns = sum(costs.values()) or 1
    causes = []
    for cause, ns in sorted(costs.items(), key=lambda item: -item[1]):
        rank = f" on rank {facts.report.rank}" * (len(reports) > 1)
        places = top_places(facts.places.get(cause, ()), facts.step_ns, rank, by_function=cause == COMPUTE)
        if cause == UNKNOWN or (cause == COMM and WIRE in costs):  # the calls are those on the wire
            places = []
        elif cause in (COMM, WAIT, WIRE):
            places = [
                f"{item.calls} {item.op}" + (f", {format_bytes(item.nbytes)}" if item.nbytes else "")
                + f" ({format_ns(item.exposed_ns)} exposed)"
                for item in facts.traffic[:3] if item.exposed_ns
            ]  # fmt: skip
        if cause == WAIT:
            places = [f"{late} ({format_ns(late.waited_ns)} of others)" for late in _most_awaited(facts.late)]
        causes.append(Cause(
            cause=cause, text=WORDING[cause], duration_ns=ns, share=ns / total_ns, places=tuple(places),
        ))  # fmt: skip
    return causes


def _most_awaited(late: Sequence[LateRank]) -> list[LateRank]:
    """Return the three ranks that others waited for longest, or fewer, the longest first."""
    return sorted(late, key=lambda each: -each.waited_ns)[:3]


def _verdict_sentence(
    facts: Facts, causes: Sequence[Cause], wall_ns: int, missing: Sequence[int], notes: Sequence[str]
) -> str:
    """Return the one sentence on a job: the largest loss, its place, and a change to try."""
    name, unit_ns = figure_unit(wall_ns)
    subject = "the recording" if facts.step is None else f"step {facts.step}"
    subject += " of a file that was cut off" * any("cut off" in note for note in facts.report.notes)
    loss = next((cause for cause in causes if cause.cause != COMPUTE), None)
    compute_ns, total_ns = facts.cost_ns(COMPUTE), facts.step_ns
    count = len(facts.ranks[facts.step])
    mean = "" if total_ns > 0.99 * wall_ns else f" on the longest rank, {figure(total_ns, unit_ns)} on average"
    head = f"{subject} takes {figure(wall_ns, unit_ns)} {name}{mean}: "
    if loss is None or compute_ns >= BUSY_SHARE * total_ns:
        return head + _busy_sentence(facts, unit_ns, name)
    changes = advice(facts)
    if changes and changes[0].cause == COMPUTE and not facts.report.on_device:
        top = changes[0]
        return head + f"for many small operators: {top.evidence}, at {top.place}; try: {top.change}"
    lost = f"{figure(loss.duration_ns, unit_ns)} {name} ({loss.share:.0%}{f', mean of {count} ranks' * (count > 1)})"
    where = f", the largest part at {loss.places[0]}" if loss.places else ""
    change = next((f"; try: {item.change}" for item in changes if item.cause == loss.cause), "")
    if loss.cause == UNKNOWN:
        rest_ns = total_ns - loss.duration_ns
        rest = f"; of the other {figure(rest_ns, unit_ns)} {name}, {compute_ns / max(rest_ns, 1):.0%} are computing"
        return head + f"it cannot be told why {lost} of it are lost: {_unknown_reason(facts)}{rest}"
    if loss.cause == LAUNCH and is_launch_bound(facts):
        count, median_ns = facts.report.kernels[facts.step], facts.report.kernel_median_ns[facts.step]
        reason = f"launch-bound: for {lost} the device is idle, as the host launches its {count} kernels (median "
        return head + f"{reason}{format_ns(median_ns)}) too slowly{where}{change}"
    if loss.cause == COMM:
        first_place = f": {loss.places[0]}" if loss.places else ""
        unfit = any("clocks do" in note for note in notes)
        alone = "the clocks of the files do not fit, or they are of two runs" if unfit else "not matched"
        alone = f"{named_ranks(missing)} not recorded" if missing else alone
        return head + f"{lost} are exposed communication{first_place}; wait or wire cannot be told: {alone}{change}"
    if loss.cause == WAIT and facts.late:
        late = _most_awaited(facts.late)[0]
        op = f"; it comes last to {late.ops.most_common(1)[0][0]}" if late.ops else ""
        return head + f"{lost} are waiting for {late}{op}{change}"
    if loss.cause in (LAUNCH, SYNC, DATA, PYTHON):
        idle = f"for {lost} the device is idle: " if facts.report.on_device else f"{lost} are "
        return head + f"{idle}{loss.text}{where}{change}"
    if loss.cause == STARTUP and (rest_ns := facts.cost_ns(ALLOCATOR)):
        lost += f", and {figure(rest_ns, unit_ns)} {name} of allocation,"
    return head + f"{lost} are {loss.text}{where}{change}"


def _busy_sentence(facts: Facts, unit_ns: int, name: str) -> str:
    """Return the end of the sentence on a step that mostly computes: kernels, place, and a change or the next cause."""
    compute_ns, classes = facts.cost_ns(COMPUTE), facts.report.kernel_classes_ns
    what = "the device" if facts.report.on_device else "the host (no device is recorded)"
    text = f"{what} computes for {compute_ns / facts.step_ns:.0%} of it ({figure(compute_ns, unit_ns)} {name})"
    kind = max((kind for kind in classes if kind != "other"), key=lambda kind: classes[kind], default="")
    if facts.report.on_device and kind and (share := classes[kind] / sum(classes.values())) > _LARGE_CLASS:
        text += f", {share:.0%} of its kernels' time in {_CLASSES[kind]}"
    places = top_places(facts.places.get(COMPUTE, ()), facts.step_ns, by_function=True)
    if places:
        text += f", the largest part at {places[0]}"
    change = next((f"; try: {item.change}" for item in advice(facts) if item.cause == COMPUTE), "")
    costs = facts.steps[facts.step]
    other = max(costs, key=lambda cause: (cause != COMPUTE) * costs[cause])
    if not change and other != COMPUTE and costs[other] >= WORTH_SHARE * facts.step_ns:
        return f"{text}; {costs[other] / facts.step_ns:.0%} are: {WORDING[other]}"
    return text + (change or f"; nothing but {'kernels' if facts.report.on_device else 'operators'} takes long")


def _longer_steps_note(facts: Facts, walls: Mapping[int | None, int]) -> list[str]:
    """Return a line on steps far longer than the shown one, with the cause that grows most; no line without any."""
    longer = [at for at in walls if walls[at] >= LONGER_FACTOR * walls[facts.step]]
    if not longer:
        return []
    longest = max(longer, key=lambda at: walls[at])
    costs, usual = facts.steps[longest], facts.steps[facts.step]
    cause = max(costs, key=lambda each: costs[each] - usual.get(each, 0))
    more_ns = costs[cause] - usual.get(cause, 0)
    places = top_places(facts.report.places.get(longest, {}).get(cause, ()), costs[cause], by_function=cause == COMPUTE)
    where = f", the largest part at {places[0]}" if places else ""
    return [
        f"{len(longer)} of {len(walls)} steps take{'s' * (len(longer) == 1)} half as long again as this one, or more: "
        f"step {longest} takes {format_ns(walls[longest])}, of which {WORDING[cause]} is {format_ns(more_ns)} "
        f"more{where}"
    ]


_CLASSES = {
    "softmax": "softmax", "elementwise": "elementwise, reducing and concatenating kernels",
    "optimizer": "the optimizer", "matmul": "matrix products and convolutions",
}  # fmt: skip


def _unknown_reason(facts: Facts) -> str:
    """Return why the time without a cause has none, as text."""
    if note := _missing_events_note(facts):
        return note
    if not facts.report.on_device:
        return "no operator runs, and no Python function is recorded"
    return "the next work was queued already, or its launch is not recorded: nothing shows what the device waited for"


def _missing_events_note(facts: Facts) -> str:
    """Return the first note on events that the file lacks; "" if it lacks none."""
    notes = facts.report.notes
    return next((note for word in ("left out", "recorded") for note in notes if word in note), "")


def _open_questions(facts: Facts, missing: Sequence[int]) -> list[str]:
    """Return sentences on what the profiles cannot show, each with the recording that would show it."""
    sentences = []
    if missing and (ns := facts.cost_ns(COMM)):
        least_ns = sum(each.waits_at_least_ns for each in facts.traffic)
        wait_note = (
            f"; at least {format_ns(least_ns)} are waiting: some messages took longer than their bytes can explain"
        )
        sentences.append(
            f"whether {format_ns(ns)} of communication are waiting or wire: of "
            f"{facts.report.world_size} ranks, {listed(missing)} {'is' if len(missing) == 1 else 'are'} not recorded"
            + wait_note
            * (least_ns >= _UNDECIDED * ns)
        )
    if facts.cost_ns(UNKNOWN) >= _UNDECIDED * facts.step_ns and not _missing_events_note(facts):
        sentences.append(f"{format_ns(facts.cost_ns(UNKNOWN))} of the step: {_unknown_reason(facts)}")
    if len(facts.steps) < MIN_STEPS:
        sentences.append("gains: one step is recorded, so what differs between steps is unknown; record three or more")
    if facts.cost_ns(LAUNCH, PYTHON, SYNC) >= 0.1 * facts.step_ns and not facts.report.has_python:
        sentences.append("the Python function: record with with_stack=True and with_modules=True")
    return sentences
