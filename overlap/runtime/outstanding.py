"""Unfinished operations of a rank, their deadlines, and failures that no task was given."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import lru_cache
from math import inf, isfinite
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import trio

from transports import TransportError
from transports.failures import REPORT_BUG

from ..errors import DeadlineError, OverlapError, PeerError, UsageError, argument_text, error_text
from ..ranklist import format_rank_list
from ..timeline.recording import format_call_site
from .failure import Failure, FailureCause
from .future import Future, dependent_futures, is_waited_for
from .settling import has_failed_nursery, settle
from .state import ADMITTED, BLOCKED, CANCELLING, DONE, QUEUED, STOPPING, UNWANTED, OperationState, TransitionError

if TYPE_CHECKING:
    from .context import RankContext

T_co = TypeVar("T_co", covariant=True)

CallSite: TypeAlias = FrameType | str | tuple[CodeType, int]
"""Origin of an operation: a frame, "file.py:41", or the `place` of another handle."""

TURNS = 3
"""Turns of the event loop after which a task that the program has just started has run, and a task that it has started.
"""

_MOST_CAUSES = 64  # most causes in peers and deadlines that a rank remembers
_MOST_LISTED = 4  # most unfinished operations of a rank in a report

# Texts for operations that wait for no rank, by state; a state without a text is not mentioned.
_STATE_TEXTS: dict[OperationState, str] = {
    QUEUED: "is queued",
    ADMITTED: "is queued",
    BLOCKED: "waits for its input",
    UNWANTED: "was left by its await, and goes on",
    CANCELLING: "is being cancelled",
    STOPPING: "is being stopped",
}


class IssuedFuture(Future[T_co]):
    """Handle of a collective, a message, a compute or a task that a rank has issued."""

    __slots__ = ("context", "name", "place")

    runs_code = False  # Whether it runs code of the program, such as a compute or a task
    context: RankContext
    name: str  # Name given by the caller, or name of the operation or function
    place: tuple[CodeType, int]  # Origin as code and instruction: to find the line takes longer

    @property
    def call_site(self) -> str:
        """Origin as "file:line"."""
        return format_call_site(*self.place)

    @property
    def inputs(self) -> Iterable[Future[object]]:
        """Futures among the arguments, until their results are taken."""
        return ()

    @property
    def awaited_ranks(self) -> Sequence[int]:
        """World ranks that the operation waits for."""
        return ()

    @property
    def since_ns(self) -> int | None:
        """Instant since which it runs or waits for other ranks; None: it does neither, or that is unknown."""
        return None

    def describe_state(self, now_ns: int) -> str:
        """Return the present state in words, such as "waits for rank 3", or "" if there is nothing to report."""
        awaited = self.awaited_ranks
        if not awaited:
            return _STATE_TEXTS.get(self.state, "")
        waited_s = seconds_since(self.since_ns, now_ns)
        ranks = f"{'rank' if len(awaited) == 1 else 'ranks'} {format_rank_list(awaited)}"
        return f"has waited {waited_s} s for {ranks}" if waited_s else f"waits for {ranks}"

    def involves_any(self, ranks: Container[int]) -> bool:
        """Whether any of these world ranks takes part in the operation."""
        return False

    def expire(self, error: BaseException) -> None:
        """Fail because of a deadline. On the loop's thread only."""
        operation = f"{self.label} ({self.call_site}) of rank {self.context.rank}"
        raise AssertionError(f"{operation} has no deadline, and one has expired: {REPORT_BUG}")

    def _report_transition_error(self, error: TransitionError) -> None:
        """Add label, line and rank to the error, and let it end the rank."""
        error.operation = f"{self.label} ({self.call_site}) of rank {self.context.rank}"
        self.context.report_bug(error)

    @abstractmethod
    def abandon(self, error: BaseException) -> None:
        """Fail because the world has ended."""


