"""Forced ends of tasks that ignore their cancellation.

Trio delivers a cancellation to every checkpoint of a task, unless a scope inside shields it or the task catches it and
goes on. Either would keep a rank from ending for ever. Two things end such a task: its shields are lifted, and its
coroutine is closed at the next step that it makes.

Tasks in nurseries of its own are ended first: a coroutine cannot be closed while it waits for them.

Both need private parts of Trio, which are in `trio_private`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, Generic, TypeVar, cast

import outcome
import trio
from trio.lowlevel import Task

from .trio_private import lift_shields, replace_coroutine

T = TypeVar("T")

# A task that catches its cancellation and goes on gets it again at once, so that virtual time cannot go on. Clean-up
# that waits is cancelled a few times.
_DELIVERIES = 1000


class Closable(Generic[T]):
    """An awaitable that can be closed while a task awaits it.

    Args:
        inner: The wrapped awaitable.
        ignoring: Called before it is closed because it has ignored its cancellation too often.
    """

    __slots__ = ("_ignoring", "_inner", "_remaining")

    def __init__(self, inner: Awaitable[T], ignoring: Callable[[], None]) -> None:
        self._inner, self._ignoring, self._remaining = inner, ignoring, _DELIVERIES

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self._inner.__await__()
        step: Callable[[], Any] = partial(next, steps)
        try:
            while True:
                yielded = step()
                try:
                    result = yield yielded
                except BaseException as error:
                    step = partial(steps.throw, error)
                else:
                    if isinstance(result, outcome.Error) and self._is_over(result.error):
                        _close(steps)
                        result.unwrap()
                    step = partial(steps.send, result)
        except StopIteration as end:
            return cast(T, end.value)

    def _is_over(self, error: BaseException) -> bool:
        """Whether to close the task instead of raising an error in it."""
        task = trio.lowlevel.current_task()
        if _has_children(task):
            return False
        if task in _forced:
            return True
        if isinstance(error, trio.Cancelled):
            self._remaining -= 1
            if not self._remaining:
                self._ignoring()
        return not self._remaining


class _Closing:
    """Replaces the coroutine of a task in a nursery; closes it after a number of cancellations."""

    def __init__(self, task: Task, deliveries: int, ignoring: Callable[[], None]) -> None:
        self._task, self._coro, self._remaining, self._ignoring = task, task.coro, deliveries, ignoring

    def send(self, result: outcome.Outcome[object]) -> Any:
        """Resume the coroutine; close it if it has ignored too many cancellations."""
        if isinstance(result, outcome.Error) and isinstance(result.error, trio.Cancelled):
            self._remaining -= 1
            if self._remaining <= 0 and not _has_children(self._task):
                self._ignoring()
                _close(self._coro)
                result.unwrap()
        return self._coro.send(result)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coro, name)


_forced: set[Task] = set()


def _has_children(task: Task) -> bool:
    return any(nursery.child_tasks for nursery in task.child_nurseries)


def _close(steps: Any) -> None:
    """Close a coroutine; one that ignores the close, too, is left."""
    try:
        steps.close()
    except RuntimeError:  # it has ignored the close as well: nothing resumes it any more
        pass
    finally:
        _forced.discard(trio.lowlevel.current_task())


def watch_children(task: Task, ignoring: Callable[[], None], *, deliveries: int = _DELIVERIES) -> list[Task]:
    """Close each task below a cancelled one when it has ignored its cancellation too often; return these tasks.

    In virtual time this is necessary: the clock stands still while a task goes on again and again.
    """
    below: list[Task] = []
    pending = [task]
    while pending:
        children = [child for nursery in pending.pop().child_nurseries for child in nursery.child_tasks]
        pending += children
        below += children
    for child in below:
        replace_coroutine(child, _Closing(child, deliveries, ignoring))
    return below


def force_end(task: Task, ignoring: Callable[[], None]) -> None:
    """Lift the shields inside a cancelled task, and close its `Closable` at its next cancellation."""
    _forced.add(task)
    for forced in [task, *watch_children(task, ignoring, deliveries=1)]:
        lift_shields(forced)
