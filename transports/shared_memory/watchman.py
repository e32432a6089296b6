"""The watchman of a process: lets those look who wait for ranks elsewhere, whenever somebody rings."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from time import perf_counter

import trio
from trio.lowlevel import Abort, RaiseCancelT, Task, current_task, reschedule, wait_task_rescheduled

from transports.patience import Patience
from transports.shared_memory.board import Boards, fence

__all__ = ["Watchman", "must_ring"]


def must_ring(asleep: memoryview) -> bool:
    """Whether a process sleeps; where a lock may not order what processors see, always."""
    return bool(asleep[0]) or platform.machine() not in ("x86_64", "AMD64")


class Watchman:
    """One for each process. Whoever rings writes to its bell; who waits for nobody is not rung.

    Where there are cores for it, it looks for a moment before it sleeps, and again whenever it was woken. Where
    processes share cores, that would only keep those away from them that are waited for.

    Args:
        boards: Of this process.
        bell: Descriptor that becomes readable when somebody rings.
        asleep: Word that says whether somebody needs to.
        spins: Whether there are cores for looking a moment before sleeping.
    """

    def __init__(self, boards: Boards, bell: int, asleep: memoryview, *, spins: bool) -> None:
        self._boards, self._bell, self._asleep = boards, bell, asleep
        self._spins = self._cores = spins
        self._parked: Task | None = None
        self._patience = Patience()
        boards.watchman = self

    # -- what boards ask for -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Watch: somebody waits, and nobody did."""
        if self._spins:
            self._wake()
        else:  # it always listens, and says so only while that is needed
            self._fall_asleep()

    def rest(self) -> None:
        """Take note that nobody waits any more."""
        if not self._spins:
            self._stay_awake()

    def listen(self) -> None:
        """Never look before sleeping: from now on threads do, who cannot wake this one."""
        if self._spins:
            self._spins = False
            if self._boards.watching:
                self._fall_asleep()
            self._wake()

    def rouse(self) -> float:
        """Be rung no more, for a thread looks instead; return for how many seconds it is worth it, 0 if it is not."""
        patience_s = self._patience.take() if self._cores else 0.0
        if patience_s:
            self._stay_awake()
        return patience_s

    def dozes(self, *, came: bool) -> None:
        """Be rung again, after a thread has looked."""
        self._patience.learn(came=came)
        if self._boards.watching:
            self.doze()

    def doze(self) -> None:
        """Be rung again."""
        self._asleep[0] = 1
        fence()

    # -- the task ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Watch."""
        while True:
            if self._spins:
                await self._look_before_sleeping()
            await trio.lowlevel.wait_readable(self._bell)
            if self._spins:
                self._stay_awake()
            with suppress(BlockingIOError):
                os.eventfd_read(self._bell)
            self._boards.look()

    async def _look_before_sleeping(self) -> None:
        """Return when somebody still waits after a moment, and others know that this process has to be rung."""
        watching = self._boards.watching
        while self._spins:
            if not watching:
                await self._park()
            await self._spin()
            if watching:
                self._fall_asleep()
                if watching:
                    return
                self._stay_awake()

    async def _spin(self) -> None:
        patience_s, watching = self._patience.take(), self._boards.watching
        if patience_s:
            until = perf_counter() + patience_s
            while watching and perf_counter() < until:
                await trio.lowlevel.checkpoint()
                self._boards.look()
            self._patience.learn(came=not watching)

    def _fall_asleep(self) -> None:
        self.doze()
        self._boards.look()  # who came before could not know that this process sleeps

    def _stay_awake(self) -> None:
        self._asleep[0] = 0

    async def _park(self) -> None:
        self._parked = current_task()
        await wait_task_rescheduled(self._cancelled)

    def _cancelled(self, _: RaiseCancelT) -> Abort:
        self._parked = None
        return Abort.SUCCEEDED

    def _wake(self) -> None:
        task, self._parked = self._parked, None
        if task is not None:
            reschedule(task)
