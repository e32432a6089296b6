"""Handles of issued operations: `await` one for its result, or ask for its `result()` in another thread.

A future ends in two steps, whatever it stands for. It is *settled* once, by the event loop or a thread that has its
place, by a compute thread, or by whoever cancels a compute: it has its outcome and its last state, and threads that
wait for it go on. Then its end is *delivered* on the loop or in its place, perhaps a moment later: its stream goes on,
and tasks and callbacks hear of it. `conclude` does both. Before that it moves from state to state as `state.TABLE`
allows.

The functions below the classes are for streams, engines and worlds; programs use the methods.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from numbers import Number
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar, cast, overload

import numpy as np
import trio
from trio.lowlevel import Abort, Task, checkpoint, current_task, reschedule, wait_task_rescheduled

from ..errors import FutureCancelledError, UsageError, shown
from .state import CANCELLED, DONE, FAILED, FOLLOWS, ISSUED, State, TransitionError, transition

if TYPE_CHECKING:
    from numpy.typing import NDArray

T_co = TypeVar("T_co", covariant=True)
K = TypeVar("K")
V = TypeVar("V")
S = TypeVar("S", bound=np.generic)

_VALUES = (Number, np.generic, np.ndarray)
_FIRST = "await it first, or pass it to rank.compute or a collective"

# Guards a future against several threads: settling, waiting, callbacks. Its holder does nothing else, so one lock for
# all futures is no bottleneck, and a future need not carry its own.
_LOCK = threading.Lock()


class Cause:
    """Cause of failed operations: one failed compute, or one loss that many operations met.

    Attributes:
        seen: Whether any task or thread was given the error of an operation that failed of it.
    """

    __slots__ = ("_unseen", "seen")

    def __init__(self, *, seen: bool = False) -> None:
        self.seen: bool = seen
        self._unseen: dict[Cause, Failure] | None = None

    def keep_in(self, unseen: dict[Cause, Failure], failure: Failure) -> None:
        """Keep one of its failures among the unseen ones of a rank, until it is seen."""
        self._unseen = unseen
        unseen.setdefault(self, failure)

    def note_seen(self) -> None:
        """Note that a program was given an error of it; the rank keeps its failure no longer."""
        self.seen = True
        unseen, self._unseen = self._unseen, None
        if unseen is not None:
            unseen.pop(self, None)


class Failure:
    """One error, shared by the future of the operation that raised it and by futures that depended on it.

    Attributes:
        error: The exception as raised.
        awaiters: Tasks that await it at a checkpoint.
        cause: What made the operation fail, which other failures may share.
        prompt: Whether it ends its rank at once if nobody awaits it: an error of the rank's own code.
    """

    __slots__ = ("awaiters", "cause", "error", "prompt")

    def __init__(self, error: BaseException, *, seen: bool = False, prompt: bool = False) -> None:
        self.error: BaseException = error
        self.awaiters: int = 0
        self.cause: Cause = Cause(seen=seen)
        self.prompt: bool = prompt

    @property
    def seen(self) -> bool:
        """Whether any task or thread was given it, or another error of its cause."""
        return self.cause.seen

    def note_seen(self) -> None:
        """Note that a task or thread was given it; an unseen failure fails its rank at the end."""
        self.cause.note_seen()


class Onlooker(partial[None]):
    """A callback that makes no use of the result: nobody but it waits for a receive that has no other."""

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


class Future(Generic[T_co]):
    """The result of an operation that has been issued and may not have run yet.

    `await future` returns the result or raises the operation's error; any number of tasks may await it, any number of
    times. Where the operation has ended already, an await checks for cancellation, and lets other tasks run from time
    to time: always in virtual time, at most once in half a millisecond in real time. Cancelling a task that awaits does
    not cancel the operation; a receive that nobody else waits for leaves its message to the next receive. `future[i]`
    is the future of an item of the result. Futures may be passed to `rank.compute` and to collectives in place of
    values.

        total = rank.all_reduce(x)  # under way
        scaled = rank.compute(np.multiply, total, 0.5)  # begins when the sum is there
        print(await scaled)

    Threads that do not run its event loop, such as those of computes, use `result(timeout)`, `exception(timeout)`,
    `wait(timeout)` and `add_done_callback`, as in `concurrent.futures`. Programs on asyncio await it as well.
    """

    __slots__ = (
        "_anywhere", "_callbacks", "_failure", "_nursery_failed", "_taken", "_threads", "_value", "_waiters", "state",
    )  # fmt: skip

    state: State  # Streams, engines and the ends below move it on
    _nursery_failed: bool  # of a task that awaited it; there if it is so

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
        """Whether the operation has ended, well or badly; `done()` says the same."""
        return _YES if self.state >= DONE else _NO

    @property
    def failed(self) -> bool:
        """Whether the operation has ended with an error. To ask does not count as having been given the error."""
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

    @property
    def label(self) -> str:
        """Its name in messages."""
        return "result"

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
        failure.note_seen()
        try:
            raise failure.error
        finally:
            del self, failure  # the traceback of the error has this frame: it would keep itself alive

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
        _, failure = self._settled(timeout)
        if failure is None:
            return None
        failure.note_seen()
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
            callback: Must not block. An error that it raises is logged, and changes nothing.
        """
        call = partial(_call_back, callback, self)
        with _LOCK:
            waits = self._present < DONE
            if waits:
                self._add_callback(call)
        self._claim()  # from here on it has a user
        if not waits or (self.done and self._take_callback(call)):  # it ended before it could know of the callback
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
        return _Item(self, index)

    def __await__(self) -> Generator[object, object, T_co]:
        try:
            task = current_task()
        except RuntimeError:  # no loop of Trio runs here
            task = None
        if task is None:
            yield from _await_in_asyncio(self)
            while not self._take():
                yield from _await_in_asyncio(self)
        elif self.state >= DONE:
            yield from self._await_ended()
        elif self._loop_thread() not in (None, threading.get_ident()):
            raise UsageError(f"{self.label} belongs to another world; wait for its result() in a thread")
        elif self._ends_at_once():
            yield from self._await_ended()
        else:
            waiters = self._waiters
            if waiters is None:
                waiters = self._waiters = []
            waiters.append(task)
            self._is_awaited()

            def abort(_: object) -> Abort:
                waiters.remove(task)
                self._await_cancelled()  # noqa: F821 (deleted below, once nothing can be cancelled any more)
                return Abort.SUCCEEDED

            try:
                yield from wait_task_rescheduled(abort).__await__()  # noqa: ASYNC105 (driven by hand)
            except trio.Cancelled as cancelled:
                self._note_failed_nursery(cancelled)
                raise
        if self._failure is None:
            self._taken = True
            return self._value  # type: ignore[return-value]
        try:
            return self.result()
        finally:
            del self  # see `result`

    def _await_ended(self) -> Generator[object, object, None]:
        """Pass a checkpoint; the loop may not have heard of a failure, and asks then whether a task awaits it."""
        failure = self._failure
        if failure is None:
            try:
                yield from self._pause().__await__()
            except BaseException:
                self._await_cancelled()
                raise
            return
        failure.awaiters += 1
        try:
            yield from self._pause().__await__()
        except trio.Cancelled as cancelled:
            self._note_failed_nursery(cancelled)
            raise
        finally:
            failure.awaiters -= 1

    def _is_awaited(self) -> None:
        """Note that a program cannot go on without it."""

    def _await_cancelled(self) -> None:
        """Note that a task that awaited it was cancelled; the loop's thread only."""

    def _note_failed_nursery(self, cancelled: trio.Cancelled) -> None:
        """Count an error of it as seen if an await of it was cancelled by a nursery that has failed.

        It is one more error of that nursery, which has raised in the program.
        """
        if cancelled.source == "nursery":
            self._nursery_failed = True
            if self._failure is not None:
                self._failure.note_seen()

    def _await_cancelled_elsewhere(self) -> None:
        """Note that a task of another thread's loop that awaited it was cancelled; any thread."""

    def _claim(self) -> None:
        """Note that the program asks for it, or gives it to another operation; any thread."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lstrip('_')} {self.label}: {self._present.word}>"

    # -- a program that takes it for its value ---------------------------------------------------------------------

    def __format__(self, spec: str) -> str:
        if spec:
            raise TypeError(f"a future cannot be formatted as {spec!r}; {_FIRST}")
        return str(self)

    def __iter__(self) -> Generator[object, None, None]:
        raise TypeError("a future cannot be iterated; await it, or take items by index")

    def __bool__(self) -> bool:
        raise TypeError("a future is neither true nor false; await it first, or ask for its `done`")

    def __array__(self, *_: object, **__: object) -> object:
        raise TypeError(f"a future is no array yet; {_FIRST}")

    if not TYPE_CHECKING:  # which would believe that a future can be computed with

        def _refuse(self, *_: object) -> NoReturn:
            raise TypeError(f"a future cannot be computed with; {_FIRST}")

        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
        __matmul__ = __rmatmul__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse
        __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __divmod__ = __rdivmod__ = __invert__ = _refuse
        __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __abs__ = __float__ = __int__ = __round__ = _refuse
        __contains__ = __setitem__ = __delitem__ = _refuse

        def __eq__(self, other: object) -> bool:
            if isinstance(other, _VALUES):  # else it compares by identity
                raise TypeError(f"a future cannot be compared with {type(other).__name__}; {_FIRST}")
            return NotImplemented

        __hash__ = object.__hash__

        def __len__(self) -> int:
            raise TypeError(f"a future has no length; {_FIRST}")

    # -- for the functions below -------------------------------------------------------------------------------------

    def _loop_thread(self) -> int | None:
        """The thread of the event loop that tells of it, if that is known."""
        return None

    def _source(self) -> Future[object]:
        """The future of the operation that settles this one."""
        return cast("Future[object]", self)

    def _ends_at_once(self) -> bool:
        """Whether it has ended, after an attempt to end it: called before a task of its loop waits for it."""
        return False

    def _pause(self) -> Coroutine[object, object, None]:
        """Return the checkpoint of a task that awaits it when it has ended."""
        return checkpoint()  # noqa: ASYNC105 (the caller awaits it)

    def _settled(self, timeout: float | None) -> tuple[object, Failure | None]:
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

    @property
    def _present(self) -> State:
        """The state as programs see it."""
        return self.state

    def _enter(self, state: State) -> None:
        """Move on to another state; for ends see `settle`."""
        if FOLLOWS[self.state][state]:  # else `transition` says what is wrong: each operation comes here twice or more
            self.state = state
            return
        try:
            transition(self.state, state)
        except TransitionError as error:
            self._report(error)
            raise

    def _report(self, error: TransitionError) -> None:
        """Name itself in an error about its own states."""
        error.operation = self.label

    def _deliver(self) -> None:
        """Tell whoever waits on the loop that it has been settled; the loop's thread, or one in its place."""
        self._tell()

    def _wake_threads(self) -> None:
        with _LOCK:
            waiting = list(self._threads or ())
        for ended in waiting:
            ended.release()

    def _call_anywhere(self) -> None:
        """Run the callbacks that any thread may run; the thread that has ended it does."""
        with _LOCK:
            callbacks, self._anywhere = self._anywhere, None
        for callback in callbacks or ():
            callback()

    def _tell(self) -> None:
        if self._failure is not None and has_failed_nursery(self):
            self._failure.note_seen()
        waiters, self._waiters = self._waiters, None
        if waiters is not None:
            for task in waiters:
                reschedule(task)
        if self._callbacks is not None:
            self._taken = self._taken or self._has_callers()
            with _LOCK:
                callbacks, self._callbacks = self._callbacks, None
            for callback in callbacks or ():
                callback()

    def _add_callback(self, callback: Callable[[], None]) -> None:
        if self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def _take(self) -> bool:
        """Note that the program is given the result; False if it has gone to another receive meanwhile; any thread."""
        source = self._source()
        with _LOCK:
            if source.state < DONE:
                return False
            source._taken = True
            return True

    def _has_callers(self) -> bool:
        """Whether anything is called at its end that does not only look on."""
        return any(type(callback) is not Onlooker for callback in self._callbacks or ())

    def _take_callback(self, callback: Callable[[], None]) -> bool:
        with _LOCK:
            if self._callbacks is None or callback not in self._callbacks:
                return False
            self._callbacks.remove(callback)
            return True

    def _block(self, timeout: float | None = None) -> bool:
        ended = threading.Lock()  # which is released in the end: nothing that threads can wait for costs less
        ended.acquire()
        with _LOCK:
            self._threads = {**(self._threads or {}), ended: None}
        longest = -1 if timeout is None or timeout > threading.TIMEOUT_MAX else timeout
        # Settled before the lock was among them: nobody would release it.
        self._claim()  # from here on it has a user
        if self.state < DONE:
            ended.acquire(timeout=longest)
        with _LOCK:
            self._threads.pop(ended, None)
        return self.state >= DONE


