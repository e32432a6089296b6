"""World of a test: simulated ranks with a record of their operations, and with planned faults."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from ..runtime.callbacks import call_when_done
from ..runtime.communicator import BaseEngine
from ..runtime.communicators import Communicators
from ..runtime.inbox import Inbox
from ..runtime.message import Message
from ..runtime.operation import CollectiveFuture, Operation
from ..runtime.port import Port
from ..runtime.settling import Onlooker
from ..runtime.state import CANCELLED, PARKED
from ..runtime.world import World
from ..simulation.faulty_world import (
    FaultInjector,
    FaultyArrivals,
    FaultyCommunicators,
    FaultyInbox,
    FaultyWorld,
)
from ..simulation.simulated_backend import SimulatedBackend, Virtual
from ..timeline.spans import Timeline
from .faults import Fault, FaultPlan
from .record import Issue, Record

if TYPE_CHECKING:
    from types import FrameType

    import topology


T = TypeVar("T")

# Ends of a message: whether this is the receiver's end, the peer (None: any source), and the tag.
Ends: TypeAlias = "tuple[bool, int | None, int]"


class Place(Protocol):
    """Where operations of ranks meet."""

    @property
    def identity(self) -> str:
        """Name in few characters, the same on every rank."""


_EXCHANGES = ("all_to_all", "all_to_all_single")
"""Calls of PyTorch that are operations, or several messages, of other names."""

_RELEASED = 1000
"""Operations of a released rank that wait for no other rank."""


class TestedCommunicators(FaultyCommunicators):
    """Where recorded operations meet."""

    def __init__(self, engine: BaseEngine, injector: FaultInjector, record: Record) -> None:
        super().__init__(engine, injector)
        self.intercept = _TestedArrivals(self, injector)
        self.record = record
        self.unfinished: dict[int, tuple[Issue, CollectiveFuture[Any]]] = {}  # by the id of one that has not ended
        self.released: dict[int, int] = {}  # by rank: the index from which its operations wait for no other rank
        self._counts: dict[int, int] = {}
        self._identities: dict[int, tuple[object, str]] = {}  # by the id of a communicator, which is kept
        self._opened: Counter[str] = Counter()  # how often each was opened: those of messages close when they are idle

    def make_inbox(self) -> Inbox:
        """Make the inbox, which records messages, and at which planned faults happen."""
        return _TestedInbox(self, self.engine)

    def record_operation(
        self,
        operation: CollectiveFuture[Any],
        place: Place,
        message: Ends | None,
        ranks: tuple[int, ...],
    ) -> None:
        """Record an operation, and later its end.

        Args:
            operation: The operation.
            place: Where it meets the operations of the other ranks.
            message: Ends of a message.
            ranks: World ranks of the group.
        """
        rank = operation.context.rank
        if id(operation) in self.unfinished:  # a receive from any source, which has found one
            issue = self.unfinished[id(operation)][0]
            issue.key, issue.seq, issue.members = self._identity(place), operation.seq, operation.members
            issue.peer = issue.members[0]
            return
        index = self._counts[rank] = self._counts.get(rank, -1) + 1
        issue = Issue(
            rank=rank,
            index=index,
            op=operation.op if message is None else "recv" if message[0] else "send",
            what="",
            name=operation.name if operation.name in _EXCHANGES else "",
            group=operation.group.name,
            members=operation.members,
            key=self._identity(place) or f"any source, {rank}, {index}",
            seq=operation.seq,
            line=os.path.basename(operation.call_site),
            issued_ns=operation.context.now_ns(),
            tag=0 if message is None else message[2],
            peer=None if message is None or message[1] is None else ranks[message[1]],
            lost=rank in self.record.stopped,
            ahead=_strategy_issues(),
        )
        self.record.issues.append(issue)
        self.unfinished[id(operation)] = issue, operation
        _describe(issue, operation)

        def note_end() -> None:
            """Note end, failure and wait of the operation; a withdrawn receive leaves the record."""
            self.unfinished.pop(id(operation), None)
            if issue.op == "recv" and operation.state is CANCELLED:  # nobody waits for its message
                self.record.issues.remove(issue)
                return
            issue.ended_ns = operation.context.now_ns()
            issue.failed = operation._failure is not None
            _describe(issue, operation)
            issue.awaited = operation.awaited_ns is not None
            if issue.awaited:
                issue.waited_ns = issue.ended_ns

        call_when_done(operation, Onlooker(note_end))

    def waits_for_none(self, operation: Operation) -> bool:
        """Whether an operation of a released rank ends without the other ranks; a loop that they end goes no further.

        Its result has whatever is in its memory: only the order of operations counts then.
        """
        first = self.released.get(operation.context.rank)
        return first is not None and 0 <= self.unfinished[id(operation)][0].index - first < _RELEASED

    def let_arrive(
        self,
        operation: Operation,
        arrive: Callable[[], None],
        delay: Callable[[Operation, Callable[[], None]], Callable[[], None]],
    ) -> None:
        """Let a rank's operation arrive, in turn if a seed decides, unless a planned fault stops it.

        Args:
            operation: The operation.
            arrive: Lets it arrive, as its fate says.
            delay: Takes the operation and what lets it arrive late; returns the function to call then.
        """
        plan = self.injector.fates
        assert isinstance(plan, FaultPlan)
        if self.waits_for_none(operation):
            now_ns = operation.context.now_ns()
            operation.finish(now_ns, operation.describe(operation.call, now_ns))
        elif plan.turns is not None:
            operation.lock()
            plan.turns.hold(operation.context.rank, delay(operation, arrive))
        elif operation.context.rank in plan.dead or plan.apply_faults(operation):
            arrive()

    def drop_withdrawn(self) -> None:
        """Drop receives with a cancelled await from the record: nobody waits for their messages."""
        for issue, operation in self.unfinished.values():
            if operation.state is PARKED:
                self.record.issues.remove(issue)

    def note_unfinished(self, rank: int, *, sends: bool) -> None:
        """Record operations in flight at the end of a rank's program that it never waited for.

        Args:
            sends: Whether sends count too, as in programs of PyTorch; ours may leave them to the end of a rank.
        """
        for issue, operation in self.unfinished.values():
            counts = issue.rank == rank and not issue.ahead and (sends or issue.op != "send")
            left = operation.state is PARKED  # its await was cancelled, and nobody waits for its message
            if counts and not left and not issue.waited_ns and operation.awaited_ns is None:
                leak = f"has ended without waiting for {issue.title}, which is under way"
                self.record.leaks.append((rank, leak, issue.line))

    def _identity(self, place: Place) -> str:
        """Return the name of a communicator or a lane that is the same on every rank.

        Numbers of messages restart when a lane is opened again.
        """
        named = self._identities.get(id(place))
        if named is None and not place.identity:
            return ""
        if named is None:
            self._opened[place.identity] += 1
            again = f", {self._opened[place.identity]}" if self._opened[place.identity] > 1 else ""
            named = self._identities[id(place)] = place, f"{place.identity}{again}"
        return named[1]


def _strategy_issues() -> bool:
    """Return whether a strategy issues the present operation."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (module := frame.f_globals.get("__name__", "")).startswith("overlap."):
        if module.startswith("overlap.parallel."):
            return True
        frame = frame.f_back
    return False


