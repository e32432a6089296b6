"""Ends of daemons: they are cancelled with the program of their rank, and waited for, as Trio waits for any task.

A daemon that shields itself from its cancellation, or catches it and goes on, keeps its rank from ending. It is named
again and again, by a thread: virtual time stands still while a task catches its cancellation in a loop. Nobody may
watch a process of `overlap run`, which ends after a limit.
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
from .ending import leave
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
    """Names the daemons of a world that go on after their cancellation; its thread lives as long as a rank waits.

    Args:
        failure: Returns the error of the world; None if no rank has failed.
    """

    def __init__(self, failure: Callable[[], BaseException | None]) -> None:
        self._failure = failure
        self._cancelled_s: dict[TaskFuture[Any], float] = {}
        self._due_s: dict[TaskFuture[Any], float] = {}  # time of the next notice
        self._waits = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._limited = "OVERLAP_STATUS_FD" in os.environ

    async def end_daemons(self, outstanding: Outstanding, *, on_late: Callable[[], None] = lambda: None) -> None:
        """Cancel the daemons of a rank, and wait for them.

        Daemons last as long as tasks and no longer: a daemon that receives for ever would keep the rank waiting for its
        message.

        Args:
            outstanding: The operations and daemons of the rank.
            on_late: Called once if a daemon still runs after `GRACE_S`.
        """
        daemons = [daemon for daemon in outstanding.daemons if isinstance(daemon, TaskFuture)]
        if not daemons:
            return
        for daemon in daemons:
            daemon.cancel()
        with self._watching(daemons):
            with trio.move_on_after(GRACE_S):
                await outstanding.daemons_ended()
            if outstanding.daemons:
                on_late()
            await outstanding.daemons_ended()

    @contextmanager
    def _watching(self, daemons: Collection[TaskFuture[Any]]) -> Iterator[None]:
        """Name cancelled daemons while the block waits for them; a second Ctrl-C ends the process then."""
        self._cancelled_s.update(dict.fromkeys(daemons, monotonic()))
        self._due_s.update(dict.fromkeys(daemons, monotonic() + GRACE_S))
        if self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._name_daemons, name="overlap daemons", daemon=True)
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

    def _name_daemons(self) -> None:
        """Name each daemon that still runs, as long as a rank waits for one; end a launched process after `LIMIT_S`."""
        after = f"its process ends after {LIMIT_S:g} s" if self._limited else "Ctrl-C twice ends the process"
        while not self._ended.wait(min(_LOOK_S, GRACE_S)):
            now_s = monotonic()
            for daemon, due_s in list(self._due_s.items()):
                name = f"{daemon.label} ({daemon.call_site}) of rank {daemon.context.rank}"
                if daemon.state >= DONE:
                    del self._due_s[daemon]
                elif self._limited and now_s >= self._cancelled_s[daemon] + LIMIT_S:
                    line = f"{name} did not end within {LIMIT_S:g} s of its cancellation, and its process ends"
                    if (failure := self._failure()) is not None:
                        notify(line)
                    leave(failure or OverlapError(line))
                elif now_s >= due_s:
                    self._due_s[daemon] = now_s + REPEAT_S
                    notify(
                        f"{name} goes on although it was cancelled, and its rank waits for it: let it end on "
                        f"trio.Cancelled, and shield for bounded clean-up only; {after}"
                    )
