"""Functions that start a thread with a readable error, read another thread's frames, and pause garbage collection."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, Thread
from types import FrameType

from .errors import UsageError

#: Text of Python's RuntimeError if the system refuses a thread.
_NO_MORE_THREADS = "can't start new thread"

_pausing = RLock()
_pauses, _collected = 0, False  # blocks under way that pause the garbage collector, and whether it was on before them


def _end_pauses_in_fork() -> None:
    """End the pauses of a process that is a fork: the threads that were in them do not exist there."""
    global _pauses
    if _pauses and _collected:
        gc.enable()
    _pauses = 0
    _pausing.release()


os.register_at_fork(before=_pausing.acquire, after_in_parent=_pausing.release, after_in_child=_end_pauses_in_fork)


def start_thread(thread: Thread, *, need: str = "a world needs a few") -> None:
    """Start a thread.

    Args:
        thread: The thread; the error names it.
        need: Clause for the error that says how many threads are needed.

    Raises:
        UsageError: The system allows no more threads.
        RuntimeError: The thread has been started before, or the interpreter ends.
    """
    try:
        thread.start()
    except RuntimeError as error:
        if str(error) != _NO_MORE_THREADS:
            raise
        raise UsageError(
            f"no thread for {thread.name!r} ({error}); {need}: allow more (ulimit -u), or spread the ranks over "
            "processes of several machines"
        ) from error


@contextmanager
def paused_garbage_collector() -> Iterator[None]:
    """Disable the garbage collector in the block, and in blocks of other threads that overlap with it.

    The last block that ends enables it again, if it was on before the first. Blocks that each put back what they have
    found would leave it off for ever, if one looks while another has disabled it, and disables it after that one's end.
    """
    global _pauses, _collected
    with _pausing:
        if _pauses == 0:
            _collected = gc.isenabled()
        gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _pausing:
            _pauses -= 1
            if _pauses == 0 and _collected:
                gc.enable()


@contextmanager
def without_garbage_collector() -> Iterator[None]:
    """Disable the garbage collector while this thread reads frames of another thread.

    Python 3.11 makes the object of a frame when the frame is first read, and may collect garbage for that. A finalizer
    can then let the other thread leave the frame, and the new object overwrites other memory. From 3.12 on, garbage is
    collected only between two instructions, so that the object is complete before another thread runs.
    """
    if sys.version_info >= (3, 12):
        yield
        return
    with paused_garbage_collector():
        yield


def read_frames(thread: int) -> list[FrameType]:
    """Return the frames of a thread, innermost first; [] if the thread has ended.

    Args:
        thread: `Thread.ident` of the thread.
    """
    frames: list[FrameType] = []
    with without_garbage_collector():
        frame = sys._current_frames().get(thread)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
    return frames
