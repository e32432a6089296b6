"""The points of a sweep: every combination of the values of its axes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ...errors import UsageError
from .setting import PARAMETERS, value_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepAxis:
    """One parameter and the values that it takes."""

    name: str  # As the user writes it
    parameter: str | None  # Its name as a parameter of the simulation; None if it is the program's
    texts: tuple[str, ...]  # The values, as the user writes them

    @classmethod
    def parse(cls, text: str) -> SweepAxis:
        """Read `NAME=V,V,...`.

        Raises:
            UsageError: If it is something else.
        """
        name, equals, values = text.partition("=")
        texts = tuple(value.strip() for value in values.split(","))
        if not name or not equals or not all(texts):
            raise UsageError(f"--sweep: expected NAME=V,V,... such as nodes=1,2,4, got {text!r}")
        if len(set(texts)) < len(texts):
            raise UsageError(f"--sweep: {text!r} has a value twice")
        known = name.replace("-", "_")
        return cls(name=name, parameter=known if known in PARAMETERS else None, texts=texts)

    @property
    def option(self) -> str:
        """The argument by which a program gets a value."""
        return self.name if self.name.startswith("-") else "--" + self.name.replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One combination."""

    texts: Mapping[str, str]  # The value on each axis, by its name
    values: Mapping[str, object]  # Of parameters of the simulation, with those that are the same at all points
    arguments: tuple[str, ...]  # For the program, after its own


def axes(texts: Sequence[str]) -> tuple[SweepAxis, ...]:
    """Read all axes of a sweep.

    Raises:
        UsageError: If one cannot be meant, or there are two of one parameter.
    """
    found = tuple(map(SweepAxis.parse, texts))
    options = [axis.option for axis in found]
    for axis in found:
        if options.count(axis.option) > 1:
            raise UsageError(f"--sweep: {axis.name} is there twice")
    return found


def points(swept: Sequence[SweepAxis], fixed: Mapping[str, object]) -> Iterator[Point]:
    """Yield every combination, the last axis first.

    Args:
        swept: The axes.
        fixed: Parameters of the simulation that are the same at all points, unless they are swept.

    Raises:
        UsageError: If a value cannot be meant.
    """
    for texts in product(*(axis.texts for axis in swept)):
        chosen = list(zip(swept, texts, strict=True))
        values = {axis.parameter: value_of(axis.parameter, text) for axis, text in chosen if axis.parameter}
        yield Point(
            texts={axis.name: text for axis, text in chosen},
            values={**fixed, **values},
            arguments=tuple(word for axis, text in chosen if not axis.parameter for word in (axis.option, text)),
        )
