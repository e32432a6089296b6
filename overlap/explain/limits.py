"""Limits on figures, such as `exposed > 5%`, which `--fail-if` reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..timeline.measure.verdict import Verdict
from ..units import format_ns

_MEAN: Mapping[str, Callable[[Verdict], int]] = {
    "compute": lambda verdict: verdict.compute_ns,
    "exposed": lambda verdict: verdict.exposed_ns,
    "waiting": lambda verdict: verdict.waiting_ns,
    "wire": lambda verdict: verdict.wire_ns,
    "kept": lambda verdict: verdict.kept_ns,
    "copy": lambda verdict: verdict.copy_ns,
    "queued": lambda verdict: verdict.queued_ns,
    "idle": lambda verdict: verdict.idle_ns,
}
_UNITS_NS = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}
_LIMIT = re.compile(r"\s*([a-z]+)\s*(<|>)\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(%|[a-z]+)\s*")
_NAMES = ("step", "hidden", *_MEAN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A condition on a verdict, such as `exposed > 5%` or `step > 41ms`, that a run must not meet."""

    # "step" (the longest rank's time), "compute", "exposed", "waiting", "wire", "kept", "copy", "queued", "idle" (means
    # of the ranks), or "hidden" (of communication).
    name: str
    above: bool  # Whether the condition holds above the bound, or else below
    bound: float  # In percent of the ranks' time, or in nanoseconds
    unit: str  # "%", "ns", "us", "ms" or "s"

    def holds(self, verdict: Verdict) -> bool:
        """Whether a verdict meets the condition; False if the verdict lacks the figure."""
        return self.is_met(self._read_figure(verdict))

    def is_met(self, value: float | None) -> bool:
        """Whether a value, in percent or nanoseconds as the bound is, meets the condition."""
        return value is not None and (value > self.bound if self.above else value < self.bound)

    def describe(self, verdict: Verdict) -> str:
        """Return text with the figure of a verdict and the bound."""
        return self.describe_value(self._read_figure(verdict))

    def describe_value(self, value: float | None) -> str:
        """Return text with a value, in percent or nanoseconds as the bound is, and the bound."""
        if value is None:
            return f"{self.name}: there is none"
        found = f"{value:.3g}%" if self.unit == "%" else format_ns(value)
        bound = f"{self.bound:g}%" if self.unit == "%" else format_ns(self.bound)
        return f"{self.name} is {found}, {'above' if self.above else 'below'} {bound}"

    def _read_figure(self, verdict: Verdict) -> float | None:
        """Return the limited figure of a verdict, in percent or nanoseconds as the bound is; None if it has none."""
        if self.name == "hidden":
            return None if verdict.hidden_share is None else 100 * verdict.hidden_share
        if self.name == "step":
            return verdict.wall_ns
        sum_ns = _MEAN[self.name](verdict)
        if self.unit == "%":
            return 100 * sum_ns / verdict.walls_ns if verdict.walls_ns else None
        return sum_ns / verdict.ranks if verdict.ranks else None


def parse_limit(text: str, names: Sequence[str] = _NAMES) -> Limit:
    """Read `NAME > BOUND` or `NAME < BOUND`, where NAME is one of `names`.

    Raises:
        UsageError: If the text is no condition, or the unit does not fit the name.
    """
    match = _LIMIT.fullmatch(text)
    if match is None or match[1] not in names or match[4] not in ("%", *_UNITS_NS):
        raise UsageError(
            f"--fail-if: {text!r} is no condition; write one of {', '.join(names)}, then < or >, then a number with "
            "%, ns, us, ms or s: 'exposed > 5%'"
        )
    name, unit = match[1], match[4]
    if (name == "step" and unit == "%") or (name == "hidden" and unit != "%"):
        raise UsageError(f"--fail-if: {text!r}: {name} is {'a time' if name == 'step' else 'a share'}, not {unit}")
    bound = float(match[3]) * (1 if unit == "%" else _UNITS_NS[unit])
    return Limit(name=name, above=match[2] == ">", bound=bound, unit=unit)
