"""Parser of command lines, and the layout of help: lines are wrapped, and rare options are shown by `--help-all`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import groupby
from typing import Any, NoReturn

from ..errors import UsageError
from ..units import wrapped

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

    def __init__(self, prog: str) -> None:
        super().__init__(prog, formatter_class=HelpFormatter, add_help=False)
        self._optionals.title, self._positionals = "arguments", self._optionals
        self.add_argument("-h", "--help", action=_Help, nargs=0, help="show the usual options, and exit").rare = True  # type: ignore[attr-defined]
        self.add_argument("--help-all", action=_Help, nargs=0, help="show all options with their defaults, and exit")

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
        return {flag for action in self._actions for flag in action.option_strings if flag.startswith("--")}

    def _suggest_option(self, words: str) -> str:
        """Return "; did you mean --ranks?" for the first of some words, or nothing if no option is similar."""
        option = words.partition(" ")[0].partition("=")[0].replace("_", "-")
        if option in _INSTEAD:
            return f"; {_INSTEAD[option]}"
        similar = sorted(self.flags().intersection(_OF_OTHERS.get(option, ())))
        if not similar and option.startswith("--"):
            names = sorted(flag[2:] for flag in self.flags())
            begun = [name for name in names if name.startswith(f"{option[2:]}-")]
            close = get_close_matches(option[2:], begun or names, n=1, cutoff=0 if begun else _SIMILAR)
            similar = [f"--{name}" for name in close]
        return f"; did you mean {' or '.join(similar)}?" if similar else ""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Layout of help: prose is wrapped, and examples are not."""

    everything = False
    """Whether rare options are shown, and of each option the remarks after the first semicolon of its help."""

    def add_argument(self, action: argparse.Action) -> None:
        """Show an option, unless it is a rare one."""
        if self.everything or not getattr(action, "rare", False):
            super().add_argument(action)

    def add_usage(self, usage: Any, actions: Iterable[argparse.Action], *rest: Any) -> None:
        """Show the line of usage, without each option."""
        needed = [self._format_args(action, action.dest.upper()) for action in actions if not action.option_strings]
        super().add_usage(usage or " ".join(["%(prog)s [options]", *needed]), actions, *rest)

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action)
        return text if self.everything else text.partition(";")[0]

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Return the spellings of an option, and its value once (called by argparse)."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {self._format_args(action, action.dest.upper())}"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap the lines without indent, which are prose; examples stay as they are (called by argparse)."""
        groups = groupby(text.splitlines(), key=lambda line: bool(line) and not line.startswith(" "))
        parts = [wrapped(" ".join(lines), width) if prose else list(lines) for prose, lines in groups]
        return "\n".join(indent + line for part in parts for line in part)


class FullHelpFormatter(HelpFormatter):
    """Layout of help with all options."""

    everything = True


class _Help(argparse.Action):
    """`--help`, with the first paragraphs of the texts, or `--help-all`; before other arguments are missed."""

    def __call__(self, parser: Any, _: object, __: object, option: str | None = None) -> None:
        """Print the help and exit."""
        if option == "--help-all":
            parser.formatter_class = FullHelpFormatter
        else:
            parser.description, parser.epilog = (text.split("\n\n")[0] for text in (parser.description, parser.epilog))
        parser.print_help()
        parser.exit()
