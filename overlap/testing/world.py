"""World of a test: simulated ranks with planned faults, whose operations are recorded."""

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
from ..waits.ends import CallRecord, parse_call_form
from .faults import Fault, FaultPlan
from .record import Issue, Record

if TYPE_CHECKING:
    from types import FrameType

    import topology


_EXCHANGES = ("all_to_all", "all_to_all_single")
"""Calls of PyTorch that overlap carries out as another operation, or as several messages."""

_RELEASED = 1000
"""Number of operations after its release for which a released rank waits for no other rank."""


class RecordingInjector(FaultInjector):
    """Injector of planned faults, and of the order that a seed decides. It records all operations.

    Attributes:
        record: The record of the run.
        unfinished: By id of an operation that has not ended: its record, and the operation.
        released: By rank, the index of the operation from which on its operations wait for no other rank.

    Args:
        plan: The planned faults.
        kernel: Kernel of the simulation, which moves the virtual clock.
        record: The record to fill.
    """

    fates: FaultPlan
    record: Record

    def __init__(self, plan: FaultPlan, kernel: Kernel, record: Record) -> None:
        super().__init__(plan, kernel)
        plan.on_stop, self.record = self._stop_rank, record
        self.unfinished: dict[int, tuple[Issue, CollectiveFuture[Any]]] = {}
        self.released: dict[int, int] = {}
        self._counts: dict[int, int] = {}  # index of the last operation, by rank
        # By id of a communicator or lane: the object, which keeps its id from being used again, and its name.
        self._identities: dict[int, tuple[object, str]] = {}
        self._opened: Counter[str] = Counter()  # how often each lane was opened; idle lanes are closed

    def on_issued(self, place: Place, operation: Any) -> None:
        """Record an operation when a rank issues it, and its outcome when it ends.

        A receive from any source is issued again once its sender is known; its record then gets the sender.
        """
        rank = operation.context.rank
        if isinstance(place, Port):
            operation.port, operation.seq = place, place.next_seq  # values that it gets after this call
        key = self._place_name(place.communicator if isinstance(place, Port) else operation.lane)
        if id(operation) in self.unfinished:  # a receive from any source, whose sender is known now
            issue = self.unfinished[id(operation)][0]
            issue.call = structs.replace(issue.call, key=key, members=operation.members, any_source=False)
            issue.seq = operation.seq
            return
        index = self._counts[rank] = self._counts.get(rank, -1) + 1
        call = _make_call_record(operation, key or f"any source, {rank}, {index}")
        issue = Issue(
            rank=rank, index=index, call=call, seq=operation.seq, issued_ns=operation.context.now_ns(),
            lost=rank in self.record.stopped, ahead=_is_issued_by_strategy(),
        )  # fmt: skip
        self.record.issues.append(issue)
        self.unfinished[id(operation)] = issue, operation
        _record_arrays(issue, operation)

        def record_end() -> None:
            """Record end, failure and wait of the operation; a cancelled receive is removed from the record."""
            self.unfinished.pop(id(operation), None)
            if issue.call.op == "recv" and operation.state is CANCELLED:  # nobody waits for its message
                self.record.issues.remove(issue)
                return
            issue.ended_ns = operation.context.now_ns()
            issue.failed = operation._failure is not None
            _record_arrays(issue, operation)
            issue.awaited = operation.awaited_ns is not None
            if issue.awaited:
                issue.waited_ns = issue.ended_ns

        call_when_done(operation, Onlooker(record_end))

    def waits_for_none(self, operation: Operation) -> bool:
        """Whether an operation is of a released rank, and ends at once, without the other ranks.

        This holds only for the first `_RELEASED` operations after the release, so that a loop which other ranks would
        end cannot run for ever. The values of the result are arbitrary: only the order of operations counts then.
        """
        first = self.released.get(operation.context.rank)
        # The index of the operation, counted from the release on.
        return first is not None and 0 <= self.unfinished[id(operation)][0].index - first < _RELEASED

    def arrive(self, place: Place, operation: Operation) -> None:
        """Let a rank's operation arrive, when it is the rank's turn if a seed decides turns.

        It does not arrive if the rank is dead, or a planned fault stops it.
        """
        plan = self.fates
        if self.waits_for_none(operation):
            now_ns = operation.context.now_ns()
            operation.finish(now_ns, operation.describe_meeting(operation.call, now_ns))
        elif plan.turns is not None:
            operation.lock_arrays()
            plan.turns.queue(
                operation.context.rank, self.delay_arrival(operation, partial(super().arrive, place, operation))
            )
        elif operation.context.rank in plan.dead or plan.apply_faults(operation):
            super().arrive(place, operation)

    def _stop_rank(self, operation: Operation) -> None:
        """Stop a rank for ever at an operation, without a notice to other ranks."""
        operation.lock_arrays()
        rank, first = operation.context.rank, self.unfinished[id(operation)][0]
        for issue, _ in self.unfinished.values():
            # Also operations that the rank has issued ahead of this one.
            issue.lost = issue.lost or (issue.rank == rank and issue.index >= first.index)
        self.record.stopped.add(rank)
        self.record.left[rank] = "was stopped by a fault"
        self.stop(rank)

    def drop_withdrawn_receives(self) -> None:
        """Remove receives whose await was cancelled from the record: nobody waits for their messages."""
        for issue, operation in self.unfinished.values():
            if operation.state is PARKED:
                self.record.issues.remove(issue)

    def record_unfinished_operations(self, rank: int, *, sends: bool) -> None:
        """Record, as leaks, operations in flight at the end of a rank's program for which it never waited.

        Args:
            rank: The rank.
            sends: Whether sends count, too, as in programs of PyTorch. In programs of overlap they need no wait.
        """
        for issue, operation in self.unfinished.values():
            counts = issue.rank == rank and not issue.ahead and (sends or issue.call.op != "send")
            left = operation.state is PARKED  # a receive whose await was cancelled
            if counts and not left and not issue.waited_ns and operation.awaited_ns is None:
                leak = f"has ended without waiting for {issue.title}, which is under way"
                self.record.leaks.append((rank, leak, issue.call.site))

    def _place_name(self, place: Any) -> str:
        """Return a name of a communicator or a lane that is the same on every rank; "" if it has none.

        A lane that is opened again gets another name, as the numbers of its messages restart.
        """
        parts = self._identities.get(id(place))
        if parts is None and not place.identity:
            return ""
        if parts is None:
            self._opened[place.identity] += 1
            again = f", {self._opened[place.identity]}" if self._opened[place.identity] > 1 else ""
            parts = self._identities[id(place)] = place, f"{place.identity}{again}"
        return parts[1]


