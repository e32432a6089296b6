"""Handles of issued operations: `await` one for its result.

A future is settled once, on the event loop's thread (collectives) or on a rank's compute thread (computes). A compute
thread that needs it goes on at once; tasks and callbacks of the loop are told on the loop, a moment later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar, cast

import trio
from trio.lowlevel import Abort, Task, checkpoint, current_task, reschedule, wait_task_rescheduled

T_co = TypeVar("T_co", covariant=True)

__all__ = ["Failure", "Future"]


_BLOCKING = threading.Lock()  # several compute threads may begin to wait for one future


class Failure:
    """One error, shared by the future of the operation that raised it and by those that depended on it.

    Attributes:
        error: The exception as raised.
        seen: Whether anybody has been given it; an unseen failure fails its rank at the end.
    """

    __slots__ = ("error", "seen")

    def __init__(self, error: BaseException, *, seen: bool = False) -> None:
        self.error = error
        self.seen = seen


class Future(Generic[T_co]):
    """The result of an operation that has been issued and may not have run yet.

    `await future` returns the result or raises the operation's error; any number of tasks may await it, any number of
    times. Cancelling a task that awaits does not cancel the operation. `future[i]` is the future of an item of the
    result. Futures may be passed to `rank.compute` and to collectives in place of values.
    """

    __slots__ = ("_callbacks", "_done", "_failure", "_threads", "_value", "_waiters")

    def __init__(self) -> None:
        self._done = False
        self._value: object = None
        self._failure: Failure | None = None
        self._waiters: list[Task] | None = None
        self._callbacks: list[Callable[[], None]] | None = None
        self._threads: list[threading.Event] | None = None

    @property
    def done(self) -> bool:
        """Whether the operation has ended, well or badly."""
        return self._done

    def result(self) -> T_co:
        """Return the result of a finished operation without waiting.

        Raises:
            trio.WouldBlock: If the operation has not ended yet; `await` the future instead.
            Exception: The error of the operation, if it failed.
        """
        if not self.done:
            raise trio.WouldBlock("the operation has not ended; await its future")
        value, failure = self._outcome()
        if failure is not None:
            failure.seen = True
            raise failure.error
        return cast(T_co, value)

    def __getitem__(self, index: object) -> Future[object]:
        """Return the future of `result[index]`."""
        return _Item(self, index)

    def __iter__(self) -> Generator[object, None, None]:
        raise TypeError("a future cannot be iterated; await it, or take items by index")

    def __bool__(self) -> bool:
        raise TypeError("a future is neither true nor false; await it first, or ask for its `done`")

    def __array__(self, *_: object, **__: object) -> object:
        raise TypeError("a future is no array yet; await it first, or pass it to rank.compute or a collective")

    def __await__(self) -> Generator[object, object, T_co]:
        if self._done:
            yield from checkpoint().__await__()  # noqa: ASYNC105 (driven by hand)
        else:
            waiters = self._waiters
            if waiters is None:
                waiters = self._waiters = []
            task = current_task()
            waiters.append(task)

            def abort(_: object) -> Abort:
                waiters.remove(task)
                return Abort.SUCCEEDED

            yield from wait_task_rescheduled(abort).__await__()  # noqa: ASYNC105 (driven by hand)
        if self._failure is None:
            return self._value  # type: ignore[return-value]
        return self.result()

    def __repr__(self) -> str:
        state = "pending" if not self.done else "failed" if self._outcome()[1] else "done"
        return f"<{type(self).__name__.lstrip('_')} {self._label()}: {state}>"

    def _label(self) -> str:
        return "result"

    # -- below: for the streams and the world, not for users ---------------------------------------------------

    def _outcome(self) -> tuple[object, Failure | None]:
        return self._value, self._failure

    def _settle(self, value: object, failure: Failure | None = None) -> None:
        """Set the outcome; any thread. `_tell` must follow on the loop's thread."""
        self._value, self._failure = value, failure
        self._done = True
        self._wake_threads()

    def _wake_threads(self) -> None:
        for event in self._threads or ():
            event.set()

    def _tell(self) -> None:
        """Wake the tasks and run the callbacks that wait; the loop's thread only."""
        waiters, self._waiters = self._waiters, None
        if waiters is not None:
            for task in waiters:
                reschedule(task)
        callbacks, self._callbacks = self._callbacks, None
        if callbacks is not None:
            for callback in callbacks:
                callback()

    def _on_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the loop's thread once settled; at once if it is."""
        if self.done:
            callback()
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def _block(self) -> None:
        """Wait in a compute thread; never on the loop's."""
        event = threading.Event()
        with _BLOCKING:
            self._threads = [*(self._threads or ()), event]
        if not self._done:  # settled before the event was in the list: nobody would set it
            event.wait()


class _Item(Future[object]):
    """The future of one item of another future's result; it holds nothing of its own."""

    __slots__ = ("_index", "_whole")

    def __init__(self, whole: Future[object], index: object) -> None:
        super().__init__()
        self._whole, self._index = whole, index

    @property
    def done(self) -> bool:
        return self._whole.done

    def _label(self) -> str:
        return f"item {self._index!r} of {self._whole._label()}"

    def _outcome(self) -> tuple[object, Failure | None]:
        whole, failure = self._whole._outcome()
        if failure is not None:
            return None, failure
        try:
            return whole[self._index], None  # type: ignore[index]
        except Exception as error:
            return None, Failure(error)

    def _on_done(self, callback: Callable[[], None]) -> None:
        self._whole._on_done(callback)

    def _block(self) -> None:
        self._whole._block()

    def __await__(self) -> Generator[object, object, object]:
        yield from self._whole.__await__()
        return self.result()


def resolve(value: object) -> tuple[object, Failure | None]:
    """Return the outcome of `value`, looking into futures (settled) and into tuples, lists and dicts that hold some."""
    if isinstance(value, Future):
        return value._outcome()
    if not isinstance(value, (tuple, list, dict)) or not any(map(_holds_future, _items(value))):
        return value, None
    resolved = [resolve(item) for item in _items(value)]
    for _, failure in resolved:
        if failure is not None:
            return None, failure
    plain: list[Any] = [item for item, _ in resolved]
    if isinstance(value, dict):
        return dict(zip(value, plain, strict=True)), None
    rebuild = type(value)
    return (rebuild(*plain) if hasattr(value, "_fields") else rebuild(plain)), None  # named tuples take their fields


def _items(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (tuple, list)) else []


def _holds_future(value: object) -> bool:
    return isinstance(value, Future) or any(map(_holds_future, _items(value)))
