"""The figures under the drawing: a table that folds to the width, and what they mean in one or two sentences."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from ..units import format_ns
from .axis import in_unit, unit_for
from .lateness import Arrivals, straggler
from .metrics import Breakdown

_HEADS = ("rank", "wall", "compute", "comm", "overlapped", "exposed", "idle", "overlap", "ideal")


def table(rows: Sequence[Breakdown], width: int) -> list[str]:
    """Return the lines of the table; columns that do not fit go into a second block under the first."""
    unit, unit_ns = unit_for(max(row.wall_ns for row in rows))
    columns = [list(column) for column in zip(_HEADS, *(_figures(row, unit_ns) for row in rows), strict=True)]
    columns[0][0] = f"rank/{unit}"
    padded = [[text.rjust(max(map(len, column))) for text in column] for column in columns]
    lines: list[str] = []
    for block in _blocks(padded, width):
        lines += ["  ".join(texts) for texts in zip(padded[0], *block, strict=True)]
    return lines


def sentences(rows: Sequence[Breakdown], counted: Sequence[Arrivals], width: int) -> list[str]:
    """Say what an ideal overlap would reach and who kept the others waiting, wrapped to the width."""
    said = [_ideal(rows), _straggler(counted)]
    return [line for text in said if text for line in textwrap.wrap(text, width)]


def _figures(row: Breakdown, unit_ns: int) -> list[str]:
    times = (row.wall_ns, row.compute_ns, row.comm_ns, row.overlapped_ns, row.exposed_ns, row.idle_ns)
    ratio = "n/a" if row.overlap_ratio is None else f"{row.overlap_ratio:.1%}"
    written = [in_unit(time_ns, unit_ns) for time_ns in times]
    return [str(row.rank), *written, ratio, in_unit(row.ideal_wall_ns, unit_ns)]


def _blocks(padded: list[list[str]], width: int) -> list[list[list[str]]]:
    """Deal the columns after the first into blocks that fit beside a copy of the first."""
    blocks: list[list[list[str]]] = []
    room = 0
    for column in padded[1:]:
        needed = len(column[0]) + 2
        if not blocks or needed > room:
            blocks.append([])
            room = width - len(padded[0][0])
        blocks[-1].append(column)
        room -= needed
    return blocks


def _ideal(rows: Sequence[Breakdown]) -> str:
    wall_ns, ideal_ns = max(row.wall_ns for row in rows), max(row.ideal_wall_ns for row in rows)
    if not any(row.comm_ns for row in rows):
        return "There was no communication."
    if format_ns(ideal_ns) == format_ns(wall_ns):
        return "Overlap is ideal here: hiding more communication would gain nothing."
    faster = f", {wall_ns / ideal_ns:.2f}x as fast" if ideal_ns else ""
    return f"With ideal overlap this takes {format_ns(ideal_ns)} instead of {format_ns(wall_ns)}{faster}."


def _straggler(counted: Sequence[Arrivals]) -> str:
    if not any(one.collectives for one in counted):
        return ""
    worst = straggler(counted)
    if worst is None:
        return "No rank kept the others waiting."
    often = f"Rank {worst.rank} came last to {worst.last} of its {worst.collectives} collectives"
    return f"{often}; the others waited {format_ns(worst.caused_wait_ns)} for it, added up."