class Outstanding:
    """Unfinished operations of one rank, and failures that no task or thread has seen.

    Attributes:
        operations: Unfinished operations in the order of issue; a dict with the values None serves as an ordered set.
        daemons: Tasks that end with the program, as such a set.
        draining: Whether the program has ended, and the rank waits for the operations.
        doing: Lines on the operations that were unfinished when the rank was abandoned.
    """

    __slots__ = (
        "_broken_wire_operation", "_causes", "_changed", "_unseen", "daemons", "doing", "draining", "operations"
    )  # fmt: skip

    def __init__(self) -> None:
        self.operations: dict[IssuedFuture[object], None] = {}
        self.daemons: dict[IssuedFuture[object], None] = {}
        self.draining: bool = False
        self.doing: list[str] = []
        self._broken_wire_operation = ""  # name and line of the first operation that failed with a broken wire
        self._unseen: dict[FailureCause, Failure] = {}  # the first failure of each unseen cause, oldest cause first
        self._causes: dict[object, FailureCause] = {}  # causes in peers and deadlines, by `_cause_key`
        self._changed = trio.Event()

    def record_end(self, operation: IssuedFuture[T_co], failure: Failure | None) -> None:
        """Wake `drain` after the end of an operation, and keep its failure until a task or thread sees it.

        Args:
            operation: The operation, which is no longer among the unfinished ones.
            failure: Failure of the operation; None: it went well, or another operation reports the failure.
        """
        if failure is not None:
            # computes and tasks may raise again an error that they have seen: that must not mark the cause as seen
            if not operation.runs_code:
                self._share_cause(failure)
            if not failure.seen:
                failure.cause.add_to_unseen(self._unseen, failure)
            if isinstance(failure.error, TransportError):
                self._broken_wire_operation = (
                    self._broken_wire_operation or f"{operation.label} ({operation.call_site})"
                )
        self._changed.set()

    def record_failure(self, failure: Failure) -> None:
        """Let `drain` raise the error of a failure that belongs to no operation."""
        failure.cause.add_to_unseen(self._unseen, failure)
        self._changed.set()

    async def drain(self, waits: Callable[[IssuedFuture[object]], bool] | None = None) -> None:
        """Wait until all issued operations have ended.

        Args:
            waits: Returns whether to wait for an operation; None: wait for all.

        Raises:
            BaseException: The oldest error that no task or thread has seen, as soon as there is one.
        """
        self.draining = True
        while self.unseen or (any(map(waits, self.operations)) if waits else self.operations):
            if self.unseen:
                for _ in range(TURNS):  # meanwhile a daemon that awaits the failed operation may see the error
                    await trio.lowlevel.cancel_shielded_checkpoint()
                if (unseen := self.unseen) is not None:
                    unseen.mark_seen()
                    raise unseen.error
            else:
                self._changed = trio.Event()
                await self._changed.wait()

    async def wait_for_daemons(self) -> None:
        """Wait until no daemon runs any more."""
        while self.daemons:
            self._changed = trio.Event()
            await self._changed.wait()

    @property
    def unseen(self) -> Failure | None:
        """The oldest failure that no task or thread has seen; None: there is none."""
        return next(iter(self._unseen.values()), None) if self._unseen else None

    def is_awaited(self, future: Future[Any], failure: Failure) -> bool:
        """Whether a task or thread waits for a failed future, or for an operation or future that has it as an input.

        An await that a failed nursery has cancelled counts, too.

        Args:
            future: The future that has failed.
            failure: Failure of that future.

        Cost: two passes over the unfinished operations; only for errors of the rank's own code.
        """
        operations = list(self.operations)
        users = _users_by_input(operations)
        # Search from the futures with this failure to those that use them, until a task or thread waits for one.
        pending: list[Future[Any]] = [future, *_operations_failed_with(failure, operations)]
        visited: set[Future[Any]] = set()
        while pending:
            user = pending.pop()
            if user in visited:
                continue
            if is_waited_for(user) or has_failed_nursery(user):
                return True
            visited.add(user)
            pending += [*users.get(user, ()), *dependent_futures(user)]
        return False

    def _share_cause(self, failure: Failure) -> None:
        """Let a failure whose reason is a peer or a deadline share the cause of earlier failures for the same reason.

        So all of them count as seen once one is. If this one has been seen, the earlier ones are marked as seen.
        """
        key = _cause_key(failure.error)
        if key is None:
            return
        earlier = self._causes.get(key)
        if earlier is None:
            if len(self._causes) >= _MOST_CAUSES:
                del self._causes[next(iter(self._causes))]
            self._causes[key] = failure.cause
        elif failure.seen:
            earlier.mark_seen()
        else:
            failure.cause = earlier

    def abandon_all(self, error: Callable[[], BaseException]) -> None:
        """Fail all unfinished operations because the world has ended; `error` makes a new error for each."""
        self.doing = self.doing or self.operation_lines()
        for operation in reversed(list(self.operations)):  # the last first: an end would start the operation after it
            operation.abandon(error())

    def settle_all(self, error: Callable[[], BaseException]) -> None:
        """Settle all unfinished operations when no event loop runs any more: waiting threads go on, tasks do not.

        Args:
            error: Makes a new error for each operation.
        """
        for operation in list(self.operations):
            settle(operation, None, Failure(error(), seen=True))

    def operation_lines(self, now_ns: int | None = None) -> list[str]:
        """Return a line for each of the oldest unfinished operations, and a line with the number of the others.

        Args:
            now_ns: The present instant, to describe the state of each; None: the lines have no states.
        """
        operations = [operation for operation in list(self.operations) if operation.state < DONE]
        lines = []
        for operation in operations[:_MOST_LISTED]:
            state = "" if now_ns is None else operation.describe_state(now_ns)
            lines.append(f"{operation.label} ({operation.call_site}){'; ' if state else ''}{state}")
        rest = len(operations) - _MOST_LISTED
        return [*lines, f"and {rest} more"] if rest > 0 else lines

    def awaited_ranks(self) -> list[int]:
        """Return the world ranks that any operation waits for, ascending."""
        return sorted({rank for operation in list(self.operations) for rank in operation.awaited_ranks})

    def describe_waiting_operation(self, ranks: Container[int]) -> str:
        """Return the name and line of an operation that waits for one of these world ranks, which are lost.

        If there is none: that of an operation in which one of them takes part; else of the first operation that failed
        with a broken wire; else "".
        """
        operations = list(self.operations)
        waiting = [operation for operation in operations if any(rank in ranks for rank in operation.awaited_ranks)]
        named = waiting or [operation for operation in operations if operation.involves_any(ranks)]
        return f"{named[0].label} ({named[0].call_site})" if named else self._broken_wire_operation


