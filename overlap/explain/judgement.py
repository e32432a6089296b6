"""The judge of lost time: causes of a step, advice, and the one sentence on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from ..errors import escape_control_characters
from ..units import format_bytes, format_figure, format_ns, table_unit
from .advice import choose_advice
from .bounds import compute_gain
from .causes import COMM, COMPUTE, OWN_WORDING, UNKNOWN, WAIT, WIRE, WORDING
from .facts import Facts
from .report import Advice, Cause, Why

MENTIONED_SHARE = 1 / 20
"""The sentence mentions a loss that takes at least this part of a step."""
_SIMILAR_SHARE = 0.01
"""If the mean of the ranks is shorter than the longest rank by less than this part, the sentence gives one time."""
BUSY_SHARE = 0.8
"""If a step computes for at least this part, the sentence names the call site of most computes."""
_LARGE_CLASS = 0.3
"""If a kind of kernels takes more than this part of the time of kernels, the sentence names it."""


def explain_facts(facts: Facts) -> Why:
    """Return the report on a job: verdict, causes, advice and open questions."""
    changes = tuple(choose_advice(facts))
    ranks = sorted({rank for costs in facts.costs.values() for rank in costs})
    return Why(
        verdict=verdict_sentence(facts, changes), origin=facts.origin, ranks=tuple(ranks), world_size=facts.world_size,
        step=facts.step, step_ns=facts.walls_ns[facts.step],
        steps_ns={"all" if step is None else str(step): ns for step, ns in facts.walls_ns.items()},
        causes=tuple(_causes_of_step(facts)), advice=changes, undecided=tuple(facts.undecided),
        notes=tuple(facts.notes), traffic=tuple(asdict(each) for each in facts.traffic),
        costs=tuple(
            (rank, step, cause, ns)
            for step, costs in facts.costs.items()
            for rank, cost in costs.items()
            for cause, ns in cost.costs_ns.items()
        ),
    )  # fmt: skip


def cause_wording(facts: Facts) -> Mapping[str, str]:
    """Return the text of each cause; it differs for traces of overlap, which record everything that a rank does."""
    return OWN_WORDING if facts.ours else WORDING


def _causes_of_step(facts: Facts) -> list[Cause]:
    """Return the causes of the shown step, the largest first, each with its share and its most expensive call sites."""
    total_ns, causes = facts.step_ns or 1, []  # 1: never divide by 0
    # With several ranks, call sites are those of one rank, which the text names.
    rank = f" on rank {facts.profile.rank}" * (len(facts.shown_ranks) > 1) if facts.profile else ""
    for cause, ns in sorted(facts.mean_ns.items(), key=lambda item: -item[1]):
        sites = [each.text(rank) for each in facts.site_times(cause)]
        if cause == WAIT:
            sites = [f"{late} ({format_ns(late.waited_ns)} of others)" for late in facts.late_ranks[:3]]
        elif cause in (COMM, WIRE) and facts.profile:
            sites = [
                f"{item.calls} {item.op}" + (f", {format_bytes(item.nbytes)}" if item.nbytes else "")
                + f" ({format_ns(item.exposed_ns)} exposed)"
                for item in facts.traffic[:3] if item.exposed_ns and not (cause == COMM and WIRE in facts.mean_ns)
            ]  # fmt: skip
        causes.append(Cause(
            cause=cause, text=cause_wording(facts)[cause], duration_ns=ns, share=ns / total_ns, places=tuple(sites),
        ))  # fmt: skip
    return causes


def verdict_sentence(facts: Facts, changes: Sequence[Advice]) -> str:
    """Return the one sentence on a job: the length of the step, its parts, the losses, and a change to try.

    Times are averaged over the ranks, in the unit of the length. Losses below `MENTIONED_SHARE` of the step are left
    out, but the parts of exposed communication below it are given as one sum.

    Args:
        facts: The facts.
        changes: Advice, the best first.
    """
    wall_ns, total_ns = facts.walls_ns[facts.step], facts.step_ns
    name, unit_ns = table_unit(wall_ns)
    whole = "whole run" if facts.ours else "whole recording"
    subject = whole if facts.step is None else "step"
    first = f"{facts.first.evidence}: {facts.first.change}; " if facts.first else ""
    if not total_ns:
        return f"{first}{subject}: nothing was recorded"
    text = f"{first}{subject} {format_figure(wall_ns, unit_ns)} {name}{' of a file that was cut off' * facts.cut}"
    average_ns = sum(sum(rank.costs_ns.values()) for rank in facts.shown_ranks) / len(facts.shown_ranks)
    if wall_ns - average_ns >= _SIMILAR_SHARE * wall_ns:
        text += f" on the longest of {len(facts.shown_ranks)} ranks; {format_figure(average_ns, unit_ns)} on average"
    computed = "not recorded" + " (overlap.torch.record(model) does that)" * facts.torch
    if compute_ns := facts.cost_ns(COMPUTE):
        computed = _time_text(compute_ns, unit_ns)
    text += f": compute {computed}{_computing_part(facts)}"
    mentioned = [cause for cause, ns in facts.mean_ns.items() if ns >= MENTIONED_SHARE * total_ns]
    text += _exposed_part(facts, mentioned, unit_ns)
    others = [cause for cause in mentioned if cause not in (COMPUTE, COMM, WAIT, WIRE)]
    for cause in sorted(others, key=lambda cause: -facts.mean_ns[cause]):
        ns = facts.mean_ns[cause]
        reason = f", and it cannot be told why: {reason}" if (reason := reason_without_cause(facts, cause)) else ""
        lost = f"{_time_text(ns, unit_ns)} ({ns / total_ns:.0%}) {cause_wording(facts)[cause].partition(':')[0]}"
        text += f"; {lost}{reason}{_largest_site_text(facts, cause)}"
    # `facts.first` is at the beginning already; a change that gains nothing is not worth a try.
    worth = [item for item in changes if item is not facts.first and item.gain_ns != 0]
    tried = next((item for item in worth if item.cause in (COMPUTE, *mentioned)), None)
    return escape_control_characters(text + (_advice_part(facts, tried) if tried else ""))


def _time_text(mean_ns: float, unit_ns: int) -> str:
    """Return a time as text in a unit, without the name of the unit; tiny times keep one significant digit."""
    # Below a twentieth of the unit, one decimal would show 0.0.
    return f"{mean_ns / unit_ns:.1g}" if 0 < 20 * mean_ns < unit_ns else format_figure(mean_ns, unit_ns)


def _largest_site_text(facts: Facts, cause: str) -> str:
    """Return the most expensive call site of a cause, as " (SITE)" or " (mostly SITE)"; "" if none is known."""
    sites = facts.site_times(cause)
    return f" ({'mostly ' * (len(sites) > 1)}{sites[0].site})" if sites else ""


def _computing_part(facts: Facts) -> str:
    """Return the part of the sentence on a step that mostly computes: its main kernels, and its call site.

    "" for timelines, and for steps that compute less than `BUSY_SHARE`.
    """
    if facts.profile is None or facts.cost_ns(COMPUTE) < BUSY_SHARE * facts.step_ns:
        return ""
    classes = facts.profile.kernel_classes_ns
    kind = max((kind for kind in classes if kind != "other"), key=lambda kind: classes[kind], default="")
    large = facts.profile.on_device and kind and classes[kind] > _LARGE_CLASS * sum(classes.values())
    shares = [f"{classes[kind] / sum(classes.values()):.0%} {_CLASSES[kind]}"] if large else []
    sites = facts.site_times(COMPUTE)
    parts = [*shares, *(["mostly " * (len(sites) > 1) + sites[0].site] if sites else [])]
    return f" ({', '.join(parts)})" if parts else ""


_CLASSES = {
    "softmax": "softmax", "elementwise": "elementwise, reducing and concatenating kernels",
    "optimizer": "the optimizer", "matmul": "matrix products and convolutions",
}  # fmt: skip


def _exposed_part(facts: Facts, mentioned: Sequence[str], unit_ns: int) -> str:
    """Return the part of the sentence on exposed communication, or "" if the step has no communication at all."""
    exposed_ns, total_ns = facts.cost_ns(COMM, WAIT, WIRE), facts.step_ns
    if not facts.communicates and not exposed_ns:
        return ""
    parts: list[tuple[float, str]] = []  # (nanoseconds, what they were spent on)
    for late in facts.late_ranks:
        mean_ns = late.waited_ns / len(facts.shown_ranks)
        if WAIT in mentioned and mean_ns >= MENTIONED_SHARE * total_ns:
            parts.append((mean_ns, f"waiting for {late}"))
    if WIRE in mentioned:
        parts.append((facts.cost_ns(WIRE), f"on the wire{_largest_site_text(facts, WIRE)}"))
    rest_ns = exposed_ns - sum(ns for ns, _ in parts) - facts.cost_ns(COMM) * (COMM in mentioned)
    # A rest that would be printed as 0 is left out.
    if exposed_ns >= MENTIONED_SHARE * total_ns and float(format_figure(rest_ns, unit_ns)):
        parts.append((rest_ns, f"in parts below 1/{round(1 / MENTIONED_SHARE)} of the step"))
    if COMM in mentioned:
        where = f"; wait or wire cannot be told: {facts.unknown}" if facts.unknown else ""
        parts.append((facts.cost_ns(COMM), f"communicating{_largest_site_text(facts, COMM)}{where}"))
    lost = ", ".join(f"{_time_text(ns, unit_ns)} {text}" for ns, text in parts)
    return f", exposed {_time_text(exposed_ns, unit_ns)} ({exposed_ns / total_ns:.0%}){lost and ': '}{lost}"


def _advice_part(facts: Facts, item: Advice) -> str:
    """Return the end of the sentence: a change to try, with its gain if that is known."""
    text = f"; try: {item.change}" + f" ({item.evidence})" * (item.cause == COMPUTE)
    stays_ns, most_ns = item.gain_ns or item.gain_least_ns, compute_gain(facts.shown_ranks, item.cause).most_ns
    if not stays_ns or not most_ns:
        return text
    return f"{text}, -{format_ns(stays_ns)} if the rest stays, at most -{format_ns(most_ns)}"


def reason_without_cause(facts: Facts, cause: str = UNKNOWN) -> str:
    """Return why some time of a profile has no known cause, as text.

    "" if `cause` is a known one, and for timelines.
    """
    if cause != UNKNOWN or facts.profile is None:
        return ""
    if note := missing_events_note(facts.profile.notes):
        return note
    if not facts.profile.on_device:
        return "no operator runs, and no Python function is recorded"
    return "the next work was queued already, or its launch is not recorded: nothing shows what the device waited for"


def missing_events_note(notes: Sequence[str]) -> str:
    """Return the first note that says that a file lacks events, or "" if there is none."""
    return next((note for word in ("left out", "recorded") for note in notes if word in note), "")
