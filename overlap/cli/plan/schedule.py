"""Page of a pipeline schedule: its grid of ranks by time, its idle time, the activations held; and a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...parallel.schedules import FAMILIES, Durations, PipelineSchedule, make
from ...settings import Option
from ...units import parse_index
from ..options import shared_option
from ..output import Result, page_width

OPTIONS = {
    "microbatches": Option(read=parse_index, metavar="N", help="of a batch; default: 8"),
    "chunks": shared_option("chunks"),
}

_MOST_CELLS, _MOST_COMPARED = 1 << 20, 1 << 18
"""Largest product of ranks, of ranks and microbatches, and of chunks; and largest that is compared, in a minute."""


def document_and_page(name: str, options: Mapping[str, Any]) -> Result:
    """Return a schedule: functions of its document and of its page.

    Raises:
        UsageError: If there is no such schedule or file, or a number is impossible.
        ScheduleError: If the file holds no schedule.
    """
    schedule = _find_schedule(name, options)
    return partial(json_document, schedule), lambda: [
        *_summary_lines(schedule),
        "",
        *schedule.grid(width=page_width()),
        "",
        *_comparison_table(schedule, options.get("chunks")),
    ]


def json_document(schedule: PipelineSchedule) -> dict[str, object]:
    """Return a schedule for JSON: an F, an I and a W each take one unit of time."""
    timing = schedule.timing()
    return {
        "name": schedule.name,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "rows": [[str(action) for action in row] for row in schedule.rows],
        "starts": [[timing.starts[action] for action in row] for row in schedule.rows],
        "makespan": timing.makespan,
        "bubble": list(timing.bubble),
        "bubble_by_formula": _formula_idle_time(schedule),
        "peak_live": list(schedule.peak_live),
    }


def _find_schedule(name: str, options: Mapping[str, Any]) -> PipelineSchedule:
    """Return a published schedule by name, or the schedule in a file; `UsageError` if the file is unreadable."""
    path = Path(name)
    if name.lower() in FAMILIES or not (path.suffix or path.exists()):
        try:
            ranks = parse_index(options.get("ranks", "4"))
        except UsageError as error:
            raise UsageError(f"--ranks: {error}") from None
        microbatches, chunks = options.get("microbatches", 8), options.get("chunks")
        family = FAMILIES.get(name.lower())
        pieces = (family.chunks if family else None) or chunks or 2
        if (cells := ranks * (ranks + microbatches) * pieces) > _MOST_CELLS:
            product = "ranks * (ranks + microbatches) * chunks"
            raise UsageError(f"--ranks, --microbatches, --chunks: expected {product} up to {_MOST_CELLS}, got {cells}")
        return make(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    try:
        return PipelineSchedule.parse(path.read_text(encoding="utf-8"), name=path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"SUBJECT: {name} cannot be read: {error}; name a text file with a schedule") from error


def _formula_idle_time(schedule: PipelineSchedule) -> int | None:
    """Return the idle time by the published formula, or None for a schedule that is no published one."""
    family = FAMILIES.get(schedule.name)
    return family.bubble(schedule.ranks, schedule.microbatches, Durations()) if family else None


def _summary_lines(schedule: PipelineSchedule) -> list[str]:
    """Return the lines above the grid: the size of the schedule, its idle time, and the activations held at once."""
    timing, formula = schedule.timing(), _formula_idle_time(schedule)
    least, most = min(timing.bubble), max(timing.bubble)
    idle = f"{least}" if least == most else f"{least} to {most}"
    share = most / timing.makespan if timing.makespan else 0.0
    by_formula = "" if formula is None else f"; by the formula {formula}"
    live = schedule.peak_live
    held = f"{live[0]}" if len(set(live)) == 1 else f"{min(live)} to {max(live)}"
    return [
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} microbatches",
        "",
        f"  time    {timing.makespan}, of which a rank is idle for {idle} ({share:.0%}){by_formula}",
        f"  memory  {held} activations at once on a rank, each of a microbatch at a stage",
    ]


def _comparison_table(schedule: PipelineSchedule, chunks: int | None) -> list[str]:
    """Return a table of all published schedules for this number of ranks and microbatches, or why there is none."""
    per_rank = schedule.stages // schedule.ranks
    if (cells := schedule.stages * (schedule.ranks + schedule.microbatches)) > _MOST_COMPARED:
        return [f"not compared with others: stages * (ranks + microbatches) is {cells}, above {_MOST_COMPARED}"]
    # If a rank's part is cut into pieces, a unit of time is smaller by that factor.
    durations = Durations(forward=per_rank, input_gradient=per_rank, weight_gradient=per_rank)
    lines = ["schedule              time  idle  share  held at once (of a rank's whole part)"]
    for name in FAMILIES:
        pieces = FAMILIES[name].chunks or chunks or 2
        try:
            # some schedules do not exist for these numbers
            candidate = make(name, ranks=schedule.ranks, microbatches=schedule.microbatches, chunks=pieces)
        except UsageError:
            continue
        timing = candidate.timing(durations)
        makespan, idle = (value / pieces for value in (timing.makespan, max(timing.bubble)))
        share = idle / makespan if makespan else 0.0
        mark = "*" if name == schedule.name else " "
        held = max(candidate.peak_live) / pieces
        lines.append(f"{mark} {name:18} {makespan:6g} {idle:5g} {share:6.0%}  {held:g}")
    return lines
