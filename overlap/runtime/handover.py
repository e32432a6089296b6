"""Handover: other threads pass work to the event loop, or do it in the loop's place while it sleeps.

If a thread wakes a sleeping loop, and the loop wakes the waiting thread, these two wake-ups take longer than a small
operation. So one thread at a time may take the place of the loop. The reasons why this is safe:

* **One at a time.** Data of the loop that have no lock of their own are guarded by a turn, a lock that knows its
  thread. The loop's thread holds it whenever it runs, gives it away only while it waits for input and output, and takes
  it back before anything of it runs (`_TurnInstrument`). A thread works in the loop's place only while it holds the
  turn (`Handover.run_in_place`).
* **Only work that wakes no task.** Tasks belong to Trio's own thread. An operation is issued in place if nothing of it
  starts or wakes a task: `Ports._enqueue_in_thread` checks all of it in one expression, and its plan answers for itself
  (`CallPlan.runs_in_any_thread`). It ends in place unless its end wakes the loop (`CollectiveFuture.end_wakes_loop`);
  otherwise the end is posted.
* **Order.** Posted work (`post`) runs before work in place, which is refused while posted work waits. The end of work
  that only one operation waits for may skip this order: it is reported by the loop's token.
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
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import trio
from trio import RunFinishedError

from .settling import LONGEST_WAIT_S

if TYPE_CHECKING:
    from transports.shared_memory.engine import Run

    from .operation import Operation

T = TypeVar("T")
_Work: TypeAlias = tuple[object, Callable[..., object], tuple[object, ...]]

#: A turn of the loop with little to do takes 50 to 100 us, and to wake a sleeping loop takes 100 to 300.
ABOUT_TO_SLEEP_S = 100e-6


class Handover:
    """Passes calls of other threads to the event loop, in their order.

    To wake a loop takes a system call, which also passes the interpreter's lock to it: many calls at a time do so once.

    After `allow_work_in_place`, one thread at a time may do work of the sleeping loop that wakes no task; see the
    module.

    Args:
        token: Token of the event loop.

    Attributes:
        turn: Lock that guards the loop's data. The loop holds it while it runs. None: no thread may work in its place.
        posted: Calls that wait for the loop.
    """

    __slots__ = ("_called_in", "_interrupted", "_runs", "_token", "posted", "turn")

    def __init__(self, token: trio.lowlevel.TrioToken) -> None:
        self._token = token
        self.posted: deque[_Work] = deque()
        self._runs = 0  # how often the loop has begun to do posted work
        self._called_in = -1  # value of `_runs` when the loop was last woken
        self.turn: threading.RLock | None = None
        self._interrupted: Callable[[BaseException], None]

    def allow_work_in_place(self, interrupted: Callable[[BaseException], None]) -> None:
        """Allow threads to do the loop's work while it sleeps. On the loop's thread only.

        Args:
            interrupted: Called on the loop's thread if an interrupt has left the loop's work half done.
        """
        self._interrupted = interrupted
        if self.turn is None:
            self.turn = threading.RLock()  # it has an owner thread, which `run_in_place` needs
            self.turn.acquire()
            trio.lowlevel.add_instrument(_TurnInstrument(self.turn))

    def run_in_place(self, work: Callable[[], T], otherwise: T) -> T:
        """Do work of the sleeping loop in this thread, and return its result.

        Return `otherwise`, without doing the work, if the loop does not sleep or posted work waits. The thread waits a
        moment for a loop that is about to sleep: to wake it again takes longer.

        Ctrl-C, and any other error of a signal handler, may be raised between any two instructions. The loop gets its
        place back all the same, and a report that the work is half done.
        """
        turn = self.turn
        if turn is None:
            return otherwise
        leave, works = turn.release, False
        try:
            if not (turn.acquire(blocking=False) or turn.acquire(timeout=ABOUT_TO_SLEEP_S)):
                return otherwise
            if self.posted:
                return otherwise
            works = True
            result = work()
            works = False
            return result
        except BaseException as error:
            if works:
                self.report_interrupted_work(error)
            raise
        finally:
            try:  # noqa: SIM105 - a function in Python could be interrupted before its first instruction
                leave()
            except RuntimeError:  # it does not hold the turn
                pass

    def wait_and_end_operation(
        self,
        wait: Callable[[float], bool],
        longest_s: float | None,
        end_here: Callable[[], bool],
        end_on_loop: Callable[[], object],
    ) -> None:
        """Wait in a thread until an operation's bytes have moved, and end the operation in the loop's place.

        It may return before the operation has ended: at the time limit, or because only the loop may end it. Then that
        is posted to the loop. The caller looks at the operation's state, and waits for the rest in another way.

        Args:
            wait: Waits for that many seconds, without the interpreter's lock; returns whether no more bytes move.
            longest_s: Time limit in seconds; None: none. The wait may return long before.
            end_here: Ends the operation in the loop's place; returns False if only the loop may.
            end_on_loop: Ends the operation on the loop.
        """
        left_to_loop = True
        try:
            limit_s = LONGEST_WAIT_S if longest_s is None else min(longest_s, LONGEST_WAIT_S)
            at_limit = not wait(limit_s)  # its bytes still move, and there is nothing to end
            left_to_loop = not (at_limit or self.run_in_place(end_here, False))
        finally:  # a signal handler may raise anywhere
            if left_to_loop:
                self.post_if_open(end_on_loop)

    def report_interrupted_work(self, error: BaseException) -> None:
        """Report that an interrupt has left the loop's work half done, and let no other thread continue it."""
        self.turn = None
        self.post(self._interrupted, error)

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Let the loop call a function soon. Any thread may call it.

        Raises:
            RunFinishedError: If the loop has ended.
        """
        work = object(), function, args  # equal to itself alone, for `remove`; a partial takes 100 ns more
        self.posted.append(work)
        runs = self._runs
        if self._called_in == runs:  # the loop has been woken and has not looked yet: it will find this work, too
            return
        try:
            self._token.run_sync_soon(self._run_posted)
        except RunFinishedError:
            with suppress(ValueError):  # not there: the loop has done the work in its last turn, and nothing is raised
                self.posted.remove(work)
                raise
        else:
            self._called_in = runs  # only now: posts of other threads rely on the call

    def post_if_open(self, function: Callable[..., object]) -> None:
        """Let the loop call a function soon, if there is a loop. Any thread may call it, at any point of a program."""
        with suppress(RunFinishedError):
            self.post(function)

    def _run_posted(self) -> None:
        """Call the functions that other threads have posted so far, on the event loop."""
        self._runs += 1  # first: a later post wakes the loop again, or its work is found below
        queue = self.posted
        for _ in range(len(queue)):  # no later work, so that busy threads do not keep the loop from all else
            try:
                _, function, args = queue.popleft()
            except IndexError:  # a post that has come too late has removed its work
                return
            function(*args)


class _TurnInstrument(trio.abc.Instrument):
    """Instrument of Trio that releases the turn while the loop sleeps, and takes it back before the loop runs on.

    If the loop only looks for input and output, with a timeout of 0, it keeps the turn.
    """

    def __init__(self, turn: threading.RLock) -> None:
        self._turn, self._has_released = turn, False

    def before_io_wait(self, timeout: float) -> None:
        """Release the turn if the loop is about to sleep."""
        if timeout > 0:
            self._has_released = True
            self._turn.release()

    def after_io_wait(self, timeout: float) -> None:
        """Take the turn back, which may wait for the work of a thread."""
        if self._has_released:
            self._has_released = False
            self._turn.acquire()


class OperationRun(ABC):
    """One rank's side of an operation in an engine that any thread may submit to, and wait in.

    It is no protocol, because `isinstance` would take 8 to 14 us.

    Attributes:
        operation: The operation.
        run: Run of the operation in the engine, once it has begun.
        memory: Object that owns memory that the engine may touch; it is held until the end.
    """

    __slots__ = ("memory", "operation", "run")

    operation: Operation
    run: Run | None
    memory: object

    @abstractmethod
    def cancel(self) -> object:
        """Stop the work, soon."""

    @abstractmethod
    def wait_in_engine(self, handover: Handover, longest_s: float | None) -> None:
        """Wait for a while in the engine, and end the operation in the loop's place.

        See `Handover.wait_and_end_operation`.

        Args:
            handover: Handover of the loop.
            longest_s: Time limit in seconds; None: none. The wait may return long before.
        """

    @abstractmethod
    def match_late(self) -> None:
        """Match the operation on the loop, after a thread has submitted it, and it has not ended in time."""
