"""`overlap pipeline NAME`: a pipeline schedule as a grid of ranks by time, its bubble, and what ranks hold at once."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..errors import UsageError
from ..parallel.schedules import FAMILIES, Durations, PipelineSchedule, make
from .options import index

SCHEMA_VERSION = 1
"""Version of what `--json` prints; it rises when a field changes its meaning or goes."""

_WIDTH = 80

_DESCRIPTION = """\
Show a pipeline schedule: what each rank computes when, how long it is idle, and how many activations it holds at once.

The schedule is one of the published ones, or a file with a line for each rank: its actions with commas between, such as
0F0,0F1,0B0,0B1 (stage, F forward, B backward or I and W for its halves, microbatch), as PyTorch writes them. It is
proved: a file that misses an action, or with which ranks wait for each other for ever, is refused.
"""

_EPILOG = f"""\
examples:
  overlap pipeline 1f1b --ranks 4 --microbatches 8
  overlap pipeline interleaved-1f1b --ranks 4 --microbatches 8 --chunks 2 --forward 2 --hop 1
  overlap pipeline zb-h1 --ranks 4 --microbatches 8 --text >mine.csv && overlap pipeline mine.csv

schedules: {", ".join(FAMILIES)}
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """Tell the front door's parser what the command is for and what it takes."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("name", metavar="NAME", help="schedule, such as 1f1b, or a file of its text form")
    parser.add_argument("--ranks", type=index, default=4, metavar="N", help="of the pipeline; default: 4")
    parser.add_argument("--microbatches", type=index, default=8, metavar="N", help="of a batch; default: 8")
    parser.add_argument(
        "--chunks", type=index, metavar="N", help="stages on each rank, of interleaved-1f1b; default: 2"
    )
    for name, letter in (("forward", "F"), ("input-gradient", "I"), ("weight-gradient", "W")):
        parser.add_argument(
            f"--{name}", type=index, default=1, metavar="T", help=f"what {letter} takes of a microbatch; default: 1"
        )
    parser.add_argument("--hop", type=index, default=0, metavar="T", help="what a message takes; default: 0")
    parser.add_argument(
        "--max-live", type=index, metavar="N", help="refuse it if a rank holds more activations at once"
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--text", action="store_true", help="print its text form instead")
    shown.add_argument("--json", action="store_true", help="print one JSON object instead")


def main(args: argparse.Namespace) -> int:
    """Run the command and return the exit code 0.

    Raises:
        UsageError: If there is no such schedule or file, or a number cannot be meant.
        ScheduleError: If the file holds no schedule, or a rank holds more than is allowed.
    """
    schedule = _schedule(args)
    durations = Durations(
        forward=args.forward, input_gradient=args.input_gradient, weight_gradient=args.weight_gradient, hop=args.hop
    )
    if args.max_live is not None:
        schedule.check_live(args.max_live)
    if args.text:
        print(schedule.text(), end="")
    elif args.json:
        print(json.dumps(describe(schedule, durations), indent=2, sort_keys=True))
    else:
        print("\n".join([*_summary(schedule, durations), "", *schedule.grid(durations, width=_WIDTH)]))
        print("\n".join(["", *_comparison(schedule, durations, args.chunks)]))
    return 0


def describe(schedule: PipelineSchedule, durations: Durations) -> dict[str, object]:
    """Return a schedule as the one object that `--json` prints: times in the unit of the durations."""
    timing = schedule.timing(durations)
    return {
        "schema_version": SCHEMA_VERSION,
        "name": schedule.name,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "rows": [[str(action) for action in row] for row in schedule.rows],
        "starts": [[timing.starts[action] for action in row] for row in schedule.rows],
        "makespan": timing.makespan,
        "bubble": list(timing.bubble),
        "bubble_by_formula": _formula(schedule.name, schedule, durations),
        "peak_live": list(schedule.peak_live),
    }


def _schedule(args: argparse.Namespace) -> PipelineSchedule:
    path = Path(args.name)
    if args.name.lower() in FAMILIES or not (path.suffix or path.exists()):
        return make(args.name, ranks=args.ranks, microbatches=args.microbatches, chunks=args.chunks)
    try:
        return PipelineSchedule.parse(path.read_text(encoding="utf-8"), name=path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"NAME: {args.name} cannot be read: {error}") from error


def _formula(name: str, schedule: PipelineSchedule, durations: Durations) -> int | None:
    """Return the idle time by the published formula, which knows no messages; None where there is none."""
    if name not in FAMILIES or durations.hop:
        return None
    return FAMILIES[name].bubble(schedule.ranks, schedule.microbatches, durations)


def _summary(schedule: PipelineSchedule, durations: Durations) -> list[str]:
    timing, formula = schedule.timing(durations), _formula(schedule.name, schedule, durations)
    least, most = min(timing.bubble), max(timing.bubble)
    idle = f"{least}" if least == most else f"{least} to {most}"
    share = most / timing.makespan if timing.makespan else 0.0
    told = "" if formula is None else f"; by the formula {formula}"
    live = schedule.peak_live
    held = f"{live[0]}" if len(set(live)) == 1 else f"{min(live)} to {max(live)}"
    return [
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} microbatches",
        "",
        f"  time    {timing.makespan}, of which a rank is idle for {idle} ({share:.0%}){told}",
        f"  memory  {held} activations at once on a rank, each of a microbatch at a stage",
    ]


def _comparison(schedule: PipelineSchedule, durations: Durations, chunks: int | None) -> list[str]:
    """Return a table of all published schedules for as many ranks and microbatches, and the same model."""
    per_rank = schedule.stages // schedule.ranks
    lines = ["schedule              time  idle  share  held at once (of a rank's whole part)"]
    for name in FAMILIES:
        pieces = FAMILIES[name].chunks or chunks or 2
        try:
            each = make(name, ranks=schedule.ranks, microbatches=schedule.microbatches, chunks=pieces)
        except UsageError:
            continue
        timing = each.timing(_cut(durations, per_rank, pieces))
        makespan, idle = (value / pieces for value in (timing.makespan, max(timing.bubble)))
        share = idle / makespan if makespan else 0.0
        mark = "*" if name == schedule.name else " "
        held = max(each.peak_live) / pieces
        lines.append(f"{mark} {name:18} {makespan:6g} {idle:5g} {share:6.0%}  {held:g}")
    return lines


def _cut(durations: Durations, per_rank: int, pieces: int) -> Durations:
    """Return what stages take if a rank's part is cut into so many, in units that are as many times smaller."""
    return Durations(
        forward=durations.forward * per_rank,
        input_gradient=durations.input_gradient * per_rank,
        weight_gradient=durations.weight_gradient * per_rank,
        hop=durations.hop * pieces,
    )
