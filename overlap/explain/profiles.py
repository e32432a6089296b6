"""Facts on profiles of PyTorch: the files of several ranks of one job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from ..errors import UsageError
from ..ranklist import listed, named_ranks
from ..units import format_ns
from .advice import MIN_STEPS
from .bounds import RankStep
from .causes import COMM, COMPUTE, LAUNCH, PYTHON, SYNC, UNKNOWN, WAIT, WIRE, WORDING
from .facts import Facts
from .judgement import explain, missing_events_note, unknown_reason
from .pieces import Pieces
from .rank import RankReport
from .ranks import divide_exposed, late_ranks, link_gb_s, missing_ranks, sum_traffic
from .report import Why, mean_costs, median_length_step
from .sites import top_sites

LONGER_FACTOR = 1.5
"""Steps that take so many times the length of the shown one are named."""
_UNDECIDED = 0.05
"""Part of a time from which on an open question is worth a sentence."""


def explain_profiles(reports: Sequence[RankReport], *, step: int | None = None) -> Why:
    """Return the report on the profiles of a job.

    Args:
        reports: One of each rank.
        step: The step to show; None for the median one by its longest rank.

    Raises:
        UsageError: Two are of the same rank, or no rank recorded the step.
    """
    reports = sorted(reports, key=lambda report: report.rank)
    _check_same_run(reports)
    pieces, notes = divide_exposed(reports)
    every = {number for report in reports for number in report.windows}
    common = {number for number in every if all(number in report.windows for report in reports)} or every
    windows = {
        number: {report.rank: report.windows[number] for report in reports if number in report.windows}
        for number in sorted(common, key=_step_order)
    }
    walls = {number: max(high - low for low, high in ranks.values()) for number, ranks in windows.items()}
    shown = median_length_step(walls) if step is None else step
    if shown not in walls:
        raise UsageError(f"why: no step {step} is recorded; recorded are {listed(sorted(map(_step_order, walls)))}")
    if not walls[shown]:
        raise UsageError(f"why: {reports[0].path}: what it records takes no time; leave it out")
    inside = {number: pieces.within(ranks) for number, ranks in windows.items()}
    costs = {
        number: {rank: RankStep(costs_ns=inside[number].of_rank(rank, each).costs()) for rank, each in ranks.items()}
        for number, ranks in windows.items()
    }
    having = [report for report in reports if report.rank in costs[shown]]
    others = (COMPUTE, COMM, WAIT)  # what a rank does not lose by its own fault
    own_ns = {
        rank: sum(ns for cause, ns in each.costs_ns.items() if cause not in others)
        for rank, each in costs[shown].items()
    }  # fmt: skip
    worst = max(having, key=lambda report: own_ns[report.rank])
    mine = inside[shown].of_rank(worst.rank, windows[shown][worst.rank])
    calls = [call for call in worst.calls if call.step == shown]
    traffic = sum_traffic(calls, mine.cover(COMM, WAIT, WIRE), link_gb_s(worst.device, worst.world_size))
    facts = Facts(
        origin="PyTorch profiler", world_size=max(report.world_size for report in reports), step=shown,
        walls_ns=walls, costs=costs, sites=mine.sites_by_cause(), profile=worst, communicates=bool(calls),
        last={number: late_ranks(inside[number], number) for number in inside}, traffic=traffic,
        cut=any("cut off" in note for note in worst.notes), unknown=_why_undivided(missing_ranks(reports), notes),
        notes=[*notes, *_longer_steps_note(inside, walls, shown, worst.rank, windows)],
    )  # fmt: skip
    questions = [*_open_questions(facts, missing_ranks(reports))]
    questions += dict.fromkeys(note for report in reports for note in report.notes)
    return explain(replace(facts, undecided=questions))


def _step_order(step: int | None) -> int:
    """Return the sort key of a step; the whole recording, None, comes first."""
    return -1 if step is None else step


def _check_same_run(reports: Sequence[RankReport]) -> None:
    """Raise UsageError if two sorted reports are of one rank, or reports name different world sizes."""
    for one, other in pairwise(reports):
        if one.rank == other.rank:
            raise UsageError(
                f"why: {one.path} and {other.path} are both of rank {one.rank}: name the files of one run, or give "
                "the folder of one"
            )
    files = {report.world_size: report.path for report in reports}
    if len(files) > 1 and min(files) > 1:
        worlds = ", ".join(f"{path} of a world of {size} ranks" for size, path in sorted(files.items()))
        raise UsageError(f"why: the files are of different runs: {worlds}; name the files of one run")


def _why_undivided(missing: Sequence[int], notes: Sequence[str]) -> str:
    """Return why exposed communication cannot be divided into waiting and wire."""
    if missing:
        return f"{named_ranks(missing)} not recorded"
    unfit = any("clocks do" in note for note in notes)
    return "the clocks of the files do not fit, or they are of two runs" if unfit else "not matched"


def _longer_steps_note(
    inside: Mapping[int | None, Pieces], walls: Mapping[int | None, int], shown: int | None, rank: int,
    windows: Mapping[int | None, Mapping[int, tuple[int, int]]],
) -> list[str]:  # fmt: skip
    """Return a line on steps far longer than the shown one, with the cause that grows most; no line without any."""
    longer = [at for at in walls if walls[at] >= LONGER_FACTOR * walls[shown]]
    if not longer:
        return []
    longest = max(longer, key=lambda at: walls[at])
    costs, usual = (
        mean_costs([inside[at].of_rank(each, window).costs() for each, window in windows[at].items()])
        for at in (longest, shown)
    )
    cause = max(costs, key=lambda each: costs[each] - usual.get(each, 0))
    more_ns = costs[cause] - usual.get(cause, 0)
    found = inside[longest].of_rank(rank, windows[longest][rank]).sites_by_cause() if rank in windows[longest] else {}
    sites = top_sites(found.get(cause, ()), costs[cause], by="function" if cause == COMPUTE else "operator")
    where = f", the largest part at {sites[0].text()}" if sites else ""
    return [
        f"{len(longer)} of {len(walls)} steps take{'s' * (len(longer) == 1)} half as long again as this one, or more: "
        f"step {longest} takes {format_ns(walls[longest])}, of which {WORDING[cause]} is {format_ns(more_ns)} "
        f"more{where}"
    ]


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
            f"{facts.world_size} ranks, {listed(missing)} {'is' if len(missing) == 1 else 'are'} not recorded"
            + wait_note
            * (least_ns >= _UNDECIDED * ns)
        )
    if facts.cost_ns(UNKNOWN) >= _UNDECIDED * facts.step_ns and not missing_events_note(facts.report.notes):
        sentences.append(f"{format_ns(facts.cost_ns(UNKNOWN))} of the step: {unknown_reason(facts)}")
    if len(facts.costs) < MIN_STEPS:
        sentences.append("gains: one step is recorded, so what differs between steps is unknown; record three or more")
    if facts.cost_ns(LAUNCH, PYTHON, SYNC) >= 0.1 * facts.step_ns and not facts.report.has_python:
        sentences.append("the Python function: record with with_stack=True and with_modules=True")
    return sentences
