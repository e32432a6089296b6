"""The command `overlap`: one file per subcommand, loaded when it is used.

A command module has `fill(parser)`, which says what the command takes, and `main(args) -> int`, which does it.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper

from ..errors import UsageError
from .failure import report
from .output import discard, open_missing
from .parser import HelpFormatter, Parser

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "demo": "train on handwritten digits without overlap and with it, and see the difference",
    "run": "run a program's ranks, with settings and a trace from the command line",
    "simulate": "run a program on a modelled cluster in virtual time, once or over a sweep of settings",
    "timeline": "draw a trace file: what was hidden, what was exposed",
    "advise": "try on a trace what can be changed, and list what would make its steps shorter",
    "ls": "list the worlds that run on this host",
    "top": "show what the ranks of a running world do: compute, communication, who is late",
    "autopsy": "say who ended a run, where it was, and what it waited for",
    "bench": "measure a collective: its time, its bandwidth, and whether every result was right",
    "topology": "draw a machine, its legal groups and rings",
    "plan": "say what a collective becomes on a machine, how long it takes, and why",
    "pipeline": "draw a pipeline schedule: what each rank computes when, its bubble, what ranks hold at once",
    "calibrate": "make a machine file from the output of a benchmark, and say how far to trust it",
    "validate": "compare predictions with published measurements, and say how far off they are",
}
"""Every command and its line of help: `overlap --help` must not load them."""

_DESCRIPTION = "Run training loops as asynchronous ranks and hide communication behind compute."

_EPILOG = """\
examples:
  overlap demo                                      see what overlap does, in under a minute
  overlap run --ranks 4 --trace run.json train.py   run a program and record its timeline
  overlap timeline run.json                         look at it

`overlap COMMAND --help` explains a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (by default the process's own) and return the exit code.

    0 is success, 1 a failed program or wrong results, 2 something that the caller can correct (told in one line on
    stderr), 130 an interrupt. `overlap run` returns the code that its program exits with.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as the package has set it, while all this was imported
        signal.signal(signal.SIGINT, signal.default_int_handler)
    open_missing()
    if isinstance(sys.stdout, TextIOWrapper) and not sys.stdout.encoding.lower().startswith("utf"):
        sys.stdout.reconfigure(errors="backslashreplace")  # as of stderr: names and texts of users know no bounds
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
    except (Exception, KeyboardInterrupt, SystemExit, BaseExceptionGroup) as error:
        code = report(error)
    try:
        sys.stdout.flush()
    except OSError as error:  # nobody reads it, or it is full
        lost = report(error)
        code = code or lost
    try:
        sys.stderr.flush()
    except OSError:  # nobody can be told
        discard(sys.stderr)
    return code


def _run(argv: list[str]) -> int:
    """Find the command that `argv` names, and leave the rest to it."""
    name, *words = argv or ["--help"]
    if name in ("-h", "--help", "--version"):
        _overview().parse_args([name])  # shows it and exits
    if name not in COMMANDS:
        close = get_close_matches(name, COMMANDS, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise UsageError(f"{name!r} is not a command{meant}; known are {', '.join(COMMANDS)}")
    command = import_module(f".{name}", __name__)
    parser = Parser(prog=f"overlap {name}", formatter_class=HelpFormatter)
    command.fill(parser)
    return int(command.main(parser.parse_args(words)))


def _overview() -> argparse.ArgumentParser:
    parser = Parser(prog="overlap", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=HelpFormatter)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from ..version import version

        print(f"overlap {version()}")
        parser.exit()
