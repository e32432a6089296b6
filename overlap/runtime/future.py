"""Handles of issued operations: `await` one for its result, or call `result()` in another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, overload

import numpy as np
import trio
from trio.lowlevel import Abort, Task, current_task, wait_task_rescheduled

from ..errors import FutureCancelledError, UsageError, shown
from .callbacks import await_in_asyncio, call_back
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
    times. Where the operation has ended already, an await checks for cancellation, and lets other tasks run from time
    to time: always in virtual time, at most once in half a millisecond in real time. Cancelling a task that awaits does
    not cancel the operation; a receive that nobody else waits for leaves its message to the next receive. `future[i]`
    is the future of an item of the result. Futures may be passed to `rank.compute` and to collectives in place of
    values.

        total = rank.all_reduce(x)  # in flight
        scaled = rank.compute(np.multiply, total, 0.5)  # starts when the sum exists
        print(await scaled)

    Threads that do not run its event loop, such as those of computes, use `result(timeout)`, `exception(timeout)`,
    `wait(timeout)` and `add_done_callback`, as in `concurrent.futures`. Programs on asyncio await it as well.
    """

    __slots__ = ()

    context: RankContext

    @property
    def failed(self) -> bool:
        """Whether the operation has ended with an error. A look at this does not count as a look at the error."""
        return self._present >= DONE and self._outcome()[1] is not None

    def cancelled(self) -> bool:
        """Whether it was cancelled, or failed because one of its inputs was; see `cancel`."""
        failure = self._outcome()[1] if self._present >= DONE else None
        return failure is not None and isinstance(failure.error, FutureCancelledError)

    def cancel(self) -> bool:
        """Withdraw the operation if that is still possible; an await of it raises `FutureCancelledError`; any thread.

        A receive that no message has met, a compute that has not begun and a task of `Rank.spawn` can be cancelled. A
        collective, a send and a compute that runs cannot: other ranks count on them, or a thread is in them. To stop
        waiting for one of these, cancel the task that awaits it.

        Returns:
            Whether it is cancelled, now or since an earlier call; False if it goes on or has ended.
        """
        return False

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
        self._settled(timeout)
        while not self._take():
            self._settled(timeout)
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
            _, failure = self._settled(timeout)
        if failure is None:
            return None
        failure.mark_seen()
        return failure.error

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end, good or bad, as `result` does.

        Args:
            timeout: Seconds to wait at most; by default as long as it takes.

        Returns:
            Whether it has ended.

        Raises:
            trio.WouldBlock: On the thread of an event loop, if the operation has not ended.
        """
        try:
            self._settled(timeout)
        except TimeoutError:
            return False
        return True

    def add_done_callback(self, callback: Callable[[Future[Any]], object]) -> None:
        """Call `callback(future)` once it is done: at once if it is, else on the event loop's thread.

            future.add_done_callback(lambda done: print(done.result()))

        Args:
            callback: Must not block. An error that it raises is logged, and changes nothing; KeyboardInterrupt and
                SystemExit end the world.
        """
        call = partial(call_back, callback, self)
        with LOCK:
            waits = self._present < DONE
            if waits:
                self._add_callback(call)
        self._claim()  # from here on the result has a user
        if not waits or (self.done and self._take_callback(call)):  # it ended before the callback was registered
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
        if task is None:
            yield from await_in_asyncio(self)
            while not self._take():
                yield from await_in_asyncio(self)
        elif self.state < DONE and not self._ends_at_once():
            waiters = self._waiters
            if waiters is None:
                waiters = self._waiters = []
            waiters.append(task)
            try:  # inlined await, without a name for the trap function, which holds this future
                yield from wait_task_rescheduled(partial(self._abort_await, waiters, task)).__await__()  # noqa: ASYNC105
            except trio.Cancelled as cancelled:
                self._record_failed_nursery(cancelled)
                raise
        elif self._failure is None:
            try:
                yield from self.context.pause().__await__()
            except BaseException:
                self._await_cancelled()
                raise
        else:
            yield from self._await_failed(self._failure)
        if self._failure is None:
            self._taken = True
            return self._value  # type: ignore[return-value]
        try:
            return self.result()
        finally:
            del self  # see `result`

    def _abort_await(self, waiters: list[Task], task: Task, _: object) -> Abort:
        """Remove a cancelled task from the waiters."""
        waiters.remove(task)
        self._await_cancelled()
        return Abort.SUCCEEDED

    def _await_failed(self, failure: Failure) -> Generator[object, object, None]:
        """Pass a checkpoint. The loop may not have delivered the failure yet, and checks then for awaiting tasks."""
        failure.awaiters += 1
        try:
            yield from self.context.pause().__await__()
        except trio.Cancelled as cancelled:
            self._record_failed_nursery(cancelled)
            raise
        finally:
            failure.awaiters -= 1

    def _await_cancelled(self) -> None:
        """Note that a task that awaited it was cancelled; the loop's thread only."""

    def _record_failed_nursery(self, cancelled: trio.Cancelled) -> None:
        """Count its error as seen if a failed nursery has cancelled an await of it.

        The error is one more error of that nursery, which has raised in the program.
        """
        if cancelled.source == "nursery":
            self._nursery_failed = True
            if self._failure is not None:
                self._failure.mark_seen()

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lstrip('_')} {self.label}: {self._present.word}>"

    # -- for the functions below -------------------------------------------------------------------------------------

    def _ends_at_once(self) -> bool:
        """Whether it has ended, after an attempt to end it; called before a task waits for it.

        Raises:
            UsageError: If the task runs on another loop than the future's.
        """
        if self.context.thread != threading.get_ident():
            raise UsageError(f"{self.label} belongs to another world; wait for its result() in a thread")
        return False

    def _settled(self, timeout: float | None) -> tuple[object, Failure | None]:
        """Wait for the end in a thread, and return the outcome; refuse to wait in the event loop."""
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout >= 0):
            raise UsageError(f"timeout: expected a number of seconds from 0, or None, got {shown(timeout)}")
        self._claim()
        if not self.done:
            if trio.lowlevel.in_trio_run():
                raise trio.WouldBlock(
                    f"{self.label} has not ended; await its future: waiting here would stop the event loop"
                )
            if not self._block(timeout):
                raise TimeoutError(f"{self.label} has not ended within {timeout:g} s")
        return self._outcome()

    def _outcome(self) -> tuple[object, Failure | None]:
        return self._value, self._failure

    def _take(self) -> bool:
        """Note that the program takes the result; False if another receive has got it in the meantime; any thread."""
        source = self._source()
        with LOCK:
            if source.state < DONE:
                return False
            source._taken = True
            return True


