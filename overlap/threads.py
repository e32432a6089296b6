"""Starts threads, and says what is the matter where the system allows no more."""

from __future__ import annotations

from threading import Thread

from .errors import UsageError


def start_thread(thread: Thread, need: str = "a world needs a few") -> None:
    """Start a thread.

    Args:
        thread: Which has a name.
        need: How many are needed, for the message.

    Raises:
        UsageError: If the system allows no more threads.
    """
    try:
        thread.start()
    except RuntimeError as error:  # "can't start new thread"
        raise UsageError(f"no thread for {thread.name!r} ({error}); {need}: allow more (ulimit -u)") from error
