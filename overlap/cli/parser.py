"""Parser of command lines, and the layout of help: lines that do not fit the terminal are wrapped."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from typing import NoReturn

from ..errors import UsageError
from ..units import wrapped

_BESIDE = re.compile(r"(?<=\S) {2,}(?=\S)")
"""The gap between an example and its explanation."""

_DEEPEST = 6
"""Largest indentation of a wrapped line: an explanation on a line of its own may have stood further right."""


class Parser(argparse.ArgumentParser):
    """Parser of a command line that reports mistakes in one line."""

    def print_help(self, file: object = None) -> None:
        """Print the help; argparse would hide that stdout cannot be written."""
        sys.stdout.write(self.format_help())

    def error(self, message: str) -> NoReturn:
        """Raise a `UsageError`."""
        raise UsageError(f"{self.prog.removeprefix('overlap ')}: {message} (`{self.prog} --help` explains)")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Layout of help: paragraphs are wrapped; of an indented line, the explanation goes below the example."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        groups = groupby(text.splitlines(), key=lambda line: bool(line) and not line.startswith(" "))
        return "\n".join(indent + line for prose, lines in groups for line in _fitted(list(lines), width, prose))


def _fitted(lines: list[str], width: int, prose: bool) -> Iterator[str]:
    if all(len(line) <= width for line in lines):
        yield from lines
    elif prose:
        yield from wrapped(" ".join(lines), width)
    else:
        for line in lines:
            yield from _below(line, width)


def _below(line: str, width: int) -> Iterator[str]:
    """Yield the parts of an indented line, each explanation below its example."""
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
            yield from wrapped(part, width, first=begin, rest=f"{indent}    ")
