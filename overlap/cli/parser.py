"""Parser of command lines, and the layout of help: lines are wrapped, and rare options are shown by `--help-all`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from copy import copy
from difflib import get_close_matches
from itertools import groupby
from typing import Any, NoReturn

from ..errors import UsageError
from ..notice import notify
from ..units import wrapped

_BESIDE = re.compile(r"(?<=\S) {2,}(?=\S)")
"""The gap between an example and its explanation."""

_JSON_FILE = re.compile(r"(arguments: .*(\.json|-)|--json: ignored explicit argument .*)$")
"""Messages about `--json FILE`, as some commands of the previous version had it."""

_DEEPEST = 6
"""Largest indentation of a wrapped line: an explanation on a line of its own may have stood further right."""


_OF_OTHERS = dict.fromkeys(
    ("-n", "-np", "--n", "--np", "--num-processes", "--num-proc", "--world-size", "--num-ranks"),
    ("--ranks", "--processes"),
) | {"--stall": ("--stall-warning",), "--give-up": ("--stall-timeout",)}
"""Options of other launchers and of earlier versions, and ours."""

_INSTEAD = {
    **dict.fromkeys(
        ("--master-addr", "--master-port"), "--rdzv-endpoint HOST:PORT is both, and a run on one host needs none"
    ),
    "--standalone": "leave it out: a run on one host needs no rendezvous",
    "--vs": "`python -m tests.benchmarks.versus` of a checkout compares with other libraries",
}
"""Options of torchrun and of earlier versions that mean nothing here, and what to do."""


class Parser(argparse.ArgumentParser):
    """Parser of a command line that reports mistakes in one line."""

    doubles_separator = False
    """Whether `--` ends the options of a command behind its program: argparse drops the first after a positional."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, with each `--` twice where the command needs one of them."""
        if self.doubles_separator and "--" in args:
            args = [*args[: args.index("--")], "--", *args[args.index("--") :]]
        return super().parse_known_args(args, namespace)

    def print_help(self, file: object = None) -> None:
        """Print the help; argparse would hide that stdout cannot be written."""
        sys.stdout.write(self.format_help())

    def error(self, message: str) -> NoReturn:
        """Raise a `UsageError` with the message of argparse; for an unknown option it names the most similar one."""
        meant = self._suggest_option(message.partition("unrecognized arguments: ")[2])
        if not meant and "--json-file" in self.flags() and _JSON_FILE.search(message):
            meant = "; --json prints the result on stdout, --json-file FILE writes it to a file"
        raise UsageError(f"{self.prog.removeprefix('overlap ')}: {message}{meant} (`{self.prog} --help` explains)")

    def flags(self) -> set[str]:
        """Return the long options, also the rare ones."""
        whole = copy(self)
        whole.formatter_class = FullHelpFormatter
        whole.description = whole.epilog = None  # they may name options of others
        return set(re.findall(r"(?<!\S)--[a-z-]+", whole.format_help()))

    def _suggest_option(self, words: str) -> str:
        """Return "; did you mean --ranks?" for the first of some words, or nothing."""
        option = words.partition(" ")[0].partition("=")[0]
        option = option.replace("_", "-")
        known = self.flags() - {option}  # its help may name one of another command
        if option in _INSTEAD:
            return f"; {_INSTEAD[option]}"
        if meant := " or ".join(sorted(known.intersection(_OF_OTHERS.get(option, ())))):
            return f"; did you mean {meant}?"
        close = get_close_matches(option, sorted(known), n=1)
        return f"; did you mean {close[0]}?" if option.startswith("--") and close else ""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Layout of help: paragraphs are wrapped; of an indented line, the explanation goes below the example."""

    everything = False
    """Whether rare options are shown."""

    def add_argument(self, action: argparse.Action) -> None:
        """Show an option, unless it is a rare one."""
        if self.everything or not is_rare(action):
            super().add_argument(action)

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        """Show the line of usage without rare options."""
        shown = [action for action in actions if self.everything or not is_rare(action)]
        super().add_usage(usage, shown, groups, prefix)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Lay out paragraphs: lines without indent are prose, all others are examples (called by argparse)."""
        groups = groupby(text.splitlines(), key=lambda line: bool(line) and not line.startswith(" "))
        return "\n".join(indent + line for prose, lines in groups for line in _fit_paragraph(list(lines), width, prose))


class FullHelpFormatter(HelpFormatter):
    """Layout of help with all options."""

    everything = True


class HelpAll(argparse.Action):
    """The option `--help-all`: shows the help with all options, and exits."""

    def __init__(self, option_strings: list[str], dest: str, *, more: str = "", **_: object) -> None:
        self._more = more  # A paragraph at the end
        text = "show all options, and exit"
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=text)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the help and exit."""
        parser.formatter_class = FullHelpFormatter
        parser.epilog = f"{parser.epilog}\n{self._more}"
        parser.print_help()
        parser.exit()


class Renamed(argparse.Action):
    """A spelling of the previous version: the option works, with a notice that names its new spelling."""

    def __init__(self, option_strings: list[str], dest: str, *, now: argparse.Action, **_: object) -> None:
        self._now = now
        details: dict[str, Any] = {
            name: getattr(now, name) for name in ("nargs", "const", "type", "choices", "metavar")
        }
        super().__init__(option_strings, now.dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **details)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Store the value under the new option, and print a notice with its name."""
        notify(f"{option} is now {self._now.option_strings[-1]}; the old spelling goes with the next version")
        self._now(parser, namespace, values, option)


def mark_rare(action: argparse.Action, *, rare: bool = True) -> None:
    """Let only `--help-all` show an option."""
    action.rare = rare  # type: ignore[attr-defined]


def is_rare(action: argparse.Action) -> bool:
    """Return whether only `--help-all` shows an option."""
    return getattr(action, "rare", False)


def _fit_paragraph(lines: list[str], width: int, prose: bool) -> Iterator[str]:
    """Yield the lines of a paragraph in `width` columns: prose is wrapped, examples get their explanation below."""
    if all(len(line) <= width for line in lines):
        yield from lines
    elif prose:
        yield from wrapped(" ".join(lines), width)
    else:
        for line in lines:
            yield from _split_example(line, width)


def _split_example(line: str, width: int) -> Iterator[str]:
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
