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

_looking = RLock()
# A fork waits for it: else the child's collector could stay off for ever.
os.register_at_fork(before=_looking.acquire, after_in_parent=_looking.release, after_in_child=_looking.release)


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


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep the garbage collector off while frames are asked for that another thread may leave.

    Python 3.11 makes a frame's object when somebody asks for it, and may collect garbage for that. A finalizer can then
    let the other thread go on and leave the frame, and the object made for it overwrites what took the frame's place:
    a crash, or worse. From 3.12 on, nothing is collected there.
    """
    if sys.version_info >= (3, 12):
        yield
        return
    with _looking:  # else one thread would turn the collector on while another still looks
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()


def frames_of(thread: int) -> list[FrameType]:
    """Return the frames of a thread, innermost first; none if it has ended.

    Args:
        thread: Its ident.
    """
    frames: list[FrameType] = []
    with without_collector():
        frame = sys._current_frames().get(thread)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
    return frames
