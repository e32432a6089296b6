"""Classes of ranks that behave alike, their representatives, and the common demand of their groups. Pure.

If only the timeline matters, ranks that run the same program in corresponding places do the same at the same time. Of
each class of such ranks, the first and the last are simulated: the first stands for all, and the last is a check, as
the two must not differ.

The group of a simulated rank stands for the groups of all ranks of its class. These groups are rows of a grid over the
world, as meshes make them. All these rows do the same at the same time, and the wires carry the messages of all rows.
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
class RankClasses:
    """The classes of a world's ranks, and the ranks that are simulated for all."""

    classes: Ints  # (world_size,) Class of each rank, from 0 in the order of their first ranks
    simulated: tuple[int, ...]  # First and last rank of each class, ascending

    @classmethod
    def of(cls, classes_by: AlikeBy, world_size: int) -> Self:
        """Return the classes of the ranks of a world.

        Args:
            classes_by: Number of equal blocks of consecutive ranks, each of which is a class; or a function that
                returns the class of a rank.
            world_size: Number of ranks.

        Raises:
            UsageError: The ranks do not divide into that many blocks.
        """
        names = (
            list(map(classes_by, range(world_size)))
            if callable(classes_by)
            else _classes_of_blocks(classes_by, world_size)
        )
        numbers: dict[Hashable, int] = {}
        classes = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
        _, firsts = np.unique(classes, return_index=True)  # index of the first rank of each class
        _, from_end = np.unique(classes[::-1], return_index=True)
        lasts = world_size - 1 - from_end
        return cls(classes=classes, simulated=tuple(sorted({*firsts.tolist(), *lasts.tolist()})))

    def alike_groups(self, ranks: Sequence[int]) -> Ints:
        """Return (groups, size) the world ranks of all groups that behave like a given group, which is one of them.

        Example: 8 ranks in one class, group (0, 1): (0, 1), (2, 3), (4, 5), (6, 7).

        Args:
            ranks: World ranks of the given group.

        Raises:
            UsageError: The group is no row of a grid, or ranks of the same classes are in other groups.
        """
        row = np.array(ranks, np.int64)
        grid = self._find_grid_rows(row)
        # Rows of the grid whose ranks have the same classes, place by place; they must hold all ranks of these classes.
        pattern = self.classes[row]
        rows: Ints = grid[(self.classes[grid] == pattern).all(axis=1)]
        of_these_classes = np.flatnonzero(np.isin(self.classes, pattern))
        if rows.size != of_these_classes.size:
            others = np.setdiff1d(of_these_classes, rows).tolist()
            raise UsageError(
                f"alike: ranks {_format_ranks(ranks)} are a group, but no group alike holds ranks "
                f"{_format_ranks(others)} of the same classes; make the same groups everywhere, or leave out alike"
            )
        return rows

    def _find_grid_rows(self, row: Ints) -> Ints:
        """Return (groups, size) all rows of the grid over the world in which `row` is one; else raise `UsageError`.

        In a world of 8 ranks, row (1, 3) is in the grid (0, 2), (1, 3), (4, 6), (5, 7).
        """
        size, world_size = len(row), len(self.classes)
        stride = int(row[1] - row[0]) if size > 1 else 1
        if stride > 0 and world_size % (size * stride) == 0:
            # Ranks as an array (outer, along the axis, inner), and the axis moved last: its lines are the rows.
            grid = np.arange(world_size).reshape(-1, size, stride).transpose(0, 2, 1).reshape(-1, size)
            if (grid == row).all(axis=1).any():
                return grid
        raise UsageError(
            f"alike: ranks {_format_ranks(row.tolist())} are no row of a grid over all ranks; where ranks represent "
            "others, groups are the world and those of meshes, such as rank.mesh(dp=4, tp=8)['tp']"
        )

    def class_first_indices(self, ends: Sequence[int]) -> Ints:
        """Return, for each rank of `ends`, the index in `ends` of the first rank of the same class."""
        classes = self.classes[list(ends)].tolist()
        return np.array([classes.index(number) for number in classes], np.int64)

    def representative_indices(self, ranks: Ints, ends: Sequence[int]) -> Ints:
        """Return, for each rank of `ranks`, the index in `ends` of its representative, the first rank of its class.

        Args:
            ranks: World ranks, in an array of any shape.
            ends: The simulated ranks.
        """
        index = np.full(int(self.classes.max()) + 1, -1, np.int64)  # by class
        # If a class is assigned twice, the last assignment counts: in reverse order that of its first rank.
        index[self.classes[list(reversed(ends))]] = range(len(ends) - 1, -1, -1)
        representatives: Ints = index[self.classes[ranks]]
        return representatives


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AlikeGroups:
    """Groups with the same demand, but each on other resources."""

    demand: Demand  # demand of the first group
    resources: Ints  # (groups, needs) resources of each group that correspond to `demand.resources`
    representatives: Ints  # (groups, ranks of each) index, in the simulated ranks, of each rank's representative


