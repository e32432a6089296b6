"""Executions of programs: the callback of each message reduces its data and starts the steps that follow.

An execution without failures needs no task: every message would have to wake one, and one turn of the event loop takes
as long as sending a small message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from threading import get_ident

import trio
from trio.lowlevel import TrioToken, checkpoint

from transports import Delivery, Request, Wire

from ...collectives.reduce import Array
from ..signature import CallSignature
from .arithmetic import apply, make_pieces
from .host_bytes import as_numbers
from .laid_out import BufferRange, LaidOut, LaidStep
from .layout import Buffers
from .polling import poll_wires
from .workers import Workers


@dataclass(frozen=True, kw_only=True)
class Station:
    """Wires and workers that all programs of one rank on one group use."""

    wires: Mapping[int, Wire]  # Wire to each other member, by its world rank
    workers: Workers  # Threads for large reductions
    token: TrioToken  # Token of the event loop
    thread: int  # Ident of the event loop's thread

    @property
    def wire_kind(self) -> str:
        """Kind of the wires, as text: "shared memory" if all peers are on this host, else "wires"."""
        within_host = all(wire.within_host for wire in self.wires.values())
        return "shared memory" if self.wires and within_host else "wires"


class Execution:
    """One execution of one rank's program.

    A step begins (its message is sent or requested), works (moves or reduces data here) and ends.

    Args:
        laid: The program, laid out on the arrays.
        buffers: The arrays, used by this execution alone until it ends.
        station: The wires and workers of the rank.
        tag: First of the operation's transport tags; channel c uses `tag + c`.
        priority: Priority of the messages; lower is more urgent.
        spawn: Starts a task; only a failed execution needs one.
        signature: Signature of the call, which the messages carry; None: no other process takes part.
    """

    # Defaults of the class, because most executions never change them.
    _advancing = _gives_up = False
    _failure: BaseException | None = None
    # Set by the next end of a message or reduction after a failure; `_give_up` makes a new event for each wait.
    _next_end: trio.Event | None = None
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
        # By step: how many earlier steps it still waits for, before it may begin and before it may work.
        self._before_begin, self._before_work = [*laid.before_begin], [*laid.before_work]
        self._ready = [*laid.first]  # steps that may begin
        # Steps with a message in flight; None: worker threads carry out the step.
        self._running: dict[LaidStep, Request | None] = {}
        # Steps that have their data and wait until they may work; None: the data is of this rank.
        self._waiting: dict[LaidStep, Delivery | None] = {}
        self._consumed: set[LaidStep] = set()  # receives whose message was reduced in pieces, as it arrived

    def begin(self, ended: Callable[[BaseException | None], None]) -> bool:
        """Begin all steps that can begin. Return whether the program is over; then `ended` is not called.

        Args:
            ended: Otherwise called once, after the end of all messages and reductions, with the first error of a step
                or None.
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
        """Process messages that arrive within a short time, before a task sleeps: this may save a wake-up."""
        if self._station.wires:
            poll_wires(self._station.wires, self._awaits_no_message)

    def _end(self, error: BaseException | None) -> None:
        """Call the callback of `begin` with the error or None. Later calls do nothing."""
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(error)

    def _awaits_no_message(self) -> bool:
        """Whether no message is in flight, though worker threads may still reduce."""
        return self._failure is not None or not any(self._running.values())

    def cancel(self) -> None:
        """Begin no more steps, and withdraw the messages in flight. The execution ends when all of them have ended."""
        self._fail(trio.ClosedResourceError("the program was cancelled"))

    # -- ends of an execution ----------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        """Record the first error, and give the execution up; before `begin` has returned, `begin` does that."""
        self._failure = self._failure or error
        if self._ended is not None:
            self._give_up_soon()

    def _give_up_soon(self) -> None:
        """Start the task that withdraws the messages in flight; a callback of a transport may not do that."""
        if not self._gives_up:
            self._gives_up = True
            self._spawn(self._give_up)

    async def _give_up(self) -> None:
        """Withdraw the messages in flight, wait until all have ended, and end the execution with its failure.

        The wait is needed because messages use the caller's memory. Received data that no step has used is released.
        """
        with trio.CancelScope(shield=True):
            await checkpoint()
            for step, request in list(self._running.items()):
                if request is not None:
                    request.withdraw()
                    if request.ended:  # a thread may have been interrupted between the end and its callback
                        self._running.pop(step, None)
            # Each end of a step sets the present event. Make the new event before the check of `_running`, as a thread
            # may end the last step between the two.
            self._next_end = trio.Event()
            while self._running:
                await self._next_end.wait()
                self._next_end = trio.Event()
        for delivery in self._waiting.values():
            if delivery is not None:
                delivery.release()
        self._waiting.clear()
        self._end(self._failure)

    def _record_end_after_failure(self, error: BaseException | None) -> None:
        """Notify `_give_up` that a message or reduction has ended, after some step of the program has failed.

        Args:
            error: Error of this message or reduction; None: it ended well.
        """
        if error is not None:
            self._fail(error)
        if self._next_end is None:
            return
        if get_ident() == self._station.thread:
            self._next_end.set()
        else:  # another thread than the event loop's, on which events must be set
            self._station.token.run_sync_soon(self._next_end.set)

    # -- progress ----------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Begin all steps in `_ready`, and those that become ready meanwhile."""
        self._advancing, before, steps = True, self._before_begin, self._laid.steps
        try:
            for step in self._ready:  # the list grows in the loop
                # Begin this step, then the next steps of its queue as long as they wait for nothing else.
                while self._failure is None:
                    if step.sends:
                        self._send(step)
                    elif step.receives:
                        self._receive(step)
                    elif step.works:
                        self._work(step, None)
                    else:
                        self._end_step(step)
                    after = step.number + 1
                    if not step.leads:  # the last step of its queue
                        break
                    before[after] -= 1
                    if before[after]:
                        break
                    step = steps[after]
        except Exception as error:
            self._fail(error)
        finally:
            self._ready.clear()
            self._advancing = False

    def _send(self, step: LaidStep) -> None:
        """Send the data of a step. The end of the message calls `_continue_step`, unless it has left at once."""
        peer, tag = step.peer, self._tag + step.channel
        data = self._buffers.bytes_of(step.message_buffer, step.message_part)
        moved, signature = partial(self._continue_step, step), self._signature
        request = self._station.wires[peer].begin_send(
            peer, tag, data, priority=self._priority, signature=signature, done=moved
        )
        if request is None:  # the message has left already
            self._end_step(step)
        elif not request.ended:
            self._running[step] = request

    def _receive(self, step: LaidStep) -> None:
        """Request the message of a step.

        If the step has no work, the message arrives in its place. Otherwise `_consume` reduces it piece by piece, or if
        earlier steps still use the target, `_continue_step` gets it as a whole.
        """
        peer, tag = step.peer, self._tag + step.channel
        place = consume = None
        if not step.works:
            place = self._buffers.bytes_of(step.message_buffer, step.message_part)
        elif not self._before_work[step.number]:
            consume = partial(self._consume, step)
        moved, signature = partial(self._continue_step, step), self._signature
        request = self._station.wires[peer].begin_recv(
            peer, tag, place, step.message_bytes, signature=signature, done=moved, consume=consume
        )
        if not request.ended:
            self._running[step] = request

    # -- ends of steps -----------------------------------------------------------------------------------------------

    def _continue_step(self, step: LaidStep, request: Request) -> None:
        """Continue a step after its message has left or arrived, or has failed or been withdrawn."""
        self._running.pop(step, None)
        delivery = request.delivery() if step.works and request.error is None and not request.withdrawn else None
        if delivery is None or step in self._consumed or self._failure is not None:
            self._end_step(step, delivery, request.error)
        else:
            self._work(step, delivery)

    def _work(self, step: LaidStep, delivery: Delivery | None) -> None:
        """Move or reduce data into the target of a step, in worker threads if the data is large, and end the step.

        If earlier steps still use the memory, the step waits; the end of the last of them calls this again.

        Args:
            step: The step.
            delivery: The message with the data; None: the data is of this rank.
        """
        if self._before_work[step.number]:
            self._waiting[step] = delivery
            return
        error: BaseException | None = None
        try:
            incoming = self._array_part(step.source) if delivery is None else self._incoming(step, delivery.view)
            target, operand = self._target_and_operand(step)
            pieces = make_pieces(step.step, self._laid.layout, self._laid.rank, incoming, operand, target)
            if len(pieces) > 1:
                self._running[step] = None
                ended = partial(self._station.token.run_sync_soon, self._end_step, step, delivery)
                self._station.workers.submit(pieces, ended, priority=self._priority)
                return
            self._station.workers.quiet.run(pieces[0])
        except Exception as raised:
            error = raised
        self._end_step(step, delivery, error)

    def _end_step(self, step: LaidStep, delivery: Delivery | None = None, error: BaseException | None = None) -> None:
        """End a step, and begin the steps that wait for it, unless a step has failed.

        Args:
            step: The step.
            delivery: The message to release; None: there is none, or it arrived in its place.
            error: Error of the step; None: it went well.
        """
        self._running.pop(step, None)
        if delivery is not None:
            delivery.release()  # the caller may use its arrays again
        if error is not None or self._failure is not None:
            self._record_end_after_failure(error)
            return
        self._unended -= 1
        for number in step.lets_begin:
            remaining = self._before_begin[number] = self._before_begin[number] - 1
            if not remaining:
                self._ready.append(self._laid.steps[number])
        for number in step.lets_work:
            remaining = self._before_work[number] = self._before_work[number] - 1
            following = self._laid.steps[number]
            if not remaining and following in self._waiting and self._failure is None:
                self._work(following, self._waiting.pop(following))
        if not self._advancing:
            if self._ready:
                self._advance()
            if not self._unended:
                self._end(None)

    def _consume(self, step: LaidStep, offset: int, piece: memoryview) -> None:
        """Reduce a piece of a message while it is in the cache, before the next piece overwrites it.

        Args:
            step: The step that receives the message.
            offset: First byte of the piece in the message.
            piece: Bytes of the piece.
        """
        if self._failure is not None:  # the execution may have ended, and the caller may use its arrays again
            return
        self._consumed.add(step)
        incoming = self._incoming(step, piece)
        first = offset // incoming.itemsize
        part = slice(first, first + incoming.size)
        target, operand = self._target_and_operand(step)
        layout, rank = self._laid.layout, self._laid.rank
        try:
            self._station.workers.quiet.run(apply, step.step, layout, rank, incoming, operand[part], target[part])
        except Exception as error:
            self._fail(error)

    def _incoming(self, step: LaidStep, piece: memoryview) -> Array:
        """Return the bytes of a message, or of a piece of it, as an array with the dtype of the sender's buffer."""
        return as_numbers(piece, self._buffers.arrays[step.step.src.buffer].dtype)

    def _array_part(self, part: BufferRange) -> Array:
        """Return the array of a range of a buffer."""
        return self._buffers.arrays[part.buffer][part.start : part.stop]

    def _target_and_operand(self, step: LaidStep) -> tuple[Array, Array]:
        """Return the target of a step, and the operand that incoming data is combined with."""
        target = self._array_part(step.target)
        return target, target if step.base is None else self._array_part(step.base)
