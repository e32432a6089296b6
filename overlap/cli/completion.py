"""Prints the script by which a shell completes commands, options and files: `overlap --print-completion bash`.

The script is fixed text: completing runs no Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec

from ..errors import UsageError
from ..version import install_command
from .parser import Parser

SHELLS = ("bash", "zsh", "tcsh")

_FILES = frozenset({"FILE", "SCRIPT", "OUT", "LOG", "TRACE", "PROGRAM"})
"""What help calls arguments that are files."""


def script(shell: str, commands: Mapping[str, str], fill: Callable[[str, Parser], None]) -> str:
    """Return the script for a shell.

    Args:
        shell: One of `SHELLS`.
        commands: The lines of help of all commands, by name.
        fill: Adds the options of a command to its parser.

    Raises:
        UsageError: If shtab is not installed, or the shell is another.
    """
    if shell not in SHELLS:
        raise UsageError(f"--print-completion: expected one of {', '.join(SHELLS)}, got {shell!r}")
    if find_spec("shtab") is None:
        raise UsageError(f"--print-completion: shtab is not installed: {install_command('completion')}")
    import shtab

    overview = Parser(prog="overlap")
    overview.add_argument("--version", action="store_true", help="show the version and exit")
    parsers = overview.add_subparsers()
    for name, summary in commands.items():
        parser = parsers.add_parser(name, help=summary)
        fill(name, parser)
        for action in parser._actions:
            if action.metavar in _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.metavar == "DIR":
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return str(shtab.complete(overview, shell))
