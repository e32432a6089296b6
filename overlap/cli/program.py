"""The user's program: found before anything starts, run as python itself would run it, and its trace told of."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from .. import trace_files
from ..errors import UsageError
from ..notice import notify
from ..processes.place import find_place

_AT_ONCE_BYTES = 32 << 20
"""Traces up to that size are read again for the verdict: 60,000 spans, about a second."""

Program: TypeAlias = Callable[[], dict[str, object]]
"""Runs it, and returns what its global names stand for at the end."""


def add_program(parser: argparse.ArgumentParser) -> None:
    """Let a program be named, as to python itself; all that follows its name is its own."""
    parser.usage = f"{parser.prog} [options] (SCRIPT | -m MODULE) [ARGS ...]"
    parser.allow_abbrev = False
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run MODULE, as python -m does")
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="Python file")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="what the program finds in sys.argv")


def named(args: argparse.Namespace, *more: str, command: str) -> Program:
    """Return what runs the program that the command line names.

    Args:
        args: What `add_program` had parsed.
        more: What the program finds in sys.argv after what the user gave it.
        command: Who asks, for messages.

    Raises:
        UsageError: If none is named, or there is no such file, or it is not Python. Whether there is a module of the
            name shows when it runs.
    """
    if args.module is not None:
        return _module([*args.module, *more], command)
    return _script(args.script, [*args.args, *more], command)


def _script(path: str | None, args: list[str], command: str) -> Program:
    if path is None:
        raise UsageError(f"{command}: name a SCRIPT, or -m MODULE (`overlap {command} --help` explains)")
    _check_script(path, command)
    sys_path = os.path.dirname(os.path.realpath(path))
    return partial(_with_argv, [path, *args], sys_path, partial(runpy.run_path, path, run_name="__main__"))


def _module(words: list[str], command: str) -> Program:
    if not words:
        raise UsageError(f"{command}: -m needs a MODULE")
    name, *args = words
    return partial(_with_argv, [name, *args], os.getcwd(), partial(_run_module, name, command))


def _check_script(path: str, command: str) -> None:
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{command}: {path}: {error.strerror}") from None
    try:
        compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UsageError(f"{command}: {path}{line}: not Python: {reason}") from None


def _run_module(name: str, command: str) -> dict[str, object]:
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # the package is there, and what it imports is not
        raise UsageError(f"{command}: -m {name}: {error}") from None
    if spec is None:
        raise UsageError(f"{command}: -m {name}: there is no such module to run")
    return runpy.run_module(name, run_name="__main__", alter_sys=True)


def _with_argv(argv: list[str], sys_path: str, program: Program) -> dict[str, object]:
    """Give the program the argv and the first entry of the import path that python itself would."""
    sys.argv[:] = argv
    if not sys.flags.safe_path:
        sys.path[0] = sys_path
    return program()


@contextmanager
def as_main() -> Iterator[None]:
    """Put back what a program finds changed about the interpreter."""
    argv, path = sys.argv[:], sys.path[:]
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path


# -- traces ------------------------------------------------------------------------------------------------------


@contextmanager
def told_traces(name: str | None, path: str | os.PathLike[str] | None, *, verdict: bool = True) -> Iterator[None]:
    """Say at the end, well or bad, where the traces are, under the name that the user gave them.

    After a good end the last line is what the last run comes to, unless somebody else says it.
    """
    place = find_place()
    if place is not None and place.process != 0:  # the first process says it for all
        yield
        return
    shown = name or _shown(path)
    well = False
    try:
        yield
        well = True
        if path is not None and not trace_files.asked(str(path)):
            _note(f"no trace in {shown}: the program did not call overlap.run")
    finally:
        if path is not None and (files := trace_files.written(str(path))):
            more = f" (and {', '.join(file.name for file in files[1:])})" if len(files) > 1 else ""
            _note(f"trace in {shown}{more}; look at it with `overlap timeline {shown}` or at ui.perfetto.dev")
            if well and verdict and (told := _verdict(files[-1])):
                _note(told)


def _verdict(file: Path) -> str:
    """Return what a trace comes to, if reading it takes no longer than a moment."""
    from ..timeline import median_step, read_trace, verdict_of

    limit_bytes = _AT_ONCE_BYTES // 20 if file.suffix == ".gz" else _AT_ONCE_BYTES
    with suppress(OSError, UsageError):
        if file.is_file() and file.stat().st_size <= limit_bytes:
            timeline = read_trace(file)
            return str(verdict_of(timeline, step=median_step(timeline)))
    return ""


def _shown(path: str | os.PathLike[str] | None) -> str:
    """Return a path as its user is likely to have written it: a launcher has made it absolute."""
    if path is None:
        return ""
    with suppress(FileNotFoundError):  # somebody has removed the current folder
        short = os.path.relpath(path)
        return os.fspath(path) if short.startswith(os.pardir) else short
    return os.fspath(path)


def _note(text: str) -> None:
    with suppress(OSError, ValueError):  # the end of the command looks after what cannot be written
        sys.stdout.flush()  # what the program printed comes first, also when both streams go to one file
    notify(text)