def _operations_failed_with(
    failure: Failure, operations: Iterable[IssuedFuture[object]]
) -> Iterator[IssuedFuture[object]]:
    """Yield the operations that have failed with `failure`, or will, because one of their inputs has."""
    for operation in operations:
        if operation._failure is failure or any(source._failure is failure for source in operation.inputs):
            yield operation


def _users_by_input(operations: Iterable[IssuedFuture[object]]) -> dict[Future[object], list[IssuedFuture[object]]]:
    users: dict[Future[object], list[IssuedFuture[object]]] = {}
    for operation in operations:
        for source in operation.inputs:
            users.setdefault(source, []).append(operation)
    return users


def _cause_key(error: BaseException) -> object:
    """Return a key that is equal for errors with the same cause in a peer, or of the same deadline; None for others.

    After a deadline, the operation that took too long and all operations after it fail for that one reason.
    """
    if isinstance(error, DeadlineError):
        return error_text(error)
    if not isinstance(error, PeerError):
        return None
    cause = error.__cause__
    if isinstance(cause, DeadlineError):  # a later operation, failed by the one that took too long
        return error_text(cause)
    return type(error), error.culprit, "" if cause is None else f"{type(cause).__name__}: {error_text(cause)}"


def is_own_error(error: BaseException) -> bool:
    """Whether the rank's own code has caused an error, so that it may end the rank at once, before it is awaited.

    * Errors of this package: only a `UsageError`, unless all ranks raise the same one (`agreed`).
    * Errors of a transport: no.
    * All other errors: yes. An exception group: if any error in it is.
    """
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_own_error, error.exceptions))
    if isinstance(error, OverlapError):
        return isinstance(error, UsageError) and not error.agreed
    return not isinstance(error, TransportError)


def checked_name(name: object, otherwise: str) -> str:
    """Return `name`, or `otherwise` if the name is "".

    Raises:
        UsageError: If the name is no text.
    """
    if not isinstance(name, str):
        raise UsageError(f"name: expected a text, got {argument_text(name)}")
    return name or otherwise


def code_place(site: CallSite) -> tuple[CodeType, int]:
    """Return a call site that is no frame as (code object, index of the instruction).

    Raises:
        UsageError: If the call site is a text other than "file:line", or of another type.
    """
    if isinstance(site, tuple) and len(site) == 2 and isinstance(site[0], CodeType):
        return site
    if not isinstance(site, str):
        raise UsageError(f'call_site: expected a frame or "file:line", got {argument_text(site)}')
    return _code_place_from_text(site)


