"""Computed times of a pipeline schedule with fixed durations of actions, and a drawing of ranks by time."""

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
    hop: int = 0  # From the end of an action to the arrival of its message on another rank

    def of(self, kind: ActionKind) -> int:
        """Return the duration of an action of this kind."""
        if kind is ActionKind.BACKWARD:
            return self.input_gradient + self.weight_gradient
        if kind is ActionKind.INPUT_GRADIENT:
            return self.input_gradient
        return self.forward if kind is ActionKind.FORWARD else self.weight_gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The start of every action, and the time that ranks are busy, in the unit of the durations."""

    starts: dict[Action, int]  # Start of every action
    makespan: int  # From the first start to the last end
    busy: tuple[int, ...]  # Sum of the durations of every rank's actions

    @property
    def bubble(self) -> tuple[int, ...]:
        """The idle time of every rank, between the first start and the last end on any rank."""
        return tuple(self.makespan - busy for busy in self.busy)


def replay_timing(rows: Rows, owners: tuple[int, ...], durations: Durations) -> Timing:
    """Return the times of a proved schedule: each rank runs its actions in order, each as soon as its inputs are there.

    Args:
        rows: The actions of every rank.
        owners: The rank of every stage.
        durations: Durations of the actions.
    """
    starts = replay_starts(rows, owners, durations)
    busy = tuple(sum(durations.of(action.kind) for action in row) for row in rows)
    ends = [start + durations.of(action.kind) for action, start in starts.items()]
    return Timing(starts=starts, makespan=max(ends), busy=busy)


def replay_starts(rows: Rows, owners: tuple[int, ...], durations: Durations) -> dict[Action, int]:
    """Return the start of each action; actions that would wait forever are missing.

    Arguments: see `replay_timing`; the rows need not be proved.
    """
    starts: dict[Action, int] = {}
    ends: dict[Action, int] = {}
    # `waiting`: remaining actions of each rank, the next one at the end of the list. `free`: when the rank is free.
    waiting, free = [list(reversed(row)) for row in rows], [0] * len(rows)
    before = -1
    while len(starts) > before:  # until a pass over all ranks starts no action
        before = len(starts)
        for rank, actions in enumerate(waiting):
            while actions and (ready := _ready_time(actions[-1], rank, ends, owners, durations.hop)) is not None:
                action = actions.pop()
                starts[action] = max(ready, free[rank])
                ends[action] = free[rank] = starts[action] + durations.of(action.kind)
    return starts


def _ready_time(action: Action, rank: int, ends: dict[Action, int], owners: tuple[int, ...], hop: int) -> int | None:
    """Return when all inputs of an action are on its rank; None if an action that it needs is not in `ends`.

    A message to another rank takes `hop`.
    """
    ready = 0
    for either in action.needs(len(owners) - 1):  # alternatives, one of which must have run
        over = [ends[each] + hop * (owners[each.stage] != rank) for each in either if each in ends]
        if not over:
            return None
        ready = max(ready, *over)
    return ready


def draw_time_grid(rows: Rows, timing: Timing, durations: Durations, *, width: int | None = None) -> list[str]:
    """Return the lines of the grid, a column for each unit of time.

    `F3` is the forward of microbatch 3; if ranks have several stages, `2F3` is that at stage 2. `--` continues the
    action on its left, and `.` is idle time.

    Args:
        rows: Rows of the schedule.
        timing: Times of its actions.
        durations: Durations of the actions.
        width: Characters in a line: a longer grid continues in further blocks below. None: one block.
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
    """Return the cells of a rank's row, one for each unit of time; actions that take no time are not drawn.

    With `plain`, cells leave out the stage, because each rank has only one.
    """
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
