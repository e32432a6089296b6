"""`overlap run SCRIPT`: run a program whose `overlap.run` obeys the command line."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

from .. import settings
from ..errors import UsageError
from ..launch.environment import find_place
from ..launch.lifeline import take
from ..launch.status import status_of, tell_launcher
from ..settings import Settings
from .failure import report
from .nodeoptions import add_options, count, seconds
from .nodes import among_nodes, fitted, run_nodes, starts_nodes

_DESCRIPTION = """\
Run a program: all ranks in this process, or with --nnodes in one process for each node. What is given here wins over
the arguments of its overlap.run(...), so the same file runs with other ranks, on another machine or with a trace,
unchanged.
"""

_EPILOG = """\
examples:
  overlap run --ranks 4 train.py --epochs 3                 what follows the script is the script's
  overlap run --trace run.json --timeout 60 -m mypackage.train
  overlap timeline run.json                                 look at the trace
  overlap run --nnodes 2 --nproc-per-node 4 train.py        two processes with four ranks each, on this machine
  overlap run --nnodes 2 --nproc-per-node 4 --node-rank 0 --rdzv-endpoint 10.0.0.1:29500 train.py
                                                            the first of two machines; the other has --node-rank 1

Settings can also be environment variables: OVERLAP_RANKS, _TRACE, _CLUSTER, _TIMEOUT_S, _ALGORITHM, _TRANSPORT, _RAILS,
_PEER_DIRECT, _UNIX, _TLS_CERT, _TLS_KEY, _TLS_CA, _JOIN_TIMEOUT_S. The option wins. Nodes on several machines need
the same OVERLAP_SECRET, or OVERLAP_SECRET_FILE.

The exit code is the program's: 0, what it gives to sys.exit, or 1 if a rank fails; 2 for bad usage, 128 plus the
number for signals (130 for Ctrl-C). Of several processes it is that of the one at fault, whose error is told last.
Ctrl-C lets the nodes end in peace, a second one ends them at once.
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
    parser.add_argument("--ranks", type=count, metavar="N", help="how many ranks; default: what the program says")
    parser.add_argument("--trace", metavar="FILE", help="write the timeline there (.json or .json.gz)")
    parser.add_argument("--cluster", metavar="NAME", help='machine to run as, such as "trn1.32xlarge" or "local"')
    parser.add_argument("--timeout", type=seconds, metavar="S", help="give up after S seconds; say who waits for whom")
    parser.add_argument("--algorithm", metavar="A", help="use this algorithm wherever it exists, such as ring")
    add_options(parser)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run MODULE, as python -m does")
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="Python file")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="what the program finds in sys.argv")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Run the program and return its exit code; in a process of its own what it raises goes through.

    Raises:
        UsageError: If there is no such program, or an option cannot be meant. Nothing has run then.
    """
    launched = take()
    try:
        return _run(args)
    except BaseException as error:
        if not launched or (isinstance(error, SystemExit) and not error.code):
            raise
        return _tell(error)


def _run(args: argparse.Namespace) -> int:
    wanted = fitted(args, _settings(args))
    program = _module(args.module) if args.module is not None else _script(args.script, args.args)
    if starts_nodes(args):
        return run_nodes(args, wanted, [args.script, *args.args] if args.module is None else ["-m", *args.module])
    with settings.imposed(wanted), among_nodes(args), _as_main(), _told_traces(args.trace, wanted.trace):
        program()
    return 0


def _tell(error: BaseException) -> int:
    """Let the launcher print the error, last of all; return the exit code."""
    place = find_place()
    with redirect_stderr(StringIO()) as told:
        code = report(error)
    if not tell_launcher(status_of(error, local=place.ranks if place else (), text=told.getvalue())):
        sys.stderr.write(told.getvalue())
    return code


# -- settings ----------------------------------------------------------------------------------------------------


def _settings(args: argparse.Namespace) -> Settings:
    options = Settings(
        ranks=args.ranks,
        trace=args.trace,
        cluster=args.cluster,
        timeout_s=args.timeout,
        algorithm=args.algorithm,
        transport=args.transport,
        rails=args.rails,
        peer_direct=args.peer_direct,
        unix=args.unix,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        tls_ca=args.tls_ca,
        join_timeout_s=args.join_timeout,
    )
    wanted = settings.from_environment(os.environ | options.variables())
    if wanted.algorithm is not None:
        from ..collectives.select import check_algorithm

        check_algorithm(wanted.algorithm)
    if wanted.cluster is not None:
        from topology import cluster

        cluster(wanted.cluster)
    return _with_tls_files(replace(wanted, trace=_trace(wanted.trace)))


def _with_tls_files(wanted: Settings) -> Settings:
    """Refuse files that nobody could read, before anything starts; the program may change its directory meanwhile."""
    files = {"--tls-cert": wanted.tls_cert, "--tls-key": wanted.tls_key, "--tls-ca": wanted.tls_ca}
    given = {name: path for name, path in files.items() if path is not None}
    if not given:
        return wanted
    if len(given) < len(files):
        raise UsageError(f"TLS needs three files: {', '.join(files)}")
    for name, path in given.items():
        if not os.path.isfile(path) or not os.access(path, os.R_OK):
            raise UsageError(f"{name}: {path}: there is no such file to read")
    cert, key, authority = map(os.path.abspath, given.values())
    return replace(wanted, tls_cert=cert, tls_key=key, tls_ca=authority)


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
    place = find_place()
    if place is not None and place.process != 0:  # the first process says it for all
        yield
        return
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
