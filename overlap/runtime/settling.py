"""Settling: the state and the outcome of a future, and the tasks, threads and callbacks that wait for it.

A future ends in two steps. First it is *settled*, once: it gets its outcome (a value or a failure) and its last state,
and threads that wait for it go on. The event loop does that, or a thread in its place, a compute thread, or a thread
that cancels a compute. Then, perhaps a moment later, its end is *delivered* on the loop, or in its place: its stream
goes on, and tasks and callbacks are notified. `settle_and_deliver` does both.

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

# One lock for all futures: for settling, and for lists of waiting threads and callbacks. It is held only for a few
# instructions, so that it is no bottleneck, and a future needs no lock of its own.
LOCK: threading.Lock = threading.Lock()


class Onlooker(partial[None]):
    """A callback that does not use the result. A receive with no other callback or waiter counts as unwanted."""

    __slots__ = ()


class Flag(int):
    """A bool that can be called: `future.done` works, and `future.done()` as in `concurrent.futures`."""

    __slots__ = ()

    def __call__(self) -> bool:
        """Return the flag as a plain bool."""
        return bool(self)

    def __repr__(self) -> str:
        return str(bool(self))


_YES, _NO = Flag(1), Flag(0)


class Settling:
    """Base of futures: the state, the outcome, and the tasks, threads and callbacks that wait."""

    __slots__ = (
        "_callbacks", "_failure", "_nursery_failed", "_taken", "_thread_callbacks", "_threads", "_value", "_waiters",
        "state",
    )  # fmt: skip

    state: OperationState  # Changed by streams, engines and the functions below
    _nursery_failed: bool  # True if a failed nursery has cancelled an await of the future; else absent

    def __init__(self) -> None:
        self.state = ISSUED
        self._taken = False  # whether the result was given to a task, a thread, a callback or another operation
        self._value: object = None
        self._failure: Failure | None = None
        self._thread_callbacks: list[partial[None]] | None = None  # callbacks that the settling thread may run
        self._waiters: list[Task] | None = None  # tasks that await the future
        self._callbacks: list[Callable[[], None]] | None = None  # callbacks for the loop's thread
        self._threads: dict[threading.Lock, None] | None = None  # for each waiting thread a lock that it waits for

    @property
    def done(self) -> Flag:
        """Whether the operation has ended, with a result or an error; `done()` is the same."""
        return _YES if self.state >= DONE else _NO

    @property
    def label(self) -> str:
        """Name of the future in messages."""
        return "result"

    @property
    def _shown_state(self) -> OperationState:
        """State that is shown to programs."""
        return self.state

    def _state_owner(self) -> Future[Any]:
        """Return the future that has the state: itself, but for items of another result."""
        return cast("Future[Any]", self)

    def _prepare_for_use(self) -> None:
        """Let a receive that has left its lane take part again. Any thread may call this."""

    def _await_cancelled_elsewhere(self) -> None:
        """Handle a cancelled await of a task on another thread's loop. Any thread may call this."""

    def _enter(self, state: OperationState) -> None:
        """Change to a state that is no end (see `_settle`); raise `TransitionError` if it may not follow."""
        if not FOLLOWS[self.state][state]:
            self._refuse_transition(state)
        self.state = state

    def _refuse_transition(self, state: OperationState) -> NoReturn:
        error = TransitionError(self.state, state)
        self._report_transition_error(error)
        raise error

    def _settle(
        self, value: object, failure: Failure | None = None, before: OperationState = DONE, alone: bool = False
    ) -> bool:
        """Set the outcome, and notify the threads that wait. `_deliver` must follow, on the loop or in its place.

        Any thread may call this. If no other thread can settle the future (`alone`), no lock is needed, which halves
        the time. Return False if nothing was done, because the future was in the state `before` or a later one.
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
            # any end may follow MATCHING, the most frequent state here: no look at the table
            if self.state is not MATCHING and not FOLLOWS[self.state][state]:
                self._refuse_transition(state)
            self.state = state
        finally:
            if not alone:
                LOCK.release()
        if self._threads is not None:
            self._notify_threads()
        if self._thread_callbacks is not None:
            self._run_thread_callbacks()
        return True

    def _report_transition_error(self, error: TransitionError) -> None:
        """Add the label of this future to the error."""
        error.operation = self.label

    def _deliver(self) -> None:
        """Notify tasks and callbacks of a settled future, in the loop's thread or in one in its place.

        Subclasses that belong to a stream override this, to let the stream start its next operation first.
        """
        self._notify()

    def _notify_threads(self) -> None:
        with LOCK:
            waiting = list(self._threads or ())
        for ended in waiting:
            ended.release()

    def _run_thread_callbacks(self) -> None:
        """Run the callbacks that any thread may run, in the thread that has settled the future."""
        with LOCK:
            callbacks, self._thread_callbacks = self._thread_callbacks, None
        for callback in callbacks or ():
            callback()

    def _notify(self) -> None:
        """Wake the tasks that await the future, and call the callbacks."""
        if self._failure is not None and has_failed_nursery(self):
            self._failure.mark_seen()
        waiters, self._waiters = self._waiters, None
        if waiters is not None:
            for task in waiters:
                reschedule(task)
        if self._callbacks is not None:
            # a callback gets the result: no other receive may get it
            self._taken = self._taken or self._has_result_callbacks()
            with LOCK:
                callbacks, self._callbacks = self._callbacks, None
            for callback in callbacks or ():
                callback()

    def _add_callback(self, callback: Callable[[], None]) -> None:
        """The caller holds `LOCK`."""
        if self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def _has_result_callbacks(self) -> bool:
        return any(type(callback) is not Onlooker for callback in self._callbacks or ())

    def _remove_callback(self, callback: Callable[[], None]) -> bool:
        """Return False if it was removed before, as the end of the future does."""
        with LOCK:
            if self._callbacks is None or callback not in self._callbacks:
                return False
            self._callbacks.remove(callback)
            return True

    def _wait_in_thread(self, timeout: float | None = None) -> bool:
        """Wait until the future is settled; return False at the time limit of `timeout` seconds."""
        ended = threading.Lock()  # released at the end: no other primitive of threads costs less
        ended.acquire()
        with LOCK:
            self._threads = {**(self._threads or {}), ended: None}
        try:
            # A future settled before the lock was registered would never release it: look at the state first.
            self._prepare_for_use()  # from here on the result has a user
            if self.state < DONE:
                wait_for_lock(ended, timeout)
            return self.state >= DONE  # before the thread is removed: until then `undo_end` does nothing
        finally:
            with LOCK:
                self._threads.pop(ended, None)


# A signal that comes just before a wait does not end the wait: Python handles it after the wait only.
LONGEST_WAIT_S: float = 1.0
"""Longest time in seconds for which a thread waits in C code, without handling signals."""


@interruptible
def wait_for_lock(lock: threading.Lock, timeout_s: float | None = None) -> None:
    """Acquire a lock that another thread releases, or return at the time limit. An interrupt ends the wait.

    It does not return whether the lock was acquired: the caller looks at what the other thread set before the release.
    """
    over_s = inf if timeout_s is None else monotonic() + timeout_s
    while not lock.acquire(timeout=max(0.0, min(LONGEST_WAIT_S, over_s - monotonic()))):
        if monotonic() >= over_s:
            return


wait_until_settled: Callable[..., bool] = Settling._wait_in_thread
"""Wait in this thread until a future is settled; return False at the time limit in seconds."""

settle: Callable[..., bool] = Settling._settle
"""Set the outcome of a future; see `Settling._settle`."""


def deliver(future: Settling) -> None:
    """Notify the stream, tasks and callbacks of a settled future. On the loop's thread, or on one in its place."""
    future._deliver()


