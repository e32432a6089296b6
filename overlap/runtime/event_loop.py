"""Event loop: work handed over by other threads, callbacks that must not recurse, fair pauses of tasks."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from time import perf_counter
from typing import Protocol, TypeVar

import trio
from trio.lowlevel import checkpoint, checkpoint_if_cancelled

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

    def enter(self) -> bool:
        """Take the loop's place, if it sleeps and nothing that threads have asked for waits; then `leave` follows.

        A loop that is about to sleep is waited for, for a moment: to wake it again takes longer.
        """
        turn = self._turn
        if turn is None or not (turn.acquire(blocking=False) or turn.acquire(timeout=_ABOUT_TO_SLEEP_S)):
            return False
        if self._queue or self._called:
            turn.release()
            return False
        return True

    def leave(self) -> None:
        """Give the loop its place back."""
        assert self._turn is not None, "`enter` comes first"
        self._turn.release()

    def in_place(self, work: Callable[[], T], otherwise: T) -> T:
        """Do work of the sleeping loop in this thread, if it can `enter`, and return its result, else `otherwise`.

        A Ctrl-C, and any other error that a handler of signals raises, comes between any two instructions of the main
        thread. Then the loop gets its place back all the same, and is told that the work is half done.
        """
        turn = self._turn
        if turn is None:
            return otherwise
        leave, works = turn.release, False
        try:
            if not self.enter():
                return otherwise
            works = True
            result = work()
            works = False
            return result
        except BaseException as error:
            if works and not isinstance(error, Exception):
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
            trio.RunFinishedError: If there is no loop any more.
        """
        self._queue.append((function, args))
        if not self._called:
            self._called = True
            try:
                self._token.run_sync_soon(self._look)
            except trio.RunFinishedError:
                self._called = False  # so that the next one hears of it too
                self._queue.clear()
                raise

    def post_if_open(self, function: Callable[..., object]) -> None:
        """Let the loop call a function, soon, if there is one; any thread, and at any point of a program."""
        with suppress(trio.RunFinishedError):
            self.post(function)

    def _look(self) -> None:
        self._called = False  # first: later posts call again, or are seen below
        queue = self._queue
        for _ in range(len(queue)):  # no more, lest threads that never rest keep all else from its turn
            function, args = queue.popleft()
            function(*args)
        if queue and not self._called:
            self._called = True
            self._token.run_sync_soon(self._look)


class Cancels(Protocol):
    """Work that can be stopped."""

    def cancel(self) -> object:
        """Stop it, soon."""


class Withdraws(ABC):
    """Work of a receive that can be taken back as long as no message has met it."""

    __slots__ = ()

    @abstractmethod
    def withdraw(self, later: Callable[[], None]) -> bool | None:
        """Take it back; see `Communicator.withdraw_receive`."""


class Looks(ABC):
    """Work of an operation that a waiting thread can do instead of sleeping at once.

    No protocol: to find out whether something follows one takes 8 to 14 us, in each wait.
    """

    __slots__ = ()

    @abstractmethod
    def cancel(self) -> object:
        """Stop it, soon."""

    @abstractmethod
    def look_here(self, handover: Handover, longest_s: float | None) -> None:
        """Try for a while, for so long at most, to end the operation."""


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


class InTurn:
    """Calls callbacks one after the other, never one within another: chains of operations must not recurse."""

    def __init__(self) -> None:
        self._callbacks: deque[Callable[[], None]] = deque()
        self._calling = False

    def call(self, callback: Callable[[], None]) -> None:
        """Call `callback` now, or after the one that is running and those that wait."""
        self._callbacks.append(callback)
        if self._calling:
            return
        self._calling, errors = True, []
        try:
            while self._callbacks:
                try:
                    self._callbacks.popleft()()
                except Exception as error:  # the callbacks behind it are of other operations
                    errors.append(error)
        finally:
            self._calling = False
        if errors:
            raise errors[0] if len(errors) == 1 else ExceptionGroup("callbacks of operations", errors)


# A turn of the loop takes 15 to 35 us. A message of 64 KiB each way between two processes takes 250, and two such turns
# if each await that finds its operation ended takes one. Others wait for so long as for two of those messages.
_EVERY_S = 0.5e-3


class Turns:
    """Turns of the tasks of one loop.

    Args:
        every_s: Other tasks run after so long.
    """

    __slots__ = ("_every_s", "_last_s")

    def __init__(self, every_s: float = _EVERY_S) -> None:
        self._every_s, self._last_s = every_s, perf_counter()

    def pause(self) -> Coroutine[object, object, None]:
        """Return a checkpoint: it checks for cancellation, and lets other tasks run if it is their turn."""
        now_s = perf_counter()
        if now_s - self._last_s < self._every_s:
            return checkpoint_if_cancelled()  # noqa: ASYNC105 (the caller awaits it)
        self._last_s = now_s
        return checkpoint()  # noqa: ASYNC105 (the caller awaits it)