def _missing(name: str) -> property:
    """Return what stands for an attribute of values, and says so."""

    def refuse(future: Future[Any]) -> NoReturn:
        raise AttributeError(f"a future has no {name!r}; {_FIRST}", name=name, obj=future)

    return property(refuse, doc="What only the value has.")


# Name by name: of a class that has `__getattr__`, every other attribute takes five times as long to read.
for _name in {*dir(np.ndarray), *dir(dict), *dir(list)}:
    if not _name.startswith("_") and not hasattr(Future, _name):
        setattr(Future, _name, _missing(_name))


class _Item(Future[object]):
    """The future of one item of another future's result; it holds nothing of its own."""

    __slots__ = ("_index", "_whole")

    def __init__(self, whole: Future[object], index: object) -> None:
        super().__init__()
        self._whole, self._index = whole, index

    @property
    def done(self) -> Flag:
        return self._whole.done

    @property
    def label(self) -> str:
        return f"item {self._index!r} of {self._whole.label}"

    @property
    def _present(self) -> State:
        whole = self._whole._present
        return FAILED if whole is DONE and self._outcome()[1] is not None else whole

    def _outcome(self) -> tuple[object, Failure | None]:
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

    def _loop_thread(self) -> int | None:
        return self._whole._loop_thread()

    def _source(self) -> Future[object]:
        return self._whole._source()

    def _claim(self) -> None:
        self._whole._claim()

    def cancel(self) -> bool:
        """Withdraw the operation that it is an item of; see `Future.cancel`."""
        return self._whole.cancel()

    def cancelled(self) -> bool:
        """Whether the operation that it is an item of was cancelled."""
        return self._whole.cancelled()

    def __await__(self) -> Generator[object, object, object]:
        yield from self._whole.__await__()
        return self.result()


