"""Message: one rank's end of a message, from the call through its lane and a match to its end."""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import suppress
from threading import get_ident
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, TypeVar, cast
from weakref import ref

import numpy as np
import trio

from transports import Request, Wire

from ..collectives.call import Call
from ..errors import UsageError
from ..timeline.recording import RawGroup, RawMatch, RawSpan
from .arguments import prepare_late
from .callbacks import call_when_done
from .derived import resolve
from .engine.polling import linger
from .failure import Failure
from .forms import pack_form
from .future import Future
from .operation import NOWHERE
from .outstanding import CallSite, Outstanding, checked_name, code_place
from .received import unpack
from .settling import LONGEST_WAIT_S, settle_and_deliver
from .signature import signature_of
from .state import (
    ADMITTED,
    BLOCKED,
    DONE,
    FOLLOWS,
    ISSUED,
    MATCHING,
    RUNNING,
    STOPPING,
    UNWANTED,
)
from .transfer import MESSAGE_ALGORITHM, form_call
from .withdrawal import ARRIVALS, LEFT_STATES, Withdrawable

if TYPE_CHECKING:
    from .messages import Messages

T_co = TypeVar("T_co", covariant=True)


class Message(Withdrawable[T_co]):
    """One rank's end of a message."""

    __slots__ = ()

    def __init__(
        self,
        messages: Messages,
        receives: bool,
        peer: int | None,
        tag: int,
        x: object,
        out: object,
        priority: int,
        name: str | None,
        caller: CallSite,
    ) -> None:
        self.state, self._taken = ISSUED, False
        self._value = self._failure = self._waiters = self._callbacks = self._threads = self._anywhere = None
        self._past = None
        self.messages, self.context, self.member = messages, messages.context, messages.group
        self.receives, self.peer, self.asked, self.tag, self.lane = receives, peer, peer, tag, None
        self.input, self.out, self._place = x, out, out  # type: ignore[assignment]
        self.caller_out = self.input_changed = self.source = self.target = self.buffers = None
        self.locked, self._input_locked, self._tree_locked, self.at_once = (), False, False, False
        self.name, default = "recv" if receives else "send", name is None
        if not default:
            self.name = checked_name(name, self.name)
        self.priority, self.order = priority, 0
        self.place = (caller.f_code, caller.f_lasti) if type(caller) is FrameType else code_place(caller)
        self.deadline_s = self.awaited_ns = self.scope = self.poll = None
        self.algorithm, self.record, self.port = "direct", -1, NOWHERE
        self.seq, self.pattern, self.request, self._form, self._over, self._half_met = 0, None, None, None, None, False
        self._refused, self.flat = None, False

    # -- its names -----------------------------------------------------------------------------------------------------

    @property
    def src(self) -> int | None:
        """Group rank of the sender; None until it is known."""
        return self.peer if self.receives else self.member.rank

    @property
    def towards(self) -> str:
        """The other end, in messages."""
        ranks = self.member.label[1]
        peer = "any rank" if self.peer is None else f"rank {ranks[self.peer]}"
        return f" {'from' if self.receives else 'to'} {peer}{f' with tag {self.tag}' if self.tag else ''}"

    @property
    def label(self) -> str:
        """Name of the message in messages."""
        number = "" if self.peer is None else f" #{self.seq}"
        return f"{self.name}{number}{self.towards} on group '{self.member.name}'"

    @property
    def awaits(self) -> Sequence[int]:
        """World ranks that have not arrived at it, once this one has."""
        return self.lane.missing(self) if MATCHING <= self.state <= STOPPING and self.lane is not None else ()

    def concerns(self, ranks: Container[int]) -> bool:
        """Whether any of some world ranks takes part."""
        return any(rank in ranks for rank in self.members)

    def flight_fields(self) -> dict[str, object]:
        """Return the fields of `waits.ends.CallRecord`, which all messages of this call at this line share."""
        key = self.lane.identity if self.lane is not None else cast("Messages", self.messages).identity(self)
        return {
            **super().flight_fields(),
            "op": "recv" if self.receives else "send",
            "key": f"any source, {self.context.rank}" if self.peer is None else key,
            "tag": self.tag,
            "any_source": self.peer is None,
        }

    def agrees(self, sent: Call, flat: bool) -> bool:
        """Whether a message with a call fits this receive; `flat` says whether that is a flat message."""
        call = self.call
        if sent is call or sent.agrees(call):
            return True
        return (flat or self.flat) and (sent.key.dtype, sent.nbytes, sent.form) == (
            call.key.dtype,
            call.nbytes,
            call.form,
        )

    def describe(self, pattern: Call, met_ns: int) -> RawMatch:
        """Return the part of its timeline entry that both ends share."""
        group: RawGroup = self.member.name, self.members, self.tag
        return pattern.kind.text, self.algorithm, group, self.seq, pattern.nbytes, pattern.dtype, met_ns

    # -- the way to its match ------------------------------------------------------------------------------------------

    def activate(self) -> None:
        """Let it arrive, now that it is the first of its lane, once its input exists."""
        if isinstance(self.input, Future):
            self._enter(BLOCKED)
            self.lock()
            call_when_done(self.input, lambda: self.context.soon(self._input_settled))
        else:
            self._enter(MATCHING)
            self._inbox.arrive(self)

    def activate_late(self) -> None:
        """Let it arrive after others, unless it was withdrawn or has failed in the meantime."""
        if self.state is ADMITTED:
            self.started_ns = self.context.now_ns()
            self.activate()

    def _input_settled(self) -> None:
        """Continue after the end of its input: arrive, or fail with the input."""
        if self.state >= DONE:  # the world failed in the meantime
            return
        self.input, failure = resolve(self.input)
        if failure is None:
            try:
                prepare_late(self)
            except Exception as error:  # no memory for a copy, or invalid arguments
                failure = Failure(error)
        if failure is not None:
            self._inbox.fail_one(self, failure)
            return
        assert self.messages is not None
        self.context.flight.described(self.record, self, self.messages.known(self), self.call)
        self.started_ns = self.context.now_ns()
        self._enter(MATCHING)
        self._inbox.arrive(self)

    def arrive(self) -> None:
        """Match it with the other end."""
        self._inbox.arrive(self)

    def lock(self) -> None:
        """Make its arrays read-only for everybody else until it ends."""
        super().lock()
        buffers = self.buffers
        if buffers is not None and not self._tree_locked and buffers.arrays and not self.context.arrays.shapes_only:
            self._tree_locked = True
            self.locked += self.context.locks.lock(tuple(buffers.arrays))

    def release(self) -> None:
        """Unlock the arrays: no bytes move any more."""
        super().release()
        self._tree_locked = False

    # -- its end -------------------------------------------------------------------------------------------------------

    def finish(self, end_ns: int, meeting: RawMatch | None) -> None:
        """Record the span, set the result and let the lane go on; or return the message for the next receive.

        `meeting` is the part of its timeline entry that both ends share; None if there is only one end here.
        """
        if self.state >= DONE or (self.state in LEFT_STATES and self.return_if_left()):
            return
        if self.input_changed is not None and self.input_changed():
            text = f"x: was changed while {self.label} ({self.call_site}) was reading it; await that first"
            self.fail(Failure(UsageError(text)))
            return
        if self.receives:
            self.order = self.order or next(ARRIVALS)
            if self.buffers is not None and self.pattern is not None and self.pattern.form:
                try:
                    self.caller_out = unpack(self.buffers, self.pattern.form, self.out, self.context.arrays)
                except Exception as error:  # no memory, or an invalid form
                    self.fail(Failure(error))
                    return
        context, started_ns, lane, messages = self.context, self.started_ns, self.lane, self.messages
        if meeting is None:
            sent: Call = self.pattern or self.call
            ranks = self.member.label[1]
            members = lane.members if lane is not None else (ranks[self.member.rank], ranks[cast("int", self.peer)])
            group: RawGroup = self.member.name, members, self.tag
            meeting = sent.kind.text, self.algorithm, group, self.seq, sent.nbytes, sent.dtype, started_ns
        info = meeting, self.issued_ns, self.priority, *self.place, self.awaited_ns, self.step
        span: RawSpan = "comm", self.stream.name, self.name, started_ns, end_ns, info
        context.flight.carried(self.record, started_ns, end_ns, span)
        value = self.out if self.caller_out is None else self.caller_out
        # unlock first: a waiter may need the same arrays at once; inlined from `release`, for a short latency
        if self.locked:
            context.locks.unlock(self.locked)
            self.locked, self._tree_locked = (), False
        self.input = self.source = self.target = self.out = self.caller_out = self.input_changed = None
        # settle, inlined: only the loop, or a thread in its place, ends it
        if not FOLLOWS[self.state][DONE]:
            self._refuse(DONE)
        if self.receives and messages is not None:
            self._past = ref(messages)  # a future does not hold a group
        self.messages, self._value, self.state = None, value, DONE
        if self._threads is not None:
            self._wake_threads()
        if self._anywhere is not None:
            self._call_anywhere()
        if self.deadline_s is not None:
            context.deadlines.drop(self, self.deadline_s)
        if lane is not None:
            lane.inbox.leave(self, None)
        if self._waiters is not None or self._callbacks is not None:
            if get_ident() == context.thread:
                self._notify()
            else:  # added after its end was found to wake nobody
                context.from_thread(self._notify)

    def fail(self, failure: Failure) -> None:
        """End with an error; a receive that no task waits for gives its place back instead.

        Bytes that are moving are stopped first, or waited for.
        """
        if self.state >= DONE:
            return
        if self._is_left:
            if self.scope is None and self.request is None:  # else the transport ends it
                self._leave_late()
        elif self.scope is not None or self.request is not None:
            if self.state is not STOPPING:
                self._enter(STOPPING)
                self._failure = failure  # the outcome once its bytes have stopped
                self._stop()
        else:
            self.context.flight.ended(self.record, -self.context.now_ns())
            self.release()
            settle_and_deliver(self, None, failure)

    def expire(self, error: BaseException) -> None:
        """Fail because of a deadline, and with it all later messages of the lane; of PyTorch this one alone."""
        if self.state < DONE and self.flat:
            self.fail(Failure(error))
        elif self.state < DONE:
            self._inbox.give_up(self, Failure(error))

    def drop(self) -> None:
        """End a send that nobody is going to receive, as if it had been received."""
        if self.state < DONE:
            self.context.flight.ended(self.record, self.context.now_ns())
            settle_and_deliver(self, None)
            self._stop()

    def abandon(self, error: BaseException) -> None:
        """Fail with the world. Waiting tasks get the error before they are cancelled; the arrays are released later."""
        settle_and_deliver(self, None, Failure(error, seen=True))
        if self.scope is not None or self.request is not None:
            self._stop()
        else:
            self.release()

    def _stop(self) -> None:
        """Stop its bytes, soon."""
        if self.request is not None:
            self.context.spawn(self._give_up_transfer)
        elif self.scope is not None:
            self.scope.cancel()

    def _deliver(self) -> None:
        """Deliver the end to the lane, the deadlines, and the tasks and callbacks that wait."""
        if self.deadline_s is not None:
            self.context.deadlines.drop(self, self.deadline_s)
        if self.lane is not None:
            self.lane.inbox.leave(self, self._failure)
        self.messages = None
        if self._waiters is not None or self._callbacks is not None:
            if get_ident() == self.context.thread:
                self._notify()
            else:  # added after its end was found to wake nobody
                self.context.from_thread(self._notify)

    @property
    def end_wakes_loop(self) -> bool:
        """Whether its end wakes tasks, callbacks or other messages, which only the loop may do."""
        if self._waiters is not None or self._callbacks is not None or self.context.outstanding.draining:
            return True
        return self.lane is None or len(self.lane.lines[self.receives]) > 1 or bool(self.lane.queue.receives)

    def _ends_at_once(self) -> bool:
        """Whether the result is available without waiting, after taking part again; note the start of a wait."""
        if get_ident() != self.context.thread:
            return super()._ends_at_once()
        if self.state >= UNWANTED:
            self._claim()
        if self.poll is not None:
            self.poll()
        if self.state < DONE and self.awaited_ns is None:
            self.awaited_ns = self.context.now_ns()
        return self.state >= DONE

    def fit(self, pattern: Call) -> None:
        """Make the array of a receive, unless there is one; `pattern` has its dtype and shape.

        Raises:
            MemoryError: If there is no memory for it.
        """
        if self.target is None:
            if self.out is None and self.receives:
                assert pattern.dtype is not None, "this is a bug in overlap: a message has no dtype"
                self.out = self.context.arrays.empty(pattern.result_shape, pattern.dtype)
            self.target = self.out
        self.pattern = pattern

    def begin(self, wire: Wire, tag: int, peer: int) -> None:
        """Begin to send to a world rank over a wire, or to receive; a small message leaves at once.

        The form of a tree travels ahead, as a message of its own with the same tag.
        """
        call, source, messages = self.call, self.source, self.messages
        assert messages is not None, "this is a bug in overlap: a message that was taken goes on"
        self.wire, self.algorithm, signed = wire, MESSAGE_ALGORITHM, messages.signed
        if signed is None or signed[0] is not call or signed[1] != self.place or signed[2] is not self.flat:
            signed = call, self.place, self.flat, signature_of(call, self.place, flat=self.flat)
            messages.signed = signed
        try:
            if source is not None:
                if call.form:
                    self._send_form(tag, call.form)
                request = wire.begin_send(
                    peer,
                    tag,
                    memoryview(source.reshape(-1).view(np.uint8)),  # type: ignore[arg-type]
                    priority=(self.priority << 64) + self.issued_ns,
                    signature=signed[3],
                    done=self.request_done,
                )
            elif call.dtype is None:
                self.lock()
                request = self._receive(tag, None, call, self._allocate)
            elif call.form:
                self._form = pack_form(call.form)
                self.lock()
                request = self._receive(
                    tag, memoryview(bytearray(len(self._form))), form_call(call.form, len(self._form))
                )
            else:
                self.pattern, out = call, self.out
                assert out is not None, "this is a bug in overlap: a receive of a known call has no array"
                if self.target is None:
                    self.target = out.view()
                if not (self.flat or self.locked):  # nobody else has the array of a flat one
                    self.locked = self.context.locks.lock((out,), out)
                request = wire.begin_recv(
                    peer,
                    tag,
                    memoryview(self.target.reshape(-1).view(np.uint8)),  # type: ignore[arg-type]
                    call.nbytes,
                    signature=signed[3],
                    done=self.request_done,
                )
        except Exception as error:  # no memory, or no wire between the ranks
            self._own()
            self._inbox.fail_broken_wire(self, error)
            return
        if request is None:
            self.finish(self.context.now_ns(), None)
        elif not request.ended:
            if self.lane is None:
                self._own()
            self.go_on(request)

    def _own(self) -> None:
        """Give a send its place in its lane, unless it has one or has ended: it does not leave at once."""
        if self.lane is None and not self.receives and self.messages is not None:
            self.messages.own(self)

    def request_done(self, request: Request) -> None:
        """End the message with the end of its transfer; a thread in the loop's place leaves other ends to the loop."""
        if self.lane is None:
            self._own()
        lane, context = self.lane, self.context
        plain = (
            request.error is None and not request.withdrawn and self._form is None and self._refused is None
            and self.state <= RUNNING and self._over is None and lane is not None
        )  # fmt: skip
        if get_ident() != context.thread and (
            not plain
            or self._waiters is not None
            or self._callbacks is not None
            or context.outstanding.draining
            or lane.queue.receives  # type: ignore[union-attr]  # a plain end has a lane
            or len(lane.lines[self.receives]) > 1  # type: ignore[union-attr]
        ):
            context.from_thread(self._request_ended, request)
        elif plain:
            self.request = self.poll = None
            self.finish(context.now_ns(), None)
        else:
            self._request_ended(request)

    def go_on(self, request: Request) -> None:
        """Note a transfer that has not ended."""
        self.request = request
        if self.state is MATCHING:
            self.state = RUNNING
        if not self.receives and not self.flat:
            self.lock()
        lane = self.lane
        if lane is not None and lane.inbox.here is not None and lane.members[not self.receives] not in lane.inbox.here:
            self.poll = self._look

    def _look(self) -> None:
        """Process arriving messages for a moment, before a task sleeps until the end."""
        request = self.request
        if request is not None and not request.look():
            linger({self.members[not self.receives]: self.wire}, lambda: self.request is None)

    def _block(self, timeout: float | None = None) -> bool:
        """Wait in this thread, in the wire as long as that is quicker; then end it in the loop's place."""
        request, start_s, handover = self.request, perf_counter(), self.context.handover
        if request is not None:
            settled = False
            try:
                came = request.wait(LONGEST_WAIT_S if timeout is None else min(timeout, LONGEST_WAIT_S))
                settled = not came or handover.in_place(request.settle_in_thread, False)
            finally:  # a signal handler may raise anywhere
                if not settled:
                    with suppress(trio.RunFinishedError):  # no task waits any more
                        handover.post(request.settle)
        rest = None if timeout is None else max(0.0, start_s + timeout - perf_counter())
        return self.state >= DONE or super()._block(rest)


def pending_sends(outstanding: Outstanding) -> list[Message[object]]:
    """Return the unfinished sends of a rank."""
    return [each for each in outstanding.operations if isinstance(each, Message) and not each.receives]
