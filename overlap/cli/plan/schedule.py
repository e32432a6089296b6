"""Page of a pipeline schedule: its grid of ranks by time, its idle time, the activations held; and a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...parallel.schedules import FAMILIES, Durations, PipelineSchedule, make
from ...settings import Option
from ...units import index, switch
from ..output import as_json

_WIDTH = 80

_DURATIONS = {"forward": "F", "input_gradient": "I", "weight_gradient": "W"}

OPTIONS = {
    "microbatches": Option(read=index, metavar="N", help="of a batch; default: 8"),
    "chunks": Option(read=index, metavar="N", help="stages on each rank, of interleaved-1f1b; default: 2"),
    **{
        name: Option(read=index, metavar="T", help=f"time of {letter} for a microbatch; default: 1")
        for name, letter in _DURATIONS.items()
    },
    "hop": Option(read=index, metavar="T", help="time of a message; default: 0"),
    "max_live": Option(read=index, metavar="N", help="refuse it if a rank holds more activations at once"),
    "text": Option(read=switch, help="print its text form instead"),
}


def show(name: str, told: Mapping[str, Any]) -> int:
    """Print a schedule, and return the exit code 0.

    Raises:
        UsageError: If there is no such schedule or file, or a number is impossible.
        ScheduleError: If the file holds no schedule, or a rank holds more than is allowed.
    """
    schedule = _schedule(name, told)
    durations = Durations(**{each: told.get(each, 1) for each in _DURATIONS}, hop=told.get("hop", 0))
    if "max_live" in told:
        schedule.check_live(told["max_live"])
    if told.get("text"):
        print(schedule.text(), end="")
    elif told.get("json"):
        print(as_json(describe(schedule, durations)), end="")
    else:
        print("\n".join([*_summary(schedule, durations), "", *schedule.grid(durations, width=_WIDTH)]))
        print("\n".join(["", *_comparison(schedule, durations, told.get("chunks"))]))
    return 0


def describe(schedule: PipelineSchedule, durations: Durations) -> dict[str, object]:
    """Return a schedule for JSON: times in the unit of the durations."""
    timing = schedule.timing(durations)
    return {
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


def _schedule(name: str, told: Mapping[str, Any]) -> PipelineSchedule:
    path = Path(name)
    if name.lower() in FAMILIES or not (path.suffix or path.exists()):
        try:
            ranks = index(told.get("ranks", "4"))
        except UsageError as error:
            raise UsageError(f"--ranks: {error}") from None
        return make(name, ranks=ranks, microbatches=told.get("microbatches", 8), chunks=told.get("chunks"))
    try:
        return PipelineSchedule.parse(path.read_text(encoding="utf-8"), name=path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"SUBJECT: {name} cannot be read: {error}") from error


def _formula(name: str, schedule: PipelineSchedule, durations: Durations) -> int | None:
    """Return the idle time by the published formula; None without one, or with messages, which it leaves out."""
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
    """Return a table of all published schedules for this number of ranks and microbatches, and one model."""
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
    """Return the durations of stages if a rank's part is cut into `pieces`, in a unit smaller by that factor."""
    return Durations(
        forward=durations.forward * per_rank,
        input_gradient=durations.input_gradient * per_rank,
        weight_gradient=durations.weight_gradient * per_rank,
        hop=durations.hop * pieces,
    )
