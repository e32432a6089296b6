"""Executions of programs, driven by the wires: the callback of a message adds it and passes it on.

A task for each queue of a program, and one for each message under way, would be woken by every message, and each of
these turns of the event loop takes as long as sending a small message does. So there is none, as long as all goes well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import trio
from trio.lowlevel import Task, checkpoint, current_task, reschedule, wait_task_rescheduled

from transports import Call, Delivery, Starter

from ...collectives.program import Step
from ...collectives.reduce import Array
from ...collectives.schedule import Buffer, Op
from .host_bytes import typed
from .laid_out import LaidOut, LaidStep, Run
from .layout import Buffers, Layout
from .polling import linger
from .workers import INLINE_BYTES, PIECE_BYTES, Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    """The wires and workers of all programs of one rank on one group."""

    starters: Mapping[int, Starter]  # What starts messages, by the world rank of the other end
    workers: Workers  # Where large reductions run


class Execution:
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
    ) -> None:
        self._laid, self._buffers, self._station = laid, buffers, station
        self._tag, self._priority, self._spawn = tag, priority, spawn
        self._unended = len(laid.steps)
        # For how many each run waits before it begins, and each step before it works.
        self._before_begin, self._before_work = [*laid.before_begin], [*laid.before_work]
        self._able = [*laid.first]  # runs that may begin
        self._running: dict[LaidStep, Call | None] = {}  # None: in the worker threads
        self._waiting: dict[LaidStep, tuple[Array, Delivery | None]] = {}  # what is there to be moved or added
        self._consumed: set[LaidStep] = set()  # receives whose message came in pieces

    def begin(self, ended: Callable[[BaseException | None], None]) -> bool:
        """Begin whatever can be; True if that was all there is to do.

        Args:
            ended: Called once if it was not: when everything is over, well or with the first error of a step, and
                nothing is under way any more.
        """
        self._advance()
        if not self._unended:
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

    def _stopped(self, error: BaseException | None) -> None:
        """Something has ended that is of no use any more."""
        if error is not None:
            self._fail(error)
        task, self._sleeper = self._sleeper, None
        if task is not None:
            reschedule(task)

    # -- going on ------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Begin all runs that can be, and those that can once they have ended."""
        self._advancing = True
        try:
            for run in self._able:  # which grows meanwhile
                self._begin_run(run)
        except Exception as error:
            self._fail(error)
        finally:
            self._able.clear()
            self._advancing = False

    def _begin_run(self, run: Run) -> None:
        for step in run.steps:
            if self._failure is not None:
                return
            if step.sends:
                self._send(step)
            elif step.receives:
                self._receive(step)
            elif step.works:
                self._in_turn(step, self._part(step.source), None)
            else:
                self._step_ended(step)
        if run.lets_begin:
            self._let_begin(run.lets_begin)

    def _let_begin(self, runs: Iterable[int]) -> None:
        """Note that something is over that these wait for."""
        for number in runs:
            left = self._before_begin[number] = self._before_begin[number] - 1
            if not left:
                self._able.append(self._laid.runs[number])

    def _send(self, step: LaidStep) -> None:
        peer, tag = step.peer, self._tag + step.channel
        data = self._buffers.bytes_of(step.message_buffer, step.message_part)
        starter = self._station.starters[peer]
        call = starter.begin_send(peer, tag, data, priority=self._priority, done=partial(self._moved, step))
        if call is None:
            self._step_ended(step)
        elif not call.ended:
            self._running[step] = call

    def _receive(self, step: LaidStep) -> None:
        peer, tag = step.peer, self._tag + step.channel
        starter = self._station.starters[peer]
        if step.works:
            call = starter.begin_recv(
                peer,
                tag,
                None,
                step.message_bytes,
                done=partial(self._arrived, step),
                consume=None if self._before_work[step.number] else partial(self._consume, step),
            )
        else:
            place = self._buffers.bytes_of(step.message_buffer, step.message_part)
            call = starter.begin_recv(peer, tag, place, step.message_bytes, done=partial(self._moved, step))
        if not call.ended:
            self._running[step] = call

    # -- what has ended ------------------------------------------------------------------------------------------

    def _step_ended(self, step: LaidStep) -> None:
        """Note that a step is over, and go on with those that have waited for it."""
        self._unended -= 1
        if step.lets_begin:
            self._let_begin(step.lets_begin)
        for number in step.lets_work:
            left = self._before_work[number] = self._before_work[number] - 1
            if not left:
                self._has_turn(self._laid.steps[number])
        if not self._advancing:
            if self._able:
                self._advance()
            if not self._unended and self._ended is not None:
                ended, self._ended = self._ended, None
                ended(None)

    def _moved(self, step: LaidStep, call: Call) -> None:
        """A message has left, or is in its place."""
        self._running.pop(step, None)
        if call.error is None and self._failure is None:
            self._step_ended(step)
        else:
            self._stopped(call.error)

    def _arrived(self, step: LaidStep, call: Call) -> None:
        """A message has come that is to be added to something."""
        self._running.pop(step, None)
        if call.error is None and not call.withdrawn:
            delivery = call.delivery()
            if self._failure is None:
                self._use(step, delivery)
                return
            delivery.release()  # the arrays may be in other hands
        self._stopped(call.error)

    def _use(self, step: LaidStep, delivery: Delivery) -> None:
        if step in self._consumed:
            self._worked(step, delivery, None)
        else:
            self._in_turn(step, self._incoming(step, delivery.view), delivery)

    # -- moving and adding ---------------------------------------------------------------------------------------

    def _consume(self, step: LaidStep, offset: int, piece: memoryview) -> None:
        """Add a piece of a message while it is in the cache, and before the next one comes into its place."""
        if self._failure is not None:  # the arrays may be in other hands
            return
        self._consumed.add(step)
        incoming = self._incoming(step, piece)
        first = offset // incoming.itemsize
        part = slice(first, first + incoming.size)
        target, mine = self._places(step)
        layout, rank = self._laid.layout, self._laid.rank
        try:
            self._station.workers.quiet.run(apply, step.step, layout, rank, incoming, mine[part], target[part])
        except Exception as error:
            self._fail(error)

    def _incoming(self, step: LaidStep, piece: memoryview) -> Array:
        return typed(piece, self._buffers.arrays[step.step.src.buffer].dtype)

    def _part(self, where: tuple[int, int, int]) -> Array:
        buffer, start, stop = where
        return self._buffers.arrays[buffer][start:stop]

    def _places(self, step: LaidStep) -> tuple[Array, Array]:
        """Return where a step puts what comes, and what it is added to."""
        target = self._part(step.target)
        return target, target if step.base is None else self._part(step.base)

    def _in_turn(self, step: LaidStep, incoming: Array, delivery: Delivery | None) -> None:
        """Move or add `incoming` once all steps before that touch the same have ended."""
        if self._before_work[step.number]:
            self._waiting[step] = incoming, delivery
        else:
            self._work(step, incoming, delivery)

    def _has_turn(self, step: LaidStep) -> None:
        if step in self._waiting and self._failure is None:
            self._work(step, *self._waiting.pop(step))

    def _work(self, step: LaidStep, incoming: Array, delivery: Delivery | None) -> None:
        """Move or add `incoming` to where a step says, in worker threads if it is large."""
        try:
            target, mine = self._places(step)
            pieces = pieces_of(step.step, self._laid.layout, self._laid.rank, incoming, mine, target)
            if len(pieces) > 1:
                self._let_others(pieces, step, delivery)
                return
            self._station.workers.quiet.run(pieces[0])
        except Exception as error:
            self._worked(step, delivery, error)
        else:
            self._worked(step, delivery, None)

    def _let_others(self, pieces: Sequence[Callable[[], None]], step: LaidStep, delivery: Delivery | None) -> None:
        """Let worker threads do it."""
        token = trio.lowlevel.current_trio_token()
        done = partial(self._told_by_workers, step, delivery)
        self._running[step] = None
        self._station.workers.submit(pieces, lambda error: token.run_sync_soon(done, error), priority=self._priority)

    def _told_by_workers(self, step: LaidStep, delivery: Delivery | None, error: BaseException | None) -> None:
        del self._running[step]
        self._worked(step, delivery, error)

    def _worked(self, step: LaidStep, delivery: Delivery | None, error: BaseException | None) -> None:
        if delivery is not None:
            delivery.release()
        if error is None and self._failure is None:
            self._step_ended(step)
        else:
            self._stopped(error)


