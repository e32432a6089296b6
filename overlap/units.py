"""Sizes, times and numbers as people write them; paragraphs and tables of text. GB is 10**9 bytes, GiB is 2**30."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

from .errors import UsageError

_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SUFFIXES = (
    {f"{k}iB" if k else "B": v for k, v in _BINARY.items()}
    | _BINARY
    | {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
)
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*")
_UNITS = (("ns", 1), ("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000))


def parse_bytes(text: str, *, argument: str = "size") -> int:
    """Read a size such as `8`, `64K`, `32MiB` or `1.5GB`.

    A bare letter is binary, as in nccl-tests (`1M` is 2**20); `MB` is decimal and `MiB` binary.

    Raises:
        UsageError: If `text` is not a size, naming `argument`.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in _SUFFIXES:
        known = "B, K, M, G, KiB, MiB, GiB, kB, MB, GB"
        raise UsageError(f"{argument}: {text!r} is not a size; write a number and one of {known}")
    return int(float(match[1]) * _SUFFIXES[match[2]])


def format_bytes(nbytes: int) -> str:
    """Write a size in the largest binary unit that keeps it readable: `1536` is `1.5 KiB`."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def format_ns(duration_ns: float) -> str:
    """Write a duration with three significant digits: `1234567` is `1.23 ms`."""
    for limit, unit in ((1e3, "ns"), (1e6, "us"), (1e9, "ms")):
        if abs(duration_ns) < limit * 0.9995:
            return f"{duration_ns / (limit / 1e3):.3g} {unit}"
    return f"{duration_ns / 1e9:.3g} s" if abs(duration_ns) < 999.5e9 else f"{duration_ns / 1e9:.0f} s"


def format_s(duration_s: float) -> str:
    """Write a duration that is given in seconds, as `format_ns` does."""
    return format_ns(duration_s * 1e9)


def unit_for(length_ns: int) -> tuple[str, int]:
    """Return the largest unit that is not longer than the length: its name and its nanoseconds."""
    return max((unit for unit in _UNITS if unit[1] <= length_ns), key=lambda unit: unit[1], default=_UNITS[0])


def figure_unit(length_ns: int) -> tuple[str, int]:
    """Return the largest unit that is at most a tenth of a length: its name and its nanoseconds."""
    return unit_for(length_ns // 10)


def figure(duration_ns: float, unit_ns: int) -> str:
    """Write a duration in a unit with one decimal, or none where it has four digits."""
    value = duration_ns / unit_ns
    return f"{value:.0f}" if unit_ns == 1 or value >= 999.95 else f"{value:.1f}"


# -- text of a width --------------------------------------------------------------------------------------------------

_LEAST_WIDTH = 14
"""Characters that a column of text has at least."""


def wrapped(text: str, width: int = 80, *, first: str = "", rest: str = "") -> list[str]:
    """Return a paragraph as lines of at most `width` columns, broken at blanks only; `first` and `rest` begin them."""
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def columns(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: float = math.inf,
    words: Sequence[int] = (),
    whole: Sequence[int] = (),
) -> list[str]:
    """Return the lines of a table: the columns `words` are text and stand to the left, figures to the right.

    Where the table is wider than `width`, text goes on in lines of its own, but for the columns `whole`; then columns
    of figures at the end are left out until the rest fits.
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
        cells = [wrapped(row[index], wide[index]) or [""] if index in words else [row[index]] for index in columns_left]
        for texts in zip_longest(*cells, fillvalue=""):
            padded = [
                text.ljust(wide[index]) if index in words else text.rjust(wide[index])
                for index, text in zip(columns_left, texts, strict=True)
            ]
            lines.append("  ".join(padded).rstrip())
    return lines


# -- numbers and switches ----------------------------------------------------------------------------------------------

_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def count(text: str) -> int:
    """Read a positive whole number."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise UsageError(f"expected a positive integer, got {text!r}")
    return int(text)


def index(text: str) -> int:
    """Read a whole number that may be 0."""
    if not text.isdecimal():
        raise UsageError(f"expected an integer of 0 or more, got {text!r}")
    return int(text)


def _without_groups(text: str) -> str:
    """Return a text that is to be read as a number; `ValueError` for the groups of Python, such as 1_0 for 10."""
    if "_" in text:
        raise ValueError(text)
    return text


def integer(text: str) -> int:
    """Read a whole number."""
    try:
        return int(_without_groups(text))
    except ValueError:
        raise UsageError(f"expected an integer, got {text!r}") from None


def number(text: str) -> float:
    """Read a number."""
    try:
        return float(_without_groups(text))
    except ValueError:
        raise UsageError(f"expected a number, got {text!r}") from None


def seconds(text: str) -> float:
    """Read a positive number of seconds."""
    try:
        value = float(_without_groups(text))
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"expected a positive number of seconds, got {text!r}")
    return value


def switch(text: str) -> bool:
    """Read yes or no."""
    if text.lower() not in _YES + _NO:
        raise UsageError(f"expected 1 or 0, got {text!r}")
    return text.lower() in _YES
