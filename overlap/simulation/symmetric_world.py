"""Simulated worlds in which only a few ranks run, and stand for all: their groups, messages and prices.

A rank issues operations on its group. The groups of all ranks of the same class are taken to do the same at the same
time. So one communicator stands for all these groups, and matches the operations of the simulated ranks only.
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
from ..cost.remembered import LimitedCache
from ..errors import UsageError
from ..runtime.communicator import BaseEngine, Communicator
from ..runtime.communicators import Communicators
from ..runtime.failure import Failure
from ..runtime.inbox import Inbox
from ..runtime.lane import Lane, LaneName, QueueName
from ..runtime.match import Key, Match, RankCall, minority_and_majority, mismatch_error_maker
from ..runtime.message import Message
from ..runtime.operation import Operation
from ..runtime.world import World
from ..units import format_ns
from .demand import Demand
from .fabric import FabricTransfer
from .simulated_engine import SimulatedEngine
from .symmetry import AlikeGroups, RankClasses, group_rows_by_unit, join_demands

if TYPE_CHECKING:
    from topology import Cluster
    from transports import Transport


T = TypeVar("T")


class SymmetricWorld(World):
    """A world in which only the first and the last rank of each class run.

    Args:
        size: Number of ranks in the world.
        cluster: The machine.
        transport: Transport of all ranks; nothing is sent.
        alike: Classes of the ranks, and the ranks that run.
        settings: Further arguments of `World`.
    """

    def __init__(
        self, size: int, cluster: Cluster, transport: Transport, *, alike: RankClasses, **settings: Any
    ) -> None:
        self._alike = alike
        super().__init__(size, cluster, transport, ranks=alike.simulated, **settings)
        named = ", ".join(map(str, alike.simulated))
        self.reports.caveat = f"only ranks {named} run, for all: they may not behave as alike as was said"

    async def run_to_end(
        self, main: Callable[..., Awaitable[T]], args: tuple[object, ...], timeout_s: float | None
    ) -> list[T]:
        """Run `main` on the simulated ranks; return a result for every rank, that of its representative.

        Args:
            main: The program of each rank.
            args: Further arguments of `main`.
            timeout_s: Virtual seconds after which the run ends with an error; None: never.
        """
        results = await super().run_to_end(main, args, timeout_s)
        representatives = self._alike.representative_indices(np.arange(self.size), self._alike.simulated)
        return [results[index] for index in representatives.tolist()]

    def check_group(self, ranks: tuple[int, ...]) -> None:
        """Check a group, and all groups that behave like it. Raises the errors of `World.check_group`."""
        for row in self._alike.alike_groups(ranks).tolist():
            super().check_group(tuple(row))


class SymmetricCommunicators(Communicators):
    """The communicators of a world in which only a few ranks run.

    Args:
        engine: Carries out operations.
        alike: Classes of the ranks, and the ranks that run.
    """

    def __init__(self, engine: BaseEngine, alike: RankClasses) -> None:
        super().__init__(engine)
        self._alike = alike
        # By group, distance and members of a message: the pairs of ranks with such messages, the simulated senders and
        # receivers among them, and a name for their stream. Equal for all tags.
        self._pairs: dict[tuple[object, ...], tuple[Ints, list[list[int]], str]] = {}

    def get_or_make(self, key: Key, name: str) -> Communicator:
        """Return the communicator of all groups that behave like a given group.

        Args:
            key: Key of the given group and its stream.
            name: Name of the group.

        Raises:
            UsageError: Ranks of the same classes are in other groups.
        """
        rows = self._alike.alike_groups(key.ranks)
        # The first row stands for all rows in the key, so that all ranks of a class find the same communicator.
        shared = key._replace(ranks=tuple(rows[0].tolist()))
        return self._get_or_make_shared(shared, name, rows, [self._simulated_ranks_among(rows)])

    def _ranks_here(self, key: Key) -> tuple[Key, int]:
        """Return the key of all groups that behave like a given group, and the number of simulated ranks in them."""
        rows = self._alike.alike_groups(key.ranks)
        return Key(tuple(rows[0].tolist()), key.occurrence, ""), len(self._simulated_ranks_among(rows))

    def make_inbox(self) -> Inbox:
        """Return the inbox of the messages of all pairs."""
        return SymmetricInbox(self)

    def find_pair_communicator(self, key: Key, name: str, members: tuple[int, ...]) -> SymmetricCommunicator:
        """Return the communicator of all messages that behave like those of a given pair of ranks.

        They go from ranks of the sender's class to ranks of the receiver's class, over the same distance in the group.

        Args:
            key: Key of the messages of the given pair: group, source, destination and tag.
            name: Name of the group.
            members: World ranks of the given pair: sender and receiver.
        """
        rows = self._alike.alike_groups(key.ranks)
        shift, classes = (key.dst - key.src) % rows.shape[1], self._alike.classes
        pairs_key = key.ranks, shift, members
        if pairs_key not in self._pairs:
            # (pairs, 2): each rank of a row with the rank `shift` places further on, round the row. Of these, keep the
            # pairs whose classes are those of `members`.
            pairs = np.stack([rows, np.roll(rows, -shift, axis=1)], axis=-1).reshape(-1, 2)
            pairs = pairs[(classes[pairs] == classes[list(members)]).all(axis=1)]
            class_names = ", ".join(map(str, classes[list(members)].tolist()))
            sides = [self._simulated_ranks_among(pairs[:, 0]), self._simulated_ranks_among(pairs[:, 1])]
            self._pairs[pairs_key] = pairs, sides, f"messages between classes {class_names}"
        pairs, sides, stream = self._pairs[pairs_key]
        shared = Key(tuple(rows[0].tolist()), key.occurrence, stream, src=0, dst=shift, tag=key.tag)
        return self._get_or_make_shared(shared, name, pairs, sides)

    def _simulated_ranks_among(self, ranks: Ints) -> list[int]:
        return [rank for rank in self._alike.simulated if rank in ranks]

    def _get_or_make_shared(self, key: Key, name: str, rows: Ints, sides: Sequence[list[int]]) -> SymmetricCommunicator:
        """Return the communicator with a key; make it if there is none. Arguments: see `SymmetricCommunicator`."""
        existing = self.find(key) or self.add(SymmetricCommunicator(self, key, name, rows, sides, self._alike))
        assert isinstance(existing, SymmetricCommunicator)
        return existing


class SymmetricLane(Lane):
    """Messages of one simulated rank, which stand for the messages of all ranks of its class.

    Args:
        name: Name of the lane.
        group: Key of the group.
        pairs: Communicator in which the messages of all such pairs are matched.
        place: Index of the rank in `pairs.members`.
    """

    __slots__ = ("pairs", "place")

    pairs: SymmetricCommunicator
    place: int

    def __init__(self, name: LaneName, group: Key, pairs: SymmetricCommunicator, place: int) -> None:
        # A `Lane` has no constructor: its creator sets the attributes, as `Inbox.open_lane` does for usual lanes.
        lane: Lane = self
        lane.name, lane.queue, lane.src = name, QueueName(*name[:3]), name[3]
        lane.group, lane.by_wire = group, False
        lane.messages, lane.arrived = (deque(), deque()), [None, None]
        lane.numbers, lane.returned = [0, 0], []
        self.pairs, self.place = pairs, place

    def missing_ranks(self, message: Message[object]) -> list[int]:
        """Return the simulated ranks that have not arrived at a message."""
        match = self.pairs.open_matches.get(message.seq, ())
        # Without an open match the list is empty.
        return [rank for rank, end in zip(self.pairs.members, match, strict=False) if end is None]


class SymmetricInbox(Inbox):
    """Inbox of a world in which only a few ranks run: messages are matched by number, over all simulated ranks."""

    shared: SymmetricCommunicators
    _engine: SymmetricEngine

    def __init__(self, shared: SymmetricCommunicators) -> None:
        super().__init__(shared)
        self._lanes: dict[tuple[Key, int], SymmetricLane] = {}  # by key of the pairs, and place of the rank in them

    def enqueue(self, message: Message[object]) -> bool:
        """Add a message to the lane of its rank, and number it; return whether it is the first one in the lane.

        Raises:
            UsageError: A receive does not name its source.
        """
        if message.peer is None:
            raise UsageError("src: where ranks represent others, a receive must name its source; pass src=")
        name, group = message.messages.lane_name(message), message.member.key
        _, dst, tag, src = name
        key = Key(group.ranks, group.occurrence, "", src=src, dst=dst, tag=tag)
        pairs = self.shared.find_pair_communicator(key, message.member.name, message.members)
        place = pairs.member_index(message.receives, message.context.rank)
        lane = self._lanes.get((pairs.key, place))
        if lane is None:
            lane = self._lanes[pairs.key, place] = SymmetricLane(name, group, pairs, place)
        end = message.receives  # as an index of `messages` and `numbers`: 0 for a send, 1 for a receive
        line, message.lane, message.seq = lane.messages[end], lane, lane.numbers[end]
        lane.numbers[end] += 1
        line.append(message)
        return line[0] is message

    def match(self, message: Message[object]) -> None:
        """Begin the transfer of a message once all simulated ranks have arrived; fail all if their calls differ."""
        lane = message.lane
        assert type(lane) is SymmetricLane
        pairs = lane.pairs
        match = pairs.open_matches.setdefault(message.seq, Match([None] * len(pairs.members)))
        match[lane.place] = message
        match.arrived += 1
        if match.arrived < len(pairs.members):
            return
        del pairs.open_matches[message.seq]
        # All have arrived: their calls must agree, as those of a message between two ranks.
        calls = [RankCall(end.context.rank, end.call, end.call_site) for end in match.ends]
        match.pattern = next((rank.call for rank in calls if rank.call.dtype is not None), None)
        if match.pattern is None or not all(match.pattern.agrees(rank.call) for rank in calls):
            few, many = minority_and_majority(calls)
            error = mismatch_error_maker(message.member.name, message.seq, few[0], many[0])
            for end in match.ends:
                end.fail(Failure(error()))
            return
        self._engine.begin_message(pairs, match)


class SymmetricCommunicator(Communicator):
    """Communicator of all groups, or of all pairs of sender and receiver, that behave alike.

    Args:
        shared: The communicators of the world.
        key: Key of the communicator.
        name: Name of the group.
        rows: (groups, ranks of each) World ranks of the groups; for messages, (pairs, 2).
        sides: For collectives one list: the simulated ranks in `rows`. For messages two: the simulated senders, and the
            simulated receivers. Joined, they are `members`.
        alike: Classes of the ranks, and the ranks that run.

    Attributes:
        rows: (groups, ranks of each) World ranks of the groups.
        representatives: (groups, ranks of each) Index, in `members`, of each rank's representative.
        class_firsts: (members,) Index, in `members`, of each member's representative.
        open_matches: Messages at which some members have not arrived, by number.
    """

    rows: Ints

    def __init__(
        self,
        shared: Communicators,
        key: Key,
        name: str,
        rows: Ints,
        sides: Sequence[list[int]],
        alike: RankClasses,
    ) -> None:
        super().__init__(shared, key, name, tuple(rank for side in sides for rank in side))
        self.size: int = rows.shape[1]
        self.open_matches: dict[int, Match] = {}
        self.rows, self._sides = rows, sides
        columns = [rows] if len(sides) == 1 else [rows[:, :1], rows[:, 1:]]
        # For each side: its columns of `rows`, its simulated ranks, and the index of the first of these in `members`.
        # Collectives have one side.
        parts = list(zip(columns, sides, (0, len(sides[0])), strict=False))
        self.representatives: NDArray[np.int64] = np.concatenate(
            [start + alike.representative_indices(ranks, side) for ranks, side, start in parts], axis=1
        )
        class_firsts = [start + alike.class_first_indices(side) for _, side, start in parts]
        self.class_firsts: NDArray[np.int64] = np.concatenate(class_firsts)

    def member_index(self, position: int, rank: int) -> int:
        """Return the index of a simulated rank in `members`.

        Args:
            position: For messages 0 for a sender, 1 for a receiver; ignored for collectives.
            rank: World rank.
        """
        side = position if len(self._sides) > 1 else 0
        return side * len(self._sides[0]) + self._sides[side].index(rank)

    def check_arrivals(self, operations: Sequence[Operation], arrivals_ns: Ints) -> None:
        """Check that the simulated ranks of each class have arrived at the same instant.

        Args:
            operations: Operations of the simulated ranks, in the order of `members`.
            arrivals_ns: Arrival of each operation.

        Raises:
            UsageError: Naming two ranks of a class that arrived at different instants.
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
"""Demands to remember: a run repeats those of a step. They are few, because a demand has arrays of all ranks."""


