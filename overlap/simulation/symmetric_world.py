"""Simulated worlds of representatives: the groups, messages and prices of a few ranks that are run for all.

A rank issues on its own group, and the groups of all ranks like it are taken to do the same at the same time. So one
communicator has all these groups, and matches the operations of the simulated ranks only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..collectives.call import Call
from ..collectives.kinds import Collective
from ..collectives.placement import Ints
from ..errors import UsageError
from ..runtime.communicator import BaseEngine, Communicator
from ..runtime.communicators import Communicators
from ..runtime.failure import Failure
from ..runtime.inbox import Inbox
from ..runtime.lane import Lane, LaneName
from ..runtime.match import Key, Match, RankCall, minority_and_majority, mismatch
from ..runtime.message import Message
from ..runtime.operation import Operation
from ..runtime.world import World
from ..units import format_ns
from . import Alike, AlikeGroups, Demand, FabricTransfer, group_by_unit, join_demands
from .simulated_engine import SimulatedEngine

if TYPE_CHECKING:
    from topology import Cluster
    from transports import Transport


T = TypeVar("T")


class SymmetricWorld(World):
    """A world in which only the representatives run.

    Args:
        size: Ranks in the world.
        cluster: The machine.
        transport: Transport of all ranks; nothing travels.
        alike: Classes of the ranks, with their representatives.
        settings: Further arguments of `World`.
    """

    def __init__(self, size: int, cluster: Cluster, transport: Transport, *, alike: Alike, **settings: Any) -> None:
        self._alike = alike
        super().__init__(size, cluster, transport, ranks=alike.simulated, **settings)
        named = ", ".join(map(str, alike.simulated))
        self.reports.caveat = f"only ranks {named} run, for all: they may not behave as alike as was said"

    async def live(
        self, main: Callable[..., Awaitable[T]], args: tuple[object, ...], timeout_s: float | None
    ) -> list[T]:
        """Run `main` on the simulated ranks; the result of each rank is that of its representative."""
        results = await super().live(main, args, timeout_s)
        representatives = self._alike.representatives(np.arange(self.size), self._alike.simulated)
        return [results[index] for index in representatives.tolist()]

    def check_group(self, ranks: tuple[int, ...]) -> None:
        """Check this group and all groups that behave like it."""
        for row in self._alike.rows(ranks).tolist():
            super().check_group(tuple(row))


class SymmetricCommunicators(Communicators):
    """The communicators of a world in which only the representatives run."""

    def __init__(self, engine: BaseEngine, alike: Alike) -> None:
        super().__init__(engine)
        self._alike = alike
        # The pairs of messages from one class to another, their simulated ranks and their stream: equal for all tags.
        self._pairs: dict[tuple[object, ...], tuple[Ints, list[list[int]], str]] = {}

    def get_or_make(self, key: Key, name: str) -> Communicator:
        """Return the communicator of all groups like one."""
        rows = self._alike.rows(key.ranks)
        shared = key._replace(ranks=tuple(rows[0].tolist()))
        return self._shared_communicator(shared, name, rows, [self._simulated_among(rows)])

    def _ranks_here(self, key: Key) -> tuple[Key, int]:
        """Return the key of all groups like one, and the number of their simulated ranks."""
        rows = self._alike.rows(key.ranks)
        return Key(tuple(rows[0].tolist()), key.occurrence, ""), len(self._simulated_among(rows))

    def make_inbox(self) -> Inbox:
        """Return the inbox of the messages of all pairs."""
        return SymmetricInbox(self)

    def find_pairs(self, key: Key, name: str, members: tuple[int, ...]) -> SymmetricCommunicator:
        """Return the pairs of ranks of the classes of two ranks at the same distance, which have one communicator."""
        rows = self._alike.rows(key.ranks)
        shift, classes = (key.dst - key.src) % rows.shape[1], self._alike.classes
        pairs_key = key.ranks, shift, members
        if pairs_key not in self._pairs:
            # (pairs, 2) Each rank of a row with the one `shift` places on; of them pairs of the classes of `members`.
            pairs = np.stack([rows, np.roll(rows, -shift, axis=1)], axis=-1).reshape(-1, 2)
            pairs = pairs[(classes[pairs] == classes[list(members)]).all(axis=1)]
            class_names = ", ".join(map(str, classes[list(members)].tolist()))
            sides = [self._simulated_among(pairs[:, 0]), self._simulated_among(pairs[:, 1])]
            self._pairs[pairs_key] = pairs, sides, f"messages between classes {class_names}"
        pairs, sides, stream = self._pairs[pairs_key]
        shared = Key(tuple(rows[0].tolist()), key.occurrence, stream, src=0, dst=shift, tag=key.tag)
        return self._shared_communicator(shared, name, pairs, sides)

    def _simulated_among(self, ranks: Ints) -> list[int]:
        return [rank for rank in self._alike.simulated if rank in ranks]

    def _shared_communicator(
        self, key: Key, name: str, rows: Ints, sides: Sequence[list[int]]
    ) -> SymmetricCommunicator:
        existing = self.find(key) or self.keep(SymmetricCommunicator(self, key, name, rows, sides, self._alike))
        assert isinstance(existing, SymmetricCommunicator)
        return existing


class SymmetricLane(Lane):
    """Messages of one rank that stand for those of all ranks like it.

    Args:
        name: Name of the lane of the rank.
        group: Key of the group.
        pairs: Where messages of all pairs meet.
        place: Distance of the pair.
    """

    __slots__ = ("pairs", "place")

    pairs: SymmetricCommunicator
    place: int

    def __init__(self, name: LaneName, group: Key, pairs: SymmetricCommunicator, place: int) -> None:
        lane: Lane = self  # which declares these
        lane.name, lane.group, lane.by_wire = name, group, False
        lane.lines, lane.arrived, lane.numbers, lane.returned = (deque(), deque()), [None, None], [0, 0], []
        self.pairs, self.place = pairs, place

    def missing(self, message: Message[object]) -> list[int]:
        """Return the simulated ranks that have not arrived at a message."""
        match = self.pairs.open_matches.get(message.seq, ())
        return [rank for rank, end in zip(self.pairs.members, match, strict=False) if end is None]


class SymmetricInbox(Inbox):
    """Inbox of the messages of all pairs of ranks that behave alike: the simulated ones match by their numbers."""

    shared: SymmetricCommunicators
    _engine: SymmetricEngine

    def __init__(self, shared: SymmetricCommunicators) -> None:
        super().__init__(shared)
        self._lanes: dict[tuple[Key, int], SymmetricLane] = {}  # by the key of their pairs and the place of their rank

    def admit(self, message: Message[object]) -> bool:
        """Put a message into the lane of its rank, and number it; return whether it is the first there."""
        if message.peer is None:
            raise UsageError("src: where ranks represent others, a receive must name its source; pass src=")
        name, group = message.messages.lane_name(message), message.member.key
        key = Key(group.ranks, group.occurrence, "", src=name[3], dst=name[1], tag=name[2])
        pairs = self.shared.find_pairs(key, message.member.name, message.members)
        place = pairs.place(message.receives, message.context.rank)
        lane = self._lanes.get((pairs.key, place))
        if lane is None:
            lane = self._lanes[pairs.key, place] = SymmetricLane(name, group, pairs, place)
        line, number = lane.lines[message.receives], lane.numbers[message.receives]
        message.lane, message.seq, lane.numbers[message.receives] = lane, number, number + 1
        line.append(message)
        return line[0] is message

    def match(self, message: Message[object]) -> None:
        """Begin the transfer of a message once all simulated ranks of both classes have arrived."""
        lane = message.lane
        assert type(lane) is SymmetricLane
        pairs = lane.pairs
        match = pairs.open_matches.setdefault(message.seq, Match([None] * len(pairs.members)))
        match[lane.place] = message
        match.arrived += 1
        if match.arrived < len(pairs.members):
            return
        del pairs.open_matches[message.seq]
        # All ends have come: they must agree, as those of a message between two ranks.
        calls = [RankCall(end.context.rank, end.call, end.call_site) for end in match.ends]
        match.pattern = next((rank.call for rank in calls if rank.call.dtype is not None), None)
        if match.pattern is None or not all(match.pattern.agrees(rank.call) for rank in calls):
            few, many = minority_and_majority(calls)
            error = mismatch(message.member.name, message.seq, few[0], many[0])
            for end in match.ends:
                end.fail(Failure(error()))
            return
        self._engine.begin_message(pairs, match)


class SymmetricCommunicator(Communicator):
    """Communicator of the operations of all groups that behave alike, or of the messages of all pairs.

    Args:
        shared: The communicators of the world.
        key: Its key.
        name: Name of the group.
        sides: Ranks that behave alike.

    Attributes:
        rows: (groups, ranks of each) World ranks.
        representatives: The same, as indices in `members` of their representatives.
        class_firsts: (members,) Index of the representative of each member.
    """

    rows: Ints

    def __init__(
        self,
        shared: Communicators,
        key: Key,
        name: str,
        rows: Ints,
        sides: Sequence[list[int]],
        alike: Alike,
    ) -> None:
        super().__init__(shared, key, name, tuple(rank for side in sides for rank in side))
        self.size: int = rows.shape[1]
        self.open_matches: dict[int, Match] = {}  # of messages, by number, until all ranks have arrived
        self.rows, self._sides = rows, sides
        columns = [rows] if len(sides) == 1 else [rows[:, :1], rows[:, 1:]]
        parts = list(zip(columns, sides, (0, len(sides[0])), strict=False))
        self.representatives: NDArray[np.int64] = np.concatenate(
            [start + alike.representatives(ranks, side) for ranks, side, start in parts], axis=1
        )
        class_firsts = [start + alike.first_of_class(side) for _, side, start in parts]
        self.class_firsts: NDArray[np.int64] = np.concatenate(class_firsts)

    def place(self, position: int, rank: int) -> int:
        """Return the index in `members` of a simulated rank; of a message, as sender (0) or receiver (1)."""
        side = position if len(self._sides) > 1 else 0
        return side * len(self._sides[0]) + self._sides[side].index(rank)

    def check(self, operations: Sequence[Operation], arrivals_ns: Ints) -> None:
        """Check that the ranks of a class have arrived at the same instant.

        Raises:
            UsageError: If they differ.
        """
        early_ns = arrivals_ns - arrivals_ns[self.class_firsts]
        if early_ns.any():
            late = int(np.flatnonzero(early_ns)[0])
            one, other = self.members[int(self.class_firsts[late])], self.members[late]
            raise UsageError(
                f"alike: ranks {one} and {other} were said to behave alike, but came to {operations[late].label} "
                f"({operations[late].call_site}) {format_ns(abs(int(early_ns[late])))} apart; leave out alike"
            )


_MOST_DEMANDS = 256
"""Demands kept, the oldest go first: a run repeats those of a step, and a demand holds arrays of all ranks."""


class SymmetricEngine(SimulatedEngine):
    """Engine that prices the operations of all groups that are alike, for the simulated ranks."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        # By the id of the rows, which are kept here: an array's id is its own only while it lives.
        self._demands: dict[tuple[object, ...], tuple[Demand, str, Ints]] = {}

    def begin_message(self, pairs: SymmetricCommunicator, match: Match) -> None:
        """Begin the transfer of a message of all pairs."""
        for end in match.ends:
            end.fit(match.pattern)  # type: ignore[arg-type]  # known, as all have arrived
        self._begin_transfer(pairs, match)

    def _make_transfer(
        self, communicator: Communicator | Lane, operations: list[Operation], pattern: Call, arrivals_ns: list[int]
    ) -> FabricTransfer:
        """Return the transfer of an operation of all groups that behave alike; refuse blocks that differ."""
        assert isinstance(communicator, SymmetricCommunicator)
        if pattern.counts:
            raise UsageError(
                f"counts: ranks that behave alike have blocks of one size, got {pattern}; run without `alike`"
            )
        met_ns = np.array(arrivals_ns, np.int64)
        communicator.check(operations, met_ns)
        demand, algorithm = self._joint_demand(communicator, pattern, met_ns - met_ns.min())
        sends = pattern.kind is Collective.P2P
        for operation in operations:
            operation.algorithm = algorithm or operation.algorithm
        name = str(communicator.key)
        return FabricTransfer(
            ("comm", name, operations[0].seq, max(arrivals_ns)),
            "send" if sends else pattern.kind.value,
            demand,
            priority=min(operation.priority for operation in operations),
            lane=communicator.key.with_any_tag() if sends else name,
        )

    def _joint_demand(self, communicator: SymmetricCommunicator, pattern: Call, late_ns: Ints) -> tuple[Demand, str]:
        """Return the demand of a collective of all alike groups together, and the algorithm of the first group.

        Args:
            communicator: The groups: each row of `rows` has the ranks of one.
            pattern: The call.
            late_ns: Time of each representative after the first that arrived.
        """
        rows = communicator.rows
        demand_key = id(rows), pattern, late_ns.tobytes()
        entry = self._demands.get(demand_key)
        if entry is None:
            groups, algorithm = [], ""
            for members, units in group_by_unit(rows, self._traffic.fabric.resources.ranks_per_unit):
                group, representatives = rows[members[0]].tolist(), communicator.representatives[members]
                demand, algorithm = self._group_demand(group, pattern, late_ns[representatives[0]], algorithm)
                resources = self._traffic.fabric.resources.shift_units(demand.resources, units)
                groups.append(AlikeGroups(demand=demand, resources=resources, representatives=representatives))
            joint_demand = join_demands(groups, communicator.members, communicator.class_firsts)
            if len(self._demands) >= _MOST_DEMANDS:
                del self._demands[next(iter(self._demands))]
            entry = self._demands[demand_key] = joint_demand, algorithm, rows
        return entry[:2]

    def _group_demand(self, group: list[int], pattern: Call, late_ns: Ints, like: str) -> tuple[Demand, str]:
        """Return the demand of one group alone, and its algorithm.

        Args:
            group: World ranks of the group.
            pattern: The call.
            late_ns: Time of each rank after the first that arrived.
            like: Algorithm of other groups that behave alike; "": it is chosen.
        """
        fabric, nbytes = self._traffic.fabric, pattern.nbytes
        if pattern.kind is Collective.P2P:
            src, dst = group
            return fabric.message((), src, dst, nbytes, late_ns=int(late_ns[1] - late_ns[0])).demand, ""
        option = self._choose_option(tuple(group), pattern, like=like)
        return fabric.collective_transfer(
            (), pattern.kind.value, option, nbytes, group, late_ns
        ).demand, option.algorithm
