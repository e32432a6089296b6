"""Rows of a drawing: ranks with similar times share a row. And the table of times under the drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...units import format_figure, table_unit
from ..measure.metrics import Breakdown
from ..measure.steps import keep_ranks_with_steps

_SIMILAR_SHARE = 0.02
"""Ranks share a row if each of their times differs by at most this part of the step; by more if rows do not fit."""
_BLAMED_SHARE = 0.25
"""Part of all waiting that a rank must have caused to get a row of its own."""
_WAITING_SHARE = 0.01
"""If ranks wait for less than this part of all time, no rank gets a row of its own for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """The ranks that share one row."""

    ranks: tuple[int, ...]  # Ascending
    drawn: int  # The rank that the row shows: the one with the median exposed communication
    spread: float  # Largest difference in any time between two of the ranks, as part of the longest wall time
    culprit: bool  # Whether the row has one rank, for which others waited long

    @property
    def label(self) -> str:
        """Label of the row: the rank, or "4 like 2" for four ranks of which rank 2 is drawn."""
        return str(self.drawn) if len(self.ranks) == 1 else f"{len(self.ranks)} like {self.drawn}"


def fold_alike_ranks(rows: Sequence[Breakdown], blamed_ns: Mapping[int, int], *, room: int) -> list[Fold]:
    """Distribute ranks over at most `room` rows, at least one; ranks with similar times share a row.

    Ranks that others waited for long come first, each in a row of its own, then the others by exposed communication,
    most first. The difference that counts as similar doubles until the rows fit. Cost: for each doubling, each rank is
    compared with each row.

    Args:
        rows: Times of each rank.
        blamed_ns: By rank, how long others waited for it.
        room: Largest number of rows.
    """
    wall_ns = max((row.wall_ns for row in keep_ranks_with_steps(rows)), default=0) or 1  # 1: never divide by 0
    points = {row.rank: np.array([getattr(row, f"{name}_ns") for name in _TIME_NAMES]) / wall_ns for row in rows}
    total_ns = sum(blamed_ns.values())
    has_waiting = total_ns > _WAITING_SHARE * sum(row.wall_ns for row in rows)
    blamed = (
        rank for rank, ns in blamed_ns.items() if has_waiting and ns >= _BLAMED_SHARE * total_ns and rank in points
    )
    # One row must be left for the other ranks.
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
"""Times of a rank that are compared with those of others, in the order of the table."""


_Point: TypeAlias = NDArray[np.float64]
"""A rank's times as parts of the longest wall time, in the order of `_TIME_NAMES`."""


def _group_alike(rows: Sequence[Breakdown], points: Mapping[int, _Point], tolerance: float) -> list[list[Breakdown]]:
    """Group ranks in order: each joins the first group whose first rank differs by at most `tolerance` in each time."""
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
    """Return the row of at least one rank, sorted by exposed communication; it shows the middle one."""
    spread = float(np.ptp([points[rank] for rank in ranks], axis=0).max())
    return Fold(ranks=tuple(sorted(ranks)), drawn=ranks[(len(ranks) - 1) // 2], spread=spread, culprit=culprit)


_TABLE_HEADS = ("wall", "compute", "hidden", "hid%", "wait", "wire", "kept", "copy", "queued", "idle")


def table_lines(rows: Sequence[tuple[Fold, Sequence[Breakdown]]], width: int) -> list[str]:
    """Return the lines of the table under a drawing: for each row, the times averaged over its ranks.

    The wall time is the sum of compute, waiting, wire, kept, copy, queued and idle; hidden communication is a part of
    compute. Columns that do not fit go into a second block under the first. The columns queued, copy and kept are left
    out if all are 0.

    Args:
        rows: Each row of the drawing, and the times of its ranks.
        width: Width of a line in characters.
    """
    unit, unit_ns = table_unit(max(row.wall_ns for _, ranks in rows for row in ranks))
    heads = [f"rank/{unit}", *_TABLE_HEADS, "spread"]
    columns = [list(column) for column in zip(heads, *(_table_row(*row, unit_ns) for row in rows), strict=True)]
    for name in ("queued", "copy", "kept"):
        if not any(getattr(row, f"{name}_ns") for _, ranks in rows for row in ranks):
            # The names are in order from right to left, so that the indexes of the others stay valid.
            columns.pop(heads.index(name))
    if all(len(one.ranks) == 1 for one, _ in rows):
        # No row has several ranks: the last column, the spread, is empty.
        columns.pop()
    padded = [[text.rjust(max(map(len, column))) for text in column] for column in columns]
    lines: list[str] = []
    for block in _divide_into_blocks(padded, width):
        lines += ["  ".join(texts).rstrip() for texts in zip(padded[0], *block, strict=True)]
    return lines


def _table_row(fold: Fold, ranks: Sequence[Breakdown], unit_ns: int) -> list[str]:
    """Return the texts of a row of the table; times are means of its ranks, and the spread of one rank is ""."""

    def total_ns(name: str) -> int:
        return sum(getattr(row, f"{name}_ns") for row in ranks)

    comm_ns = total_ns("comm")
    hidden = f"{total_ns('overlapped') / comm_ns:.0%}" if comm_ns else "n/a"
    means = [format_figure(total_ns(name) / len(ranks), unit_ns) for name in _TIME_NAMES]
    return [fold.label, *means[:3], hidden, *means[3:], f"{fold.spread:.1%}" if len(ranks) > 1 else ""]


def _divide_into_blocks(padded: list[list[str]], width: int) -> list[list[list[str]]]:
    """Divide the columns after the first into blocks that fit into `width` next to a copy of the first column."""
    blocks: list[list[list[str]]] = []
    room = 0
    labels, *others = padded
    for column in others:
        needed = len(column[0]) + 2
        if not blocks or needed > room:
            blocks.append([])
            room = width - len(labels[0])
        blocks[-1].append(column)
        room -= needed
    return blocks
