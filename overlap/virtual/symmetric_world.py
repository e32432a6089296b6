"""Simulations in which a few ranks stand for all: their world, where they meet, and what prices what they do.

A rank issues on its own group, and the groups of all ranks like it are taken to do the same at the same time. So there
is one channel for all these groups, in which only those meet who are simulated.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..collectives.call import Call
from ..collectives.kinds import Collective
from ..errors import UsageError
from ..runtime.communicator import Channel
from ..runtime.world import World
from ..units import format_ns
from . import Alike, Demand, Same, Transfer, repeated, together
from .simulated_engine import ModelledEngine, Operation

if TYPE_CHECKING:
    from topology import Cluster
    from transports import Transport

    from .simulated_backend import ModelledClock

T = TypeVar("T")
Ints: TypeAlias = NDArray[np.int64]

__all__ = ["AlikeChannel", "AlikeEngine", "AlikeWorld"]


class AlikeWorld(World):
    """A world of which only some ranks run.

    Args:
        size: Ranks in the world.
        cluster: The machine.
        transport: Of all ranks; nothing travels.
        algorithm: The only one to use.
        clock: Virtual time.
        alike: Who stands for whom.
    """

    def __init__(
        self,
        size: int,
        cluster: Cluster,
        transport: Transport,
        *,
        algorithm: str | None,
        clock: ModelledClock,
        alike: Alike,
    ) -> None:
        self._alike = alike
        super().__init__(size, cluster, transport, algorithm=algorithm, clock=clock, ranks=alike.simulated)

    async def live(
        self, main: Callable[..., Awaitable[T]], args: tuple[object, ...], timeout_s: float | None
    ) -> list[T]:
        """Run `main` on those who are simulated; everybody's result is that of the first rank like it."""
        results = await super().live(main, args, timeout_s)
        standing = self._alike.standing(np.arange(self.size), self._alike.simulated)
        return [results[place] for place in standing.tolist()]

    def report(self) -> list[str]:
        """Say what everybody waits for, and that they may not be as alike as they were said to be."""
        named = ", ".join(map(str, self._alike.simulated))
        return [*super().report(), f"only ranks {named} run, for all: they may not behave as alike as was said"]

    def check_group(self, ranks: tuple[int, ...]) -> None:
        """Check all groups like this one."""
        for row in self._alike.rows(ranks).tolist():
            super().check_group(tuple(row))

    def channel(self, key: tuple[object, ...], name: str, members: tuple[int, ...]) -> Channel:
        """Return the channel in which all groups like this one meet, or the ranks that send to one another in them."""
        ranks, occurrence, *lane = key
        assert isinstance(ranks, tuple)
        rows = self._alike.rows(ranks)
        if lane[0] == "p2p":
            return self._messages(rows, occurrence, lane, name, members)
        key = (tuple(rows[0].tolist()), occurrence, *lane)
        return self._found(key, name, rows, [self._simulated(rows)])

    def _messages(
        self, rows: Ints, occurrence: object, lane: Sequence[object], name: str, members: tuple[int, ...]
    ) -> Channel:
        """Return the channel of all ranks like the sender, and those like the receiver so many places further on."""
        _, src, dst, tag = lane
        assert isinstance(src, int)
        assert isinstance(dst, int)
        shift, classes = (dst - src) % rows.shape[1], self._alike.classes
        pairs = np.stack([rows, np.roll(rows, -shift, axis=1)], axis=-1).reshape(-1, 2)
        pairs = pairs[(classes[pairs] == classes[list(members)]).all(axis=1)]
        key = (tuple(rows[0].tolist()), occurrence, "p2p", shift, *classes[list(members)].tolist(), tag)
        return self._found(key, name, pairs, [self._simulated(pairs[:, 0]), self._simulated(pairs[:, 1])])

    def _simulated(self, ranks: Ints) -> list[int]:
        return [rank for rank in self._alike.simulated if rank in ranks]

    def _found(self, key: tuple[object, ...], name: str, rows: Ints, sides: Sequence[list[int]]) -> Channel:
        found = self._channels.get(key)
        if found is None:
            found = self._channels[key] = AlikeChannel(self, key, name, rows, sides, self._alike)
        return found


