"""Comparisons of two reports: regression, improvement or noise, from the steps of both."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from ..units import format_ns
from .causes import WORDING
from .report import Why

MIN_STEPS = 3
"""Least number of steps of each job; with fewer, chance sorts them into any order too often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The difference between two jobs."""

    judgement: str  # "regression", "improvement", "noise" or "undecided"
    sentence: str


def compare_reports(new: Why, old: Why) -> Comparison:
    """Compare the steps of two jobs: regression, improvement, noise, or undecided.

    A difference counts if every step of one job is longer than every step of the other. By chance that has a
    probability of 1 in 10 with three steps each, and of 1 in 126 with five. Otherwise it is noise. Cost: a sort of the
    steps.

    Args:
        new: The report on the newer job.
        old: The report on the older job.
    """
    new_ns, old_ns = sorted(new.per_step().values()), sorted(old.per_step().values())
    if not new_ns or not old_ns:
        return Comparison(judgement="undecided", sentence="one of them has no steps")
    before_ns, after_ns = median(old_ns), median(new_ns)
    change = f"{format_ns(before_ns)} before, {format_ns(after_ns)} now ({after_ns / before_ns - 1:+.1%})"
    counts = f"{len(old_ns)} and {len(new_ns)} steps"
    if min(len(new_ns), len(old_ns)) < MIN_STEPS:
        return Comparison(
            judgement="undecided",
            sentence=f"cannot be told: a step takes {change}, but {counts} are too few: record {MIN_STEPS} or more",
        )
    # Both lists are sorted: the ranges of step times overlap.
    if new_ns[0] <= old_ns[-1] and old_ns[0] <= new_ns[-1]:
        old_range = f"{format_ns(old_ns[0])} to {format_ns(old_ns[-1])} before"
        spread = f"{old_range}, {format_ns(new_ns[0])} to {format_ns(new_ns[-1])}"
        return Comparison(
            judgement="noise", sentence=f"noise: a step takes {change}, and steps overlap ({spread} now; {counts})"
        )
    judgement = "regression" if after_ns > before_ns else "improvement"
    sign = 1 if after_ns > before_ns else -1
    return Comparison(
        judgement=judgement,
        sentence=f"{judgement}: a step takes {change}{_largest_change_text(new, old, sign)}; {counts}, none overlap",
    )


def _largest_change_text(new: Why, old: Why, sign: int) -> str:
    """Return the cause that contributes most to the change, as ", of which 3.0 ms more is CAUSE at LINE"; or "".

    `sign` is 1 if steps have become longer, -1 if shorter.
    """
    causes = {cause for why in (new, old) for _, _, cause, _ in why.costs}
    changes = {
        cause: sign * (median(new.per_step(cause).values()) - median(old.per_step(cause).values())) for cause in causes
    }
    largest = max(changes, key=lambda cause: changes[cause], default="")
    if not largest or changes[largest] <= 0:
        return ""
    places = _call_sites_of(largest, new) or _call_sites_of(largest, old)
    where = f" at {places[0]}" if places else ""
    return f", of which {format_ns(changes[largest])} {'more' if sign > 0 else 'less'} is {WORDING[largest]}{where}"


def _call_sites_of(cause: str, why: Why) -> tuple[str, ...]:
    return next((each.places for each in why.causes if each.cause == cause), ())
