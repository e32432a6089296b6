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

if TYPE_CHECKING:
    from .future import Future


def call_and_log_errors(callback: Callable[[Any], object], future: Future[Any]) -> None:
    """Call `callback(future)`; an error that it raises is logged, and changes nothing.

    KeyboardInterrupt and SystemExit end the rank of the future, and so the world: raised here, they would end the event
    loop. In a thread without Trio they are raised.
    """
    try:
        callback(future)
    except BaseException as error:
        if not isinstance(error, Exception) and not trio.lowlevel.in_trio_run():
            raise  # in a thread of the program, Ctrl-C is for the program
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            future.context.interrupt(error)
            return
        logging.getLogger("overlap").exception("a callback of %r raised", future)


def call_when_done(future: Future[Any], callback: Callable[[], None]) -> None:
    """Call `callback()` on the loop's thread once a future has ended: at once if it has. On the loop's thread only."""
    # the callback is added before `done` is read, so that an end in another thread in between cannot be missed
    with LOCK:
        future._add_callback(callback)
    future._prepare_for_use()  # from here on the result has a user
    if future.done and future._remove_callback(callback):  # else the end calls it
        callback()


def call_when_settled(future: Future[Any], callback: Callable[[Any], object]) -> None:
    """Call `callback(future)` once a future is settled: at once if it is, else in the thread that settles it.

    The thread may be one of the program, so that no loop has to be woken. The callback must neither block nor use
    objects of the loop. An error that it raises is logged, and changes nothing.
    """
    # an `Item` ends with the whole result
    call, source = partial(call_and_log_errors, callback, future), future._state_owner()
    with LOCK:
        source._thread_callbacks = [*(source._thread_callbacks or ()), call]
    source._prepare_for_use()  # from here on the result has a user
    if source.done:  # else the end calls it
        source._run_thread_callbacks()


def await_in_asyncio(future: Future[Any]) -> Generator[object, object, None]:
    """Wait on an event loop of asyncio until a future is settled; the thread that settles it wakes the loop.

    The outcome is left to the caller. If the wait is cancelled, a receive may leave its message to the next one.
    """
    import asyncio  # imported already by a program that awaits there

    loop, ended, source = asyncio.get_running_loop(), asyncio.Event(), future._state_owner()

    def wake(_: object) -> None:
        with suppress(RuntimeError):  # that loop has been closed
            loop.call_soon_threadsafe(ended.set)

    call_when_settled(source, wake)
    try:
        yield from ended.wait().__await__()
    except BaseException:
        with LOCK:  # remove the callback, which `call_when_settled` has put in a partial
            source._thread_callbacks = [
                call for call in source._thread_callbacks or () if call.args[0] is not wake
            ] or None
        source._await_cancelled_elsewhere()
        raise


def wait_in_thread(future: Future[Any], unless: Future[Any] | None = None) -> None:
    """Wait in a thread of this package, which has no event loop, until a future is settled.

    It is no wait of the program, so that `is_waited_for` does not count it.

    Args:
        future: The future.
        unless: Another future; its end also ends the wait.
    """
    ended = threading.Lock()
    ended.acquire()  # `wait_for_lock` below acquires it again: that waits for `release`

    def release(_: object) -> None:
        with suppress(RuntimeError):  # the lock is free: the other future has released it
            ended.release()

    call_when_settled(future, release)
    if unless is not None:
        call_when_settled(unless, release)
    wait_for_lock(ended)
