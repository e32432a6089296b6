"""Delays of threads that wait for a processor, and limits of time without them: a busy host fails no right program."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import get_native_id
from time import monotonic_ns

import trio

_THREADS = Path("/proc/self/task")


def read_delays() -> dict[str, int]:
    """Return by thread id the nanoseconds that each thread of this process was ready to run and waited for a processor.

    Linux counts them: Documentation/scheduler/sched-stats.rst, "/proc/<pid>/schedstat". On other systems the result is
    empty. The call takes 9 us per thread.
    """
    delays: dict[str, int] = {}
    with suppress(OSError):
        for thread in os.listdir(_THREADS):
            with suppress(OSError, IndexError, ValueError):  # the thread has ended, or the file has another form
                with open(f"{_THREADS}/{thread}/schedstat", "rb", buffering=0) as file:
                    delays[thread] = int(file.read().split()[1])
    return delays


@dataclass(frozen=True, slots=True)
class Instant:
    """An instant, to measure the own time of this process between two instants.

    Own time is wall time less the time that the most delayed thread waited for a processor, see `read_delays`. So a
    busy host does not use up a limit of own time. Where the system counts no delays, own time is wall time.
    """

    wall_ns: int  # On any clock that does not go back
    delays_ns: Mapping[str, int]  # By thread, see `read_delays`

    @classmethod
    def now(cls, now_ns: Callable[[], int] = monotonic_ns) -> Instant:
        """Return the present instant, without the delay of the calling thread.

        The caller watches other threads, and no other thread waits for it.

        Args:
            now_ns: The clock to read, in nanoseconds.
        """
        delays_ns = read_delays()
        delays_ns.pop(str(get_native_id()), None)
        return cls(now_ns(), delays_ns)

    def own_seconds_since(self, earlier: Instant) -> float:
        """Return the seconds of own time since an earlier instant.

        Here 10 s of wall time passed, in which thread 1 was delayed by 3 s and thread 2 by 4 s:

        >>> began = Instant(10_000_000_000, {"1": 0, "2": 2_000_000_000})
        >>> Instant(20_000_000_000, {"1": 3_000_000_000, "2": 6_000_000_000}).own_seconds_since(began)
        6.0
        """
        delays_ns = (ns - earlier.delays_ns.get(thread, 0) for thread, ns in self.delays_ns.items())
        return (self.wall_ns - earlier.wall_ns - max(delays_ns, default=0)) / 1e9


@contextmanager
def limit_own_time(seconds: float) -> Iterator[trio.CancelScope]:
    """Cancel the block after that many seconds of own time, and continue behind it, as `trio.move_on_after` does.

    Own time is wall time less the delays of the threads of this process, see `Instant`.
    """
    began = _now_on_trio_clock()
    block, watching = trio.CancelScope(), trio.CancelScope()

    async def cancel_block() -> None:
        with watching:
            left_s = seconds
            while left_s > 0:
                await trio.sleep_until(trio.current_time() + left_s)
                # part of the time may have been delay: then own time is still left, and the task sleeps again
                left_s = seconds - _now_on_trio_clock().own_seconds_since(began)
            block.cancel()

    # A system task, because a nursery around the caller's block would wrap the errors of the block in groups.
    trio.lowlevel.spawn_system_task(cancel_block)
    try:
        with block:
            yield block
    finally:
        watching.cancel()


def _now_on_trio_clock() -> Instant:
    """Unlike `Instant.now`, count the delay of the calling thread, because the limited block runs in this thread."""
    return Instant(round(trio.current_time() * 1e9), read_delays())
