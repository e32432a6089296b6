"""Handles of operations in torch's words: `wait`, `get_future`, and errors that Python and C++ both see.

Torch's functions return a `Work` and wait for it. Its future is completed in a thread of its own, because functions
chained to it by `then` may issue operations and wait for them, which the event loop that ends them must not. Only DDP's
own buckets have none of these, and are completed in the thread that ends the operation.
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
from ..runtime.callbacks import call_anywhere
from ..runtime.future import Future
from ..runtime.settling import Settling, settle, wait_until_settled
from . import typed
from .errors import backend_error, timed_out
from .operations import exclude_from_compiler

# The end of a record takes microseconds in the thread that ends the operation; should that thread have ended before.
_RECORD_S = 5.0


class Handle(Protocol):
    """The operation under a Work: a future of ours, or several as one."""

    @property
    def done(self) -> bool:
        """Whether the operation has ended, well or badly."""

    def result(self, timeout: float | None = None) -> object:
        """Wait for the end of the operation, in a thread that runs no event loop, and raise its error."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the operation, and return its error."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        """Call `callback(handle)` once the operation is done."""


class JoinedOperations:
    """Operations that end as one, once all of them have, followed by copies into place.

    Args:
        handles: The operations; later ones may end first.
        finish: Is called once, when all have ended well, in the thread that ended the last one.
    """

    def __init__(self, handles: Sequence[Handle], finish: Callable[[], None] | None = None) -> None:
        self._finish = finish
        self._lock, self._ended = threading.Lock(), Settling()
        self._callbacks: list[Callable[[Any], object]] = []
        self._error: BaseException | None = None
        self._unfinished_count, self._handles = len(handles) + 1, handles
        for handle in handles:
            call_at_end(handle, self._record_end)
        self._count_end()

    @property
    def done(self) -> bool:
        """Whether all operations have ended, and the copies as well."""
        return bool(self._ended.done)

    def result(self, timeout: float | None = None) -> None:
        """Wait for the end of all operations, and raise the first error."""
        error = self.exception(timeout)
        if error is not None:
            raise error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of all operations, and return the first error."""
        for handle in self._handles if timeout is None else ():
            handle.exception()
        if not wait_until_settled(self._ended, timeout):
            raise TimeoutError(f"{self._unfinished_count} operations have not ended within {timeout:g} s; wait longer")
        return self._error

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback(self)` once all operations are done, in the thread that ends the last."""
        with self._lock:
            if not self._ended.done:
                self._callbacks.append(callback)
                return
        callback(self)

    def _record_end(self, handle: Handle) -> None:
        """Note the end of one operation, and its error if it is the first."""
        error = handle.exception(0)
        if error is not None and self._error is None:
            self._error = error
        self._count_end()

    def _count_end(self) -> None:
        """Count an end; at the last one copy the results, and call the callbacks."""
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
    """One operation of torch: its handle, the tensors that it writes, and the rank that a message came from.

    Args:
        source: Returns the rank that a message came from; None: it is known.
    """

    def __init__(self, handle: Handle, tensors: object, source: Callable[[], int] | None = None) -> None:
        super().__init__()
        self._handle, self._tensors, self._source = handle, tensors, source
        self._future: torch.futures.Future[Any] | None = None
        self._recorded: threading.Event | None = None

    @exclude_from_compiler
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end of the operation, and raise its error.

        Args:
            timeout: How long at most; by default as long as the operation may take.

        Raises:
            DistBackendError: If it failed, or has not ended in time. What the program's own handlers of signals raise
                meanwhile leaves as it is.
        """
        seconds = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
        begun_s = monotonic()
        try:
            failure = self._handle.exception(seconds)
        except TimeoutError as error:
            if seconds is None or monotonic() - begun_s < seconds:
                raise
            raise dist.DistBackendError(timed_out(seconds, error)) from error
        except (OverlapError, trio.WouldBlock) as error:
            raise backend_error(error) from error
        if self._recorded is not None:
            self._recorded.wait(_RECORD_S)
        if failure is not None:
            raise backend_error(failure) from failure
        return True

    def synchronize(self) -> None:
        """Wait for the end of the operation: the CPU has no streams that could wait instead."""
        self.wait()

    @exclude_from_compiler
    def is_completed(self) -> bool:
        """Return whether the operation has ended, well or badly."""
        return self._handle.done and (self._recorded is None or self._recorded.is_set())

    @exclude_from_compiler
    def is_success(self) -> bool:
        """Return whether the operation has ended well."""
        return self._handle.done and self._handle.exception(0) is None

    @exclude_from_compiler
    def exception(self) -> BaseException | None:
        """Return the error of the operation as `wait` raises it; None if it has none so far."""
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
        """Return a future of the written tensors; C++ sees its error, too."""
        for_backward = self._future is None and typed.is_for_backward(2)
        if for_backward and typed.needs_typed_future(self._tensors):
            self._future = typed.future(lambda: cast("list[torch.Tensor]", self._wait_for_tensors(None)))
        if self._future is None:
            start: torch.futures.Future[None] = torch.futures.Future()
            self._future = start.then(self._wait_for_tensors)  # C++ only sees errors that are raised in `then`
            if self._handle.done:
                start.set_result(None)
            elif for_backward:
                call_at_end(self._handle, lambda _: start.set_result(None))
            else:
                call_at_end(self._handle, lambda _: _complete_in_thread(start))
        return self._future

    def get_future_result(self) -> torch.futures.Future[Any]:
        """Return a future of the written tensors, as `get_future` does."""
        return self.get_future()

    def record_end(self, record: Callable[[], object]) -> None:
        """Call a function that neither waits nor fails once the operation has ended, well or badly.

        No wait for the operation ends before that: a profiler that the program stops then must have no record open,
        into whose memory torch would write after it has been freed.
        """
        recorded = self._recorded = threading.Event()

        def record_end(_: object) -> None:
            record()
            recorded.set()

        call_at_end(self._handle, record_end)

    def _wait_for_tensors(self, _: object) -> object:
        self.wait()
        return self._tensors


def call_at_end(handle: Handle, callback: Callable[[Any], object]) -> None:
    """Call `callback(handle)` in the thread that ends an operation, without a wake-up of the event loop.

    The callback neither waits nor fails.
    """
    if isinstance(handle, Future):
        call_anywhere(handle, callback)
    else:
        handle.add_done_callback(callback)


def _complete_in_thread(start: torch.futures.Future[None]) -> None:
    """Complete a future in a new thread: its callbacks may wait."""
    trio.lowlevel.start_thread_soon(lambda: start.set_result(None), _ignore_outcome)


def _ignore_outcome(outcome: Any) -> None:
    """Ignore the outcome of a thread; errors of callbacks are in the futures that `then` returned."""
