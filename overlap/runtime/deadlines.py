"""Deadlines of operations: one task of a rank waits for the next of them, and only while there is one."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite
from typing import Protocol

import trio

from ..errors import DeadlineError, UsageError, shown


class Expiring(Protocol):
    """What may take too long."""

    @property
    def label(self) -> str:
        """What it is called in messages."""

    @property
    def call_site(self) -> str:
        """Where it was issued."""

    def state(self, now_ns: int) -> str:
        """Say what it does now."""

    def expire(self, error: BaseException) -> None:
        """Fail, for it has."""


def check_timeout(timeout_s: float) -> None:
    """Raise `UsageError` unless it is a number of seconds that can go by."""
    number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not number or not timeout_s > 0 or not isfinite(timeout_s):
        raise UsageError(f"timeout_s: expected a positive number of seconds, or None, got {shown(timeout_s)}")


class Deadlines:
    """Those of one rank; everything here happens on the loop's thread.

    Programs give the same time to most of what they issue, so those that share one are in order by themselves, and what
    ends is forgotten in one step: it may be long before its time.
    """

    def __init__(self) -> None:
        self._queues: dict[float, dict[Expiring, float]] = {}
        self._next_s = inf
        self._scope: trio.CancelScope | None = None
        self._clock: trio.abc.Clock | None = None
        self._sooner = trio.Event()

    def add(self, operation: Expiring, timeout_s: float, spawn: Callable[..., None], now_ns: Callable[[], int]) -> None:
        """Let an operation expire when so much time has gone by.

        Args:
            operation: Which one.
            timeout_s: From now on.
            spawn: Starts the task that waits.
            now_ns: Tells for how long it has waited.
        """
        if self._clock is None:
            self._clock = trio.lowlevel.current_clock()
        due_s = self._clock.current_time() + timeout_s
        self._queues.setdefault(timeout_s, {})[operation] = due_s
        if due_s >= self._next_s:
            return
        self._next_s = due_s
        if self._scope is None:
            self._scope = trio.CancelScope()
            spawn(self._watch, self._scope, now_ns)
        else:
            self._sooner.set()

    def wakes(self, timeout_s: float | None) -> bool:
        """Whether adding an operation with such a time wakes or starts a task; any thread."""
        if timeout_s is None:
            return False
        return self._clock is None or self._clock.current_time() + timeout_s < self._next_s

    def drop(self, operation: Expiring, timeout_s: float) -> None:
        """Forget an operation that has ended."""
        queue = self._queues.get(timeout_s)
        if queue is not None:
            queue.pop(operation, None)
            if not queue:
                del self._queues[timeout_s]

    def stop(self) -> None:
        """Let nothing expire any more."""
        self._queues.clear()
        if self._scope is not None:
            self._scope.cancel()

    async def _watch(self, scope: trio.CancelScope, now_ns: Callable[[], int]) -> None:
        with scope:
            while True:
                self._sooner = trio.Event()
                with trio.move_on_at(self._next_s):
                    await self._sooner.wait()
                self._expire(trio.current_time(), now_ns())

    def _expire(self, now_s: float, now_ns: int) -> None:
        for timeout_s, queue in list(self._queues.items()):
            due = [operation for operation, due_s in queue.items() if due_s <= now_s]
            for operation in due:
                self.drop(operation, timeout_s)
                state = operation.state(now_ns)
                operation.expire(DeadlineError(operation.label, operation.call_site, timeout_s=timeout_s, state=state))
        self._next_s = min((next(iter(queue.values())) for queue in self._queues.values()), default=inf)
