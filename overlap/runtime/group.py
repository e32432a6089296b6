"""Groups of ranks, which issue collectives together: ordered sets, and the axes of grids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from math import prod
from typing import TYPE_CHECKING
from weakref import ref

import numpy as np

from ..collectives.kinds import ALL_GATHER
from ..diagnostics import calling
from ..errors import UsageError, shown
from .arguments import check_rank
from .calls import GroupCalls
from .communicators import Communicators
from .context import RankContext
from .match import Key
from .memory.arrays import metadata
from .messages import Messages
from .operation import CollectiveFuture, GroupLike
from .outstanding import CallSite, checked_name
from .port import Ports
from .stream import Stream, Streams

if TYPE_CHECKING:
    import topology

    from .world import World

_MOST = 1 << 63  # integers that travel as int64


class GroupRank:
    """One rank's place in a group, as its operations need it: futures that outlive a group do not keep it alive."""

    __slots__ = ("_group", "key", "label", "name", "rank", "size")

    def __init__(self, group: Group, key: Key) -> None:
        self._group = ref(group)
        self.key: Key = key
        self.name: str = group.name
        self.label: tuple[str, tuple[int, ...]] = group.label
        self.rank: int = group.rank
        self.size: int = group.size

    @property
    def group(self) -> GroupLike:
        """Group of the program while that lives; then this object, with the same members."""
        return self._group() or self


class GroupUse:
    """The use of a group by one rank, until nothing refers to this object any more.

    That may be in any thread and at any point of a program, where the garbage collector runs. So the end is left to the
    event loop, and changes nothing that programs see.

    Args:
        context: What all operations of the rank share.
        communicators: The communicators of the world.
        key: Key of the group.
    """

    __slots__ = ("__weakref__", "_communicators", "_context", "key")

    def __init__(self, context: RankContext, communicators: Communicators, key: Key) -> None:
        self._context, self._communicators = context, communicators
        self.key: Key = key

    def __del__(self) -> None:
        if not self._context.ending.forked:
            self._communicators.later(partial(self._communicators.end_use, self._context, self.key))


