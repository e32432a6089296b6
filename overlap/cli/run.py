"""`overlap run SCRIPT`: run a program whose `overlap.run` obeys the command line."""

from __future__ import annotations

import argparse
import math
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from .. import settings
from ..errors import UsageError
from ..settings import Settings

_DESCRIPTION = """\
Run a program in this process. What is given here wins over the arguments of its overlap.run(...), so the same file
runs with other ranks, on another machine or with a trace, unchanged.
"""

_EPILOG = """\
examples:
  overlap run --ranks 4 train.py --epochs 3                 what follows the script is the script's
  overlap run --trace run.json --timeout 60 -m mypackage.train
  overlap timeline run.json                                 look at the trace

Every option can also be an environment variable: OVERLAP_RANKS, OVERLAP_TRACE, OVERLAP_CLUSTER, OVERLAP_TIMEOUT_S,
OVERLAP_ALGORITHM. The option wins. The exit code is the program's: 0, what it gives to sys.exit, or 1 if a rank fails;
2 for bad usage, 130 for Ctrl-C.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the front door's parser; `main` is put into the default `main`."""
    parser = subparsers.add_parser(
        "run",
        usage="overlap run [options] (SCRIPT | -m MODULE) [ARGS ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=_ranks, metavar="N", help="how many ranks; default: what the program says")
    parser.add_argument("--trace", metavar="FILE", help="write the timeline there (.json or .json.gz)")
    parser.add_argument("--cluster", metavar="NAME", help='machine to run as, such as "trn1.32xlarge" or "local"')
    parser.add_argument("--timeout", type=_seconds, metavar="S", help="give up after S seconds; say who waits for whom")
    parser.add_argument("--algorithm", metavar="A", help="use this algorithm wherever it exists, such as ring")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run MODULE, as python -m does")
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="Python file")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="what the program finds in sys.argv")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Run the program and return 0; whatever it raises, SystemExit included, goes through.

    Raises:
        UsageError: If there is no such program, or an option cannot be meant. Nothing has run then.
    """
    wanted = _settings(args)
    program = _module(args.module) if args.module is not None else _script(args.script, args.args)
    with settings.imposed(wanted), _as_main(), _told_traces(args.trace, wanted.trace):
        program()
    return 0


# -- settings ----------------------------------------------------------------------------------------------------


def _settings(args: argparse.Namespace) -> Settings:
    options = Settings(
        ranks=args.ranks, trace=args.trace, cluster=args.cluster, timeout_s=args.timeout, algorithm=args.algorithm
    )
    wanted = settings.from_environment(os.environ | options.variables())
    if wanted.algorithm is not None:
        from ..collectives.select import check_algorithm

        check_algorithm(wanted.algorithm)
    if wanted.cluster is not None:
        from topology import cluster

        cluster(wanted.cluster)
    return replace(wanted, trace=_trace(wanted.trace))


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return value


def _trace(path: str | None) -> str | None:
    """Refuse what could not be written at the end of a long run; the program may change its directory meanwhile."""
    if path is None:
        return None
    if os.path.isdir(path):
        raise UsageError(f"--trace: {path} is a directory; name a file in it")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise UsageError(f"--trace: cannot write into {folder}")
    return os.path.abspath(path)


@contextmanager
def _told_traces(name: str | None, path: str | None) -> Iterator[None]:
    """Say at the end, well or bad, where the traces are, under the name that the user gave them."""
    try:
        yield
        if path is not None and not settings.written_traces(path):
            _note(f"no trace in {name or path}: the program did not call overlap.run")
    finally:
        if path is not None and (files := settings.written_traces(path)):
            more = f" (and {', '.join(file.name for file in files[1:])})" if len(files) > 1 else ""
            shown = name or path
            _note(f"trace in {shown}{more}; look at it with `overlap timeline {shown}` or at ui.perfetto.dev")


def _note(text: str) -> None:
    sys.stdout.flush()  # what the program printed comes first, also when both streams go to one file
    print(f"overlap: {text}", file=sys.stderr)


# -- programs ----------------------------------------------------------------------------------------------------


def _script(path: str | None, args: list[str]) -> Callable[[], object]:
    if path is None:
        raise UsageError("run: name a SCRIPT, or -m MODULE (`overlap run --help` explains)")
    _check_script(path)
    sys_path = os.path.dirname(os.path.realpath(path))
    return partial(_with_argv, [path, *args], sys_path, partial(runpy.run_path, path, run_name="__main__"))


def _check_script(path: str) -> None:
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"run: {path}: {error.strerror}") from None
    try:
        compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UsageError(f"run: {path}{line}: not Python: {reason}") from None


def _module(words: list[str]) -> Callable[[], object]:
    if not words:
        raise UsageError("run: -m needs a MODULE")
    name, *args = words
    return partial(_with_argv, [name, *args], os.getcwd(), partial(_run_module, name))


def _run_module(name: str) -> object:
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # the package is there, and what it imports is not
        raise UsageError(f"run: -m {name}: {error}") from None
    if spec is None:
        raise UsageError(f"run: -m {name}: there is no such module to run")
    return runpy.run_module(name, run_name="__main__", alter_sys=True)


def _with_argv(argv: list[str], sys_path: str, program: Callable[[], object]) -> object:
    """Give the program the argv and the first entry of the import path that python itself would."""
    sys.argv[:] = argv
    if not sys.flags.safe_path:
        sys.path[0] = sys_path
    return program()


@contextmanager
def _as_main() -> Iterator[None]:
    """Put back what a program finds changed about the interpreter."""
    argv, path = sys.argv[:], sys.path[:]
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path
