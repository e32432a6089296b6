"""Ranks with a program of plain code, each in a thread of its own, of which only one runs at a time.

The thread that may run has the baton: the event loop's, or that of one rank. A rank's thread gives the baton back
when it issues an operation, waits, or ends. So the order of everything follows from the virtual clock and the seed.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from inspect import iscoroutine
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from unittest.mock import patch

import trio

from transports.delays import Instant

from ..diagnostics import line_in_thread
from ..errors import OverlapError, UsageError
from ..runtime.future import Future
from .views import RankProcess

if TYPE_CHECKING:
    from ..runtime.rank import Rank
    from ..simulation.kernel import Kernel

C = TypeVar("C")
T = TypeVar("T")

# Seconds in which an interrupted thread has to end: it only runs `finally` blocks.
_END_S = 5.0
# Shortest pause between two looks at the delays of this process's threads.
_LEAST_S = 0.01
_HERE = threading.local()
_OWNER = "_overlap_owner"  # attribute of threads that programs of ranks have started


class StopThread(BaseException):
    """Raised in the thread of a rank after the end of its world. No `Exception`, so that programs do not catch it."""


class UntestableError(UsageError):
    """A program uses a feature that tests do not support.

    Attributes:
        line: Line of the program, as "file:line", if the traceback of the error does not have it; else "".
    """

    line: str = ""


class RealTimeError(OverlapError):
    """A rank has computed for longer, in real time, than a test allows."""

    def __init__(self, text: str = "nothing has moved for longer, in real time, than the test allows") -> None:
        super().__init__(text)


@dataclass(slots=True)
class RealTime:
    """Limit of the real time, less delays of this process, that a rank may run without a turn of others.

    All ranks share it: when one exceeds the limit, the others stop.
    """

    limit_s: float
    exceeded: bool = False  # whether a rank has exceeded the limit


class RankThread(Generic[T]):
    """One rank's thread: it runs a program while it has the baton.

    Args:
        rank: The rank.
        kernel: Kernel of the simulation, which moves the virtual clock.
        view: The process as the rank sees it while its thread runs.
        program: Runs in the thread, with this object as its argument.
        real_time: Limit of the time that the program may run before it gives the baton back.
        compute_ns: Returns how many nanoseconds a compute takes on this rank, from those on a usual rank.

    Attributes:
        rank, kernel, view: As passed.
        cost_ns: Virtual time of the program's computes since the thread got the baton.
        on_resume: Called in the thread after each wait.
        turn: Awaited in the event loop before the thread goes on after a wait.
    """

    def __init__(
        self,
        rank: Rank,
        kernel: Kernel,
        view: RankProcess,
        program: Callable[[RankThread[T]], T],
        *,
        real_time: RealTime,
        compute_ns: Callable[[int], int],
    ) -> None:
        self.rank: Rank = rank
        self.kernel: Kernel = kernel
        self.view: RankProcess = view
        self.cost_ns: int = 0
        self._interrupt_handler: Callable[[], None] | None = None
        self._program, self._real_time, self._compute_ns = program, real_time, compute_ns
        self._baton_of_thread, self._baton_of_loop = threading.Lock(), threading.Lock()
        self._baton_of_thread.acquire()
        self._baton_of_loop.acquire()
        self._nursery: trio.Nursery | None = None  # of the threads of this rank
        self._request: Callable[[], Any] | None = None  # function, sync or async, that the event loop is to call
        self._answer: tuple[Any, BaseException | None] = (None, None)  # its result, or its error
        self._refused: UntestableError | None = None  # unsupported call of a thread that the program started
        self._ended, self._is_ending = False, False
        self._result: T | None = None
        self._error: BaseException | None = None
        self.on_resume: Callable[[], None] = lambda: None
        self.turn: Callable[[], Awaitable[None]] = _go_on
        self._thread = threading.Thread(target=self._thread_main, name=f"overlap rank {rank.rank}", daemon=True)

    @staticmethod
    def current() -> RankThread[Any] | None:
        """Return the `RankThread` whose thread calls, or None in other threads."""
        return getattr(_HERE, "rank", None)

    @staticmethod
    def owner() -> RankThread[Any] | None:
        """Return the `RankThread` whose program runs in the calling thread, or has started it; None without one."""
        return getattr(_HERE, "rank", None) or getattr(threading.current_thread(), _OWNER, None)

    # -- in the event loop -------------------------------------------------------------------------------------------

    async def run_program(self) -> T:
        """Run the program to its end, and return its result or raise its error.

        It waits for threads that `start_thread` has added, as a process waits for its threads. If it is cancelled, the
        thread ends first.
        """
        self.rank._context.program_line = self.line_now  # for reports on where the rank is
        failure: BaseException | None = None
        async with trio.open_nursery() as self._nursery:
            try:
                await self._run_thread()
            except trio.Cancelled:
                raise
            except BaseException as error:
                failure = error
                self._nursery.cancel_scope.cancel()
        # Raised outside of the nursery, which would wrap it in an ExceptionGroup.
        if failure is not None:
            raise failure
        return self._result  # type: ignore[return-value]

    def start_thread(self, program: Callable[[RankThread[Any]], object]) -> None:
        """Start another thread of this rank, which takes turns with the first one as ranks do."""
        thread: RankThread[Any] = RankThread(
            self.rank, self.kernel, self.view, program,
            real_time=self._real_time, compute_ns=self._compute_ns,
        )  # fmt: skip
        thread.turn, thread._nursery = self.turn, self._nursery
        assert self._nursery is not None
        self.call(partial(self._nursery.start_soon, thread._run_thread))

    async def _run_thread(self) -> None:
        """Run this thread from the event loop, and raise the error of its program."""
        self._thread.start()
        try:
            await self._alternate_with_thread()
        except BaseException:
            with suppress(RealTimeError):  # the present error says more than that of the limit around all ranks
                self._end_thread()
            if self.is_stuck:
                self.view.restore_process()  # in place of the thread, which may never do it
            raise
        self._thread.join()
        if self._error is not None:
            raise self._error

    async def _alternate_with_thread(self) -> None:
        """Alternate with the thread until its program ends: let it run, then call the function that it requests."""
        while True:
            if self._real_time.exceeded:
                await trio.sleep_forever()  # the world is about to end, and cancels this
            self._give_baton()
            if self._refused is not None:
                raise self._refused
            await self._pass_compute_time()
            if self._ended:
                return
            request, self._request = self._request, None
            assert request is not None
            try:
                answer = request()
                if iscoroutine(answer):
                    answer = await answer
                    await self.turn()
                self._answer = answer, None
            except (Exception, SystemExit) as error:
                self._answer = None, error

    async def _pass_compute_time(self) -> None:
        """Let the virtual time of the thread's computes pass, at least 1 ns, so that others get a turn; record it."""
        cost_ns, self.cost_ns = self._compute_ns(max(self.cost_ns, 1)), 0
        started_ns = self.kernel.now_ns
        await self.kernel.sleep_until(started_ns + cost_ns, rank=self.rank.rank)
        if cost_ns > 1:
            self.rank._context.record(("compute", "compute", "program", started_ns, self.kernel.now_ns, None))

    def call_after_wait(self, function: Callable[[], None]) -> None:
        """Have the thread call a function when it goes on after its present wait, like the handler of a signal."""
        self._interrupt_handler = function

    def _give_baton(self) -> None:
        """Let the thread run until it gives the baton back; raise RealTimeError after the limit of real time."""
        self._baton_of_thread.release()
        limit_s = self._real_time.limit_s
        if not _acquire_within_limit(self._baton_of_loop, limit_s):
            self._real_time.exceeded = True
            line = self.line_now()
            self._raise_in_thread()
            if self._refused is not None:
                raise self._refused
            raise RealTimeError(
                f"rank {self.rank.rank} is still computing at {line} after {limit_s:g} s of real time: its "
                "program never ends, or waits for a thread, a socket or a lock outside; end that, or pass a longer "
                "real_timeout_s="
            )

    @property
    def is_stuck(self) -> bool:
        """Whether the thread has started and not ended. After the end of the world, only a wait in C can keep it."""
        return self._thread.ident is not None and not self._ended

    def line_now(self) -> str:
        """Return the line that the thread executes, as "file:line"."""
        return line_in_thread(self._thread.ident or 0)

    def _end_thread(self) -> None:
        """End the thread by `StopThread`: at its present wait; if it does not wait, at its next bytecode."""
        self._is_ending = True
        if not self._ended and self._thread.is_alive():
            if not self._baton_of_loop.locked():  # the thread was interrupted while it ran
                self._baton_of_loop.acquire(blocking=False)
            self._answer = None, StopThread()
            if self._baton_of_thread.locked():
                self._baton_of_thread.release()
            self._thread.join(_END_S)
            if self._thread.is_alive():
                self._raise_in_thread()
                self._thread.join(_END_S)

    def _raise_in_thread(self) -> None:
        """Raise `StopThread` in the thread, at its next bytecode."""
        self._is_ending = True
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(StopThread)
        )

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _thread_main(self) -> None:
        """Wait for the baton, then run the program, with the process set to the rank's state."""
        _HERE.rank = self
        self._baton_of_thread.acquire()
        try:
            if self._is_ending:
                return
            self.view.enter_rank()
            try:
                self._result = self._program(self)
            finally:
                self.view.restore_process()
        except StopThread:
            self._error = None
        except BaseException as error:
            self._error = error
        finally:
            self._ended = True
            self._baton_of_loop.release()

    def call(self, function: Callable[[], C]) -> C:
        """Call a function in the event loop, at this rank's present instant, and return its result."""
        return cast(C, self._request_in_loop(function))

    def wait(self, future: Future[Any], timeout_s: float | None = None) -> bool:
        """Wait until a future is done.

        Args:
            future: The future, whatever its outcome.
            timeout_s: Limit of virtual time; None: without limit.

        Returns:
            False if it is not done within the limit.
        """
        if future.done and not self.cost_ns:
            return True
        return bool(self._request_in_loop(partial(_wait_for_future, future, timeout_s)))

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass, in which other ranks run."""
        self._request_in_loop(partial(trio.sleep, seconds))

    def let_others_run(self, seconds: float, *, at_once: bool) -> None:
        """Let other ranks run while this rank is busy.

        Args:
            seconds: Virtual time, which is longer on a slow rank.
            at_once: Whether it takes no time if ranks have turns, as their order decides then.
        """
        in_turns = self.turn is not _go_on
        self.sleep(0.0 if at_once and in_turns else self._compute_ns(round(seconds * 1e9)) * 1e-9)

    def wait_until(self, condition: Callable[[], bool], changed: Callable[[], trio.Event], timeout_s: float) -> bool:
        """Wait until a condition holds.

        Args:
            condition: Whether it holds; called in the event loop.
            changed: Returns the event after which `condition` is called again.
            timeout_s: Limit of virtual time.

        Returns:
            Whether the condition holds at the end.
        """
        return bool(self._request_in_loop(partial(_wait_for_condition, condition, changed, timeout_s)))

    def _request_in_loop(self, request: Callable[[], Any]) -> Any:
        """Have the event loop call a function, while others run, and return its result or raise its error.

        Raises UntestableError in another thread than that of the rank, and StopThread if the world has ended.
        """
        if threading.current_thread() is not self._thread:
            self._refused = UntestableError(
                f"a thread that the program of rank {self.rank.rank} has started communicates; in a test only the "
                "program's own thread can, because the order of threads is not repeatable; move the call there"
            )
            self._refused.line = line_in_thread(threading.get_ident())
            raise self._refused
        if self._is_ending:
            raise StopThread
        self._request = request
        self.view.restore_process()
        self._baton_of_loop.release()
        self._baton_of_thread.acquire()
        self.view.enter_rank()
        answer, error = self._answer
        if self._is_ending:
            raise StopThread
        if error is not None:
            raise error
        interrupting, self._interrupt_handler = self._interrupt_handler, None
        if interrupting is not None:
            interrupting()
        self.on_resume()
        return answer


def _acquire_within_limit(lock: threading.Lock, limit_s: float) -> bool:
    """Acquire a lock, and return whether that took less than a limit of real time, less delays of this process."""
    # Reading the delays takes longer than most turns, so in the first tenth of the limit they are not read.
    began, left_s = None, 0.1 * limit_s
    while not lock.acquire(timeout=max(left_s, _LEAST_S)):
        began = began or Instant.now()
        left_s = 0.9 * limit_s - Instant.now().own_seconds_since(began)
        if left_s <= 0:
            return False
    return True


@contextmanager
def assigning_threads_to_ranks() -> Iterator[None]:
    """Assign threads that a rank's program starts, directly or indirectly, to the rank, during a `with` block."""
    original = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        setattr(thread, _OWNER, RankThread.owner())
        original(thread)

    with patch.object(threading.Thread, "start", start):
        yield


async def _go_on() -> None:
    """Return at once: the default of `RankThread.turn`, for ranks without turns."""


async def _wait_for_future(future: Future[Any], timeout_s: float | None) -> bool:
    """Wait for the end of a future, whatever its outcome; return False if it has not ended within the limit."""
    with trio.move_on_after(float("inf") if timeout_s is None else timeout_s):
        try:
            await future
        except Exception:
            return True
    return bool(future.done)


async def _wait_for_condition(
    condition: Callable[[], bool], changed: Callable[[], trio.Event], timeout_s: float
) -> bool:
    """Wait for a condition, which is asked again after each `changed` event; return whether it holds in time."""
    with trio.move_on_after(timeout_s):
        while not condition():
            await changed().wait()
    return condition()
