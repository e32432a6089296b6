"""Classes of ranks that behave alike: which are simulated, and what all of a class need together. Pure.

Where only the timeline matters, ranks that run the same program in places that are alike do the same at the same time.
Of each class of them the first and the last are simulated: the first stands for all, the last is a witness, because a
class whose ends differ is none.

A group of such a rank stands for the groups of all ranks like it: the rows of a grid over the world, as meshes make
them. What one row does all rows like it do at once, and the wires carry them all.
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
    """The classes of a world."""

    classes: Ints  # (world_size,) Class of each rank, from 0 in the order of their first ranks
    simulated: tuple[int, ...]  # First and last rank of each class, ascending

    @classmethod
    def of(cls, told: AlikeBy, world_size: int) -> Self:
        """Sort the ranks of a world.

        Args:
            told: Into how many blocks of consecutive ranks that behave alike the world falls; or what says the class
                of a rank.
            world_size: Ranks.

        Raises:
            UsageError: If there are no such blocks.
        """
        names = [told(rank) for rank in range(world_size)] if callable(told) else _blocks(told, world_size)
        numbers: dict[Hashable, int] = {}
        classes = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
        lasts = dict(zip(classes.tolist(), range(world_size), strict=True))
        firsts = dict(zip(classes[::-1].tolist(), range(world_size - 1, -1, -1), strict=True))
        return cls(classes=classes, simulated=tuple(sorted({*firsts.values(), *lasts.values()})))

    def rows(self, ranks: Sequence[int]) -> Ints:
        """Return the groups like this one, itself among them, as (groups, ranks of each).

        Raises:
            UsageError: If it is no row of a grid, or ranks like its own are in other groups.
        """
        own = np.array(ranks, np.int64)
        grid = self._grid(own)
        pattern = self.classes[own]
        rows: Ints = grid[(self.classes[grid] == pattern).all(axis=1)]
        if rows.size != np.isin(self.classes, pattern).sum():
            raise UsageError(
                f"alike: ranks {_named(ranks)} are a group, but others that are said to behave alike are grouped "
                "in another way"
            )
        return rows

    def _grid(self, own: Ints) -> Ints:
        size, world_size = len(own), len(self.classes)
        stride = int(own[1] - own[0]) if size > 1 else 1
        if stride > 0 and world_size % (size * stride) == 0:
            grid = np.arange(world_size).reshape(-1, size, stride).transpose(0, 2, 1).reshape(-1, size)
            if (grid == own).all(axis=1).any():
                return grid
        raise UsageError(
            f"alike: ranks {_named(own.tolist())} are no row of a grid over all ranks; where ranks stand for others, "
            "groups are the world and those of meshes, such as rank.mesh(dp=4, tp=8)['tp']"
        )

    def first_like(self, ends: Sequence[int]) -> Ints:
        """Return for each of some ranks the place among them of the first that is of its class."""
        classes = self.classes[list(ends)].tolist()
        return np.array([classes.index(each) for each in classes], np.int64)

    def standing(self, ranks: Ints, ends: Sequence[int]) -> Ints:
        """Return for each of many ranks the place among `ends` of the first that is of its class."""
        place = np.full(int(self.classes.max()) + 1, -1, np.int64)
        place[self.classes[list(reversed(ends))]] = range(len(ends) - 1, -1, -1)
        found: Ints = place[self.classes[ranks]]
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Same:
    """Groups that need the same, each in its own place."""

    demand: Demand  # demand of the first group
    resources: Ints  # (groups, needs) The resources that each group keeps busy where the first keeps its own
    standing: Ints  # (groups, ranks of each) The stand-in of each rank, as a position among the simulated ranks


def repeated(rows: Ints, ranks_per_unit: int) -> list[tuple[Ints, Ints]]:
    """Sort groups by how they sit: those that are the same but for some units of the cluster belong together.

    Args:
        rows: (groups, ranks of each) World ranks.
        ranks_per_unit: Ranks of a node or UltraServer; all of them are built alike.

    Returns:
        For each sort which rows are of it, and how many units each of these is further on than the first.
    """
    units = rows.min(axis=1) // ranks_per_unit
    _, which = np.unique(rows - units[:, None] * ranks_per_unit, axis=0, return_inverse=True)
    sorts = [np.flatnonzero(which.reshape(-1) == sort) for sort in range(int(which.max()) + 1)]
    return [(members, units[members] - units[members[0]]) for members in sorts]


def together(groups: Sequence[Same], ends: Sequence[int], first_like: Ints) -> Demand:
    """Return the common demand of groups that do the same at once, as the simulated ranks see it.

    Ranks of one class are done when the last of them is. What the groups need of one wire adds up, section by
    section, and if that is more than there is, all take so much longer. Groups whose sections
    differ in length need it evenly.

    Args:
        groups: All of them.
        ends: World ranks that are simulated.
        first_like: (ends,) Who stands for each of them, as places in `ends`.
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


def _added_up(groups: Sequence[Same], evenly: bool) -> tuple[Ints, Floats, Floats]:
    """Return the resources of all groups, (sections, needs) busy times and messages; one section if `evenly`."""
    needed, which = np.unique(np.concatenate([same.resources.ravel() for same in groups]), return_inverse=True)

    def over_all(rows: Sequence[Floats]) -> Floats:
        tiled = np.hstack([np.tile(each, len(same.resources)) for each, same in zip(rows, groups, strict=True)])
        return np.array([np.bincount(which, each, len(needed)) for each in tiled])

    busy_ns, messages = [same.demand.busy_ns for same in groups], [same.demand.messages for same in groups]
    if evenly:
        both = zip(busy_ns, messages, strict=True)
        messages = [(busy * each).sum(axis=0, keepdims=True) / busy.sum(axis=0, keepdims=True) for busy, each in both]
        busy_ns = [each.sum(axis=0, keepdims=True) for each in busy_ns]
    return needed, over_all(busy_ns), over_all(messages)


def _blocks(count: int, world_size: int) -> list[int]:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1 or world_size % count:
        raise UsageError(f"alike: {world_size} ranks do not fall into {count!r} equal blocks")
    return [rank // (world_size // count) for rank in range(world_size)]


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
