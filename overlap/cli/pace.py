"""Pace of long commands: what they do, how far they are and how long they will take, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from ..notice import notify
from ..units import format_s

_FIRST_S = 2.0
"""A command that takes less says nothing."""
_AGAIN_S = 10.0


@contextmanager
def pace(clock_s: Callable[[], float] = monotonic) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function that takes how many pieces of work are done, of how many (0: unknown), and what comes next."""
    begun_s = clock_s()
    due_s, told = begun_s + _FIRST_S, False

    def tell(done: int, total: int, what: str) -> None:
        nonlocal due_s, told
        now_s = clock_s()
        if now_s < due_s:
            return
        due_s, told = now_s + _AGAIN_S, True
        gone_s = now_s - begun_s
        left = f", about {format_s(gone_s * (total - done) / done)} left" if done and total else ""
        share = f"{done} of {total} done in {format_s(gone_s)}{left}; " if total else ""
        notify(f"{share}{what}")

    yield tell
    if told:
        notify(f"done in {format_s(clock_s() - begun_s)}")
