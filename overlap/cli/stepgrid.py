"""Drawing of a schedule as a grid of ranks by steps, for 80 columns; steps that are alike share a column."""

from __future__ import annotations

import numpy as np

from ..collectives.schedule import Op, Schedule
from ..cost.rounds import rounds

_WIDTH = 80
_ROWS = 20
_CUT = "..."

_LEGEND = """\
to whom each rank sends: >3 overwrites at rank 3, +3 adds there, >3x4 is to 4
ranks, 3 first; = is local work, . is idle; steps that are alike share a column\
"""


def step_grid(schedule: Schedule) -> list[str]:
    """Return the lines of the grid: at most 20 ranks, and as many steps as fit, both cut in the middle."""
    firsts, labels = _columns(schedule)
    ranks = _cut(list(range(schedule.size)), _ROWS)
    column = [labels, *([_cell(schedule, step, rank) for step in firsts] for rank in ranks if rank is not None)]
    widths = [max(map(len, cells)) for cells in zip(*column, strict=True)]
    margin = max(len("rank"), len(str(schedule.size - 1)))
    shown = _fitting(widths, _WIDTH - margin)
    table = iter(column[1:])
    lines = [*_LEGEND.splitlines(), "", _line("step", labels, widths, shown, margin)]
    for rank in ranks:
        cells = [_CUT] * len(firsts) if rank is None else next(table)
        lines.append(_line(_CUT if rank is None else str(rank), cells, widths, shown, margin))
    return lines


def _columns(schedule: Schedule) -> tuple[list[int], list[str]]:
    """Return the first step and the label of each run of steps that are alike."""
    repeats = [each.repeat for each in rounds(schedule).rounds]
    firsts = np.cumsum([0, *repeats[:-1]]).tolist()
    return firsts, [f"{a}-{a + n - 1}" if n > 1 else str(a) for a, n in zip(firsts, repeats, strict=True)]


def _cell(schedule: Schedule, step: int, rank: int) -> str:
    start, stop = np.searchsorted(schedule.step, [step, step + 1])
    mine = np.flatnonzero(schedule.src[start:stop] == rank) + start
    remote = mine[schedule.dst[mine] != rank]
    if not len(remote):
        return "=" if len(mine) else "."
    peers = list(dict.fromkeys(schedule.dst[remote].tolist()))
    sign = "+" if schedule.op[remote[0]] == Op.ADD else ">"
    return f"{sign}{peers[0]}" + (f"x{len(peers)}" if len(peers) > 1 else "")


def _cut(items: list[int], most: int) -> list[int | None]:
    """Leave out the middle of a list that is too long; None marks the gap."""
    if len(items) <= most:
        return list(items)
    tail = most // 4
    return [*items[: most - tail - 1], None, *items[len(items) - tail :]]


def _fitting(widths: list[int], room: int) -> list[int | None]:
    """Return the columns that fit in `room`, cut in the middle where not all do."""
    for most in range(len(widths), 1, -1):
        shown = _cut(list(range(len(widths))), most)
        if sum(len(_CUT) + 1 if index is None else widths[index] + 1 for index in shown) <= room:
            return shown
    return [0]


def _line(head: str, cells: list[str], widths: list[int], shown: list[int | None], margin: int) -> str:
    texts = [_CUT if index is None else cells[index].rjust(widths[index]) for index in shown]
    return " ".join([head.rjust(margin), *texts])
