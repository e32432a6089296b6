"""Private parts of Trio: every use of a name that a new version of Trio may change.

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

`tests/runtime/test_trio_private.py` takes each of them away.
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
def task_order(order: Random) -> Iterator[None]:
    """Let an object shuffle tasks that are ready at once; Trio has a switch for that, intended for Hypothesis.

    Raises:
        UsageError: If this version of Trio has no switch.
    """
    scheduler = _scheduler()
    if not (hasattr(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING") and hasattr(scheduler, "_r")):
        raise UsageError(f"faults: the order of tasks cannot be chosen in Trio {trio.__version__}")
    before = scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r = True, order
    try:
        yield
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r = before


def _scheduler() -> Any:
    """Return Trio's module of the event loop; None if it has another name."""
    return getattr(getattr(trio, "_core", None), "_run", None)


def failed_task(internal: trio.TrioInternalError) -> tuple[Task | None, BaseException | None]:
    """Return the task that ended with an event loop's death, and its error; None for each that is not found."""
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
    """Whether a cancel scope of a task, below a nursery around it, has a deadline; True if that is not known."""
    status, around = getattr(task, _STATUS, None), getattr(nursery, _STATUS, None)
    if status is None or around is None:
        return True
    return bool(status.effective_deadline() < around.effective_deadline())


def joins_children(code: CodeType) -> bool:
    """Whether a frame of Trio belongs to a nursery that waits for its children."""
    return code.co_name in _JOINING


def is_loop(code: CodeType) -> bool:
    """Whether a frame of Trio is that of the event loop, which runs tasks and callbacks, or waits for the system."""
    return code in (trio.run.__code__, getattr(getattr(_scheduler(), "unrolled_run", None), "__code__", None))


def deliver_interrupt() -> bool:
    """Let the event loop of this thread interrupt its main task; return whether this version of Trio can."""
    context = getattr(_scheduler(), "GLOBAL_RUN_CONTEXT", None)
    deliver = getattr(getattr(context, "runner", None), "deliver_ki", None)
    if deliver is not None:
        deliver()
    return deliver is not None
