"""Progress of long commands on stderr: their work, its share that is done, the time left; and their early end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from warnings import catch_warnings, filterwarnings

from ..notice import notify
from ..signals import handling_signals
from ..units import format_s

_FIRST_S = 2.0
"""A command that takes less says nothing."""
_AGAIN_S = 10.0


@contextmanager
def pace(clock_s: Callable[[], float] = monotonic) -> Iterator[Callable[[int, int, str], bool]]:
    """Yield a function that prints progress: it takes finished pieces, all pieces (0: unknown), and the next work.

    The function returns whether it printed.

    Raises:
        Terminated: If a signal ends the process; a message was printed.
    """
    begun_s = clock_s()
    due_s, is_shown = begun_s + _FIRST_S, False

    def print_pace(done: int, total: int, text: str) -> bool:
        """Print a line of progress, and return True; at most one every `_AGAIN_S` seconds, otherwise return False."""
        nonlocal due_s, is_shown
        now_s = clock_s()
        if now_s < due_s:
            return False
        due_s, is_shown = now_s + _AGAIN_S, True
        elapsed_s = now_s - begun_s
        left = f", about {format_s(elapsed_s * (total - done) / done)} left" if done and total else ""
        share = f"{done} of {total} done in {format_s(elapsed_s)}{left}; " if total else ""
        notify(f"{share}{text}")
        return True

    try:
        with catch_warnings(), handling_signals():
            _ignore_interrupted()
            yield print_pace
    except (KeyboardInterrupt, SystemExit):
        _ignore_interrupted()
        raise
    if is_shown:
        notify(f"done in {format_s(clock_s() - begun_s)}")


def _ignore_interrupted() -> None:
    """Ignore warnings of coroutines that an interrupt left without an await, also when they are collected later."""
    filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)
