"""Operations under way as torch's `Work`: `wait`, `get_future`, and errors that both Python and C++ see.

Torch's functions return a `Work`, or wait for it. The future of a Work is completed in a new thread, because functions
chained to the future by `then` may issue operations and wait for them. The event loop, which ends operations, must not
wait. Nothing of that kind is chained to the futures of DDP's own buckets: these are completed in the thread that ends
the operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import trio

from ..errors import OverlapError
from ..runtime.callbacks import call_when_settled
from ..runtime.future import Future
from ..runtime.settling import Settling, settle, wait_until_settled
from ..runtime.state import DONE
from . import typed
from .errors import backend_error, timeout_text
from .operations import exclude_from_compiler

# Longest wait for the end of a profiler's record. The thread that ends the operation writes it within microseconds; if
# that thread has ended before it wrote it, a wait without a limit would never end.
_RECORD_S = 5.0


class Handle(Protocol):
    """The operation of a Work: a `runtime.future.Future`, or `JoinedOperations`."""

    @property
    def done(self) -> bool:
        """Whether the operation has ended, with or without an error."""

    def result(self, timeout: float | None = None) -> object:
        """Wait for the end of the operation, in a thread that runs no event loop, and raise its error."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the operation, and return its error; None: it has succeeded."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        """Call `callback(handle)` once the operation is done."""


class JoinedOperations:
    """Several operations as one, which ends once all of them have ended.

    Args:
        handles: The operations, which may end in any order.
        finish: Called once if all operations have succeeded, before the end, in the thread that ends the last one. It
            copies results into place. None: there is nothing to copy.
    """

    def __init__(self, handles: Sequence[Handle], finish: Callable[[], None] | None = None) -> None:
        self._finish = finish
        self._lock, self._ended = threading.Lock(), Settling()
        self._callbacks: list[Callable[[Any], object]] = []
        self._error: BaseException | None = None
        # One more than there are operations. The last line below counts it, so that the end comes after the loop.
        self._unfinished_count, self._handles = len(handles) + 1, handles
        for handle in handles:
            call_at_end(handle, self._record_end)
        self._count_end()

    @property
    def done(self) -> bool:
        """Whether all operations and `finish` have ended."""
        return bool(self._ended.done)

    def result(self, timeout: float | None = None) -> None:
        """Wait for the end of all operations, and raise the first error."""
        error = self.exception(timeout)
        if error is not None:
            raise error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of all operations and of `finish`, and return the first error; None: there is none.

        Raises:
            TimeoutError: They have not ended within `timeout` seconds. None: there is no limit.
        """
        if self._ended.state >= DONE:
            return self._error
        # without a limit, wait for each operation: that may carry it out in this thread
        for handle in self._handles if timeout is None else ():
            handle.exception()
        if not wait_until_settled(self._ended, timeout):
            raise TimeoutError(f"{self._unfinished_count} operations have not ended; pass a longer timeout")
        return self._error

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback(self)` once all operations are done, in the thread that ends the last."""
        with self._lock:
            if not self._ended.done:
                self._callbacks.append(callback)
                return
        callback(self)

    def _record_end(self, handle: Handle) -> None:
        """Record the end of one operation, and its error if it is the first."""
        error = handle.exception(0)
        if error is not None and self._error is None:
            self._error = error
        self._count_end()

    def _count_end(self) -> None:
        """Count an end; at the last one call `finish`, and then the callbacks."""
        with self._lock:
            self._unfinished_count -= 1
            if self._unfinished_count:
                return
        if self._error is None and self._finish is not None:
            try:
                self._finish()
            except Exception as error:
                self._error = error
        with self._lock:
            settle(self._ended, None)
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


