"""`overlap simulate SCRIPT`: runs a program on a modelled cluster in virtual time, once or over many settings."""

# setting: the options, which sweeps vary too;  simulation: runs the program, and measures its median step
# page: prints that step;  sweep: points, rows and their table

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from functools import partial

from ...config import RunConfig, overriding
from ...errors import UsageError
from ...launch.report import EXIT_FAILED, EXIT_INTERRUPTED
from ...notice import notify
from ...settings import Option
from ...units import wrapped
from ..options import add_options, check_width, shared_option, values
from ..output import output_path, print_result
from ..pace import pace
from ..parser import HelpAll, Parser
from ..program import Program, add_program, named_program, report_late_options, report_traces
from .goodput import add_goodput, measured_goodput
from .page import assumptions, describe, drawing, page
from .setting import PARAMETERS, check_setting
from .simulation import SAMPLES, Simulation, progress_pulse, simulate
from .sweep import Point, SweepRow, axes, best, json_rows, points, sweep, sweep_table

_DESCRIPTION = """\
Run a program unchanged on a modelled cluster, in deterministic virtual time: how long its step takes, how much of it
is communication, and how much of that is exposed. Options win over the arguments of its overlap.run(...);
everything else stays, also the assumptions of its clock=overlap.Virtual(...).
Computes take the time that they state (seconds=, or flops= and bytes_moved= by the device's peak) or that of a
--profile.
"""

_EPILOG = """\
examples:
  overlap simulate --cluster "trn2.48xlarge x4" train.py --epochs 3     what follows the script is the script's
  overlap simulate --cluster trn2.48xlarge --sweep nodes=1,2,4 --sweep bucket_bytes=1MiB,25MiB train.py
  overlap simulate --cluster "trn2.48xlarge x4" --mtbf 3h --spares 1 train.py

The exit code is 0, 1 if the program or a point of a sweep fails, 2 for bad usage, 130 for Ctrl-C.
"""

_MORE = f"""\
A sweep runs the program for every combination of values. NAME is one of {", ".join(PARAMETERS)},
or else a parameter of the program: bucket_bytes=1MiB adds the arguments --bucket-bytes 1MiB. A NAME that begins with
-- is always the program's: --sweep=--seed=1,2. A program that calls overlap.run several times is judged by the last.
Its output is not shown. Ctrl-C prints the rows that are done.

A program that has a global name {SAMPLES} gets a throughput too. The best row is marked: it has the highest
throughput, or else the shortest step.
"""

OPTIONS = {
    "sweep": Option(read=str, metavar="NAME=V,V,...", repeated=True, help="once for each of these values"),
    **{name: shared_option(name) for name in ("trace", "json", "json_file", "width", "ascii")},
}
"""Options that are no settings of a simulation."""

_USUAL = {"cluster", "nodes", "ranks", "algorithm", "efficiency", "profile", "jitter"}


