"""Sizes, times and numbers as people write them; paragraphs and tables of text. GB is 10**9 bytes, GiB is 2**30."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import TypeVar

from .errors import UsageError

N = TypeVar("N", int, float)

_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SUFFIXES = (
    {f"{k}iB" if k else "B": v for k, v in _BINARY.items()}
    | _BINARY
    | {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
)
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*")
_UNITS = (("ns", 1), ("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000))


def parse_bytes(text: str, *, argument: str = "size") -> int:
    """Return the bytes of a size such as `8`, `64K`, `32MiB` or `1.5GB`.

    A bare letter is binary, as in nccl-tests (`1M` is 2**20); `MB` is decimal and `MiB` binary.

    Args:
        text: The size.
        argument: Name of the argument that has it, for the error.

    Raises:
        UsageError: `text` is no size.
    """
    match = _SIZE.fullmatch(text)
    size = float(match[1]) * _SUFFIXES.get(match[2], math.nan) if match else math.nan
    if not math.isfinite(size):
        known = "B, K, M, G, KiB, MiB, GiB, kB, MB, GB"
        raise UsageError(f"{argument}: {text!r} is not a size; write a number and one of {known}")
    return int(size)


def format_bytes(nbytes: int) -> str:
    """Return a size as text in the largest binary unit in which it is 1 or more: 1536 is "1.5 KiB"."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def format_ns(duration_ns: float) -> str:
    """Return a duration as text with three significant digits: 1234567 is "1.23 ms"."""
    for limit, unit in ((1e3, "ns"), (1e6, "us"), (1e9, "ms")):
        if abs(duration_ns) < limit * 0.9995:
            return f"{duration_ns / (limit / 1e3):.3g} {unit}"
    return f"{duration_ns / 1e9:.3g} s" if abs(duration_ns) < 999.5e9 else f"{duration_ns / 1e9:.0f} s"


def format_s(duration_s: float) -> str:
    """Return a duration in seconds as text, as `format_ns` does: 0.00123 is "1.23 ms"."""
    return format_ns(duration_s * 1e9)


def axis_unit(length_ns: int) -> tuple[str, int]:
    """Return the unit for an axis: the largest unit of time that is not longer than `length_ns`.

    Returns:
        Name and nanoseconds of the unit, such as ("us", 1000).
    """
    return max((unit for unit in _UNITS if unit[1] <= length_ns), key=lambda unit: unit[1], default=_UNITS[0])


def table_unit(length_ns: int) -> tuple[str, int]:
    """Return the unit for the times of a table whose longest time is `length_ns`.

    The unit is at most a tenth of the longest time, which so has two digits or more before the decimal point.

    Returns:
        Name and nanoseconds of the unit.
    """
    return axis_unit(length_ns // 10)


def format_figure(duration_ns: float, unit_ns: int) -> str:
    """Return a duration in a unit as a number without the unit's name, with one decimal: figure(1234, 1000) is "1.2".

    Nanoseconds, and numbers of four digits or more, have no decimals.
    """
    value = duration_ns / unit_ns
    return f"{value:.0f}" if unit_ns == 1 or value >= 999.95 else f"{value:.1f}"


# -- text of a width --------------------------------------------------------------------------------------------------

_LEAST_WIDTH = 14
"""Least width of a column of text, in characters."""


def wrap_text(text: str, width: int = 80, *, first: str = "", rest: str = "") -> list[str]:
    """Return a paragraph as lines of at most `width` characters, broken at blanks only.

    Args:
        text: The paragraph.
        width: Greatest length of a line; a longer word has a line of its own.
        first: Beginning of the first line.
        rest: Beginning of all other lines.
    """
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def format_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: float = math.inf,
    words: Sequence[int] = (),
    whole: Sequence[int] = (),
) -> list[str]:
    """Return the lines of a table; text is aligned to the left, figures to the right.

    If the table is too wide, the longest columns of text are narrowed, and their cells wrapped over several lines. If
    that is not enough, columns of figures are left out, the last one first.

    Args:
        heads: Head of each column.
        rows: Cells of each row.
        width: Greatest length of a line.
        words: Indexes of the columns of text; all others are figures.
        whole: Indexes of the columns of text that are never narrowed.
    """
    table = [list(heads), *map(list, rows)]
    columns_left = list(range(len(heads)))
    wide = [max(len(row[index]) for row in table) for index in columns_left]
    while sum(wide[index] for index in columns_left) + 2 * (len(columns_left) - 1) > width:
        longest = max(set(words) - set(whole), key=lambda index: wide[index], default=None)
        if longest is not None and wide[longest] > _LEAST_WIDTH:
            wide[longest] -= 1
        elif figures := [index for index in columns_left[1:] if index not in words]:
            columns_left.remove(figures[-1])
        else:
            break
    lines = []
    for row in table:
        cells = [
            wrap_text(row[index], wide[index]) or [""] if index in words else [row[index]] for index in columns_left
        ]
        for texts in zip_longest(*cells, fillvalue=""):
            padded = [
                text.ljust(wide[index]) if index in words else text.rjust(wide[index])
                for index, text in zip(columns_left, texts, strict=True)
            ]
            lines.append("  ".join(padded).rstrip())
    return lines


# -- numbers and switches ----------------------------------------------------------------------------------------------

_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def parse_count(text: str) -> int:
    """Return a positive whole number read from text.

    Raises:
        UsageError: The text is no positive whole number.
    """
    if not text.strip().isdecimal() or int(text) < 1:
        raise UsageError(f"expected a positive integer, got {text!r}")
    return int(text)


def parse_index(text: str) -> int:
    """Return a whole number of 0 or more read from text.

    Raises:
        UsageError: The text is no whole number of 0 or more.
    """
    if not text.isdecimal():
        raise UsageError(f"expected an integer of 0 or more, got {text!r}")
    return int(text)


def _parse_number_of_kind(text: str, kind: Callable[[str], N], expected: str) -> N:
    """Return `kind(text)`; raises `UsageError`, also for underscores, which Python allows in numbers."""
    with suppress(ValueError):
        if "_" not in text:
            return kind(text)
    raise UsageError(f"expected {expected}, got {text!r}")


def parse_integer(text: str) -> int:
    """Return a whole number read from text; raises `UsageError` if it is none."""
    return _parse_number_of_kind(text, int, "an integer")


def parse_number(text: str) -> float:
    """Return a number read from text; raises `UsageError` if it is none."""
    return _parse_number_of_kind(text, float, "a number")


def parse_seconds(text: str) -> float:
    """Return a positive, finite number of seconds read from text; raises `UsageError` if it is none."""
    expected = "a positive number of seconds"
    value = _parse_number_of_kind(text, float, expected)
    if not 0 < value < math.inf:
        raise UsageError(f"expected {expected}, got {text!r}")
    return value


def parse_yes_no(text: str) -> bool:
    """Return whether a text means yes: 1, true, yes or on; 0, false, no and off mean no.

    Raises:
        UsageError: The text means neither.
    """
    if text.lower() not in _YES + _NO:
        raise UsageError(f"expected 1 or 0, got {text!r}")
    return text.lower() in _YES
