"""What must hold around every test of every room: signals act as in a terminal, and nothing is left behind."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

_DESCRIPTORS = Path("/proc/self/fd")
# Trio keeps idle worker threads for ten seconds, to use them again.
_CACHED = "Trio thread"


_SIGNALS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGQUIT: signal.SIG_DFL,
}


@pytest.fixture(autouse=True, scope="session")
def _signals_act_as_in_a_terminal() -> Iterator[None]:
    """Who starts pytest in the background, or under nohup, lets it ignore signals, and all that tests start."""
    before = {number: signal.signal(number, handler) for number, handler in _SIGNALS.items()}
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for number, handler in before.items():
        signal.signal(number, handler)


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.name.startswith(_CACHED)}


def _sockets() -> set[str]:
    """Return the open sockets of this process, where the system tells."""
    found = set()
    for descriptor in _DESCRIPTORS.iterdir() if _DESCRIPTORS.is_dir() else ():
        try:
            target = os.readlink(descriptor)
        except OSError:  # the one that iterdir itself held open
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Fail a test that leaves a thread or a socket behind."""
    threads, sockets = _threads(), _sockets()
    yield
    left = sorted(thread.name for thread in _threads() - threads)
    assert not left, f"threads left behind: {', '.join(left)}"
    opened = len(_sockets() - sockets)
    assert not opened, f"{opened} sockets left open"
