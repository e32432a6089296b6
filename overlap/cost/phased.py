"""Options made of phases, each priced by itself, and pipelined in slices where their wires allow it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from math import inf
from typing import TypeAlias

import numpy as np

from ..collectives.schedule import Schedule
from .maxplus import CostBreakdown
from .option import AlgorithmOption, Price, PricedPhase
from .parameters import CostParameters

Uses: TypeAlias = tuple[tuple[float, ...], ...]
"""(resources, phases) Use of a resource by each working phase, as a share of the phase's largest use."""

# Shares that differ by less are equal: sums of similar nodes are added up in another order.
_DIGITS = 9


def apart(phases: int) -> Uses:
    """Return the uses of phases that share nothing."""
    return tuple(tuple(float(row == column) for column in range(phases)) for row in range(phases))


def uses(parts: Sequence[PricedPhase]) -> Uses:
    """Return the uses of all resources that can bound the phases together, without resources that others dominate."""
    busy_s = [part.busy_s_per_slot for part in parts]
    busy = np.zeros((max(len(column_s) for column_s in busy_s), len(parts)))
    for column, column_s in enumerate(busy_s):
        busy[: len(column_s), column] = column_s
    used = busy[busy.any(axis=1)] / np.maximum(busy.max(axis=0, initial=0.0), np.finfo(float).tiny)
    rows = np.unique(np.round(used, _DIGITS), axis=0)
    binding = [row for row in rows if not ((rows >= row).all(axis=1) & (rows > row).any(axis=1)).any()]
    return tuple(tuple(row.tolist()) for row in binding)


def in_slices_s(phases_s: Sequence[float], slices: int, shared: Uses) -> float:
    """Return the time of `slices` pieces through phases that take `phases_s` for each piece alone.

    With phases that share nothing it is sum(phases_s) + (slices - 1) * max(phases_s); with phases that all need the
    same wires, slices * sum(phases_s).
    """
    now_s, count = 0.0, len(phases_s)
    done = [0] * count  # number of finished slices of each phase
    left_s = list(phases_s)  # time left of the slice that each phase works on
    while done[-1] < slices:
        at_work = tuple(p for p in range(count) if done[p] < slices and (p == 0 or done[p] < done[p - 1]))
        rate = _rates(at_work, shared)
        step_s = min(left_s[p] / rate[p] for p in at_work)
        now_s += step_s
        for p in at_work:
            left_s[p] -= rate[p] * step_s
            if left_s[p] <= 1e-12 * phases_s[p]:
                done[p] += 1
                left_s[p] = phases_s[p]
    return now_s


@lru_cache(maxsize=4096)  # a plan of many slices and sizes asks for the same few again and again
def _rates(at_work: tuple[int, ...], shared: Uses) -> Mapping[int, float]:
    """Return the rates of phases: all rise until a resource is used up, then only phases without need of it."""
    rate = dict.fromkeys(at_work, 0.0)
    rising = set(at_work)
    while rising:
        levels = [1.0 - max((rate[p] for p in rising), default=0.0)]
        for row in shared:
            by = sum(row[p] for p in rising)
            if by > 0:
                levels.append(max(0.0, (1.0 - sum(row[p] * rate[p] for p in at_work)) / by))
        step = min(levels)
        for p in rising:
            rate[p] += step
        full = [row for row in shared if sum(row[p] * rate[p] for p in at_work) >= 1.0 - 1e-9]
        stopped = {p for p in rising if rate[p] >= 1.0 - 1e-9 or any(row[p] > 0 for row in full)}
        rising -= stopped or rising
    return rate


# Further slices must save more than another order of addition does.
_ROUNDING = 1e-12
# Up to this many slices every number is tried, and beyond it powers of two.
_FEW = 4


class Phased(AlgorithmOption):
    """Phases one after the other.

    Args:
        algorithm: Name of the algorithm.
        detail: Names of its phases.
        parts: The phases, without the launch of the collective.
        parameters: CostParameters of the cost model.
        make: Generates the table with the data in a number of slices.
        made_of: Names of the algorithms of its phases.
    """

    algorithm: str
    detail: str
    parts: tuple[PricedPhase, ...]

    def __init__(
        self,
        algorithm: str,
        detail: str,
        parts: tuple[PricedPhase, ...],
        parameters: CostParameters,
        make: Callable[[int], Schedule],
        made_of: Sequence[str] = (),
    ) -> None:
        self.algorithm, self.detail, self.parts = algorithm, detail, parts
        self._made_of = (algorithm, *made_of)
        self._parameters, self._make = parameters, make
        self._uses: Uses | None = None

    @property
    def made_of(self) -> tuple[str, ...]:
        """Its own name, and the names of its phases' algorithms."""
        return self._made_of

    def price(self, nbytes: float, *, below_s: float = inf) -> Price:
        """Return the cost with the best number of slices, of equal ones the smallest."""
        choices = (self._price(nbytes, slices) for slices in self._counts(nbytes))
        return min(choices, key=lambda price: price.total_s * (1 + _ROUNDING * price.slices))

    def _counts(self, nbytes: float) -> Iterator[int]:
        """Yield the numbers of slices that are worth a look: all small ones, then powers of two."""
        yield 1
        least, slices = self._parameters.slice_bytes, 2
        while slices <= self._parameters.most_slices and nbytes >= slices * least:
            yield slices
            slices += 1 if slices < _FEW else slices

    def _price(self, nbytes: float, slices: int) -> Price:
        phases_s = [part.total_s(nbytes / slices) for part in self.parts]
        return Price(total_s=self._parameters.launch_s + self.in_slices_s(phases_s, slices), slices=slices)

    def in_slices_s(self, phases_s: Sequence[float], slices: int) -> float:
        """Return the time of all slices, without the launch, if phases take `phases_s` for each slice."""
        if slices == 1:
            return sum(phases_s)
        if self._uses is None:
            self._uses = uses(self.parts)
        return in_slices_s(phases_s, slices, self._uses)

    def breakdown(self, nbytes: float, slices: int) -> CostBreakdown:
        """Return the terms of the time: each phase counts once, and further slices count for the slowest phase."""
        phases_s = [part.total_s(nbytes / slices) for part in self.parts]
        slowest = max(range(len(phases_s)), key=lambda phase: phases_s[phase])
        further_s = self.in_slices_s(phases_s, slices) - sum(phases_s)
        total = dict.fromkeys((term.name for term in fields(CostBreakdown)), 0.0)
        for number, part in enumerate(self.parts):
            times = 1 + further_s / phases_s[slowest] if number == slowest and phases_s[slowest] else 1.0
            for name, duration_s in asdict(part.breakdown(nbytes / slices)).items():
                total[name] += duration_s * times
        total["launch_s"] += self._parameters.launch_s
        return CostBreakdown(**total)

    def schedule(self, slices: int = 1) -> Schedule:
        """Return the table on data in slices, not yet proved."""
        return self._make(slices)