@lru_cache(maxsize=1024)
def _code_place_from_text(text: str) -> tuple[CodeType, int]:
    """Return an empty code object with the file and line of `text`, "file:line", and the instruction 0."""
    file, _, line = text.rpartition(":")
    if not file or not line.isdecimal():
        raise UsageError(f'call_site: expected a frame or "file:line", got {argument_text(text)}')
    return compile("", file, "exec").replace(co_firstlineno=int(line), co_linetable=b""), 0


def seconds_since(since_ns: int | None, now_ns: int) -> int:
    """Return the number of whole seconds from one instant to another, or 0 if the first is None."""
    return 0 if since_ns is None else max(0, now_ns - since_ns) // 10**9


def check_timeout(timeout_s: float) -> None:
    """Raise `UsageError` unless `timeout_s` is a positive, finite number of seconds."""
    number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not number or not timeout_s > 0 or not isfinite(timeout_s):
        raise UsageError(f"timeout_s: expected a positive number of seconds, or None, got {argument_text(timeout_s)}")


class Deadlines:
    """Deadlines of the operations of one rank. On the loop's thread only, except `needs_earlier_wakeup`.

    There is a queue for each timeout, because programs give most operations the same one. A queue is in the order of
    its deadlines by itself, and an operation that ends before its deadline is dropped in one step.
    """

    def __init__(self) -> None:
        # By timeout: each operation with its deadline, in seconds of the loop's clock.
        self._queues: dict[float, dict[IssuedFuture[object], float]] = {}
        self._next_s = inf  # the earliest deadline that the task waits for
        self._scope: trio.CancelScope | None = None  # cancels the task; None: it has not been started
        self._clock: trio.abc.Clock | None = None
        self._wait = trio.CancelScope()  # scope of the task's present wait

    def add(self, operation: IssuedFuture[object], timeout_s: float) -> None:
        """Let an operation expire after a timeout from now on. The first call starts a task that waits.

        Args:
            operation: The operation.
            timeout_s: The timeout in seconds; `drop` needs the same number.
        """
        if self._clock is None:
            self._clock = trio.lowlevel.current_clock()
        # An operation that moves to another port keeps its deadline.
        due_s = self._queues.setdefault(timeout_s, {}).setdefault(operation, self._clock.current_time() + timeout_s)
        if due_s >= self._next_s:
            return
        self._next_s = due_s
        if self._scope is None:
            self._scope = trio.CancelScope()
            operation.context.spawn(self._wait_for_deadlines, self._scope)
        else:
            self._wait.deadline = due_s

    def needs_earlier_wakeup(self, timeout_s: float | None) -> bool:
        """Whether `add` with this timeout would start or wake the task. Any thread may call this."""
        if timeout_s is None:
            return False
        return self._clock is None or self._clock.current_time() + timeout_s < self._next_s

    def drop(self, operation: IssuedFuture[object], timeout_s: float) -> None:
        """Drop the deadline of an operation that was added with this timeout; nothing happens if there is none."""
        queue = self._queues.get(timeout_s)
        if queue is not None:
            queue.pop(operation, None)
            if not queue:
                del self._queues[timeout_s]

    def stop(self) -> None:
        """Drop all deadlines, and end the task that waits for them."""
        self._queues.clear()
        if self._scope is not None:
            self._scope.cancel()

    async def _wait_for_deadlines(self, scope: trio.CancelScope) -> None:
        """Expire operations when their deadlines pass. `add` wakes this task for an earlier deadline."""
        with scope:
            while True:
                with trio.CancelScope(deadline=self._next_s) as self._wait:
                    await trio.sleep_forever()
                # in virtual time the rounded deadline may lie a little after the present time
                self._expire_due(max(trio.current_time(), self._next_s))

    def _expire_due(self, now_s: float) -> None:
        """Fail the operations whose deadlines have passed, and set the next deadline."""
        for timeout_s, queue in list(self._queues.items()):
            due = [operation for operation, due_s in queue.items() if due_s <= now_s]
            for operation in due:
                self.drop(operation, timeout_s)
                state = operation.describe_state(operation.context.now_ns())
                operation.expire(DeadlineError(operation.label, operation.call_site, timeout_s=timeout_s, state=state))
        self._next_s = min((next(iter(queue.values())) for queue in self._queues.values()), default=inf)
