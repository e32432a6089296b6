"""Functions that start a thread with a readable error and read another thread's frames; shared changes of settings."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from threading import RLock, Thread
from types import FrameType
from typing import Self

from .errors import UsageError

#: Text of Python's RuntimeError if the system refuses a thread.
_NO_MORE_THREADS = "can't start new thread"


class SharedChange(ContextDecorator):
    """A change of a setting of the process, for several threads at one time: the first makes it, the last undoes it.

    It is a context, and a decorator. Blocks that each restored what they had found could leave the change behind: if
    one looks while the change holds for another, and makes it after that one's end.

    Args:
        change: Makes the change, and returns the function that undoes it.
    """

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
        # a finalizer that runs under the lock may need it, too
        self._change, self._users, self._lock = change, 0, RLock()
        self._undo: Callable[[], None]

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._undo = self._change()
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._undo()

    def undo_in_forks(self) -> Self:
        """Undo the change in each process that is a fork, which lacks the threads that need it; return this object."""

        def undo() -> None:
            if self._users:
                self._users = 0
                self._undo()
            self._lock.release()

        os.register_at_fork(before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=undo)
        return self


def _disable_garbage_collector() -> Callable[[], None]:
    is_on = gc.isenabled()
    gc.disable()
    return gc.enable if is_on else lambda: None


paused_garbage_collector: SharedChange = SharedChange(_disable_garbage_collector).undo_in_forks()
"""Context in which the garbage collector is off, in all threads."""


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
    with paused_garbage_collector:
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
