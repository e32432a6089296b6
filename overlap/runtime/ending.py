"""Verdict on a world that ends: the first culprit, further failures, the errors of other ranks; and forks.

A fork shares every socket with its parent, also the one that wakes its event loop, and has none of its other threads.
So a call on a rank raises in a fork, no event loop goes on there, and the fork ends when it leaves the program or the
compute that has forked, without sending, writing or removing anything that belongs to the parent.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import NoReturn, Protocol
from weakref import WeakSet

import trio
from trio.lowlevel import Task

from ..diagnostics import is_ours, make_presentable, where
from ..errors import PeerFailedError, RankFailedError, in_one_line
from .trio_private import failed_task

_FORKED = (
    "this process is a fork of the one that has this rank, and is no rank itself: use none in it, or let it join a "
    "world of its own by overlap.connect"
)


class WorldEnding:
    """The verdict on a world.

    Attributes:
        failure: Rank that ended the world and its error; None before.
        doing: The unfinished operations of that rank, as text.
        others: Errors of further ranks that were no consequences, by rank.
        forked: Whether this process is a fork; the world goes on in its parent.
    """

    def __init__(self) -> None:
        self.failure: tuple[int, BaseException] | None = None
        self.doing: list[str] = []
        self.others: dict[int, BaseException] = {}
        self.forked: bool = False
        self._since_ns = -1

    def begin(self, culprit: int, cause: BaseException, doing: list[str], now_ns: int) -> None:
        """Record the first culprit."""
        self.failure, self.doing, self._since_ns = (culprit, cause), doing, now_ns

    def fork(self, rank: int) -> None:
        """Note that this process is a fork, in which the rank cannot work."""
        self.forked = True
        self.begin(rank, PeerFailedError(_FORKED, culprit=rank), [], 0)

    def add(self, culprit: int, cause: BaseException, doing: list[str], now_ns: int | None) -> None:
        """Record a failure after the first that is no consequence of it.

        Of ranks that fail in one instant of virtual time, the lowest becomes the first culprit.

        Args:
            culprit: Rank that failed.
            cause: Its error.
            doing: Unfinished operations of the rank, as text.
            now_ns: Virtual time of the failure; None in real time.
        """
        assert self.failure is not None
        if now_ns == self._since_ns and culprit < self.failure[0]:
            first, self.failure, self.doing = self.failure, (culprit, cause), doing
            culprit, cause = first
        self.others[culprit] = cause

    def peer_failed(self) -> PeerFailedError:
        """Return the error of operations that the end of the world cuts short."""
        if self.failure is None:
            return PeerFailedError("the world has ended", culprit=-1)
        culprit, cause = self.failure
        if self.forked:
            return PeerFailedError(_FORKED, culprit=culprit)
        return PeerFailedError.caused_by(cause, f"rank {culprit} failed: {in_one_line(cause)}", culprit=culprit)

    def rank_failed(self, world_size: int, finished_ranks: Collection[int]) -> RankFailedError:
        """Return the error of a failed world, given the ranks that had finished their programs."""
        assert self.failure is not None
        culprit, cause = self.failure
        return RankFailedError(
            rank=culprit,
            cause=cause,
            where=where(cause),
            doing=self.doing,
            others=self.others,
            world_size=world_size,
            finished=len({*finished_ranks} - {culprit, *self.others}),
        )


RANK: ContextVar[tuple[int, int]] = ContextVar("rank")
"""Rank of the program that a task belongs to, and the size of its world."""


def ended_by_its_loop(internal: trio.TrioInternalError) -> RankFailedError | None:
    """Return the error of a world with an event loop that died of an error without a `repr`; None for other reasons.

    A nursery of the program formats the error of its task by `repr`, in the loop itself, before `make_presentable`.
    """
    task, error = failed_task(internal)
    if task is None or error is None or RANK not in task.context:
        return None
    shown = make_presentable(error)
    if shown is error:  # its `repr` works: another reason
        return None
    rank, world_size = task.context[RANK]
    return RankFailedError(rank=rank, cause=shown, where=where(shown), doing=(), others={}, world_size=world_size)


# A program that catches the error and waits again is ended after this number of waits.
_CHANCES = 100


class Forkable(Protocol):
    """An object that does not survive in a fork."""

    def forked(self) -> None:
        """Note that this process is a fork: the worker threads are not here."""


_forkables: WeakSet[Forkable] = WeakSet()


def register_for_forks(forkable: Forkable) -> None:
    """Call `forkable.forked` in any process that is forked from this one."""
    _forkables.add(forkable)


@contextmanager
def registered_for_forks(forkable: Forkable) -> Iterator[None]:
    """Call `forkable.forked` in any process that is forked from this one during the block."""
    register_for_forks(forkable)
    try:
        yield
    finally:
        _forkables.discard(forkable)


def _in_child() -> None:
    """Detach all worlds of a process in its fork."""
    for forkable in list(_forkables):
        forkable.forked()
    _forkables.clear()


os.register_at_fork(after_in_child=_in_child)


@contextmanager
def ending_forks(ending: WorldEnding) -> Iterator[None]:
    """End a fork of this process at the end of the block, as a program of its own would end."""
    try:
        yield
    except BaseException as error:
        if ending.forked:
            leave(error)
        raise
    if ending.forked:
        leave(None)


def leave(error: BaseException | None) -> NoReturn:
    """End this fork with the outcome of its program. Exit handlers are its parent's."""
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
    """Return the frames from the start of the program on."""
    while frames is not None and is_ours(frames.tb_frame.f_code):
        frames = frames.tb_next
    return frames


def stop_loop(error: Callable[[], BaseException]) -> None:
    """Stop the event loop of this thread in this fork: waiting tasks get an error."""
    signal.set_wakeup_fd(-1)  # a wake-up would go to the parent
    trio.lowlevel.add_instrument(_StoppedLoop(error))


class _StoppedLoop(trio.abc.Instrument):
    """Replaces the loop from the first wait of the task that has forked, until that task is over."""

    def __init__(self, error: Callable[[], BaseException]) -> None:
        self._error = error

    def after_task_step(self, task: Task) -> None:
        """Fail the operation that the task waits for."""
        if task.coro.cr_frame is None:  # it has ended, and its waiters go on in the parent
            leave(self._error())
        try:
            for _ in range(_CHANCES):
                task.context.run(task.coro.throw, self._error())
        except StopIteration:
            pass
        except BaseException as error:
            leave(error)
        leave(self._error())
