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
from ..collectives.kinds import GATHER, PERMUTE, REDUCE, Collective
from ..collectives.reduce import Array
from ..errors import PeerFailedError, UsageError
from ..flight.recorder import Known
from ..ranklist import format_rank_list
from ..timeline.recording import RawMatch, RawSpan
from .derived import futures_in
from .event_loop import Cancellable
from .failure import Failure
from .future import Future, source_of
from .handover import OperationRun
from .memory.arrays import as_read_only
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
    """Arguments of a collective besides its arrays; see `GroupCalls`."""

    op: str | None = None  # Name of the operator of a reduction
    root: int = 0
    counts: object = None  # Rows of each block; once checked, as `check_counts` returns them, or None
    exact: bool = False
    shared: bool = False
    algorithm: str | None = None  # Algorithm that the caller requests
    pairs: Pairs = ()


class _Nowhere:
    """Placeholder for the port of an operation that has none yet, and for that port's communicator and stream."""

    members: tuple[int, ...] = ()
    identity = variant = ""
    position = match_index = 0

    def __init__(self) -> None:
        self.communicator = self.stream = self

    def on_operation_end(self, operation: Operation, failure: Failure | None) -> None:
        """Do nothing: the operation has not begun."""


NOWHERE: Port = cast("Port", _Nowhere())
"""Port of operations that the event loop has not enqueued yet."""


