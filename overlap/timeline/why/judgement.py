"""The judgement on a job's profiles: which step is shown, its causes, and the sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise

from ...errors import UsageError
from ...units import figure, figure_unit, format_bytes, format_ns
from ..measure.intervals import clip, merge
from ..ranklist import listed, named_ranks
from .advice import FEW_STEPS, WORTH, Facts, advice, is_launch_bound
from .causes import ALLOCATOR, COMM, COMPUTE, DATA, LAUNCH, PYTHON, STARTUP, SYNC, UNKNOWN, WAIT, WIRE, WORDING
from .places import top_places
from .rank import RankReport
from .ranks import Late, MatchedRanks, link_gb_s, traffic
from .report import Cause, Why, median_of, shares

LONGER = 1.5
"""Steps that take so many times the length of the shown one are named."""
BUSY = 0.8
"""A device that computes for this part of a step is the limit."""


def judge(reports: Sequence[RankReport], *, step: int | None = None) -> Why:
    """Judge the profiles of a job.

    Args:
        reports: One of each rank.
        step: The step to show; None for the median one by its longest rank.

    Raises:
        UsageError: Two are of the same rank, or no rank recorded the step.
    """
    reports = sorted(reports, key=lambda report: report.rank)
    _check(reports)
    ranks = MatchedRanks(reports=list(reports))
    ranks.divide()
    every = {number for report in reports for number in report.windows}
    common = {number for number in every if all(number in report.windows for report in reports)} or every
    walls = {
        number: max(
            high - low for report in reports if number in report.windows for low, high in [report.windows[number]]
        )
        for number in common
    }
    shown_step = median_of(walls) if step is None else step
    if shown_step not in walls:
        raise UsageError(f"why: no step {step} is recorded; recorded are {listed(sorted(map(_number, walls)))}")
    if not walls[shown_step]:
        raise UsageError(f"why: {reports[0].path}: what it records takes no time; leave it out")
    facts = _facts(reports, ranks, shown_step, sorted(walls, key=_number))
    costs = facts.steps[shown_step]
    causes = _causes(reports, facts, costs)
    missing = ranks.missing
    undecided = [*_undecided(facts, missing), *dict.fromkeys(note for report in reports for note in report.notes)]
    return Why(
        verdict=_sentence(facts, causes, walls[shown_step], missing, ranks.notes), origin="PyTorch profiler",
        ranks=tuple(report.rank for report in reports), world_size=max(report.world_size for report in reports),
        step=shown_step, step_ns=walls[shown_step],
        steps_ns={_name(number): walls[number] for number in sorted(walls, key=_number)},
        causes=tuple(causes), advice=tuple(advice(facts)), undecided=tuple(undecided),
        notes=(*ranks.notes, *_longer(facts, walls)),
        traffic=tuple(asdict(each) for each in facts.traffic),
        costs=tuple(
            (report.rank, number, cause, ns)
            for report in reports
            for number, found in report.costs_ns.items()
            for cause, ns in found.items()
        ),
    )  # fmt: skip


def _number(step: int | None) -> int:
    return -1 if step is None else step


def _name(step: int | None) -> str:
    return "all" if step is None else str(step)


def _check(reports: Sequence[RankReport]) -> None:
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


def _facts(
    reports: Sequence[RankReport], ranks: MatchedRanks, shown_step: int | None, steps: Sequence[int | None]
) -> Facts:
    having = [report for report in reports if shown_step in report.windows]
    worst = max(having, key=lambda report: _lost(report, shown_step))
    exposed = clip(merge(worst.exposed), worst.windows[shown_step])
    late = [late for late in ranks.late.values() if late.step == shown_step]
    last = {
        at: max((each for each in ranks.late.values() if each.step == at), key=lambda each: each.waited_ns)
        for at in {each.step for each in ranks.late.values()}
    }
    of_ranks = {step: [report.costs_ns[step] for report in reports if step in report.costs_ns] for step in steps}
    return Facts(
        report=worst, step=shown_step, places=worst.places[shown_step], late=late, last=last,
        steps={step: shares(costs) for step, costs in of_ranks.items()}, ranks=of_ranks,
        traffic=traffic(
            [call for call in worst.calls if call.step == shown_step], exposed,
            link_gb_s(worst.device, worst.world_size),
        ),
    )  # fmt: skip


def _lost(report: RankReport, step: int | None) -> int:
    """Return the time that a rank lost by its own fault: not by waiting for others."""
    return sum(ns for cause, ns in report.costs_ns[step].items() if cause not in (COMPUTE, COMM, WAIT))


def _causes(reports: Sequence[RankReport], facts: Facts, costs: Mapping[str, int]) -> list[Cause]:
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
            places = [f"{late} ({format_ns(late.waited_ns)} of others)" for late in _worst(facts.late)]
        causes.append(Cause(
            cause=cause, text=WORDING[cause], duration_ns=ns, share=ns / total_ns, places=tuple(places),
        ))  # fmt: skip
    return causes


def _worst(late: Sequence[Late]) -> list[Late]:
    return sorted(late, key=lambda each: -each.waited_ns)[:3]


def _sentence(facts: Facts, causes: Sequence[Cause], wall_ns: int, missing: Sequence[int], notes: Sequence[str]) -> str:
    """Return the one sentence on a job: the largest loss, its place, and a change to try."""
    name, unit_ns = figure_unit(wall_ns)
    subject = "the recording" if facts.step is None else f"step {facts.step}"
    subject += " of a file that was cut off" * any("cut off" in note for note in facts.report.notes)
    loss = next((cause for cause in causes if cause.cause != COMPUTE), None)
    compute_ns, total_ns = facts.cost_ns(COMPUTE), facts.step_ns
    count = len(facts.ranks[facts.step])
    mean = "" if total_ns > 0.99 * wall_ns else f" on the longest rank, {figure(total_ns, unit_ns)} on average"
    head = f"{subject} takes {figure(wall_ns, unit_ns)} {name}{mean}: "
    if loss is None or compute_ns >= BUSY * total_ns:
        return head + _busy(facts, unit_ns, name)
    found = advice(facts)
    if found and found[0].cause == COMPUTE and not facts.report.on_device:
        return head + f"for many small operators: {found[0].evidence}, at {found[0].place}; try: {found[0].change}"
    lost = f"{figure(loss.duration_ns, unit_ns)} {name} ({loss.share:.0%}{f', mean of {count} ranks' * (count > 1)})"
    where = f", the largest part at {loss.places[0]}" if loss.places else ""
    change = next((f"; try: {item.change}" for item in found if item.cause == loss.cause), "")
    if loss.cause == UNKNOWN:
        rest_ns = total_ns - loss.duration_ns
        rest = f"; of the other {figure(rest_ns, unit_ns)} {name}, {compute_ns / max(rest_ns, 1):.0%} are computing"
        return head + f"it cannot be told why {lost} of it are lost: {_why_unknown(facts)}{rest}"
    if loss.cause == LAUNCH and is_launch_bound(facts):
        count, median_ns = facts.report.kernels[facts.step], facts.report.kernel_median_ns[facts.step]
        reason = f"launch-bound: for {lost} the device is idle, as the host launches its {count} kernels (median "
        return head + f"{reason}{format_ns(median_ns)}) too slowly{where}{change}"
    if loss.cause == COMM:
        of = f": {loss.places[0]}" if loss.places else ""
        unfit = any("clocks do" in note for note in notes)
        alone = "the clocks of the files do not fit, or they are of two runs" if unfit else "not matched"
        alone = f"{named_ranks(missing)} not recorded" if missing else alone
        return head + f"{lost} are exposed communication{of}; wait or wire cannot be told: {alone}{change}"
    if loss.cause == WAIT and facts.late:
        late = _worst(facts.late)[0]
        op = f"; it comes last to {late.ops.most_common(1)[0][0]}" if late.ops else ""
        return head + f"{lost} are waiting for {late}{op}{change}"
    if loss.cause in (LAUNCH, SYNC, DATA, PYTHON):
        idle = f"for {lost} the device is idle: " if facts.report.on_device else f"{lost} are "
        return head + f"{idle}{loss.text}{where}{change}"
    if loss.cause == STARTUP and (rest_ns := facts.cost_ns(ALLOCATOR)):
        lost += f", and {figure(rest_ns, unit_ns)} {name} of allocation,"
    return head + f"{lost} are {loss.text}{where}{change}"


def _busy(facts: Facts, unit_ns: int, name: str) -> str:
    compute_ns, classes = facts.cost_ns(COMPUTE), facts.report.kernel_classes_ns
    what = "the device" if facts.report.on_device else "the host (no device is recorded)"
    text = f"{what} computes for {compute_ns / facts.step_ns:.0%} of it ({figure(compute_ns, unit_ns)} {name})"
    kind = max((kind for kind in classes if kind != "other"), key=lambda kind: classes[kind], default="")
    if facts.report.on_device and kind and (share := classes[kind] / sum(classes.values())) > 0.3:
        text += f", {share:.0%} of its kernels' time in {_CLASSES[kind]}"
    places = top_places(facts.places.get(COMPUTE, ()), facts.step_ns, by_function=True)
    if places:
        text += f", the largest part at {places[0]}"
    change = next((f"; try: {item.change}" for item in advice(facts) if item.cause == COMPUTE), "")
    costs = facts.steps[facts.step]
    other = max(costs, key=lambda cause: (cause != COMPUTE) * costs[cause])
    if not change and other != COMPUTE and costs[other] >= WORTH * facts.step_ns:
        return f"{text}; {costs[other] / facts.step_ns:.0%} are: {WORDING[other]}"
    return text + (change or f"; nothing but {'kernels' if facts.report.on_device else 'operators'} takes long")


def _longer(facts: Facts, walls: Mapping[int | None, int]) -> list[str]:
    """Return a line on steps far longer than the shown one, with the cause that grows most in the longest."""
    longer = [at for at in walls if walls[at] >= LONGER * walls[facts.step]]
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


def _why_unknown(facts: Facts) -> str:
    if note := _note(facts):
        return note
    if not facts.report.on_device:
        return "no operator runs, and no Python function is recorded"
    return "the next work was queued already, or its launch is not recorded: nothing shows what the device waited for"


def _note(facts: Facts) -> str:
    """Return which events the file lacks, if it is known."""
    notes = facts.report.notes
    return next((note for word in ("left out", "recorded") for note in notes if word in note), "")


def _undecided(facts: Facts, missing: Sequence[int]) -> list[str]:
    sentences = []
    if missing and (ns := facts.cost_ns(COMM)):
        least_ns = sum(each.waits_at_least_ns for each in facts.traffic)
        more = f"; at least {format_ns(least_ns)} are waiting: some messages took longer than their bytes can explain"
        sentences.append(
            f"whether {format_ns(ns)} of communication are waiting or wire: of "
            f"{facts.report.world_size} ranks, {listed(missing)} {'is' if len(missing) == 1 else 'are'} not recorded"
            + more
            * (least_ns >= 0.05 * ns)
        )
    if facts.cost_ns(UNKNOWN) >= 0.05 * facts.step_ns and not _note(facts):
        sentences.append(f"{format_ns(facts.cost_ns(UNKNOWN))} of the step: {_why_unknown(facts)}")
    if len(facts.steps) < FEW_STEPS:
        sentences.append("gains: one step is recorded, so what differs between steps is unknown; record three or more")
    if facts.cost_ns(LAUNCH, PYTHON, SYNC) >= 0.1 * facts.step_ns and not facts.report.has_python:
        sentences.append("the Python function: record with with_stack=True and with_modules=True")
    return sentences