def fill(parser: Parser) -> None:
    """Add the description and the options of the command to its parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    add_simulation(parser)
    add_options(parser, {"state_dir": shared_option("state_dir", "in virtual time nothing is kept")})
    add_goodput(parser)
    add_program(parser)


def add_simulation(parser: Parser) -> None:
    """Add the options of a simulation of any program: a script, or a recorded run."""
    parser.add_argument("--help-all", action=HelpAll, more=_MORE)
    add_options(parser, OPTIONS)
    group = parser.add_argument_group("the cluster and what is assumed of it; each NAME can also be swept")
    add_options(group, PARAMETERS, usual=_USUAL)


def main(args: argparse.Namespace) -> int:
    """Simulate, print, and return the exit code.

    Raises:
        UsageError: If there is no such program, or an option cannot be meant. Nothing has run then.
        TopologyError: If there is no such cluster, or it is too small.
    """

    def name_folder(config: RunConfig) -> RunConfig:
        folder = args.state_dir and os.path.abspath(args.state_dir)
        return config.changed("--state-dir", state_dir=folder) if folder else config

    with overriding(revise=name_folder):
        if args.mtbf is not None:
            return _print_goodput(args)
        return simulate_command(args, partial(_user_program, args))


def _print_goodput(args: argparse.Namespace) -> int:
    """Measure the goodput of a job with losses, print it, and return the exit code."""
    if args.sweep or args.trace is not None:
        raise UsageError("--mtbf: leave out --sweep and --trace: the program runs several times, with losses")
    check_width(args.width)
    args.json_file = output_path(args.json_file, option="--json-file")
    setting, program = check_setting(values(args, PARAMETERS)), _user_program(args, ())
    with redirect_stdout(sys.stderr):
        measured = measured_goodput(program, setting, args)
    return 0 if print_result(args, measured.describe, measured.page) else EXIT_FAILED


def simulate_command(
    args: argparse.Namespace, make: Callable[[Sequence[str]], Program], *, prints_pace: bool = False
) -> int:
    """Run a program in virtual time, once or over a sweep, and return the exit code.

    Args:
        args: Of `add_simulation`.
        make: Makes the program, given further arguments for it.
        prints_pace: Whether the program prints its progress.
    """
    check_width(args.width)
    args.json_file = output_path(args.json_file, option="--json-file")
    return _simulate_sweep(args, make) if args.sweep else _simulate_once(args, make, prints_pace)


def _simulate_once(args: argparse.Namespace, make: Callable[[Sequence[str]], Program], prints_pace: bool) -> int:
    """Simulate one run, print its page, and return the exit code; progress is shown unless the program does that."""
    setting, program, trace = check_setting(values(args, PARAMETERS)), make(()), output_path(args.trace)
    aside = redirect_stdout(sys.stderr) if args.json else nullcontext()
    with aside, report_traces(args.trace, trace, verdict=False):
        if prints_pace:
            simulation = simulate(program, setting, trace=trace)
        else:
            with pace() as print_pace:
                simulation = simulate(program, setting, trace=trace, pulse=progress_pulse(print_pace))
    is_written = print_result(args, partial(_describe_runs, simulation), partial(_page_lines, args, simulation))
    return 0 if is_written else EXIT_FAILED


def _user_program(args: argparse.Namespace, arguments: Sequence[str]) -> Program:
    """Return the program that the command line names; raise `UsageError` for a recorded run, which `replay` repeats."""
    if args.script is not None and args.script.endswith((".json", ".json.gz")):
        if args.json:
            raise UsageError(f"--json: prints the result on stdout; --json-file {args.script} writes it to a file")
        raise UsageError(f"{args.script}: a recorded run is repeated by `overlap replay {args.script}`")
    program = named_program(args, *arguments, command="simulate")
    if not arguments:
        report_late_options(args, command="simulate")
    return program


def _describe_runs(simulation: Simulation) -> dict[str, object]:
    """Return all runs of a program for JSON, and the seconds that their simulation took."""
    return {
        "wall_s": simulation.wall_s,
        "meta": [run.timeline.meta for run in simulation.runs],
        "runs": [describe(run.outcome) for run in simulation.runs],
    }


def _page_lines(args: argparse.Namespace, simulation: Simulation) -> Iterator[str]:
    """Yield the lines of all runs, and print their pictures."""
    from ..console import Console

    console = Console(width=args.width, highlight=False)
    look = {"ascii": args.ascii or console.plain, "color": console.coloured}
    for number, run in enumerate(simulation.runs, 1):
        if len(simulation.runs) > 1:
            yield f"run {number} of {len(simulation.runs)}"
        yield from page(run.outcome, run.request, simulation.wall_s)
        yield ""
        for line in drawing(run.timeline, run.outcome, width=console.width, **look):
            console.print(line)


def _simulate_sweep(args: argparse.Namespace, make: Callable[[Sequence[str]], Program]) -> int:
    """Simulate every point of a sweep, print the table, and return the exit code: failed if any point has failed."""
    if args.trace is not None:
        raise UsageError("--trace: a sweep has many timelines; simulate one point with --trace")
    swept, fixed = axes(args.sweep), values(args, PARAMETERS)
    program = make(())  # or refuse, before anything runs
    grid = list(points(swept, fixed))

    def run(point: Point) -> Simulation:
        again = make(point.arguments) if point.arguments else program
        return simulate(again, check_setting(point.values))

    rows, interrupted = sweep(grid, run)
    winner = best(rows)

    def document() -> dict[str, object]:
        texts = {axis.name: axis.texts for axis in swept}
        return {"sweep": texts, "complete": not interrupted, "rows": json_rows(rows, winner)}

    is_written = print_result(args, document, partial(_rows_page, args, rows, winner))
    if interrupted:
        notify(f"interrupted; {len(rows)} of {len(grid)} points are done")
        return EXIT_INTERRUPTED
    return EXIT_FAILED if not is_written or any(row.error is not None for row in rows) else 0


def _rows_page(args: argparse.Namespace, rows: Sequence[SweepRow], winner: SweepRow | None) -> Iterator[str]:
    """Yield the assumptions that all points share, and the table of points."""
    from ..console import Console

    console = Console(width=args.width)
    if common := _common_assumptions(rows):
        yield from wrapped(f"assumed at every point: {'; '.join(common)}", min(console.width, 80), rest="  ")
    yield ""
    yield from sweep_table(rows, winner, width=console.width, ascii=args.ascii or console.plain)


def _common_assumptions(rows: Sequence[SweepRow]) -> list[str]:
    """Return the assumptions that all points share; the table has the swept ones."""
    by_row = [assumptions(row.run.request) for row in rows if row.run]
    return [text for text in by_row[0] if all(text in texts for texts in by_row)] if by_row else []
