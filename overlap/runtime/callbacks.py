"""Waits for the ends of futures: callbacks on the event loop or in any thread, and tasks of asyncio."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from .settling import LOCK, wait_for_lock
from .state import DONE

if TYPE_CHECKING:
    from .future import Future


def call_back(callback: Callable[[Any], object], future: Future[Any]) -> None:
    """Call a callback; an error that it raises is logged, and changes nothing.

    KeyboardInterrupt and SystemExit end the rank of the future, and so the world. A loop would not survive them.
    """
    try:
        callback(future)
    except BaseException as error:
        if not isinstance(error, Exception) and not trio.lowlevel.in_trio_run():
            raise  # in the program's own thread a Ctrl-C is the program's
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            future.context.interrupt(error)
            return
        logging.getLogger("overlap").exception("a callback of %r raised", future)


def call_when_done(future: Future[Any], callback: Callable[[], None]) -> None:
    """Call `callback` on the loop's thread once a future is settled; at once if it is. The loop's thread only."""
    future._claim()
    if future.done:
        callback()
        return
    with LOCK:
        future._add_callback(callback)
    future._claim()
    if future.done and future._take_callback(callback):  # a compute's thread has settled it in the meantime
        callback()


def call_anywhere(future: Future[Any], callback: Callable[[Any], object]) -> None:
    """Call `callback(future)` once a future is settled: at once if it is, else in the thread that settles it.

    The thread may be one of the program, so that no loop has to be woken. The callback must neither block nor use
    objects of the loop. An error that it raises is logged, and changes nothing.
    """
    call = partial(call_back, callback, future)
    with LOCK:
        waits = future._present < DONE
        if waits:
            future._anywhere = [*(future._anywhere or ()), call]
    future._claim()  # from here on the result has a user
    if not waits:
        call()
    elif future.done:  # it ended before the callback was registered
        future._call_anywhere()


def await_in_asyncio(future: Future[Any]) -> Generator[object, object, None]:
    """Wait on a loop of asyncio, which another thread wakes."""
    import asyncio  # imported already by a program that awaits there

    loop, ended, source = asyncio.get_running_loop(), asyncio.Event(), future._source()

    def wake(_: object) -> None:
        with suppress(RuntimeError):  # that loop has been closed
            loop.call_soon_threadsafe(ended.set)

    call_anywhere(source, wake)
    try:
        yield from ended.wait().__await__()
    except BaseException:
        with LOCK:
            source._anywhere = [call for call in source._anywhere or () if call.args[0] is not wake] or None
        source._await_cancelled_elsewhere()
        raise


def wait_in_thread(future: Future[Any], unless: Future[Any] | None = None) -> None:
    """Wait in a thread of ours without an event loop. It is no wait of the program, see `is_waited_for`.

    Args:
        unless: Another future; its end also ends the wait.
    """
    ended = threading.Lock()
    ended.acquire()

    def release(_: object) -> None:
        with suppress(RuntimeError):  # the other future has released it
            ended.release()

    call_anywhere(future._source(), release)
    if unless is not None:
        call_anywhere(unless, release)
    wait_for_lock(ended)
