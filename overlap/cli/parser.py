"""Parser of command lines, and the layout of help: lines are wrapped, and rare options are shown by `--help-all`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from itertools import groupby
from typing import Any, NoReturn

from ..errors import UsageError
from ..units import wrapped

_BESIDE = re.compile(r"(?<=\S) {2,}(?=\S)")
"""The gap between an example and its explanation."""

_DEEPEST = 6
"""Largest indentation of a wrapped line: an explanation on a line of its own may have stood further right."""


_SIMILAR = 0.75
"""Least share of equal letters in an option that is meant by another word, as `SequenceMatcher.ratio` counts."""

_OF_OTHERS = dict.fromkeys(
    ("-n", "-np", "--n", "--np", "--num-processes", "--num-proc", "--world-size", "--num-ranks"),
    ("--ranks", "--processes"),
) | {"--nproc-per-node": ("--processes",)}
"""Options of other launchers, and ours."""

_INSTEAD = {
    **dict.fromkeys(
        ("--master-addr", "--master-port"), "--rdzv-endpoint HOST:PORT is both, and a run on one host needs none"
    ),
    "--standalone": "leave it out: a run on one host needs no rendezvous",
}
"""Options of torchrun that mean nothing here, and what to do."""


class Parser(argparse.ArgumentParser):
    """Parser of a command line that reports mistakes in one line."""

    doubles_separator = False
    """Whether `--` ends the options of a command behind its program: argparse drops the first after a positional."""

    more = ""
    """A paragraph at the end of `--help-all`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, formatter_class=HelpFormatter)
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all options, and exit")

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
        raise UsageError(f"{self.prog.removeprefix('overlap ')}: {message}{meant} (`{self.prog} --help` explains)")

    def flags(self) -> set[str]:
        """Return the long options, also the rare ones."""
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        return {flag for action in shown for flag in action.option_strings if flag.startswith("--")}

    def _suggest_option(self, words: str) -> str:
        """Return "; did you mean --ranks?" for the first of some words, or nothing if no option is similar."""
        option = words.partition(" ")[0].partition("=")[0].replace("_", "-")
        if option in _INSTEAD:
            return f"; {_INSTEAD[option]}"
        meant = sorted(self.flags().intersection(_OF_OTHERS.get(option, ())))
        if not meant and option.startswith("--"):
            names = sorted(flag[2:] for flag in self.flags())
            begun = [name for name in names if name.startswith(f"{option[2:]}-")]
            close = get_close_matches(option[2:], begun or names, n=1, cutoff=0 if begun else _SIMILAR)
            meant = [f"--{name}" for name in close]
        return f"; did you mean {' or '.join(meant)}?" if meant else ""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Layout of help: paragraphs are wrapped; of an indented line, the explanation goes below the example."""

    everything = False
    """Whether rare options are shown."""

    def add_argument(self, action: argparse.Action) -> None:
        """Show an option, unless it is a rare one."""
        if self._shows(action):
            super().add_argument(action)

    def add_usage(self, usage: Any, actions: Iterable[argparse.Action], *rest: Any) -> None:
        """Show the line of usage without rare options."""
        super().add_usage(usage, list(filter(self._shows, actions)), *rest)

    def _shows(self, action: argparse.Action) -> bool:
        """Whether an option is shown: rare ones only by `--help-all`, which itself needs no place in the usage."""
        return self.everything or not getattr(action, "rare", False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Lay out paragraphs: lines without indent are prose, all others are examples (called by argparse)."""
        groups = groupby(text.splitlines(), key=lambda line: bool(line) and not line.startswith(" "))
        return "\n".join(indent + line for prose, lines in groups for line in _fit_paragraph(list(lines), width, prose))


class FullHelpFormatter(HelpFormatter):
    """Layout of help with all options."""

    everything = True


class _HelpAll(argparse.Action):
    """The option `--help-all`: shows the help with all options, and exits, before other arguments are missed."""

    def __call__(self, parser: Any, *_: object) -> None:
        """Print the help and exit."""
        parser.formatter_class = FullHelpFormatter
        parser.epilog = f"{parser.epilog}\n{parser.more}"
        parser.print_help()
        parser.exit()


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
