"""An execution that the wires drive: what has come is added and passed on by whatever brings the news of it.

A task for each queue of a program, and one for each message under way, would be woken by every message, and each of
these turns of the event loop takes as long as sending a small message does. So there is none, as long as all goes well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import trio
from trio.lowlevel import Task, checkpoint, current_task, reschedule, wait_task_rescheduled

from transports import Call, Delivery, Starter

from ...collectives.reduce import Array
from .cc_core import AHEAD, apply, pieces_of
from .host_bytes import bytes_of, typed
from .laid_out import LaidOut, LaidStep
from .lingering import linger
from .program_memory import Buffers
from .workers import Workers

__all__ = ["Station", "WireDrivenExecution"]

_Key: TypeAlias = tuple[int, int]  # of a step: its queue, and its position there


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    """What all programs of one rank on one group have.

    Attributes:
        starters: What starts messages, by the world rank of the other end.
        workers: Where large reductions run.
        quiet: In which numpy does not warn.
    """

    starters: Mapping[int, Starter]
    workers: Workers
    quiet: Context


class WireDrivenExecution:
    """One rank's program under way, over what has a starter for every peer.

    Args:
        laid: The program, laid out on the arrays.
        buffers: These; nobody else touches them meanwhile.
        station: Whose program it is.
        tag: First of the transport tags that belong to this operation; channel c uses `tag + c`.
        priority: Of the messages; lower is more urgent.
        spawn: Starts a task, which is needed only to give up.
    """

    # What most never have: a class without slots, so that these need not be set each time.
    _advancing = _again = _gives_up = False
    _failure: BaseException | None = None
    _sleeper: Task | None = None
    _ended: Callable[[BaseException | None], None] | None = None
    _consumed: Set[_Key] = frozenset()  # receives whose message came in pieces

    def __init__(
        self,
        laid: LaidOut,
        buffers: Buffers,
        station: Station,
        *,
        tag: int,
        priority: int,
        spawn: Callable[..., None],
    ) -> None:
        self._laid, self._arrays, self._station = laid, buffers.arrays, station
        self._tag, self._priority, self._spawn = tag, priority, spawn
        self._bytes: list[memoryview | None] = [None, None, None]  # of the arrays, once a message has needed them
        self._begun = [0] * len(laid.queues)  # steps of each queue that have been begun
        self._finished = self._begun.copy()  # and ended, with all before them
        self._unbegun = self._unfinished = laid.steps
        self._early: set[_Key] = set()  # those that ended before others of their queue
        # What is there to be moved or added once all steps before it have ended.
        self._waiting: dict[_Key, tuple[Array, Delivery | None]] = {}
        self._running: dict[_Key, Call | None] = {}  # None: in the worker threads

    def begin(self, ended: Callable[[BaseException | None], None]) -> bool:
        """Begin whatever can be; True if that was all there is to do.

        Args:
            ended: Called once if it was not: when everything is over, well or with the first error of a step, and
                nothing is under way any more.
        """
        self._go_on()
        if not self._unfinished:
            return True
        self._ended = ended
        if self._failure is not None:
            self._give_up_soon()
        return False

    def look(self) -> None:
        """Go on with what has come, before whoever waits for the end sleeps: that saves waking up for it."""
        starters = self._station.starters
        if starters:
            linger(starters, self._rests)

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
        if ended is not None and not self._gives_up:
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
        for _, delivery in self._waiting.values():
            if delivery is not None:
                delivery.release()
        self._waiting.clear()
        assert self._ended is not None, "it is told once, here or when all went well"
        self._ended(self._failure)

    def _wake(self) -> None:
        task, self._sleeper = self._sleeper, None
        if task is not None:
            reschedule(task)

    # -- going on ------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Begin all steps that can be, and tell if that was the end; what ends meanwhile is seen in the next round."""
        if self._advancing:
            return
        if self._unbegun:
            self._advance()
        if not self._unfinished:
            self._tell()

    def _advance(self) -> None:
        self._advancing = self._again = True
        begun = self._begun
        try:
            while self._again and self._unbegun and self._failure is None:
                self._again = False
                for index, steps in enumerate(self._laid.queues):
                    if begun[index] < len(steps):
                        self._push(index, steps)
        except Exception as error:
            self._fail(error)
        finally:
            self._advancing = False

    def _push(self, index: int, steps: Sequence[LaidStep]) -> None:
        """Begin the next steps of a queue, until one has to wait."""
        begun, finished = self._begun, self._finished
        for at in range(begun[index], len(steps)):
            laid = steps[at]
            for queue, count in laid.waits:
                if finished[queue] < count:
                    return
            if laid.sends:
                self._send((index, at), laid)
            elif laid.receives:
                apart = not laid.collides or self._apart(index, laid)
                # A message may come while steps before it are under way: there is room, or a place nobody touches.
                if at - finished[index] >= AHEAD or (laid.lands and not apart):
                    return
                self._receive((index, at), laid, apart)
            else:
                self._in_turn((index, at), laid, self._view(laid.source), None)
            begun[index] = at + 1
            self._unbegun -= 1

    def _apart(self, index: int, laid: LaidStep) -> bool:
        """Whether nothing that reduces or copies before a step, and has not ended, touches what it touches."""
        finished, early = self._finished[index], self._early
        return all(other < finished or (index, other) in early for other in laid.collides)

    def _view(self, where: tuple[int, int, int]) -> Array:
        buffer, start, stop = where
        return self._arrays[buffer][start:stop]

    def _memory(self, laid: LaidStep) -> memoryview:
        """Return the bytes that a step sends, or receives."""
        whole = self._bytes[laid.message_buffer]
        if whole is None:
            whole = self._bytes[laid.message_buffer] = bytes_of(self._arrays[laid.message_buffer])
        return whole[laid.message_part]

    def _send(self, key: _Key, laid: LaidStep) -> None:
        peer, tag, data = laid.peer, self._tag + laid.channel, self._memory(laid)
        starter = self._station.starters[peer]
        if starter.try_send(peer, tag, data, priority=self._priority):
            self._step_ended(key)
            return
        self._running[key] = None  # its end may be told before it is known
        try:
            call = starter.begin_send(peer, tag, data, priority=self._priority, done=partial(self._moved, key))
        except BaseException:
            del self._running[key]
            raise
        if key in self._running:
            self._running[key] = call

    def _receive(self, key: _Key, laid: LaidStep, apart: bool) -> None:
        lands = laid.lands
        self._running[key] = None  # its end may be told before it is known
        try:
            call = self._station.starters[laid.peer].begin_recv(
                laid.peer,
                self._tag + laid.channel,
                self._memory(laid) if lands else None,
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

    def _step_ended(self, key: _Key) -> None:
        """Note that a step is over; those behind it count once it does."""
        index, at = key
        self._unfinished -= 1
        self._again = True
        if at != self._finished[index]:
            self._early.add(key)
            return
        at, early = at + 1, self._early
        while early and (index, at) in early:
            early.remove((index, at))
            at += 1
        self._finished[index] = at
        if self._waiting and self._failure is None:
            waiting = self._waiting.pop((index, at), None)
            if waiting is not None:
                self._work((index, at), self._laid.queues[index][at], *waiting)

    def _fails(self, key: _Key, call: Call) -> bool:
        """Whether a message has not been; who waits is told."""
        del self._running[key]
        if call.error is not None:
            self._fail(call.error)
        elif self._failure is None and not call.withdrawn:
            return False
        self._wake()
        return call.error is not None or call.withdrawn

    def _moved(self, key: _Key, call: Call) -> None:
        """A message has left, or is in its place."""
        if not self._fails(key, call):
            self._step_ended(key)
            self._go_on()

    def _consume(self, key: _Key, offset: int, piece: memoryview) -> None:
        """Add a piece of a message while it is in the cache, and before the next one comes into its place."""
        if self._failure is not None:  # the arrays may be in other hands
            return
        self._consumed |= {key}
        laid = self._laid.queues[key[0]][key[1]]
        incoming = self._incoming(laid, piece)
        first = offset // incoming.itemsize
        part = slice(first, first + incoming.size)
        target, mine = self._places(laid)
        layout, rank = self._laid.layout, self._laid.rank
        try:
            self._station.quiet.run(apply, laid.step, layout, rank, incoming, mine[part], target[part])
        except Exception as error:
            self._fail(error)

    def _incoming(self, laid: LaidStep, piece: memoryview) -> Array:
        return typed(piece, self._arrays[laid.step.src.buffer].dtype)

    def _places(self, laid: LaidStep) -> tuple[Array, Array]:
        """Return where a step puts what comes, and what it is added to."""
        target = self._view(laid.target)
        return target, target if laid.base is None else self._view(laid.base)

    def _arrived(self, key: _Key, call: Call) -> None:
        """A message has come that is to be added to something."""
        if self._fails(key, call):
            return
        laid, delivery = self._laid.queues[key[0]][key[1]], call.delivery()
        if self._failure is not None:  # the arrays may be in other hands
            delivery.release()
            return
        if key in self._consumed:
            self._worked(key, delivery, None)
        else:
            self._in_turn(key, laid, self._incoming(laid, delivery.view), delivery)
        self._go_on()

    def _in_turn(self, key: _Key, laid: LaidStep, incoming: Array, delivery: Delivery | None) -> None:
        """Move or add `incoming` once all steps before have ended."""
        if key[1] == self._finished[key[0]] and self._failure is None:
            self._work(key, laid, incoming, delivery)
        else:
            self._waiting[key] = incoming, delivery

    def _work(self, key: _Key, laid: LaidStep, incoming: Array, delivery: Delivery | None) -> None:
        """Move or add `incoming` to where a step says, in worker threads if it is large."""
        try:
            target, mine = self._places(laid)
            pieces = pieces_of(laid.step, self._laid.layout, self._laid.rank, incoming, mine, target)
            if len(pieces) > 1:
                self._let_others(pieces, key, delivery)
                return
            self._station.quiet.run(pieces[0])
        except Exception as error:
            self._worked(key, delivery, error)
        else:
            self._worked(key, delivery, None)

    def _let_others(self, pieces: Sequence[Callable[[], None]], key: _Key, delivery: Delivery | None) -> None:
        """Let worker threads do it."""
        token = trio.lowlevel.current_trio_token()
        done = partial(self._told_by_workers, key, delivery)
        self._running[key] = None
        self._station.workers.submit(pieces, lambda error: token.run_sync_soon(done, error), priority=self._priority)

    def _told_by_workers(self, key: _Key, delivery: Delivery | None, error: BaseException | None) -> None:
        del self._running[key]
        self._worked(key, delivery, error)
        if self._failure is not None:
            self._wake()
        self._go_on()

    def _worked(self, key: _Key, delivery: Delivery | None, error: BaseException | None) -> None:
        if delivery is not None:
            delivery.release()
        if error is not None:
            self._fail(error)
        else:
            self._step_ended(key)


def _never(_: object) -> trio.lowlevel.Abort:
    raise AssertionError("who gives up is shielded")
