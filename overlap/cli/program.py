"""Programs of users: checked before anything starts, run as `python` runs them; and lines about their traces."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from .. import trace_files
from ..errors import UsageError
from ..hints import find_shadowed_package
from ..notice import notify
from ..processes.place import find_place
from .parser import Parser

_QUICK_TRACE_BYTES = 32 << 20
"""Longest trace that is read again for the verdict: 60,000 spans, which takes about a second."""

_GZIP_RATIO = 20  # assumed ratio of a trace's length to that of its compressed file

Program: TypeAlias = Callable[[], dict[str, object]]
"""Runs a program, and returns its global names at the end."""


def add_program_arguments(parser: Parser) -> None:
    """Add the argument PROGRAM to a command line; as with python, all arguments after it belong to the program."""
    parser.usage = f"{parser.prog} [options] (SCRIPT | -m MODULE) [ARGS ...]"
    parser.allow_abbrev = False
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run MODULE, as python -m does")
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="Python file")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments").rare = True  # type: ignore[attr-defined]
    parser.set_defaults(flags=parser.flags)


def make_program_runner(args: argparse.Namespace, *, command: str) -> Program:
    """Return a function that runs the program which the command line names.

    Args:
        args: The arguments of `add_program_arguments`.
        command: The name of the command, for messages.

    Raises:
        UsageError: No program is named, or the file does not exist or is not Python. A missing module is found only
            when the function is called.
    """
    if args.module is not None:
        if not args.module:
            raise UsageError(f"{command}: -m needs a MODULE")
        name, *arguments = args.module
        folder, program = os.getcwd(), partial(_run_module, name, command)
    else:
        name, arguments = args.script, args.args
        if name is None:
            raise UsageError(f"{command}: name a SCRIPT, or -m MODULE (`overlap {command} --help` explains)")
        _check_script(name, command)
        folder, program = os.path.dirname(os.path.realpath(name)), partial(runpy.run_path, name, run_name="__main__")
    if not sys.flags.safe_path and (hidden := find_shadowed_package([folder])):
        raise UsageError(f"{command}: {hidden}")  # the program would import it in place of a package of ours
    return partial(_run_with_argv, [name, *arguments], folder, program)


def _check_script(path: str, command: str) -> None:
    """Raise `UsageError` if a script cannot be read or is not Python, so that no process is started for it."""
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{command}: {path}: {error.strerror}; name a script that can be read") from None
    try:
        compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UsageError(f"{command}: {path}{line}: not Python: {reason}; correct it") from None


_READS_ARGUMENTS = re.compile(r"argv|pars(e|er|ing)\b|Parser|\b(absl|click|docopt|fire|hydra|typer|tyro)\b")
"""Matches in the text of a script that reads its arguments, itself or by a library, and would refuse unknown ones."""


def report_late_options(args: argparse.Namespace, command: str) -> None:
    """Print a notice for each option of overlap after a script that reads no arguments: the script ignores the option.

    Args:
        args: The arguments of `add_program_arguments`, with an existing script.
        command: The name of the command.
    """
    if args.script is None or not args.args:
        return
    if _READS_ARGUMENTS.search(Path(args.script).read_text(errors="replace")):
        return
    given = {word.partition("=")[0] for word in args.args}
    for flag in sorted(given & args.flags()):
        notify(
            f"{command}: {flag} is an argument of {args.script}, which reads none itself; options of "
            f"`overlap {command}` stand before the script"
        )


def _run_module(name: str, command: str) -> dict[str, object]:
    """Run a module as `python -m` does; raise `UsageError` if there is no such module."""
    find_module_spec(name, command)
    return runpy.run_module(name, run_name="__main__", alter_sys=True)


def find_module_spec(name: str, command: str) -> ModuleSpec:
    """Return the specification of the module that `-m` names; for a package, that of its `__main__`.

    Raises:
        UsageError: There is no such module.
    """
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # the package exists, but a module that it imports does not
        raise UsageError(f"{command}: -m {name}: {error}; install it, or correct the name") from None
    if spec is None:
        raise UsageError(f"{command}: -m {name}: there is no such module to run; install it, or correct the name")
    return spec


def _run_with_argv(argv: list[str], sys_path: str, program: Program) -> dict[str, object]:
    """Set argv and the first entry of the import path as python does, and return the result of the program."""
    sys.argv[:] = argv
    if not sys.flags.safe_path:
        sys.path[0] = sys_path
    try:
        return program()
    except Exception as error:
        sys.last_value = error  # as Python sets it; exit handlers read it, such as that of `embedded.connection`
        raise


@contextmanager
def restoring_argv_and_path() -> Iterator[None]:
    """Let a program change argv and the import path within the block, and restore both after it."""
    argv, path = sys.argv[:], sys.path[:]
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path


# -- traces ------------------------------------------------------------------------------------------------------


@contextmanager
def reporting_traces(name: str | None, path: str | os.PathLike[str] | None, *, verdict: bool = True) -> Iterator[None]:
    """Print at the end, also after a failure, where the traces are.

    Args:
        name: The file as the user named it; None: `path` is shown.
        path: Where the traces are written; None: there are none.
        verdict: Whether, after an end without an error, the last line is the verdict on the last run.
    """
    place = find_place()
    if place is not None and place.process != 0:  # the first process prints it for all
        yield
        return
    shown_path = name or relative_path(path)
    well = False
    try:
        yield
        well = True
        if path is not None and not trace_files.paths_given_out(str(path)):
            _print_note(f"no trace in {shown_path}: the program did not call overlap.run")
    finally:
        if path is not None and (files := trace_files.written_paths(str(path))):
            more = f" (and {', '.join(file.name for file in files[1:])})" if len(files) > 1 else ""
            _print_note(
                f"trace in {shown_path}{more}; look at it with `overlap timeline {shown_path}` or at ui.perfetto.dev"
            )
            if well and verdict and (sentence := _trace_verdict(files[-1])):
                _print_note(sentence)


def _trace_verdict(file: Path) -> str:
    """Return the verdict on a trace; "" if the file is too large to be read quickly, missing or unreadable."""
    from ..explain.recorded import explain_timeline
    from ..timeline import read_trace

    limit_bytes = _QUICK_TRACE_BYTES // _GZIP_RATIO if file.suffix == ".gz" else _QUICK_TRACE_BYTES
    with suppress(OSError, UsageError):
        if file.is_file() and file.stat().st_size <= limit_bytes:
            return explain_timeline(read_trace(file)).verdict
    return ""


def relative_path(path: str | os.PathLike[str] | None) -> str:
    """Return a path relative to the current folder, if it is in that folder, because launchers make paths absolute.

    "" for None.
    """
    if path is None:
        return ""
    with suppress(FileNotFoundError):  # somebody has removed the current folder
        short = os.path.relpath(path)
        return os.fspath(path) if short.startswith(os.pardir) else short
    return os.fspath(path)


def _print_note(text: str) -> None:
    """Print a note on stderr, after all output of the program."""
    with suppress(OSError, ValueError):  # the end of the command reports a full or closed stdout
        sys.stdout.flush()  # output of the program comes first, also when both streams go to one file
    notify(text)
