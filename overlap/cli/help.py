"""How help is laid out: texts keep their lines where these fit, and are wrapped anew where the terminal is narrower."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator
from itertools import groupby

_BESIDE = re.compile(r"(?<=\S) {2,}(?=\S)")
"""Between an example and what is said of it."""

_DEEPEST = 6
"""Columns before a line that is wrapped: what is said of an example on a line of its own stood further right."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Paragraphs are wrapped; of a line that is indented, what stands beside it goes below it."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        groups = groupby(text.splitlines(), key=lambda line: bool(line) and not line.startswith(" "))
        return "\n".join(indent + line for prose, lines in groups for line in _wrapped(list(lines), width, prose))


def _wrapped(lines: list[str], width: int, prose: bool) -> Iterator[str]:
    if all(len(line) <= width for line in lines):
        yield from lines
    elif prose:
        yield from textwrap.wrap(" ".join(lines), width, break_on_hyphens=False)
    else:
        for line in lines:
            yield from _below(line, width)


def _below(line: str, width: int) -> Iterator[str]:
    """Yield the parts of an indented line, what stands beside the first one below it."""
    if len(line) <= width:
        yield line
        return
    stripped = line.strip()
    indent = " " * min(len(line) - len(line.lstrip()), _DEEPEST)
    for number, part in enumerate(_BESIDE.split(stripped)):
        begin = indent + "    " * (number > 0)
        if part.startswith("overlap "):  # a command, to be copied
            yield begin + part
        else:
            yield from textwrap.wrap(
                part, width, initial_indent=begin, subsequent_indent=f"{indent}    ", break_on_hyphens=False
            )
