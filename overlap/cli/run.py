"""`overlap run SCRIPT`: runs a program, with the settings of the command line for its `overlap.run`."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import redirect_stderr
from io import StringIO

from ..config import RunConfig, setting_environment, warn_of_unknown_variables
from ..errors import UsageError
from ..launch.lifeline import join_launcher
from ..launch.report import report_error
from ..notice import write_stderr
from ..processes.place import find_place
from ..processes.status import Status, report_to_launcher, status_from_error
from ..settings import Option
from ..signals import Terminated, handling_signals
from ..units import parse_yes_no
from .engine import running_on_ray
from .options import add_options, add_settings, given_settings
from .output import output_path
from .parser import Parser
from .processes import dividing_into_hosts, run_processes
from .program import (
    add_program_arguments,
    make_program_runner,
    report_late_options,
    reporting_traces,
    restoring_argv_and_path,
)
from .world_size import starts_processes, with_rank_count

DESCRIPTION = """\
Run a program: all ranks in this process, or with --processes in several. Options win over the arguments of its
overlap.run(...).
"""

EPILOG = """\
examples:
  overlap run --ranks 4 --trace run.json train.py --epochs 3
  overlap run --processes 2 --ranks 8 train.py
  overlap run --max-restarts 3 --state-dir state train.py

  overlap run --timeout 60 -m mypackage.train
  overlap run --survive --processes 8 train.py

What follows the script is the script's, so the same file runs with other ranks, on another machine or with a trace,
unchanged. The first of two hosts, the other of which has --node-rank 1:
  overlap run --nnodes 2 --node-rank 0 --rdzv-endpoint 10.0.0.1:29500 --processes 4 train.py

Settings can also be environment variables, such as OVERLAP_TRACE; the option wins.

Several hosts need the same OVERLAP_SECRET, or OVERLAP_SECRET_FILE.

The exit code is the program's: 0, what it gives to sys.exit, or 1 if a rank fails; 2 for bad usage, 128 plus the
number for signals (130 for Ctrl-C). Of several processes it is that of the one at fault, whose error is printed last.
Ctrl-C lets the processes end in peace, a second one ends them at once.
"""


def add_arguments(parser: Parser) -> None:
    """Add the options of the command to its parser."""
    add_settings(parser)
    show_config = {
        "show_config": Option(read=parse_yes_no, rare=True, help="print every setting with its source, and run nothing")
    }
    add_options(parser, show_config)
    add_program_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Run the program and return its exit code.

    Errors of the program are raised; a launcher gets them in a report instead.

    Raises:
        UsageError: If there is no such program, or an option has an impossible value. Nothing has run then.
    """
    launched = join_launcher()
    try:
        with handling_signals(quiet=launched):
            return _run_program(args, launched=launched)
    except Terminated as end:  # the launcher has asked for it, or reads the exit code
        if launched and end.saved_state_text:
            report_to_launcher(Status(cause=False, line=end.saved_state_text, code=int(end.code or 0)))
        return int(end.code or 0)
    except BaseException as error:
        if not launched or (isinstance(error, SystemExit) and not error.code):
            raise
        return _send_error_to_launcher(error)


def _run_program(args: argparse.Namespace, *, launched: bool) -> int:
    """Run the program here, on an engine or in processes, as the settings say, and return the exit code.

    With `--show-config` nothing runs. If a launcher has started this process (`launched`), it has reported options
    after the program already.
    """
    config = with_rank_count(_read_config(args))
    if args.show_config:
        print("\n".join(config.lines()))
        if (place := find_place()) is not None:
            print(f"{place.source} has started this process as number {place.process} of {place.processes}")
        return 0
    program = make_program_runner(args, command="run")
    if not launched:
        report_late_options(args, command="run")
    if config.engine is not None:
        with (
            setting_environment(config),
            restoring_argv_and_path(),
            reporting_traces(args.trace, config.trace),
            running_on_ray(config),
        ):
            program()
        return 0
    if starts_processes(config):
        if args.script is not None and os.path.abspath(args.script).startswith(("/dev/", "/proc/")):
            # only one process could read it, such as our stdin, which belongs to the first process
            raise UsageError(
                f"run: {args.script}: every process reads the program for itself; with --processes name a file"
            )
        return run_processes(config, [args.script, *args.args] if args.module is None else ["-m", *args.module])
    with (
        setting_environment(config),
        dividing_into_hosts(config),
        restoring_argv_and_path(),
        reporting_traces(args.trace, config.trace),
    ):
        try:
            program()
        except ValueError as error:
            if "env:// rendezvous" in str(error):  # of torch.distributed.init_process_group
                error.add_note("`overlap run --processes N` starts N processes that find each other, as torchrun does")
            raise
    return 0


def _send_error_to_launcher(error: BaseException) -> int:
    """Send the error to the launcher, which prints it last, and return the exit code."""
    place = find_place()
    with redirect_stderr(StringIO()) as text:
        code = report_error(error)
    # without a place, all ranks live in this process
    local = place.ranks if place else range(sys.maxsize)
    if not report_to_launcher(status_from_error(error, local=local, text=text.getvalue(), code=code)):
        write_stderr(text.getvalue())
    return code


# -- configuration -----------------------------------------------------------------------------------------------


def _read_config(args: argparse.Namespace) -> RunConfig:
    """Return the settings of options and environment, with absolute paths; raise `UsageError` if one is invalid."""
    warn_of_unknown_variables()
    config = given_settings(args).merged_over(RunConfig.from_environment())
    config = _with_absolute_tls_paths(
        config.with_changes(trace=output_path(config.trace, option=config.sources.get("trace", "")))
    )
    folders = {name: getattr(config, name) for name in ("flight_dir", "state_dir") if getattr(config, name)}
    config = config.with_changes(**{name: os.path.abspath(folder) for name, folder in folders.items()})
    config.check_values()
    if isinstance(config.cluster, str):
        from topology import TopologyError, cluster

        try:
            cluster(config.cluster)
        except TopologyError as error:
            raise UsageError(f"{config.sources['cluster']}: {error}") from None
    return config


def _with_absolute_tls_paths(config: RunConfig) -> RunConfig:
    """Make the paths of the TLS files absolute, because the program may change its directory.

    Raises `UsageError` if only some are given, or one cannot be read.
    """
    files = {"--tls-cert": config.tls_cert, "--tls-key": config.tls_key, "--tls-ca": config.tls_ca}
    paths = {name: path for name, path in files.items() if path is not None}
    if not paths:
        return config
    if missing := ", ".join(name for name in files if name not in paths):
        given = ", ".join(f"{name} {path}" for name, path in paths.items())
        raise UsageError(f"TLS needs three files: {', '.join(files)}; given: {given}; missing: {missing}")
    for name, path in paths.items():
        if not os.path.isfile(path) or not os.access(path, os.R_OK):
            raise UsageError(f"{name}: {path}: there is no such file to read; name one that exists")
    cert, key, authority = map(os.path.abspath, paths.values())
    return config.with_changes(tls_cert=cert, tls_key=key, tls_ca=authority)
