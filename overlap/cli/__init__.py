"""The command `overlap`: one file per subcommand, loaded when it is used.

A command module has the texts of its help, `DESCRIPTION` and `EPILOG`; `add_arguments(parser)`, which adds the options
of the command; and `main(args) -> int`, which runs it.
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
from ..notice import NO_MEMORY, notify
from .output import open_closed_streams
from .parser import Parser

__all__ = ["COMMANDS", "main"]

GROUPS = {
    "get to know it": {
        "demo": "train the same model without overlap and with it",
        "new": "make a project: a training loop and its test",
        "doctor": "say what this machine lacks, and how to fix it",
    },
    "run a program": {
        "run": "run a program's ranks, in one process or several",
        "test": "run many ranks in one process, by seeds, and find bugs",
        "top": "show the jobs that run, and who is late",
        "why": "say why a job is slow or stuck, from its traces and dumps",
    },
    "see where its time goes": {
        "timeline": "draw a trace: what was hidden, and what was exposed",
        "bench": "measure a collective, and check every result",
    },
    "plan for machines": {
        "simulate": "run a program on a modelled cluster in virtual time",
        "plan": "show what a collective becomes on a machine, and why",
        "topology": "draw a machine: devices, wires, groups and rings",
    },
}
"""The commands with their lines of help, in groups by purpose. They stand here so that `overlap --help` loads none."""

COMMANDS = {name: line for commands in GROUPS.values() for name, line in commands.items()}
"""Every command and its line of help."""

GONE = {
    **dict.fromkeys(("model", "replay"), "simulate the program itself, with `overlap simulate`"),
    **dict.fromkeys(("calibrate", "validate"), "write the machine file by hand, as docs/machines.md shows"),
    "autopsy": "`overlap why` says it",
    "ls": "`overlap top` says it",
    "pipeline": "`overlap plan` shows schedules of pipelines",
}
"""Commands of the previous version, and what to do instead."""

_DESCRIPTION = "Run training loops as asynchronous ranks and hide communication behind compute."

_EPILOG = """\
examples:
  overlap demo                                      in under a minute
  overlap run --ranks 4 --trace run.json train.py   record a timeline
  overlap timeline run.json                         look at it
  overlap COMMAND --help                            all about a command
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (None: that of the process), and return the exit code.

    0 is success, 1 a failed program or wrong results, 2 a mistake that the user can correct (reported in one line on
    stderr), 130 an interrupt. `overlap run` returns the exit code of its program.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # the package sets this while it is imported
        signal.signal(signal.SIGINT, signal.default_int_handler)
    open_closed_streams()
    if isinstance(sys.stdout, TextIOWrapper) and not sys.stdout.encoding.lower().startswith("utf"):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does: names and texts may have any characters
    try:
        code = _run_command(list(sys.argv[1:] if argv is None else argv))
    except (Exception, KeyboardInterrupt, SystemExit, BaseExceptionGroup) as error:
        code = _report_error(error)
    try:
        sys.stdout.flush()
    except OSError as error:  # nobody reads it, or it is full
        lost = _report_error(error)
        code = code or lost
    try:
        sys.stderr.flush()
    except OSError:  # nobody can be told
        import_module("..launch.output", __name__).discard_stream(sys.stderr)
    return code


def _report_error(error: BaseException) -> int:
    """Report an error, and return the exit code. The module for reports is imported only here, when it is needed."""
    try:
        code: int = import_module("..launch.report", __name__).report_error(error)
    except ModuleNotFoundError as missing:  # such as msgspec; the command has probably failed for the same reason
        notify(f"{missing}: install overlap together with the packages that it needs, by pip")
        return 1
    except (MemoryError, ImportError):  # `ulimit -v` leaves no memory for it
        notify(f"{NO_MEMORY} ({type(error).__name__}: {error})")
        return 1
    return code


def _run_command(argv: list[str]) -> int:
    name, *words = argv or ["--help"]
    if name in ("-h", "--help", "--help-all", "--version"):
        _overview_parser().parse_args([name])  # shows it and exits
    if name in GONE:
        raise UsageError(f"`overlap {name}` is gone: {GONE[name]}")
    if name not in COMMANDS:
        close = get_close_matches(name, COMMANDS, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise UsageError(f"{name!r} is not a command{meant}; known are {', '.join(COMMANDS)}")
    command = import_module(f".{name}", __name__)
    parser = Parser(f"overlap {name}")
    parser.description, parser.epilog = command.DESCRIPTION, command.EPILOG
    command.add_arguments(parser)
    return int(command.main(parser.parse_args(words)))


def _overview_parser() -> argparse.ArgumentParser:
    """Return the parser of `overlap --help`: it lists all commands in their groups, and has no other use."""
    parser = Parser("overlap")
    parser.usage = "overlap [-h] [--version] COMMAND ..."
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    for title, commands in GROUPS.items():
        group = parser.add_argument_group(title)
        for name, summary in commands.items():
            group.add_argument(name, nargs="?", help=summary)
    return parser


class _Version(argparse.Action):
    """The option `--version`, which loads the version only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from ..version import version

        print(f"overlap {version()}")
        parser.exit()
