"""Classes of ranks that behave alike, their representatives, and the common demand of their groups. Pure.

Where only the timeline matters, ranks that run the same program in like places do the same at the same time. Of each
class of them the first and the last are simulated: the first represents all, the last is a check, because the ends of a
class must not differ.

A group of such a rank represents the groups of all ranks like it: the rows of a grid over the world, as meshes make
them. All rows that are alike do the same at once, and the wires carry them all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np

from ..collectives.placement import Floats, Ints
from ..errors import UsageError
from .demand import Demand

AlikeBy: TypeAlias = "int | Callable[[int], Hashable]"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alike:
    """The classes of a world's ranks."""

    classes: Ints  # (world_size,) Class of each rank, from 0 in the order of their first ranks
    simulated: tuple[int, ...]  # First and last rank of each class, ascending

    @classmethod
    def of(cls, classes_by: AlikeBy, world_size: int) -> Self:
        """Sort the ranks of a world.

        Args:
            classes_by: Number of equal blocks of consecutive ranks that behave alike; or a function that returns the
                class of a rank.
            world_size: Number of ranks.

        Raises:
            UsageError: If there are no such blocks.
        """
        names = list(map(classes_by, range(world_size))) if callable(classes_by) else _blocks(classes_by, world_size)
        numbers: dict[Hashable, int] = {}
        classes = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
        lasts = dict(zip(classes.tolist(), range(world_size), strict=True))
        firsts = dict(zip(classes[::-1].tolist(), range(world_size - 1, -1, -1), strict=True))
        return cls(classes=classes, simulated=tuple(sorted({*firsts.values(), *lasts.values()})))

    def rows(self, ranks: Sequence[int]) -> Ints:
        """Return the groups like one, itself included, as (groups, ranks of each).

        Raises:
            UsageError: If it is no row of a grid, or ranks like its own are in groups of another form.
        """
        row = np.array(ranks, np.int64)
        grid = self._grid(row)
        pattern = self.classes[row]
        rows: Ints = grid[(self.classes[grid] == pattern).all(axis=1)]
        if rows.size != np.isin(self.classes, pattern).sum():
            raise UsageError(
                f"alike: ranks {_named(ranks)} are a group, but others that are said to behave alike are grouped "
                "in another way; group all of them, or leave out alike"
            )
        return rows

    def _grid(self, row: Ints) -> Ints:
        size, world_size = len(row), len(self.classes)
        stride = int(row[1] - row[0]) if size > 1 else 1
        if stride > 0 and world_size % (size * stride) == 0:
            grid = np.arange(world_size).reshape(-1, size, stride).transpose(0, 2, 1).reshape(-1, size)
            if (grid == row).all(axis=1).any():
                return grid
        raise UsageError(
            f"alike: ranks {_named(row.tolist())} are no row of a grid over all ranks; where ranks represent others, "
            "groups are the world and those of meshes, such as rank.mesh(dp=4, tp=8)['tp']"
        )

    def first_like(self, ends: Sequence[int]) -> Ints:
        """Return for each rank the index of the first rank of its class."""
        classes = self.classes[list(ends)].tolist()
        return np.array([classes.index(number) for number in classes], np.int64)

    def standing(self, ranks: Ints, ends: Sequence[int]) -> Ints:
        """Return for each rank the index in `ends` of its representative, the first rank of its class."""
        index = np.full(int(self.classes.max()) + 1, -1, np.int64)
        index[self.classes[list(reversed(ends))]] = range(len(ends) - 1, -1, -1)
        representatives: Ints = index[self.classes[ranks]]
        return representatives


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AlikeGroups:
    """Groups with the same demand, each on its own resources."""

    demand: Demand  # demand of the first group
    resources: Ints  # (groups, needs) The resources of each group, in the order of the first group's
    standing: Ints  # (groups, ranks of each) The representative of each rank, as an index of the simulated ranks


