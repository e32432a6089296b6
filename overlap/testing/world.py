"""World of a test: simulated ranks with a record of their operations, and with planned faults."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import structs

from ..runtime.callbacks import call_when_done
from ..runtime.interceptor import Place
from ..runtime.message import Message
from ..runtime.operation import CollectiveFuture, Operation
from ..runtime.port import Port
from ..runtime.settling import Onlooker
from ..runtime.state import CANCELLED, PARKED
from ..runtime.world import World
from ..simulation.injector import FaultInjector
from ..simulation.kernel import Kernel
from ..simulation.simulated_backend import SimulatedBackend, Virtual
from ..timeline.spans import Timeline
from ..waits.ends import CallRecord, form_of
from .faults import Fault, FaultPlan
from .record import Issue, Record

if TYPE_CHECKING:
    from types import FrameType

    import topology


_EXCHANGES = ("all_to_all", "all_to_all_single")
"""Calls of PyTorch that are operations, or several messages, of other names."""

_RELEASED = 1000
"""Operations of a released rank that wait for no other rank."""


class RecordingInjector(FaultInjector):
    """Injector of planned faults, and of the order of a seed, into operations, all of which are recorded.

    Args:
        plan: Planned faults.
        kernel: Moves the virtual clock.
        record: What tests know of the run.
    """

    fates: FaultPlan
    record: Record

    def __init__(self, plan: FaultPlan, kernel: Kernel, record: Record) -> None:
        super().__init__(plan, kernel)
        plan.on_stop, self.record = self._stop_for_ever, record
        self.unfinished: dict[int, tuple[Issue, CollectiveFuture[Any]]] = {}  # by the id of one that has not ended
        self.released: dict[int, int] = {}  # by rank: the index from which its operations wait for no other rank
        self._counts: dict[int, int] = {}
        self._identities: dict[int, tuple[object, str]] = {}  # by the id of a communicator, which is kept
        self._opened: Counter[str] = Counter()  # how often each was opened: those of messages close when they are idle

    def issued(self, place: Place, operation: Any) -> None:
        """Record an operation when a rank issues it, and its outcome when it ends.

        A receive from any source is issued again once its sender is known; its record then gets the sender.
        """
        rank, message = operation.context.rank, operation if isinstance(operation, Message) else None
        if isinstance(place, Port):
            operation.port, operation.seq = place, place.next_seq  # as it is about to be
        key = self._place_name(place.communicator if isinstance(place, Port) else operation.lane)
        if id(operation) in self.unfinished:  # a receive from any source, which has found one
            issue = self.unfinished[id(operation)][0]
            issue.call = structs.replace(issue.call, key=key, members=operation.members, any_source=False)
            issue.seq = operation.seq
            return
        index = self._counts[rank] = self._counts.get(rank, -1) + 1
        call = CallRecord(
            op=operation.op if message is None else "recv" if message.receives else "send",
            site=os.path.basename(operation.call_site),
            name=operation.name if operation.name in _EXCHANGES else "",
            key=key or f"any source, {rank}, {index}",
            group=operation.group.name,
            members=operation.members,
            tag=0 if message is None else message.tag,
            any_source=message is not None and message.asked is None,
        )
        issue = Issue(
            rank=rank, index=index, call=call, seq=operation.seq, issued_ns=operation.context.now_ns(),
            lost=rank in self.record.stopped, ahead=_strategy_issues(),
        )  # fmt: skip
        self.record.issues.append(issue)
        self.unfinished[id(operation)] = issue, operation
        _describe_arrays(issue, operation)

        def record_end() -> None:
            """Note end, failure and wait of the operation; a withdrawn receive leaves the record."""
            self.unfinished.pop(id(operation), None)
            if issue.call.op == "recv" and operation.state is CANCELLED:  # nobody waits for its message
                self.record.issues.remove(issue)
                return
            issue.ended_ns = operation.context.now_ns()
            issue.failed = operation._failure is not None
            _describe_arrays(issue, operation)
            issue.awaited = operation.awaited_ns is not None
            if issue.awaited:
                issue.waited_ns = issue.ended_ns

        call_when_done(operation, Onlooker(record_end))

    def waits_for_none(self, operation: Operation) -> bool:
        """Whether an operation of a released rank ends without the other ranks; a loop that they end goes no further.

        Its result has whatever is in its memory: only the order of operations counts then.
        """
        first = self.released.get(operation.context.rank)
        return first is not None and 0 <= self.unfinished[id(operation)][0].index - first < _RELEASED

    def arrive(self, place: Place, operation: Operation) -> None:
        """Let a rank's operation arrive, in turn if a seed decides, unless a planned fault stops it."""
        plan = self.fates
        if self.waits_for_none(operation):
            now_ns = operation.context.now_ns()
            operation.finish(now_ns, operation.describe(operation.call, now_ns))
        elif plan.turns is not None:
            operation.lock()
            plan.turns.hold(operation.context.rank, self.delay(operation, partial(super().arrive, place, operation)))
        elif operation.context.rank in plan.dead or plan.apply_faults(operation):
            super().arrive(place, operation)

    def _stop_for_ever(self, operation: Operation) -> None:
        """Stop a rank for ever, without any notice to other ranks."""
        operation.lock()
        rank, first = operation.context.rank, self.unfinished[id(operation)][0]
        for issue, _ in self.unfinished.values():
            issue.lost = issue.lost or (issue.rank == rank and issue.index >= first.index)  # also what it issued ahead
        self.record.stopped.add(rank)
        self.record.left[rank] = "was stopped by a fault"
        self.stop(rank)

    def drop_withdrawn(self) -> None:
        """Drop receives with a cancelled await from the record: nobody waits for their messages."""
        for issue, operation in self.unfinished.values():
            if operation.state is PARKED:
                self.record.issues.remove(issue)

    def record_unfinished(self, rank: int, *, sends: bool) -> None:
        """Record operations in flight at the end of a rank's program that it never waited for.

        Args:
            sends: Whether sends count too, as in programs of PyTorch; ours may leave them to the end of a rank.
        """
        for issue, operation in self.unfinished.values():
            counts = issue.rank == rank and not issue.ahead and (sends or issue.call.op != "send")
            left = operation.state is PARKED  # its await was cancelled, and nobody waits for its message
            if counts and not left and not issue.waited_ns and operation.awaited_ns is None:
                leak = f"has ended without waiting for {issue.title}, which is under way"
                self.record.leaks.append((rank, leak, issue.call.site))

    def _place_name(self, place: Any) -> str:
        """Return the name of a communicator or a lane that is the same on every rank.

        Numbers of messages restart when a lane is opened again.
        """
        parts = self._identities.get(id(place))
        if parts is None and not place.identity:
            return ""
        if parts is None:
            self._opened[place.identity] += 1
            again = f", {self._opened[place.identity]}" if self._opened[place.identity] > 1 else ""
            parts = self._identities[id(place)] = place, f"{place.identity}{again}"
        return parts[1]


