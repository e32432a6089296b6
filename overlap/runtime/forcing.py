"""End of tasks that ignore their cancellation.

Trio delivers a cancellation to every checkpoint of a task, unless a scope inside shields it or the task catches it and
goes on. Either would keep a rank from ending for ever. Two things end such a task: its shields are lifted, and its
coroutine is closed at the next step that it makes.

Tasks in nurseries of its own are ended first: a coroutine cannot be closed while it waits for them.

Neither is possible without private parts of Trio, which are in `trio_private`.
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
        inner: The awaitable that it stands for.
        ignoring: Called when it has ignored its cancellation so often that it is closed.
    """

    __slots__ = ("_ignoring", "_inner", "_left")

    def __init__(self, inner: Awaitable[T], ignoring: Callable[[], None]) -> None:
        self._inner, self._ignoring, self._left = inner, ignoring, _DELIVERIES

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
        """Whether a task that an error is about to be raised in is to be closed instead."""
        task = trio.lowlevel.current_task()
        if _has_children(task):
            return False
        if task in _forced:
            return True
        if isinstance(error, trio.Cancelled):
            self._left -= 1
            if not self._left:
                self._ignoring()
        return not self._left


class _Closing:
    """Stands for the coroutine of a task in a nursery: closes it when it has met its cancellation so many times."""

    def __init__(self, task: Task, left: int, ignoring: Callable[[], None]) -> None:
        self._task, self._coro, self._left, self._ignoring = task, task.coro, left, ignoring

    def send(self, result: outcome.Outcome[object]) -> Any:
        if isinstance(result, outcome.Error) and isinstance(result.error, trio.Cancelled):
            self._left -= 1
            if self._left <= 0 and not _has_children(self._task):
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
    try:
        steps.close()
    except RuntimeError:  # it has ignored that, too: nothing resumes it any more
        pass
    finally:
        _forced.discard(trio.lowlevel.current_task())


def watch_children(task: Task, ignoring: Callable[[], None], *, left: int = _DELIVERIES) -> list[Task]:
    """Close each task below a cancelled one when it has ignored its cancellation so often; return these tasks.

    In virtual time there is no other way: it stands still while a task goes on again and again.
    """
    below: list[Task] = []
    ahead = [task]
    while ahead:
        children = [child for nursery in ahead.pop().child_nurseries for child in nursery.child_tasks]
        ahead += children
        below += children
    for child in below:
        replace_coroutine(child, _Closing(child, left, ignoring))
    return below


def force_end(task: Task, ignoring: Callable[[], None]) -> None:
    """Lift the shields inside a cancelled task, and close its `Closable` when it next meets its cancellation."""
    _forced.add(task)
    for each in [task, *watch_children(task, ignoring, left=1)]:
        lift_shields(each)
