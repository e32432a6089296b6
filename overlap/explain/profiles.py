"""Facts on profiles of PyTorch: the files of several ranks of one job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from ..errors import UsageError
from ..ranklist import format_rank_list, named_ranks
from ..units import format_ns
from .advice import MIN_STEPS
from .bounds import RankStep
from .causes import COMM, COMPUTE, LAUNCH, PYTHON, SYNC, UNKNOWN, WAIT, WIRE, WORDING
from .facts import Facts
from .judgement import explain_facts, missing_events_note, reason_without_cause
from .pieces import Pieces
from .rank import RankReport
from .ranks import divide_exposed_time, late_ranks, link_gb_s, missing_ranks, sum_traffic
from .report import Why, median_length_step
from .sites import top_sites

LONGER_FACTOR = 1.5
"""A note lists steps that take at least this many times as long as the shown one."""
_UNDECIDED = 0.05
"""A question is worth a sentence if it concerns at least this part of the time."""


def explain_profiles(reports: Sequence[RankReport], *, step: int | None = None) -> Why:
    """Return the report on the profiles of a job.

    Args:
        reports: The measures of each rank's profile.
        step: The step to show; None: the one with the median length, which is that of its longest rank.

    Raises:
        UsageError: Two reports are of the same rank or of different runs, the step is not recorded, or a profile
            records no time.
    """
    reports = sorted(reports, key=lambda report: report.rank)
    _check_same_run(reports)
    # Where the time of each rank went, step by step.
    pieces, notes = divide_exposed_time(reports)
    windows = _common_windows(reports)
    walls = {number: max(high - low for low, high in ranks.values()) for number, ranks in windows.items()}
    # The step that the report shows.
    shown = median_length_step(walls) if step is None else step
    if shown not in walls:
        raise UsageError(
            f"why: no step {step} is recorded; recorded are {format_rank_list(sorted(map(_step_order, walls)))}"
        )
    if not walls[shown]:
        raise UsageError(f"why: {reports[0].path}: what it records takes no time; leave it out")
    inside = {number: pieces.cut_to_rank_windows(ranks) for number, ranks in windows.items()}
    costs = {
        number: {
            rank: RankStep(costs_ns=inside[number].cut_to_rank_window(rank, each).cost_by_cause())
            for rank, each in ranks.items()
        }
        for number, ranks in windows.items()
    }
    # The rank that lost most time of its own in this step: the report shows the call sites of its profile.
    step_reports = [report for report in reports if report.rank in costs[shown]]
    worst = max(step_reports, key=lambda report: _own_lost_ns(costs[shown][report.rank]))
    worst_pieces = inside[shown].cut_to_rank_window(worst.rank, windows[shown][worst.rank])
    calls = [call for call in worst.calls if call.step == shown]
    traffic = sum_traffic(
        calls, worst_pieces.instants_of_causes(COMM, WAIT, WIRE), link_gb_s(worst.device, worst.world_size)
    )
    missing = missing_ranks(reports)
    facts = Facts(
        origin="PyTorch profiler", world_size=max(report.world_size for report in reports), step=shown,
        walls_ns=walls, costs=costs, sites=worst_pieces.sites_by_cause(), profile=worst, communicates=bool(calls),
        late_by_step={number: late_ranks(inside[number], number) for number in inside}, traffic=traffic,
        cut=any("cut off" in note for note in worst.notes), unknown=_undivided_reason(missing, notes),
    )  # fmt: skip
    # A note that several ranks have is listed once.
    recording_notes = dict.fromkeys(note for report in reports for note in report.notes)
    questions = [*_open_questions(facts, missing), *recording_notes]
    return explain_facts(replace(facts, undecided=questions, notes=[*notes, *_longer_steps_note(facts, inside)]))


def _common_windows(reports: Sequence[RankReport]) -> dict[int | None, dict[int, tuple[int, int]]]:
    """Return the window of each rank, by step, for the steps that all ranks recorded, or for all if there is none."""
    every = {step for report in reports for step in report.windows}
    common = {step for step in every if all(step in report.windows for report in reports)} or every
    return {
        step: {report.rank: report.windows[step] for report in reports if step in report.windows}
        for step in sorted(common, key=_step_order)
    }


def _own_lost_ns(step: RankStep) -> int:
    """Return the time that a rank lost by itself: the wire counts; computes, other communication and waits do not."""
    return sum(ns for cause, ns in step.costs_ns.items() if cause not in (COMPUTE, COMM, WAIT))


def _step_order(step: int | None) -> int:
    """Return the sort key of a step; the whole recording, None, comes first."""
    return -1 if step is None else step


def _check_same_run(reports: Sequence[RankReport]) -> None:
    """Raise `UsageError` unless reports, sorted by rank, are of different ranks and of one world size."""
    for one, other in pairwise(reports):
        if one.rank == other.rank:
            raise UsageError(
                f"why: {one.path} and {other.path} are both of rank {one.rank}: name the files of one run, or give "
                "the folder of one"
            )
    files = {report.world_size: report.path for report in reports}
    # A file without a world size counts as a world of one rank, and fits any other.
    if len(files) > 1 and min(files) > 1:
        worlds = ", ".join(f"{path} of a world of {size} ranks" for size, path in sorted(files.items()))
        raise UsageError(f"why: the files are of different runs: {worlds}; name the files of one run")


def _undivided_reason(missing: Sequence[int], notes: Sequence[str]) -> str:
    """Return why exposed communication cannot be divided into waiting and wire, from missing ranks and notes."""
    if missing:
        return f"{named_ranks(missing)} not recorded"
    unfit = any("clocks do" in note for note in notes)
    return "the clocks of the files do not fit, or they are of two runs" if unfit else "not matched"


def _longer_steps_note(facts: Facts, pieces: Mapping[int | None, Pieces]) -> list[str]:
    """Return, in a list, one line on steps far longer than the shown one, or [] if there are none.

    It names the longest of them, and the cause that grew most in it.
    """
    walls_ns = facts.walls_ns
    longer = [step for step, ns in walls_ns.items() if ns >= LONGER_FACTOR * walls_ns[facts.step]]
    if not longer:
        return []
    longest = max(longer, key=lambda step: walls_ns[step])
    costs_ns, usual_ns = facts.mean_costs_of(longest), facts.mean_ns
    cause = max(costs_ns, key=lambda each: costs_ns[each] - usual_ns.get(each, 0))
    more_ns = costs_ns[cause] - usual_ns.get(cause, 0)
    # Call sites are those of the rank whose profile the report shows.
    of_longest = pieces[longest]
    of_rank = of_longest.take(of_longest.rank == facts.report.rank).sites_by_cause()
    sites = top_sites(of_rank.get(cause, ()), costs_ns[cause], by="function" if cause == COMPUTE else "operator")
    where = f", the largest part at {sites[0].text()}" if sites else ""
    # "half as long again" is `LONGER_FACTOR` in words.
    return [
        f"{len(longer)} of {len(walls_ns)} steps take{'s' * (len(longer) == 1)} half as long again as this one, or "
        f"more: step {longest} takes {format_ns(walls_ns[longest])}, of which {WORDING[cause]} is "
        f"{format_ns(more_ns)} more{where}"
    ]


def _open_questions(facts: Facts, missing: Sequence[int]) -> list[str]:
    """Return sentences on questions that the profiles leave open, some with a way to record the answer."""
    sentences = []
    if missing and (ns := facts.cost_ns(COMM)):
        least_ns = sum(each.waits_at_least_ns for each in facts.traffic)
        sentence = f"whether {format_ns(ns)} of communication are waiting or wire: of {facts.world_size} ranks, "
        sentence += f"{format_rank_list(missing)} {'is' if len(missing) == 1 else 'are'} not recorded"
        if least_ns >= _UNDECIDED * ns:
            least = f"at least {format_ns(least_ns)} are waiting"
            sentence += f"; {least}: some messages took longer than their bytes can explain"
        sentences.append(sentence)
    if facts.cost_ns(UNKNOWN) >= _UNDECIDED * facts.step_ns and not missing_events_note(facts.report.notes):
        sentences.append(f"{format_ns(facts.cost_ns(UNKNOWN))} of the step: {reason_without_cause(facts)}")
    if len(facts.costs) < MIN_STEPS:
        sentences.append("gains: one step is recorded, so what differs between steps is unknown; record three or more")
    if facts.cost_ns(LAUNCH, PYTHON, SYNC) >= 0.1 * facts.step_ns and not facts.report.has_python:
        sentences.append("the Python function: record with with_stack=True and with_modules=True")
    return sentences
