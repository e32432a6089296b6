"""Settling: the state and the outcome of a future, and the tasks, threads and callbacks that wait for it.

A future ends in two steps. It is *settled* once, by the event loop or a thread in its place, by a compute thread, or by
a thread that cancels a compute: it gets its outcome and its last state, and threads that wait for it go on. Then its
end is *delivered* on the loop or in its place, perhaps a moment later: its stream goes on, and tasks and callbacks are
notified. `settle_and_deliver` does both. Before that it moves from state to state as `state.TABLE` allows.

The functions below the class are for streams, engines and worlds; programs use the methods of `Future`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn, cast

from trio.lowlevel import Task, reschedule

from ..errors import FutureCancelledError
from .failure import Failure
from .interrupts import interruptible
from .state import CANCELLED, DONE, FAILED, FOLLOWS, ISSUED, MATCHING, OperationState, TransitionError

if TYPE_CHECKING:
    from .future import Future

# Lock of all futures for settling, waiting and callbacks of several threads. Its holder does nothing else, so one lock
# for all futures is no bottleneck, and a future need not carry its own.
LOCK: threading.Lock = threading.Lock()


class Onlooker(partial[None]):
    """Callback that does not use the result: a receive with no other callback or waiter counts as unwanted."""

    __slots__ = ()


class Flag(int):
    """True or false, and callable for the same: `future.done`, or `future.done()` as in `concurrent.futures`."""

    __slots__ = ()

    def __call__(self) -> bool:
        """Return the flag as a plain bool."""
        return bool(self)

    def __repr__(self) -> str:
        return str(bool(self))


_YES, _NO = Flag(1), Flag(0)


class Settling:
    """State and outcome of a future, and the tasks, threads and callbacks that wait for it."""

    __slots__ = (
        "_anywhere", "_callbacks", "_failure", "_nursery_failed", "_taken", "_threads", "_value", "_waiters", "state",
    )  # fmt: skip

    state: OperationState  # Moved on by streams, engines and the functions below
    _nursery_failed: bool  # True if the nursery of a task that awaited it has failed; else absent

    def __init__(self) -> None:
        self.state = ISSUED
        self._taken = False  # the result was given to a task, a thread, a callback or another operation
        self._value: object = None
        self._failure: Failure | None = None
        self._anywhere: list[partial[None]] | None = None
        self._waiters: list[Task] | None = None
        self._callbacks: list[Callable[[], None]] | None = None
        self._threads: dict[threading.Lock, None] | None = None

    @property
    def done(self) -> Flag:
        """Whether the operation has ended, with a result or an error; `done()` is the same."""
        return _YES if self.state >= DONE else _NO

    @property
    def label(self) -> str:
        """Name of the future in messages."""
        return "result"

    @property
    def _present(self) -> OperationState:
        """State that programs see."""
        return self.state

    def _source(self) -> Future[Any]:
        """Return the future of the operation that settles this one."""
        return cast("Future[Any]", self)

    def _claim(self) -> None:
        """Note that the program uses the result, or passes it to another operation; any thread."""

    def _await_cancelled_elsewhere(self) -> None:
        """Note a cancelled await of a task on another thread's loop; any thread."""

    def _enter(self, state: OperationState) -> None:
        """Move to another state that is no end; for ends see `_settle`."""
        if not FOLLOWS[self.state][state]:
            self._refuse(state)
        self.state = state

    def _refuse(self, state: OperationState) -> NoReturn:
        """Raise the error of a state that may not follow the present one."""
        error = TransitionError(self.state, state)
        self._report(error)
        raise error

    def _settle(
        self, value: object, failure: Failure | None = None, before: OperationState = DONE, alone: bool = False
    ) -> bool:
        """Set the outcome, any thread; `_deliver` must follow on the loop's thread, or in its place.

        Args:
            value: The result.
            failure: The error, in place of a result.
            before: Settle only a future in a state before this one.
            alone: Whether no other thread can settle it: a lock takes as long as all else here.

        Returns:
            Whether the future has this outcome; False if its state is `before` or a later one.
        """
        state = DONE
        if failure is not None:
            state = CANCELLED if isinstance(failure.error, FutureCancelledError) else FAILED
        if not alone:
            LOCK.acquire()
        try:
            if self.state >= before:
                return False
            self._value, self._failure = value, failure
            if self.state is not MATCHING and not FOLLOWS[self.state][state]:  # most settle from there; see `_enter`
                self._refuse(state)
            self.state = state
        finally:
            if not alone:
                LOCK.release()
        if self._threads is not None:
            self._wake_threads()
        if self._anywhere is not None:
            self._call_anywhere()
        return True

    def _report(self, error: TransitionError) -> None:
        """Put the label into an error about the states of this future."""
        error.operation = self.label

    def _deliver(self) -> None:
        """Notify the stream, tasks and callbacks of a settled future; the loop's thread, or one in its place."""
        self._notify()

    def _wake_threads(self) -> None:
        """Release the threads that wait for this future."""
        with LOCK:
            waiting = list(self._threads or ())
        for ended in waiting:
            ended.release()

    def _call_anywhere(self) -> None:
        """Run the callbacks that any thread may run, in the thread that has settled the future."""
        with LOCK:
            callbacks, self._anywhere = self._anywhere, None
        for callback in callbacks or ():
            callback()

    def _notify(self) -> None:
        """Wake the tasks that wait for the future, and call its callbacks."""
        if self._failure is not None and has_failed_nursery(self):
            self._failure.mark_seen()
        waiters, self._waiters = self._waiters, None
        if waiters is not None:
            for task in waiters:
                reschedule(task)
        if self._callbacks is not None:
            self._taken = self._taken or self._has_callers()
            with LOCK:
                callbacks, self._callbacks = self._callbacks, None
            for callback in callbacks or ():
                callback()

    def _add_callback(self, callback: Callable[[], None]) -> None:
        """Add a callback for the end; the lock is held."""
        if self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def _has_callers(self) -> bool:
        """Whether any callback uses the result."""
        return any(type(callback) is not Onlooker for callback in self._callbacks or ())

    def _take_callback(self, callback: Callable[[], None]) -> bool:
        """Remove a callback; False if it is not there any more."""
        with LOCK:
            if self._callbacks is None or callback not in self._callbacks:
                return False
            self._callbacks.remove(callback)
            return True

    def _block(self, timeout: float | None = None) -> bool:
        """Wait in this thread until the future is settled; False at the time limit."""
        ended = threading.Lock()  # released at the end: no other primitive of threads costs less
        ended.acquire()
        with LOCK:
            self._threads = {**(self._threads or {}), ended: None}
        try:
            # A future settled before the lock was registered would never release it: look at the state first.
            self._claim()  # from here on the result has a user
            if self.state < DONE:
                wait_for_lock(ended, timeout)
        finally:
            with LOCK:
                self._threads.pop(ended, None)
        return self.state >= DONE


