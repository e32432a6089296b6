"""Messages of one rank on one group: checks of a call, its place in the inbox, and calls of other threads."""

from __future__ import annotations

from copy import copy
from functools import cached_property, partial
from sys import _getframe
from threading import get_ident
from typing import TYPE_CHECKING, Any, Self, cast
from weakref import ref

from numpy import ndarray, uint8

from transports.base import PAYLOAD_BYTES
from transports.wire import OPEN

from ..collectives.call import Call, call
from ..collectives.kinds import P2P
from ..collectives.reduce import check_dtype
from ..errors import UsageError
from ..flight.recorder import Known
from ..timeline.recording import RawSpan
from .arguments import TAGS, check_peer, prepare, receive_like, take_output
from .context import RankContext
from .derived import check_here
from .future import Future
from .inbox import Inbox
from .lane import TAG_BITS, QueueName, lane_id, wire_tag
from .message import Message
from .outstanding import CallSite
from .signature import CallSignature, CodePlace, signature_of
from .state import DONE, MATCHING, QUEUED, RUNNING
from .stream import OpenLane, Stream, Streams, activate
from .transfer import MESSAGE_ALGORITHM, ReceiveBuffers, allocate
from .tree_operation import tree_future

if TYPE_CHECKING:
    from transports import Wire

    from ..collectives.reduce import Array
    from .group import GroupRank, GroupUse

# Most peers and tags with calls that the flight record knows: a program may use a new tag for each message.
_KNOWN = 256
_FORMS = (list, tuple, dict)

MOST_TAGS: int = (1 << 31) + 1
"""Number of tags of flat messages: those of PyTorch, and one for messages of its collectives."""