class SymmetricEngine(SimulatedEngine):
    """Engine that prices an operation of the simulated ranks as the operations of all groups that behave alike."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        # Keys have the id of the rows. The values have the rows themselves, which keeps them alive and the id unique.
        self._demands = LimitedCache[tuple[object, ...], tuple[Demand, str, Ints]](_MOST_DEMANDS)

    def begin_message(self, pairs: SymmetricCommunicator, match: Match) -> None:
        """Begin the transfer of one message between each of the pairs that behave alike.

        Args:
            pairs: The communicator of the pairs.
            match: The sends and receives of all its simulated ranks.
        """
        assert match.pattern is not None
        for end in match.ends:
            end.prepare_result(match.pattern)  # gives a receive its array
        self._begin_transfer(pairs, match.ends, match.pattern)

    def _make_transfer(
        self, communicator: Communicator | Lane, operations: list[Operation], pattern: Call, arrivals_ns: list[int]
    ) -> FabricTransfer:
        """Return the transfer of an operation, for all groups that behave alike together.

        Raises `UsageError` if blocks differ in size, or if ranks of a class have not arrived at the same instant.
        """
        assert isinstance(communicator, SymmetricCommunicator)
        if pattern.counts:
            raise UsageError(
                f"counts: ranks that behave alike have blocks of one size, got {pattern}; run without `alike`"
            )
        met_ns = np.array(arrivals_ns, np.int64)
        communicator.check_arrivals(operations, met_ns)
        demand, algorithm = self._joint_demand(communicator, pattern, met_ns - met_ns.min())
        sends = pattern.kind is Collective.P2P
        for operation in operations:
            # A message has no algorithm: "" leaves the operation as it is.
            operation.algorithm = algorithm or operation.algorithm
        name = str(communicator.key)
        return FabricTransfer(
            ("comm", name, operations[0].seq, max(arrivals_ns)),
            "send" if sends else pattern.kind.value,
            demand,
            priority=min(operation.priority for operation in operations),
            # Messages of a pair leave in the order of their sends, whatever their tags: they share one lane.
            lane=communicator.key._replace(tag=0) if sends else name,
        )

    def _joint_demand(self, communicator: SymmetricCommunicator, pattern: Call, late_ns: Ints) -> tuple[Demand, str]:
        """Return the demand of an operation of all groups together, and the name of its algorithm ("" for a message).

        `late_ns` has the time from the first arrival to the arrival of each member.
        """
        rows, all_resources = communicator.rows, self._traffic.fabric.resources

        def join_groups() -> tuple[Demand, str, Ints]:
            """Return the demand, the algorithm, and `rows`, which the cache must keep alive as its key has their id."""
            # The algorithm of the first group is used by all.
            groups, algorithm = [], ""
            # For groups that differ by whole units of the cluster: price the first, and shift its resources to others.
            for members, units in group_rows_by_unit(rows, all_resources.ranks_per_unit):
                group, representatives = rows[members[0]].tolist(), communicator.representatives[members]
                demand, algorithm = self._group_demand(group, pattern, late_ns[representatives[0]], algorithm)
                resources = all_resources.shift_resources_to_units(demand.resources, units)
                groups.append(AlikeGroups(demand=demand, resources=resources, representatives=representatives))
            return join_demands(groups, communicator.members, communicator.class_firsts), algorithm, rows

        # Arrays cannot be keys: the id of `rows` stands for it.
        demand, algorithm, _ = self._demands.find_or_compute((id(rows), pattern, late_ns.tobytes()), join_groups)
        return demand, algorithm

    def _group_demand(self, group: list[int], pattern: Call, late_ns: Ints, like: str) -> tuple[Demand, str]:
        """Return the demand of one group alone, and the name of its algorithm ("" for a message).

        `group` has world ranks, of a message sender and receiver. `like` is the algorithm of other groups that behave
        alike, which is used here, too; "": it is chosen here.
        """
        fabric, nbytes = self._traffic.fabric, pattern.nbytes
        if pattern.kind is Collective.P2P:
            src, dst = group
            return fabric.message_transfer((), src, dst, nbytes, late_ns=int(late_ns[1] - late_ns[0])).demand, ""
        option = self._choose_option(tuple(group), pattern, like=like)
        return fabric.collective_transfer(
            (), pattern.kind.value, option, nbytes, group, late_ns
        ).demand, option.algorithm