def repeated(rows: Ints, ranks_per_unit: int) -> list[tuple[Ints, Ints]]:
    """Sort groups by their ranks within a unit of the cluster: groups that differ by whole units belong together.

    Args:
        rows: (groups, ranks of each) World ranks.
        ranks_per_unit: Ranks of a node or UltraServer; all of them are built alike.

    Returns:
        For each sort the indices of its rows, and the distance of each from the first one in units.
    """
    units = rows.min(axis=1) // ranks_per_unit
    _, which = np.unique(rows - units[:, None] * ranks_per_unit, axis=0, return_inverse=True)
    sorts = [np.flatnonzero(which.reshape(-1) == sort) for sort in range(int(which.max()) + 1)]
    return [(members, units[members] - units[members[0]]) for members in sorts]


def together(groups: Sequence[AlikeGroups], ends: Sequence[int], first_like: Ints) -> Demand:
    """Return the common demand of groups that do the same at once, for the simulated ranks.

    Ranks of one class are done when the last of them is. The needs of the groups on one wire add up, section by
    section, and where the sum is more than the wire has, all take so much longer. Groups with sections of different
    lengths need it evenly.

    Args:
        groups: The groups.
        ends: World ranks that are simulated.
        first_like: (ends,) The representative of each simulated rank, as an index of `ends`.
    """
    left_ns = np.zeros(len(ends), np.int64)
    for same in groups:
        for mark_ns, positions in zip(same.demand.marks_ns, same.demand.positions, strict=True):
            np.maximum.at(left_ns, same.standing[:, positions], mark_ns)
    alone_ns, evenly = int(left_ns.max()), len({same.demand.ends_ns for same in groups}) > 1
    section_ends_ns = np.array([alone_ns] if evenly else groups[0].demand.ends_ns)
    needed, busy_ns, messages = _added_up(groups, evenly)
    lengths_ns = np.diff(section_ends_ns, prepend=0)
    longer_ns = np.maximum(lengths_ns, np.rint(busy_ns.max(axis=1, initial=0.0)).astype(np.int64))
    starts_ns, later_ns = section_ends_ns - lengths_ns, np.cumsum(longer_ns) - longer_ns
    section = np.searchsorted(section_ends_ns[:-1], left_ns)
    within = (left_ns - starts_ns[section]) / np.maximum(lengths_ns[section], 1)
    left_ns = np.rint(later_ns[section] + within * longer_ns[section]).astype(np.int64)[first_like]
    return Demand.of(np.array(ends, np.int64), left_ns, needed, busy_ns, longer_ns, messages)


def _added_up(groups: Sequence[AlikeGroups], evenly: bool) -> tuple[Ints, Floats, Floats]:
    """Return the resources of all groups, (sections, needs) busy times and messages; one section if `evenly`."""
    needed, which = np.unique(np.concatenate([same.resources.ravel() for same in groups]), return_inverse=True)

    def over_all(rows: Sequence[Floats]) -> Floats:
        tiled = np.hstack([np.tile(row, len(same.resources)) for row, same in zip(rows, groups, strict=True)])
        return np.array([np.bincount(which, row, len(needed)) for row in tiled])

    busy_ns, messages = [same.demand.busy_ns for same in groups], [same.demand.messages for same in groups]
    if evenly:
        both = zip(busy_ns, messages, strict=True)
        messages = [(busy * count).sum(axis=0, keepdims=True) / busy.sum(axis=0, keepdims=True) for busy, count in both]
        busy_ns = [busy.sum(axis=0, keepdims=True) for busy in busy_ns]
    return needed, over_all(busy_ns), over_all(messages)


def _blocks(count: int, world_size: int) -> list[int]:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1 or world_size % count:
        raise UsageError(f"alike: {world_size} ranks do not fall into {count!r} equal blocks; choose a divisor")
    return [rank // (world_size // count) for rank in range(world_size)]


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
