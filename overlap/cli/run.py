"""`overlap run SCRIPT`: run a program whose `overlap.run` obeys the command line."""

from __future__ import annotations

import argparse
import os
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO

from .. import settings
from ..errors import UsageError
from ..launch.lifeline import take
from ..launch.status import status_of, tell_launcher
from ..notice import say
from ..rendezvous.launcher_environment import find_place
from ..settings import Settings
from .failure import report
from .nodeoptions import add_options, count, seconds
from .nodes import among_nodes, fitted, run_nodes, starts_nodes
from .program import add_program, as_main, named, output_path, told_traces

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


def fill(parser: argparse.ArgumentParser) -> None:
    """Tell the front door's parser what the command is for and what it takes."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("--ranks", type=count, metavar="N", help="how many ranks; default: what the program says")
    parser.add_argument("--trace", metavar="FILE", help="write the timeline there (.json or .json.gz)")
    parser.add_argument("--cluster", metavar="NAME", help='machine to run as, such as "trn1.32xlarge" or "local"')
    parser.add_argument("--timeout", type=seconds, metavar="S", help="give up after S seconds; say who waits for whom")
    parser.add_argument("--algorithm", metavar="A", help="use this algorithm wherever it exists, such as ring")
    add_options(parser)
    add_program(parser)


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
    program = named(args, command="run")
    if starts_nodes(args):
        return run_nodes(args, wanted, [args.script, *args.args] if args.module is None else ["-m", *args.module])
    with settings.imposed(wanted), among_nodes(args), as_main(), told_traces(args.trace, wanted.trace):
        program()
    return 0


def _tell(error: BaseException) -> int:
    """Let the launcher print the error, last of all; return the exit code."""
    place = find_place()
    with redirect_stderr(StringIO()) as told:
        code = report(error)
    if not tell_launcher(status_of(error, local=place.ranks if place else (), text=told.getvalue())):
        say(told.getvalue())
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
    return _with_tls_files(replace(wanted, trace=output_path(wanted.trace)))


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
