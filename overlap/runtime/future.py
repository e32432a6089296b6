"""Handles of issued operations: `await` one for its result, or call `result()` in another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, overload

import numpy as np
import trio
from trio.lowlevel import Abort, Task, current_task, wait_task_rescheduled

from ..errors import FutureCancelledError, UsageError, argument_text
from .callbacks import await_in_asyncio, call_and_log_errors
from .failure import Failure
from .not_a_value import NotAValue
from .settling import LOCK, Flag, Settling
from .state import DONE, FAILED, OperationState

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .context import RankContext

T_co = TypeVar("T_co", covariant=True)
K = TypeVar("K")
V = TypeVar("V")
S = TypeVar("S", bound=np.generic)


class Future(Settling, NotAValue, Generic[T_co]):
    """The result of an operation that has been issued and may not have run yet.

    `await future` returns the result or raises the operation's error; any number of tasks may await it, any number of
    times. If the operation has ended already, an await is still a checkpoint: it checks for cancellation, and lets
    other tasks run (in real time at most every half millisecond). Cancelling a task that awaits does not cancel the
    operation; a receive that nobody else waits for leaves its message to the next receive. `future[i]` is the future of
    an item of the result. Futures may be passed to `rank.compute` and to collectives in place of values.

        total = rank.all_reduce(x)  # in flight
        scaled = rank.compute(np.multiply, total, 0.5)  # starts when the sum exists
        print(await scaled)

    Other threads than the event loop's, such as those of computes, use `result(timeout)`, `exception(timeout)`,
    `wait(timeout)` and `add_done_callback`, as in `concurrent.futures`. Tasks of asyncio may await a future, too.
    """

    __slots__ = ()

    context: RankContext

    @property
    def failed(self) -> bool:
        """Whether the operation has ended with an error. Reading this does not count as seeing the error."""
        return self._shown_state >= DONE and self._outcome()[1] is not None

    def cancelled(self) -> bool:
        """Whether the operation was cancelled, or has failed because one of its inputs was cancelled; see `cancel`."""
        failure = self._outcome()[1] if self._shown_state >= DONE else None
        return failure is not None and isinstance(failure.error, FutureCancelledError)

    def cancel(self) -> bool:
        """Cancel the operation if that is still possible. Then an await of it raises `FutureCancelledError`.

        Any thread may call it.

        A receive that no message has met, a compute that has not begun and a task of `Rank.spawn` can be cancelled. A
        collective, a send and a compute that runs cannot: other ranks count on them, or a thread is in them. To stop
        waiting for one of these, cancel the task that awaits it.

        Returns:
            Whether it is cancelled, now or since an earlier call; False if it goes on or has ended.
        """
        return False  # as a default: the futures that can be cancelled have a method of their own

    def result(self, timeout: float | None = None) -> T_co:
        """Return the result, waiting for it in a thread that runs no event loop.

        Args:
            timeout: Seconds to wait at most; by default as long as it takes.

        Raises:
            trio.WouldBlock: On the thread of an event loop, if the operation has not ended: waiting there would stop
                the loop that ends it. `await` the future instead.
            TimeoutError: If it has not ended in time.
            Exception: The error of the operation, if it failed.
        """
        self._wait_for_outcome(timeout)
        while not self._take_result():  # a receive has given its message to another receive just now
            self._wait_for_outcome(timeout)
        value, failure = self._outcome()
        if failure is None:
            return cast(T_co, value)
        failure.mark_seen()
        try:
            raise failure.error
        finally:
            del self, failure  # the traceback of the error holds this frame, a reference cycle

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error of the operation, waiting for its end as `result` does.

        Args:
            timeout: Seconds to wait at most; by default as long as it takes.

        Returns:
            The error; None if it went well.

        Raises:
            trio.WouldBlock: On the thread of an event loop, if the operation has not ended.
            TimeoutError: If it has not ended in time.
        """
        if timeout is None and self.state >= DONE:  # the usual case of a thread that has waited already
            failure = self._failure
        else:
            _, failure = self._wait_for_outcome(timeout)
        if failure is None:
            return None
        failure.mark_seen()
        return failure.error

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the operation has ended, with a result or an error, as `result` does.

        Args:
            timeout: Seconds to wait at most; by default as long as it takes.

        Returns:
            Whether it has ended.

        Raises:
            trio.WouldBlock: On the thread of an event loop, if the operation has not ended.
        """
        try:
            self._wait_for_outcome(timeout)
        except TimeoutError:
            return False
        return True

    def add_done_callback(self, callback: Callable[[Future[Any]], object]) -> None:
        """Call `callback(future)` once the future is done: at once if it is, else on the event loop's thread.

            future.add_done_callback(lambda done: print(done.result()))

        Args:
            callback: Must not block. An error that it raises is logged, and changes nothing; KeyboardInterrupt and
                SystemExit end the world.
        """
        call = partial(call_and_log_errors, callback, self)
        with LOCK:
            self._add_callback(call)
        self._prepare_for_use()  # from here on the result has a user
        if self.done and self._remove_callback(call):  # else the end calls it
            call()

    @overload
    def __getitem__(self: Future[tuple[V, *tuple[object, ...]]], index: Literal[0]) -> Future[V]: ...

    @overload
    def __getitem__(self: Future[tuple[object, V, *tuple[object, ...]]], index: Literal[1]) -> Future[V]: ...

    @overload
    def __getitem__(self: Future[NDArray[S]], index: slice) -> Future[NDArray[S]]: ...

    @overload
    def __getitem__(self: Future[Mapping[K, V]], index: K) -> Future[V]: ...

    @overload
    def __getitem__(self: Future[Sequence[V]], index: int) -> Future[V]: ...

    @overload
    def __getitem__(self, index: object) -> Future[object]: ...

    def __getitem__(self, index: object) -> Future[object]:
        """Return the future of `result[index]`."""
        return Item(self, index)

    def __await__(self) -> Generator[object, object, T_co]:
        try:
            task = current_task()
        except RuntimeError:  # no loop of Trio runs here
            task = None
        # four cases: on asyncio; on Trio before the end; after a good end, a checkpoint; after a failure, a checkpoint
        if task is None:
            yield from await_in_asyncio(self)
            while not self._take_result():
                yield from await_in_asyncio(self)
        elif self.state < DONE and not self._poll_for_end():
            waiters = self._waiters
            if waiters is None:
                waiters = self._waiters = []
            waiters.append(task)
            try:  # no name for the abort function: a frame in a traceback would keep this future alive by it
                yield from wait_task_rescheduled(partial(self._abort_await, waiters, task)).__await__()  # noqa: ASYNC105
            except trio.Cancelled as cancelled:
                self._record_failed_nursery(cancelled)
                raise
        elif self._failure is None:
            try:
                yield from self.context.pause().__await__()
            except BaseException:
                self._on_await_cancelled()
                raise
        else:
            yield from self._pause_before_error(self._failure)
        if self._failure is None:
            self._taken = True
            return self._value  # type: ignore[return-value]
        try:
            return self.result()
        finally:
            del self  # see `result`

    def _abort_await(self, waiters: list[Task], task: Task, _: object) -> Abort:
        """Remove a cancelled task from the waiters, and let Trio cancel it. Trio calls this, with a third argument."""
        waiters.remove(task)
        self._on_await_cancelled()
        return Abort.SUCCEEDED

    def _pause_before_error(self, failure: Failure) -> Generator[object, object, None]:
        """Pass a checkpoint before the error is raised, and count this task as one that awaits the error.

        The loop may be about to deliver the failure, which ends the rank if no task awaits it.
        """
        failure.awaiters += 1
        try:
            yield from self.context.pause().__await__()
        except trio.Cancelled as cancelled:
            self._record_failed_nursery(cancelled)
            raise
        finally:
            failure.awaiters -= 1

    def _on_await_cancelled(self) -> None:
        """Handle the cancellation of a task that awaited the future. On the loop's thread only."""

    def _record_failed_nursery(self, cancelled: trio.Cancelled) -> None:
        """If a failed nursery has cancelled an await of the future, count the future's error as seen, now or later.

        The nursery raises an error in the program anyway, so that this one need not fail the rank.
        """
        if cancelled.source == "nursery":
            self._nursery_failed = True
            if self._failure is not None:
                self._failure.mark_seen()

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lstrip('_')} {self.label}: {self._shown_state.word}>"

    # -- for the functions below -------------------------------------------------------------------------------------

    def _poll_for_end(self) -> bool:
        """Return whether the future has ended: False here, but subclasses may poll before the task sleeps.

        Raises `UsageError` if the task that is about to wait runs on another loop than the future's.
        """
        if self.context.thread != threading.get_ident():
            advice = "call `await trio.to_thread.run_sync(future.result)`"
            raise UsageError(f"{self.label} belongs to another world; {advice}")
        return False  # nothing to poll here

    def _wait_for_outcome(self, timeout: float | None) -> tuple[object, Failure | None]:
        """Wait in a thread until the future has ended, and return its outcome; for errors see `result`.

        A `timeout` that is no number of seconds from 0 is a `UsageError`.
        """
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout >= 0):
            raise UsageError(f"timeout: expected a number of seconds from 0, or None, got {argument_text(timeout)}")
        self._prepare_for_use()
        if not self.done:
            if trio.lowlevel.in_trio_run():
                raise trio.WouldBlock(
                    f"{self.label} has not ended, and waiting here would stop the event loop; await its future, or "
                    "wait in a thread that runs no event loop"
                )
            if not self._wait_in_thread(timeout):
                raise TimeoutError(f"{self.label} has not ended within {timeout:g} s; pass a longer timeout")
        return self._outcome()

    def _outcome(self) -> tuple[object, Failure | None]:
        """Return (value, None) or (None, failure) of a future that has ended."""
        return self._value, self._failure

    def _take_result(self) -> bool:
        """Record that the program takes the result. Return False if it was given to another receive in the meantime."""
        source = self._state_owner()
        with LOCK:
            if source.state < DONE:
                return False
            source._taken = True
            return True


