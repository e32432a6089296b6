"""Handover: other threads pass work to the event loop, or do it in the loop's place while it sleeps.

A thread that wakes a sleeping loop pays for two wake-ups, of the loop and then of the thread that waits for it: more
than a small operation takes. So one thread at a time may take the place of the loop. The reasons why this is safe:

* **One at a time.** Data of the loop that have no lock of their own are guarded by a turn, a lock that knows its
  thread. The loop's thread holds it whenever it runs, gives it away only while it waits for input and output, and takes
  it back before anything of it runs (`_Sleep`). A thread works in the loop's place only while it holds the turn
  (`Handover.in_place`).
* **Only work that wakes no task.** Tasks belong to Trio's own thread. An operation is issued in place if nothing of it
  starts or wakes a task: `Ports._enqueue_in_place` checks all of it in one expression, and its plan answers for itself
  (`CallPlan.takes_threads`). It ends in place unless its end wakes the loop (`CollectiveFuture.end_wakes_loop`);
  otherwise the end is posted.
* **Order.** Posted work (`post`) runs before work in place, which is refused while any of it waits. Ends of pieces of
  work that only their own operation waits for go by the loop's token, out of this order.
* **No deadlock.** A thread that holds the turn waits for nothing, and returns it whatever is raised, a Ctrl-C between
  any two instructions included. Its work may be half done then: no thread works in place any more, and the world
  fails.
* **No lost wake-up.** A thread that waits does so in the engine, which reports to other processes which thread to wake
  (`transports/shared_memory/native/wait.c`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import trio
from trio import RunFinishedError

from .settling import LONGEST_WAIT_S

if TYPE_CHECKING:
    from transports.shared_memory.engine import Run

    from .operation import Operation

T = TypeVar("T")

#: A turn of the loop with little to do takes 50 to 100 us, and to wake a sleeping loop takes 100 to 300.
ABOUT_TO_SLEEP_S = 100e-6


class Handover:
    """Calls from other threads to the event loop, in their order.

    To wake a loop takes a system call, which also passes the interpreter to it: a burst does so once.

    If a loop lets threads in, one thread at a time may do work of the sleeping loop that wakes no task. That saves
    two wake-ups, of the loop and of the thread.

    Attributes:
        turn: Guards the loop's data; held while the loop runs. None: no thread may work in the loop's place.
        posted: Posted work.
        called: Whether the loop was called, and has not begun to run posted work.
    """

    __slots__ = ("_interrupted", "_token", "called", "posted", "turn")

    def __init__(self, token: trio.lowlevel.TrioToken) -> None:
        self._token = token
        self.posted: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self.called: bool = False
        self.turn: threading.RLock | None = None
        self._interrupted: Callable[[BaseException], None]

    def let_threads_in(self, interrupted: Callable[[BaseException], None]) -> None:
        """Allow threads to do the loop's work while it sleeps; the loop's thread only.

        Args:
            interrupted: Called on the loop's thread if an interrupt has left the loop's work half done.
        """
        self._interrupted = interrupted
        if self.turn is None:
            self.turn = threading.RLock()  # it has an owner thread, which `in_place` needs
            self.turn.acquire()
            trio.lowlevel.add_instrument(_Sleep(self.turn))

    def in_place(self, work: Callable[[], T], otherwise: T) -> T:
        """Do work of the sleeping loop in this thread, and return its result, else `otherwise`.

        The loop must sleep, and no posted work may wait. If a loop is about to sleep, the thread waits for that a
        moment: to wake it again takes longer. A Ctrl-C, and any other error that a signal handler raises, comes between
        any two instructions of the main thread. The loop gets its place back all the same, and a report that the work
        is half done.
        """
        turn = self.turn
        if turn is None:
            return otherwise
        leave, works = turn.release, False
        try:
            if not (turn.acquire(blocking=False) or turn.acquire(timeout=ABOUT_TO_SLEEP_S)):
                return otherwise
            if self.posted or self.called:
                return otherwise
            works = True
            result = work()
            works = False
            return result
        except BaseException as error:
            if works:
                self.break_off(error)
            raise
        finally:
            try:  # noqa: SIM105 - a function in Python could be interrupted before its first instruction
                leave()
            except RuntimeError:  # it does not hold the turn
                pass

    def wait_in_engine(
        self,
        wait: Callable[[float], bool],
        longest_s: float | None,
        end_here: Callable[[], bool],
        end_on_loop: Callable[[], object],
    ) -> None:
        """Wait for an operation in a thread of the program, without the interpreter, and end it in the loop's place.

        Args:
            wait: Waits for some seconds; returns whether the operation moves no more bytes.
            longest_s: Time limit in seconds; None: none. The wait may return long before.
            end_here: Ends the operation in the loop's place; returns False if only the loop may.
            end_on_loop: Ends it on the loop.
        """
        over = False
        try:
            limit_s = LONGEST_WAIT_S if longest_s is None else min(longest_s, LONGEST_WAIT_S)
            over = not wait(limit_s) or self.in_place(end_here, False)
        finally:  # a signal handler may raise anywhere
            if not over:
                self.post_if_open(end_on_loop)

    def break_off(self, error: BaseException) -> None:
        """Report that an interrupt has left the loop's work half done; no other thread continues it."""
        self.turn = None
        self.post(self._interrupted, error)

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Let the loop call a function soon; any thread.

        Raises:
            RunFinishedError: If the loop has ended.
        """
        try:
            self.posted.append((function, args))
            if not self.called:
                self.called = True
                self._token.run_sync_soon(self._run_posted)
        except RunFinishedError:
            self.called = False  # so that the next call raises too
            self.posted.clear()
            raise
        except BaseException:  # a Ctrl-C, perhaps before the loop was called: the next post calls it
            self.called = False
            raise

    def post_if_open(self, function: Callable[..., object]) -> None:
        """Let the loop call a function soon, if there is a loop; any thread, and at any point of a program."""
        with suppress(RunFinishedError):
            self.post(function)

    def _run_posted(self) -> None:
        """Call the functions that other threads have posted so far, on the event loop."""
        self.called = False  # first: later posts call again, or are seen below
        queue = self.posted
        for _ in range(len(queue)):  # no later ones, lest busy threads keep all else from its turn
            function, args = queue.popleft()
            function(*args)
        if queue and not self.called:
            self.called = True
            try:
                self._token.run_sync_soon(self._run_posted)
            except RunFinishedError:  # in the last turn of the loop: later posts raise
                self.called = False
                queue.clear()


class _Sleep(trio.abc.Instrument):
    """Releases the turn while the loop waits, and takes it back before anything of the loop runs."""

    def __init__(self, turn: threading.RLock) -> None:
        self._turn, self._away = turn, False

    def before_io_wait(self, timeout: float) -> None:
        if timeout > 0:
            self._away = True
            self._turn.release()

    def after_io_wait(self, timeout: float) -> None:
        if self._away:
            self._away = False
            self._turn.acquire()


class OperationRun(ABC):
    """One rank's end of an operation in an engine that any thread may submit to, and wait in.

    No protocol: `isinstance` would take 8 to 14 us.

    Attributes:
        operation: The operation.
        run: Its run in the engine, once that has begun.
        memory: Memory that is held as long as the engine may touch it.
    """

    __slots__ = ("memory", "operation", "run")

    operation: Operation
    run: Run | None
    memory: object

    @abstractmethod
    def cancel(self) -> object:
        """Stop the work, soon."""

    @abstractmethod
    def look_here(self, handover: Handover, longest_s: float | None) -> None:
        """Wait for a while, in a thread that waits for the operation, and end the operation in the loop's place."""

    @abstractmethod
    def match_late(self) -> None:
        """Match an operation that a thread has submitted first, and that has not ended in time; on the loop."""
