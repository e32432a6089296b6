"""Parser of command lines, and the layout of help: lines are wrapped, and rare options are shown by `--help-all`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import groupby
from typing import Any, NoReturn

from ..errors import UsageError
from ..units import wrap_text

_SIMILAR = 0.75
"""Least similarity of an unknown option to one that is suggested, as a `SequenceMatcher.ratio` from 0 to 1."""

_OPTIONS_OF_LAUNCHERS = dict.fromkeys(
    ("-n", "-np", "--n", "--np", "--num-processes", "--num-proc", "--world-size", "--num-ranks"),
    ("--ranks", "--processes"),
) | {"--nproc-per-node": ("--processes",)}
"""Options of other launchers, each with the options of overlap that may be meant."""

_TORCHRUN_ADVICE = {
    **dict.fromkeys(
        ("--master-addr", "--master-port"), "--rdzv-endpoint HOST:PORT is both, and a run on one host needs none"
    ),
    "--standalone": "leave it out: a run on one host needs no rendezvous",
}
"""Options of torchrun that overlap does not need, each with what to do."""


class Parser(argparse.ArgumentParser):
    """Parser of a command line that reports mistakes in one line."""

    doubles_separator = False
    """Whether a command has options after its program that `--` ends. Argparse would drop the first `--` there."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, formatter_class=HelpFormatter, add_help=False)
        self._optionals.title, self._positionals = "arguments", self._optionals
        self.add_argument("-h", "--help", action=_Help, nargs=0, help="show the usual options, and exit").rare = True  # type: ignore[attr-defined]
        self.add_argument("--help-all", action=_Help, nargs=0, help="show all options with their defaults, and exit")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments; if `doubles_separator`, the first `--` is doubled, because argparse drops one."""
        if self.doubles_separator and "--" in args:
            args = [*args[: args.index("--")], "--", *args[args.index("--") :]]
        return super().parse_known_args(args, namespace)

    def print_help(self, file: object = None) -> None:
        """Print the help on stdout; `file` is ignored. Argparse would ignore an error of writing."""
        sys.stdout.write(self.format_help())

    def error(self, message: str) -> NoReturn:
        """Raise a `UsageError` with the message of argparse; for an unknown option it names the most similar one."""
        meant = self._suggest_option(message.partition("unrecognized arguments: ")[2])
        raise UsageError(f"{self.prog.removeprefix('overlap ')}: {message}{meant} (`{self.prog} --help` explains)")

    def flags(self) -> set[str]:
        """Return all long options, such as "--ranks", the rare ones included."""
        return {flag for action in self._actions for flag in action.option_strings if flag.startswith("--")}

    def _suggest_option(self, words: str) -> str:
        """Return a suggestion such as "; did you mean --ranks?" for the first of some words, or ""."""
        option = words.partition(" ")[0].partition("=")[0].replace("_", "-")
        if option in _TORCHRUN_ADVICE:
            return f"; {_TORCHRUN_ADVICE[option]}"
        similar = sorted(self.flags().intersection(_OPTIONS_OF_LAUNCHERS.get(option, ())))
        if not similar and option.startswith("--"):
            names = sorted(flag[2:] for flag in self.flags())
            begun = [name for name in names if name.startswith(f"{option[2:]}-")]
            close = get_close_matches(option[2:], begun or names, n=1, cutoff=0 if begun else _SIMILAR)
            similar = [f"--{name}" for name in close]
        return f"; did you mean {' or '.join(similar)}?" if similar else ""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Layout of help: prose is wrapped, and examples are not."""

    everything = False
    """Whether to show rare options, and the part of each help after its first semicolon."""

    def add_argument(self, action: argparse.Action) -> None:
        """Show an option, unless it is a rare one."""
        if self.everything or not getattr(action, "rare", False):
            super().add_argument(action)

    def add_usage(self, usage: Any, actions: Iterable[argparse.Action], *rest: Any) -> None:
        """Show the line of usage, with "[options]" in place of each option."""
        needed = [self._format_args(action, action.dest.upper()) for action in actions if not action.option_strings]
        super().add_usage(usage or " ".join(["%(prog)s [options]", *needed]), actions, *rest)

    def _expand_help(self, action: argparse.Action) -> str:
        """Return the help of an option; only up to its first semicolon, unless everything is shown."""
        text = super()._expand_help(action)
        return text if self.everything else text.partition(";")[0]

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Return the names of an option, followed by one metavar: "-o, --output FILE" (called by argparse)."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {self._format_args(action, action.dest.upper())}"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap lines without an indent, which are prose; indented lines are examples, and stay (called by argparse)."""
        groups = groupby(text.splitlines(), key=lambda line: bool(line) and not line.startswith(" "))
        parts = [wrap_text(" ".join(lines), width) if prose else list(lines) for prose, lines in groups]
        return "\n".join(indent + line for part in parts for line in part)


class FullHelpFormatter(HelpFormatter):
    """Layout of help with all options."""

    everything = True


class _Help(argparse.Action):
    """The options `--help` and `--help-all`, which print and exit before missing arguments are reported.

    `--help` shows only the first paragraphs of the description and the epilog.
    """

    def __call__(self, parser: Any, _: object, __: object, option: str | None = None) -> None:
        """Print the help and exit."""
        if option == "--help-all":
            parser.formatter_class = FullHelpFormatter
        else:
            parser.description, parser.epilog = (text.split("\n\n")[0] for text in (parser.description, parser.epilog))
        parser.print_help()
        parser.exit()
