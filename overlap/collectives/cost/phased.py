"""Algorithms made of phases, each costed by itself, and pipelined in slices where their wires allow it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from math import inf

from ..schedule import Schedule
from .maxplus import CostBreakdown
from .option import Option, Part, Price
from .parameters import Parameters

__all__ = ["Phased", "pipeline_s"]


def pipeline_s(phases_s: Sequence[float], slices: int) -> float:
    """Return the time of `slices` pieces through phases that take `phases_s` for each piece.

    With T for the phases' times on all data, and no latencies, this is max(T) (slices - 1) / slices + sum(T) / slices.
    """
    return sum(phases_s) + (slices - 1) * max(phases_s)


class Phased(Option):
    """Phases one after the other.

    Args:
        algorithm: Its name.
        detail: What it is made of.
        parts: The phases, without the launch of the whole.
        parameters: The model's.
        make: Generates the table on data in so many slices.
        most_slices: How many there may be; 1 where phases share their wires.
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

    def price(self, nbytes: float, *, below_s: float = inf) -> Price:
        """Return the cost with the best number of slices."""
        choices = (self._price(nbytes, slices) for slices in range(1, self._most_slices + 1))
        return min(choices, key=lambda price: price.total_s)

    def _price(self, nbytes: float, slices: int) -> Price:
        phases_s = [part.total_s(nbytes / slices) for part in self.parts]
        return Price(total_s=self._parameters.launch_s + pipeline_s(phases_s, slices), slices=slices)

    def breakdown(self, nbytes: float, slices: int) -> CostBreakdown:
        """Return where the time goes: the slowest phase counts once for each slice, the others once."""
        slowest = max(self.parts, key=lambda part: part.total_s(nbytes / slices))
        total = dict.fromkeys((each.name for each in fields(CostBreakdown)), 0.0)
        for part in self.parts:
            for name, duration_s in asdict(part.breakdown(nbytes / slices)).items():
                total[name] += duration_s * (slices if part is slowest else 1)
        total["launch_s"] += self._parameters.launch_s
        return CostBreakdown(**total)

    def schedule(self, slices: int = 1) -> Schedule:
        """Return the table on data in so many slices, not yet proved."""
        return self._make(slices)
