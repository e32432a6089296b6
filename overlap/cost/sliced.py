"""Algorithms that send slice after slice: how many slices is part of their price."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

from ..collectives.schedule import Schedule
from .maxplus import CostBreakdown
from .option import Option, Part, Price
from .placed import Placed

# Twice as many would gain at most 1 / 64 of the time that bytes take.
_MOST_SLICES = 64


class Sliced(Option):
    """One schedule over all ranks, on data cut in as many slices as is fastest.

    Args:
        algorithm: Its name.
        whole: What it is with the data in one piece.
        placed: What it is with so many slices.
        make: Generates the table with so many slices.
    """

    def __init__(
        self,
        algorithm: str,
        whole: Placed,
        placed: Callable[[int], Placed],
        make: Callable[[int], Schedule],
    ) -> None:
        self.algorithm, self.detail, self._placed, self._make = algorithm, "", placed, make
        self._known = {1: Part(whole)}
        self.parts = (self._known[1],)
        self._wire_s_per_byte = whole.busiest_s_per_byte()

    def price(self, nbytes: float, *, below_s: float = inf) -> Price:
        """Return the cost with the best number of slices, a power of two.

        The time falls with the number of slices as long as bytes count for more than starts, then it rises. However
        many there are, it is more than the time without any bytes, and than bytes are on the busiest wire: where that
        is too much, the price is for one piece.
        """
        best, slices = Price(total_s=self._part(1).total_s(nbytes)), 2
        hopeless = max(self._part(1).total_s(0), self._wire_s_per_byte * nbytes) >= below_s
        while slices <= _MOST_SLICES and not hopeless:
            more = Price(total_s=self._part(slices).total_s(nbytes), slices=slices)
            if more.total_s >= best.total_s:
                break
            best, slices = more, 2 * slices
        return best

    def phases(self, slices: int) -> tuple[Part, ...]:
        """Return the one phase that it has, cut in so many slices."""
        return (self._part(slices),)

    def breakdown(self, nbytes: float, slices: int) -> CostBreakdown:
        """Return where the time goes."""
        return self._part(slices).breakdown(nbytes)

    def schedule(self, slices: int = 1) -> Schedule:
        """Return the table under the option's name, not yet proved."""
        return replace(self._make(slices), algorithm=self.algorithm)

    def _part(self, slices: int) -> Part:
        if slices not in self._known:
            self._known[slices] = Part(self._placed(slices))
        return self._known[slices]