def _describe(issue: Issue, operation: CollectiveFuture[Any]) -> None:
    """Describe an operation in its issue, after its input has arrived."""
    call = getattr(operation, "call", None)
    if call is not None:
        text = str(call)
        issue.what, issue.nbytes = issue.name + text[text.index("(") :] if issue.name else text, call.nbytes


class _TestedArrivals(FaultyArrivals):
    """Collectives that are recorded, and at which planned faults happen."""

    def __init__(self, shared: TestedCommunicators, injector: FaultInjector) -> None:
        super().__init__(injector)
        self._shared = shared

    def issued(self, port: Port, operation: Operation) -> None:
        """Record an operation."""
        operation.port, operation.seq = port, port.next_seq  # as it is about to be
        self._shared.record_operation(operation, port.communicator, None, ())

    def arrive(self, port: Port, operation: Operation) -> None:
        """Let a rank's operation arrive, unless a fault stops it."""
        self._shared.let_arrive(operation, partial(super().arrive, port, operation), self.delay)


class _TestedInbox(FaultyInbox):
    """An inbox that records messages, and at which planned faults happen."""

    def admit(self, message: Message[object]) -> bool:
        """Put a message into its lane, and record it."""
        first, shared, lane = super().admit(message), self._shared, message.lane
        assert isinstance(shared, TestedCommunicators)
        assert lane is not None, "this is a bug in overlap: a message has no lane"
        ends = message.receives, message.asked, message.tag
        shared.record_operation(message, lane, ends, message.member.label[1])
        return first

    def arrive(self, message: Message[object]) -> None:
        """Let a rank's message arrive, unless a fault stops it."""
        assert isinstance(self._shared, TestedCommunicators)
        self._shared.let_arrive(message, partial(super().arrive, message), self.delay_arrival)