class Item(Future[object]):
    """Future of one item of another future's result; it has no state of its own."""

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
    def _present(self) -> OperationState:
        whole = self._whole._present
        return FAILED if whole is DONE and self._outcome()[1] is not None else whole

    def _outcome(self) -> tuple[object, Failure | None]:
        """Return one item of the other future's result, or the failure."""
        whole, failure = self._whole._outcome()
        if failure is not None:
            return None, failure
        try:
            return whole[self._index], None  # type: ignore[index]
        except Exception as error:
            return None, Failure(error)

    def _add_callback(self, callback: Callable[[], None]) -> None:
        self._whole._add_callback(callback)

    def _take_callback(self, callback: Callable[[], None]) -> bool:
        return self._whole._take_callback(callback)

    def _block(self, timeout: float | None = None) -> bool:
        return self._whole._block(timeout)

    def _source(self) -> Future[Any]:
        return self._whole._source()

    def _claim(self) -> None:
        self._whole._claim()

    def cancel(self) -> bool:
        """Withdraw the operation of the whole result; see `Future.cancel`."""
        return self._whole.cancel()

    def cancelled(self) -> bool:
        """Whether the operation of the whole result was cancelled."""
        return self._whole.cancelled()

    def __await__(self) -> Generator[object, object, object]:
        yield from self._whole.__await__()
        return self.result()


# -- for streams, engines and worlds ---------------------------------------------------------------------------------


def outcome(future: Future[Any]) -> tuple[object, Failure | None]:
    """Return the value and the failure of a settled future, for an operation that uses it."""
    future._source()._taken = True
    return future._outcome()


def is_elsewhere(future: Future[Any], thread: int) -> bool:
    """Whether an unsettled future belongs to a world on another thread's event loop."""
    return not future.done and future.context.thread != thread


def is_waited_for(future: Future[Any]) -> bool:
    """Whether a task or a thread of the program waits for a future itself; the loop's thread only."""
    failure = future._failure
    return bool(future._waiters or future._threads or (failure is not None and failure.awaiters))


def source_of(future: Future[Any]) -> Future[object]:
    """Return the future of the operation that settles another one: itself, or the whole of an item."""
    return future._source()


def consumers(future: Future[Any]) -> Iterator[Future[Any]]:
    """Yield the futures with a callback at the end of another one; the loop's thread only."""
    for callback in future._callbacks or ():
        consumer = getattr(getattr(callback, "func", callback), "__self__", None)
        if isinstance(consumer, Future):
            yield consumer
