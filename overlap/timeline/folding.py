"""Which ranks are alike: those are one row of a drawing, with their number and how far they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .metrics import Breakdown

_ALIKE = 0.02
"""Ranks are alike whose times differ by at most that part of the step; more where there is no room for so many rows."""
_BLAMED = 0.25
"""Of all waiting: a rank that caused as much has a row of its own."""
_WORTH = 0.01
"""Of all time: less waiting than that is nobody's fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Ranks that one row stands for."""

    ranks: tuple[int, ...]  # Ascending
    drawn: int  # The one that is shown: its exposed communication is the median
    spread: float  # By how much their times differ at most, as part of the longest wall time
    blamed_ns: int  # How long others waited for them
    culprit: bool  # Whether it has a row of its own because of that

    @property
    def label(self) -> str:
        """What the row is called."""
        return str(self.drawn) if len(self.ranks) == 1 else f"{len(self.ranks)} like {self.drawn}"


def fold(rows: Sequence[Breakdown], blamed_ns: Mapping[int, int], *, room: int) -> list[Fold]:
    """Fold ranks into at most `room` rows (at least one), those that were waited for most first.

    Ranks whose compute, hidden, waiting, wire and idle times are alike share a row. Others follow the culprits by how
    much they have exposed, most first. What counts as alike doubles until there is room. Cost: one pass over the ranks
    for each doubling, a look at each row for each.
    """
    wall_ns = max((row.wall_ns for row in rows), default=0) or 1
    points = {row.rank: _point(row, wall_ns) for row in rows}
    total_ns = sum(blamed_ns.values())
    worth = total_ns > _WORTH * sum(row.wall_ns for row in rows)
    culprits = {rank for rank, ns in blamed_ns.items() if worth and ns >= _BLAMED * total_ns and rank in points}
    culprits = set(sorted(culprits, key=lambda rank: (-blamed_ns[rank], rank))[: max(room - 1, 0)])
    others = sorted((row for row in rows if row.rank not in culprits), key=lambda row: (-row.exposed_ns, row.rank))
    alike, groups = _ALIKE, _grouped(others, points, _ALIKE)
    while len(groups) > max(room - len(culprits), 1):
        alike *= 2
        groups = _grouped(others, points, alike)
    first = sorted(culprits, key=lambda rank: (-blamed_ns[rank], rank))
    return [
        *(_made([rank], points, blamed_ns, culprit=True) for rank in first),
        *(_made([row.rank for row in group], points, blamed_ns, culprit=False) for group in groups),
    ]


def _point(row: Breakdown, wall_ns: int) -> tuple[float, ...]:
    times_ns = (row.wall_ns, row.compute_ns, row.overlapped_ns, row.waiting_ns, row.wire_ns, row.idle_ns)
    return tuple(time_ns / wall_ns for time_ns in times_ns)


def _grouped(rows: Sequence[Breakdown], points: Mapping[int, tuple[float, ...]], alike: float) -> list[list[Breakdown]]:
    """Put each rank to the first group whose first rank it is like."""
    groups: list[list[Breakdown]] = []
    for row in rows:
        point = points[row.rank]
        for group in groups:
            if _apart(point, points[group[0].rank]) <= alike:
                group.append(row)
                break
        else:
            groups.append([row])
    return groups


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def _made(
    ranks: list[int], points: Mapping[int, tuple[float, ...]], blamed_ns: Mapping[int, int], *, culprit: bool
) -> Fold:
    """Make a fold of ranks that are in order of what they have exposed."""
    spread = max(max(values) - min(values) for values in zip(*(points[rank] for rank in ranks), strict=True))
    blamed = sum(blamed_ns.get(rank, 0) for rank in ranks)
    return Fold(
        ranks=tuple(sorted(ranks)), drawn=ranks[(len(ranks) - 1) // 2], spread=spread, blamed_ns=blamed, culprit=culprit
    )