class Checked(_Item):
    """The future of another future's result, which fails if `check(result)` raises.

    Args:
        whole: The other future.
        check: Looks at the result, perhaps several times, in any thread.
    """

    __slots__ = ("_check",)

    def __init__(self, whole: Future[object], check: Callable[[Any], object]) -> None:
        super().__init__(whole, None)
        self._check = check

    @property
    def label(self) -> str:
        """The name of the other future."""
        return self._whole.label

    def _outcome(self) -> tuple[object, Failure | None]:
        value, failure = self._whole._outcome()
        if failure is None:
            try:
                self._check(value)
            except Exception as error:
                return None, Failure(error)
        return value, failure


def _await_in_asyncio(future: Future[Any]) -> Generator[object, object, None]:
    """Wait on a loop of asyncio, which another thread wakes."""
    import asyncio  # a program that awaits there has it

    loop, ended, source = asyncio.get_running_loop(), asyncio.Event(), future._source()

    def wake(_: object) -> None:
        with suppress(RuntimeError):  # that loop has been closed meanwhile
            loop.call_soon_threadsafe(ended.set)

    call_anywhere(source, wake)
    try:
        yield from ended.wait().__await__()
    except BaseException:
        with _LOCK:
            source._anywhere = [call for call in source._anywhere or () if call.args[0] is not wake] or None
        source._await_cancelled_elsewhere()
        raise


