"""Annotations of the fields that a machine file holds: limits, and their names in messages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated


def wrong(key: str, expected: str, found: object) -> ValueError:
    """Return the error for a value that contradicts other keys."""
    return ValueError(f"{key}: expected {expected}, found {as_written(found)!r}")


def as_written(found: object) -> object:
    """Return a value as TOML writes it, with lists for tuples."""
    return [as_written(item) for item in found] if isinstance(found, tuple) else found


@dataclass(frozen=True, slots=True)
class Words:
    """The expected value of a key, in the words of messages."""

    expected: str


@dataclass(frozen=True, slots=True)
class Numbers(Words):
    """The numbers that a key may hold, or the value of a figure."""

    least: float = -sys.float_info.max
    above: float | None = None  # limit that the number must exceed
    most: float = sys.float_info.max  # TOML has inf and nan
    whole: bool = False
    text: str | None = None  # word that may be written instead of a number, and is read as None

    def allow(self, value: object) -> bool:
        """Return whether a value is such a number."""
        return (
            (type(value) is int or (type(value) is float and (not self.whole or value.is_integer())))
            and self.least <= value <= self.most
            and (self.above is None or value > self.above)
        )


@dataclass(frozen=True, slots=True)
class ByName(Words):
    """A table by names: of records that keep their key as `kind`, or of figures."""

    known: tuple[str, ...] = ()  # accepted names, in the order of the records; any if empty


@dataclass(frozen=True, slots=True)
class Parsed(Words):
    """A text that a function converts, or refuses with a ValueError."""

    parse: Callable[[str], object]


_ONE = Numbers("a whole number, 1 or more", least=1, whole=True)
_ZERO = Numbers("a whole number, 0 or more", least=0, whole=True)
Count = Annotated[int, _ONE]
Index = Annotated[int, _ZERO]
Counts = Annotated[tuple[Count, ...], Words("a list of whole numbers, 1 or more")]
Indices = Annotated[tuple[Index, ...], Words("a list of whole numbers, 0 or more")]
Pair = Annotated[tuple[Index, Index], Words("a pair such as [0, 1]")]
Pairs = Annotated[tuple[Pair, ...], Words("a list of pairs such as [[0, 1], [1, 2]]")]
Texts = Annotated[tuple[str, ...], Words("a list of texts")]
