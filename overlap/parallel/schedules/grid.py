"""A pipeline schedule drawn as a grid of ranks by time."""

from __future__ import annotations

from collections.abc import Sequence

from .action import Action
from .proof import Rows
from .timing import Durations, Timing


def time_grid(rows: Rows, timing: Timing, durations: Durations, *, width: int | None = None) -> list[str]:
    """Return the lines of the grid, a column for each unit of time.

    `F3` is the forward of microbatch 3, `2F3` that at stage 2 where ranks have several; `--` goes on with what is to
    its left, and `.` is idle.

    Args:
        rows: Of the schedule.
        timing: When its actions run.
        durations: What they take.
        width: Characters in a line; what does not fit goes into further blocks below. By default all is one block.
    """
    plain = all(len({action.stage for action in row}) == 1 for row in rows)
    table = [_cells(row, timing, durations, plain=plain) for row in rows]
    column = max(len(cell) for cells in table for cell in cells)
    column = max(column, len(str(timing.makespan - 1)))
    margin = max(len("rank"), len(str(len(rows) - 1)))
    each = timing.makespan if width is None else max(1, (width - margin - 1) // (column + 1))
    lines: list[str] = []
    for begin in range(0, timing.makespan, each):
        end = min(begin + each, timing.makespan)
        lines += [""] if begin else []
        lines.append(_line("time", [str(at) for at in range(begin, end)], column, margin))
        lines += [_line(str(rank), cells[begin:end], column, margin) for rank, cells in enumerate(table)]
    return lines


def _cells(row: Sequence[Action], timing: Timing, durations: Durations, *, plain: bool) -> list[str]:
    cells = ["."] * timing.makespan
    for action in row:
        start = timing.starts[action]
        for at in range(start, start + durations.of(action.kind)):
            cells[at] = "--"
        if durations.of(action.kind):
            cells[start] = f"{action.kind}{action.microbatch}" if plain else str(action)
    return cells


def _line(head: str, cells: list[str], column: int, margin: int) -> str:
    return " ".join([head.rjust(margin), "", *(cell.ljust(column) for cell in cells)]).rstrip()
