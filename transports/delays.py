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
    """Return for each thread of this process the nanoseconds in which it could run, and waited for a processor.

    Linux counts them: Documentation/scheduler/sched-stats.rst, "/proc/<pid>/schedstat". Elsewhere there are none. The
    cost is 9 us per thread.
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
    """An instant of this process, for a limit of its own time.

    Own time is wall time less the delay of the most delayed thread: without the load, no thread would have been late
    by more. Where the system counts no delays, own time is wall time.
    """

    wall_ns: int  # On any clock that does not go back
    delays_ns: Mapping[str, int]  # By thread, see `read_delays`

    @classmethod
    def now(cls, now_ns: Callable[[], int] = monotonic_ns) -> Instant:
        """Return the present instant, without the delay of this thread: it watches, and nothing waits for it."""
        delays_ns = read_delays()
        delays_ns.pop(str(get_native_id()), None)
        return cls(now_ns(), delays_ns)

    def since(self, earlier: Instant) -> float:
        """Return the seconds of own time since an earlier instant.

        >>> began = Instant(10_000_000_000, {"1": 0, "2": 2_000_000_000})
        >>> Instant(20_000_000_000, {"1": 3_000_000_000, "2": 6_000_000_000}).since(began)
        6.0
        """
        delays_ns = (ns - earlier.delays_ns.get(thread, 0) for thread, ns in self.delays_ns.items())
        return (self.wall_ns - earlier.wall_ns - max(delays_ns, default=0)) / 1e9


@contextmanager
def limit_own_time(seconds: float) -> Iterator[trio.CancelScope]:
    """Cancel the block after that many seconds of own time, and go on after it, as `trio.move_on_after` does."""
    began = _instant_of_loop()
    block, watching = trio.CancelScope(), trio.CancelScope()

    async def cancel_block() -> None:
        """Cancel the block at its limit."""
        with watching:
            left_s = seconds
            while left_s > 0:
                await trio.sleep_until(trio.current_time() + left_s)
                left_s = seconds - _instant_of_loop().since(began)
            block.cancel()

    trio.lowlevel.spawn_system_task(cancel_block)
    try:
        with block:
            yield block
    finally:
        watching.cancel()


def _instant_of_loop() -> Instant:
    """Return the present instant on Trio's clock, with the delay of this thread: the block needs it, too."""
    return Instant(round(trio.current_time() * 1e9), read_delays())
