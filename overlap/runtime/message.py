"""Message: one rank's end of a message, from the call through its lane and a match to its end.

A receive with only one awaiting task gives its place back when that task is cancelled, so that no message is lost:

* If no message has met it, it leaves its lane at once, and it is `PARKED`.
* If a message has met it, or the transport cannot decide at once, it is `UNWANTED` and goes on; at its end the message
  is returned to the lane, for the next receive.
* If it was done, and the await was cancelled at its checkpoint, the message is returned at once.

A parked receive takes part again, behind all others, once the program uses it again: by `await`, `result`,
`exception`, `wait`, `add_done_callback`, as an input, or by `done` if a message has arrived. None of this depends on
references to the future: a finalizer would run at an arbitrary time for cycles, held tracebacks and interpreters
without a GIL, and a receive that lives on by accident would swallow a message.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from itertools import count
from threading import get_ident
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar
from weakref import ref

import numpy as np
import trio

from transports import OPEN, Buffer, LengthMismatchError, Request, SignatureMismatchError, TransportError, Wire

from ..collectives.call import Call, call
from ..collectives.kinds import P2P, Collective
from ..collectives.reduce import Array
from ..errors import CollectiveMismatchError, FutureCancelledError, PeerFailedError, UsageError
from ..ranklist import listed
from ..timeline.recording import RawGroup, RawMatch, RawSpan
from .arguments import prepare_late, take_output
from .callbacks import call_when_done
from .derived import resolve
from .engine.host_bytes import bytes_of
from .engine.polling import linger
from .failure import Failure
from .forms import pack_form, unpack_form
from .future import Future
from .memory.foreign import as_input, as_output
from .operation import NOWHERE, CollectiveFuture
from .outstanding import CallSite, Outstanding, checked_name, code_place
from .received import ReceiveBuffers, call_of_form, unpack
from .settling import LONGEST_WAIT_S, Flag, conclude, take_back
from .signature import parse, signature_of
from .state import (
    ADMITTED,
    BLOCKED,
    CANCELLING,
    DONE,
    FOLLOWS,
    ISSUED,
    MATCHING,
    PARKED,
    RUNNING,
    STOPPING,
    UNWANTED,
)
from .trees import leaves_of

if TYPE_CHECKING:
    from .inbox import Inbox, Lane
    from .messages import Messages
    from .stream import Stream

T_co = TypeVar("T_co", covariant=True)

LEFT_STATES = (UNWANTED, CANCELLING)
"""States of receives whose message goes to the next one, unless a task waits for them again."""

MESSAGE_ALGORITHM: Final = "mesh"
"""Name of a message over a wire in timelines."""

_ARRIVALS = count(1)  # numbers of a lane would restart when it is opened again


def _release(request: Request) -> None:
    """Release a message that was received for nobody."""
    if request.error is None and not request.withdrawn:
        request.delivery().release()


def _form_call(form: str, nbytes: int) -> Call:
    """Return the call of the message with the form of a tree, which travels ahead of its data."""
    return call(P2P.text, None, np.dtype(np.uint8), (nbytes,), 2, 0, (), (), False, False, None, form)


class Returned(NamedTuple):
    """A message in a lane without a sender that waits: received and not taken, or failed before it was sent."""

    order: int  # Order of arrival among the messages of one source and tag
    call: Call | None = None  # Kind, dtype, shape and form
    flat: bool = False  # Whether its shape is open
    data: Array | None = None  # Flat, in memory of its own; None in a simulation without data
    error: Callable[[], BaseException] | None = None  # Makes the error of the receive that meets it

    @classmethod
    def failed(cls, error: Callable[[], BaseException]) -> Returned:
        """Return the place of a message that was never sent."""
        return cls(next(_ARRIVALS), error=error)


class Message(CollectiveFuture[T_co]):
    """One rank's end of a message.

    Attributes:
        messages: Messages of its rank and group; None once a receive is taken, so that a future does not hold a group.
        receives: Whether it is the receiver's end.
        peer: Group rank of the other end; None: any source, none chosen yet.
        asked: The same, as the program has asked for it.
        stream: Stream of its name in the timeline, and of its priority.
        lane: Lane of its messages; None until the loop has put it there.
        order: Order of arrival of the message of a receive; 0 before.
        pattern: Call of the message that has met a receive.
        buffers: Arrays that a receive of a tree, or of any message, fills.
        flat: Whether its shape is open: it agrees with any shape of as many elements.
        at_once: Whether its data must move within its match, without modelled time.
        request: Its transfer over a wire, while that goes on.
        wire: That wire.
    """

    __slots__ = (
        "_form",
        "_half_met",
        "_on_withdrawn",
        "_over",
        "_past",
        "_place",
        "_refused",
        "_tree_locked",
        "asked",
        "at_once",
        "buffers",
        "flat",
        "lane",
        "messages",
        "order",
        "pattern",
        "peer",
        "receives",
        "request",
        "stream",
        "tag",
        "wire",
    )

    kind: Final[Collective] = P2P  # type: ignore[misc]
    reduction: Final[None] = None  # type: ignore[misc]
    root: Final[int] = 0  # type: ignore[misc]
    pairs: Final[tuple[()]] = ()  # type: ignore[misc]
    counts: Final[None] = None  # type: ignore[misc]
    exact: Final[bool] = False  # type: ignore[misc]
    shared: Final[bool] = False  # type: ignore[misc]
    requested_algorithm: Final[None] = None  # type: ignore[misc]
    messages: Messages | None
    receives: bool
    peer: int | None
    asked: int | None
    tag: int
    pattern: Call | None
    stream: Stream
    lane: Lane | None
    buffers: ReceiveBuffers | None
    order: int
    at_once: bool
    flat: bool
    request: Request | None
    wire: Wire
    _form: bytes | bytearray | None  # Form of a tree, while it travels
    _half_met: bool  # Whether the form of a tree has arrived, and its data has not
    _on_withdrawn: Callable[[], None] | None  # Called once the wire has given a receive back
    _refused: Request | None  # Form of a tree that the receiver has refused
    _past: ref[Messages] | None  # Its messages, once it has ended well
    _over: trio.Event | None  # Set at the end of a transfer that is given up

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
    def members(self) -> tuple[int, ...]:
        """World ranks of the sender and the receiver; empty for a receive without a sender."""
        if self.peer is None:
            return ()
        ranks, own = self.member.label[1], self.member.rank
        return (ranks[self.peer], ranks[own]) if self.receives else (ranks[own], ranks[self.peer])

    @property
    def awaits(self) -> Sequence[int]:
        """World ranks that have not arrived at it, once this one has."""
        return self.lane.missing(self) if MATCHING <= self.state <= STOPPING and self.lane is not None else ()

    def concerns(self, ranks: Container[int]) -> bool:
        """Whether any of some world ranks takes part."""
        return any(rank in ranks for rank in self.members)

    def flight_fields(self) -> dict[str, str]:
        """Return the fields of the flight record that all messages of this call at this line share."""
        call = getattr(self, "call", None)  # absent until the input exists
        return {
            "name": self.name,
            "what": "" if call is None else str(call),
            "kind": self.op,
            "group": self.member.name,
            "towards": self.towards,
            "members": listed(self.members),
            "key": "" if self.lane is None else self.lane.identity,
            "nbytes": "" if call is None else str(call.nbytes),
            "site": self.call_site,
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

    @property
    def _inbox(self) -> Inbox:
        assert self.messages is not None, "this is a bug in overlap: a message that was taken goes on"
        return self.messages.inbox

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

    # -- over a wire ---------------------------------------------------------------------------------------------------

    def begin(self, wire: Wire, lane: Lane) -> None:
        """Begin to send or to receive over a wire; a small message leaves at once.

        The form of a tree travels ahead, as a message of its own with the same tag.
        """
        self.wire, self.algorithm, call, tag, source = (
            wire,
            MESSAGE_ALGORITHM,
            self.call,
            lane.queue.tag,
            self.source,
        )
        try:
            if source is not None:
                if call.form:
                    self._send_form(tag, call.form)
                request = wire.begin_send(
                    lane.members[1],
                    tag,
                    memoryview(source.reshape(-1).view(np.uint8)),  # type: ignore[arg-type]
                    priority=(self.priority << 64) + self.issued_ns,
                    signature=signature_of(call, self.place, flat=self.flat),
                    done=self._request_done,
                )
            elif call.dtype is None:
                self.lock()
                request = self._receive(tag, None, call, self._allocate)
            elif call.form:
                self._form = pack_form(call.form)
                self.lock()
                request = self._receive(
                    tag, memoryview(bytearray(len(self._form))), _form_call(call.form, len(self._form))
                )
            else:
                self.pattern, out = call, self.out
                assert out is not None, "this is a bug in overlap: a receive of a known call has no array"
                if self.target is None:
                    self.target = out.view()
                if not (self.flat or self.locked):  # nobody else has the array of a flat one
                    self.locked = self.context.locks.lock((out,), out)
                request = wire.begin_recv(
                    lane.members[0],
                    tag,
                    memoryview(self.target.reshape(-1).view(np.uint8)),  # type: ignore[arg-type]
                    call.nbytes,
                    signature=signature_of(call, self.place, flat=self.flat),
                    done=self._request_done,
                )
        except Exception as error:  # no memory, or no wire between the ranks
            self._inbox.fail_broken_wire(self, error)
            return
        if request is None:
            self.finish(self.context.now_ns(), None)
        elif not request.ended:
            self._go_on(request)

    def _send_form(self, tag: int, form: str) -> None:
        """Begin to send the form of a tree, ahead of its data."""
        packed = pack_form(form)
        signature = signature_of(_form_call(form, len(packed)), self.place)
        self.wire.begin_send(
            self.members[1], tag, packed, priority=self.urgency, signature=signature, done=self._form_sent
        )

    def _begin_receive(self, tag: int, call: Call) -> Request:
        """Begin to receive data of a known call."""
        self.fit(call)
        assert self.target is not None
        return self._receive(tag, bytes_of(self.target.reshape(-1)), call)

    def _receive(
        self,
        tag: int,
        out: memoryview | None,
        call: Call,
        allocate: Callable[[Request], Buffer] | None = None,
    ) -> Request:
        """Begin to receive one message of the wire; `allocate` returns its place if its length is open."""
        src, _ = self.members
        nbytes = OPEN if out is None else out.nbytes
        signature = signature_of(call, self.place, flat=self.flat)
        return self.wire.begin_recv(
            src, tag, out, nbytes, signature=signature, done=self._request_done, allocate=allocate
        )

    def _go_on(self, request: Request) -> None:
        """Note a transfer that has not ended."""
        self.request = request
        if self.state is MATCHING:
            self.state = RUNNING
        if not self.receives and not self.flat:
            self.lock()
        lane = self.lane
        if lane is not None and lane.inbox.here is not None and lane.members[not self.receives] not in lane.inbox.here:
            self.poll = self._look

    def _allocate(self, request: Request) -> Buffer:
        """Return the place of a message whose sender alone knows its shape, or the form of its tree."""
        assert request.theirs is not None
        call = parse(request.theirs.text, request.theirs.fingerprint).call
        if call is None or call.form:
            self._form = bytearray(request.nbytes)
            return self._form
        self.fit(call)
        assert self.target is not None
        return bytes_of(self.target.reshape(-1))

    def _form_sent(self, request: Request) -> None:
        """Note that the receiver has refused the form of a tree; it receives the data all the same, for nobody."""
        if request.error is not None:
            self._refused = request

    def _request_done(self, request: Request) -> None:
        """End the message with the end of its transfer; a thread in the loop's place leaves other ends to the loop."""
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

    def _request_ended(self, request: Request) -> None:
        """End the message, or go on with the data of a tree."""
        self.request = self.poll = None
        if request.withdrawn:
            if self._on_withdrawn is not None:
                self._on_withdrawn()
        elif request.error is not None:
            self._wire_failed(request, request.error)
        elif self._refused is not None and self._refused.error is not None:
            self._wire_failed(self._refused, self._refused.error)
        elif self.receives and self._form is not None:
            self._receive_tree()
        else:
            self._end()
        if self._over is not None and self.request is None:
            self._over.set()

    def _receive_tree(self) -> None:
        """Receive the data of a tree whose form has arrived."""
        form, self._form, self._half_met = self._form, None, True
        assert form is not None, "this is a bug in overlap: a tree without a form"
        assert self.lane is not None
        call = self.call
        try:
            if call.dtype is None:
                call = call_of_form(unpack_form(bytes(form)))
            request = self._begin_receive(self.lane.queue.tag, call)
        except Exception as error:  # no memory, or an invalid form
            self._inbox.fail_broken_wire(self, error)
            return
        if not request.ended:
            self._go_on(request)

    def _end(self) -> None:
        """End the message well, unless it has failed in the meantime."""
        self.stopped()
        if self.state < DONE:
            self.finish(self.context.now_ns(), None)

    def _wire_failed(self, request: Request, error: Exception) -> None:
        """Fail the message: the ends differ, or the wire is broken."""
        theirs = request.theirs
        self._form = None
        self.stopped()
        if self.state >= DONE:
            return
        if theirs is None or not isinstance(error, (SignatureMismatchError, LengthMismatchError)):
            if isinstance(error, TransportError):
                error.operation = f"{self.label} ({self.call_site})"
            self._inbox.fail_broken_wire(self, error)
            return
        other, (src, dst) = parse(theirs.text, theirs.fingerprint), self.members
        if self.receives and (other.call is None or other.call.form):
            self._drop_tree_data()
        ends = [(str(self.call), self.call_site), (other.what, other.site)]
        sent, received = reversed(ends) if self.receives else ends
        mismatch = CollectiveMismatchError(
            group=self.member.name,
            seq=self.seq,
            ranks=(src, dst),
            calls=(sent[0], received[0]),
            call_sites=(sent[1], received[1]),
        )
        self.fail(Failure(mismatch))

    def _drop_tree_data(self) -> None:
        """Receive the data of a tree for nobody, because the receive differs from its form."""
        assert self.lane is not None, "this is a bug in overlap: a message without a lane"
        tag, src = self.lane.queue.tag, self.members[0]
        with suppress(TransportError):
            self.wire.begin_recv(src, tag, None, OPEN, done=_release)

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

    def withdraw_request(self, later: Callable[[], None]) -> bool | None:
        """Withdraw the transfer of a receive; see `Inbox.withdraw_receive`."""
        request = self.request
        if request is None or self._half_met:
            return False
        self._on_withdrawn = None
        request.withdraw()
        if request.ended:
            return request.withdrawn
        self._on_withdrawn = later
        return False

    async def _give_up_transfer(self) -> None:
        """Withdraw the transfer, or wait for its end, because it uses the caller's memory."""
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()  # a callback of a transport may not call it back
            if self.request is not None:
                self._over, self._on_withdrawn = trio.Event(), self.stopped
                self.request.withdraw()
                if self.request is not None:
                    await self._over.wait()

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
            self.order = self.order or next(_ARRIVALS)
            if self.buffers is not None and self.pattern is not None and self.pattern.form:
                try:
                    self.caller_out = unpack(self.buffers, self.pattern.form, self.out, self.context.arrays)
                except Exception as error:  # no memory, or an invalid form
                    self.fail(Failure(error))
                    return
        context, started_ns, lane, messages = self.context, self.started_ns, self.lane, self.messages
        if meeting is None:
            assert lane is not None, "this is a bug in overlap: a message without a lane ends"
            sent: Call = self.pattern or self.call
            group: RawGroup = self.member.name, lane.members, self.tag
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
            conclude(self, None, failure)

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
            conclude(self, None)
            self._stop()

    def abandon(self, error: BaseException) -> None:
        """Fail with the world. Waiting tasks get the error before they are cancelled; the arrays are released later."""
        conclude(self, None, Failure(error, seen=True))
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

    # -- receives that give their place back -----------------------------------------------------------------------

    @property
    def done(self) -> Flag:
        """Whether the message has ended, with a result or an error; `done()` is the same."""
        if self.state is PARKED and get_ident() == self.context.thread and self._inbox.has_message(self):
            self.at_once = True
            self._resume()
        return super().done

    def cancel(self) -> bool:
        """Withdraw a receive, unless a message has met it; see `Future.cancel`."""
        return self.receives and (self.cancelled() or self.context.on_loop(self._cancel_on_loop))

    def _await_cancelled(self) -> None:
        """Leave the lane after a cancelled await, if the receive has no other user; return a received message."""
        if not self.receives or self.state in (PARKED, CANCELLING, STOPPING) or self._has_user():
            return
        if self.lane is None and self.state < DONE:  # issued by another thread, and not on the loop yet
            self._await_cancelled_elsewhere()
        elif self.state < DONE:
            if self._withdraw():
                self._park()
            elif self.state is not UNWANTED:
                self._enter(UNWANTED)
        elif self._failure is None and self._past is not None and (messages := self._past()) is not None:
            value = self._value
            if take_back(self, PARKED):  # else a thread has just been given the result
                self.messages = messages
                message = self._take_message(value)
                self._reset_for_reissue()
                messages.inbox.put_back(messages.inbox.lane(self), message)

    def _await_cancelled_elsewhere(self) -> None:
        """Let the loop's thread handle a cancelled await, unless the loop has ended."""
        with suppress(PeerFailedError):  # the loop has ended
            self.context.from_thread(self._await_cancelled)

    def _has_user(self) -> bool:
        """Whether a task, a thread, a callback or another operation waits for the result, or was given it."""
        if self._taken or self._waiters or self._threads or self._anywhere or self._has_callers():
            return True
        return any(self in operation.inputs for operation in self.context.outstanding.operations)

    def _claim(self) -> None:
        """Take part again on the loop's thread, if the receive has left its lane or is about to."""
        if self.state is PARKED or self.state is UNWANTED:
            if get_ident() == self.context.thread:
                self._resume()
            else:
                self.context.from_thread(self._resume)

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

    def _resume(self) -> None:
        """Take part again: in its place, or, if it had left its lane, behind the receives issued since."""
        if self.state is UNWANTED:
            self._enter(MATCHING if self.scope is None and self.request is None else RUNNING)
        if self.state is not PARKED:
            return
        if self.context.closed:
            conclude(self, None, Failure(self.context.ended(), seen=True))
            return
        self._enter(ISSUED)
        self.out = self._place  # type: ignore[assignment]
        assert self.messages is not None, "this is a bug in overlap: a parked receive has no messages"
        if self.out is not None and not (type(self.out) is np.ndarray and self.out.flags.carray):
            take_output(self)
        self.peer = self.asked
        self.messages.begin(self)

    def _withdraw(self) -> bool | None:
        """Remove the receive from its lane; False if a message has met it; None if that is not decided yet."""
        if self.state > ADMITTED:
            withdrawn = self._inbox.withdraw_receive(self, self._leave_late)
            if not withdrawn:
                return bool(withdrawn) if withdrawn is not None else None
        self._leave_lane()
        return True

    def _leave_late(self) -> None:
        """Park or cancel the receive now that the transport has given it back; take part again if it has a user."""
        if self.state >= DONE:
            return
        self._leave_lane()
        self._park_or_cancel()
        if self.state is PARKED and self._has_user():
            self._resume()

    def _leave_lane(self) -> None:
        """Return the place and the number of the receive."""
        self.context.flight.ended(self.record, self.context.now_ns())
        self._inbox.leave(self, None, gives_back=True)

    def _park(self) -> None:
        self._enter(PARKED)
        self._reset_for_reissue()

    def _reset_for_reissue(self) -> None:
        """Reset the values that the next issue of the receive sets again."""
        if self.deadline_s is not None:
            self.context.deadlines.drop(self, self.deadline_s)
        self.release()
        self._value, self._input_locked, self.order, self.awaited_ns, self.lane = None, False, 0, None, None
        self.at_once, self._half_met, self.pattern, self._form = False, False, None, None
        self.priority -= self.stream.priority

    def _park_or_cancel(self) -> None:
        """End the receive if it is being cancelled; otherwise park it."""
        cancelled = self.state is CANCELLING
        self._park()
        if cancelled:
            self._conclude_cancelled()

    def _cancel_on_loop(self) -> bool:
        """Cancel the receive on the loop's thread; False if a message has met it."""
        if self.state >= DONE or self.state is CANCELLING:
            return self.state is CANCELLING or self.cancelled()
        if self.lane is None and self.state is not PARKED:  # issued by another thread, and not on the loop yet
            self.release()
        elif self.state is not PARKED:
            withdrawn = self._withdraw()
            if withdrawn is None:
                self._enter(CANCELLING)
            if not withdrawn:
                return withdrawn is None
            self._park()
        self._conclude_cancelled()
        return True

    def _conclude_cancelled(self) -> None:
        """End the receive with `FutureCancelledError`."""
        conclude(self, None, Failure(FutureCancelledError(f"{self.label} ({self.call_site}) was cancelled"), seen=True))

    def return_if_left(self) -> bool:
        """Return the arrived message if no task waits for it or the receive is cancelled; return whether it was."""
        if not self._is_left:
            return False
        inbox, lane = self._inbox, self.lane
        message = self._take_message(None)
        self.context.flight.ended(self.record, self.context.now_ns())
        assert lane is not None, "this is a bug in overlap: an arrived message has no lane"
        inbox.put_back(lane, message, giver=self)
        inbox.leave(self, None)  # the next receive, if any, takes it
        self._park_or_cancel()
        return True

    @property
    def _is_left(self) -> bool:
        """Whether the receive is being cancelled, or unwanted and without a user."""
        return self.state is CANCELLING or (self.state is UNWANTED and not self._has_user())

    def _take_message(self, value: object) -> Returned:
        """Return the message: with `value`, or with the arrived bytes if there is no value yet."""
        self.order = self.order or next(_ARRIVALS)
        pattern = self.pattern
        assert pattern is not None, "this is a bug in overlap: a receive without a message returns it"
        if self.context.arrays.shapes_only:
            return Returned(self.order, pattern, self.flat)
        if value is None or not pattern.form:
            data = np.array(as_input(value) if value is not None else self.out).reshape(-1)
        else:  # the leaves of a tree as one flat copy of bytes
            leaves = [as_output(leaf, "like").reshape(-1).view(np.uint8) for leaf in leaves_of(value)]
            assert pattern.dtype is not None, "this is a bug in overlap: a received message has no dtype"
            data = np.concatenate(leaves).view(pattern.dtype)
        return Returned(self.order, pattern, self.flat, data)


def pending_sends(outstanding: Outstanding) -> list[Message[object]]:
    """Return the unfinished sends of a rank."""
    return [each for each in outstanding.operations if isinstance(each, Message) and not each.receives]
