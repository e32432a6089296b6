"""Algorithms made of phases, each costed by itself, and pipelined in slices where their wires allow it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from math import inf

from ..collectives.schedule import Schedule
from .inslices import Uses, in_slices_s, uses
from .maxplus import CostBreakdown
from .option import Option, Part, Price
from .parameters import Parameters

# Further slices must save more than what adding up in another order does.
_ROUNDING = 1e-12
# Up to so many slices every number is tried, and twice as many each time beyond.
_FEW = 4


class Phased(Option):
    """Phases one after the other.

    Args:
        algorithm: Its name.
        detail: What it is made of.
        parts: The phases, without the launch of the whole.
        parameters: The model's.
        make: Generates the table on data in so many slices.
        most_slices: How many there may be.
    """

    def __init__(
        self,
        algorithm: str,
        detail: str,
        parts: tuple[Part, ...],
        parameters: Parameters,
        make: Callable[[int], Schedule],
        *,
        most_slices: int,
    ) -> None:
        self.algorithm, self.detail, self.parts = algorithm, detail, parts
        self._parameters, self._make, self._most_slices = parameters, make, most_slices
        self._uses: Uses | None = None

    def price(self, nbytes: float, *, below_s: float = inf) -> Price:
        """Return the cost with the best number of slices, of equal ones the smallest."""
        choices = (self._price(nbytes, slices) for slices in self._counts(nbytes))
        return min(choices, key=lambda price: price.total_s * (1 + _ROUNDING * price.slices))

    def _counts(self, nbytes: float) -> Iterator[int]:
        """Yield the numbers of slices that are worth a look: all small ones, then powers of two."""
        yield 1
        least, slices = self._parameters.slice_bytes, 2
        while slices <= self._most_slices and nbytes >= slices * least:
            yield slices
            slices += 1 if slices < _FEW else slices

    def _price(self, nbytes: float, slices: int) -> Price:
        phases_s = [part.total_s(nbytes / slices) for part in self.parts]
        return Price(total_s=self._parameters.launch_s + self.in_slices_s(phases_s, slices), slices=slices)

    def in_slices_s(self, phases_s: Sequence[float], slices: int) -> float:
        """Return the time of so many slices, without the launch, if phases take `phases_s` for each."""
        if slices == 1:
            return sum(phases_s)
        if self._uses is None:
            self._uses = uses(self.parts)
        return in_slices_s(phases_s, slices, self._uses)

    def breakdown(self, nbytes: float, slices: int) -> CostBreakdown:
        """Return where the time goes: each phase counts once, and what more slices take is that of the slowest."""
        phases_s = [part.total_s(nbytes / slices) for part in self.parts]
        slowest = max(range(len(phases_s)), key=lambda each: phases_s[each])
        further_s = self.in_slices_s(phases_s, slices) - sum(phases_s)
        total = dict.fromkeys((each.name for each in fields(CostBreakdown)), 0.0)
        for number, part in enumerate(self.parts):
            times = 1 + further_s / phases_s[slowest] if number == slowest and phases_s[slowest] else 1.0
            for name, duration_s in asdict(part.breakdown(nbytes / slices)).items():
                total[name] += duration_s * times
        total["launch_s"] += self._parameters.launch_s
        return CostBreakdown(**total)

    def schedule(self, slices: int = 1) -> Schedule:
        """Return the table on data in so many slices, not yet proved."""
        return self._make(slices)