def _strategy_issues() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (module := frame.f_globals.get("__name__", "")).startswith("overlap."):
        if module.startswith("overlap.parallel."):
            return True
        frame = frame.f_back
    return False


def _describe_arrays(issue: Issue, operation: CollectiveFuture[Any]) -> None:
    """Describe an operation in its issue, after its input has arrived."""
    call = getattr(operation, "call", None)
    if call is not None:
        issue.call = structs.replace(issue.call, form=form_of(str(call)), nbytes=call.nbytes)


_UNKNOWN_S = 1e-4
"""Cost of a compute that states none: a test asks for order, and seldom for times."""


class TestedBackend(SimulatedBackend):
    """Virtual time of a test, with planned faults and a record of all operations.

    Args:
        assumptions: Machine and costs.
        cluster: Where the ranks run.
        plan: Planned faults.
    """

    plan: FaultPlan
    record: Record
    injector: RecordingInjector

    def __init__(self, assumptions: Virtual, cluster: topology.Cluster, plan: FaultPlan, record: Record) -> None:
        super().__init__(assumptions, cluster)
        self.plan, self.record = plan, record
        self._starts.costs = replace(self._starts.costs, unknown_s=_UNKNOWN_S)
        if plan.turns is not None:
            self.kernel.on_idle = plan.turns.release
        self.injector = self._injector = self._starts.injector = RecordingInjector(plan, self.kernel, record)


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
        injector = clock.injector

        def stall() -> None:
            injector.drop_withdrawn()  # before the end cancels the awaits of all others
            world.deadlock()

        clock.kernel.on_stall = stall
        try:
            results = await world.live(wrap(clock, world), (), timeout_s)
            injector.drop_withdrawn()
            return results
        finally:
            result.timeline = world.timeline
            for issue, operation in injector.unfinished.values():
                issue.awaited = operation.awaited_ns is not None
                _describe_arrays(issue, operation)

    try:
        with plan.ordering_tasks():
            result.results = clock.kernel.run(live)
        result.unused = plan.unused(size)
    except Exception as error:
        result.error = error
    return result
