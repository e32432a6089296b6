"""The event loop's place: other threads hand work over to the loop, or do it in its place while it sleeps.

Who wakes a sleeping loop pays for two wake-ups, of the loop and then of the thread that waits for it: more than a small
operation takes. So one thread at a time may take the place of the loop. Why nothing goes wrong:

* **One at a time.** Data of the loop that have no lock of their own are guarded by a turn, a lock that knows its
  thread. The loop's thread holds it whenever it runs, gives it away only while it waits for input and output, and takes
  it back before anything of it runs (`_Sleep`). A thread works in the loop's place only while it holds the turn
  (`Handover.in_place`).
* **Only what wakes no task.** Tasks belong to Trio's own thread. An operation is issued in place if nothing of that
  starts or wakes one: `Issuer._enqueue_in_place` asks for all of it in one expression, and its executor answers for
  itself (`Executor.takes_threads`). It ends in place unless its end wakes the loop (`CollectiveFuture.end_wakes_loop`);
  else the end is handed over.
* **Order.** What threads have handed over (`post`) runs before what they do in place, which is refused while any of it
  waits. Ends of pieces of work that only their own operation waits for go by the loop's token, out of this order.
* **No deadlock.** A thread that holds the turn waits for nothing, and gives it back whatever is raised, a Ctrl-C
  between any two instructions included. Then its work may be half done: nobody works in place any more, and the world
  fails.
* **No lost wake-up.** A thread that waits does so in the engine, which says to other processes who is to be woken
  (`transports/shared_memory/native/wait.c`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

import trio
from trio import RunFinishedError

T = TypeVar("T")

# A turn of the loop in which little is to do takes 50 to 100 us, and to wake a loop that sleeps 100 to 300.
_ABOUT_TO_SLEEP_S = 100e-6


class _Turn(Protocol):
    """A lock that knows which thread holds it."""

    def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool:
        """Take it."""

    def release(self) -> None:
        """Give it back; raises `RuntimeError` in a thread that does not hold it."""


class Handover:
    """The way from other threads to the loop; the order in which they ask is kept.

    Waking a loop takes a system call, which also hands the interpreter to it: a burst is to do that once.

    Where a loop lets threads in, one thread at a time may do work of the sleeping loop that wakes no task. That saves
    two wake-ups, of the loop and of the thread.

    Args:
        token: Of the loop.
    """

    __slots__ = ("_called", "_interrupted", "_queue", "_token", "_turn")

    def __init__(self, token: trio.lowlevel.TrioToken) -> None:
        self._token = token
        self._queue: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._called = False  # the loop has been called, and has not begun to look
        self._turn: _Turn | None = None  # guards the loop's data; held while the loop runs
        self._interrupted: Callable[[BaseException], None]

    def let_threads_in(self, interrupted: Callable[[BaseException], None]) -> None:
        """Allow threads to do the loop's work while it sleeps; the loop's thread only.

        Args:
            interrupted: Called on the loop's thread once a thread has left the loop's work half done, for good.
        """
        self._interrupted = interrupted
        if self._turn is None:
            self._turn = threading.RLock()  # which knows its thread, so that `in_place` can tell
            self._turn.acquire()
            trio.lowlevel.add_instrument(_Sleep(self._turn))

    def in_place(self, work: Callable[[], T], otherwise: T) -> T:
        """Do work of the sleeping loop in this thread, and return its result, else `otherwise`.

        The loop has to sleep, and nothing that threads have asked for may wait. A loop that is about to sleep is waited
        for, for a moment: to wake it again takes longer. A Ctrl-C, and any other error that a handler of signals
        raises, comes between any two instructions of the main thread. Then the loop gets its place back all the same,
        and is told that the work is half done.
        """
        turn = self._turn
        if turn is None:
            return otherwise
        leave, works = turn.release, False
        try:
            if not (turn.acquire(blocking=False) or turn.acquire(timeout=_ABOUT_TO_SLEEP_S)):
                return otherwise
            if self._queue or self._called:
                return otherwise
            works = True
            result = work()
            works = False
            return result
        except BaseException as error:
            if works:
                self._turn = None  # lest another thread goes on from there
                self.post(self._interrupted, error)
            raise
        finally:
            try:  # noqa: SIM105 - a function in Python could be interrupted before it does anything
                leave()
            except RuntimeError:  # it has not entered
                pass

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Let the loop call a function, soon; any thread.

        Raises:
            RunFinishedError: If there is no loop any more.
        """
        self._queue.append((function, args))
        if not self._called:
            self._called = True
            try:
                self._token.run_sync_soon(self._look)
            except RunFinishedError:
                self._called = False  # so that the next one hears of it too
                self._queue.clear()
                raise

    def post_if_open(self, function: Callable[..., object]) -> None:
        """Let the loop call a function, soon, if there is one; any thread, and at any point of a program."""
        with suppress(RunFinishedError):
            self.post(function)

    def _look(self) -> None:
        self._called = False  # first: later posts call again, or are seen below
        queue = self._queue
        for _ in range(len(queue)):  # no more, lest threads that never rest keep all else from its turn
            function, args = queue.popleft()
            function(*args)
        if queue and not self._called:
            self._called = True
            try:
                self._token.run_sync_soon(self._look)
            except RunFinishedError:  # in the last turn of the loop: threads that ask now are told so
                self._called = False
                queue.clear()


class _Sleep(trio.abc.Instrument):
    """Gives the turn away while the loop waits, and takes it back before anything of it runs."""

    def __init__(self, turn: _Turn) -> None:
        self._turn, self._away = turn, False

    def before_io_wait(self, timeout: float) -> None:
        if timeout > 0:
            self._away = True
            self._turn.release()

    def after_io_wait(self, timeout: float) -> None:
        if self._away:
            self._away = False
            self._turn.acquire()


class Run(ABC):
    """One rank's end of an operation that is carried out. No protocol: `isinstance` would take 8 to 14 us."""

    __slots__ = ()

    @abstractmethod
    def cancel(self) -> object:
        """Stop it, soon."""

    @abstractmethod
    def look_here(self, handover: Handover, longest_s: float | None) -> None:
        """Wait for a while, in a thread that waits for the operation, and end it in the loop's place."""