class Item(Future[object]):
    """Future of `result[index]` of another future. It has no state of its own.

    Args:
        whole: The other future.
        index: Index or key. If `result[index]` raises an error, that is the failure of this future.
    """

    context: RankContext
    _whole: Future[Any]
    _index: object
    __slots__ = tuple(__annotations__)

    def __init__(self, whole: Future[object], index: object) -> None:
        super().__init__()
        self.context, self._whole, self._index = whole.context, whole, index

    @property
    def done(self) -> Flag:
        """Whether the operation of the whole result has ended."""
        return self._whole.done

    @property
    def label(self) -> str:
        """Name of the item in messages."""
        return f"item {self._index!r} of {self._whole.label}"

    @property
    def _shown_state(self) -> OperationState:
        whole = self._whole._shown_state
        return FAILED if whole is DONE and self._outcome()[1] is not None else whole

    def _outcome(self) -> tuple[object, Failure | None]:
        """Return (item, None) or (None, failure)."""
        whole, failure = self._whole._outcome()
        if failure is not None:
            return None, failure
        try:
            return whole[self._index], None  # type: ignore[index]
        except Exception as error:
            return None, Failure(error)

    def _add_callback(self, callback: Callable[[], None]) -> None:
        self._whole._add_callback(callback)

    def _remove_callback(self, callback: Callable[[], None]) -> bool:
        return self._whole._remove_callback(callback)

    def _wait_in_thread(self, timeout: float | None = None) -> bool:
        return self._whole._wait_in_thread(timeout)

    def _state_owner(self) -> Future[Any]:
        return self._whole._state_owner()

    def _prepare_for_use(self) -> None:
        self._whole._prepare_for_use()

    def cancel(self) -> bool:
        """Cancel the operation of the whole result; see `Future.cancel`."""
        return self._whole.cancel()

    def __await__(self) -> Generator[object, object, object]:
        yield from self._whole.__await__()
        return self.result()