def _is_issued_by_strategy() -> bool:
    """Whether a strategy of `overlap.parallel` issues the present operation, by the frames of overlap on the stack."""
    # Frame 2 is the caller of `RecordingInjector.on_issued`.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (module := frame.f_globals.get("__name__", "")).startswith("overlap."):
        if module.startswith("overlap.parallel."):
            return True
        frame = frame.f_back
    return False


def _make_call_record(operation: Any, key: str) -> CallRecord:
    """Return the facts of a new operation, without its arrays, which may not exist yet; `key` is that of all ranks."""
    is_message = isinstance(operation, Message)
    direction = "recv" if is_message and operation.receives else "send"
    return CallRecord(
        op=direction if is_message else operation.op,
        site=os.path.basename(operation.call_site),
        name=operation.name if operation.name in _EXCHANGES else "",
        key=key,
        group=operation.group.name,
        members=operation.members,
        tag=operation.tag if is_message else 0,
        any_source=is_message and operation.given_peer is None,
    )


def _record_arrays(issue: Issue, operation: CollectiveFuture[Any]) -> None:
    """Add arguments and bytes to the record of an operation, if its input exists already."""
    call = getattr(operation, "call", None)
    if call is not None:
        issue.call = structs.replace(issue.call, form=parse_call_form(str(call)), nbytes=call.nbytes)


_UNKNOWN_S = 1e-4
"""Virtual seconds of a compute without a given cost: tests need an order, and seldom times."""


class TestedBackend(SimulatedBackend):
    """Virtual time of a test, with planned faults and a record of all operations.

    Args:
        assumptions: Assumptions of virtual time on machine and costs.
        cluster: The cluster on which the ranks run.
        plan: The planned faults.
        record: The record to fill with all operations.
    """

    plan: FaultPlan
    record: Record
    injector: RecordingInjector

    def __init__(self, assumptions: Virtual, cluster: topology.Cluster, plan: FaultPlan, record: Record) -> None:
        super().__init__(assumptions, cluster)
        self.plan, self.record = plan, record
        self._starts.costs = replace(self._starts.costs, unknown_s=_UNKNOWN_S)
        if plan.turns is not None:
            self.kernel.on_idle = plan.turns.run_next_step
        self.injector = self._injector = self._starts.injector = RecordingInjector(plan, self.kernel, record)


@dataclass(slots=True, kw_only=True)
class WorldResult:
    """Result of a world that has ended, with or without an error."""

    record: Record
    results: list[Any] = field(default_factory=list)  # Results of the programs by rank; empty if the world failed
    error: BaseException | None = None  # Error that ended the world; None: it ended without one
    timeline: Callable[[], Timeline] | None = None  # Makes the timeline, which takes a while
    faults: Sequence[Fault] = ()  # Planned faults that have happened
    unused: str = ""  # Why a planned fault has not happened, if the world ended without an error; "": all have


def simulate_world(
    clock: TestedBackend,
    cluster: topology.Cluster,
    timeout_s: float | None,
    make_main: Callable[[TestedBackend, World], Callable[..., Awaitable[Any]]],
) -> WorldResult:
    """Run a world of ranks in virtual time. An error that ends it is not raised: it is in the result.

    Args:
        clock: Backend of the world.
        cluster: The cluster on which the ranks run.
        timeout_s: Limit of virtual time; None: without limit.
        make_main: Makes the async function that runs each rank, from the backend and the world.
    """
    record, plan, size = clock.record, clock.plan, clock.record.size
    result = WorldResult(record=record, faults=plan.happened)

    async def live_world() -> list[Any]:
        """Run the world, and record at its end which unfinished operations were awaited."""
        world = clock.world(size, cluster, algorithm=None)
        injector = clock.injector

        def end_stalled_world() -> None:
            # withdrawn: receives whose await was cancelled; now, before the end cancels the awaits of all others
            injector.drop_withdrawn_receives()
            world.end_deadlocked()

        clock.kernel.on_stall = end_stalled_world
        try:
            results = await world.run_to_end(make_main(clock, world), (), timeout_s)
            injector.drop_withdrawn_receives()
            return results
        finally:
            result.timeline = world.timeline
            for issue, operation in injector.unfinished.values():
                issue.awaited = operation.awaited_ns is not None
                _record_arrays(issue, operation)

    try:
        with plan.order_tasks():
            result.results = clock.kernel.run(live_world)
        result.unused = plan.explain_unused_fault(size)
    except Exception as error:
        result.error = error
    return result
