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
    """The classes of a world's ranks, and the ranks that are simulated for all."""

    classes: Ints  # (world_size,) Class of each rank, from 0 in the order of their first ranks
    simulated: tuple[int, ...]  # First and last rank of each class, ascending

    @classmethod
    def of(cls, classes_by: AlikeBy, world_size: int) -> Self:
        """Return the classes of the ranks of a world.

        Args:
            classes_by: Number of equal blocks of consecutive ranks that behave alike; or a function that returns the
                class of a rank.
            world_size: Number of ranks.

        Raises:
            UsageError: If there are no such blocks.
        """
        names = (
            list(map(classes_by, range(world_size))) if callable(classes_by) else _class_blocks(classes_by, world_size)
        )
        numbers: dict[Hashable, int] = {}
        classes = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
        # Of equal keys a dict keeps the last value: ascending ranks give the last one of a class, descending the first.
        lasts = dict(zip(classes.tolist(), range(world_size), strict=True))
        firsts = dict(zip(classes[::-1].tolist(), range(world_size - 1, -1, -1), strict=True))
        return cls(classes=classes, simulated=tuple(sorted({*firsts.values(), *lasts.values()})))

    def rows(self, ranks: Sequence[int]) -> Ints:
        """Return (groups, size) the world ranks of all groups that behave like one, which is among them.

        Args:
            ranks: World ranks of the one group.

        Raises:
            UsageError: If it is no row of a grid, or ranks like its own are in groups of another form.
        """
        row = np.array(ranks, np.int64)
        grid = self._grid_rows(row)
        # Rows of the grid whose ranks have the same classes, place by place; they must hold all ranks of these classes.
        pattern = self.classes[row]
        rows: Ints = grid[(self.classes[grid] == pattern).all(axis=1)]
        if rows.size != np.isin(self.classes, pattern).sum():
            raise UsageError(
                f"alike: ranks {_format_ranks(ranks)} are a group, but others that are said to behave alike are "
                "grouped in another way; group all of them, or leave out alike"
            )
        return rows

    def _grid_rows(self, row: Ints) -> Ints:
        """Return the rows of the grid over all ranks that has this row; refuse a row of no such grid."""
        size, world_size = len(row), len(self.classes)
        stride = int(row[1] - row[0]) if size > 1 else 1
        if stride > 0 and world_size % (size * stride) == 0:
            # Ranks as (outer, along the axis, inner); each row has the ranks along the axis.
            grid = np.arange(world_size).reshape(-1, size, stride).transpose(0, 2, 1).reshape(-1, size)
            if (grid == row).all(axis=1).any():
                return grid
        raise UsageError(
            f"alike: ranks {_format_ranks(row.tolist())} are no row of a grid over all ranks; where ranks represent "
            "others, groups are the world and those of meshes, such as rank.mesh(dp=4, tp=8)['tp']"
        )

    def first_of_class(self, ends: Sequence[int]) -> Ints:
        """Return for each of the ranks `ends` the index, in `ends`, of the first rank of its class."""
        classes = self.classes[list(ends)].tolist()
        return np.array([classes.index(number) for number in classes], np.int64)

    def representatives(self, ranks: Ints, ends: Sequence[int]) -> Ints:
        """Return for each rank the index, in `ends`, of its representative, the first rank of its class."""
        index = np.full(int(self.classes.max()) + 1, -1, np.int64)
        # Of equal indices the last assignment counts: in reverse order that is the first rank of a class.
        index[self.classes[list(reversed(ends))]] = range(len(ends) - 1, -1, -1)
        representatives: Ints = index[self.classes[ranks]]
        return representatives


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AlikeGroups:
    """Groups with the same demand, each on its own resources."""

    demand: Demand  # demand of the first group
    resources: Ints  # (groups, needs) The resources of each group, in the order of the first group's
    representatives: Ints  # (groups, ranks of each) The representative of each rank, as an index of the simulated ranks


