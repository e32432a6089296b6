"""The compute stream: plain functions, in order, in the rank's own worker thread."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import SimpleQueue
from time import perf_counter_ns
from types import FrameType
from typing import TYPE_CHECKING, TypeVar, cast

import trio
from trio.lowlevel import TrioToken

from ..collectives.reduce import Array
from ..timeline.spans import call_site
from .future import Failure, Future, resolve
from .memory.lent_arguments import arrays_in, explain

if TYPE_CHECKING:
    from .rank import Rank

T_co = TypeVar("T_co", covariant=True)

__all__ = ["ComputeFuture", "ComputeStream", "ThreadedCompute"]


class ComputeFuture(Future[T_co]):
    """The handle of a function on the compute stream; `await` it for what the function returns.

    Attributes:
        name: As given, or the function's name.
        cost: Nanoseconds that it takes and what limits it, on the virtual clock.
    """

    __slots__ = ("_code", "_instruction", "args", "awaited", "cost", "function", "lent", "name", "running")

    def __init__(self, function: Callable[..., T_co], args: tuple[object, ...], name: str, frame: FrameType) -> None:
        super().__init__()
        self.function: Callable[..., T_co] | None = function
        self.args, self.name = args, name
        self.lent: list[Array] = []  # the arrays that are locked for it
        self.awaited: list[Future[object]] = []  # among the arguments
        self.running = False
        self.cost: tuple[int, str] | None = None
        self._code, self._instruction = frame.f_code, frame.f_lasti

    @property
    def call_site(self) -> str:
        """Where it was issued, as "file:line"."""
        return call_site(self._code, self._instruction)

    def _label(self) -> str:
        return f"compute '{self.name}'"


class ComputeStream(ABC):
    """A FIFO of functions of one rank."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def price(
        self, name: str, *, seconds: float | None, flops: float | None, bytes_moved: float | None
    ) -> tuple[int, str] | None:
        """Return what a function takes in nanoseconds, and what limits it; None where only the clock can tell."""
        return None

    def lend(self, operation: ComputeFuture[T_co]) -> None:
        """Lock the arrays among its arguments, those that settled futures hold included."""
        arrays, others = arrays_in(operation.args)
        for other in others:
            if isinstance(other, Future):
                operation.awaited.append(other)
                if other.done:
                    arrays += arrays_in((other._outcome()[0],))[0]
        if arrays:
            self._lock(operation, arrays)

    def resolve(self, operation: ComputeFuture[T_co]) -> tuple[tuple[object, ...], Failure | None]:
        """Return the arguments, which exist by now, and lock the arrays that the futures among them have become."""
        if not operation.awaited:
            return operation.args, None
        args, failure = resolve(operation.args)
        if failure is not None:
            return (), failure
        resolved = cast("tuple[object, ...]", args)
        self._lock(operation, arrays_in(resolved)[0])
        return resolved, None

    def _lock(self, operation: ComputeFuture[T_co], arrays: list[Array]) -> None:
        if not self._rank._world.clock.shapes_only:  # else there is nothing to spoil
            lock = self._rank._world.locks.lock
            operation.lent += [array for array in arrays if lock(array)]

    def give_back(self, operation: ComputeFuture[T_co], value: object = None) -> None:
        """Unlock the arrays of a function that has returned `value` or will never run; any thread."""
        lent = operation.lent
        if lent:
            locks = self._rank._world.locks
            locks.follow(arrays_in((value,))[0], lent)
            while lent:
                locks.unlock(lent.pop())

    @abstractmethod
    def submit(self, operation: ComputeFuture[object]) -> None:
        """Append a function; it runs when all before it have run and the futures among its arguments are settled."""

    def abandon(self, operation: ComputeFuture[object], error: BaseException) -> None:
        """Fail an operation that has not run because the world has failed; the loop's thread only."""
        if not operation.running:
            self.give_back(operation)
        if not operation.done:
            operation._settle(None, Failure(error, seen=True))
        self._ended(operation)

    @abstractmethod
    def stop(self) -> None:
        """Let the function that is running finish, and no other start; any thread."""

    @abstractmethod
    async def ended(self) -> None:
        """Wait until nothing runs any more; `stop` first."""

    def _ended(self, operation: ComputeFuture[object]) -> None:
        if self._rank._unfinished.pop(operation, operation) is None:
            self._rank._note_end(operation)
        operation._tell()


class ThreadedCompute(ComputeStream):
    """The stream in real time: one thread runs the functions; it starts with the first of them."""

    def __init__(self, rank: Rank, token: TrioToken) -> None:
        super().__init__(rank)
        self._token = token
        self._queue: SimpleQueue[ComputeFuture[object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._exited = trio.Event()
        self._stopped = False

    def submit(self, operation: ComputeFuture[object]) -> None:
        """Append a function; it runs when all before it have run and the futures among its arguments are settled."""
        if self._thread is None:
            self._rank._world.limit_blas()
            self._thread = threading.Thread(target=self._work, name=f"overlap-rank-{self._rank.rank}", daemon=True)
            self._thread.start()
        self._queue.put(operation)

    def stop(self) -> None:
        """Let the function that is running finish, and no other start; any thread."""
        self._stopped = True
        self._queue.put(None)

    async def ended(self) -> None:
        """Wait until the thread has ended; `stop` first."""
        if self._thread is not None:
            await self._exited.wait()
            self._thread.join()

    def _work(self) -> None:
        try:
            while (operation := self._queue.get()) is not None and not self._stopped:
                self._run(operation)
                del operation
        finally:
            self._token.run_sync_soon(self._exited.set)

    def _run(self, operation: ComputeFuture[object]) -> None:
        operation.running = True
        value, failure = None, None
        try:
            value, failure = self._call(operation)
        except BaseException as error:
            explain(error)
            failure = Failure(error)
        self.give_back(operation, value)
        operation.function, operation.args, operation.awaited = None, (), []
        if not operation.done:  # the world may have given it up meanwhile
            operation._settle(value, failure)
        self._token.run_sync_soon(self._ended, operation)

    def _call(self, operation: ComputeFuture[object]) -> tuple[object, Failure | None]:
        for future in operation.awaited:
            if not future.done:
                future._block()
        args, failure = self.resolve(operation)
        function = operation.function
        if failure is not None or self._stopped or function is None:
            return None, failure
        started_ns = perf_counter_ns()
        try:
            return function(*args), None
        finally:
            self._rank.record(("compute", "compute", operation.name, started_ns, perf_counter_ns(), None))