class AlikeChannel(Channel):
    """The operations of all groups that are alike, or the messages of all pairs.

    Attributes:
        rows: (groups, ranks of each) World ranks.
        standing: The same, as places in `members` of those who stand for them.
        first_like: (members,) Who stands for each of the members.
    """

    def __init__(
        self,
        world: World,
        key: tuple[object, ...],
        name: str,
        rows: Ints,
        sides: Sequence[list[int]],
        alike: Alike,
    ) -> None:
        super().__init__(world, key, name, tuple(rank for side in sides for rank in side))
        self.size = rows.shape[1]
        self.rows, self._sides = rows, sides
        columns = [rows] if len(sides) == 1 else [rows[:, :1], rows[:, 1:]]
        parts = list(zip(columns, sides, (0, len(sides[0])), strict=False))
        self.standing = np.concatenate([start + alike.standing(ranks, side) for ranks, side, start in parts], axis=1)
        self.first_like = np.concatenate([start + alike.first_like(side) for _, side, start in parts])

    def place(self, position: int, rank: int) -> int:
        """Return which of `members` a simulated rank is: of messages, as sender (0) or receiver (1)."""
        side = position if len(self._sides) > 1 else 0
        return side * len(self._sides[0]) + self._sides[side].index(rank)

    def check(self, operations: Sequence[Operation], arrivals_ns: Ints) -> None:
        """Compare when ranks of a class have come.

        Raises:
            UsageError: If that differs.
        """
        early_ns = arrivals_ns - arrivals_ns[self.first_like]
        if early_ns.any():
            late = int(np.flatnonzero(early_ns)[0])
            one, other = self.members[int(self.first_like[late])], self.members[late]
            raise UsageError(
                f"alike: ranks {one} and {other} were said to behave alike, but came to {operations[late]._label()} "
                f"({operations[late].call_site}) {format_ns(abs(int(early_ns[late])))} apart"
            )


class AlikeEngine(ModelledEngine):
    """Prices what all groups like that of a rank do, for the ranks that are simulated."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._demands: dict[tuple[object, ...], tuple[Demand, str]] = {}

    def _transfer(
        self, channel: Channel, operations: list[Operation], pattern: Call, arrivals_ns: list[int]
    ) -> Transfer:
        assert isinstance(channel, AlikeChannel)
        met_ns = np.array(arrivals_ns, np.int64)
        channel.check(operations, met_ns)
        demand, algorithm = self._demand(channel, pattern, met_ns - met_ns.min())
        sends = pattern.kind is Collective.P2P
        for operation in operations:
            operation.algorithm = algorithm or operation.algorithm
        name = channel.label
        return Transfer(
            ("comm", name, operations[0].seq),
            "send" if sends else pattern.kind.value,
            demand,
            priority=min(operation.priority for operation in operations),
            lane=channel.key[:-1] if sends else name,
        )

    def _demand(self, channel: AlikeChannel, pattern: Call, late_ns: Ints) -> tuple[Demand, str]:
        """Return what all rows need together, and the algorithm of the first."""
        asked = channel, pattern, late_ns.tobytes()
        known = self._demands.get(asked)
        if known is None:
            groups, algorithm = [], ""
            for members, units in repeated(channel.rows, self._ranks_per_unit):
                row, standing = channel.rows[members[0]].tolist(), channel.standing[members]
                demand, algorithm = self._of_row(row, pattern, late_ns[standing[0]], algorithm)
                resources = self._traffic.fabric.resources.shifted(demand.resources, units)
                groups.append(Same(demand=demand, resources=resources, standing=standing))
            known = self._demands[asked] = together(groups, channel.members, channel.first_like), algorithm
        return known

    def _of_row(self, row: list[int], pattern: Call, late_ns: Ints, like: str) -> tuple[Demand, str]:
        """Return what one group needs alone, and its algorithm: that of the others, if any is known."""
        fabric, nbytes = self._traffic.fabric, pattern.nbytes
        if pattern.kind is Collective.P2P:
            src, dst = row
            return fabric.message((), src, dst, nbytes, late_ns=int(late_ns[1] - late_ns[0])).demand, ""
        option = self._option(tuple(row), pattern, like=like)
        return fabric.collective((), pattern.kind.value, option, nbytes, row, late_ns).demand, option.algorithm

    @property
    def _ranks_per_unit(self) -> int:
        """Ranks of a node or UltraServer, if all of these are whole; else of the whole cluster."""
        cluster = self._cluster
        return cluster.world_size if cluster.nodes % cluster.servers else cluster.servers * cluster.ranks_per_node
