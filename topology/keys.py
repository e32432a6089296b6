"""What the keys of a machine file hold: numbers with their origin, lists, texts; each says what it expects.

The words of a `description` are those of messages; `complaint` puts them together.
"""

# Annotations are objects in this file: evaluating them from text takes msgspec longer than everything else here.

import sys
from typing import Annotated

from msgspec import Meta, Struct

from .grouprules import Confidence
from .overheads import Figure

_LARGEST = sys.float_info.max  # TOML has inf and nan
Positive = Annotated[float, Meta(gt=0, le=_LARGEST, description="a positive number")]
NotNegative = Annotated[float, Meta(ge=0, le=_LARGEST, description="a number, 0 or more")]
Count = Annotated[int, Meta(ge=1, description="a whole number, 1 or more")]
Index = Annotated[int, Meta(ge=0, description="a whole number, 0 or more")]
Counts = Annotated[tuple[Count, ...], Meta(description="a list of whole numbers, 1 or more")]
Indices = Annotated[tuple[Index, ...], Meta(description="a list of whole numbers, 0 or more")]
Pair = Annotated[tuple[Index, Index], Meta(description="a pair such as [0, 1]")]
Pairs = Annotated[tuple[Pair, ...], Meta(description="a list of pairs such as [[0, 1], [1, 2]]")]
Text = Annotated[str, Meta(description="a text")]
Texts = Annotated[tuple[Text, ...], Meta(description="a list of texts")]
Flag = Annotated[bool, Meta(description="true or false")]
Share = Annotated[float, Meta(gt=0, le=1, description="a share, more than 0 and at most 1")]


class TomlTable(Struct, kw_only=True, forbid_unknown_fields=True):
    """One table of a file; a key that is not there is None."""


class Amount(TomlTable):
    """A number with its origin; zero is none."""

    value: Positive
    source: Text = ""
    confidence: Confidence = "E"


class Duration(TomlTable):
    """The same of something that may take no time."""

    value: NotNegative
    source: Text = ""
    confidence: Confidence = "E"


AmountKey = Annotated[Positive | Amount, Meta(description="a positive number, or { value, source, confidence }")]
DurationKey = Annotated[
    NotNegative | Duration, Meta(description="a number, 0 or more, or { value, source, confidence }")
]


def wrong(key: str, expected: str, found: object) -> ValueError:
    """Build the error for a key that contradicts others."""
    return ValueError(f"{key}: expected {expected}, found {_as_written(found)!r}")


def _as_written(found: object) -> object:
    return [_as_written(item) for item in found] if isinstance(found, tuple) else found


def figure(given: float | Amount | Duration, where: str) -> Figure:
    """Return a number with its origin; a bare one is the user's own, from the file."""
    if isinstance(given, Amount | Duration):
        return Figure(value=given.value, source=given.source or where, confidence=given.confidence)
    return Figure(value=given, source=where, confidence="E")


def figure_or_none(given: float | Amount | Duration | None, where: str) -> Figure | None:
    """Return the same of a number that may be absent."""
    return None if given is None else figure(given, where)