# -- for streams, engines and worlds ---------------------------------------------------------------------------------


def take_outcome(future: Future[Any]) -> tuple[object, Failure | None]:
    """Return (value, None) or (None, failure) of a settled future, for an operation that has it as an input.

    The result counts as used from now on: a receive no longer gives it to another receive.
    """
    future._state_owner()._taken = True  # an item has no state of its own
    return future._outcome()


def belongs_to_other_world(future: Future[Any], thread: int) -> bool:
    """Whether an unsettled future belongs to a world on another thread's event loop."""
    return not future.done and future.context.thread != thread


def is_waited_for(future: Future[Any]) -> bool:
    """Whether a task or thread of the program waits for this future, not for one made from it. Loop's thread only."""
    failure = future._failure
    return bool(future._waiters or future._threads or (failure is not None and failure.awaiters))


def has_waiting_thread(future: Future[Any]) -> bool:
    """Whether a thread of the program waits for a future, or for one that depends on it. On the loop's thread only."""
    return bool(future._threads) or any(map(has_waiting_thread, dependent_futures(future)))


def source_of(future: Future[Any]) -> Future[object]:
    """Return the future whose operation settles `future`: for an `Item` that of the whole result, else itself."""
    return future._state_owner()


def dependent_futures(future: Future[Any]) -> Iterator[Future[Any]]:
    """Yield the futures that depend on `future`: they have a callback at its end. On the loop's thread only."""
    for callback in future._callbacks or ():
        # the object of a method, or of a method in a partial
        consumer = getattr(getattr(callback, "func", callback), "__self__", None)
        if isinstance(consumer, Future):
            yield consumer
