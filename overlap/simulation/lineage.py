"""Which task is which: a name for each that does not depend on the order in which Trio runs them."""

from __future__ import annotations

import trio
from trio.lowlevel import Task, current_task


class Lineage(trio.abc.Instrument):
    """Numbers tasks by who has started them: the third one that task (0, 5) starts is (0, 5, 2).

    What one task does follows from the program, so these names are the same in every run; the order in which two tasks
    run in an instant is not.
    """

    def __init__(self) -> None:
        self._names: dict[Task, tuple[int, ...]] = {}
        self._children: dict[Task, int] = {}

    def here(self) -> tuple[int, ...]:
        """Return the name of the task that runs now; tasks older than this object have none."""
        return self._names.get(current_task(), ())

    def task_spawned(self, task: Task) -> None:
        """Name a task, for Trio."""
        parent = current_task()
        number = self._children.get(parent, 0)
        self._children[parent] = number + 1
        self._names[task] = (*self._names.get(parent, ()), number)

    def task_exited(self, task: Task) -> None:
        """Forget a task, for Trio."""
        self._names.pop(task, None)
        self._children.pop(task, None)
