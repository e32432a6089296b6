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

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from threading import get_ident
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import numpy as np
import trio

from transports import Request, Wire

from ..collectives.call import Call
from ..collectives.kinds import P2P
from ..collectives.reduce import Array
from ..errors import FutureCancelledError, PeerFailedError, UsageError, shown
from ..flight.recorder import Known
from ..timeline.recording import RawMatch
from . import transfer
from .arguments import take_output
from .context import STEP_OF_TASK
from .engine.polling import linger
from .failure import Failure
from .lane import lane_id
from .memory.foreign import as_input, as_output
from .operation import CollectiveFuture
from .outstanding import CallSite, Outstanding, check_timeout, checked_name, code_place
from .settling import Flag, replace_end, settle_and_deliver
from .state import ADMITTED, CANCELLING, DONE, ISSUED, MATCHING, PARKED, RUNNING, STOPPING, UNWANTED
from .transfer import ReceiveBuffers, unpack
from .trees import leaves_of

if TYPE_CHECKING:
    from .inbox import Inbox
    from .lane import Lane
    from .messages import MessagePort
    from .port import Port

T_co = TypeVar("T_co", covariant=True)

LEFT_STATES = (UNWANTED, CANCELLING)
"""States of receives whose message goes to the next one, unless a task waits for them again."""

ARRIVALS = count(1)
"""Order of arrival of messages: numbers of a lane would restart when it is opened again."""

# Time limits up to this one need no further check.
_LONGEST_S = 1e9


class Returned(NamedTuple):
    """A message in a lane without a sender that waits: received and not taken, or failed before it was sent."""

    order: int  # Order of arrival among the messages of one source and tag
    call: Call | None = None  # Kind, dtype, shape and form
    flat: bool = False  # Whether its shape is open
    data: Array | None = None  # Flat, in memory of its own; None in a simulation without data
    error: Callable[[], BaseException] | None = None  # Makes the error of the receive that meets it


