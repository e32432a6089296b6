"""Executions of programs: the callback of each message reduces its data and starts the steps that follow.

An execution without failures needs no task. A task for each queue or message would be woken by every message,
and one turn of the event loop takes as long as sending a small message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from threading import get_ident

import trio
from trio.lowlevel import Task, TrioToken, checkpoint, current_task, reschedule, wait_task_rescheduled

from transports import Delivery, Request, Wire

from ...collectives.reduce import Array
from ..signature import CallSignature
from .arithmetic import apply, pieces_of
from .host_bytes import as_numbers
from .laid_out import LaidOut, LaidStep
from .layout import Buffers
from .polling import linger
from .workers import Workers


@dataclass(frozen=True, kw_only=True)
class Station:
    """Wires and workers of all programs of one rank on one group."""

    wires: Mapping[int, Wire]  # Wires of messages, by world rank of the peer
    workers: Workers  # Threads of large reductions
    token: TrioToken  # Token of the event loop
    thread: int  # Thread of the event loop

    @property
    def wire_kind(self) -> str:
        """Kind of the wires, as text."""
        within_host = all(wire.within_host for wire in self.wires.values())
        return "shared memory" if self.wires and within_host else "wires"


class Execution:
    """One execution of one rank's program.

    Args:
        laid: The program, laid out on the arrays.
        buffers: The arrays, used by this execution alone until it ends.
        station: The wires and workers of the rank.
        tag: First of the operation's transport tags; channel c uses `tag + c`.
        priority: Priority of the messages; lower is more urgent.
        spawn: Starts a task; only a failed execution needs one.
        signature: The operation, as its messages carry it; None: no other process takes part.
    """

    # Defaults of the class, because most executions never change them.
    _advancing = _gives_up = False
    _failure: BaseException | None = None
    _sleeper: Task | None = None
    _ended: Callable[[BaseException | None], None] | None = None

    def __init__(
        self,
        laid: LaidOut,
        buffers: Buffers,
        station: Station,
        *,
        tag: int,
        priority: int,
        spawn: Callable[..., None],
        signature: CallSignature | None = None,
    ) -> None:
        self._laid, self._buffers, self._station = laid, buffers, station
        self._tag, self._priority, self._spawn, self._signature = tag, priority, spawn, signature
        self._unended = len(laid.steps)
        # Numbers of unfinished predecessors of each step, before it begins, and before it works.
        self._before_begin, self._before_work = [*laid.before_begin], [*laid.before_work]
        self._able = [*laid.first]  # steps that may begin
        self._running: dict[LaidStep, Request | None] = {}  # None: the worker threads have the step
        self._waiting: dict[LaidStep, Delivery | None] = {}  # steps that wait for their turn; None: local data
        self._consumed: set[LaidStep] = set()  # receives with a message in pieces

    def begin(self, ended: Callable[[BaseException | None], None]) -> bool:
        """Begin all steps that can begin; return whether the program is over.

        Args:
            ended: Called once, later, if the program is not over: with None or the first error of a step, after the end
                of all messages and reductions.
        """
        self._advance()
        if not self._unended:
            return True
        self._ended = ended
        if self._failure is not None:
            self._give_up_soon()
        return False

    # -- waiting -------------------------------------------------------------------------------------------------

    def look_before_sleeping(self) -> None:
        """Process arrived messages before a task sleeps until the end: this saves a wake-up."""
        if self._station.wires:
            linger(self._station.wires, self._rests)

    def _end(self, error: BaseException | None) -> None:
        """Call the callback of the end, once."""
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(error)

    def _rests(self) -> bool:
        """Whether no message is in flight; worker threads may still reduce."""
        return self._failure is not None or not any(self._running.values())

    def cancel(self) -> None:
        """Begin no more steps, withdraw the messages under way, and wait for messages that cannot be withdrawn."""
        self._fail(trio.ClosedResourceError("the program was cancelled"))

    # -- ends of an execution ----------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        """Note the first error of a step, and give up the execution."""
        self._failure = self._failure or error
        if self._ended is not None:
            self._give_up_soon()

    def _give_up_soon(self) -> None:
        """Withdraw the messages in flight in a task, because a callback of a transport may not call it back."""
        if not self._gives_up:
            self._gives_up = True
            self._spawn(self._give_up)

    async def _give_up(self) -> None:
        """Withdraw the messages in flight and wait until all have ended, because they use the caller's memory."""
        with trio.CancelScope(shield=True):
            await checkpoint()
            for step, call in list(self._running.items()):
                if call is not None:
                    call.withdraw()
                    if call.ended:  # also if a thread was interrupted before it could call back
                        self._running.pop(step, None)
            while self._running:
                self._sleeper = current_task()
                await wait_task_rescheduled(_refuse_abort)
        for delivery in self._waiting.values():
            if delivery is not None:
                delivery.release()
        self._waiting.clear()
        self._end(self._failure)

    def _stopped(self, error: BaseException | None) -> None:
        """Note the end of a message or reduction after a failure, or its own failure."""
        if error is not None:
            self._fail(error)
        task, self._sleeper = self._sleeper, None
        if task is None:
            return
        if get_ident() == self._station.thread:
            reschedule(task)
        else:
            self._station.token.run_sync_soon(reschedule, task)

    # -- progress ----------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Begin all steps that can begin, and the steps that become ready."""
        self._advancing, before, steps = True, self._before_begin, self._laid.steps
        try:
            for step in self._able:  # the list grows in the loop
                while self._failure is None:
                    if step.sends:
                        self._send(step)
                    elif step.receives:
                        self._receive(step)
                    elif step.works:
                        self._work(step, None)
                    else:
                        self._step_ended(step)
                    after = step.number + 1
                    if not step.leads:
                        break
                    before[after] -= 1
                    if before[after]:
                        break
                    step = steps[after]
        except Exception as error:
            self._fail(error)
        finally:
            self._able.clear()
            self._advancing = False

    def _send(self, step: LaidStep) -> None:
        """Send the data of a step; its end calls back."""
        peer, tag = step.peer, self._tag + step.channel
        data = self._buffers.bytes_of(step.message_buffer, step.message_part)
        wire = self._station.wires[peer]
        moved, signature = partial(self._moved, step), self._signature
        call = wire.begin_send(peer, tag, data, priority=self._priority, signature=signature, done=moved)
        if call is None:
            self._step_ended(step)
        elif not call.ended:
            self._running[step] = call

    def _receive(self, step: LaidStep) -> None:
        """Receive the message of a step, to its target or to the function that reduces it."""
        peer, tag = step.peer, self._tag + step.channel
        wire = self._station.wires[peer]
        if step.works:
            call = wire.begin_recv(
                peer,
                tag,
                None,
                step.message_bytes,
                signature=self._signature,
                done=partial(self._moved, step),
                consume=None if self._before_work[step.number] else partial(self._consume, step),
            )
        else:
            place = self._buffers.bytes_of(step.message_buffer, step.message_part)
            moved, signature = partial(self._moved, step), self._signature
            call = wire.begin_recv(peer, tag, place, step.message_bytes, signature=signature, done=moved)
        if not call.ended:
            self._running[step] = call

    # -- ends of steps -----------------------------------------------------------------------------------------------

    def _moved(self, step: LaidStep, call: Request) -> None:
        """Continue a step after its message has left or arrived."""
        self._running.pop(step, None)
        delivery = call.delivery() if step.works and call.error is None and not call.withdrawn else None
        if delivery is None or step in self._consumed or self._failure is not None:
            self._step_ended(step, delivery, call.error)
        else:
            self._work(step, delivery)

    def _work(self, step: LaidStep, delivery: Delivery | None) -> None:
        """Move or add data to the target of a step; in worker threads if they are large."""
        if self._before_work[step.number]:  # waits for earlier steps on overlapping memory
            self._waiting[step] = delivery
            return
        error: BaseException | None = None
        try:
            incoming = self._array_part(step.source) if delivery is None else self._incoming(step, delivery.view)
            target, operand = self._places(step)
            pieces = pieces_of(step.step, self._laid.layout, self._laid.rank, incoming, operand, target)
            if len(pieces) > 1:
                self._running[step] = None
                ended = partial(self._station.token.run_sync_soon, self._step_ended, step, delivery)
                self._station.workers.submit(pieces, ended, priority=self._priority)
                return
            self._station.workers.quiet.run(pieces[0])
        except Exception as raised:
            error = raised
        self._step_ended(step, delivery, error)

    def _step_ended(self, step: LaidStep, delivery: Delivery | None = None, error: BaseException | None = None) -> None:
        """End a step; the steps that wait for it go on, unless any step has failed."""
        self._running.pop(step, None)
        if delivery is not None:
            delivery.release()  # the caller may use its arrays again
        if error is not None or self._failure is not None:
            self._stopped(error)
            return
        self._unended -= 1
        for number in step.lets_begin:
            remaining = self._before_begin[number] = self._before_begin[number] - 1
            if not remaining:
                self._able.append(self._laid.steps[number])
        for number in step.lets_work:
            remaining = self._before_work[number] = self._before_work[number] - 1
            following = self._laid.steps[number]
            if not remaining and following in self._waiting and self._failure is None:
                self._work(following, self._waiting.pop(following))
        if not self._advancing:
            if self._able:
                self._advance()
            if not self._unended:
                self._end(None)

    def _consume(self, step: LaidStep, offset: int, piece: memoryview) -> None:
        """Add a piece of a message while it is in the cache, before the next piece overwrites it."""
        if self._failure is not None:  # the caller may use its arrays again
            return
        self._consumed.add(step)
        incoming = self._incoming(step, piece)
        first = offset // incoming.itemsize
        part = slice(first, first + incoming.size)
        target, operand = self._places(step)
        layout, rank = self._laid.layout, self._laid.rank
        try:
            self._station.workers.quiet.run(apply, step.step, layout, rank, incoming, operand[part], target[part])
        except Exception as error:
            self._fail(error)

    def _incoming(self, step: LaidStep, piece: memoryview) -> Array:
        return as_numbers(piece, self._buffers.arrays[step.step.src.buffer].dtype)

    def _array_part(self, where: tuple[int, int, int]) -> Array:
        """Return the array of a range of a buffer."""
        buffer, start, stop = where
        return self._buffers.arrays[buffer][start:stop]

    def _places(self, step: LaidStep) -> tuple[Array, Array]:
        """Return the target of a step, and the operand to which incoming data is added."""
        target = self._array_part(step.target)
        return target, target if step.base is None else self._array_part(step.base)


def _refuse_abort(_: object) -> trio.lowlevel.Abort:
    raise AssertionError("this is a bug in overlap: the shielded wait of a failed execution was cancelled")