def group_rows_by_unit(rows: Ints, ranks_per_unit: int) -> list[tuple[Ints, Ints]]:
    """Put groups together whose ranks differ by whole units of the cluster only.

    Example, with 4 ranks in a unit: (0, 1), (2, 3), (4, 5) gives ([0, 2], [0, 1]) and ([1], [0]).

    Args:
        rows: (groups, ranks of each) World ranks.
        ranks_per_unit: Ranks of a unit of the cluster, such as a node; all units are built alike.

    Returns:
        For each such set of groups: their indices in `rows`, and their distances from the first of them, in units.
    """
    units = rows.min(axis=1) // ranks_per_unit
    # Groups belong together if their ranks are equal after whole units are subtracted.
    _, kind = np.unique(rows - units[:, None] * ranks_per_unit, axis=0, return_inverse=True)
    sorts = [np.flatnonzero(kind.reshape(-1) == sort) for sort in range(int(kind.max()) + 1)]
    return [(members, units[members] - units[members[0]]) for members in sorts]


def join_demands(groups: Sequence[AlikeGroups], ends: Sequence[int], class_firsts: Ints) -> Demand:
    """Return the common demand of groups that do the same at the same time, for the simulated ranks.

    Ranks of one class are done when the last of them is. The needs of all groups on one wire add up, section by
    section. If the sum is more than the wire has, the section takes longer in proportion. If the groups have sections
    of different lengths, there is one section in which needs are even.

    Args:
        groups: The groups.
        ends: World ranks that are simulated.
        class_firsts: (ends,) Index, in `ends`, of the representative of each simulated rank.
    """
    # For each simulated rank, the time until all ranks that it stands for are done.
    left_ns = np.zeros(len(ends), np.int64)
    for same in groups:
        for mark_ns, positions in zip(same.demand.marks_ns, same.demand.positions, strict=True):
            np.maximum.at(left_ns, same.representatives[:, positions], mark_ns)
    alone_ns, evenly = int(left_ns.max()), len({same.demand.ends_ns for same in groups}) > 1
    section_ends_ns = np.array([alone_ns] if evenly else groups[0].demand.ends_ns)
    needed, busy_ns, messages = _sum_needs(groups, evenly)
    lengths_ns = np.diff(section_ends_ns, prepend=0)
    # A section lasts as long as its busiest wire needs for all groups, if that is longer.
    longer_ns = np.maximum(lengths_ns, np.rint(busy_ns.max(axis=1, initial=0.0)).astype(np.int64))
    starts_ns, later_ns = section_ends_ns - lengths_ns, np.cumsum(longer_ns) - longer_ns
    # A rank that was done halfway through a section is done halfway through the longer section.
    section = np.searchsorted(section_ends_ns[:-1], left_ns)
    within = (left_ns - starts_ns[section]) / np.maximum(lengths_ns[section], 1)
    left_ns = np.rint(later_ns[section] + within * longer_ns[section]).astype(np.int64)[class_firsts]
    return Demand.of(np.array(ends, np.int64), left_ns, needed, busy_ns, longer_ns, messages)


def _sum_needs(groups: Sequence[AlikeGroups], evenly: bool) -> tuple[Ints, Floats, Floats]:
    """Return the resources of all groups (needs,), and the sums of busy times and of messages (sections, needs).

    With `evenly`, all sections are joined into one.
    """
    needed, place = np.unique(np.concatenate([group.resources.ravel() for group in groups]), return_inverse=True)

    def sum_by_resource(rows: Sequence[Floats]) -> Floats:
        """Return (sections, needs) the sum over all groups, given (sections, needs) for each item of `groups`."""
        tiled = np.hstack([np.tile(row, len(group.resources)) for row, group in zip(rows, groups, strict=True)])
        return np.array([np.bincount(place, row, len(needed)) for row in tiled])

    busy_ns, messages = [group.demand.busy_ns for group in groups], [group.demand.messages for group in groups]
    if evenly:
        # Numbers of messages are averaged over the sections, weighted by busy times.
        pairs = zip(busy_ns, messages, strict=True)
        messages = [
            (busy * count).sum(axis=0, keepdims=True) / busy.sum(axis=0, keepdims=True) for busy, count in pairs
        ]
        busy_ns = [busy.sum(axis=0, keepdims=True) for busy in busy_ns]
    return needed, sum_by_resource(busy_ns), sum_by_resource(messages)


def _classes_of_blocks(count: int, world_size: int) -> list[int]:
    """Return the class of each rank, for `count` equal blocks of consecutive ranks.

    Raises `UsageError` unless `count` is an integer from 1 that divides the number of ranks.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1 or world_size % count:
        raise UsageError(f"alike: {world_size} ranks do not fall into {count!r} equal blocks; choose a divisor")
    return [rank // (world_size // count) for rank in range(world_size)]


def _format_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