class MessagePort:
    """One rank's messages on a group and a stream; they do not keep the group.

    Args:
        inbox: The inbox of the process.

    Attributes:
        context: Context of the rank.
        communicator: Inbox of its process.
        stream: Name and priority of its messages.
        group: Place of the rank in the group.
        use: Reference to the object that keeps the group in use.
        wires: Wires by group rank, as far as known; None: messages match inside this process.
        signed: The last signature, with what it follows from: most messages repeat it.
    """

    position: int = 0

    def __init__(
        self,
        context: RankContext,
        inbox: Inbox,
        stream: Stream,
        group: GroupRank,
        use: ref[GroupUse],
    ) -> None:
        self.context: RankContext = context
        self.communicator: Inbox = inbox
        self.stream: OpenLane = OpenLane(stream.name, stream.priority, stream.window, inbox.leave)
        self.group: GroupRank = group
        self.use: ref[GroupUse] = use
        self.wires: dict[int, Wire | None] = {}
        self.signed: tuple[Call, CodePlace, bool, CallSignature] | None = None
        self._known: dict[tuple[bool, int | None, int], Known] = {}

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
            wires[peer] = self.communicator.shared.engine.wire(self.context, self.group.label[1][peer])
        return wires[peer]

    def begin(self, message: Message[Any], *, known_elsewhere: bool = False) -> None:
        """Put a message into its lane, and let it arrive if it is the first there. A short send needs no lane.

        Args:
            message: The message.
            known_elsewhere: Whether another thread may wait for it already.
        """
        context, inbox, peer, tag = self.context, self.communicator, message.peer, message.tag
        # find the wire of a short send whose lane was used before and is idle, while nothing is wrong
        wire, source, shared = None, message.source, inbox.shared
        if not (source is None or not inbox.counts or source.nbytes > PAYLOAD_BYTES or message.input_changed
                or known_elsewhere):  # fmt: skip
            counted = inbox.counts.get((self.group_id, peer, tag, self.group.rank))  # type: ignore[arg-type]
            if not (
                counted is None or (self.group_id, peer, tag) in inbox.queues
                or shared.intercept is not None or shared.left or shared.early or shared.broken
                or context.outstanding.draining or (wire := self.wires.get(peer)) is None  # type: ignore[arg-type]
            ):  # fmt: skip
                message.seq = counted[1][0]
                counted[1][0] += 1
        first = wire is not None or inbox.admit(message)
        # record it
        if shared.intercept is not None:
            shared.intercept.issued(inbox, message)
        message.priority += self.stream.priority
        message.issued_ns = message.started_ns = now_ns = context.now_ns()
        try:
            call_: object = message.call
        except AttributeError:  # its input does not exist yet
            call_ = None
        known = self._known.get((message.receives, peer, tag)) or self.known(message)
        message.record = context.flight.issued(message, known, call_, message.seq, now_ns)
        # let it leave, or arrive
        if wire is not None:
            message.state = MATCHING
            high = tag >> TAG_BITS
            wire_tag_ = wire_tag((self.group_id, 0, tag)) if high else self.group_id << TAG_BITS | tag
            self.transfer(message, wire_tag_)
            return
        if message.deadline_s is not None:
            context.expire(message, message.deadline_s)
        context.outstanding.operations[message] = None
        if not first:
            message._enter(QUEUED)
            message.lock()
        elif isinstance(message.input, Future):
            activate(message)
        else:  # inlined from `activate`, and a receive from another process from `Inbox.match`, for a short latency
            message.state, lane = MATCHING, message.lane
            if (
                peer is None or source is not None or not lane.by_wire or lane.returned  # type: ignore[union-attr]
                or shared.intercept is not None or shared.left or shared.early or shared.broken
            ):  # fmt: skip
                inbox.arrive(message)
            else:
                self.transfer(message, lane.queue.tag)  # type: ignore[union-attr]

    def transfer(self, message: Message[Any], tag: int) -> None:
        """Begin to send over the wire to the peer, or to receive; a small message leaves at once."""
        call, source, place, flat, signed = message.call, message.source, message.place, message.flat, self.signed
        context, peer = self.context, cast("int", message.peer)
        wire = message.wire = cast("Wire", self.wires[peer] if peer in self.wires else self.wire(peer))
        message.algorithm, peer = MESSAGE_ALGORITHM, message.members[not message.receives]
        if signed is None or signed[0] is not call or signed[1] != place or signed[2] is not flat:
            signed = self.signed = call, place, flat, signature_of(call, place, flat=flat)
        try:
            if source is not None:
                data = source if message.tree_memory is None else message.tree_memory
                view = memoryview(data.reshape(-1).view(uint8))  # type: ignore[arg-type]
                request = wire.begin_send(
                    peer, tag, view, priority=(message.priority << 64) + message.issued_ns, signature=signed[3],
                    done=message.request_done,
                )  # fmt: skip
            elif call.dtype is None:
                message.lock()
                request = wire.begin_recv(
                    peer, tag, None, OPEN, signature=signed[3], done=message.request_done,
                    allocate=partial(allocate, message),
                )  # fmt: skip
            else:
                message.pattern, out = call, cast("Array", message.out)
                if call.form:
                    message.lock()
                    data = cast("Array", cast(ReceiveBuffers, message.buffers).message)
                else:
                    if message.target is None:
                        message.target = out.view()
                    if not (flat or message.locked):  # nobody else has the array of a flat one
                        message.locked = context.locks.lock((out,), out)
                    data = message.target
                view = memoryview(data.reshape(-1).view(uint8))  # type: ignore[arg-type]
                request = wire.begin_recv(peer, tag, view, data.nbytes, signature=signed[3], done=message.request_done)
        except Exception as error:  # no memory, or no wire between the ranks
            message.own()
            self.communicator.fail_broken_wire(message, error)
            return
        if request is None and message.lane is None:  # nobody waits for it yet
            now_ns, started_ns = context.now_ns(), message.started_ns
            info = message.describe(call, started_ns), message.issued_ns, message.priority, *place, None, message.step
            span: RawSpan = "comm", self.stream.name, message.name, started_ns, now_ns, info
            context.flight.carried(message.record, started_ns, now_ns, span)
            message.input = message.source = message.tree_memory = message._use = None
            message.state = DONE
        elif request is None:
            message.finish(context.now_ns(), message.describe(call, message.started_ns))
        elif not request.ended:
            message.request = request
            if message.state is MATCHING:
                message.state = RUNNING
            if not message.receives:
                message.own()
                if not flat:
                    message.lock()
            if (here := self.communicator.here) is not None and peer not in here:
                message.poll = message.look

    def arrive(self, message: Message[Any]) -> None:
        """Match a message whose input exists now."""
        self.communicator.arrive(message)

    def own(self, send: Message[Any]) -> None:
        """Give a send its place in its lane, which it has begun without."""
        self.communicator.counts[self.group_id, send.peer or 0, send.tag, self.group.rank][1][0] -= 1
        self.communicator.admit(send)
        if send.deadline_s is not None:
            self.context.expire(send, send.deadline_s)
        self.context.outstanding.operations[send] = None

    def identity(self, send: Message[Any]) -> str:
        """Name of the lane of a send in few characters, the same on every rank."""
        return f"{lane_id(self.group_id, send.peer or 0, send.tag, self.group.rank):x}"

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

    # -- calls of other threads ----------------------------------------------------------------------------------------

    def begin_elsewhere(self, message: Message[Any]) -> None:
        """Begin a message of another thread."""
        in_place = None if isinstance(message.input, Future) else partial(self._begin_in_place, message)
        message.issue_elsewhere(in_place, partial(self.begin, message, known_elsewhere=True))

    def _begin_in_place(self, message: Message[Any]) -> bool:
        """Begin a message in this thread, if nothing needs the event loop; False: it must."""
        context, peer = self.context, message.peer
        if context.closed or peer is None or context.deadlines.wakes(message.deadline_s):
            return False
        wire = self.wires[peer] if peer in self.wires else self.wire(peer)
        if wire is None or not wire.takes_threads(self.group.label[1][peer]):
            return False
        if context.outstanding.draining or self.queue_name(message) in self.communicator.queues:
            return False
        self.begin(message)
        return True


