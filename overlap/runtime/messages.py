"""Messages of one rank on one group: checks of a call, its place in the inbox, and calls of other threads."""

from __future__ import annotations

from copy import copy
from functools import cached_property, partial
from sys import _getframe
from threading import get_ident
from typing import TYPE_CHECKING, Any, Self

from numpy import ndarray

from transports.base import PAYLOAD_BYTES

from ..collectives.call import Call, call
from ..collectives.kinds import P2P
from ..collectives.reduce import check_dtype
from ..errors import PeerFailedError, UsageError, shown
from ..flight.recorder import Known
from .arguments import TAGS, check_peer, prepare, receive_like, take_output
from .context import STEP_OF_TASK, RankContext
from .derived import check_here
from .failure import Failure
from .future import Future
from .inbox import Inbox
from .lane import TAG_BITS, QueueName, lane_id, wire_tag
from .message import Message
from .outstanding import CallSite, check_timeout
from .received import ReceiveBuffers
from .settling import settle_and_deliver
from .signature import CallSignature, CodePlace
from .state import MATCHING, QUEUED
from .stream import Stream, Streams
from .tree_operation import tree_future

if TYPE_CHECKING:
    from transports import Wire

    from .communicator import BaseEngine
    from .group import GroupRank

# Most peers and tags with calls that the flight record knows: a program may use a new tag for each message.
_KNOWN = 256
_FORMS = (list, tuple, dict)
# Time limits up to this one need no further check.
_LONGEST_S = 1e9

MOST_TAGS: int = (1 << 31) + 1
"""Number of tags of flat messages: those of PyTorch, and one for messages of its collectives."""


