"""Forks of a process with ranks: they are detached from the world of their parent, and end early.

A fork shares every socket with its parent, even the one that wakes the event loop, but only the thread that has forked
exists in it. So in a fork a call on a rank raises an error, and the event loop does not go on. The fork ends when it
leaves the program or the compute that has forked. It sends, writes and removes nothing that belongs to the parent.
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
from .ending import WorldEnding

# Most waits of a forked program that catches the error of each wait and waits again; then the process ends.
_CHANCES = 100


class Forkable(Protocol):
    """An object that must be changed in a fork, such as a world."""

    def on_fork(self) -> None:
        """Detach the object from threads and sockets of the parent. Called in the fork, by its only thread."""


_forkables: WeakSet[Forkable] = WeakSet()


def register_for_forks(forkable: Forkable) -> None:
    """Call `forkable.on_fork` in any process that is forked from this one."""
    _forkables.add(forkable)


@contextmanager
def registered_for_forks(forkable: Forkable) -> Iterator[None]:
    """Call `forkable.on_fork` in any process that is forked from this one while the block runs."""
    register_for_forks(forkable)
    try:
        yield
    finally:
        _forkables.discard(forkable)


def _detach_in_fork() -> None:
    """Call `on_fork` of all registered objects, in a new fork."""
    for forkable in list(_forkables):
        forkable.on_fork()
    _forkables.clear()


os.register_at_fork(after_in_child=_detach_in_fork)


@contextmanager
def ending_forks(ending: WorldEnding) -> Iterator[None]:
    """If this process becomes a fork inside the block, end the process at the end of the block.

    An error that leaves the block is printed, as at the end of any program.
    """
    try:
        yield
    except BaseException as error:
        if ending.forked:
            exit_process(error)
        raise
    if ending.forked:
        exit_process(None)


def exit_process(error: BaseException | None) -> NoReturn:
    """End this process at once, with the output and exit code of a program that ends with `error`.

    No exit handlers are called: those of a fork belong to its parent.

    Args:
        error: Printed with its traceback, from the program's first frame on; the exit code is 1. SystemExit ends with
            its own code, KeyboardInterrupt with 130 and without a text. None: exit code 0.
    """
    code = 0 if error is None else 1
    with suppress(OSError):  # the reader is closed
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if not isinstance(error.code, (int, type(None))):
                print(error.code, file=sys.stderr)
        elif isinstance(error, KeyboardInterrupt):
            code = 128 + signal.SIGINT
        elif error is not None:
            traceback.print_exception(type(error), error, _program_frames(error.__traceback__))
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _program_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the first frames that belong to this package; None if no frame remains."""
    while frames is not None and is_ours(frames.tb_frame.f_code):
        frames = frames.tb_next
    return frames


def stop_forked_loop(error: Callable[[], BaseException]) -> None:
    """Stop the event loop in a fork: the task that has forked gets an error at its next wait.

    No other task goes on. The process ends when the task ends.

    Args:
        error: Makes a new error for each wait.
    """
    signal.set_wakeup_fd(-1)  # a wake-up would go to the parent
    trio.lowlevel.add_instrument(_ForkInstrument(error))


class _ForkInstrument(trio.abc.Instrument):
    """Instrument of Trio that takes over from the event loop at the first wait of the task that has forked.

    Args:
        error: Makes a new error for each wait.
    """

    def __init__(self, error: Callable[[], BaseException]) -> None:
        self._error = error

    def after_task_step(self, task: Task) -> None:
        """Raise an error in the task at each wait until it ends, then end the process. Trio calls this at a wait.

        It never returns.
        """
        if task.coro.cr_frame is None:  # the task has ended; tasks that wait for it go on in the parent alone
            exit_process(self._error())
        # the loop would wait for input and output of the parent: drive the task from here, and never return
        try:
            for _ in range(_CHANCES):
                task.context.run(task.coro.throw, self._error())
        except StopIteration:
            pass
        except BaseException as error:
            exit_process(error)
        exit_process(self._error())
