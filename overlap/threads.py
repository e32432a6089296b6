"""Start of threads, with the reason where the system allows no more; and the position of another thread."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, Thread
from types import FrameType

from .errors import UsageError

#: Error of Python where the system refuses a thread.
_NO_MORE_THREADS = "can't start new thread"

_reading_frames = RLock()
# A fork waits for it: else the child's collector could stay off for ever.
os.register_at_fork(
    before=_reading_frames.acquire, after_in_parent=_reading_frames.release, after_in_child=_reading_frames.release
)


def start_thread(thread: Thread, *, need: str = "a world needs a few") -> None:
    """Start a thread.

    Args:
        thread: The thread; its name is in the error.
        need: Number of threads that are needed, for the error.

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
def without_collector() -> Iterator[None]:
    """Disable the garbage collector while this thread reads frames of another one.

    Python 3.11 makes a frame's object at its first use, and may collect garbage for that. A finalizer can then let the
    other thread leave the frame, and the new object overwrites the memory that follows it: a crash, or worse. From
    3.12 on, garbage is collected between two instructions only, and a thread that leaves a frame there leaves a whole
    object.
    """
    if sys.version_info >= (3, 12):
        yield
        return
    with _reading_frames:  # else one thread would turn the collector on while another still looks
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()


def read_frames(thread: int) -> list[FrameType]:
    """Return the frames of a thread, by its ident, innermost first; none if it has ended."""
    frames: list[FrameType] = []
    with without_collector():
        frame = sys._current_frames().get(thread)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
    return frames