def group_by_unit(rows: Ints, ranks_per_unit: int) -> list[tuple[Ints, Ints]]:
    """Sort groups by their ranks within a unit of the cluster: groups that differ by whole units belong together.

    Args:
        rows: (groups, ranks of each) World ranks.
        ranks_per_unit: Ranks of a node or UltraServer; all of them are built alike.

    Returns:
        For each sort the indices of its rows, and the distance of each from the first one in units.
    """
    units = rows.min(axis=1) // ranks_per_unit
    # Groups are alike if their ranks are equal but for whole units.
    _, kind = np.unique(rows - units[:, None] * ranks_per_unit, axis=0, return_inverse=True)
    sorts = [np.flatnonzero(kind.reshape(-1) == sort) for sort in range(int(kind.max()) + 1)]
    return [(members, units[members] - units[members[0]]) for members in sorts]


def join_demands(groups: Sequence[AlikeGroups], ends: Sequence[int], class_firsts: Ints) -> Demand:
    """Return the common demand of groups that do the same at once, for the simulated ranks.

    Ranks of one class are done when the last of them is. The needs of the groups on one wire add up, section by
    section, and where the sum is more than the wire has, all take longer in proportion. Groups with sections of
    different lengths need it evenly.

    Args:
        groups: The groups.
        ends: World ranks that are simulated.
        class_firsts: (ends,) The representative of each simulated rank, as an index of `ends`.
    """
    left_ns = np.zeros(len(ends), np.int64)
    for same in groups:  # the latest end of the ranks that a simulated one stands for
        for mark_ns, positions in zip(same.demand.marks_ns, same.demand.positions, strict=True):
            np.maximum.at(left_ns, same.representatives[:, positions], mark_ns)
    alone_ns, evenly = int(left_ns.max()), len({same.demand.ends_ns for same in groups}) > 1
    section_ends_ns = np.array([alone_ns] if evenly else groups[0].demand.ends_ns)
    needed, busy_ns, messages = _sum_needs(groups, evenly)
    # Sections in which a wire is overfull take longer; each end moves with its place within its section.
    lengths_ns = np.diff(section_ends_ns, prepend=0)
    longer_ns = np.maximum(lengths_ns, np.rint(busy_ns.max(axis=1, initial=0.0)).astype(np.int64))
    starts_ns, later_ns = section_ends_ns - lengths_ns, np.cumsum(longer_ns) - longer_ns
    section = np.searchsorted(section_ends_ns[:-1], left_ns)
    within = (left_ns - starts_ns[section]) / np.maximum(lengths_ns[section], 1)
    left_ns = np.rint(later_ns[section] + within * longer_ns[section]).astype(np.int64)[class_firsts]
    return Demand.of(np.array(ends, np.int64), left_ns, needed, busy_ns, longer_ns, messages)


def _sum_needs(groups: Sequence[AlikeGroups], evenly: bool) -> tuple[Ints, Floats, Floats]:
    """Return the resources of all groups, and (sections, needs) busy times and messages; one section if `evenly`."""
    needed, place = np.unique(np.concatenate([group.resources.ravel() for group in groups]), return_inverse=True)

    def sum_by_resource(rows: Sequence[Floats]) -> Floats:
        """Return (sections, needs) sums of a figure over all groups, each of which is on its own resources."""
        tiled = np.hstack([np.tile(row, len(group.resources)) for row, group in zip(rows, groups, strict=True)])
        return np.array([np.bincount(place, row, len(needed)) for row in tiled])

    busy_ns, messages = [group.demand.busy_ns for group in groups], [group.demand.messages for group in groups]
    if evenly:
        # One section: messages are averaged, weighted by the busy time of their section.
        pairs = zip(busy_ns, messages, strict=True)
        messages = [
            (busy * count).sum(axis=0, keepdims=True) / busy.sum(axis=0, keepdims=True) for busy, count in pairs
        ]
        busy_ns = [busy.sum(axis=0, keepdims=True) for busy in busy_ns]
    return needed, sum_by_resource(busy_ns), sum_by_resource(messages)


def _class_blocks(count: int, world_size: int) -> list[int]:
    """Return the class of each rank for `count` equal blocks of consecutive ranks."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1 or world_size % count:
        raise UsageError(f"alike: {world_size} ranks do not fall into {count!r} equal blocks; choose a divisor")
    return [rank // (world_size // count) for rank in range(world_size)]


def _format_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
