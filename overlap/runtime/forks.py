"""What becomes of worlds in a process that is forked from theirs: its ranks are not that process's own.

A fork shares every socket with its parent, also the one by which an event loop learns of all others, and none of its
other threads is there. So what a fork asks of a rank raises, nothing of an event loop goes on in it, and it ends where
it leaves the program or the compute that has forked, without what would still be sent, written or removed there.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import NoReturn, Protocol
from weakref import WeakSet

import trio
from trio.lowlevel import Task

from ..diagnostics import is_ours
from .ending import Ending

# A program that catches what it gets where it waits, and waits again, is ended after so many times.
_CHANCES = 100


class Forkable(Protocol):
    """What does not survive in a fork."""

    def forked(self) -> None:
        """Take note that this process is a fork: the threads that do the work are not here."""


_kept: WeakSet[Forkable] = WeakSet()


def keep(one: Forkable) -> None:
    """Tell it, in any process that is forked from this one."""
    _kept.add(one)


@contextmanager
def kept(one: Forkable) -> Iterator[None]:
    """Tell it, in any process that is forked from this one during the block."""
    keep(one)
    try:
        yield
    finally:
        _kept.discard(one)


def _in_child() -> None:
    for each in list(_kept):
        each.forked()
    _kept.clear()


os.register_at_fork(after_in_child=_in_child)


@contextmanager
def ending_forks(ending: Ending) -> Iterator[None]:
    """End a fork of this process where it leaves the block, as a program of its own would end."""
    try:
        yield
    except BaseException as error:
        if ending.forked:
            leave(error)
        raise
    if ending.forked:
        leave(None)


def leave(error: BaseException | None) -> NoReturn:
    """End this fork with what it has returned or raised. Exit handlers are its parent's."""
    code = 0 if error is None else 1
    with suppress(OSError):  # nobody reads any more
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if not isinstance(error.code, (int, type(None))):
                print(error.code, file=sys.stderr)
        elif isinstance(error, KeyboardInterrupt):
            code = 128 + signal.SIGINT
        elif error is not None:
            traceback.print_exception(type(error), error, _own(error.__traceback__))
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _own(frames: TracebackType | None) -> TracebackType | None:
    """Return them from where the program begins."""
    while frames is not None and is_ours(frames.tb_frame.f_code):
        frames = frames.tb_next
    return frames


def stop_loop(error: Callable[[], BaseException]) -> None:
    """Let the event loop of this thread do nothing more in this fork: what waits there gets an error."""
    signal.set_wakeup_fd(-1)  # which would wake the parent
    trio.lowlevel.add_instrument(_Stopped(error))


class _Stopped(trio.abc.Instrument):
    """Takes the loop's place when the task that has forked waits for the first time, until it is over."""

    def __init__(self, error: Callable[[], BaseException]) -> None:
        self._error = error

    def after_task_step(self, task: Task) -> None:
        """Fail whatever the task waits for."""
        if task.coro.cr_frame is None:  # it has ended, and what waits for it goes on in the parent
            leave(self._error())
        try:
            for _ in range(_CHANCES):
                task.context.run(task.coro.throw, self._error())
        except StopIteration:
            pass
        except BaseException as error:
            leave(error)
        leave(self._error())
