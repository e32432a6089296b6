"""End of daemons: when the program of their rank ends, they are cancelled, and the rank waits for their end.

A daemon that shields itself from its cancellation, or catches it and goes on, keeps its rank from ending. A thread
prints notices that name the daemon; a task could not do that in virtual time, which stands still while another task
catches its cancellation in a loop. A process of `overlap run`, which nobody may watch, ends after a time limit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import trio

from ..errors import OverlapError
from ..notice import notify
from .forks import exit_process
from .interrupts import ending_at_second_interrupt
from .outstanding import Outstanding
from .state import DONE
from .task import TaskFuture

GRACE_S = 5.0
"""Seconds from the cancellation of a daemon to the first notice; other ranks get the failure of its rank then."""
REPEAT_S = 10.0
"""Seconds between two notices on a daemon."""
LIMIT_S = 20.0
"""Seconds from the cancellation of a daemon to the end of a process that `overlap run` has started."""
_LOOK_S = 0.05


class DaemonWatch:
    """Prints notices on daemons of a world that run on after their cancellation. Its thread runs while a rank waits.

    Args:
        failure: Returns the error of the world; None if no rank has failed.
    """

    def __init__(self, failure: Callable[[], BaseException | None]) -> None:
        self._failure = failure
        self._cancelled_s: dict[TaskFuture[Any], float] = {}
        self._due_s: dict[TaskFuture[Any], float] = {}  # time of the next notice on each daemon
        self._waits = 0  # number of ranks that wait for daemons
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._limited = "OVERLAP_STATUS_FD" in os.environ

    async def end_daemons(self, outstanding: Outstanding, *, on_late: Callable[[], None] = lambda: None) -> None:
        """Cancel the daemons of a rank, and wait until they have ended.

        Args:
            outstanding: The operations and daemons of the rank.
            on_late: Called once if a daemon still runs after `GRACE_S`.
        """
        daemons = [daemon for daemon in outstanding.daemons if isinstance(daemon, TaskFuture)]
        if not daemons:
            return
        for daemon in daemons:
            daemon.cancel()
        with self._printing_notices(daemons):
            with trio.move_on_after(GRACE_S):
                await outstanding.wait_for_daemons()
            if outstanding.daemons:
                on_late()
            await outstanding.wait_for_daemons()

    @contextmanager
    def _printing_notices(self, daemons: Collection[TaskFuture[Any]]) -> Iterator[None]:
        """Print notices on cancelled daemons while the block waits for them. In it a second Ctrl-C ends the process."""
        self._cancelled_s.update(dict.fromkeys(daemons, monotonic()))
        self._due_s.update(dict.fromkeys(daemons, monotonic() + GRACE_S))
        if self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._print_due_notices, name="overlap daemons", daemon=True)
            self._thread.start()
        self._waits += 1
        try:
            with ending_at_second_interrupt():
                yield
        finally:
            self._waits -= 1
            if not self._waits:
                self._ended.set()
                self._thread.join()
                self._thread = None

    def _print_due_notices(self) -> None:
        """Print notices until no rank waits any more. The thread of the watch runs this."""
        while not self._ended.wait(min(_LOOK_S, GRACE_S)):
            for daemon in list(self._due_s):
                if daemon.state >= DONE:
                    del self._due_s[daemon]
                else:
                    self._handle_late_daemon(daemon, monotonic())

    def _handle_late_daemon(self, daemon: TaskFuture[Any], now_s: float) -> None:
        """Print a notice on a daemon that still runs, if one is due.

        `LIMIT_S` after its cancellation, a process that `overlap run` has started (`_limited`) ends here.
        """
        name = f"{daemon.label} ({daemon.call_site}) of rank {daemon.context.rank}"
        if self._limited and now_s >= self._cancelled_s[daemon] + LIMIT_S:
            line = f"{name} did not end within {LIMIT_S:g} s of its cancellation, and its process ends"
            if (failure := self._failure()) is not None:
                notify(line)
            exit_process(failure or OverlapError(line))
        if now_s >= self._due_s[daemon]:
            self._due_s[daemon] = now_s + REPEAT_S
            after = f"its process ends after {LIMIT_S:g} s" if self._limited else "Ctrl-C twice ends the process"
            notify(
                f"{name} goes on although it was cancelled, and its rank waits for it: let it end on trio.Cancelled, "
                f"and shield for bounded clean-up only; {after}"
            )