class Messages:
    """Messages of one rank on one group, which they keep in use.

    Any thread of the process may send and receive. A call from a thread other than the event loop's is checked at once
    and its arrays are locked at once; the loop puts it into its lane later, in the order of the calls.

    Args:
        group: Place of the rank in the group.
        use: Reference that is held as long as the rank may use the group.
        context: What all operations of the rank share.
        inbox: The inbox of the process.
        streams: The streams of the rank.
    """

    def __init__(
        self,
        context: RankContext,
        inbox: Inbox,
        streams: Streams,
        group: GroupRank,
        use: GroupUse,
    ) -> None:
        self._context, self._inbox, self._streams = context, inbox, streams
        self._group, self._use = group, use
        self._opened: dict[Stream, MessagePort] = {}

    def preferring(self, stream: Stream, group: GroupRank) -> Self:
        """Return the same messages for another place object, with another default stream."""
        other = copy(self)
        other._group, other._streams, other._opened = group, self._streams.preferring(stream), {}
        return other

    def _open(self, stream: Stream) -> MessagePort:
        """Return the port of the messages on a stream."""
        port = self._opened[stream] = MessagePort(self._context, self._inbox, stream, self._group, ref(self._use))
        return port

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
        context, group = self._context, self._group
        if type(x) is not ndarray:
            if x is None:
                raise UsageError("x: send needs an array or a tree of arrays, got None")
            if isinstance(x, _FORMS):
                x = tree_future(x, context)
        if not (type(dst) is type(tag) is int and 0 <= dst < group.size and 0 <= tag < tags):
            check_peer(group, "dst", dst, tag, tags)
            dst, tag = int(dst), int(tag)  # 1.0 would be the same as 1
        lane = self._streams.default if stream is None else self._streams.find(stream)
        port = self._opened.get(lane) or self._open(lane)
        message: Message[Any] = Message(port, False, dst, tag, x, None, priority, name, timeout_s, caller, flat)
        if type(x) is ndarray and x.flags.carray:
            message.source, message.call = x, call(P2P.text, None, x.dtype, x.shape, 2)
        elif isinstance(x, Future):
            check_here(x, context.thread)
        else:
            prepare(message)
        if get_ident() == context.thread:
            port.begin(message)
        else:
            port.begin_elsewhere(message)
        return message

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
        context, group, out, buffers = self._context, self._group, like, None
        if type(like) is ndarray:
            check_dtype(like.dtype, "like")
        else:
            out = receive_like(like, context.arrays)
            if type(out) is ReceiveBuffers:
                buffers, out = out, out.packed
        peer = 0 if src is None else src
        if not (type(peer) is type(tag) is int and 0 <= peer < group.size and 0 <= tag < tags):
            check_peer(group, "src", peer, tag, tags)
            src, tag = None if src is None else int(src), int(tag)
        lane = self._streams.default if stream is None else self._streams.find(stream)
        port = self._opened.get(lane) or self._open(lane)
        message: Message[Any] = Message(port, True, src, tag, None, out, priority, name, timeout_s, caller, flat)
        message.buffers = buffers
        if out is not None and not (type(out) is ndarray and out.flags.carray):
            take_output(message)
        out = message.out
        if buffers is None and type(out) is ndarray:
            message.call = call(P2P.text, None, out.dtype, out.shape, 2)
        else:
            prepare(message)
        if get_ident() == context.thread:
            port.begin(message)
        else:
            port.begin_elsewhere(message)
        return message
