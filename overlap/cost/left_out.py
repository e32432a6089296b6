"""Measured collectives beside what a fitted machine says of them; how far to trust it is told by rows left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Generic, Protocol, TypeVar


class Timed(Protocol):
    """A measured collective."""

    @property
    def time_s(self) -> float:
        """How long it took."""


S = TypeVar("S", bound=Timed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted(Generic[S]):
    """A sample beside what the fitted machine says of it."""

    sample: S  # what was measured
    predicted_s: float  # what is predicted
    left_out: bool  # whether the figures have not seen it

    @property
    def error(self) -> float:
        """The prediction's, as a share of what was measured."""
        return self.predicted_s / self.sample.time_s - 1


@dataclass(frozen=True, kw_only=True)
class FittedRows(Generic[S]):
    """What a fit has found, as far as its rows tell."""

    rows: tuple[Fitted[S], ...]  # all samples

    def errors(self, *, left_out: bool) -> tuple[int, float, float]:
        """Return how many rows were left out, or were not, with the median and the worst error, as shares."""
        found = [abs(row.error) for row in self.rows if row.left_out is left_out]
        return len(found), median(found) if found else 0.0, max(found, default=0.0)


def left_out_rows(kinds: Sequence[str]) -> list[bool]:
    """Choose every third row of a kind, but none of two."""
    seen, found = dict[str, int](), []
    for kind in kinds:
        number = seen.get(kind, 0)
        seen[kind] = number + 1
        found.append(number % 3 == 1)
    return [out and seen[kind] > 2 for out, kind in zip(found, kinds, strict=True)]