class CollectiveFuture(IssuedFuture[T_co]):
    """Handle of a collective or a message that a rank has issued.

    `await` it for the result. Until it is done, the arrays `x` and `out` belong to the operation, and are read-only for
    everybody else. The result belongs to the caller.

    Args:
        kind: Kind of the collective.
        x: Input of the collective.
        out: Where to put the result; None: in a new array.
        caller: Frame or line that issued it.
        priority: Lower numbers send first.
        name: Name in timelines; None: that of the kind.
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
    source: Array | None  # Array that the operation reads: `input`, or a contiguous or packed copy
    target: Array | None  # Array that the operation writes: a view of `out` that stays writable while `out` is locked
    locked: tuple[Array, ...]  # Arrays to unlock at the end
    # -- its life
    port: Port
    seq: int  # Position among the group's operations on its stream
    issued_ns: int
    started_ns: int
    step: int | None  # Step of the rank in which it was issued
    deadline_s: float | None  # Time within which it must end
    awaited_ns: int | None  # Instant at which the program began to wait for it
    scope: Cancellable | None  # Stops its bytes; None while they do not move
    poll: Callable[[], None] | None  # Looks whether it has progressed; an await calls this before it sleeps
    algorithm: str  # Name in the timeline
    record: int  # Number in the flight record
    __slots__ = tuple(__annotations__)
    receives = False  # Whether it is a receive of a message

    def __init__(
        self, kind: Collective, x: object, out: object, caller: CallSite, priority: int, name: str | None
    ) -> None:
        # The base class's part is inlined, because this is on the path of every collective. Callers pass arguments by
        # position: with keywords an object takes half as long again.
        issued: IssuedFuture[T_co] = self  # the base class, which declares some of the attributes
        # of a future that has not ended
        issued.state, self._taken = ISSUED, False
        self._value = self._failure = self._waiters = self._callbacks = self._threads = self._thread_callbacks = None
        # its arguments, as far as they are known
        self.kind, self.input, self.out = kind, x, out  # type: ignore[assignment]  # checked later
        self.caller_out = self.input_changed = self.source = self.target = self.memory = self.plan = None
        # its life, which has not begun
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
        """Group that it was issued on, or its name, size and ranks once the program has dropped it."""
        return self.member.group

    @property
    def src(self) -> int | None:
        """Group rank that sends a message, or None for collectives."""
        return None

    @property
    def identity(self) -> str:
        """Short name of the operation's communicator, the same on every rank."""
        return self.port.communicator.identity

    @property
    def known_calls(self) -> Known:
        """Calls of the operation's port that the flight record has a number for."""
        return self.port.known_calls

    @property
    def members(self) -> tuple[int, ...]:
        """World ranks that take part in the operation."""
        return self.port.communicator.members

    @property
    def urgency(self) -> int:
        """Sort key of its messages on a wire, lowest first: the priority, then the instant of issue."""
        return (self.priority << 64) + self.issued_ns

    @property
    def label(self) -> str:
        """Name of the operation in messages."""
        number = f" #{self.seq}" if self.port is not NOWHERE else ""  # a thread has issued it just now
        return f"{self.name}{number} on group '{self.member.name}'"

    @property
    def inputs(self) -> Iterable[Future[object]]:
        """Futures that the operation has as its input, until their results are taken."""
        return map(source_of, futures_in(self.input))

    @property
    def awaited_ranks(self) -> Sequence[int]:
        """World ranks that this rank waits for: it has arrived at the operation, and they have not."""
        return self.port.communicator.missing_ranks(self.seq) if MATCHING <= self.state <= STOPPING else ()

    def involves_any(self, ranks: Container[int]) -> bool:
        """Whether any of these world ranks takes part in the operation."""
        return any(rank in ranks for rank in self.members)

    @property
    def since_ns(self) -> int | None:
        """Instant at which this rank arrived at the operation; None before, and after the end."""
        return self.started_ns if MATCHING <= self.state <= STOPPING else None

    def flight_fields(self) -> dict[str, object]:
        """Return the fields of `waits.ends.CallRecord`, which all operations of this call at this line share."""
        call = getattr(self, "call", None)  # absent until the input exists
        return {
            "op": self.op,
            "name": self.name,
            "form": "" if call is None else str(call),
            "group": self.member.name,
            "variant": self.port.communicator.variant,
            "members": format_rank_list(self.members),
            "key": self.identity,
            "nbytes": 0 if call is None else call.nbytes,
            "site": self.call_site,
        }

    def _wait_in_thread(self, timeout: float | None = None) -> bool:
        """Return False at the time limit, in seconds.

        At first the thread waits in the engine, if the operation runs there: that is quicker than to be woken.
        """
        run, start_s = self.scope, perf_counter()
        if isinstance(run, OperationRun):
            run.wait_in_engine(self.context.handover, timeout)
        return self.state >= DONE or super()._wait_in_thread(
            None if timeout is None else max(0.0, start_s + timeout - perf_counter())
        )

    def _poll_for_end(self) -> bool:
        """Poll once before a task sleeps, and record the start of its wait. Return whether the operation has ended.

        Raise `UsageError` if the task runs on another thread than the operation's event loop.
        """
        if get_ident() != self.context.thread:
            return super()._poll_for_end()  # this raises
        # a receive that no task awaited any more (its states follow UNWANTED) takes part again
        if self.state >= UNWANTED:
            self._prepare_for_use()
        if self.poll is not None:
            self.poll()
        if self.state >= DONE:
            return True
        if self.awaited_ns is None:
            self.awaited_ns = self.context.now_ns()
        return False

    # -- life --------------------------------------------------------------------------------------------------

    def issue_from_thread(self, in_place: Callable[[], bool] | None, on_loop: Callable[[], None]) -> None:
        """Issue an operation from another thread than the loop's: in that thread if possible, else soon on the loop.

        The arrays are locked at once in both cases.

        Args:
            in_place: Issues in this thread while the loop sleeps; returns False if only the loop can. None: the loop
                must do it.
            on_loop: Issues on the loop.

        Raises:
            PeerFailedError: If the loop has ended.
        """
        if in_place is not None and self.context.handover.run_in_place(in_place, False):
            return
        self.lock_arrays()
        try:
            self.context.post_to_loop(self._issue_on_loop, on_loop)
        except PeerFailedError:
            self.release_arrays()
            raise

    def _issue_on_loop(self, issue: Callable[[], None]) -> None:
        """Issue what a thread has called, unless it was cancelled; fail it if the rank has ended by then."""
        if self.state < DONE and not self.context.closed:
            issue()
        elif self.state < DONE:
            self.release_arrays()
            settle_and_deliver(self, None, Failure(self.context.closed_rank_error(), seen=True))

    def arrive(self) -> None:
        """Match the operation with those of the other ranks, now that its input exists."""
        self.port.arrive(self)

    def prepare_result(self, pattern: Call) -> None:
        """Set `target`, the array for the result: `out`, or a new array; None on a rank without a result.

        In a permute, a rank to which no rank sends gets zeros, which are written here.

        Args:
            pattern: The call that all ranks agree on, which has dtype and shape.

        Raises:
            MemoryError: If there is no memory for a new array.
        """
        kind, position = self.kind, self.port.position
        if self.target is None:
            has_result = (kind is not REDUCE and kind is not GATHER) or self.call.root == position
            if self.out is None and pattern.dtype is not None and has_result:
                self.out = self.context.arrays.empty(pattern.result_shape_at(position), pattern.dtype)
            self.target = self.out
        zeros = kind is PERMUTE and position not in {dst for _, dst in pattern.pairs}
        if zeros and not self.context.arrays.shapes_only:  # no rank sends to it
            cast(Array, self.target)[...] = 0

    def describe_meeting(self, pattern: Call, met_ns: int) -> RawMatch:
        """Return the part of the operation's timeline span that all ranks share.

        Args:
            pattern: The call that all ranks agree on.
            met_ns: Instant at which the last rank arrived, as far as this process knows.
        """
        return pattern.kind.text, self.algorithm, self.port.group, self.seq, pattern.nbytes, pattern.dtype, met_ns

    def finish(self, end_ns: int, meeting: RawMatch) -> None:
        """End the operation with its result: record the span, unlock the arrays, let the stream go on, wake waiters.

        It fails instead if its input was changed while it was read. Nothing happens if it has ended already. Only the
        loop's thread, or a thread in its place, may call this. For a short latency, the steps of `release_arrays`,
        `settle` and `_deliver` are written out here.

        Args:
            end_ns: Instant of the end.
            meeting: The result of `describe_meeting`.
        """
        if self.state >= DONE or (self.receives and self._unpack_or_return_message()):
            return
        if self.input_changed is not None and self.input_changed():
            message = f"x: was changed while {self.label} ({self.call_site}) was reading it; await that first"
            self.fail(Failure(UsageError(message)))
            return
        context, started_ns, stream = self.context, self.started_ns, self.port.stream
        code, instruction = self.place
        info = (meeting, self.issued_ns, self.priority, code, instruction, self.awaited_ns, self.step)
        span: RawSpan = "comm", stream.name, self.name, started_ns, end_ns, info
        context.flight.record_success(self.record, started_ns, end_ns, span)
        if self.call.shared and not context.arrays.shapes_only:
            self.out = as_read_only(cast(Array, self.out))
        value = self.out if self.caller_out is None else self.caller_out
        # unlock first: a waiter may need the same arrays at once; inlined from `release_arrays`, for a short latency
        if self.locked:
            context.locks.unlock(self.locked)
            self.locked = ()
        self.input = self.source = self.target = self.out = self.caller_out = self.input_changed = self.memory = None
        # settle, inlined: only the loop, or a thread in its place, ends it
        if not FOLLOWS[self.state][DONE]:
            self._refuse_transition(DONE)
        issued: IssuedFuture[T_co] = self  # which declares the state
        self._value, issued.state = value, DONE
        if self._threads is not None:
            self._notify_threads()
        if self._thread_callbacks is not None:
            self._run_thread_callbacks()
        # deliver, inlined where nothing waits for the stream
        if self.deadline_s is not None:
            context.deadlines.drop(self, self.deadline_s)
        if stream.queue or stream.in_flight is None or context.outstanding.draining:
            stream.on_operation_end(self, None)
        else:
            del context.outstanding.operations[self], stream.in_flight[self]
        # notify, inlined for tasks alone, the most frequent case: no callbacks, and no failure to be marked as seen
        waiters = self._waiters
        if waiters is not None or self._callbacks is not None:
            if get_ident() != context.thread:  # added after `end_wakes_loop` was false
                context.post_to_loop(self._notify)
            elif self._callbacks is not None:
                self._notify()
            else:
                self._waiters = None
                for task in waiters or ():
                    reschedule(task)

    def _unpack_or_return_message(self) -> bool:
        """Whether a receive ends otherwise than with its message; see `Message`."""
        return False

    @property
    def end_wakes_loop(self) -> bool:
        """Whether the end of the operation wakes tasks, callbacks or the stream, which only the loop may do."""
        return self._waiters is not None or self._callbacks is not None or self.port.stream.end_needs_loop

    def start_moving(self, scope: Cancellable | None) -> None:
        """Enter the state RUNNING, because the operation's bytes begin to move.

        Args:
            scope: Cancels the transfer; None if the transfer takes no time.
        """
        self.scope = scope
        if self.state is MATCHING:  # else it runs already, or is a receive that no task waits for any more
            self._enter(RUNNING)

    @property
    def is_unstarted(self) -> bool:
        """Whether the operation has not ended and its bytes do not move yet."""
        return self.scope is None and self.state < DONE

    def fail(self, failure: Failure) -> None:
        """End the operation with an error, which awaiting tasks raise; without any, it fails the rank.

        If bytes of the operation move, they are stopped first: it ends when they have stopped.
        """
        if self.state >= DONE:
            return
        if self._has_moving_bytes:
            if self.state is not STOPPING:
                self._enter(STOPPING)
                self._failure = failure  # the outcome once its bytes have stopped
                self._stop_bytes()
        else:
            self.context.flight.record_end(self.record, -self.context.now_ns())
            self.release_arrays()
            settle_and_deliver(self, None, failure)

    def expire(self, error: BaseException) -> None:
        """Fail because of a deadline; all present and later operations of the communicator fail, too."""
        if self.state < DONE:
            self.port.communicator.give_up_waiting(self, Failure(error))

    def abandon(self, error: BaseException) -> None:
        """Fail because the world has ended. Waiting tasks get the error before they are cancelled.

        The arrays are released once the operation's bytes have stopped moving.
        """
        self.port.communicator.forget_operation(self.seq)
        settle_and_deliver(self, None, Failure(error, seen=True))
        if self._has_moving_bytes:
            self._stop_bytes()
        else:
            self.release_arrays()

    @property
    def _has_moving_bytes(self) -> bool:
        return self.scope is not None

    def _stop_bytes(self) -> None:
        """Cancel the movement of bytes; `on_bytes_stopped` is called once they have stopped."""
        if self.scope is not None:
            self.scope.cancel()

    def on_bytes_stopped(self) -> None:
        """Record that the operation's bytes have stopped moving. If it has failed, it ends now."""
        self.scope = self.poll = None
        if self.state is STOPPING:
            assert self._failure is not None, "it stops because it has failed"
            self.fail(self._failure)
        elif self.state >= DONE:
            self.release_arrays()

    def _deliver(self) -> None:
        """Report the end to the stream and the deadlines, and wake the tasks and callbacks that wait."""
        if self.deadline_s is not None:
            self.context.deadlines.drop(self, self.deadline_s)
        self.port.stream.on_operation_end(self, self._failure)
        if self._waiters is not None or self._callbacks is not None:
            if get_ident() == self.context.thread:
                self._notify()
            else:
                self.context.post_to_loop(self._notify)

    # -- memory --------------------------------------------------------------------------------------------------
    def lock_arrays(self) -> None:
        """Make the operation's arrays read-only for everybody else until it ends.

        May be called again, for arrays that did not exist before.
        """
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
        """Whether the input is so small that it is copied as the operation starts, so that it may need no lock."""
        source = self.source
        return self.out is None and source is not None and source.nbytes <= PAYLOAD_BYTES

    def release_arrays(self) -> None:
        """Unlock the arrays, and drop all references to them, once no bytes move any more."""
        if self.locked:
            self.context.locks.unlock(self.locked)
            self.locked = ()
        self.input = self.source = self.target = self.out = self.caller_out = self.input_changed = self.memory = None


Operation: TypeAlias = CollectiveFuture[object]
