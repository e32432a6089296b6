"""`overlap simulate SCRIPT`: runs a program on a modelled cluster in virtual time."""

# setting: the options;  simulation: runs the program, and measures its median step;  page: prints that step

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from functools import partial
from time import perf_counter

from ...errors import UsageError
from ..options import add_options, check_width, given_values, shared_option
from ..output import output_path, print_page_or_json
from ..parser import Parser
from ..program import add_program_arguments, make_program_runner, report_late_options, reporting_traces
from .page import draw_timelines, json_document, page_lines
from .setting import PARAMETERS, check_setting
from .simulation import SimulatedRun, showing_progress, simulate

DESCRIPTION = """\
Run a program unchanged on a modelled cluster, in deterministic virtual time: how long its step takes, how much of it
is communication, and how much of that is exposed.

Options win over the arguments of its overlap.run(...); everything else stays, also the assumptions of its
clock=overlap.Virtual(...). Computes take the time that they state: seconds=, or flops= and bytes_moved= by the
device's peak.
"""

EPILOG = """\
examples:
  overlap simulate --cluster "trn2.48xlarge x4" train.py --epochs 3
  overlap simulate --cluster "trn2.48xlarge x4" --json train.py

What follows the script is the script's.

The exit code is 0, 1 if the program fails, 2 for bad usage, 130 for Ctrl-C.
"""

OPTIONS = {name: shared_option(name) for name in ("trace", "json", "width", "ascii")}
OPTIONS["state_dir"] = shared_option("state_dir", "in virtual time nothing is kept")
"""Options that are no settings of a simulation."""

_USUAL = {"cluster", "nodes", "ranks", "algorithm", "efficiency", "jitter"}


def add_arguments(parser: Parser) -> None:
    """Add the options of the command to its parser."""
    add_options(parser, OPTIONS, usual={"trace", "json"})
    group = parser.add_argument_group("the cluster and what is assumed of it")
    add_options(group, PARAMETERS, usual=_USUAL)
    add_program_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Simulate, print, and return the exit code.

    Raises:
        UsageError: If there is no such program, or an option cannot be meant. Nothing has run then.
        TopologyError: If there is no such cluster, or it is too small.
    """
    check_width(args.width)
    setting = check_setting(given_values(args, PARAMETERS))
    if args.script is not None and args.script.endswith((".json", ".json.gz")):
        raise UsageError(f"simulate: {args.script}: a recorded run is no program; name the program itself")
    program, trace = make_program_runner(args, command="simulate"), output_path(args.trace)
    report_late_options(args, command="simulate")
    aside = redirect_stdout(sys.stderr) if args.json else nullcontext()
    folder = args.state_dir and os.path.abspath(args.state_dir)
    with aside, reporting_traces(args.trace, trace, verdict=False), showing_progress() as pulse:
        begun_s = perf_counter()
        runs = simulate(program, setting, trace=trace, state_dir=folder, pulse=pulse)
        wall_s = perf_counter() - begun_s
    meta = [run.timeline.meta for run in runs]
    document = {"wall_s": wall_s, "meta": meta, "runs": [json_document(run.outcome) for run in runs]}
    return print_page_or_json(args, lambda: document, partial(_page_lines, args, runs, wall_s), version=2)


def _page_lines(args: argparse.Namespace, runs: Sequence[SimulatedRun], wall_s: float) -> Iterator[str]:
    """Yield the lines of all runs, and print their pictures. `wall_s` is the real time of all together."""
    from ..console import Console

    console = Console(width=args.width, highlight=False)
    look = {"ascii": args.ascii or console.plain, "color": console.coloured}
    for number, run in enumerate(runs, 1):
        if len(runs) > 1:
            yield f"run {number} of {len(runs)}"
        yield from page_lines(run.outcome, run.request, wall_s, console.width)
        yield ""
        for line in draw_timelines(run.timeline, run.outcome, width=console.width, **look):
            console.print(line)
