"""Page of a report: text for a terminal, at most 24 lines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from ..errors import printable
from ..units import figure, figure_unit
from .report import Advice, Why

LINES = 24
WRAPPED_CAUSES = 3
"""Causes whose places are wrapped to a second line; those of others are cut."""
_SMALL = 0.01
"""Part of a step: causes with less share a line."""


def page_lines(why: Why, width: int = 100) -> list[str]:
    """Return the page as lines: the sentence, causes, advice, and open questions; omitted advice is counted."""
    if why.hang is not None:
        return [printable(line) for line in why.hang["page"]]
    head = textwrap.wrap(printable(why.verdict), width, max_lines=4, placeholder=" ...")
    tail = [_shorten(f"cannot be told: {each}", width) for each in why.undecided]
    notes = [_shorten(each, width) for each in why.notes]
    lines = [*head, ""]
    for number, line in enumerate(_cause_lines(why)):
        lines += _wrap(line, width, indent=21) if number < WRAPPED_CAUSES else [_shorten(line, width)]
    room = LINES - len(lines) - min(len(tail), 2) - 1
    for number, item in enumerate(why.advice, 1):
        advice_lines = _advice_lines(number, item, width)
        if len(advice_lines) + (number == 1) > room:
            lines.append(f"and {len(why.advice) - number + 1} more: --json")
            break
        lines += [""] * (number == 1) + advice_lines
        room -= len(advice_lines) + (number == 1)
    return [*lines, *[*tail, *notes][: LINES - len(lines)]]


def _shorten(line: str, width: int) -> str:
    """Return a text as one line of at most `width` characters; longer texts end in "..."."""
    line = printable(line)
    return line if len(line) <= width else line[: width - 3] + "..."


def _cause_lines(why: Why) -> Iterator[str]:
    """Yield a line for each cause with its time, share and place; causes below `_SMALL` share the last line."""
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
    """Return the lines of one piece of advice: the change with its place, then evidence and gain."""
    where = f" (at {item.place})" if item.place else ""
    return [
        *_wrap(f"{number}. {item.change}{where}", width, indent=3),
        *_wrap(f"   {item.evidence}; gain {item.gain_text}", width, indent=3),
    ]


def _wrap(line: str, width: int, *, indent: int) -> list[str]:
    """Return a text as at most two lines, the second one indented; longer texts end in " ..."."""
    return textwrap.wrap(printable(line), width, max_lines=2, placeholder=" ...", subsequent_indent=" " * indent)