class Messages:
    """Messages of one rank on one group.

    Any thread of the process may send and receive. A call from a thread other than the event loop's is checked at once
    and its arrays are locked at once; the loop puts it into its lane later, in the order of the calls.

    Args:
        group: Place of the rank in the group.
        use: Reference that is held as long as the rank may use the group.
    """

    context: RankContext
    inbox: Inbox
    group: GroupRank

    def __init__(
        self,
        context: RankContext,
        inbox: Inbox,
        engine: BaseEngine,
        streams: Streams,
        group: GroupRank,
        use: object,
    ) -> None:
        self.context, self.inbox, self.group, self._engine = context, inbox, group, engine
        self.wires: dict[int, Wire | None] = {}  # by group rank, as far as known
        self._streams, self._use = streams, use
        self._known: dict[tuple[bool, int | None, int], Known] = {}
        # the last signature, with what it follows from: most messages repeat it
        self.signed: tuple[Call, CodePlace, bool, CallSignature] | None = None

    def preferring(self, stream: Stream, group: GroupRank) -> Self:
        """Return the same messages for another place object, with another default stream."""
        other = copy(self)
        other.group, other._streams = group, self._streams.preferring(stream)
        return other

    @cached_property
    def group_id(self) -> int:
        """Id of the group, the same on every rank."""
        return self.group.key.id

    @cached_property
    def has_wires(self) -> bool:
        """Whether messages of any member go over a wire."""
        return any(self.wire(peer) is not None for peer in range(self.group.size))

    def wire(self, peer: int) -> Wire | None:
        """Return the wire of the messages with a group rank; None: they match inside this process."""
        wires = self.wires
        if peer not in wires:
            wires[peer] = self._engine.wire(self.context, self.group.label[1][peer])
        return wires[peer]

    def send(
        self,
        x: object,
        dst: int,
        tag: int,
        stream: Stream | str | None,
        priority: int,
        name: str | None,
        timeout_s: float | None,
        call_site: CallSite | None,
        *,
        flat: bool = False,
    ) -> Message[Any]:
        """Check and start the sender's end of a message; a flat one agrees with any shape of as many elements."""
        caller, tags = _getframe(2) if call_site is None else call_site, MOST_TAGS if flat else TAGS
        if type(x) is not ndarray:
            if x is None:
                raise UsageError("x: send needs an array or a tree of arrays, got None")
            if isinstance(x, _FORMS):
                x = tree_future(x, self.context)
        if not (
            type(dst) is type(tag) is int and 0 <= dst < self.group.size and 0 <= tag < (MOST_TAGS if flat else TAGS)
        ):
            check_peer(self.group, "dst", dst, tag, tags)
            dst, tag = int(dst), int(tag)  # 1.0 would be the same as 1
        message: Message[Any] = Message(self, False, dst, tag, x, None, priority, name, caller)
        message.flat = flat
        return self.begin(message, stream, timeout_s, is_new=True)

    def receive(
        self,
        like: object,
        src: int | None,
        tag: int,
        stream: Stream | str | None,
        priority: int,
        name: str | None,
        timeout_s: float | None,
        call_site: CallSite | None,
        *,
        flat: bool = False,
    ) -> Message[Any]:
        """Check and start the receiver's end of a message. Without a source, a sender is chosen first."""
        caller, tags = _getframe(2) if call_site is None else call_site, MOST_TAGS if flat else TAGS
        out, buffers = like, None
        if type(like) is ndarray:
            check_dtype(like.dtype, "like")
        else:
            out = receive_like(like, self.context.arrays)
            if type(out) is ReceiveBuffers:
                buffers, out = out, out.packed
        peer = 0 if src is None else src
        if not (
            type(peer) is type(tag) is int and 0 <= peer < self.group.size and 0 <= tag < (MOST_TAGS if flat else TAGS)
        ):
            check_peer(self.group, "src", peer, tag, tags)
            src, tag = None if src is None else int(src), int(tag)
        message: Message[Any] = Message(self, True, src, tag, None, out, priority, name, caller)
        message.buffers, message.flat = buffers, flat
        return self.begin(message, stream, timeout_s, is_new=True)

    def begin(
        self,
        message: Message[Any],
        stream: Stream | str | None = None,
        timeout_s: float | None = None,
        *,
        is_new: bool = False,
    ) -> Message[Any]:
        """Put a message into its lane, and let it arrive if it is the first there.

        A new message is checked before; an error leaves no trace. Any thread may pass one, the loop's thread others.
        """
        context = self.context
        if is_new:
            if context.closed:
                raise context.ended()
            if type(message.priority) is not int and not isinstance(message.priority, int):
                raise UsageError(f"priority: expected an integer, lower is more urgent, got {shown(message.priority)}")
            if timeout_s is not None:
                if not (type(timeout_s) is float and 0 < timeout_s < _LONGEST_S):
                    check_timeout(timeout_s)
                message.deadline_s = timeout_s
            rank, step = STEP_OF_TASK.get()
            message.step = step if rank is context else context.step
            x, out = message.input, message.out
            if out is not None and not (type(out) is ndarray and out.flags.carray):
                take_output(message)
            if type(x) is ndarray and x.flags.carray:
                message.source, message.call = x, call(P2P.text, None, x.dtype, x.shape, 2)
            elif type(out) is ndarray and message.buffers is None and x is None:
                message.call = call(P2P.text, None, out.dtype, out.shape, 2)
            elif isinstance(x, Future):
                check_here(x, context.thread)
            else:
                prepare(message)
            message.stream = self._streams.default if stream is None else self._streams.find(stream)
            if get_ident() != context.thread:
                self._begin_elsewhere(message)
                return message
        inbox = self.inbox
        wire = self._idle_wire(message) if inbox.counts and not message.receives else None
        first = wire is not None or inbox.admit(message)
        if inbox.intercept is not None:
            inbox.intercept.issued(inbox, message)
        message.priority += message.stream.priority
        message.issued_ns = message.started_ns = now_ns = context.now_ns()
        try:
            call_: object = message.call
        except AttributeError:  # its input does not exist yet
            call_ = None
        known = self._known.get((message.receives, message.peer, message.tag)) or self.known(message)
        message.record = context.flight.issued(message, known, call_, message.seq, now_ns)
        if wire is not None:
            message.state = MATCHING
            tag = (
                wire_tag((self.group_id, 0, message.tag))
                if message.tag >> TAG_BITS
                else (self.group_id << TAG_BITS | message.tag)
            )
            message.begin(wire, tag, self.group.label[1][message.peer])  # type: ignore[index]
            return message
        if message.deadline_s is not None:
            context.deadlines.add(message, message.deadline_s, context.spawn, context.now_ns)
        context.outstanding.operations[message] = None
        if not first:
            message._enter(QUEUED)
            message.lock()
        elif isinstance(message.input, Future):
            message.activate()
        else:  # inlined from `activate`, for a short latency
            message.state = MATCHING
            inbox.arrive(message)
        return message

    def _idle_wire(self, message: Message[Any]) -> Wire | None:
        """Return the wire of a short send that needs no place in its lane, unless it does not leave at once; number it.

        The lane was used before and is idle, nothing is wrong, and there is no deadline.
        """
        inbox, peer, source, tag, shared = self.inbox, message.peer, message.source, message.tag, self.inbox.shared
        counted = inbox.counts.get((self.group_id, peer, tag, self.group.rank))  # type: ignore[arg-type]  # a send has a peer
        if (
            counted is None or source is None or source.nbytes > PAYLOAD_BYTES or message.call.form
            or message.deadline_s is not None or (self.group_id, peer, tag) in inbox.queues
            or inbox.intercept is not None or shared.left or shared.early or shared.broken
            or self.context.outstanding.draining
        ):  # fmt: skip
            return None
        if (wire := self.wires.get(peer)) is not None:  # type: ignore[arg-type]
            message.seq = counted[1][0]
            counted[1][0] += 1
        return wire

    def identity(self, send: Message[Any]) -> str:
        """Name of the lane of a send in few characters, the same on every rank."""
        return f"{lane_id(self.group_id, send.peer or 0, send.tag, self.group.rank):x}"

    def own(self, send: Message[Any]) -> None:
        """Give a send its place in its lane, which it has begun without."""
        self.inbox.counts[self.group_id, send.peer or 0, send.tag, self.group.rank][1][0] -= 1
        self.inbox.admit(send)
        self.context.outstanding.operations[send] = None

    def _begin_elsewhere(self, message: Message[Any]) -> None:
        """Begin a message of another thread: in the place of the sleeping loop if no task starts, else on the loop.

        The arrays are locked at once.
        """
        context = self.context
        if not isinstance(message.input, Future) and context.handover.in_place(
            partial(self._begin_in_place, message), False
        ):
            return
        message.lock()
        try:
            context.from_thread(self._begin_late, message)
        except PeerFailedError:
            message.release()
            raise

    def _begin_in_place(self, message: Message[Any]) -> bool:
        """Begin a message in this thread, if nothing needs the event loop; False: it must."""
        context, peer = self.context, message.peer
        if context.closed or peer is None or context.deadlines.wakes(message.deadline_s):
            return False
        wire = self.wires[peer] if peer in self.wires else self.wire(peer)
        if wire is None or not wire.takes_threads(self.group.label[1][peer]):
            return False
        name = self.group_id, self.group.rank if message.receives else peer, message.tag
        if context.outstanding.draining or name in self.inbox.queues:
            return False
        self.begin(message)
        return True

    def _begin_late(self, message: Message[Any]) -> None:
        """Put a message of another thread into its lane; fail it if the rank has ended."""
        if message.done:  # cancelled in the meantime
            return
        if not self.context.closed:
            self.begin(message)
            return
        message.release()
        settle_and_deliver(message, None, Failure(self.context.ended(), seen=True))

    def queue_name(self, message: Message[Any]) -> QueueName:
        """Return the name of the queue of a message."""
        return self.group_id, self.group.rank if message.receives else message.peer or 0, message.tag

    def known(self, message: Message[Any]) -> Known:
        """Return the calls of a peer and a tag that have fields in the flight record."""
        ends = message.receives, message.peer, message.tag
        known = self._known.get(ends)
        if known is None:
            if len(self._known) >= _KNOWN:
                del self._known[next(iter(self._known))]
            known = self._known[ends] = Known()
        return known
