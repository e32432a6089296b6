"""Groups of ranks that issue collectives together, and grids of ranks with a group for each axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from math import prod
from typing import TYPE_CHECKING
from weakref import ref

import numpy as np

from ..collectives.kinds import ALL_GATHER
from ..diagnostics import find_caller
from ..errors import UsageError, argument_text
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
    """Facts of a group that operations need: its key, names and size, and this rank's index in it.

    It refers to the group weakly, so that futures that outlive a group do not keep it alive.

    Args:
        group: The group, as this rank sees it.
        key: Key of the group.
    """

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
        """The program's group as long as it lives; then this object, which has the same interface (`GroupLike`)."""
        return self._group() or self


class GroupUse:
    """Keeps a group in use by one rank, until nothing refers to this object any more.

    The garbage collector may find that in any thread and at any point of a program. So `__del__` only posts the end of
    the use to the event loop.

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
            self._communicators.call_later(partial(self._communicators.end_group_use, self._context, self.key))


class Group(GroupCalls):
    """One rank's view of an ordered set of ranks.

    Make one with `rank.group(ranks)`, which needs no communication, or `await group.split(color)`.

    A group needs no closing. Once the programs of a process have dropped all references to it, and its operations have
    ended, the process frees it. Memory that processes of one host share for it, 260 KiB for each member, is free once
    all of these have dropped it. Futures do not keep a group.

    Args:
        context: What all operations of the rank share.
        world: The world of the rank.
        streams: The streams of the rank.
        made_before: For each tuple of ranks, how many groups of these ranks this rank has made; this group is counted.
        ranks: World ranks in group order.
        name: Name in messages and the timeline; None: the ranks, joined by "-".

    Raises:
        UsageError: A rank is named twice, this rank is not among them, or the world refuses the group.

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
        world: World,
        streams: Streams,
        made_before: dict[tuple[int, ...], int],
        ranks: tuple[int, ...],
        name: str | None = None,
    ) -> None:
        if len(set(ranks)) < len(ranks):
            raise UsageError(f"ranks: {list(ranks)} names a rank twice; name each rank once")
        if context.rank not in ranks:
            raise UsageError(f"ranks: expected this rank, {context.rank}, among {list(ranks)}; only members call it")
        world.check_group(ranks)
        self.ranks, self.name = ranks, name or "-".join(map(str, ranks))
        self.size: int = len(ranks)
        self.label: tuple[str, tuple[int, ...]] = (self.name, ranks)
        self.rank: int = ranks.index(context.rank)
        self._context, self._world, self._streams, self._made_before = context, world, streams, made_before
        key = Key(ranks, made_before.get(ranks, 0), "")  # all members make the same groups, so they count the same
        made_before[ranks] = key.occurrence + 1
        self._use = GroupUse(context, world.communicators, key)
        member = GroupRank(self, key)
        communicators = world.communicators
        self._messages = Messages(context, communicators.inbox, streams, member, self._use)
        self._ports = Ports(context, communicators, streams, member, self._use)

    def __repr__(self) -> str:
        return f"<Group '{self.name}' of ranks {list(self.ranks)}, this is {self.rank}>"

    def group(self, ranks: Sequence[int], *, name: str | None = None) -> Group:
        """Make a sub-group of group ranks, in that order, without communication.

        Each member of the new group must make the same call; other ranks make none.

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
            raise UsageError(f"ranks: expected ranks of group '{self.name}', got {argument_text(ranks)}") from None
        for member in indices:
            check_rank(self, "ranks", member)
        if name is not None:
            name = checked_name(name, "")
        members = tuple(self.ranks[member] for member in indices)
        return Group(self._context, self._world, self._streams, self._made_before, members, name)

    def send_flat(
        self, x: object, dst: int, tag: int, *, timeout_s: float, call_site: CallSite, name: str | None = None
    ) -> CollectiveFuture[None]:
        """Send an array for PyTorch: the receiver's array may have another shape, and more tags are allowed.

        The receive agrees if it has the same dtype and number of elements. Arguments: see `Exchanges.send`.
        """
        return self._messages.send(x, dst, tag, None, 0, name, timeout_s, call_site, flat=True)

    def receive_flat(
        self, like: object, src: int | None, tag: int, *, timeout_s: float, call_site: CallSite, name: str | None = None
    ) -> CollectiveFuture[object]:
        """Receive an array that was sent by `send_flat`. Arguments: see `Exchanges.recv`."""
        return self._messages.receive(like, src, tag, None, 0, name, timeout_s, call_site, flat=True)

    def abort(self, error: BaseException | str | None = None) -> None:
        """Fail all present and later operations of this group on every rank; the world lives on.

        Operations under way fail with a `GroupAbortedError` that names this rank. A new group of the same ranks works.

        Args:
            error: The reason, for the error's text: a text, or an error, which also becomes the cause; None: no reason.

        Raises:
            PeerFailedError: In a fork, which has no rank.
        """
        if self._context.ending.forked:
            raise self._context.ending.peer_error()
        self._ports.abort(error)

    def on(self, stream: Stream | str) -> Group:
        """Return the same group with another default stream, for calls without `stream`.

        Operations on that stream have one common order, whether they are issued on this group or on the returned one.

        Raises:
            UsageError: If there is no such stream, or it is another rank's.
        """
        other = copy(self)
        preferred, member = self._streams.find(stream), GroupRank(other, self._use.key)
        other._messages = self._messages.with_default_stream(preferred, member)
        other._ports = self._ports.with_default_stream(preferred, member)
        return other

    async def split(self, color: int | None, key: int = 0, *, name: str | None = None) -> Group | None:
        """Cut the group into one group for each color, ordered by `key`, then by rank.

        A collective: every rank of the group must call it.

            halves = await group.split(group.rank % 2)

        Args:
            color: Ranks of one color form a group; with None, this rank is in none.
            key: Ranks with a lower key come first in the new group; with equal keys, the order of this group remains.
            name: Name of the groups, for messages and timelines; by default this group's name and the color.

        Returns:
            The group of this rank's color; None without a color.

        Raises:
            UsageError: If `color` or `key` is no integer of 64 bits.
        """
        for argument, value in (("color", 0 if color is None else color), ("key", key)):
            if not isinstance(value, (int, np.integer)):
                raise UsageError(f"{argument}: expected an integer, got {argument_text(value)}")
            if not -_MOST <= value < _MOST:
                raise UsageError(f"{argument}: expected an integer of 64 bits, got {argument_text(value)}")
        own = metadata([int(color is not None), color or 0, key], np.int64)  # (takes part, color, key)
        # `find_caller`: the program's line that awaits this method, perhaps through `Rank.split`
        gathered = self._ports.issue(ALL_GATHER, own, None, None, 0, "split", None, find_caller()[0])
        notes = self._world.backend.shared_integers(self._use.key, gathered.seq)
        notes[self.rank] = own.tolist()
        choices: list[list[int]] = (await gathered).reshape(self.size, own.size).tolist()
        if self._context.arrays.shapes_only:  # the gathered arrays have no data: the values are in `notes`
            if len(notes) < self.size:
                raise UsageError("split: with alike=, the choices of other ranks are unknown; use rank.mesh")
            choices = [notes[rank] for rank in range(self.size)]
        if color is None:
            return None
        # by key, then by rank in this group
        chosen = sorted((k, rank) for rank, (takes_part, c, k) in enumerate(choices) if takes_part and c == color)
        return self.group([rank for _, rank in chosen], name=name or f"{self.name}/{color}")


class Mesh:
    """One rank's place in a grid of all ranks, row-major: the last axis runs fastest.

        mesh = rank.mesh(dp=2, tp=4)
        await mesh["tp"].all_reduce(x)

    Every rank makes the same call; there is no communication. `mesh["tp"]` is the group of the ranks that differ from
    this one along "tp" only: with dp=2, tp=4, rank 5 has the coordinates dp=1, tp=1, and this group is ranks 4 to 7.
    `mesh["dp", "tp"]` is the group along several axes.

    Args:
        world: The group of all ranks.
        axes: Size of each axis by name, in order.

    Attributes:
        axes: Size of each axis by name, in order.
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
                f"choose sizes whose product is {world.size}"
            )
        self.axes: dict[str, int] = dict(axes)
        place = np.unravel_index(world.rank, tuple(axes.values())) if axes else ()
        self.coordinates: dict[str, int] = {name: int(index) for name, index in zip(axes, place, strict=True)}
        self._world = world
        self._groups: dict[tuple[str, ...], Group] = {(name,): self._make_group((name,)) for name in axes}

    def __getitem__(self, axis: str | tuple[str, ...]) -> Group:
        """Return the group of ranks that differ from this one along an axis only, or along several.

        Args:
            axis: Name of an axis, or a tuple of several names in any order. The ranks are in the order of the world.

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
            self._groups[axes] = self._make_group(axes)
        return self._groups[axes]

    def __repr__(self) -> str:
        coordinates = ", ".join(f"{name}={self.coordinates[name]}/{size}" for name, size in self.axes.items())
        return f"<Mesh {coordinates}>"

    def _make_group(self, axes: tuple[str, ...]) -> Group:
        """Make the group of the ranks that differ from this one along `axes` only."""
        along = tuple(slice(None) if name in axes else index for name, index in self.coordinates.items())
        grid = np.arange(self._world.size).reshape(tuple(self.axes.values()))
        return self._world.group(grid[along].reshape(-1).tolist(), name="x".join(axes))


class GroupRules:
    """Checks groups of a world against the rules of its cluster; each group is checked once.

    Args:
        cluster: The cluster, which has the rules.
    """

    def __init__(self, cluster: topology.Cluster) -> None:
        self._cluster = cluster
        self._legal: set[tuple[int, ...]] = set()
        self._advised: set[str] = set()  # ids of the rules that were warned about

    def check_group(self, ranks: tuple[int, ...]) -> None:
        """Raise `topology.TopologyError` if the cluster does not allow a group of these ranks.

        For a group that is allowed but not advised, issue a `topology.TopologyWarning`, once for each rule.
        """
        if ranks not in self._legal:
            for finding in self._cluster.check_group(ranks, warn=False):
                if finding.rule.id not in self._advised:
                    self._advised.add(finding.rule.id)
                    finding.warn(stacklevel=find_caller()[1])
            self._legal.add(ranks)
