"""What waits for its other end: calls of this process, and messages that have come or were announced."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, NoReturn, TypeAlias, TypeVar

import outcome
from trio.lowlevel import Abort, RaiseCancelT, Task, current_task, reschedule, wait_task_rescheduled

from transports.base import Envelope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Arrival", "Call", "Key", "Queues", "Receive", "Sending"]

#: (src, dst, tag): messages of one key are received in order.
Key: TypeAlias = "tuple[int, int, int]"

_T = TypeVar("_T")


class Call:
    """A suspended call of `Endpoint.send` or `Endpoint.recv_into`.

    Attributes:
        key: Whose message it is.
        view: The caller's bytes.
        matched: Both ends have met: it is going to be completed, whatever is cancelled.
    """

    __slots__ = ("_raise_cancel", "_task", "_withdraw", "key", "matched", "view")

    def __init__(self, key: Key, view: memoryview) -> None:
        self.key = key
        self.view = view
        self.matched = False
        self._task: Task | None = None
        self._withdraw: Callable[[], bool] | None = None
        self._raise_cancel: RaiseCancelT | None = None

    async def wait(self, withdraw: Callable[[], bool]) -> None:
        """Suspend until `wake` or `fail`.

        Args:
            withdraw: Called if the call is cancelled before it has met its other end: takes it out of where it waits
                and returns True, or returns False if whoever has it is going to call `give_up` or complete it.
        """
        self._task, self._withdraw = current_task(), withdraw
        await wait_task_rescheduled(self._abort)

    def wake(self) -> None:
        """Complete it."""
        reschedule(self._suspended)

    def fail(self, error: Exception) -> None:
        """Raise in it."""
        reschedule(self._suspended, outcome.Error(error))

    @property
    def given_up(self) -> bool:
        """Whether it has been cancelled and is still suspended."""
        return self._raise_cancel is not None

    def give_up(self) -> None:
        """Raise the cancellation that had to wait."""
        assert self._raise_cancel is not None, "only what was cancelled is given up"
        raise_cancel: Callable[[], NoReturn] = self._raise_cancel
        reschedule(self._suspended, outcome.capture(raise_cancel))

    @property
    def _suspended(self) -> Task:
        assert self._task is not None, "a call is completed after it has been suspended"
        return self._task

    def _abort(self, raise_cancel: RaiseCancelT) -> Abort:
        assert self._withdraw is not None, "set before the call was suspended"
        if not self.matched and self._withdraw():
            return Abort.SUCCEEDED
        self._raise_cancel = raise_cancel
        return Abort.FAILED

    @property
    def envelope(self) -> Envelope:
        """Who sends how much to whom."""
        src, dst, tag = self.key
        return Envelope(src=src, dst=dst, tag=tag, nbytes=self.view.nbytes)


class Receive(Call):
    """A call that wants a message."""

    __slots__ = ()


class Sending(Call):
    """A call that has announced a message.

    Attributes:
        number: Of the announcement.
        priority: Lower is more urgent.
        followed: A later message of the same key has been sent, so that withdrawing this one without asking might let a
            receive miss its turn.
    """

    __slots__ = ("followed", "number", "priority")

    def __init__(self, key: Key, view: memoryview, number: int, priority: int) -> None:
        super().__init__(key, view)
        self.number = number
        self.priority = priority
        self.followed = False


class Arrival:
    """A message that no receive has met.

    Attributes:
        key: Whose message it is.
        nbytes: Its length.
        member: The process that sends it.
        number: Of the announcement.
        payload: Its bytes if they came along, None if it was only announced.
    """

    __slots__ = ("key", "member", "nbytes", "number", "payload")

    def __init__(self, key: Key, nbytes: int, member: int, number: int, payload: bytes | None) -> None:
        self.key = key
        self.nbytes = nbytes
        self.member = member
        self.number = number
        self.payload = payload

    @property
    def envelope(self) -> Envelope:
        """Who sends how much to whom."""
        src, dst, tag = self.key
        return Envelope(src=src, dst=dst, tag=tag, nbytes=self.nbytes)


class Queues(Generic[_T]):
    """A queue for each key; none is empty."""

    __slots__ = ("_queues",)

    def __init__(self) -> None:
        self._queues: dict[Key, deque[_T]] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __iter__(self) -> Iterator[_T]:
        return (one for queue in list(self._queues.values()) for one in list(queue))

    def last(self, key: Key) -> _T | None:
        """Return the youngest of a key."""
        queue = self._queues.get(key)
        return queue[-1] if queue else None

    def of(self, key: Key) -> tuple[_T, ...]:
        """Return those of a key, the oldest first."""
        return tuple(self._queues.get(key, ()))

    def add(self, key: Key, one: _T) -> None:
        """Put it at the end."""
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = deque()
        queue.append(one)

    def put_back(self, key: Key, one: _T) -> None:
        """Put it at the head, from where it had been taken."""
        self._queues.setdefault(key, deque()).appendleft(one)

    def pop(self, key: Key) -> _T | None:
        """Take the oldest of a key."""
        queue = self._queues.get(key)
        if queue is None:
            return None
        one = queue.popleft()
        if not queue:
            del self._queues[key]
        return one

    def remove(self, key: Key, one: _T) -> None:
        """Take it from wherever it stands."""
        queue = self._queues[key]
        queue.remove(one)
        if not queue:
            del self._queues[key]