class Group(GroupCalls):
    """One rank's view of an ordered set of ranks.

    Make one with `rank.group(ranks)`, which needs no communication, or `await group.split(color)`.

    A group needs no closing. Once the programs of a process have dropped it, and its operations have ended, nothing of
    it is left there; memory that processes of one host share for it, 260 KiB for each member, is free once all have.
    Futures do not keep it; references in cycles do, until the garbage collector finds them.

    Args:
        context: What all operations of the rank share.
        around: The world.
        streams: The streams of the rank.
        occurrences: How many groups of the same ranks there have been, by ranks.

    Attributes:
        ranks: World ranks in group order.
        rank: The index of this rank in the group.
        size: Number of ranks.
        name: Name in messages and the timeline.
    """

    ranks: tuple[int, ...]
    name: str

    def __init__(
        self,
        context: RankContext,
        around: World,
        streams: Streams,
        occurrences: dict[tuple[int, ...], int],
        ranks: tuple[int, ...],
        name: str | None = None,
    ) -> None:
        if len(set(ranks)) < len(ranks):
            raise UsageError(f"ranks: {list(ranks)} names a rank twice; name each rank once")
        if context.rank not in ranks:
            raise UsageError(f"ranks: expected this rank, {context.rank}, among {list(ranks)}; only members call it")
        around.check_group(ranks)
        self.ranks, self.name = ranks, name or "-".join(map(str, ranks))
        self.size: int = len(ranks)
        self.label: tuple[str, tuple[int, ...]] = (self.name, ranks)
        self.rank: int = ranks.index(context.rank)
        self._context, self._around, self._streams, self._occurrences = context, around, streams, occurrences
        key = Key(ranks, occurrences.get(ranks, 0), "")  # the same number on all ranks
        occurrences[ranks] = key.occurrence + 1
        self._use = GroupUse(context, around.communicators, key)
        member = GroupRank(self, key)
        communicators = around.communicators
        self._messages = Messages(context, communicators.inbox, streams, member, self._use)
        self._ports = Ports(context, communicators, streams, member, self._use)

    def __repr__(self) -> str:
        return f"<Group '{self.name}' of ranks {list(self.ranks)}, this is {self.rank}>"

    def group(self, ranks: Sequence[int], *, name: str | None = None) -> Group:
        """Make a sub-group of group ranks, in that order; every member must make the same call. No communication.

            first = group.group([0, 1])  # on these two ranks only

        Args:
            ranks: Ranks of this group, this one among them.
            name: For messages and timelines; by default the world ranks.

        Returns:
            The group, as this rank sees it.

        Raises:
            UsageError: If a rank is unknown or named twice, or this rank is not among them.
        """
        try:
            indices = list(ranks)
        except TypeError:
            raise UsageError(f"ranks: expected ranks of group '{self.name}', got {shown(ranks)}") from None
        for member in indices:
            check_rank(self, "ranks", member)
        if name is not None:
            name = checked_name(name, "")
        members = tuple(self.ranks[member] for member in indices)
        return Group(self._context, self._around, self._streams, self._occurrences, members, name)

    def send_flat(
        self, x: object, dst: int, tag: int, *, timeout_s: float, call_site: CallSite, name: str | None = None
    ) -> CollectiveFuture[None]:
        """Send an array, for PyTorch: its shape is open, and there are more tags than for programs."""
        return self._messages.send(x, dst, tag, None, 0, name, timeout_s, call_site, flat=True)

    def receive_flat(
        self, like: object, src: int | None, tag: int, *, timeout_s: float, call_site: CallSite, name: str | None = None
    ) -> CollectiveFuture[object]:
        """Receive an array, for PyTorch; see `send_flat`."""
        return self._messages.receive(like, src, tag, None, 0, name, timeout_s, call_site, flat=True)

    def abort(self, error: BaseException | str | None = None) -> None:
        """Fail all present and later operations of this group on every rank; the world lives on.

        Operations under way fail with a `GroupAbortedError` that names this rank. A new group of the same ranks works.

        Args:
            error: The reason, for the message.
        """
        if self._context.ending.forked:
            raise self._context.ending.peer_failed()
        self._ports.abort(error)

    def on(self, stream: Stream | str) -> Group:
        """Return the same group, with another stream for operations that name none.

        Its operations and those of this group on that stream follow one order.

        Raises:
            UsageError: If there is no such stream, or it is another rank's.
        """
        other = copy(self)
        preferred, member = self._streams.find(stream), GroupRank(other, self._use.key)
        other._messages = self._messages.preferring(preferred, member)
        other._ports = self._ports.preferring(preferred, member)
        return other

    async def split(self, color: int | None, key: int = 0, *, name: str | None = None) -> Group | None:
        """Cut the group into one group for each color, ordered by `key`, then by rank; None takes no part.

        A collective: every rank of the group must call it.

            halves = await group.split(group.rank % 2)

        Args:
            color: Ranks of one color form a group; with None, this rank is in none.
            key: Where this rank stands in its group; by default in the order of this one.
            name: Name of the groups, for messages and timelines; by default this group's name and the color.

        Returns:
            The group of this rank's color; None without a color.

        Raises:
            UsageError: If `color` or `key` is no integer of 64 bits.
        """
        for argument, value in (("color", 0 if color is None else color), ("key", key)):
            if not isinstance(value, (int, np.integer)):
                raise UsageError(f"{argument}: expected an integer, got {shown(value)}")
            if not -_MOST <= value < _MOST:
                raise UsageError(f"{argument}: expected an integer of 64 bits, got {shown(value)}")
        own = metadata([int(color is not None), color or 0, key], np.int64)
        gathered = self._ports.issue(ALL_GATHER, own, None, None, 0, "split", None, calling()[0])
        notes = self._around.backend.notes(self._use.key, gathered.seq)
        notes[self.rank] = own.tolist()
        choices: list[list[int]] = (await gathered).reshape(self.size, own.size).tolist()
        if self._context.arrays.shapes_only:  # the values are in the notes alone
            if len(notes) < self.size:
                raise UsageError(
                    "split: a simulation of representatives has no choices of the other ranks; use rank.mesh"
                )
            choices = [notes[rank] for rank in range(self.size)]
        if color is None:
            return None
        chosen = sorted((k, rank) for rank, (takes_part, c, k) in enumerate(choices) if takes_part and c == color)
        return self.group([rank for _, rank in chosen], name=name or f"{self.name}/{color}")


