"""The watchman of a process: lets those look who wait for ranks elsewhere, whenever somebody rings."""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import suppress
from functools import cache
from time import perf_counter

import trio
from trio.lowlevel import Abort, RaiseCancelT, Task, current_task, reschedule, wait_task_rescheduled

from transports.shared_memory.board import Boards, fence

__all__ = ["Watchman", "must_ring"]

# Waking another process takes 15 us and more, and being woken as long: a process looks for a moment before it sleeps.
# Measured on 2 processes, 8 bytes: 5 us with 50 us of that, 33 without (without a framework around it).
_SPIN_S = 50e-6
# Where processes share cores, who waits gives way so often before it sleeps. Measured on 4 processes, 2 cores: 8
# bytes take 28 us so and 71 without, 1 MiB 0.22 to 0.53 ms and 0.35 to 1.2. On a core that others want, turns take
# milliseconds: after one that was longer than this, it sleeps at once for a while.
_TURNS, _LONG_TURN_S, _REST_S = 20, 200e-6, 20e-3


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)  # whose calls let other threads of this process run, too, which `os.sched_yield` does not


def must_ring(asleep: memoryview) -> bool:
    """Whether a process sleeps; where a lock may not order what processors see, always."""
    return bool(asleep[0]) or platform.machine() not in ("x86_64", "AMD64")


class Watchman:
    """One for each process. Whoever rings writes to its bell; who waits for nobody is not rung.

    Args:
        boards: Of this process.
        bell: Descriptor that becomes readable when somebody rings.
        asleep: Word that says whether somebody needs to.
        spins: Whether there are cores for looking a moment before sleeping; else those who share them take turns.
    """

    def __init__(self, boards: Boards, bell: int, asleep: memoryview, *, spins: bool) -> None:
        self._boards, self._bell, self._asleep = boards, bell, asleep
        self._spins = spins
        self._parked: Task | None = None
        self._resumes_s = 0.0
        boards.on_watch = self._wake

    async def run(self) -> None:
        """Watch, as long as anybody waits."""
        boards = self._boards
        while True:
            if not boards.watching:
                await self._park()
            await (self._spin() if self._spins else self._give_way())
            if boards.watching:
                await self._sleep()
            boards.look()

    async def _spin(self) -> None:
        until = perf_counter() + _SPIN_S
        while self._boards.watching and perf_counter() < until:
            await trio.lowlevel.checkpoint()
            self._boards.look()

    async def _give_way(self) -> None:
        """Let other processes have this core for a moment: those that are waited for."""
        await trio.lowlevel.checkpoint()
        self._boards.look()
        before = perf_counter()
        if before < self._resumes_s:
            return
        for _ in range(_TURNS):
            if not self._boards.watching:
                return
            _libc().sched_yield()
            now = perf_counter()
            if now - before > _LONG_TURN_S:
                self._resumes_s = now + _REST_S
                return
            before = now
            self._boards.look()

    async def _sleep(self) -> None:
        self._asleep[0] = 1
        fence()
        self._boards.look()  # who came before could not know that this process sleeps
        try:
            if self._boards.watching:
                await trio.lowlevel.wait_readable(self._bell)
        finally:
            self._asleep[0] = 0
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)

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
