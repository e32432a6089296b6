"""Unfinished operations of a rank, their deadlines, and failures that no task was given."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Sequence
from functools import lru_cache
from math import inf, isfinite
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import trio

from transports import TransportError

from ..errors import DeadlineError, OverlapError, PeerError, UsageError, shown, text_of
from ..ranklist import listed
from ..timeline.recording import call_site
from .failure import Failure, FailureCause
from .future import Future, consumers, is_waited_for
from .settling import has_failed_nursery, settle
from .state import ADMITTED, BLOCKED, CANCELLING, DONE, QUEUED, STOPPING, UNWANTED, OperationState, TransitionError

if TYPE_CHECKING:
    from .context import RankContext

T_co = TypeVar("T_co", covariant=True)

CallSite: TypeAlias = FrameType | str | tuple[CodeType, int]
"""Origin of an operation: a frame, "file.py:41", or the `place` of another handle."""

TURNS = 3
"""Turns until a task that a program starts has run; a function that it calls may start one more."""

_CAUSES = 64  # causes from elsewhere that a rank remembers: mostly peers
_LISTED = 4  # unfinished operations of a rank in a report

# Texts of states without a wait for ranks; states without a text are not mentioned.
_DESCRIBED: dict[OperationState, str] = {
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

    runs_code = False  # Whether it is code of the program, which may have seen the error that it raises
    context: RankContext
    name: str  # Name given by the caller, or name of the operation or function
    place: tuple[CodeType, int]  # Origin as code and instruction: to find the line takes longer

    @property
    def call_site(self) -> str:
        """Origin as "file:line"."""
        return call_site(*self.place)

    @property
    def inputs(self) -> Iterable[Future[object]]:
        """Futures of the arguments, until their results are taken."""
        return ()

    @property
    def awaits(self) -> Sequence[int]:
        """World ranks that it waits for."""
        return ()

    @property
    def since_ns(self) -> int | None:
        """Start time of its present state; None if unknown."""
        return None

    def describe_state(self, now_ns: int) -> str:
        """Describe the present state; empty if there is nothing to report."""
        awaited = self.awaits
        if not awaited:
            return _DESCRIBED.get(self.state, "")
        waited_s = seconds_since(self.since_ns, now_ns)
        ranks = f"{'rank' if len(awaited) == 1 else 'ranks'} {listed(awaited)}"
        return f"has waited {waited_s} s for {ranks}" if waited_s else f"waits for {ranks}"

    def concerns(self, ranks: Container[int]) -> bool:
        """Whether any of some world ranks takes part in it."""
        return False

    def expire(self, error: BaseException) -> None:
        """Fail because of a deadline; the loop's thread only."""
        raise AssertionError("this is a bug in overlap: an operation without a deadline expired")

    def _report(self, error: TransitionError) -> None:
        """Put the label, line and rank into an error about its states, which ends the rank."""
        error.operation = f"{self.label} ({self.call_site}) of rank {self.context.rank}"
        self.context.report_bug(error)

    @abstractmethod
    def abandon(self, error: BaseException) -> None:
        """Fail because the world has ended."""


