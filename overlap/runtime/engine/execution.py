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
from .arithmetic import apply_step, make_pieces
from .host_bytes import bytes_as_array
from .laid_out import BufferRange, LaidOutProgram, LaidOutStep
from .layout import Buffers
from .polling import poll_wires
from .workers import Workers


@dataclass(frozen=True, kw_only=True)
class ProgramResources:
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
        resources: The wires and workers of the rank.
        tag: First of the operation's transport tags; channel c uses `tag + c`.
        priority: Priority of the messages; lower is more urgent.
        spawn: Starts a task; only a failed execution needs one.
        signature: Signature of the call, which the messages carry; None: no other process takes part.
    """

    # Defaults of the class, because most executions never change them.
    _advancing = _is_withdrawing = False
    _failure: BaseException | None = None
    # Set by the next end of a message or reduction after a failure; `_withdraw_messages` makes one for each wait.
    _next_end: trio.Event | None = None
    _ended: Callable[[BaseException | None], None] | None = None

    def __init__(
        self,
        laid: LaidOutProgram,
        buffers: Buffers,
        resources: ProgramResources,
        *,
        tag: int,
        priority: int,
        spawn: Callable[..., None],
        signature: CallSignature | None = None,
    ) -> None:
        self._program, self._buffers, self._resources = laid, buffers, resources
        self._tag, self._priority, self._spawn, self._signature = tag, priority, spawn, signature
        self._unended_count = len(laid.steps)
        # By step: how many earlier steps it still waits for, before it may begin and before it may work.
        self._before_begin, self._before_work = [*laid.before_begin], [*laid.before_work]
        self._ready_steps = [*laid.first]  # steps that may begin
        # Steps with a message in flight; None: worker threads carry out the step.
        self._running_steps: dict[LaidOutStep, Request | None] = {}
        # Steps that have their data and wait until they may work; None: the data is of this rank.
        self._waiting_steps: dict[LaidOutStep, Delivery | None] = {}
        self._reduced_in_pieces: set[LaidOutStep] = set()  # receives whose message was reduced in pieces, as it arrived

    def begin(self, ended: Callable[[BaseException | None], None]) -> bool:
        """Begin all steps that can begin. Return whether the program is over; then `ended` is not called.

        Args:
            ended: Otherwise called once, after the end of all messages and reductions, with the first error of a step
                or None.
        """
        self._begin_ready_steps()
        if not self._unended_count:
            return True
        self._ended = ended
        if self._failure is not None:
            self._withdraw_messages_soon()
        return False

    # -- waiting -------------------------------------------------------------------------------------------------

    def look_before_sleeping(self) -> None:
        """Process messages that arrive within a short time, before a task sleeps: this may save a wake-up."""
        if self._resources.wires:
            poll_wires(self._resources.wires, self._awaits_no_message)

    def _call_end_callback(self, error: BaseException | None) -> None:
        """Call the callback of `begin` with the error or None. Later calls do nothing."""
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(error)

    def _awaits_no_message(self) -> bool:
        """Whether no message is in flight, though worker threads may still reduce."""
        return self._failure is not None or not any(self._running_steps.values())

    def cancel(self) -> None:
        """Begin no more steps, and withdraw the messages in flight. The execution ends when all of them have ended."""
        self._fail(trio.ClosedResourceError("the program was cancelled"))

    # -- ends of an execution ----------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        """Record the first error, and give the execution up; before `begin` has returned, `begin` does that."""
        self._failure = self._failure or error
        if self._ended is not None:
            self._withdraw_messages_soon()

    def _withdraw_messages_soon(self) -> None:
        """Start the task that withdraws the messages in flight; a callback of a transport may not do that."""
        if not self._is_withdrawing:
            self._is_withdrawing = True
            self._spawn(self._withdraw_messages)

    async def _withdraw_messages(self) -> None:
        """Withdraw the messages in flight, wait until all have ended, and end the execution with its failure.

        The wait is needed because messages use the caller's memory. Received data that no step has used is released.
        """
        with trio.CancelScope(shield=True):
            await checkpoint()
            for step, request in list(self._running_steps.items()):
                if request is not None:
                    request.withdraw()
                    if request.ended:  # a thread may have been interrupted between the end and its callback
                        self._running_steps.pop(step, None)
            # Each end of a step sets the present event. Make the new event before the check of `_running_steps`, as a
            # thread may end the last step between the two.
            self._next_end = trio.Event()
            while self._running_steps:
                await self._next_end.wait()
                self._next_end = trio.Event()
        for delivery in self._waiting_steps.values():
            if delivery is not None:
                delivery.release()
        self._waiting_steps.clear()
        self._call_end_callback(self._failure)

    def _record_end_after_failure(self, error: BaseException | None) -> None:
        """Notify `_withdraw_messages`, which waits, that a message or reduction has ended."""
        if error is not None:
            self._fail(error)
        if self._next_end is None:
            return
        if get_ident() == self._resources.thread:
            self._next_end.set()
        else:  # another thread than the event loop's, on which events must be set
            self._resources.token.run_sync_soon(self._next_end.set)

    # -- progress ----------------------------------------------------------------------------------------------------

    def _begin_ready_steps(self) -> None:
        """Begin all steps in `_ready_steps`, and those that become ready meanwhile."""
        self._advancing, before, steps = True, self._before_begin, self._program.steps
        try:
            for step in self._ready_steps:  # the list grows in the loop
                # Begin this step, then the next steps of its queue as long as they wait for nothing else.
                while self._failure is None:
                    if step.sends:
                        self._send_message(step)
                    elif step.receives:
                        self._request_message(step)
                    elif step.works:
                        self._work_on_step(step, None)
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
            self._ready_steps.clear()
            self._advancing = False

    def _send_message(self, step: LaidOutStep) -> None:
        """Send the data of a step. The end of the message calls `_continue_step`, unless it has left at once."""
        peer, tag = step.peer, self._tag + step.channel
        data = self._buffers.bytes_of(step.message_buffer, step.message_part)
        moved, signature = partial(self._continue_step, step), self._signature
        request = self._resources.wires[peer].begin_send(
            peer, tag, data, priority=self._priority, signature=signature, done=moved
        )
        if request is None:  # the message has left already
            self._end_step(step)
        elif not request.ended:
            self._running_steps[step] = request

    def _request_message(self, step: LaidOutStep) -> None:
        """Request the message of a step. Without work, it arrives in its place.

        Otherwise `_reduce_piece` reduces it piece by piece, or `_continue_step` gets it as a whole if the target is in
        use.
        """
        peer, tag = step.peer, self._tag + step.channel
        place = consume = None
        if not step.works:
            place = self._buffers.bytes_of(step.message_buffer, step.message_part)
        elif not self._before_work[step.number]:
            consume = partial(self._reduce_piece, step)
        moved, signature = partial(self._continue_step, step), self._signature
        request = self._resources.wires[peer].begin_recv(
            peer, tag, place, step.message_bytes, signature=signature, done=moved, consume=consume
        )
        if not request.ended:
            self._running_steps[step] = request

    # -- ends of steps -----------------------------------------------------------------------------------------------

    def _continue_step(self, step: LaidOutStep, request: Request) -> None:
        """Continue a step after its message has left or arrived, or has failed or been withdrawn."""
        self._running_steps.pop(step, None)
        delivery = request.delivery() if step.works and request.error is None and not request.withdrawn else None
        if delivery is None or step in self._reduced_in_pieces or self._failure is not None:
            self._end_step(step, delivery, request.error)
        else:
            self._work_on_step(step, delivery)

    def _work_on_step(self, step: LaidOutStep, delivery: Delivery | None) -> None:
        """Move or reduce data into the target, in worker threads if the data is large, and end the step.

        If earlier steps still use the memory, the step waits, and the end of the last of them calls this again. Without
        a `delivery`, the data is of this rank.
        """
        if self._before_work[step.number]:
            self._waiting_steps[step] = delivery
            return
        error: BaseException | None = None
        try:
            incoming = (
                self._array_part(step.source) if delivery is None else self._as_incoming_array(step, delivery.view)
            )
            target, operand = self._target_and_operand(step)
            pieces = make_pieces(step.step, self._program.layout, self._program.rank, incoming, operand, target)
            if len(pieces) > 1:
                self._running_steps[step] = None
                ended = partial(self._resources.token.run_sync_soon, self._end_step, step, delivery)
                self._resources.workers.submit(pieces, ended, priority=self._priority)
                return
            self._resources.workers.without_warnings.run(pieces[0])
        except Exception as raised:
            error = raised
        self._end_step(step, delivery, error)

    def _end_step(
        self, step: LaidOutStep, delivery: Delivery | None = None, error: BaseException | None = None
    ) -> None:
        """End a step, release its message, if any, and begin the steps that wait for it, unless a step has failed."""
        self._running_steps.pop(step, None)
        if delivery is not None:
            delivery.release()  # the caller may use its arrays again
        if error is not None or self._failure is not None:
            self._record_end_after_failure(error)
            return
        self._unended_count -= 1
        for number in step.lets_begin:
            remaining = self._before_begin[number] = self._before_begin[number] - 1
            if not remaining:
                self._ready_steps.append(self._program.steps[number])
        for number in step.lets_work:
            remaining = self._before_work[number] = self._before_work[number] - 1
            following = self._program.steps[number]
            if not remaining and following in self._waiting_steps and self._failure is None:
                self._work_on_step(following, self._waiting_steps.pop(following))
        if not self._advancing:
            if self._ready_steps:
                self._begin_ready_steps()
            if not self._unended_count:
                self._call_end_callback(None)

    def _reduce_piece(self, step: LaidOutStep, offset: int, piece: memoryview) -> None:
        """Reduce a piece while it is in the cache, before the next one overwrites it. `offset` is in bytes."""
        if self._failure is not None:  # the execution may have ended, and the caller may use its arrays again
            return
        self._reduced_in_pieces.add(step)
        incoming = self._as_incoming_array(step, piece)
        first = offset // incoming.itemsize
        part = slice(first, first + incoming.size)
        target, operand = self._target_and_operand(step)
        layout, rank = self._program.layout, self._program.rank
        try:
            self._resources.workers.without_warnings.run(
                apply_step, step.step, layout, rank, incoming, operand[part], target[part]
            )
        except Exception as error:
            self._fail(error)

    def _as_incoming_array(self, step: LaidOutStep, piece: memoryview) -> Array:
        """Return a message, or a piece of it, in the dtype of the sender's buffer."""
        return bytes_as_array(piece, self._buffers.arrays[step.step.src.buffer].dtype)

    def _array_part(self, part: BufferRange) -> Array:
        return self._buffers.arrays[part.buffer][part.start : part.stop]

    def _target_and_operand(self, step: LaidOutStep) -> tuple[Array, Array]:
        """Return the target, and the operand with which incoming data is combined."""
        target = self._array_part(step.target)
        return target, target if step.base is None else self._array_part(step.base)
