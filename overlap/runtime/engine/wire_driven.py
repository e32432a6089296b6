"""An execution that the wires drive: what has come is added and passed on by whatever brings the news of it.

A task for each queue of a program, and one for each message under way, would be woken by every message, and each of
these turns of the event loop takes as long as sending a small message does. So there is none, as long as all goes well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import Context
from functools import partial

import numpy as np
import trio
from trio.lowlevel import Task, checkpoint, current_task, reschedule, wait_task_rescheduled

from transports import Call, Delivery, Starter

from ...collectives.reduce import Array
from .cc_core import AHEAD, Buffers, pieces_of, work_of
from .laid_out import LaidOut, LaidStep, collisions
from .lingering import linger
from .workers import Workers

__all__ = ["WireDrivenExecution"]


class WireDrivenExecution:
    """One rank's program under way, over what has a starter for every peer.

    Args:
        laid: The program, laid out on the arrays.
        buffers: These; nobody else touches them meanwhile.
        rank: The group rank that it is a part of.
        starters: What starts messages, by the world rank of the other end.
        tag: First of the transport tags that belong to this operation; channel c uses `tag + c`.
        priority: Of the messages; lower is more urgent.
        workers: Where large reductions run.
        quiet: In which numpy does not warn.
        spawn: Starts a task, which is needed only to give up.
    """

    __slots__ = (
        "_advancing", "_again", "_begun", "_buffers", "_bytes", "_consumed", "_early", "_ended", "_failure",
        "_finished", "_gives_up", "_laid", "_priority", "_quiet", "_rank", "_running", "_sleeper", "_spawn",
        "_starters", "_tag", "_unfinished", "_waiting", "_workers",
    )  # fmt: skip

    def __init__(
        self,
        laid: LaidOut,
        buffers: Buffers,
        rank: int,
        starters: Mapping[int, Starter],
        *,
        tag: int,
        priority: int,
        workers: Workers,
        quiet: Context,
        spawn: Callable[..., None],
    ) -> None:
        self._laid, self._buffers, self._rank = laid, buffers, rank
        self._starters, self._tag, self._priority = starters, tag, priority
        self._workers, self._quiet, self._spawn = workers, quiet, spawn
        count = len(laid)
        self._bytes: list[memoryview | None] = [None] * 3  # of the arrays, once a message has needed them
        self._begun = [0] * count  # steps of each queue that have been begun
        self._finished = [0] * count  # and ended, with all before them
        self._early: list[set[int]] = [set() for _ in laid]  # those that ended before others of their queue
        # What is there to be moved or added, by position, once all steps before it have ended.
        self._waiting: list[dict[int, tuple[LaidStep, Array, Delivery | None]]] = [{} for _ in laid]
        self._running: dict[tuple[int, int], Call | None] = {}  # by queue and position; None: in the worker threads
        self._unfinished = sum(map(len, laid))  # steps
        self._failure: BaseException | None = None
        self._consumed: set[tuple[int, int]] = set()  # receives whose message came in pieces
        self._advancing = self._again = self._gives_up = False
        self._sleeper: Task | None = None
        self._ended: Callable[[BaseException | None], None] | None = None

    def begin(self, ended: Callable[[BaseException | None], None]) -> bool:
        """Begin whatever can be; True if that was all there is to do.

        Args:
            ended: Called once if it was not: when everything is over, well or with the first error of a step, and
                nothing is under way any more.
        """
        self._go_on()
        if not self._unfinished and not self._running:
            return True
        self._ended = ended
        if self._failure is not None:
            self._give_up_soon()
        return False

    def look(self) -> None:
        """Go on with what has come, before whoever waits for the end sleeps: that saves waking up for it."""
        if self._starters:
            linger(self._starters, self._rests)

    def _rests(self) -> bool:
        """Whether no message can change anything: none is under way, though worker threads may be."""
        return self._failure is not None or not any(self._running.values())

    def cancel(self) -> None:
        """Begin nothing more, and withdraw what is under way; what cannot be withdrawn is waited for."""
        self._fail(trio.ClosedResourceError("the program was given up"))

    # -- how it ends ---------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Tell whoever asked for it that all has ended well."""
        ended = self._ended
        if ended is not None and not self._unfinished and not self._running and not self._gives_up:
            self._ended = None
            ended(None)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        if self._ended is not None:
            self._give_up_soon()

    def _give_up_soon(self) -> None:
        """See to it that what is under way is withdrawn, by a task: who tells of an end may not be called back."""
        if not self._gives_up:
            self._gives_up = True
            self._spawn(self._give_up)

    async def _give_up(self) -> None:
        """Withdraw what is under way, and wait for what cannot be: it touches memory of others."""
        with trio.CancelScope(shield=True):
            await checkpoint()
            for call in list(self._running.values()):
                if call is not None:
                    call.withdraw()
            while self._running:
                self._sleeper = current_task()
                await wait_task_rescheduled(_never)
        for waiting in self._waiting:
            for _, _, delivery in waiting.values():
                if delivery is not None:
                    delivery.release()
            waiting.clear()
        assert self._ended is not None, "it is told once, here or when all went well"
        self._ended(self._failure)

    def _wake(self) -> None:
        task, self._sleeper = self._sleeper, None
        if task is not None:
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
                for index, steps in enumerate(self._laid):
                    if self._begun[index] < len(steps):
                        self._push(index)
        except Exception as error:
            self._fail(error)
        finally:
            self._advancing = False
        self._tell()

    def _push(self, index: int) -> None:
        """Begin the next steps of a queue, until one has to wait."""
        steps = self._laid[index]
        while (at := self._begun[index]) < len(steps):
            laid = steps[at]
            for queue, count in laid.waits:
                if self._finished[queue] < count:
                    return
            if laid.sends:
                self._begun[index] = at + 1
                self._send(index, at, laid)
            elif laid.receives:
                apart = self._apart(index, at, laid)
                # A message may come while steps before it are under way: there is room, or a place nobody touches.
                if at - self._finished[index] >= AHEAD or (laid.lands and not apart):
                    return
                self._begun[index] = at + 1
                self._receive(index, at, laid, apart)
            else:
                self._begun[index] = at + 1
                self._in_turn(index, at, laid, self._view(laid.source), None)

    def _apart(self, index: int, at: int, laid: LaidStep) -> bool:
        """Whether nothing that reduces or copies before a step, and has not ended, touches what it touches."""
        if laid.collides is None:
            laid.collides = collisions(self._laid[index], at, self._buffers)
        finished, early = self._finished[index], self._early[index]
        return all(other < finished or other in early for other in laid.collides)

    def _view(self, where: tuple[int, int, int]) -> Array:
        buffer, start, stop = where
        return self._buffers.arrays[buffer][start:stop]

    def _memory(self, where: tuple[int, int, int]) -> memoryview:
        """Return the bytes of some elements."""
        buffer, start, stop = where
        array = self._buffers.arrays[buffer]
        whole = self._bytes[buffer]
        if whole is None:
            whole = self._bytes[buffer] = memoryview(array.view(np.uint8))  # type: ignore[arg-type]  # it has a buffer
        return whole[start * array.itemsize : stop * array.itemsize]

    def _send(self, index: int, at: int, laid: LaidStep) -> None:
        data, tag = self._memory(laid.source), self._tag + laid.channel
        starter, priority = self._starters[laid.peer], self._priority
        if starter.try_send(laid.peer, tag, data, priority=priority):
            self._step_ended(index, at)
            return
        key = index, at
        self._running[key] = None  # its end may be told before it is known
        try:
            call = starter.begin_send(laid.peer, tag, data, priority=priority, done=partial(self._moved, key))
        except BaseException:
            del self._running[key]
            raise
        if key in self._running:
            self._running[key] = call

    def _receive(self, index: int, at: int, laid: LaidStep, apart: bool) -> None:
        key, lands = (index, at), laid.lands
        self._running[key] = None  # its end may be told before it is known
        try:
            call = self._starters[laid.peer].begin_recv(
                laid.peer,
                self._tag + laid.channel,
                self._memory(laid.target) if lands else None,
                laid.message_bytes,
                done=partial(self._moved if lands else self._arrived, key),
                consume=partial(self._consume, key) if apart and not lands else None,
            )
        except BaseException:
            del self._running[key]
            raise
        if key in self._running:
            self._running[key] = call

    # -- what has ended ------------------------------------------------------------------------------------------

    def _step_ended(self, index: int, at: int) -> None:
        """Note that a step is over; those behind it count once it does."""
        self._unfinished -= 1
        self._again = True
        if at == self._finished[index]:
            early, at = self._early[index], at + 1
            while early and at in early:
                early.remove(at)
                at += 1
            self._finished[index] = at
            if self._waiting[index]:
                self._catch_up(index)
        else:
            self._early[index].add(at)

    def _fails(self, key: tuple[int, int], call: Call) -> bool:
        """Whether a message has not been; who waits is told."""
        del self._running[key]
        if call.error is not None:
            self._fail(call.error)
        elif self._failure is None and not call.withdrawn:
            return False
        self._wake()
        return call.error is not None or call.withdrawn

    def _moved(self, key: tuple[int, int], call: Call) -> None:
        """A message has left, or is in its place."""
        if not self._fails(key, call):
            self._step_ended(*key)
            self._go_on()

    def _consume(self, key: tuple[int, int], offset: int, piece: memoryview) -> None:
        """Add a piece of a message while it is in the cache, and before the next one comes into its place."""
        if self._failure is not None:  # the arrays may be in other hands
            return
        self._consumed.add(key)
        laid = self._laid[key[0]][key[1]]
        incoming = self._incoming(laid, piece)
        first = offset // incoming.itemsize
        target = self._view(laid.target)[first : first + incoming.size]
        try:
            self._quiet.run(work_of(laid.step, self._buffers, self._rank, incoming, target, first), slice(None))
        except Exception as error:
            self._fail(error)

    def _incoming(self, laid: LaidStep, piece: memoryview) -> Array:
        incoming: Array = np.frombuffer(piece, np.uint8).view(self._buffers.arrays[laid.step.src.buffer].dtype)
        return incoming

    def _arrived(self, key: tuple[int, int], call: Call) -> None:
        """A message has come that is to be added to something."""
        if self._fails(key, call):
            return
        index, at = key
        laid, delivery = self._laid[index][at], call.delivery()
        if self._failure is not None:  # the arrays may be in other hands
            delivery.release()
        elif key in self._consumed:
            self._worked(index, at, delivery, None)
            self._go_on()
        else:
            self._in_turn(index, at, laid, self._incoming(laid, delivery.view), delivery)
            self._go_on()

    def _in_turn(self, index: int, at: int, laid: LaidStep, incoming: Array, delivery: Delivery | None) -> None:
        """Move or add `incoming` once all steps before have ended."""
        self._waiting[index][at] = laid, incoming, delivery
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

    def _work(self, index: int, at: int, laid: LaidStep, incoming: Array, delivery: Delivery | None) -> None:
        """Move or add `incoming` to where a step says, in worker threads if it is large."""
        pieces = pieces_of(laid.step, self._buffers, self._rank, incoming, self._view(laid.target))
        if len(pieces) == 1:
            self._quiet.run(pieces[0])
            self._worked(index, at, delivery, None)
            return
        token = trio.lowlevel.current_trio_token()
        self._running[index, at] = None
        done = partial(self._told_by_workers, index, at, delivery)
        self._workers.submit(pieces, lambda error: token.run_sync_soon(done, error), priority=self._priority)

    def _told_by_workers(self, index: int, at: int, delivery: Delivery | None, error: BaseException | None) -> None:
        del self._running[index, at]
        self._worked(index, at, delivery, error)
        if self._failure is not None:
            self._wake()
        self._go_on()

    def _worked(self, index: int, at: int, delivery: Delivery | None, error: BaseException | None) -> None:
        if delivery is not None:
            delivery.release()
        if error is not None:
            self._fail(error)
        else:
            self._step_ended(index, at)


def _never(_: object) -> trio.lowlevel.Abort:
    raise AssertionError("who gives up is shielded")