class Message(CollectiveFuture[T_co]):
    """One rank's end of a message.

    Args:
        messages: The rank's messages on the group.
        receives: Whether it receives.
        peer: Position of the other end in the group; None: any source.
        tag: Tag of the message.
        x: What is sent.
        out: Where it is received; None: a new array.
        priority: Lower numbers send first.
        name: Name in timelines.
        timeout_s: Limit of its time in seconds; None: none.
        caller: Where it was issued.
        flat: Whether its shape is open: it agrees with any shape of as many elements.
    """

    messages: MessagePort  # Messages of its rank on its group; the same object as `port`
    receives: bool  # Whether it is the receiver's end
    peer: int | None  # Group rank of the other end; None: any source, none chosen yet
    asked: int | None  # The same, as the program has asked for it
    tag: int
    members: tuple[int, ...]  # World ranks of the sender and the receiver; empty for a receive without a sender
    lane: Lane | None  # Lane of its messages; None until the loop has put it there
    order: int  # Order of arrival of the message of a receive; 0 before
    pattern: Call | None  # Call of the message that has met a receive
    buffers: ReceiveBuffers | None  # Arrays that a receive of a tree, or of any message, fills
    flat: bool  # Whether its shape is open: it agrees with any shape of as many elements
    at_once: bool  # Whether its data must move within its match, without modelled time
    request: Request | None  # Its transfer over a wire, while that goes on
    wire: Wire  # That wire
    tree_memory: Array | None  # Memory of a tree as it travels, its form first; of an unknown tree once it arrives
    on_withdrawn: Callable[[], None] | None  # Called once the wire has given a receive back
    over: trio.Event | None  # Set at the end of a transfer that is given up
    _given_out: object  # The array that the caller has given a receive
    _use: object  # Keeps the group in use until the message ends
    __slots__ = tuple(__annotations__)

    def __init__(
        self,
        messages: MessagePort,
        receives: bool,
        peer: int | None,
        tag: int,
        x: object,
        out: object,
        priority: int,
        name: str | None,
        timeout_s: float | None,
        caller: CallSite,
        flat: bool,
    ) -> None:
        operation: CollectiveFuture[T_co] = self  # which declares some
        context, group = messages.context, messages.group
        operation.state, self._taken = ISSUED, False
        self._value = self._failure = self._waiters = self._callbacks = self._threads = self._anywhere = None
        self.messages, self._use, operation.port = messages, messages.use(), cast("Port", messages)
        operation.kind, operation.context, operation.member = P2P, context, group
        self.receives, self.peer, self.asked, self.tag, self.flat, self.lane = receives, peer, peer, tag, flat, None
        ranks = group.label[1]
        if peer is None:
            self.members = ()
        else:
            self.members = (ranks[peer], context.rank) if receives else (context.rank, ranks[peer])
        operation.input, operation.out, self._given_out = x, out, out  # type: ignore[assignment]  # checked later
        operation.caller_out = operation.input_changed = operation.source = operation.target = operation.plan = None
        operation.memory = operation.awaited_ns = operation.scope = operation.poll = operation.deadline_s = None
        self.buffers = self.pattern = self.request = self.tree_memory = self.on_withdrawn = self.over = None
        operation.locked, self.at_once, self.order = (), False, 0
        operation.priority, operation.algorithm, operation.record, operation.seq = priority, "direct", -1, 0
        operation.name, default = "recv" if receives else "send", name is None
        if not default:
            operation.name = checked_name(name, operation.name)
        operation.place = (caller.f_code, caller.f_lasti) if type(caller) is FrameType else code_place(caller)
        if context.closed:
            raise context.ended()
        if type(priority) is not int and not isinstance(priority, int):
            raise UsageError(f"priority: expected an integer, lower is more urgent, got {shown(priority)}")
        if timeout_s is not None:
            if not (type(timeout_s) is float and 0 < timeout_s < _LONGEST_S):
                check_timeout(timeout_s)
            operation.deadline_s = timeout_s
        rank, step = STEP_OF_TASK.get()
        operation.step = step if rank is context else context.step

    # -- its names -----------------------------------------------------------------------------------------------------

    @property
    def src(self) -> int | None:
        """Group rank of the sender; None until it is known."""
        return self.peer if self.receives else self.member.rank

    @property
    def label(self) -> str:
        """Name of the message in messages."""
        number, peer = "", "any rank"
        if self.peer is not None:
            number, peer = f" #{self.seq}", f"rank {self.members[not self.receives]}"
        tag = f" with tag {self.tag}" if self.tag else ""
        return f"{self.name}{number} {'from' if self.receives else 'to'} {peer}{tag} on group '{self.member.name}'"

    @property
    def identity(self) -> str:
        """Name of its lane in few characters, the same on every rank."""
        if self.peer is None:
            return f"any source, {self.context.rank}"
        return f"{lane_id(*self.messages.lane_name(self)):x}"

    def flight_fields(self) -> dict[str, object]:
        """Return the fields of `waits.ends.CallRecord`, which all messages of this call at this line share."""
        op = "recv" if self.receives else "send"
        return {**super().flight_fields(), "op": op, "tag": self.tag, "any_source": self.peer is None}

    @property
    def known(self) -> Known:
        """Calls of its peer and tag that the flight record has fields for."""
        return self.messages.known(self)

    @property
    def awaits(self) -> Sequence[int]:
        """World ranks that have not arrived at it, once this one has."""
        return self.lane.missing(self) if MATCHING <= self.state <= STOPPING and self.lane is not None else ()

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
        group = self.member.name, self.members, self.tag
        return pattern.kind.text, self.algorithm, group, self.seq, pattern.nbytes, pattern.dtype, met_ns

    # -- memory --------------------------------------------------------------------------------------------------------

    def lock(self) -> None:
        """Make its arrays read-only for everybody else until it ends."""
        super().lock()
        arrays = () if self.buffers is None or self.context.arrays.shapes_only else tuple(self.buffers.arrays)
        if arrays and not any(each is arrays[0] for each in self.locked):
            operation: CollectiveFuture[T_co] = self
            operation.locked += self.context.locks.lock(arrays)

    def fit(self, pattern: Call) -> None:
        """Make the array of a receive, unless there is one; `pattern` has its dtype and shape.

        Raises:
            MemoryError: If there is no memory for it.
        """
        operation: CollectiveFuture[T_co] = self
        if self.target is None:
            if self.out is None and self.receives:
                assert pattern.dtype is not None, "this is a bug in overlap: a message has no dtype"
                operation.out = self.context.arrays.empty(pattern.result_shape, pattern.dtype)
            operation.target = self.out
        self.pattern = pattern

    # -- its transfer over a wire --------------------------------------------------------------------------------------

    def request_done(self, request: Request) -> None:
        """End the message with the end of its transfer; a thread in the loop's place leaves other ends to the loop."""
        context = self.context
        plain = (
            request.error is None and not request.withdrawn and self.tree_memory is None
            and self.state <= RUNNING and self.over is None and self.lane is not None
        )  # fmt: skip
        if get_ident() != context.thread and not (plain and not self.end_wakes_loop):
            context.from_thread(transfer.request_ended, self, request)
        elif plain:
            operation: CollectiveFuture[T_co] = self
            self.request = operation.poll = None
            pattern, group = self.pattern or self.call, (self.member.name, self.members, self.tag)
            meeting = pattern.kind.text, self.algorithm, group, self.seq, pattern.nbytes, pattern.dtype, self.started_ns
            self.finish(context.now_ns(), meeting)
        else:
            transfer.request_ended(self, request)

    def look(self) -> None:
        """Process arriving messages for a moment, before a task sleeps until the end."""
        request = self.request
        if request is not None and not request.look():
            linger({self.members[not self.receives]: self.wire}, lambda: self.request is None)

    def _block(self, timeout: float | None = None) -> bool:
        """Wait in this thread, in the wire as long as that is quicker; then end it in the loop's place."""
        request, start_s = self.request, perf_counter()
        if request is not None:
            end_here, end_on_loop = request.settle_in_thread, request.settle
            self.context.handover.wait_in_engine(request.wait, timeout, end_here, end_on_loop)
        rest = None if timeout is None else max(0.0, start_s + timeout - perf_counter())
        return self.state >= DONE or super()._block(rest)

    # -- its end -------------------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        """Whether a receive has ended otherwise, now that its message has arrived: by its return, or with an error."""
        if self.state in LEFT_STATES and self._return_if_left():
            return True
        self.order = self.order or next(ARRIVALS)
        if self.buffers is not None and self.pattern is not None and self.pattern.form:
            operation: CollectiveFuture[T_co] = self
            try:
                operation.caller_out = unpack(self.buffers, self.pattern.form, self.out, self.context.arrays)
            except Exception as error:  # no memory, or an invalid form
                self.fail(Failure(error))
                return True
        return False

    def fail(self, failure: Failure) -> None:
        """End with an error; a receive that no task waits for gives its place back instead."""
        if not self._is_left:
            super().fail(failure)
        elif not self._moves:  # else the transport ends it
            self._leave_late()

    @property
    def _moves(self) -> bool:
        return self.scope is not None or self.request is not None

    def drop(self) -> None:
        """End a send that nobody is going to receive, as if it had been received, unless it stops already."""
        if self.state < STOPPING:
            self.context.flight.ended(self.record, self.context.now_ns())
            settle_and_deliver(self, None)
            self._stop()

    def _stop(self) -> None:
        """Stop its bytes, soon."""
        if self.request is not None:
            self.context.spawn(transfer.give_up, self)
        else:
            super()._stop()

    @property
    def end_wakes_loop(self) -> bool:
        """Whether its end wakes tasks, callbacks or other messages, which only the loop may do."""
        if self._waiters is not None or self._callbacks is not None or self.context.outstanding.draining:
            return True
        lane = self.lane
        return lane is None or len(lane.lines[self.receives]) > 1 or lane.name[:3] in self.messages.communicator.queues

    # -- receives that no task waits for -------------------------------------------------------------------------------

    @property
    def inbox(self) -> Inbox:
        """Inbox of its process."""
        return self.messages.communicator

    @property
    def done(self) -> Flag:
        """Whether the message has ended, with a result or an error; `done()` is the same."""
        if self.state is PARKED and get_ident() == self.context.thread and self.inbox.has_message(self):
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
        elif self._failure is None and (use := self.messages.use()) is not None:
            value = self._value
            if replace_end(self, PARKED):  # else a thread has just been given the result
                self._use, message = use, self._take_message(value)
                self._reset_for_reissue()
                self.inbox.give_back(self, message)

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

    def _resume(self) -> None:
        """Take part again: in its place, or, if it had left its lane, behind the receives issued since."""
        if self.state is UNWANTED:
            self._enter(RUNNING if self._moves else MATCHING)
        if self.state is not PARKED:
            return
        if self.context.closed:
            settle_and_deliver(self, None, Failure(self.context.ended(), seen=True))
            return
        self._enter(ISSUED)
        operation: CollectiveFuture[T_co] = self
        operation.out = self._given_out  # type: ignore[assignment]  # checked below
        if self.out is not None and not (type(self.out) is np.ndarray and self.out.flags.carray):
            take_output(self)
        self.peer = self.asked
        if self.peer is None:
            self.members = ()
        self.messages.begin(self)

    def _withdraw(self) -> bool | None:
        """Remove the receive from its lane; False if a message has met it; None if that is not decided yet."""
        if self.state > ADMITTED:
            withdrawn = self.inbox.withdraw_receive(self, self._leave_late)
            if not withdrawn:
                return withdrawn
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
        self.inbox.leave(self, None, gives_back=True)

    def _park(self) -> None:
        self._enter(PARKED)
        self._reset_for_reissue()

    def _reset_for_reissue(self) -> None:
        """Reset the values that the next issue of the receive sets again."""
        if self.deadline_s is not None:
            self.context.deadlines.drop(self, self.deadline_s)
        self.release()
        operation: CollectiveFuture[T_co] = self
        self._value = operation.awaited_ns = self.lane = self.pattern = self.tree_memory = None
        self.order, self.at_once = 0, False
        operation.priority -= self.port.stream.priority

    def _park_or_cancel(self) -> None:
        """End the receive if it is being cancelled; otherwise park it."""
        cancelled = self.state is CANCELLING
        self._park()
        if cancelled:
            self._end_cancelled()

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
        self._end_cancelled()
        return True

    def _end_cancelled(self) -> None:
        """End the receive with `FutureCancelledError`."""
        settle_and_deliver(
            self, None, Failure(FutureCancelledError(f"{self.label} ({self.call_site}) was cancelled"), seen=True)
        )

    @property
    def _is_left(self) -> bool:
        """Whether the receive is being cancelled, or unwanted and without a user."""
        return self.state is CANCELLING or (self.state is UNWANTED and not self._has_user())

    def _return_if_left(self) -> bool:
        """Return the arrived message if no task waits for it or the receive is cancelled; return whether it was."""
        if not self._is_left:
            return False
        lane = self.lane
        assert lane is not None, "this is a bug in overlap: a message has arrived outside a lane"
        message = self._take_message(None)
        self.context.flight.ended(self.record, self.context.now_ns())
        self.inbox.put_back(lane, message, giver=self)
        self.inbox.leave(self, None)  # the next receive, if any, takes it
        self._park_or_cancel()
        return True

    def _take_message(self, value: object) -> Returned:
        """Return the message: with `value`, or with the arrived bytes if there is no value yet."""
        self.order = self.order or next(ARRIVALS)
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