# A signal that comes just before a wait does not end it; the next instruction of Python handles it.
LONGEST_WAIT_S: float = 1.0
"""Longest wait of a thread without an instruction of Python."""


@interruptible
def wait_for_lock(lock: threading.Lock, timeout_s: float | None = None) -> None:
    """Acquire a lock that another thread releases, or return at the time limit; an interrupt ends the wait."""
    over_s = inf if timeout_s is None else monotonic() + timeout_s
    while not lock.acquire(timeout=max(0.0, min(LONGEST_WAIT_S, over_s - monotonic()))):
        if monotonic() >= over_s:
            return


wait_until_settled: Callable[..., bool] = Settling._block
"""Wait in this thread until a future is settled; return whether it is, at the time limit in seconds."""

settle: Callable[..., bool] = Settling._settle
"""Give a future its outcome; see `Settling._settle`."""


def deliver(future: Settling) -> None:
    """Notify the stream, tasks and callbacks of a settled future; the loop's thread, or one in its place."""
    future._deliver()


def settle_and_deliver(future: Settling, value: object, failure: Failure | None = None) -> bool:
    """Settle a future, unless it has ended, and deliver its end; the loop's thread, or one in its place."""
    if not future._settle(value, failure, alone=True):
        return False
    future._deliver()
    return True


def replace_end(future: Settling, state: OperationState) -> bool:
    """Replace the end of a future, unless the program has its result; return whether it was replaced; any thread."""
    with LOCK:
        if not future._taken:
            future._enter(state)
        return not future._taken


def advance(future: Settling, state: OperationState) -> bool:
    """Move a future that has not ended to another state that is no end; any thread."""
    with LOCK:
        before = future.state
        if before < DONE:
            if not FOLLOWS[before][state]:
                future._refuse(state)
            future.state = state
            return True
    return False


def has_failed_nursery(future: Settling) -> bool:
    """Whether the nursery of a task that awaited a future has failed, and cancelled the await."""
    return getattr(future, "_nursery_failed", False)
