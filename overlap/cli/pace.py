"""Pace of long commands: what they do, how far they are and how long they will take, on stderr; and their early end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from warnings import catch_warnings, filterwarnings

from ..notice import notify
from ..signals import obeying
from ..units import format_s

_FIRST_S = 2.0
"""A command that takes less says nothing."""
_AGAIN_S = 10.0


@contextmanager
def pace(clock_s: Callable[[], float] = monotonic) -> Iterator[Callable[[int, int, str], bool]]:
    """Yield a function that takes how many pieces of work are done, of how many (0: unknown), and what comes next.

    The function returns whether it has told the user.

    Raises:
        Terminated: If the process was told to end meanwhile; the user has been told.
    """
    begun_s = clock_s()
    due_s, told = begun_s + _FIRST_S, False

    def tell(done: int, total: int, what: str) -> bool:
        nonlocal due_s, told
        now_s = clock_s()
        if now_s < due_s:
            return False
        due_s, told = now_s + _AGAIN_S, True
        gone_s = now_s - begun_s
        left = f", about {format_s(gone_s * (total - done) / done)} left" if done and total else ""
        share = f"{done} of {total} done in {format_s(gone_s)}{left}; " if total else ""
        notify(f"{share}{what}")
        return True

    try:
        with catch_warnings(), obeying():
            _ignore_interrupted()
            yield tell
    except (KeyboardInterrupt, SystemExit):
        _ignore_interrupted()
        raise
    if told:
        notify(f"done in {format_s(clock_s() - begun_s)}")


def _ignore_interrupted() -> None:
    """Ignore warnings of coroutines that an interrupt has kept from being awaited, also of those collected later."""
    filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)
