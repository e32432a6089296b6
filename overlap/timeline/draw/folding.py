"""Rows of a drawing: ranks that are alike share one, with their number and how far they differ; and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...units import figure, figure_unit
from ..measure.metrics import Breakdown
from ..measure.steps import of_steps

_SIMILAR_SHARE = 0.02
"""Ranks are alike if their times differ by at most this part of the step; by more if there is no room for the rows."""
_BLAMED_SHARE = 0.25
"""Part of all waiting that a rank must have caused to get a row of its own."""
_WAITING_SHARE = 0.01
"""Part of all time: less waiting than this gives no rank a row of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """The ranks that share one row."""

    ranks: tuple[int, ...]  # Ascending
    drawn: int  # The rank that is shown: its exposed communication is the median
    spread: float  # The largest difference of their times, as part of the longest wall time
    culprit: bool  # Whether others waited for the rank so long that it has a row of its own

    @property
    def label(self) -> str:
        """Label of the row: the drawn rank, or "N like R" for N ranks of which R is drawn."""
        return str(self.drawn) if len(self.ranks) == 1 else f"{len(self.ranks)} like {self.drawn}"


def fold(rows: Sequence[Breakdown], blamed_ns: Mapping[int, int], *, room: int) -> list[Fold]:
    """Return at most `room` rows of ranks, at least one row; the ranks that were waited for most come first.

    Ranks whose times are alike share a row. The culprits come first, then the others by exposed communication, most
    first. The difference that counts as alike doubles until there is room. Cost: for each doubling, each rank is
    compared with each row.
    """
    wall_ns = max((row.wall_ns for row in of_steps(rows)), default=0) or 1
    points = {row.rank: np.array([getattr(row, f"{name}_ns") for name in _TIME_NAMES]) / wall_ns for row in rows}
    total_ns = sum(blamed_ns.values())
    has_waiting = total_ns > _WAITING_SHARE * sum(row.wall_ns for row in rows)
    blamed = (
        rank for rank, ns in blamed_ns.items() if has_waiting and ns >= _BLAMED_SHARE * total_ns and rank in points
    )
    culprits = sorted(blamed, key=lambda rank: (-blamed_ns[rank], rank))[: max(room - 1, 0)]
    others = sorted((row for row in rows if row.rank not in culprits), key=lambda row: (-row.exposed_ns, row.rank))
    tolerance, groups = _SIMILAR_SHARE, _group_alike(others, points, _SIMILAR_SHARE)
    while len(groups) > max(room - len(culprits), 1):
        tolerance *= 2
        groups = _group_alike(others, points, tolerance)
    return [
        *(_make_fold([rank], points, culprit=True) for rank in culprits),
        *(_make_fold([row.rank for row in group], points, culprit=False) for group in groups),
    ]


_TIME_NAMES = ("wall", "compute", "overlapped", "waiting", "wire", "kept", "copy", "queued", "idle")
"""Times of a rank by which it is like others; the table has them in this order."""


_Point: TypeAlias = NDArray[np.float64]
"""A rank's times as parts of the longest wall time, in the order of `_TIME_NAMES`."""


def _group_alike(rows: Sequence[Breakdown], points: Mapping[int, _Point], tolerance: float) -> list[list[Breakdown]]:
    """Return groups: a rank joins the first group whose first rank differs by at most `tolerance` in each time."""
    groups: list[list[Breakdown]] = []
    for row in rows:
        for group in groups:
            if np.abs(points[row.rank] - points[group[0].rank]).max() <= tolerance:
                group.append(row)
                break
        else:
            groups.append([row])
    return groups


def _make_fold(ranks: list[int], points: Mapping[int, _Point], *, culprit: bool) -> Fold:
    """Return the row of ranks that are sorted by exposed communication: it shows the middle one."""
    spread = float(np.ptp([points[rank] for rank in ranks], axis=0).max())
    return Fold(ranks=tuple(sorted(ranks)), drawn=ranks[(len(ranks) - 1) // 2], spread=spread, culprit=culprit)


_TABLE_HEADS = ("wall", "compute", "hidden", "hid%", "wait", "wire", "kept", "copy", "queued", "idle")


def table_lines(rows: Sequence[tuple[Fold, Sequence[Breakdown]]], width: int) -> list[str]:
    """Return the lines of the table under a drawing: for each row the means of its ranks.

    Wall is compute (some of which hides communication), waiting, bytes on the wire, time in which a program kept the
    event loop, copies of a device's memory, queued and idle, added up. Columns that do not fit go into a second block
    under the first; a column of zeros is left out where possible.
    """
    unit, unit_ns = figure_unit(max(row.wall_ns for _, ranks in rows for row in ranks))
    heads = [f"rank/{unit}", *_TABLE_HEADS, "spread"]
    columns = [list(column) for column in zip(heads, *(_table_row(*row, unit_ns) for row in rows), strict=True)]
    for name in ("queued", "copy", "kept"):
        if not any(getattr(row, f"{name}_ns") for _, ranks in rows for row in ranks):
            columns.pop(heads.index(name))
    if all(len(one.ranks) == 1 for one, _ in rows):
        columns.pop()
    padded = [[text.rjust(max(map(len, column))) for text in column] for column in columns]
    lines: list[str] = []
    for block in _column_blocks(padded, width):
        lines += ["  ".join(texts).rstrip() for texts in zip(padded[0], *block, strict=True)]
    return lines


def _table_row(fold: Fold, ranks: Sequence[Breakdown], unit_ns: int) -> list[str]:
    """Return the cells of a row of the table: means of its ranks, and their spread if they are several."""

    def total_ns(name: str) -> int:
        return sum(getattr(row, f"{name}_ns") for row in ranks)

    comm_ns = total_ns("comm")
    hidden = f"{total_ns('overlapped') / comm_ns:.0%}" if comm_ns else "n/a"
    means = [figure(total_ns(name) / len(ranks), unit_ns) for name in _TIME_NAMES]
    return [fold.label, *means[:3], hidden, *means[3:], f"{fold.spread:.1%}" if len(ranks) > 1 else ""]


def _column_blocks(padded: list[list[str]], width: int) -> list[list[list[str]]]:
    """Divide columns into blocks, each narrow enough to stand in `width` next to a copy of the first column."""
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