def _call_back(callback: Callable[[Future[Any]], object], future: Future[Any]) -> None:
    try:
        callback(future)
    except BaseException as error:
        if not isinstance(error, Exception) and not trio.lowlevel.in_trio_run():
            raise  # the program's own thread calls: a Ctrl-C is the program's; a loop would not survive it
        logging.getLogger("overlap").exception("a callback of %r raised", future)


# -- for streams, engines and worlds ---------------------------------------------------------------------------------


def outcome(future: Future[Any]) -> tuple[object, Failure | None]:
    """Return the value and the failure of a settled future, to an operation that uses it."""
    future._source()._taken = True
    return future._outcome()


def settle(future: Future[Any], value: object, failure: Failure | None = None, *, before: State = DONE) -> bool:
    """Give a future its outcome, any thread; `deliver` must follow on the loop's thread, or in its place.

    Args:
        future: Which.
        value: The result.
        failure: The error, in place of a result.
        before: Only in a state that comes before this one.

    Returns:
        Whether it has this outcome; False if it is further on.
    """
    cancelled = failure is not None and isinstance(failure.error, FutureCancelledError)
    state = DONE if failure is None else CANCELLED if cancelled else FAILED
    with _LOCK:
        if future.state >= before:
            return False
        future._value, future._failure = value, failure
        future._enter(state)
    if future._threads is not None:
        future._wake_threads()
    if future._anywhere is not None:
        future._call_anywhere()
    return True


