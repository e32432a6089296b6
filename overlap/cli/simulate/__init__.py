"""`overlap simulate SCRIPT`: runs a program on a modelled cluster in virtual time, once or over many settings."""

# setting: the options, which sweeps vary too;  simulation: runs the program, and measures its median step
# page: prints that step;  sweep: points, rows and their table

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from functools import partial

from ...errors import UsageError
from ...launch.report import EXIT_FAILED, EXIT_INTERRUPTED
from ...notice import notify
from ...units import wrapped
from ..options import add_options, check_width, values
from ..output import STDOUT, as_json, output_path, result_path, written
from ..pace import pace
from ..parser import HelpAll, Parser
from ..program import Program, add_program, named, report_late_options, report_traces
from .goodput import add_goodput, measured_goodput
from .page import assumptions, described, drawing, page
from .setting import PARAMETERS, checked
from .simulation import SAMPLES, Simulation, simulate, telling
from .sweep import Point, SweepRow, axes, best, json_rows, points, sweep, table

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

_USUAL = {"cluster", "nodes", "ranks", "algorithm", "efficiency", "profile", "jitter"}


def fill(parser: Parser) -> None:
    """Add the description and the options of the command to its parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    add_simulation(parser)
    add_goodput(parser)
    add_program(parser)


def add_simulation(parser: Parser) -> None:
    """Add the options of a simulation, whatever its program."""
    parser.add_argument("--help-all", action=HelpAll, more=_MORE)
    parser.add_argument("--sweep", action="append", metavar="NAME=V,V,...", help="once for each of these values")
    parser.add_argument("--trace", metavar="FILE", help="write the timeline there (.json or .json.gz)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there; - is stdout, instead of the page")
    parser.add_argument("--width", type=int, metavar="N", help="columns, at least 40; default: the terminal's")
    parser.add_argument("--ascii", action="store_true", help="draw with plain characters only")
    group = parser.add_argument_group("the cluster and what is assumed of it; each NAME can also be swept")
    add_options(group, PARAMETERS, usual=_USUAL)


def main(args: argparse.Namespace) -> int:
    """Simulate, print, and return the exit code.

    Raises:
        UsageError: If there is no such program, or an option cannot be meant. Nothing has run then.
        TopologyError: If there is no such cluster, or it is too small.
    """
    if args.mtbf is not None:
        return _goodput(args)
    return simulated(args, partial(_program, args))


def _goodput(args: argparse.Namespace) -> int:
    if args.sweep or args.trace is not None:
        raise UsageError("--mtbf: leave out --sweep and --trace: the program runs several times, with losses")
    check_width(args.width)
    args.json = result_path(args.json, option="--json")
    setting, program = checked(values(args, PARAMETERS)), _program(args, ())
    with redirect_stdout(sys.stderr):
        measured = measured_goodput(program, setting, args)
    if args.json != STDOUT:
        print("\n".join(measured.page()), flush=True)
    return 0 if args.json is None or written(as_json(measured.described()), args.json, option="--json") else EXIT_FAILED


def simulated(args: argparse.Namespace, make: Callable[[Sequence[str]], Program], *, prints_pace: bool = False) -> int:
    """Run a program in virtual time, once or over a sweep, and return the exit code.

    Args:
        args: Of `add_simulation`.
        make: Makes the program, given further arguments for it.
        tells_itself: Whether the program says how far it is.
    """
    check_width(args.width)
    args.json = result_path(args.json, option="--json")
    return _sweep(args, make) if args.sweep else _once(args, make, prints_pace)


def _once(args: argparse.Namespace, make: Callable[[Sequence[str]], Program], prints_pace: bool) -> int:
    setting, program, trace = checked(values(args, PARAMETERS)), make(()), output_path(args.trace)
    aside = redirect_stdout(sys.stderr) if args.json == STDOUT else nullcontext()
    with aside, report_traces(args.trace, trace, verdict=False):
        if prints_pace:
            simulation = simulate(program, setting, trace=trace)
        else:
            with pace() as tell:
                simulation = simulate(program, setting, trace=trace, pulse=telling(tell))
    if args.json != STDOUT:
        _show(args, simulation)
    told = args.json is None or written(as_json(_found(simulation)), args.json, option="--json")
    return 0 if told else EXIT_FAILED


def _program(args: argparse.Namespace, arguments: Sequence[str]) -> Program:
    if args.script is not None and args.script.endswith((".json", ".json.gz")):
        raise UsageError(f"{args.script}: a recorded run is repeated by `overlap replay {args.script}`")
    program = named(args, *arguments, command="simulate")
    if not arguments:
        report_late_options(args, command="simulate")
    return program


def _found(simulation: Simulation) -> dict[str, object]:
    return {
        "wall_s": simulation.wall_s,
        "meta": [run.timeline.meta for run in simulation.runs],
        "runs": [described(run.outcome) for run in simulation.runs],
    }


def _show(args: argparse.Namespace, simulation: Simulation) -> None:
    from ..console import Console

    console = Console(width=args.width, highlight=False)
    look = {"ascii": args.ascii or console.plain, "color": console.coloured}
    for number, run in enumerate(simulation.runs, 1):
        if len(simulation.runs) > 1:
            print(f"run {number} of {len(simulation.runs)}")
        print("\n".join(page(run.outcome, run.request, simulation.wall_s)), end="\n\n", flush=True)
        for line in drawing(run.timeline, run.outcome, width=console.width, **look):
            console.print(line)


def _sweep(args: argparse.Namespace, make: Callable[[Sequence[str]], Program]) -> int:
    if args.trace is not None:
        raise UsageError("--trace: a sweep has many timelines; simulate one point with --trace")
    swept, fixed = axes(args.sweep), values(args, PARAMETERS)
    program = make(())  # or refuse, before anything runs
    grid = list(points(swept, fixed))

    def run(point: Point) -> Simulation:
        again = make(point.arguments) if point.arguments else program
        return simulate(again, checked(point.values))

    rows, interrupted = sweep(grid, run)
    winner = best(rows)
    if args.json != STDOUT:
        _show_rows(args, rows, winner)
    told = True
    if args.json is not None:
        found = {
            "sweep": {axis.name: axis.texts for axis in swept},
            "complete": not interrupted,
            "rows": json_rows(rows, winner),
        }
        told = written(as_json(found), args.json, option="--json")
    if interrupted:
        notify(f"interrupted; {len(rows)} of {len(grid)} points are done")
        return EXIT_INTERRUPTED
    return EXIT_FAILED if not told or any(row.error is not None for row in rows) else 0


def _show_rows(args: argparse.Namespace, rows: Sequence[SweepRow], winner: SweepRow | None) -> None:
    from ..console import Console

    console = Console(width=args.width)
    if common := _common(rows):
        print("\n".join(wrapped(f"assumed at every point: {'; '.join(common)}", min(console.width, 80), rest="  ")))
    ascii = args.ascii or console.plain
    print("\n".join(["", *table(rows, winner, width=console.width, ascii=ascii)]), flush=True)


def _common(rows: Sequence[SweepRow]) -> list[str]:
    """Return the assumptions that all points share: what is swept stands in the table."""
    told = [assumptions(row.run.request) for row in rows if row.run]
    return [text for text in told[0] if all(text in other for other in told)] if told else []