class TestedWorld(FaultyWorld):
    """World of ranks whose operations are recorded."""


_UNKNOWN_S = 1e-4
"""Cost of a compute that states none: a test asks for order, and seldom for times."""


class TestedBackend(SimulatedBackend):
    """Virtual time of a test, with planned faults and a record of all operations."""

    plan: FaultPlan
    injector: FaultInjector
    shared: TestedCommunicators  # From the making of its world on
    faulty_world = TestedWorld

    def __init__(self, assumptions: Virtual, cluster: topology.Cluster, plan: FaultPlan, record: Record) -> None:
        super().__init__(assumptions, cluster)
        self.record = record
        self.plan, self.injector = plan, FaultInjector(plan, self.kernel)
        self._starts.costs = replace(self._starts.costs, unknown_s=_UNKNOWN_S)
        plan.on_stop = self._stop
        if plan.turns is not None:
            self.kernel.on_idle = plan.turns.release
        self._injector = self._starts.injector = self.injector

    def _stop(self, operation: Operation) -> None:
        """Stop a rank for ever, of which no other rank is notified."""
        operation.lock()
        rank, first = operation.context.rank, self.shared.unfinished[id(operation)][0]
        for issue, _ in self.shared.unfinished.values():
            issue.lost = issue.lost or (issue.rank == rank and issue.index >= first.index)  # also what it issued ahead
        self.record.stopped.add(rank)
        self.record.left[rank] = "was stopped by a fault"
        self.injector.stop(rank)

    def communicators(self, engine: BaseEngine) -> Communicators:
        """Return communicators that record their operations."""
        self.shared = TestedCommunicators(engine, self.injector, self.record)
        return self.shared


@dataclass(slots=True, kw_only=True)
class WorldResult:
    """The life of a world, however it ended."""

    record: Record
    results: list[Any] = field(default_factory=list)  # Results of the programs by rank; empty if the world failed
    error: BaseException | None = None  # Error that ended the world
    timeline: Callable[[], Timeline] | None = None  # Returns it: to read the spans takes a while
    faults: Sequence[Fault] = ()  # Planned ones that have happened
    unused: str = ""  # Why a planned fault has not happened, of a run that ended well


def simulate(
    clock: TestedBackend,
    cluster: topology.Cluster,
    timeout_s: float | None,
    wrap: Callable[[TestedBackend, World], Callable[..., Awaitable[Any]]],
) -> WorldResult:
    """Run a world of ranks in virtual time; `wrap` makes the program of its ranks once the world exists."""
    record, plan, size = clock.record, clock.plan, clock.record.size
    result = WorldResult(record=record, faults=plan.happened)

    async def live() -> list[Any]:
        """Run the world, and note at its end which operations no rank has awaited."""
        world = clock.world(size, cluster, algorithm=None)
        shared = clock.shared

        def stall() -> None:
            shared.drop_withdrawn()  # before the end cancels the awaits of all others
            world.deadlock()

        clock.kernel.on_stall = stall
        try:
            results = await world.live(wrap(clock, world), (), timeout_s)
            shared.drop_withdrawn()
            return results
        finally:
            result.timeline = world.timeline
            for issue, operation in shared.unfinished.values():
                issue.awaited = operation.awaited_ns is not None
                _describe(issue, operation)

    try:
        with plan.ordering_tasks():
            result.results = clock.kernel.run(live)
        result.unused = plan.unused(size)
    except Exception as error:
        result.error = error
    return result