def deliver(future: Future[Any]) -> None:
    """Tell whoever waits for a settled future: its stream, tasks, callbacks; the loop's thread, or one in its place."""
    future._deliver()


def conclude(future: Future[Any], value: object, failure: Failure | None = None) -> bool:
    """Settle a future, unless it has ended, and deliver its end; the loop's thread, or one that has its place."""
    if not settle(future, value, failure):
        return False
    future._deliver()
    return True


def take_back(future: Future[Any], state: State) -> bool:
    """Move a future that has ended on to another state, unless its result was given to the program; any thread."""
    with _LOCK:
        if not future._taken:
            future._enter(state)
        return not future._taken


def advance(future: Future[Any], state: State) -> bool:
    """Move a future on to another state that is no end, unless it has ended; any thread."""
    with _LOCK:
        if future.state < DONE:
            future._enter(state)
            return True
    return False


def call_when_done(future: Future[Any], callback: Callable[[], None]) -> None:
    """Call `callback` on the loop's thread once a future is settled; at once if it is. The loop's thread only."""
    future._claim()
    if future.done:
        callback()
        return
    with _LOCK:
        future._add_callback(callback)
    future._claim()
    if future.done and future._take_callback(callback):  # a compute's thread has settled it meanwhile
        callback()


def call_anywhere(future: Future[Any], callback: Callable[[Any], object]) -> None:
    """Call `callback(future)` once a future is settled: at once if it is, else in the thread that settles it.

    That may be a thread of the program, and then no loop has to be woken for it. The callback must neither block nor
    touch what belongs to the loop. An error that it raises is logged, and changes nothing.
    """
    call = partial(_call_back, callback, future)
    with _LOCK:
        waits = future._present < DONE
        if waits:
            future._anywhere = [*(future._anywhere or ()), call]
    future._claim()  # from here on it has a user
    if not waits:
        call()
    elif future.done:  # it ended before it could know of the callback
        future._call_anywhere()


def is_elsewhere(future: Future[Any], thread: int) -> bool:
    """Whether an unsettled future belongs to a world on another event loop than that of a thread."""
    return not future.done and future._loop_thread() not in (None, thread)


def wait_in_thread(future: Future[Any], unless: Future[Any] | None = None) -> None:
    """Wait in a thread of ours that runs no event loop; not as the program does, see `is_waited_for`.

    Args:
        future: To be waited for.
        unless: Its end ends the wait, too.
    """
    ended = threading.Lock()
    ended.acquire()

    def release(_: object) -> None:
        with suppress(RuntimeError):  # the other one has released it
            ended.release()

    call_anywhere(future._source(), release)
    if unless is not None:
        call_anywhere(unless, release)
    ended.acquire()


def is_waited_for(future: Future[Any]) -> bool:
    """Whether a task or a thread of the program waits for a future itself; the loop's thread only."""
    failure = future._failure
    return bool(future._waiters or future._threads or (failure is not None and failure.awaiters))


def has_failed_nursery(future: Future[Any]) -> bool:
    """Whether the nursery of a task that awaited a future has failed, and cancelled the await."""
    return getattr(future, "_nursery_failed", False)


def source_of(future: Future[Any]) -> Future[object]:
    """Return the future of the operation that settles another one: itself, or the whole of which that is an item."""
    return future._source()


def consumers(future: Future[Any]) -> Iterator[Future[Any]]:
    """Yield the futures that have asked to be called when another one is done; the loop's thread only."""
    for callback in future._callbacks or ():
        consumer = getattr(getattr(callback, "func", callback), "__self__", None)
        if isinstance(consumer, Future):
            yield consumer
