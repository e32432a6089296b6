"""Conditions on a verdict, such as `exposed > 5%` or `step > 41ms`: what a run must not come to."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import UsageError
from ..units import format_ns
from .verdict import Verdict

_MEAN: Mapping[str, Callable[[Verdict], int]] = {
    "compute": lambda verdict: verdict.compute_ns,
    "exposed": lambda verdict: verdict.exposed_ns,
    "waiting": lambda verdict: verdict.waiting_ns,
    "wire": lambda verdict: verdict.wire_ns,
    "idle": lambda verdict: verdict.idle_ns,
}
_UNITS_NS = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}
_LIMIT = re.compile(r"\s*([a-z]+)\s*(<|>)\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(%|[a-z]+)\s*")
_NAMES = ("step", "hidden", *_MEAN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One condition."""

    # "step" (the longest rank's time), "compute", "exposed", "waiting", "wire", "idle" (means of the ranks), or
    # "hidden" (of the time in which bytes moved).
    name: str
    above: bool  # Whether it holds above the bound, or else below
    bound: float  # In percent of the ranks' time, or in nanoseconds
    unit: str  # "%", "ns", "us", "ms" or "s"

    def holds(self, verdict: Verdict) -> bool:
        """Whether a run has come to it; of what there is not, nothing holds."""
        value = self._value(verdict)
        return value is not None and (value > self.bound if self.above else value < self.bound)

    def told(self, verdict: Verdict) -> str:
        """Say what the run has come to, beside the bound."""
        value = self._value(verdict)
        if value is None:
            return f"{self.name}: there is none"
        found = f"{value:.3g}%" if self.unit == "%" else format_ns(value)
        bound = f"{self.bound:g}%" if self.unit == "%" else format_ns(self.bound)
        return f"{self.name} is {found}, {'above' if self.above else 'below'} {bound}"

    def _value(self, verdict: Verdict) -> float | None:
        if self.name == "hidden":
            return None if verdict.hidden_share is None else 100 * verdict.hidden_share
        if self.name == "step":
            return verdict.wall_ns
        sum_ns = _MEAN[self.name](verdict)
        if self.unit == "%":
            return 100 * sum_ns / verdict.walls_ns if verdict.walls_ns else None
        return sum_ns / verdict.ranks if verdict.ranks else None


def parse_limit(text: str) -> Limit:
    """Read `NAME > BOUND` or `NAME < BOUND`.

    Raises:
        UsageError: If it is none, or the unit does not fit the name.
    """
    match = _LIMIT.fullmatch(text)
    if match is None or match[1] not in _NAMES or match[4] not in ("%", *_UNITS_NS):
        raise UsageError(
            f"--fail-if: {text!r} is no condition; write one of {', '.join(_NAMES)}, then < or >, then a number with "
            "%, ns, us, ms or s: 'exposed > 5%'"
        )
    name, unit = match[1], match[4]
    if (name == "step" and unit == "%") or (name == "hidden" and unit != "%"):
        raise UsageError(f"--fail-if: {text!r}: {name} is {'a time' if name == 'step' else 'a share'}, not {unit}")
    bound = float(match[3]) * (1 if unit == "%" else _UNITS_NS[unit])
    return Limit(name=name, above=match[2] == ">", bound=bound, unit=unit)
