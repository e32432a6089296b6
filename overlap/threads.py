"""Functions that start a thread with a readable error if the system allows none, and read another thread's frames."""

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

_reading_frames = RLock()
# A fork waits for the lock: a child of a fork inside the block would keep its garbage collector off for ever.
os.register_at_fork(
    before=_reading_frames.acquire, after_in_parent=_reading_frames.release, after_in_child=_reading_frames.release
)


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
def without_garbage_collector() -> Iterator[None]:
    """Disable the garbage collector while this thread reads frames of another thread.

    Python 3.11 makes the object of a frame when the frame is first read, and may collect garbage for that. A finalizer
    can then let the other thread leave the frame, and the new object overwrites other memory. From 3.12 on, garbage is
    collected only between two instructions, so that the object is complete before another thread runs.
    """
    if sys.version_info >= (3, 12):
        yield
        return
    with _reading_frames:  # else one thread could enable the collector while another thread still reads
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()


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