def settle_and_deliver(future: Settling, value: object, failure: Failure | None = None) -> bool:
    """Settle a future, unless it has ended, and deliver its end. On the loop's thread, or on one in its place.

    Only for a future that no other thread can settle.

    Args:
        future: The future.
        value: The result.
        failure: The failure; None: the operation went well.

    Returns:
        Whether the future has this outcome now; False if it had ended before.
    """
    if not future._settle(value, failure, alone=True):
        return False
    future._deliver()
    return True


def undo_end(future: Settling, state: OperationState) -> bool:
    """Put a future that is done back into `state`, unless something uses its result. Return whether it was put back.

    Any thread may call this. The lock makes sure that no other thread adds a callback in between, which is such a use.
    """
    with LOCK:
        if future._taken or future._threads or future._thread_callbacks or future._has_result_callbacks():
            return False
        future._enter(state)
        return True


def change_state(future: Settling, state: OperationState) -> bool:
    """Change the state of a future that has not ended; `state` is no end, either. Any thread may call this.

    Returns:
        Whether it is in that state now; False if it has ended.
    """
    with LOCK:
        if future.state >= DONE:
            return False
        if not FOLLOWS[future.state][state]:  # inlined from `_enter`, for a short latency
            future._refuse_transition(state)
        future.state = state
        return True


def has_failed_nursery(future: Settling) -> bool:
    """Whether the nursery of a task that awaited a future has failed, and cancelled the await."""
    return getattr(future, "_nursery_failed", False)
