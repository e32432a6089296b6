"""End of tasks that ignore their cancellation: the only use of private parts of Trio.

Trio delivers a cancellation to every checkpoint of a task, unless a scope inside shields it or the task catches it and
goes on. Either would keep a rank from ending for ever. Two things end such a task: its shields are lifted, and its
coroutine is closed at the next step that it makes.

Tasks in nurseries of its own are ended first: a coroutine cannot be closed while it waits for them.

Private parts: `Task._cancel_status`, its `_scope` and `_parent`. Trio also resumes a task by `Task.coro.send`, which
may be that of another object. `tests/core/test_daemons.py` fails if Trio changes them; without them, such a task is not
ended, and it is named all the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, Generic, TypeVar, cast

import outcome
import trio
from trio.lowlevel import Task

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
    """Stands for the coroutine of a task in a nursery: closes it when it next meets its cancellation."""

    def __init__(self, task: Task) -> None:
        self._task, self._coro = task, task.coro

    def send(self, result: outcome.Outcome[object]) -> Any:
        if isinstance(result, outcome.Error) and not _has_children(self._task):
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


def force_end(task: Task) -> None:
    """Lift the shields inside a cancelled task, and close its `Closable` when it next meets its cancellation."""
    _forced.add(task)
    ahead = [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    while ahead:
        child = ahead.pop()
        child.coro = cast(Any, _Closing(child))
        _lift_shields(child)
        ahead += [each for nursery in child.child_nurseries for each in nursery.child_tasks]
    _lift_shields(task)


def _lift_shields(task: Task) -> None:
    status = getattr(task, "_cancel_status", None)
    while status is not None:
        scope = getattr(status, "_scope", None)
        if scope is None or scope.cancel_called:  # its own scope, which is cancelled
            return
        if scope.shield:
            scope.shield = False
        status = getattr(status, "_parent", None)
