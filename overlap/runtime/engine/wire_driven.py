"""An execution that the wires drive: what has come is added and passed on by whatever brings the news of it.

A task for each queue of a program, and one for each message under way, would be woken by every message, and each of
these turns of the event loop takes as long as sending a small message does. So there is one task for all of them, which
sleeps until everything is over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import trio
from trio.lowlevel import Abort, RaiseCancelT, Task, current_task, reschedule, wait_task_rescheduled

from transports import Call, Delivery, Starter

from ...collectives.program import Kind, Step
from ...collectives.reduce import Array
from ...collectives.schedule import Op
from .cc_core import AHEAD, Execution

__all__ = ["WORTH_DRIVING_BYTES", "WireDrivenExecution"]

#: Shorter operations have so few turns that a task for them costs less than keeping account of what is under way
#: (measured: all-reduces of 16 KiB take 0.8 times as long by tasks, of 256 KiB as long, of 1 MiB 1.3 times).
WORTH_DRIVING_BYTES = 128 << 10


class WireDrivenExecution(Execution):
    """One rank's program under way, over an endpoint that has a starter for every peer."""

    __slots__ = (
        "_advancing", "_again", "_begun", "_consumed", "_early", "_failure", "_running", "_sleeper", "_unfinished",
        "_waiting",
    )  # fmt: skip

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        count = len(self._program.queues)
        self._begun = [0] * count  # steps of each queue that have been begun
        self._early: list[set[int]] = [set() for _ in range(count)]  # those that ended before others of their queue
        # What is there to be moved or added, by position, once all steps before it have ended.
        self._waiting: list[dict[int, tuple[Step, Array, Delivery | None]]] = [{} for _ in range(count)]
        self._running: dict[tuple[int, int], Call | None] = {}  # by queue and position; None: in the worker threads
        self._unfinished = sum(map(len, self._program.queues))  # steps
        self._failure: BaseException | None = None
        self._consumed: set[tuple[int, int]] = set()  # receives whose message came in pieces
        self._advancing = self._again = False
        self._sleeper: Task | None = None

    @property
    def _over(self) -> bool:
        return not self._unfinished

    def begin(self) -> bool:
        """Begin whatever can be; True if that was all there is to do."""
        self._go_on()
        return self._over and self._failure is None

    async def run(self) -> None:
        """Sleep until the program is over.

        Raises:
            BaseException: The first error of a step, once nothing is under way any more.
        """
        try:
            if not self._over and self._failure is None:
                await self._news()
            else:
                await trio.lowlevel.checkpoint()
        finally:
            with trio.CancelScope(shield=True):
                await self._give_up()
        if self._failure is not None:
            raise self._failure

    async def _give_up(self) -> None:
        """Withdraw what is under way, and wait for what cannot be: it touches memory of others."""
        if self._running:  # nothing more is begun
            self._failure = self._failure or trio.ClosedResourceError("the program was given up")
        for call in list(self._running.values()):
            if call is not None:
                call.withdraw()
        while self._running:
            await self._news()
        for waiting in self._waiting:
            for _, _, delivery in waiting.values():
                if delivery is not None:
                    delivery.release()
            waiting.clear()

    async def _news(self) -> None:
        self._sleeper = current_task()
        await wait_task_rescheduled(self._cancelled)

    def _cancelled(self, _: RaiseCancelT) -> Abort:
        self._sleeper = None
        return Abort.SUCCEEDED

    def _tell(self) -> None:
        """Wake the task if there is news for it."""
        if self._sleeper is not None and (self._over or self._failure is not None):
            task, self._sleeper = self._sleeper, None
            reschedule(task)

    # -- going on ------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Begin all steps that can be. What ends meanwhile is seen in the next round."""
        if self._advancing:
            self._again = True
            return
        self._advancing = self._again = True
        try:
            while self._again and self._failure is None:
                self._again = False
                for index in range(len(self._begun)):
                    self._push(index)
        except Exception as error:
            self._failure = self._failure or error
        finally:
            self._advancing = False
        self._tell()

    def _push(self, index: int) -> None:
        """Begin the next steps of a queue, until one has to wait."""
        steps = self._program.queues[index]
        while (at := self._begun[index]) < len(steps):
            step = steps[at]
            if self._must_wait(step) or (step.kind is Kind.RECV and not self._may_come(index, at, step)):
                return
            self._begun[index] = at + 1
            self._begin_step(index, at, step)

    def _may_come(self, index: int, at: int, step: Step) -> bool:
        """Whether a message may come while steps before it are under way: there is room, or a place nobody touches."""
        return at - self._finished[index] < AHEAD and (not self._lands(step) or self._apart(index, at, step))

    def _apart(self, index: int, at: int, step: Step) -> bool:
        """Whether nothing that reduces or copies before a step, and has not ended, touches what it touches."""
        early, steps = self._early[index], self._program.queues[index]
        before = [steps[other] for other in range(self._finished[index], at) if other not in early]
        return not self._collides(step, [self._views(other) for other in before if not self._lands(other)])

    def _begin_step(self, index: int, at: int, step: Step) -> None:
        if step.kind is Kind.SEND:
            if self._try_send(step):
                self._ended(index, at)
            else:
                self._begin_send(index, at, step)
        elif step.kind is Kind.RECV:
            self._begin_receive(index, at, step)
        else:
            self._in_turn(index, at, step, self._buffers.view(step.src), None)

    def _begin_send(self, index: int, at: int, step: Step) -> None:
        key, peer = (index, at), self._members[step.peer]
        begin = partial(
            self._starter(peer).begin_send,
            peer,
            self._tag + step.channel,
            self._buffers.view(step.src),
            priority=self._priority,
            done=partial(self._moved, key),
        )
        self._start(key, begin)

    def _begin_receive(self, index: int, at: int, step: Step) -> None:
        target, key, peer = self._buffers.view(step.dst), (index, at), self._members[step.peer]
        plain = self._lands(step)
        begin = partial(
            self._starter(peer).begin_recv,
            peer,
            self._tag + step.channel,
            target if plain else None,
            target.size * self._buffers.arrays[step.src.buffer].itemsize,
            done=partial(self._moved if plain else self._arrived, key),
            consume=partial(self._consume, key) if not plain and self._apart(index, at, step) else None,
        )
        self._start(key, begin)

    def _starter(self, peer: int) -> Starter:
        starter = self._endpoint.starter(peer)
        assert starter is not None, "who has none is served by tasks"
        return starter

    def _start(self, key: tuple[int, int], begin: Callable[[], Call]) -> None:
        self._running[key] = None  # its end may be told before it is known
        try:
            call = begin()
        except BaseException:
            del self._running[key]
            raise
        if key in self._running:
            self._running[key] = call

    # -- what has ended ------------------------------------------------------------------------------------------

    def _ended(self, index: int, at: int) -> None:
        """Note that a step is over; those behind it count once it does."""
        early = self._early[index]
        early.add(at)
        self._unfinished -= 1
        while self._finished[index] in early:
            early.remove(self._finished[index])
            self._finished[index] += 1
        self._again = True
        self._catch_up(index)

    def _fails(self, key: tuple[int, int], call: Call) -> bool:
        """Whether a message has not been; who waits is told."""
        del self._running[key]
        if call.error is None and not call.withdrawn:
            return False
        self._failure = self._failure or call.error
        self._wake()
        return True

    def _wake(self) -> None:
        task, self._sleeper = self._sleeper, None
        if task is not None:
            reschedule(task)

    def _moved(self, key: tuple[int, int], call: Call) -> None:
        """A message has left, or is in its place."""
        if not self._fails(key, call):
            self._ended(*key)
            self._go_on()

    def _consume(self, key: tuple[int, int], offset: int, piece: memoryview) -> None:
        """Add a piece of a message while it is in the cache, and before the next one comes into its place."""
        if self._failure is not None:  # the arrays may be in other hands
            return
        self._consumed.add(key)
        step = self._program.queues[key[0]][key[1]]
        incoming = np.frombuffer(piece, np.uint8).view(self._buffers.arrays[step.src.buffer].dtype)
        first = offset // incoming.itemsize
        target = self._buffers.view(step.dst)[first : first + incoming.size]
        work = (
            self._addition(step, incoming, target, first) if step.op is Op.ADD else self._move(step, incoming, target)
        )
        try:
            with np.errstate(all="ignore"):  # as in the worker threads
                work(slice(None))
        except Exception as error:
            self._failure = error
            self._wake()

    def _arrived(self, key: tuple[int, int], call: Call) -> None:
        """A message has come that is to be added to something."""
        if self._fails(key, call):
            return
        index, at = key
        step, delivery = self._program.queues[index][at], call.delivery()
        if self._failure is not None:  # the arrays may be in other hands
            delivery.release()
            self._wake()
            return
        if key in self._consumed:
            self._worked(index, at, delivery, None)
            self._go_on()
            return
        incoming = np.frombuffer(delivery.view, np.uint8).view(self._buffers.arrays[step.src.buffer].dtype)
        self._in_turn(index, at, step, incoming, delivery)
        self._go_on()

    def _in_turn(self, index: int, at: int, step: Step, incoming: Array, delivery: Delivery | None) -> None:
        """Move or add `incoming` once all steps before have ended."""
        self._waiting[index][at] = step, incoming, delivery
        self._catch_up(index)

    def _catch_up(self, index: int) -> None:
        """Do what waits for its turn, if that has come."""
        at = self._finished[index]
        ready = None if self._failure is not None else self._waiting[index].pop(at, None)
        if ready is None:
            return
        try:
            self._work(index, at, *ready)
        except Exception as error:
            self._worked(index, at, ready[2], error)

    def _work(self, index: int, at: int, step: Step, incoming: Array, delivery: Delivery | None) -> None:
        """Move or add `incoming` to where a step says, in worker threads if it is large."""
        pieces = self._pieces(step, incoming, self._buffers.view(step.dst))
        if len(pieces) == 1:
            with np.errstate(all="ignore"):  # as in the worker threads
                pieces[0]()
            self._worked(index, at, delivery, None)
            return
        token = trio.lowlevel.current_trio_token()
        self._running[index, at] = None
        done = partial(self._told_by_workers, index, at, delivery)
        self._workers.submit(pieces, lambda error: token.run_sync_soon(done, error), priority=self._priority)

    def _told_by_workers(self, index: int, at: int, delivery: Delivery | None, error: BaseException | None) -> None:
        del self._running[index, at]
        self._worked(index, at, delivery, error)
        if error is not None:
            self._wake()
        self._go_on()

    def _worked(self, index: int, at: int, delivery: Delivery | None, error: BaseException | None) -> None:
        if delivery is not None:
            delivery.release()
        if error is not None:
            self._failure = self._failure or error
        else:
            self._ended(index, at)
