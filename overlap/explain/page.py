"""Page of a report: text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from shutil import get_terminal_size

from ..errors import printable
from ..units import figure, figure_unit
from .report import Advice, Why

COLUMNS = 100
"""Width of a page where neither a terminal nor the variable COLUMNS says another."""
_LEAST_COLUMNS = 40
_SMALL = 0.01
"""Part of a step: causes with less share a line."""


def page_lines(why: Why, width: int | None = None) -> list[str]:
    """Return the page as lines: the sentence, causes, advice, and open questions. Nothing is cut off.

    Args:
        why: The report.
        width: Columns; None: those of the terminal, or of the variable COLUMNS.
    """
    if why.hang is not None:
        return [printable(line) for line in why.hang.page]
    columns = width or page_columns()
    lines = [*_wrap(why.verdict, columns), ""]
    for line in _cause_lines(why):
        lines += _wrap(line, columns, indent=21)
    for number, item in enumerate(why.advice, 1):
        lines += [""] * (number == 1) + _advice_lines(number, item, columns)
    shown = [f"step {why.step} is shown; {len(why.steps_ns)} are recorded"] if len(why.steps_ns) > 1 else []
    for line in (*shown, *(f"cannot be told: {each}" for each in why.undecided), *why.notes):
        lines += _wrap(line, columns, indent=3)
    return lines


def page_columns(default: int = COLUMNS) -> int:
    """Return the columns of the terminal, or of the variable COLUMNS; `default` without either."""
    return max(get_terminal_size((default, 0)).columns, _LEAST_COLUMNS)


def _cause_lines(why: Why) -> Iterator[str]:
    """Yield a line for each cause with its time, share and call site; causes below `_SMALL` share the last line."""
    unit, unit_ns = figure_unit(why.step_ns)
    small = [cause for cause in why.causes if cause.share < _SMALL]
    for cause in why.causes:
        if cause.share >= _SMALL:
            place = f": {cause.places[0]}" if cause.places else ""
            yield f"{figure(cause.duration_ns, unit_ns):>9} {unit} {cause.share:4.0%}  {cause.text}{place}"
    if small:
        ns, share = sum(cause.duration_ns for cause in small), sum(cause.share for cause in small)
        yield f"{figure(ns, unit_ns):>9} {unit} {share:4.0%}  {', '.join(cause.cause for cause in small)}"


def _advice_lines(number: int, item: Advice, width: int) -> list[str]:
    """Return the lines of one piece of advice: the change with its call site, then evidence and gain."""
    where = f" ({item.place})" if item.place else ""
    return [
        *_wrap(f"{number}. {item.change}{where}", width, indent=3),
        *_wrap(f"   {item.evidence}; gain {item.gain_text}", width, indent=3),
    ]


def _wrap(line: str, width: int, *, indent: int = 0) -> list[str]:
    """Return a text as lines, all but the first indented; a word that is longer than a line has one of its own."""
    indent = min(indent, width // 4)
    return textwrap.wrap(
        printable(line), width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
