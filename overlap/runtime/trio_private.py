"""Private parts of Trio: every use of a name that a new version of Trio may change, and what fails without it.

==================================================  ==================================================================
name                                                without it
==================================================  ==================================================================
`_run._ALLOW_DETERMINISTIC_SCHEDULING` and `_r`     `Faults` and tests by seeds refuse, with a UsageError
local variables of Trio's frames                    an error that cannot be shown ends `run` as a TrioInternalError
`_run.GLOBAL_RUN_CONTEXT` and `Runner.deliver_ki`   Ctrl-C ends a `trio.run` beside a connection as a TrioInternalError
`_run.unrolled_run`                                 Ctrl-C in a callback of the loop waits for the end of the run
`Nursery._nested_child_finished`                    a report names the line of a nursery beside those of its tasks
`Task._cancel_status`                               a deadlock is reported, and not ended before `--stall-timeout`
==================================================  ==================================================================

`tests/runtime/test_trio_private.py` removes each of them.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from types import CodeType
from typing import Any

import outcome
import trio
from trio.lowlevel import Task

from ..diagnostics import is_of_tasks
from ..errors import UsageError

_JOINING = ("__aexit__", "_nested_child_finished")
_STATUS = "_cancel_status"


@contextmanager
def ordering_tasks(order: Random) -> Iterator[None]:
    """Let the random numbers of `order` decide, while the block runs, in which order tasks run that are ready together.

    Trio has a switch for that, intended for Hypothesis.

    Raises:
        UsageError: If this version of Trio has no switch.
    """
    scheduler = _scheduler_module()
    if not (hasattr(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING") and hasattr(scheduler, "_r")):
        raise UsageError(f"faults: the order of tasks cannot be chosen in Trio {trio.__version__}; install Trio 0.32")
    before = scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r = True, order
    try:
        yield
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r = before


def _scheduler_module() -> Any:
    """Return the module with the event loop, or None if it has another name."""
    return getattr(getattr(trio, "_core", None), "_run", None)


def find_failed_task(internal: trio.TrioInternalError) -> tuple[Task | None, BaseException | None]:
    """Return the task at whose end the event loop has died, and the task's error; each is None if it is not found.

    Both are searched among the local variables of Trio's frames in the traceback of the loop's error.
    """
    task: Task | None = None
    error: BaseException | None = None
    cause = internal.__cause__
    for frame, _ in traceback.walk_tb(cause.__traceback__ if cause is not None else None):
        if is_of_tasks(frame.f_code):
            for value in frame.f_locals.values():
                task = value if isinstance(value, Task) else task
                error = value.error if isinstance(value, outcome.Error) else error
    return task, error


def may_time_out(task: Task, nursery: trio.Nursery) -> bool:
    """Whether a cancel scope that a task has entered inside a nursery has a deadline, which may cancel the task.

    True if that is unknown.
    """
    status, around = getattr(task, _STATUS, None), getattr(nursery, _STATUS, None)
    if status is None or around is None:
        return True
    return bool(status.effective_deadline() < around.effective_deadline())


def joins_children(code: CodeType) -> bool:
    """Whether the code of a frame of Trio is that in which a nursery waits for its children."""
    return code.co_name in _JOINING


def is_loop(code: CodeType) -> bool:
    """Whether the code of a frame of Trio is that of the event loop, which runs tasks and callbacks."""
    return code in (trio.run.__code__, getattr(getattr(_scheduler_module(), "unrolled_run", None), "__code__", None))


def deliver_interrupt() -> bool:
    """Let this thread's event loop raise KeyboardInterrupt in its main task. Return False if Trio lacks the call."""
    context = getattr(_scheduler_module(), "GLOBAL_RUN_CONTEXT", None)
    deliver = getattr(getattr(context, "runner", None), "deliver_ki", None)
    if deliver is not None:
        deliver()
    return deliver is not None