class Outstanding:
    """Unfinished operations of one rank.

    Attributes:
        operations: Operations in the order of issue.
        daemons: Tasks that end with the program.
        draining: Whether the rank waits for their ends.
        doing: Operations that were unfinished when the rank was abandoned, as text.
    """

    __slots__ = ("_causes", "_changed", "_cut_off", "_unseen", "daemons", "doing", "draining", "operations")

    def __init__(self) -> None:
        self.operations: dict[IssuedFuture[object], None] = {}
        self.daemons: dict[IssuedFuture[object], None] = {}
        self.draining: bool = False
        self.doing: list[str] = []
        self._cut_off = ""  # the first operation with a broken wire
        self._unseen: dict[FailureCause, Failure] = {}  # the first failure of each cause, oldest cause first
        self._causes: dict[object, FailureCause] = {}  # causes from elsewhere, by `_cause_key`
        self._changed = trio.Event()

    def record_end(self, operation: IssuedFuture[T_co], failure: Failure | None) -> None:
        """Keep the failure of an ended operation, in case it is never awaited, and wake `drain`."""
        if failure is not None:
            if not operation.runs_code:  # else only that code has seen the cause
                self._share_cause(failure)
            if not failure.seen:
                failure.cause.keep_in(self._unseen, failure)
            if isinstance(failure.error, TransportError):
                self._cut_off = self._cut_off or f"{operation.label} ({operation.call_site})"
        self._changed.set()

    def fail(self, failure: Failure) -> None:
        """Let `drain` raise an error that is no operation's."""
        failure.cause.keep_in(self._unseen, failure)
        self._changed.set()

    async def drain(self, waits: Callable[[IssuedFuture[object]], bool] | None = None) -> None:
        """Wait for all issued operations.

        Args:
            waits: Whether to wait for an operation; by default for all.

        Raises:
            BaseException: The first error that no task has seen.
        """
        self.draining = True
        while self.unseen or (any(map(waits, self.operations)) if waits else self.operations):
            if self.unseen:
                for _ in range(TURNS):  # a daemon that was woken with the error, or has just begun to wait, sees it
                    await trio.lowlevel.cancel_shielded_checkpoint()
                if (unseen := self.unseen) is not None:
                    unseen.mark_seen()
                    raise unseen.error
            else:
                self._changed = trio.Event()
                await self._changed.wait()

    async def daemons_ended(self) -> None:
        """Wait until no daemon runs any more."""
        while self.daemons:
            self._changed = trio.Event()
            await self._changed.wait()

    @property
    def unseen(self) -> Failure | None:
        """The oldest failure that no task or thread was given."""
        return next(iter(self._unseen.values()), None) if self._unseen else None

    def is_awaited(self, future: Future[Any], failure: Failure) -> bool:
        """Whether a task or thread of the program waits for a failed future, or for a user of it.

        A task of a failed nursery that has cancelled the await counts as well.

        Cost: one pass over the unfinished operations; only for errors of the rank's own code.
        """
        users: dict[Future[object], list[IssuedFuture[object]]] = {}
        pending: list[Future[Any]] = [future]
        for operation in list(self.operations):
            if operation._failure is failure:  # it has taken a failed input, and the loop has not delivered it
                pending.append(operation)
            for source in operation.inputs:
                users.setdefault(source, []).append(operation)
                if source._failure is failure:  # the input has failed with it and is over
                    pending.append(operation)
        visited: set[Future[Any]] = set()
        while pending:
            user = pending.pop()
            if user in visited:
                continue
            if is_waited_for(user) or has_failed_nursery(user):
                return True
            visited.add(user)
            pending += [*users.get(user, ()), *consumers(user)]
        return False

    def _share_cause(self, failure: Failure) -> None:
        """Give a failure from elsewhere the cause of earlier ones with the same key: one look at any is enough."""
        key = _cause_key(failure.error)
        if key is None:
            return
        earlier = self._causes.get(key)
        if earlier is None:
            if len(self._causes) >= _CAUSES:
                del self._causes[next(iter(self._causes))]
            self._causes[key] = failure.cause
        elif failure.seen:
            earlier.mark_seen()
        else:
            failure.cause = earlier

    def abandon(self, error: Callable[[], BaseException]) -> None:
        """Fail everything unfinished."""
        self.doing = self.doing or self.lines()
        for operation in reversed(list(self.operations)):  # otherwise the end of the first would start the next
            operation.abandon(error())

    def forsake(self, error: Callable[[], BaseException]) -> None:
        """Settle everything unfinished when no event loop runs any more: threads are notified, tasks are not."""
        for operation in list(self.operations):
            settle(operation, None, Failure(error(), seen=True))

    def lines(self, now_ns: int | None = None) -> list[str]:
        """Name the unfinished operations, oldest first; given the time, also their states."""
        operations = [operation for operation in list(self.operations) if operation.state < DONE]
        lines = []
        for operation in operations[:_LISTED]:
            state = "" if now_ns is None else operation.describe_state(now_ns)
            lines.append(f"{operation.label} ({operation.call_site}){'; ' if state else ''}{state}")
        rest = len(operations) - _LISTED
        return [*lines, f"and {rest} more"] if rest > 0 else lines

    def awaits(self) -> list[int]:
        """Return the world ranks that any operation waits for, ascending."""
        return sorted({rank for operation in list(self.operations) for rank in operation.awaits})

    def waiting_for(self, ranks: Container[int]) -> str:
        """Name an operation that waits for lost ranks, or one with a broken wire; "" without such an operation."""
        operations = list(self.operations)
        waiting = [operation for operation in operations if any(rank in ranks for rank in operation.awaits)]
        named = waiting or [operation for operation in operations if operation.concerns(ranks)]
        return f"{named[0].label} ({named[0].call_site})" if named else self._cut_off


def _cause_key(error: BaseException) -> object:
    """Return a value that is equal for errors of one cause from elsewhere; None for errors with their own cause."""
    if isinstance(error, DeadlineError):
        return text_of(error)
    if not isinstance(error, PeerError):
        return None
    cause = error.__cause__
    if isinstance(cause, DeadlineError):  # a later operation, failed by the one that took too long
        return text_of(cause)
    return type(error), error.culprit, "" if cause is None else f"{type(cause).__name__}: {text_of(cause)}"


