"""Annotations for fields that are read from a machine file: allowed values, and their description in messages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated


def contradiction_error(key: str, expected: str, found: object) -> ValueError:
    """Return the error for a value that contradicts other keys.

    Args:
        key: Key of the value within its table.
        expected: Description of the expected value.
        found: The value.
    """
    return ValueError(f"{key}: expected {expected}, found {replace_tuples(found)!r}")


def replace_tuples(found: object) -> object:
    """Return a value with tuples replaced by lists, at any depth, for messages: TOML has lists only."""
    return [replace_tuples(item) for item in found] if isinstance(found, tuple) else found


@dataclass(frozen=True, slots=True)
class Words:
    """The description of the values that a key may have."""

    expected: str  # the description, such as "a list of texts", for messages


@dataclass(frozen=True, slots=True)
class Numbers(Words):
    """The numbers that a key, or the value of a figure, may have."""

    least: float = -sys.float_info.max  # least number
    above: float | None = None  # limit that the number must exceed
    most: float = sys.float_info.max  # greatest number; it excludes inf and nan, which TOML has
    whole: bool = False  # whether the number must be an integer
    text: str | None = None  # word that may be written instead of a number, and is read as None

    def allows(self, value: object) -> bool:
        """Whether a value is such a number."""
        return (
            (type(value) is int or (type(value) is float and (not self.whole or value.is_integer())))
            and self.least <= value <= self.most
            and (self.above is None or value > self.above)
        )


@dataclass(frozen=True, slots=True)
class ByName(Words):
    """A table whose keys are names: of records, which get their name as the field `kind`, or of figures."""

    known: tuple[str, ...] = ()  # accepted names, in the order of the result; any name if empty


@dataclass(frozen=True, slots=True)
class Parsed(Words):
    """A text that a function converts."""

    parse: Callable[[str], object]  # the function; it refuses a text with a ValueError


_ONE = Numbers("a whole number, 1 or more", least=1, whole=True)
_ZERO = Numbers("a whole number, 0 or more", least=0, whole=True)
Count = Annotated[int, _ONE]
Index = Annotated[int, _ZERO]
Counts = Annotated[tuple[Count, ...], Words("a list of whole numbers, 1 or more")]
Indices = Annotated[tuple[Index, ...], Words("a list of whole numbers, 0 or more")]
Pair = Annotated[tuple[Index, Index], Words("a pair such as [0, 1]")]
Pairs = Annotated[tuple[Pair, ...], Words("a list of pairs such as [[0, 1], [1, 2]]")]
Texts = Annotated[tuple[str, ...], Words("a list of texts")]
