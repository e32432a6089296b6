"""Message: one rank's end of a message, a send or a receive, from the call through its lane to its result.

If the only task that awaits a receive is cancelled, the receive must not swallow its message. So it leaves its lane:

* If no message has met it, it leaves its lane at once, and it is `PARKED`.
* If a message has met it, or the transport cannot decide at once, it is `UNWANTED` and goes on; at its end the message
  is returned to the lane, for the next receive.
* If it was done, and the await was cancelled at the checkpoint of the await, the message is returned at once.

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
from ..errors import FutureCancelledError, PeerFailedError, UsageError, argument_text
from ..flight.recorder import Known
from ..timeline.recording import RawMatch
from . import transfer
from .arguments import set_output_array
from .context import STEP_OF_TASK
from .engine.polling import poll_wires
from .failure import Failure
from .lane import lane_id
from .memory.foreign import as_input_array, as_output_array
from .operation import CollectiveFuture
from .outstanding import CallSite, Outstanding, check_timeout, checked_name, code_place
from .settling import Flag, settle, settle_and_deliver, undo_end
from .state import ADMITTED, CANCELLING, DONE, ISSUED, MATCHING, PARKED, RUNNING, STOPPING, UNWANTED
from .transfer import ReceiveBuffers, unpack_received_tree
from .trees import leaves_of

if TYPE_CHECKING:
    from .inbox import Inbox
    from .lane import Lane
    from .messages import MessagePort
    from .port import Port

T_co = TypeVar("T_co", covariant=True)

ARRIVALS = count(1)
"""Numbers messages by their arrival in this process; the numbers of a lane would restart when it is opened again."""

# A time limit from 0 to this one is valid; others are checked by `check_timeout`.
_LONGEST_S = 1e9


class Returned(NamedTuple):
    """A message that waits in its lane for a receive, although no send waits with it.

    Either an earlier receive has received it and returned it, or its send has failed and left an error in its place.
    """

    arrival_number: int  # Number from `ARRIVALS`: older messages are received first
    call: Call | None = None  # Kind, dtype, shape and form; None for an error
    flat: bool = False  # Whether its shape is open
    data: Array | None = None  # A flat copy of the data; None in a simulation without data
    error: Callable[[], BaseException] | None = None  # Makes the error of the receive that meets it; else None


class Message(CollectiveFuture[T_co]):
    """One rank's end of a message: the handle of a send or of a receive.

    Args:
        messages: Port of the rank's messages on the group and stream.
        receives: Whether this is a receive; else it is a send.
        peer: Group rank of the other end; None: a receive from any source.
        tag: Tag of the message.
        x: Data to send; None for a receive.
        out: Array to receive into; None: a new array.
        priority: Lower numbers send first.
        name: Name in timelines; None: "send" or "recv".
        timeout_s: Time in seconds within which it must end; None: no limit.
        caller: Frame or line that issued it.
        flat: Whether its shape is open: it agrees with any shape with the same number of elements.
    """

    messages: MessagePort  # Port of the rank's messages; the same object as `port`
    receives: bool  # Whether this is a receive; else it is a send
    peer: int | None  # Group rank of the other end; None: a receive from any source that has chosen no sender yet
    given_peer: int | None  # `peer` as the program has passed it: None stays None after the choice of a sender
    tag: int
    members: tuple[int, ...]  # World ranks of the sender and the receiver; empty as long as no sender is chosen
    peer_rank: int  # World rank of the other end; -1 as long as no sender is chosen
    lane: Lane | None  # Lane of the message, or `Queue` of a receive from any source; None while it is in neither
    arrival_number: int  # For a receive, the number from `ARRIVALS` of its message; 0 before
    pattern: Call | None  # For a receive, the sender's call, once the message is known
    buffers: ReceiveBuffers | None  # Memory of a receive whose `like` is a tree or None
    flat: bool  # Whether its shape is open: it agrees with any shape with the same number of elements
    moves_at_once: bool  # Whether its data must move as soon as both ends meet, in no virtual time
    request: Request | None  # Transfer over a wire, while it goes on
    wire: Wire  # Wire of that transfer
    tree_memory: Array | None  # Bytes of a tree as it travels, its form first; without `like`, made on arrival
    on_withdrawn: Callable[[], None] | None  # Called once the wire has withdrawn the transfer of a receive
    transfer_over: trio.Event | None  # Set at the end of a transfer that is being stopped; None if it is not
    _given_out: object  # `out` as the program has passed it
    _use: object  # Keeps the group in use until the message ends
    __slots__ = tuple(__annotations__)
    # attributes of the base class that several methods here set, in forms from which checkers infer different types
    caller_out: object
    priority: int
    locked: tuple[Array, ...]
    awaited_ns: int | None
    poll: Callable[[], None] | None

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
        context, group = messages.context, messages.group
        issued: CollectiveFuture[T_co] = self  # the base class, which declares some of the attributes
        issued.state, self._taken = ISSUED, False
        self._value = self._failure = self._waiters = self._callbacks = self._threads = self._thread_callbacks = None
        self.messages, self._use, issued.port = messages, messages.use(), cast("Port", messages)
        issued.kind, issued.context, issued.member = P2P, context, group
        self.receives, self.peer, self.given_peer, self.tag, self.flat, self.lane = (
            receives, peer, peer, tag, flat, None
        )  # fmt: skip
        if peer is None:
            self.members, self.peer_rank = (), -1
        else:
            self.peer_rank = peer_rank = group.label[1][peer]
            self.members = (peer_rank, context.rank) if receives else (context.rank, peer_rank)
        issued.input, self.out, self._given_out = x, out, out  # type: ignore[assignment]  # checked later
        self.caller_out = issued.input_changed = issued.source = self.target = issued.plan = None
        issued.memory = self.awaited_ns = issued.scope = self.poll = self.deadline_s = None
        self.buffers = self.pattern = self.request = self.tree_memory = self.on_withdrawn = self.transfer_over = None
        self.locked, self.moves_at_once, self.arrival_number = (), False, 0
        self.priority, issued.algorithm, issued.record, issued.seq = priority, "direct", -1, 0
        issued.name, default = "recv" if receives else "send", name is None
        if not default:
            issued.name = checked_name(name, self.name)
        issued.place = (caller.f_code, caller.f_lasti) if type(caller) is FrameType else code_place(caller)
        if context.closed:
            raise context.closed_rank_error()
        if type(priority) is not int and not isinstance(priority, int):
            raise UsageError(f"priority: expected an integer, lower is more urgent, got {argument_text(priority)}")
        if timeout_s is not None:
            if not (type(timeout_s) is float and 0 < timeout_s < _LONGEST_S):
                check_timeout(timeout_s)
            self.deadline_s = timeout_s
        rank, step = STEP_OF_TASK.get()
        issued.step = step if rank is context else context.step

    # -- its names -----------------------------------------------------------------------------------------------------

    @property
    def src(self) -> int | None:
        """Group rank of the sender, or None until it is known."""
        return self.peer if self.receives else self.member.rank

    @property
    def label(self) -> str:
        """Name of the message in errors and reports."""
        number, peer = "", "any rank"
        if self.peer is not None:
            number, peer = f" #{self.seq}", f"rank {self.peer_rank}"
        tag = f" with tag {self.tag}" if self.tag else ""
        return f"{self.name}{number} {'from' if self.receives else 'to'} {peer}{tag} on group '{self.member.name}'"

    @property
    def identity(self) -> str:
        """Short name of the message's lane, the same on every rank; "any source, RANK" as long as it has none."""
        if self.peer is None:
            return f"any source, {self.context.rank}"
        return f"{lane_id(*self.messages.lane_name(self)):x}"

    def flight_fields(self) -> dict[str, object]:
        """Return the fields of `waits.ends.CallRecord`, which all messages of this call at this line share."""
        op = "recv" if self.receives else "send"
        return {**super().flight_fields(), "op": op, "tag": self.tag, "any_source": self.peer is None}

    @property
    def known_calls(self) -> Known:
        """Calls with the same direction, peer and tag that the flight record has a number for."""
        return self.messages.known_calls(self)

    @property
    def awaited_ranks(self) -> Sequence[int]:
        """World ranks that this rank waits for: it has arrived at the message, and they have not."""
        return self.lane.missing_ranks(self) if MATCHING <= self.state <= STOPPING and self.lane is not None else ()

    def agrees(self, sent: Call, flat: bool) -> bool:
        """Whether a message fits this receive: dtype and shape are equal, or the number of elements if a shape is open.

        Args:
            sent: Call of the sender.
            flat: Whether the shape of the sent message is open.
        """
        call = self.call
        if sent is call or sent.agrees(call):
            return True
        same_bytes = sent.key.dtype == call.key.dtype and sent.nbytes == call.nbytes and sent.form == call.form
        return same_bytes and (flat or self.flat)

    def describe_meeting(self, pattern: Call, met_ns: int) -> RawMatch:
        """Return the part of the message's timeline span that both ends share.

        Args:
            pattern: Call of the sender.
            met_ns: Instant at which both ends had arrived, as far as this process knows.
        """
        group = self.member.name, self.members, self.tag
        return pattern.kind.text, self.algorithm, group, self.seq, pattern.nbytes, pattern.dtype, met_ns

    # -- memory --------------------------------------------------------------------------------------------------------

    def lock_arrays(self) -> None:
        """Make the arrays of the message read-only for everybody else until it ends."""
        super().lock_arrays()
        arrays = () if self.buffers is None or self.context.arrays.shapes_only else tuple(self.buffers.arrays)
        if arrays and not any(each is arrays[0] for each in self.locked):
            self.locked += self.context.locks.lock(arrays)

    def prepare_result(self, pattern: Call) -> None:
        """Set `pattern`, and for a receive without an array make a new one, with dtype and shape of `pattern`.

        Raises:
            MemoryError: If there is no memory for the array.
        """
        if self.target is None:
            if self.out is None and self.receives:
                assert pattern.dtype is not None, "this is a bug in overlap: a message has no dtype"
                self.out = self.context.arrays.empty(pattern.result_shape, pattern.dtype)
            self.target = self.out
        self.pattern = pattern

    # -- its transfer over a wire --------------------------------------------------------------------------------------

    def on_transfer_end(self, request: Request) -> None:
        """End the message, because its transfer has ended. The wire calls this, in any thread.

        Another thread than the loop's only ends a message if that wakes nothing on the loop; else it posts it there.
        """
        context = self.context
        is_usual = (  # ended here, for a short latency; all other ends need `transfer.end_message`
            request.error is None and not request.withdrawn  # the transfer has ended well
            and self.tree_memory is None  # there is no tree to unpack
            and self.state <= RUNNING and self.transfer_over is None  # nobody has given it up
            and self.lane is not None  # the loop has put it into its lane
        )  # fmt: skip
        if get_ident() != context.thread and not (is_usual and not self.end_wakes_loop):
            context.post_to_loop(transfer.end_message, self, request)
        elif is_usual:
            self.request = self.poll = None
            pattern, group = self.pattern or self.call, (self.member.name, self.members, self.tag)
            # `describe_meeting`, inlined
            meeting = pattern.kind.text, self.algorithm, group, self.seq, pattern.nbytes, pattern.dtype, self.started_ns
            self.finish(context.now_ns(), meeting)
        else:
            transfer.end_message(self, request)

    def poll_before_sleep(self) -> None:
        """Poll the wire for a moment, so that a message that comes soon need not wake the task that awaits it."""
        request = self.request
        if request is not None and not request.look():
            poll_wires({self.peer_rank: self.wire}, lambda: self.request is None)

    def _wait_in_thread(self, timeout: float | None = None) -> bool:
        """Return False at the time limit, in seconds.

        At first the thread waits in the wire, and ends the message itself: that is quicker than to be woken.
        """
        request, start_s = self.request, perf_counter()
        if request is not None:
            end_here, end_on_loop = request.settle_in_thread, request.settle
            self.context.handover.wait_and_end_operation(request.wait, timeout, end_here, end_on_loop)
        rest = None if timeout is None else max(0.0, start_s + timeout - perf_counter())
        return self.state >= DONE or super()._wait_in_thread(rest)

    # -- its end -------------------------------------------------------------------------------------------------------

    def _unpack_or_return_message(self) -> bool:
        """Unpack the arrived message. Return whether `finish` has nothing left to do for this receive.

        That is so if no task waits for it, and the message was put back for the next receive, or if the tree cannot be
        unpacked, and the receive has failed.
        """
        if (self.state is UNWANTED or self.state is CANCELLING) and self._return_unwanted_message():
            return True
        self.arrival_number = self.arrival_number or next(ARRIVALS)
        if self.buffers is not None and self.pattern is not None and self.pattern.form:
            try:
                self.caller_out = unpack_received_tree(self.buffers, self.pattern.form, self.out, self.context.arrays)
            except Exception as error:  # no memory, or an invalid form
                self.fail(Failure(error))
                return True
        return False

    def fail(self, failure: Failure) -> None:
        """End with an error. But a receive that no task waits for leaves its lane instead, and the error is dropped."""
        if not self._wants_no_message:
            super().fail(failure)
        elif not self._has_moving_bytes:  # while bytes move, the end of the transfer does this
            self._finish_withdrawal()

    @property
    def _has_moving_bytes(self) -> bool:
        return self.scope is not None or self.request is not None

    def end_unreceived(self) -> None:
        """End a send that nobody will receive as if it had been received, unless it has failed or ended already."""
        if self.state < STOPPING:
            self.context.flight.record_end(self.record, self.context.now_ns())
            settle_and_deliver(self, None)
            self._stop_bytes()

    def _stop_bytes(self) -> None:
        """Over a wire, a task withdraws the transfer, and waits until it has ended."""
        if self.request is not None:
            self.context.spawn(transfer.stop_transfer, self)
        else:
            super()._stop_bytes()

    @property
    def end_wakes_loop(self) -> bool:
        """Whether the end of the message wakes tasks, callbacks or other messages, which only the loop may do."""
        if self._waiters is not None or self._callbacks is not None or self.context.outstanding.draining:
            return True
        lane = self.lane
        return lane is None or len(lane.messages[self.receives]) > 1 or lane.queue in self.messages.communicator.queues

    # -- receives that no task waits for -------------------------------------------------------------------------------

    @property
    def inbox(self) -> Inbox:
        """Inbox of the process."""
        return self.messages.communicator

    @property
    def done(self) -> Flag:
        """Whether the message has ended, with a result or an error; `done()` is the same.

        To read it on the loop's thread changes a parked receive: it receives a message that is present, and fails if
        the rank has ended.
        """
        if (
            self.state is PARKED
            and get_ident() == self.context.thread
            and (self.context.closed or self.inbox.has_message(self))
        ):
            self.moves_at_once = True
            self._rejoin_lane()
            if self.state < DONE:  # the message still moves: leave it to the next receive, as nobody waits here
                self._on_await_cancelled()
        return super().done

    def cancel(self) -> bool:
        """Withdraw a receive, unless a message has met it (see `Future.cancel`)."""
        return self.receives and (self.cancelled() or self.context.call_on_loop(self._cancel_on_loop))

    def _on_await_cancelled(self) -> None:
        """Let a receive that nothing else uses leave its lane, or return its message. On the loop's thread only.

        A send, and a receive that is being cancelled or stopped, go on.
        """
        if not self.receives or self.state in (PARKED, CANCELLING, STOPPING) or self._has_user():
            return
        if self.lane is None and self.state < DONE:  # issued by another thread, and not on the loop yet
            self._await_cancelled_elsewhere()
        elif self.state < DONE:
            if self._withdraw_from_lane():
                self._park_or_cancel()
            elif self.state is not UNWANTED:
                self._enter(UNWANTED)
        elif self._failure is None and (use := self.messages.use()) is not None:  # None: the group has been dropped
            value = self._value
            if undo_end(self, PARKED):  # False: a thread has taken the result just now
                self._use, message = use, self._copy_received_message(value)
                self._reset_for_reissue()
                self.inbox.give_to_next_receive(self, message)

    def _await_cancelled_elsewhere(self) -> None:
        """Let the loop's thread handle a cancelled await, unless the loop has ended."""
        with suppress(PeerFailedError):  # the loop has ended
            self.context.post_to_loop(self._on_await_cancelled)

    def _has_user(self) -> bool:
        """Whether a task, thread, callback or other operation waits for the result, or has taken it."""
        if self._taken or self._waiters or self._threads or self._thread_callbacks or self._has_result_callbacks():
            return True
        return any(self in operation.inputs for operation in self.context.outstanding.operations)

    def _prepare_for_use(self) -> None:
        """Let a receive that has left its lane, or is about to, take part again. Any thread may call this."""
        if self.state is PARKED or self.state is UNWANTED:
            if get_ident() == self.context.thread:
                self._rejoin_lane()
                return
            try:
                self.context.post_to_loop(self._rejoin_lane)
            except PeerFailedError as ended:  # the loop has ended
                settle(self, None, Failure(ended, seen=True))

    def _rejoin_lane(self) -> None:
        """Let a receive take part again, in its old place, or, if it has left its lane, behind the receives there now.

        It fails if the rank has ended, or its array may no longer be written.
        """
        if self.state is UNWANTED:
            self._enter(RUNNING if self._has_moving_bytes else MATCHING)
        if self.state is not PARKED:
            return
        self.out = self._given_out  # type: ignore[assignment]  # checked below
        error: BaseException | None = self.context.closed_rank_error() if self.context.closed else None
        if error is None and self.out is not None and not (type(self.out) is np.ndarray and self.out.flags.carray):
            try:
                set_output_array(self)
            except UsageError as refusal:  # the array may not be written any more
                error = refusal.with_traceback(None)  # the traceback holds this frame, and so the message
        if error is not None:
            self.out = None
            settle_and_deliver(self, None, Failure(error, seen=True))
            return
        self._enter(ISSUED)
        self.peer = self.given_peer
        if self.peer is None:
            self.members, self.peer_rank = (), -1
        self.messages.begin(self)

    def _withdraw_from_lane(self) -> bool | None:
        """Return True; False if a message has met the receive; None if the wire decides later.

        In the last case the wire calls `_finish_withdrawal` if no message has met the receive.
        """
        if self.state > ADMITTED:
            withdrawn = self.inbox.withdraw_receive(self, self._finish_withdrawal)
            if not withdrawn:
                return withdrawn
        self._leave_lane()
        return True

    def _finish_withdrawal(self) -> None:
        """Take the receive, which no transfer holds any more, out of its lane, and park it or end it as cancelled."""
        if self.state >= DONE:
            return
        self._leave_lane()
        self._park_or_cancel()

    def _leave_lane(self) -> None:
        """Give the receive's place and number to the next one there."""
        self.context.flight.record_end(self.record, self.context.now_ns())
        self.inbox.remove_message(self, None, frees_number=True)

    def _park(self) -> None:
        """Let the receive wait outside of any lane until the program uses it again."""
        self._enter(PARKED)
        self._reset_for_reissue()

    def _reset_for_reissue(self) -> None:
        """Reset the values that `MessagePort.begin` sets when the receive takes part again."""
        if self.deadline_s is not None:
            self.context.deadlines.drop(self, self.deadline_s)
        self.release_arrays()
        self._value = self.awaited_ns = self.lane = self.pattern = self.tree_memory = None
        self.arrival_number, self.moves_at_once = 0, False
        self.priority -= self.port.stream.priority  # the next issue adds it again

    def _park_or_cancel(self) -> None:
        """End the receive if it is being cancelled; otherwise park it.

        A parked receive takes part again at once if the program, in any thread, has begun to use it in the meantime.
        """
        cancelled = self.state is CANCELLING
        self._park()
        if cancelled:
            self._end_as_cancelled()
        elif self._has_user():
            self._rejoin_lane()

    def _cancel_on_loop(self) -> bool:
        """Return False if the receive has met a message, or has failed.

        If the wire decides only later, and a message has met the receive, that message goes to the next receive.
        """
        if self.state >= DONE or self.state in (CANCELLING, STOPPING):
            return self.state is CANCELLING or self.cancelled()
        if self.lane is None and self.state is not PARKED:  # issued by another thread, and not on the loop yet
            self.release_arrays()
        elif self.state is not PARKED:
            withdrawn = self._withdraw_from_lane()
            if withdrawn is None:
                self._enter(CANCELLING)
            if not withdrawn:
                return withdrawn is None
            self._park()
        self._end_as_cancelled()
        return True

    def abandon(self, error: BaseException) -> None:
        """Fail because the world has ended; but a receive that is being cancelled ends as `cancel` has promised."""
        super().abandon(self._cancellation() if self.state is CANCELLING else error)

    def _end_as_cancelled(self) -> None:
        settle_and_deliver(self, None, Failure(self._cancellation(), seen=True))

    def _cancellation(self) -> FutureCancelledError:
        return FutureCancelledError(f"{self.label} ({self.call_site}) was cancelled")

    @property
    def _wants_no_message(self) -> bool:
        """Whether the receive is being cancelled, or unwanted and without a user."""
        return self.state is CANCELLING or (self.state is UNWANTED and not self._has_user())

    def _return_unwanted_message(self) -> bool:
        """Put the arrived message back if the receive wants none. Return whether it did."""
        if not self._wants_no_message:
            return False
        lane = self.lane
        assert lane is not None, "this is a bug in overlap: a message has arrived outside a lane"
        message = self._copy_received_message(None)
        self.context.flight.record_end(self.record, self.context.now_ns())
        self.inbox.put_back_message(lane, message, giver=self)
        self.inbox.remove_message(self, None)  # the next receive, if any, takes it
        self._park_or_cancel()
        return True

    def _copy_received_message(self, value: object) -> Returned:
        """Return the message for another receive: a copy of the result `value`, or of `out` if there is none yet."""
        self.arrival_number = self.arrival_number or next(ARRIVALS)
        pattern = self.pattern
        assert pattern is not None, "this is a bug in overlap: a receive without a message returns it"
        if self.context.arrays.shapes_only:
            return Returned(self.arrival_number, pattern, self.flat)
        if value is None or not pattern.form:
            data = np.array(as_input_array(value) if value is not None else self.out).reshape(-1)
        else:  # the leaves of a tree as one flat copy of bytes
            leaves = [as_output_array(leaf, "like").reshape(-1).view(np.uint8) for leaf in leaves_of(value)]
            assert pattern.dtype is not None, "this is a bug in overlap: a received message has no dtype"
            data = np.concatenate(leaves).view(pattern.dtype)
        return Returned(self.arrival_number, pattern, self.flat, data)


def pending_sends(outstanding: Outstanding) -> list[Message[object]]:
    """Return the unfinished sends of a rank."""
    return [each for each in outstanding.operations if isinstance(each, Message) and not each.receives]