def arose_here(error: BaseException) -> bool:
    """Whether an error is of a rank's own code, rather than of a peer, a disagreement, a deadline or a lost wire.

    A task that passes an operation's error on does not make it its own.
    """
    if isinstance(error, BaseExceptionGroup):
        return any(map(arose_here, error.exceptions))
    if isinstance(error, OverlapError):
        return isinstance(error, UsageError) and not error.agreed
    return not isinstance(error, TransportError)


def checked_name(name: object, otherwise: str) -> str:
    """Return the name given by a caller, or the default if it is empty.

    Raises:
        UsageError: If it is no text.
    """
    if not isinstance(name, str):
        raise UsageError(f"name: expected a text, got {shown(name)}")
    return name or otherwise


def code_place(site: CallSite) -> tuple[CodeType, int]:
    """Return a call site that is no frame as code and instruction.

    Raises:
        UsageError: If it is a text other than "file:line", or another type.
    """
    if isinstance(site, tuple) and len(site) == 2 and isinstance(site[0], CodeType):
        return site
    if not isinstance(site, str):
        raise UsageError(f'call_site: expected a frame or "file:line", got {shown(site)}')
    return _place_from_text(site)


@lru_cache(maxsize=1024)
def _place_from_text(text: str) -> tuple[CodeType, int]:
    """Return the code and instruction of a line given as "file:line"."""
    file, _, line = text.rpartition(":")
    if not file or not line.isdecimal():
        raise UsageError(f'call_site: expected a frame or "file:line", got {shown(text)}')
    return compile("", file, "exec").replace(co_firstlineno=int(line), co_linetable=b""), 0


def seconds_since(since_ns: int | None, now_ns: int) -> int:
    """Return the number of whole seconds since a time; 0 if the time is None."""
    return 0 if since_ns is None else max(0, now_ns - since_ns) // 10**9


def check_timeout(timeout_s: float) -> None:
    """Raise `UsageError` unless it is a positive, finite number of seconds."""
    number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not number or not timeout_s > 0 or not isfinite(timeout_s):
        raise UsageError(f"timeout_s: expected a positive number of seconds, or None, got {shown(timeout_s)}")


class Deadlines:
    """Deadlines of one rank; the loop's thread only.

    Programs give most operations the same timeout. Operations of one timeout are in order by themselves, and an ended
    one is dropped in one step: it may be long before its time.
    """

    def __init__(self) -> None:
        self._queues: dict[float, dict[IssuedFuture[object], float]] = {}
        self._next_s = inf
        self._scope: trio.CancelScope | None = None
        self._clock: trio.abc.Clock | None = None
        self._wait = trio.CancelScope()

    def add(self, operation: IssuedFuture[object], timeout_s: float) -> None:
        """Let an operation of the rank expire after a timeout from now on."""
        if self._clock is None:
            self._clock = trio.lowlevel.current_clock()
        # An operation that moves to another port keeps its deadline.
        due_s = self._queues.setdefault(timeout_s, {}).setdefault(operation, self._clock.current_time() + timeout_s)
        if due_s >= self._next_s:
            return
        self._next_s = due_s
        if self._scope is None:
            self._scope = trio.CancelScope()
            operation.context.spawn(self._watch, self._scope)
        else:
            self._wait.deadline = due_s

    def wakes(self, timeout_s: float | None) -> bool:
        """Whether adding an operation with such a timeout wakes or starts a task; any thread."""
        if timeout_s is None:
            return False
        return self._clock is None or self._clock.current_time() + timeout_s < self._next_s

    def drop(self, operation: IssuedFuture[object], timeout_s: float) -> None:
        """Drop an operation that has ended."""
        queue = self._queues.get(timeout_s)
        if queue is not None:
            queue.pop(operation, None)
            if not queue:
                del self._queues[timeout_s]

    def stop(self) -> None:
        """Drop all deadlines."""
        self._queues.clear()
        if self._scope is not None:
            self._scope.cancel()

    async def _watch(self, scope: trio.CancelScope) -> None:
        """Expire operations when their deadlines pass; an earlier deadline wakes it."""
        with scope:
            while True:
                with trio.CancelScope(deadline=self._next_s) as self._wait:
                    await trio.sleep_forever()
                self._expire(trio.current_time())

    def _expire(self, now_s: float) -> None:
        """Fail the operations with passed deadlines, and note the next deadline."""
        for timeout_s, queue in list(self._queues.items()):
            due = [operation for operation, due_s in queue.items() if due_s <= now_s]
            for operation in due:
                self.drop(operation, timeout_s)
                state = operation.describe_state(operation.context.now_ns())
                operation.expire(DeadlineError(operation.label, operation.call_site, timeout_s=timeout_s, state=state))
        self._next_s = min((next(iter(queue.values())) for queue in self._queues.values()), default=inf)
