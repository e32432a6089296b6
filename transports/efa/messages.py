"""One end of a message: a task, its bytes, and how far the message has come."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import TypeAlias, cast

import outcome
from trio.lowlevel import (
    Abort,
    RaiseCancelT,
    Task,
    cancel_shielded_checkpoint,
    current_task,
    reschedule,
    wait_task_rescheduled,
)

from transports.base import Envelope, LinkLostError, TransportClosedError, TransportError

__all__ = ["Lane", "Receive", "Send", "Stage"]

Lane: TypeAlias = "tuple[int, int, int]"  # (src, dst, tag)


class _End:
    """What sends and receives share: the envelope, and the task that waits."""

    __slots__ = ("_early", "lane", "nbytes", "task", "view")

    def __init__(self, lane: Lane, view: memoryview | None, nbytes: int) -> None:
        self.lane = lane
        self.view = view
        self.nbytes = nbytes
        self.task: Task | None = None
        self._early: outcome.Outcome[memoryview | None] | None = None

    @property
    def envelope(self) -> Envelope:
        src, dst, tag = self.lane
        return Envelope(src=src, dst=dst, tag=tag, nbytes=self.nbytes)

    def result(self) -> memoryview | None:
        """Return or raise what the wait ended with before it began."""
        assert self._early is not None, "it has not ended"
        return self._early.unwrap()

    async def _wait(self, give_up: Callable[[RaiseCancelT], Abort]) -> memoryview | None:
        if self._early is not None:
            await cancel_shielded_checkpoint()
            return self.result()
        self.task = current_task()
        return cast("memoryview | None", await wait_task_rescheduled(give_up))

    def wake(self, result: outcome.Outcome[memoryview | None]) -> None:
        """End the wait, now or before it begins; let go of the bytes, which their owner may resize from here on."""
        self.view = None
        task, self.task = self.task, None
        if task is not None:
            reschedule(task, result)
        else:
            self._early = result

    def fail(self, error: TransportError) -> None:
        """Raise in the waiting task."""
        self.wake(outcome.Error(error))

    def lost(self, reason: str) -> None:
        """Raise that the peer is gone."""
        src, dst, tag = self.lane
        self.fail(LinkLostError(reason, src=src, dst=dst, tag=tag))

    def closed(self) -> None:
        """Raise that this side has closed."""
        src, dst, tag = self.lane
        self.fail(TransportClosedError("the transport has been closed", src=src, dst=dst, tag=tag))


class Stage(Enum):
    """How far a send has come."""

    WAITING = auto()  #: for the wire, to be announced
    OFFERED = auto()  #: for the receiver
    FLOWING = auto()  #: accepted; from here on it is finished first, whatever is cancelled
    ENDED = auto()


class Send(_End):
    """A message that leaves. A cancelled one that was offered waits for the receiver to say whether it came in time.

    Attributes:
        priority: As passed; any integer.
        stage: How far it has come.
        number: Of its announcement.
        next_offset: What lies before has been handed to a rail.
    """

    __slots__ = ("_raise_cancel", "_withdraw", "next_offset", "number", "priority", "stage")

    def __init__(self, lane: Lane, view: memoryview, priority: int, withdraw: Callable[[Send], None]) -> None:
        super().__init__(lane, view, view.nbytes)
        self.priority = priority
        self.stage = Stage.WAITING
        self.number = -1
        self.next_offset = 0
        self._withdraw = withdraw
        self._raise_cancel: RaiseCancelT | None = None

    @property
    def cancelled(self) -> bool:
        """Whether the caller has given up and waits to hear if that was in time."""
        return self._raise_cancel is not None

    async def wait(self) -> None:
        """Wait until the buffer is the caller's again."""
        await self._wait(self._cancelled)

    def wake(self, result: outcome.Outcome[memoryview | None]) -> None:
        """End the wait and the send."""
        self.stage = Stage.ENDED
        super().wake(result)

    def withdrawn(self) -> None:
        """Raise the cancellation that was asked for: the message has never been."""
        assert self._raise_cancel is not None, "only cancelled sends are withdrawn"
        self.wake(outcome.capture(self._raise_cancel))

    def lost(self, reason: str) -> None:
        """Raise that the peer is gone, or the cancellation that was waiting to hear of it."""
        if self.cancelled and self.stage is Stage.OFFERED:
            self.withdrawn()
        else:
            super().lost(reason)

    def _cancelled(self, raise_cancel: RaiseCancelT) -> Abort:
        if self.stage is Stage.WAITING:
            self.stage, self.task, self.view = Stage.ENDED, None, None
            self._withdraw(self)
            return Abort.SUCCEEDED
        if self.stage is Stage.OFFERED:
            self._raise_cancel = raise_cancel
            self._withdraw(self)
        return Abort.FAILED


class Receive(_End):
    """A message that is wanted.

    Attributes:
        matched: A message has been found for it; from here on it is finished first, whatever is cancelled.
        missing_bytes: What has not arrived yet.
        seen: Offsets of the chunks that have arrived.
        lend: The caller takes whatever memory the message is in.
    """

    __slots__ = ("_forget", "lend", "matched", "missing_bytes", "seen")

    def __init__(self, lane: Lane, view: memoryview | None, nbytes: int, forget: Callable[[Receive], None]) -> None:
        super().__init__(lane, view, nbytes)
        self.lend = view is None
        self.matched = False
        self.missing_bytes = nbytes
        self.seen: set[int] = set()
        self._forget = forget

    async def wait(self) -> memoryview | None:
        """Wait until the message is there; return its memory if that is to be lent."""
        return await self._wait(self._cancelled)

    def finish(self, payload: memoryview | None) -> None:
        """End the wait."""
        self.matched = True
        self.wake(outcome.Value(payload))

    def _cancelled(self, _: RaiseCancelT) -> Abort:
        if self.matched:
            return Abort.FAILED
        self.task = self.view = None
        self._forget(self)
        return Abort.SUCCEEDED
