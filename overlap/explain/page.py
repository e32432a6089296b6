"""Page of a report: text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from shutil import get_terminal_size

from ..errors import escape_control_characters
from ..units import format_figure, table_unit
from .report import Advice, Why

COLUMNS = 100
"""Width of a page without a terminal and without the variable COLUMNS."""
_LEAST_COLUMNS = 40
_SMALL = 0.01
"""Causes that take less than this part of a step are listed together on one line."""


def page_lines(why: Why, width: int | None = None) -> list[str]:
    """Return the page as lines: the sentence, causes, advice, and open questions. Nothing is cut off.

    Args:
        why: The report.
        width: Columns; None: the width of the terminal, or the variable COLUMNS.
    """
    if why.hang is not None:
        return [escape_control_characters(line) for line in why.hang.page]
    columns = width or page_columns()
    lines = [*wrap_line(why.verdict, columns), ""]
    for line in _cause_lines(why):
        lines += wrap_line(line, columns, indent=21)
    for number, item in enumerate(why.advice, 1):
        lines += [""] * (number == 1) + _advice_lines(number, item, columns)
    shown = [f"step {why.step} is shown; {len(why.steps_ns)} are recorded"] if len(why.steps_ns) > 1 else []
    for line in (*shown, *(f"cannot be told: {each}" for each in why.undecided), *why.notes):
        lines += wrap_line(line, columns, indent=3)
    return lines


def page_columns(default: int = COLUMNS) -> int:
    """Return the variable COLUMNS, or the width of the terminal, or `default` without both; at least 40."""
    return max(get_terminal_size((default, 0)).columns, _LEAST_COLUMNS)


def _cause_lines(why: Why) -> Iterator[str]:
    """Yield a line for each cause with its time, share and call site; causes below `_SMALL` share the last line."""
    unit, unit_ns = table_unit(why.step_ns)
    small = [cause for cause in why.causes if cause.share < _SMALL]
    for cause in why.causes:
        if cause.share >= _SMALL:
            place = f": {cause.places[0]}" if cause.places else ""
            yield f"{format_figure(cause.duration_ns, unit_ns):>9} {unit} {cause.share:4.0%}  {cause.text}{place}"
    if small:
        ns, share = sum(cause.duration_ns for cause in small), sum(cause.share for cause in small)
        yield f"{format_figure(ns, unit_ns):>9} {unit} {share:4.0%}  {', '.join(cause.cause for cause in small)}"


def _advice_lines(number: int, item: Advice, width: int) -> list[str]:
    """Return the lines of one piece of advice: the change with its call site, then evidence and gain."""
    where = f" ({item.place})" if item.place else ""
    return [
        *wrap_line(f"{number}. {item.change}{where}", width, indent=3),
        *wrap_line(f"   {item.evidence}; gain {item.gain_text}", width, indent=3),
    ]


def wrap_line(line: str, width: int, *, indent: int = 0) -> list[str]:
    """Wrap a text into lines. All but the first are indented; a word longer than a line is not broken."""
    indent = min(indent, width // 4)
    return textwrap.wrap(
        escape_control_characters(line),
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