class Mesh:
    """One rank's place in a grid of all ranks, row-major: the last axis runs fastest.

        mesh = rank.mesh(dp=2, tp=4)
        await mesh["tp"].all_reduce(x)

    Make one with `rank.mesh(dp=2, tp=4)`; every rank makes the same call. No communication. The group of an axis is
    `mesh["tp"]`: the ranks that differ along it only; that of several is `mesh["dp", "tp"]`.

    Attributes:
        axes: Sizes by name, in order.
        coordinates: Index of this rank along each axis, by name.
    """

    def __init__(self, world: Group, axes: Mapping[str, int]) -> None:
        for name, size in axes.items():
            if not isinstance(size, int) or size < 1:
                raise UsageError(f"{name}: an axis needs a whole number of ranks, at least 1; got {size!r}")
        if prod(axes.values()) != world.size:
            sizes = " x ".join(f"{name}={size}" for name, size in axes.items())
            raise UsageError(
                f"axes: {sizes or 'none'} makes {prod(axes.values())} ranks, but the world has {world.size}; "
                "choose sizes with that product"
            )
        self.axes: dict[str, int] = dict(axes)
        place = np.unravel_index(world.rank, tuple(axes.values())) if axes else ()
        self.coordinates: dict[str, int] = {name: int(index) for name, index in zip(axes, place, strict=True)}
        self._world = world
        self._groups: dict[tuple[str, ...], Group] = {(name,): self._make((name,)) for name in axes}

    def __getitem__(self, axis: str | tuple[str, ...]) -> Group:
        """Return the group of ranks that differ from this one along an axis only, or along several.

        Args:
            axis: One, or a tuple of several, in any order: its ranks are in the order of the world's.

        Returns:
            The group, as this rank sees it.

        Raises:
            UsageError: If there is no such axis.
        """
        names = (axis,) if isinstance(axis, str) else axis
        for name in names or ("",):
            if name not in self.axes:
                raise UsageError(f"axis: {name!r} is unknown; known are {', '.join(self.axes)}")
        axes = tuple(name for name in self.axes if name in names)
        if axes not in self._groups:
            self._groups[axes] = self._make(axes)
        return self._groups[axes]

    def __repr__(self) -> str:
        coordinates = ", ".join(f"{name}={self.coordinates[name]}/{size}" for name, size in self.axes.items())
        return f"<Mesh {coordinates}>"

    def _make(self, axes: tuple[str, ...]) -> Group:
        """Make the group of the ranks along some axes."""
        along = tuple(slice(None) if name in axes else index for name, index in self.coordinates.items())
        grid = np.arange(self._world.size).reshape(tuple(self.axes.values()))
        return self._world.group(grid[along].reshape(-1).tolist(), name="x".join(axes))


class GroupRules:
    """Checks of the groups of a world against its cluster, each once.

    Args:
        cluster: The cluster, which has the rules.
    """

    def __init__(self, cluster: topology.Cluster) -> None:
        self._cluster = cluster
        self._legal: set[tuple[int, ...]] = set()
        self._advised: set[str] = set()  # rules with a warning that has been given

    def check(self, ranks: tuple[int, ...]) -> None:
        """Raise `topology.TopologyError` if the cluster does not allow such a group, on its first member.

        A group that is allowed but not advised is a `topology.TopologyWarning`, once for each rule.
        """
        if ranks not in self._legal:
            for finding in self._cluster.check_group(ranks, warn=False):
                if finding.rule.id not in self._advised:
                    self._advised.add(finding.rule.id)
                    finding.warn(stacklevel=calling()[1])
            self._legal.add(ranks)