def _never(_: object) -> trio.lowlevel.Abort:
    raise AssertionError("who gives up is shielded")


def pieces_of(
    step: Step, layout: Layout, rank: int, incoming: Array, mine: Array, target: Array
) -> list[Callable[[], None]]:
    """Return what applies a step, see `apply`: one piece of work for this thread, or more for others."""
    weight = 1 if layout.reducer is None else layout.reducer.weight
    if (incoming.nbytes + target.nbytes) * weight <= INLINE_BYTES or _is_there(step, layout, incoming, target):
        return [partial(apply, step, layout, rank, incoming, mine, target)]
    length = max(1, PIECE_BYTES // target.itemsize)
    parts = (slice(start, start + length) for start in range(0, target.size, length))
    return [partial(apply, step, layout, rank, incoming[part], mine[part], target[part]) for part in parts]


def _is_there(step: Step, layout: Layout, incoming: Array, target: Array) -> bool:
    """Whether a move has nothing to do: input and result share memory."""
    divides = layout.reducer is not None and layout.reducer.divides
    if step.op is Op.ADD or divides or incoming.dtype != target.dtype or incoming.size != target.size:
        return False
    return bool(incoming.__array_interface__["data"][0] == target.__array_interface__["data"][0])


def apply(step: Step, layout: Layout, rank: int, incoming: Array, mine: Array, target: Array) -> None:
    """Move or add to `target` what has come, or lies elsewhere; or a part of it.

    Args:
        step: That says so.
        layout: Of the program.
        rank: Group rank of the program.
        incoming: What has come.
        mine: What it is added to: the target itself, or the base of the step.
        target: Where it goes.
    """
    reducer = layout.reducer
    if step.op is Op.ADD:
        assert reducer is not None, "only reductions have ADD rows"
        theirs, own = reducer.widen(incoming), reducer.widen(mine)
        low, high = (theirs, own) if step.peer < rank else (own, theirs)
        reducer.ufunc(low, high, out=target)
    elif reducer is None or step.src.buffer != Buffer.SCRATCH or step.dst.buffer != Buffer.OUT:
        np.copyto(target, incoming, casting="unsafe")
    else:
        reducer.finalise(incoming, target, layout.contributions)
