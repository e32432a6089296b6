"""Messages of one rank on one group: checks of a call, its place in the inbox, and calls of other threads."""

from __future__ import annotations

from copy import copy
from functools import cached_property, partial
from sys import _getframe
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, Self, cast
from weakref import ref

from numpy import ndarray, uint8

from transports import Request
from transports.wire import OPEN

from ..collectives.call import Call, call
from ..collectives.kinds import P2P
from ..collectives.reduce import check_dtype
from ..errors import UsageError
from ..flight.recorder import Known
from .arguments import TAGS, check_peer, prepare, receive_like, take_output
from .context import RankContext
from .derived import check_here
from .future import Future
from .inbox import Inbox
from .known_message import KnownMessage
from .lane import TAG_BITS, LaneName, wire_tag
from .memory.foreign import bytes_at
from .message import Message
from .outstanding import CallSite
from .signature import CallSignature, CodePlace, signature_of
from .state import DONE, MATCHING, QUEUED, RUNNING
from .stream import OpenLane, Stream, Streams, activate
from .transfer import MESSAGE_ALGORITHM, ReceiveBuffers, allocate, request_ended
from .tree_operation import tree_future

if TYPE_CHECKING:
    from transports import Wire

    from ..collectives.reduce import Array
    from .group import GroupRank, GroupUse
    from .lane import Lane

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

    def begin(self, message: Message[Any], request: Request | None = None, now_ns: int = 0) -> None:
        """Put a message into its lane, and let it arrive if it is the first there.

        Args:
            message: The message.
            request: Its transfer, if that is under way already; it is the first of its lane then.
            now_ns: The time at which its transfer began.
        """
        context, inbox, peer = self.context, self.communicator, message.peer
        shared, first = inbox.shared, inbox.admit(message)
        # record it
        if shared.intercept is not None:
            shared.intercept.issued(inbox, message)
        message.priority += self.stream.priority
        message.issued_ns = message.started_ns = now_ns = now_ns or context.now_ns()
        try:
            call_: object = message.call
        except AttributeError:  # its input does not exist yet
            call_ = None
        known = self._known.get((message.receives, peer, message.tag)) or self.known(message)
        message.record = context.flight.issued(message, known, call_, message.seq, now_ns)
        if message.deadline_s is not None:
            context.deadlines.add(message, message.deadline_s)
        context.outstanding.operations[message] = None
        # let it arrive
        if not first:
            message._enter(QUEUED)
            message.lock()
        elif isinstance(message.input, Future):
            activate(message)
        else:  # inlined from `activate`, and a message with another process from `Inbox.match`, for a short latency
            message.state, lane = MATCHING, message.lane
            if request is not None and request.ended:
                request_ended(message, request)
            elif request is not None:
                request.done = message.request_done
                self.follow(message, request)
            elif (
                peer is None or not lane.by_wire or lane.returned  # type: ignore[union-attr]
                or shared.intercept is not None or shared.left or shared.early or shared.broken
            ):  # fmt: skip
                inbox.arrive(message)
            else:
                self.transfer(message)

    def transfer(self, message: Message[Any]) -> None:
        """Begin to send over the wire to the peer, or to receive; a small message leaves at once."""
        call, source, place, flat, signed = message.call, message.source, message.place, message.flat, self.signed
        context, peer, name = self.context, cast("int", message.peer), cast("Lane", message.lane).name
        # inlined from `wire_tag`, for a short latency
        tag = wire_tag(name) if name[2] >> TAG_BITS else name[0] << TAG_BITS | name[2]
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
            self.communicator.fail_broken_wire(message, error)
            return
        if request is None:
            message.finish(context.now_ns(), message.describe(call, message.started_ns))
        elif not request.ended:
            self.follow(message, request)

    def follow(self, message: Message[Any], request: Request) -> None:
        """Let a message wait for the end of its transfer, which its place in its lane shows to others."""
        message.request = request
        if message.state is MATCHING:
            message.state = RUNNING
        if not (message.receives or message.flat):
            message.lock()
        if (here := self.communicator.here) is not None and message.members[not message.receives] not in here:
            message.poll = message.look

    def arrive(self, message: Message[Any]) -> None:
        """Match a message whose input exists now."""
        self.communicator.arrive(message)

    def lane_name(self, message: Message[Any]) -> LaneName:
        """Return the name of the lane of a message; without a peer, with group rank 0 as its sender."""
        own, peer = self.group.rank, message.peer or 0
        return (self.group_id, own, message.tag, peer) if message.receives else (self.group_id, peer, message.tag, own)

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
        message.issue_elsewhere(in_place, partial(self.begin, message))

    def _begin_in_place(self, message: Message[Any]) -> bool:
        """Begin a message in this thread, if nothing needs the event loop; False: it must."""
        context, peer = self.context, message.peer
        if context.closed or peer is None or context.deadlines.wakes(message.deadline_s):
            return False
        wire = self.wires[peer] if peer in self.wires else self.wire(peer)
        if wire is None or not wire.takes_threads(self.group.label[1][peer]):
            return False
        inbox, name = self.communicator, self.lane_name(message)
        if context.outstanding.draining or name in inbox.lanes or name[:3] in inbox.queues:
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
        self._kept: dict[object, KnownMessage] = {}

    def preferring(self, stream: Stream, group: GroupRank) -> Self:
        """Return the same messages for another place object, with another default stream."""
        other = copy(self)
        other._group, other._streams = group, self._streams.preferring(stream)
        other._opened, other._kept = {}, {}
        return other

    def _open(self, stream: Stream) -> MessagePort:
        """Return the port of the messages on a stream."""
        port = self._opened[stream] = MessagePort(self._context, self._inbox, stream, self._group, ref(self._use))
        return port

    def reissue(
        self, key: object, tensor: Any, timeout_s: float, caller: FrameType, *, waits: bool
    ) -> Message[Any] | int | None:
        """Begin a message of a thread as one before, if nothing needs the event loop.

        Args:
            key: Key of the message, as given to `keep`.
            tensor: A contiguous CPU tensor of PyTorch of the same dtype and size.
            timeout_s: Time within which it must end.
            caller: The program's line, the same as before.
            waits: Whether the thread waits for it next.

        Returns:
            See `KnownMessage.begin`.
        """
        known = self._kept.get(key)
        try:
            address = 0 if known is None else tensor.data_ptr()
        except RuntimeError:  # torch has no address for it
            address = 0
        if known is None or not address:  # of no elements, or freed
            return None
        data = bytes_at(address, known.nbytes)
        begin = partial(self._begin_again, known, data, tensor, timeout_s, caller, waits=waits)
        return self._context.handover.in_place(begin, None)

    def _begin_again(
        self, known: KnownMessage, data: memoryview, tensor: Any, timeout_s: float, caller: FrameType, *, waits: bool
    ) -> Message[Any] | int | None:
        """Begin a known message in this thread."""
        context = self._context
        if context.closed or context.deadlines.wakes(timeout_s) or not known.wire.takes_threads(known.peer):
            return None
        return known.begin(data, context.step, partial(known.future, tensor, timeout_s, caller), waits=waits)

    def keep(self, key: object, message: Message[Any], priority: int = 0) -> None:
        """Keep a message for messages like it, unless it is the first in its lane, or its wire is not known yet.

        Args:
            key: Names all that it shares with them: line, ends, tag, dtype, shape, stream, priority and name.
            message: The message, which has its call.
            priority: Its priority in its stream.
        """
        peer = message.asked  # a receive from any source has a peer once one is chosen
        wire = None if peer is None else message.messages.wires.get(peer)
        if peer is not None and wire is not None and message.seq and key not in self._kept:
            if len(self._kept) >= _KNOWN:
                self._kept.clear()
            self._kept[key] = KnownMessage(message, peer, wire, priority)

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
        key: object = None
        if type(x) is ndarray and x.flags.carray:
            message.source, message.call = x, call(P2P.text, None, x.dtype, x.shape, 2)
            if port.wires.get(dst) is not None:
                key = port, dst, tag, message.call, priority, message.name, message.place
                known = self._kept.get(key)
                if known is not None and get_ident() == context.thread and self._leave(known, message):
                    return message
        elif isinstance(x, Future):
            check_here(x, context.thread)
        else:
            prepare(message)
        if get_ident() == context.thread:
            port.begin(message)
        else:
            port.begin_elsewhere(message)
        if key is not None and not flat:
            self.keep(key, message, priority)
        return message

    @staticmethod
    def _leave(known: KnownMessage, message: Message[Any]) -> bool:
        """Begin a send like one before on the loop's thread; return whether it has begun."""
        data = memoryview(cast("Array", message.source).reshape(-1).view(uint8))  # type: ignore[arg-type]
        begun = known.begin(data, message.step, lambda: message)
        if type(begun) is int:
            message.seq, message.state = begun, DONE
            message.input = message.source = message._use = None
        return begun is not None

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
