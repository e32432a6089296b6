"""Operation: one rank's end of a collective or message, from the call through a window and a match to its end.

`CollectiveFuture` is the handle that users await. Streams, communicators and engines move it from state to state
(`state.TABLE`)::

    issued, queued, admitted   the stream: until there is room in its window
    blocked                    until its input exists
    matching                   the communicator: until the other ranks have arrived
    running                    the engine: while bytes move (`start_moving`)
    stopping                   `fail`, while they still move
    unwanted, cancelling, parked    a receive without awaits (`receive`)
    done, failed, cancelled    `finish`, `fail`, `abandon`
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from threading import get_ident
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import numpy as np
from trio.lowlevel import reschedule

from transports.base import PAYLOAD_BYTES

from ..collectives.call import Call, Pairs
from ..collectives.kinds import BARRIER, GATHER, PERMUTE, REDUCE, Collective
from ..collectives.reduce import Array
from ..errors import PeerFailedError, UsageError
from ..flight.recorder import Known
from ..ranklist import listed
from ..timeline.recording import RawMatch, RawSpan
from .derived import futures_in
from .event_loop import Cancels
from .failure import Failure
from .future import Future, source_of
from .handover import OperationRun
from .memory.arrays import read_only
from .outstanding import CallSite, IssuedFuture, checked_name, code_place
from .settling import settle_and_deliver
from .state import DONE, FOLLOWS, ISSUED, MATCHING, RUNNING, STOPPING, UNWANTED

if TYPE_CHECKING:
    from .group import GroupRank
    from .plan import CallPlan
    from .port import Port

T_co = TypeVar("T_co", covariant=True)


class GroupLike(Protocol):
    """The interface of a group to its operations."""

    name: str  # Name in messages
    label: tuple[str, tuple[int, ...]]  # Name and ranks in the timeline
    rank: int  # Index of this rank in the group
    size: int  # Number of ranks


class CallArguments(NamedTuple):
    """Arguments of a collective besides its arrays."""

    op: str | None = None
    root: int = 0
    counts: object = None  # Rows of each block; once checked, as `check_counts` returns them, or None
    exact: bool = False
    shared: bool = False
    algorithm: str | None = None  # Algorithm that the caller requests
    pairs: Pairs = ()


class _Nowhere:
    """Port of messages, and of operations that a thread has just issued; also its communicator and stream."""

    members: tuple[int, ...] = ()
    identity = ""
    position = place = 0

    def __init__(self) -> None:
        self.communicator = self.stream = self

    def finished(self, operation: Operation, failure: Failure | None) -> None:
        """Do nothing: the operation has not begun."""


NOWHERE: Port = cast("Port", _Nowhere())
"""Port of operations that the event loop has not enqueued yet."""


class CollectiveFuture(IssuedFuture[T_co]):
    """Handle of an issued collective or point-to-point operation.

    `await` it for the result. Until it is done, the input array is read-only and belongs to the operation, and so does
    `out`; the result belongs to the caller.

    Args:
        kind: Of the collective.
        x: Its input.
        priority: Lower numbers send first.
        name: Name in timelines.
    """

    # -- its arguments
    kind: Collective
    member: GroupRank  # Place of the rank in the group that it was issued on
    call: Call  # Values that all ranks must agree on; known once the input exists
    arguments: CallArguments  # Arguments that became `call`; absent if an earlier call had the same
    priority: int  # Lower is more urgent
    input: object  # Input as passed by the caller: an array, a future of one, or None
    out: Array | None  # The caller's array; once it is issued, the array for the result
    plan: CallPlan | None  # How it is carried out, if it is known yet
    caller_out: object  # The caller's `out`, if it is another object with the memory of an array
    input_changed: Callable[[], bool] | None  # Whether the input was changed, for inputs that count changes
    # In place of arrays: addresses of the input and of the result, their owner, and whether the caller waits at once
    memory: tuple[int, int, object, bool] | None
    source: Array | None  # Array that the operation reads
    target: Array | None  # A view of `out` that stays writable
    locked: tuple[Array, ...]  # Arrays to unlock at the end
    # -- its life
    port: Port
    seq: int  # Position among the group's operations on its stream
    issued_ns: int
    started_ns: int
    step: int | None  # Step of the rank in which it was issued
    deadline_s: float | None  # Time within which it must end
    awaited_ns: int | None  # Start of the program's wait for it
    scope: Cancels | None  # Handle of the moving bytes, while they move
    poll: Callable[[], None] | None  # Processes messages that have arrived in the meantime
    algorithm: str
    record: int  # Number in the flight record
    __slots__ = tuple(__annotations__)
    receives = False  # Whether it is a receive of a message

    def __init__(
        self, kind: Collective, x: object, out: object, caller: CallSite, priority: int, name: str | None
    ) -> None:
        # The base class's part is inlined, because this is on the path of every collective. Callers pass arguments by
        # position: with keywords an object takes half as long again.
        issued: IssuedFuture[T_co] = self  # which declares some
        issued.state, self._taken = ISSUED, False
        self._value = self._failure = self._waiters = self._callbacks = self._threads = self._anywhere = None
        self.kind, self.input, self.out = kind, x, out  # type: ignore[assignment]  # checked later
        self.caller_out = self.input_changed = self.source = self.target = self.memory = self.plan = None
        self.deadline_s = self.awaited_ns = self.scope = self.poll = None
        self.port, self.locked, self.priority, self.algorithm, self.record = NOWHERE, (), priority, "direct", -1
        issued.name = kind.text if name is None else checked_name(name, kind.text)
        issued.place = (caller.f_code, caller.f_lasti) if type(caller) is FrameType else code_place(caller)

    @property
    def op(self) -> str:
        """Name of the operation, such as "all_reduce"."""
        return str(self.kind.value)

    @property
    def group(self) -> GroupLike:
        """Group that it was issued on; once the program has dropped the group, its name, size and ranks."""
        return self.member.group

    @property
    def src(self) -> int | None:
        """Group rank that sends a message; None for collectives."""
        return None

    @property
    def identity(self) -> str:
        """Name of its communicator in few characters, the same on every rank."""
        return self.port.communicator.identity

    @property
    def known(self) -> Known:
        """Calls of its communicator that the flight record has fields for."""
        return self.port.known

    @property
    def members(self) -> tuple[int, ...]:
        """World ranks that meet in it."""
        return self.port.communicator.members

    @property
    def urgency(self) -> int:
        """Order of its messages on a wire: by priority, then by age."""
        return (self.priority << 64) + self.issued_ns

    @property
    def label(self) -> str:
        """Name of the operation in messages."""
        number = f" #{self.seq}" if self.port is not NOWHERE else ""  # a thread has issued it just now
        return f"{self.name}{number} on group '{self.member.name}'"

    @property
    def inputs(self) -> Iterable[Future[object]]:
        """Futures of the sent data, until their results are taken."""
        return map(source_of, futures_in(self.input))

    @property
    def awaits(self) -> Sequence[int]:
        """World ranks that have not arrived at it, once this one has."""
        return self.port.communicator.missing(self.seq) if MATCHING <= self.state <= STOPPING else ()

    def concerns(self, ranks: Container[int]) -> bool:
        """Whether any of some world ranks takes part."""
        return any(rank in ranks for rank in self.members)

    @property
    def since_ns(self) -> int | None:
        """Time at which this rank arrived at it; None before."""
        return self.started_ns if MATCHING <= self.state <= STOPPING else None

    def flight_fields(self) -> dict[str, object]:
        """Return the fields of `waits.ends.CallRecord`, which all operations of this call at this line share."""
        call = getattr(self, "call", None)  # absent until the input exists
        return {
            "op": self.op,
            "name": self.name,
            "form": "" if call is None else str(call),
            "group": self.member.name,
            "members": listed(self.members),
            "key": self.identity,
            "nbytes": 0 if call is None else call.nbytes,
            "site": self.call_site,
        }

    def _block(self, timeout: float | None = None) -> bool:
        """Wait in this thread, which polls host memory itself as long as that is quicker."""
        run, start_s = self.scope, perf_counter()
        if isinstance(run, OperationRun):
            run.look_here(self.context.handover, timeout)
        return self.state >= DONE or super()._block(
            None if timeout is None else max(0.0, start_s + timeout - perf_counter())
        )

    def _ends_at_once(self) -> bool:
        """Poll once on the event loop, and note the start of a wait."""
        if get_ident() != self.context.thread:
            return super()._ends_at_once()
        if self.state >= UNWANTED:
            self._claim()
        if self.poll is not None:
            self.poll()
        if self.state >= DONE:
            return True
        if self.awaited_ns is None:
            self.awaited_ns = self.context.now_ns()
        return False

    # -- life --------------------------------------------------------------------------------------------------

    def issue_elsewhere(self, in_place: Callable[[], bool] | None, on_loop: Callable[[], None]) -> None:
        """Issue from another thread: in the place of the sleeping loop if no task starts, else soon on the loop.

        The arrays are locked at once.

        Args:
            in_place: Issues in this thread, and returns whether it could; None: only the loop may.
            on_loop: Issues on the loop.

        Raises:
            PeerFailedError: If the loop has ended.
        """
        if in_place is not None and self.context.handover.in_place(in_place, False):
            return
        self.lock()
        try:
            self.context.from_thread(self._issue_late, on_loop)
        except PeerFailedError:
            self.release()
            raise

    def _issue_late(self, issue: Callable[[], None]) -> None:
        """Issue on the event loop, unless it was cancelled in the meantime; fail it if the rank has ended."""
        if self.state < DONE and not self.context.closed:
            issue()
        elif self.state < DONE:
            self.release()
            settle_and_deliver(self, None, Failure(self.context.ended(), seen=True))

    def arrive(self) -> None:
        """Match it with the operations of the other ranks, now that its input exists."""
        self.port.arrive(self)

    def fit(self, pattern: Call) -> None:
        """Make the array of the result, unless there is one; `pattern` has its dtype and shape.

        Raises:
            MemoryError: If there is no memory for it.
        """
        if self.target is None:
            if self.out is None and pattern.dtype is not None and self._receives():
                self.out = self.context.arrays.empty(pattern.result_at(self.port.position), pattern.dtype)
            self.target = self.out
        zeros = self.kind is PERMUTE and self.port.position not in {dst for _, dst in pattern.pairs}
        if zeros and not self.context.arrays.shapes_only:  # no rank sends to it
            cast(Array, self.target)[...] = 0

    def _receives(self) -> bool:
        """Whether this rank gets a result."""
        kind, position = self.kind, self.port.position
        if kind is REDUCE or kind is GATHER:
            return self.call.root == position
        return kind is not BARRIER

    def describe(self, pattern: Call, met_ns: int) -> RawMatch:
        """Return the part of its timeline entry that all ranks share."""
        return pattern.kind.text, self.algorithm, self.port.group, self.seq, pattern.nbytes, pattern.dtype, met_ns

    def finish(self, end_ns: int, meeting: RawMatch) -> None:
        """Record the span, set the result and let the stream go on; the loop's thread, or one in its place."""
        if self.state >= DONE or (self.receives and self._is_over()):
            return
        if self.input_changed is not None and self.input_changed():
            message = f"x: was changed while {self.label} ({self.call_site}) was reading it; await that first"
            self.fail(Failure(UsageError(message)))
            return
        context, started_ns, stream = self.context, self.started_ns, self.port.stream
        code, instruction = self.place
        info = (meeting, self.issued_ns, self.priority, code, instruction, self.awaited_ns, self.step)
        span: RawSpan = "comm", stream.name, self.name, started_ns, end_ns, info
        context.flight.carried(self.record, started_ns, end_ns, span)
        if self.call.shared and not context.arrays.shapes_only:
            self.out = read_only(cast(Array, self.out))
        value = self.out if self.caller_out is None else self.caller_out
        # unlock first: a waiter may need the same arrays at once; inlined from `release`, for a short latency
        if self.locked:
            context.locks.unlock(self.locked)
            self.locked = ()
        self.input = self.source = self.target = self.out = self.caller_out = self.input_changed = self.memory = None
        # settle, inlined: only the loop, or a thread in its place, ends it
        if not FOLLOWS[self.state][DONE]:
            self._refuse(DONE)
        issued: IssuedFuture[T_co] = self  # which declares the state
        self._value, issued.state = value, DONE
        if self._threads is not None:
            self._wake_threads()
        if self._anywhere is not None:
            self._call_anywhere()
        # deliver, inlined where nothing waits for the stream
        if self.deadline_s is not None:
            context.deadlines.drop(self, self.deadline_s)
        if stream.queue or stream.in_flight is None or context.outstanding.draining:
            stream.finished(self, None)
        else:
            del context.outstanding.operations[self], stream.in_flight[self]
        waiters = self._waiters
        if waiters is not None or self._callbacks is not None:
            if get_ident() != context.thread:  # added after `end_wakes_loop` was false
                context.from_thread(self._notify)
            elif self._callbacks is not None:
                self._notify()
            else:
                self._waiters = None
                for task in waiters or ():
                    reschedule(task)

    def _is_over(self) -> bool:
        """Whether a receive has ended otherwise, now that its message has arrived."""
        return False

    @property
    def end_wakes_loop(self) -> bool:
        """Whether its end wakes tasks, callbacks or the stream, which only the loop may do."""
        return self._waiters is not None or self._callbacks is not None or self.port.stream.end_wakes

    def start_moving(self, scope: Cancels | None) -> None:
        """Note that its bytes begin to move. `scope` stops them; None if moving takes no time."""
        self.scope = scope
        if self.state is MATCHING:  # else it began before, or no task waits for it any more
            self._enter(RUNNING)

    @property
    def can_start(self) -> bool:
        """Whether its bytes neither move nor have moved."""
        return self.scope is None and self.state < DONE

    def fail(self, failure: Failure) -> None:
        """End with an error, which is raised in the awaiting tasks, and fails the rank if there are none.

        Bytes that are moving are stopped first, or waited for.
        """
        if self.state >= DONE:
            return
        if self._moves:
            if self.state is not STOPPING:
                self._enter(STOPPING)
                self._failure = failure  # the outcome once its bytes have stopped
                self._stop()
        else:
            self.context.flight.ended(self.record, -self.context.now_ns())
            self.release()
            settle_and_deliver(self, None, failure)

    def expire(self, error: BaseException) -> None:
        """Fail because of a deadline, and with it all later operations of the communicator."""
        if self.state < DONE:
            self.port.communicator.give_up(self, Failure(error))

    def abandon(self, error: BaseException) -> None:
        """Fail with the world. Waiting tasks get the error before they are cancelled; the arrays are released later."""
        self.port.communicator.forget(self.seq)
        settle_and_deliver(self, None, Failure(error, seen=True))
        if self._moves:
            self._stop()
        else:
            self.release()

    @property
    def _moves(self) -> bool:
        """Whether its bytes move."""
        return self.scope is not None

    def _stop(self) -> None:
        """Stop its bytes, soon."""
        if self.scope is not None:
            self.scope.cancel()

    def stopped(self) -> None:
        """Note that its bytes have stopped moving."""
        self.scope = self.poll = None
        if self.state is STOPPING:
            assert self._failure is not None, "it stops because it has failed"
            self.fail(self._failure)
        elif self.state >= DONE:
            self.release()

    def _deliver(self) -> None:
        """Deliver the end to the stream, the deadlines, and the tasks and callbacks that wait."""
        if self.deadline_s is not None:
            self.context.deadlines.drop(self, self.deadline_s)
        self.port.stream.finished(self, self._failure)
        if self._waiters is not None or self._callbacks is not None:
            if get_ident() == self.context.thread:
                self._notify()
            else:
                self.context.from_thread(self._notify)

    # -- memory --------------------------------------------------------------------------------------------------
    def lock(self) -> None:
        """Make the arrays of this operation read-only for everybody else until it ends; again once more are known."""
        context, x, out = self.context, self.input, self.out
        if context.arrays.shapes_only:  # no array has data
            return
        arrays: tuple[Array, ...] = ()
        if out is not None and self.target is None:
            self.target, arrays = out.view(), (out,)
        if x is not out and isinstance(x, np.ndarray) and not any(each is x for each in self.locked):
            arrays = (x, *arrays)
        if arrays:
            self.locked += context.locks.lock(arrays, out)

    @property
    def may_leave_at_once(self) -> bool:
        """Whether its input is small and copied at once, so that it may never need a lock."""
        source = self.source
        return self.out is None and source is not None and source.nbytes <= PAYLOAD_BYTES

    def release(self) -> None:
        """Unlock the arrays: no bytes move any more."""
        if self.locked:
            self.context.locks.unlock(self.locked)
            self.locked = ()
        self.input = self.source = self.target = self.out = self.caller_out = self.input_changed = self.memory = None


Operation: TypeAlias = CollectiveFuture[object]