class Work(dist.distributed_c10d.Work):  # type: ignore[misc]
    """An operation under way, as torch's functions return it.

    Args:
        handle: The operation.
        tensors: The tensors that the operation writes, as `result` returns them.
        source: For a receive, called after its end: returns the group rank of the sender. None: it is no receive.
    """

    def __init__(self, handle: Handle, tensors: object, source: Callable[[], int] | None = None) -> None:
        super().__init__()
        self._handle, self._tensors, self._source = handle, tensors, source
        self._future: torch.futures.Future[Any] | None = None
        self._recorded: threading.Event | None = None

    @exclude_from_compiler
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end of the operation, and raise its error; return True.

        Args:
            timeout: Longest wait; None or 0: up to the time limit of the operation.

        Returns:
            Always True, because torch expects a bool.

        Raises:
            DistBackendError: The operation failed, or has not ended in time.
            BaseException: Any error that the program's own handler of a signal raises during the wait, unchanged.
        """
        seconds = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
        begun_s = monotonic()
        try:
            failure = self._handle.exception(seconds)
        except TimeoutError as error:
            # raised before the limit, so by the program's handler of a signal
            if seconds is None or monotonic() - begun_s < seconds:
                raise
            advice = "or look at which rank has not issued it (`overlap why`)"
            raise dist.DistBackendError(f"{timeout_text(seconds, error)}, {advice}") from error
        except (OverlapError, trio.WouldBlock) as error:
            raise backend_error(error) from error
        if self._recorded is not None:
            # the record of torch's profiler must be closed before this returns, see `record_end`
            self._recorded.wait(_RECORD_S)
        if failure is not None:
            raise backend_error(failure) from failure
        return True

    def synchronize(self) -> None:
        """Wait for the end of the operation: the CPU has no streams that could wait instead."""
        self.wait()

    @exclude_from_compiler
    def is_completed(self) -> bool:
        """Return whether the operation has ended, with or without an error."""
        return self._handle.done and (self._recorded is None or self._recorded.is_set())

    @exclude_from_compiler
    def is_success(self) -> bool:
        """Return whether the operation has ended without an error."""
        return self._handle.done and self._handle.exception(0) is None

    @exclude_from_compiler
    def exception(self) -> BaseException | None:
        """Return the error of the operation as `wait` raises it, or None if it has none so far."""
        error = self._handle.exception(0) if self._handle.done else None
        return None if error is None else backend_error(error)

    def result(self) -> object:
        """Return the tensors that the operation writes."""
        return self._tensors

    def source_rank(self) -> int:
        """Return the group rank of the sender, for a receive that has ended."""
        if self._source is None:
            raise ValueError("source_rank: only a receive has a source")
        return self._source()

    _source_rank = source_rank

    @exclude_from_compiler
    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the written tensors, the same one at each call. C++ code sees the future's error, too."""
        # two frames of this package lie above the caller: this method, and the wrapper of `exclude_from_compiler`
        for_backward = self._future is None and typed.is_for_backward(2)
        if for_backward and typed.needs_typed_future(self._tensors):
            self._future = typed.make_typed_future(lambda: cast("list[torch.Tensor]", self._wait_for_tensors(None)))
        if self._future is None:
            start: torch.futures.Future[None] = torch.futures.Future()
            self._future = start.then(self._wait_for_tensors)  # C++ only sees errors that are raised in `then`
            if self._handle.done:
                start.set_result(None)
            elif for_backward:
                call_at_end(self._handle, lambda _: start.set_result(None))
            else:
                # functions that the program has chained to it may wait, which the thread that ends the operation must
                # not
                call_at_end(self._handle, lambda _: _complete_in_thread(start))
        return self._future

    def get_future_result(self) -> torch.futures.Future[Any]:
        """Return a future of the written tensors, as `get_future` does."""
        return self.get_future()

    def record_end(self, record: Callable[[], object]) -> None:
        """Call `record` once the operation has ended, with or without an error; it must neither wait nor fail.

        No wait for the operation returns before that. A program may stop its profiler after a wait, and torch would
        write into freed memory if a record were open then.
        """
        recorded = self._recorded = threading.Event()

        def on_end(_: object) -> None:
            record()
            recorded.set()

        call_at_end(self._handle, on_end)

    def _wait_for_tensors(self, _: object) -> object:
        self.wait()
        return self._tensors


def call_at_end(handle: Handle, callback: Callable[[Any], object]) -> None:
    """Call `callback(handle)` in the thread that ends an operation, without a wake-up of the event loop.

    The callback neither waits nor fails.
    """
    if isinstance(handle, Future):
        call_when_settled(handle, callback)
    else:
        handle.add_done_callback(callback)


def _complete_in_thread(start: torch.futures.Future[None]) -> None:
    """Complete a future in a new thread: its callbacks may wait."""
    trio.lowlevel.start_thread_soon(lambda: start.set_result(None), _ignore_outcome)


def _ignore_outcome(outcome: Any) -> None:
    """Ignore the outcome of a thread; errors of callbacks are in the futures that `then` returned."""
