"""Times of a pipeline schedule on paper, with fixed durations, and their drawing as a grid of ranks by time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .action import Action, ActionKind, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Durations of the actions of one microbatch at one stage, in any unit of time."""

    forward: int = 1  # F
    input_gradient: int = 1  # I
    weight_gradient: int = 1  # W. A whole backward, B, takes I + W.
    hop: int = 0  # From the end of an action to when its message is there, on another rank

    def of(self, kind: ActionKind) -> int:
        """Return the duration of an action of a kind."""
        if kind is ActionKind.BACKWARD:
            return self.input_gradient + self.weight_gradient
        if kind is ActionKind.INPUT_GRADIENT:
            return self.input_gradient
        return self.forward if kind is ActionKind.FORWARD else self.weight_gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The start of every action, and the time that ranks are busy."""

    starts: dict[Action, int]  # Start of every action
    makespan: int  # From the first start to the last end
    busy: tuple[int, ...]  # Sum of the durations of every rank's actions

    @property
    def bubble(self) -> tuple[int, ...]:
        """The idle time of every rank, from the first start anywhere to the last end anywhere."""
        return tuple(self.makespan - busy for busy in self.busy)


def replay(rows: Rows, owners: tuple[int, ...], durations: Durations) -> Timing:
    """Return the times of a proved schedule: each rank keeps its order, each action waits for its inputs."""
    starts = replay_starts(rows, owners, durations)
    busy = tuple(sum(durations.of(action.kind) for action in row) for row in rows)
    ends = [start + durations.of(action.kind) for action, start in starts.items()]
    return Timing(starts=starts, makespan=max(ends), busy=busy)


def replay_starts(rows: Rows, owners: tuple[int, ...], durations: Durations) -> dict[Action, int]:
    """Return the start of each action; actions that wait for each other without end are missing."""
    starts: dict[Action, int] = {}
    ends: dict[Action, int] = {}
    heads, free = [0] * len(rows), [0] * len(rows)
    progressed = True
    while progressed:
        progressed = False
        for rank, row in enumerate(rows):
            while heads[rank] < len(row):
                action = row[heads[rank]]
                ready = _ready_time(action, rank, ends, owners, durations.hop)
                if ready is None:
                    break
                starts[action] = max(ready, free[rank])
                ends[action] = free[rank] = starts[action] + durations.of(action.kind)
                heads[rank], progressed = heads[rank] + 1, True
    return starts


def _ready_time(action: Action, rank: int, ends: dict[Action, int], owners: tuple[int, ...], hop: int) -> int | None:
    """Return when all inputs of an action are on its rank; None if one has not run yet."""
    ready = 0
    for either in action.needs(len(owners) - 1):
        over = [ends[each] + hop * (owners[each.stage] != rank) for each in either if each in ends]
        if not over:
            return None
        ready = max(ready, *over)
    return ready


def time_grid(rows: Rows, timing: Timing, durations: Durations, *, width: int | None = None) -> list[str]:
    """Return the lines of the grid, a column for each unit of time.

    `F3` is the forward of microbatch 3, `2F3` that at stage 2 where ranks have several; `--` continues the action to
    its left, and `.` is idle.

    Args:
        rows: Rows of the schedule.
        timing: When its actions run.
        durations: Durations of the actions.
        width: Characters in a line; the rest goes into further blocks below. By default all is one block.
    """
    plain = all(len({action.stage for action in row}) == 1 for row in rows)
    table = [_draw_row(row, timing, durations, plain=plain) for row in rows]
    column = max(len(cell) for cells in table for cell in cells)
    column = max(column, len(str(timing.makespan - 1)))
    margin = max(len("rank"), len(str(len(rows) - 1)))
    each = timing.makespan if width is None else max(1, (width - margin - 1) // (column + 1))
    lines: list[str] = []
    for begin in range(0, timing.makespan, each):
        end = min(begin + each, timing.makespan)
        lines += [""] if begin else []
        lines.append(_draw_line("time", [str(at) for at in range(begin, end)], column, margin))
        lines += [_draw_line(str(rank), cells[begin:end], column, margin) for rank, cells in enumerate(table)]
    return lines


def _draw_row(row: Sequence[Action], timing: Timing, durations: Durations, *, plain: bool) -> list[str]:
    """Return the cells of a rank's row, one for each unit of time."""
    cells = ["."] * timing.makespan
    for action in row:
        start = timing.starts[action]
        for at in range(start, start + durations.of(action.kind)):
            cells[at] = "--"
        if durations.of(action.kind):
            cells[start] = f"{action.kind}{action.microbatch}" if plain else str(action)
    return cells


def _draw_line(head: str, cells: list[str], column: int, margin: int) -> str:
    return " ".join([head.rjust(margin), "", *(cell.ljust(column) for cell in cells)]).rstrip()
