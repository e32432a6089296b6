"""Limits on figures, such as `wire > 5%`, which `--fail-if` reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..units import format_ns

_UNITS_NS = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}
_LIMIT = re.compile(r"\s*([a-z]+)\s*(<|>)\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(%|[a-z]+)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A condition on a report, such as `wire > 5%` or `step > 41ms`, that a run must not meet."""

    name: str  # "step" (the longest rank's time), or a cause (mean of the ranks)
    above: bool  # True: the condition holds above the bound; False: below it
    bound: float  # In percent of the step if `unit` is "%", else in nanoseconds
    unit: str  # "%", "ns", "us", "ms" or "s"

    def failure_text(self, value: float) -> str:
        """Return the failure of a value that meets the condition, such as "wire is 7.2%, above 5%"; otherwise "".

        Args:
            value: In percent or in nanoseconds, as the bound.
        """
        # The bound itself does not meet the condition.
        if value <= self.bound if self.above else value >= self.bound:
            return ""
        found = f"{value:.3g}%" if self.unit == "%" else format_ns(value)
        bound = f"{self.bound:g}%" if self.unit == "%" else format_ns(self.bound)
        return f"{self.name} is {found}, {'above' if self.above else 'below'} {bound}"


def parse_limit(text: str, names: Sequence[str]) -> Limit:
    """Parse `NAME > BOUND` or `NAME < BOUND`, where NAME is one of `names`.

    Raises:
        UsageError: The text is no condition, or the unit does not fit the name.
    """
    match = _LIMIT.fullmatch(text)
    name, sign, number, unit = match.groups() if match is not None else ("", "", "", "")
    if name not in names or unit not in ("%", *_UNITS_NS):
        raise UsageError(
            f"--fail-if: {text!r} is no condition; write one of {', '.join(names)}, then < or >, then a number with "
            "%, ns, us, ms or s: 'wire > 5%'"
        )
    if name == "step" and unit == "%":
        raise UsageError(f"--fail-if: {text!r}: step is a time; write one, such as 'step > 40ms'")
    bound = float(number) * (1 if unit == "%" else _UNITS_NS[unit])
    return Limit(name=name, above=sign == ">", bound=bound, unit=unit)
