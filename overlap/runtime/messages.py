"""Sends and receives of one rank on one group: their arguments are checked, then they enter the inbox."""

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
from .arguments import TAGS, check_peer, make_receive_target, prepare_input, set_output_array
from .context import RankContext
from .derived import check_same_world
from .future import Future
from .inbox import Inbox
from .known_message import KnownMessage
from .lane import TAG_BITS, LaneName, QueueName, wire_tag
from .memory.foreign import bytes_at
from .message import Message
from .outstanding import CallSite
from .signature import CallSignature, CodePlace, signature_of
from .state import DONE, MATCHING, QUEUED, RUNNING
from .stream import OpenLane, Stream, Streams, start_operation
from .transfer import MESSAGE_ALGORITHM, ReceiveBuffers, allocate_receive_memory, end_message
from .tree_operation import tree_future

if TYPE_CHECKING:
    from transports import Wire

    from ..collectives.reduce import Array
    from .group import GroupRank, GroupUse
    from .lane import Lane

# Most peers and tags with calls that the flight record knows: a program may use a new tag for each message.
_MOST_KNOWN = 256
_FORMS = (list, tuple, dict)

MOST_TAGS: int = (1 << 31) + 1
"""Number of tags of flat messages: those of PyTorch, and one for messages of its collectives."""


class MessagePort:
    """Begins the messages of one rank on one group and stream. Unlike `Messages`, it does not keep the group in use.

    Args:
        inbox: The inbox of the process.
        stream: The stream, whose name, priority and window the messages have.

    Attributes:
        context: Context of the rank.
        communicator: The inbox, under the name that operations of all kinds use for the object that matches them.
        stream: Name, priority and window of the messages.
        group: The rank in its group.
        use: Weak reference to the object that keeps the group in use.
        wires: Wire to each peer, by group rank, as far as known; None: messages with it match inside this process.
        signed: Call, line and `flat` of the last message, and the signature made from them: most messages repeat it.
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
        self.stream: OpenLane = OpenLane(stream.name, stream.priority, stream.window, inbox.remove_message)
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
        """Whether messages with any rank of the group go over a wire."""
        return any(self.wire(peer) is not None for peer in range(self.group.size))

    def wire(self, peer: int) -> Wire | None:
        """Return the wire of the messages with a group rank, or None if they match inside this process."""
        wires = self.wires
        if peer not in wires:
            wires[peer] = self.communicator.shared.engine.wire(self.context, self.group.label[1][peer])
        return wires[peer]

    def begin(self, message: Message[Any], request: Request | None = None, now_ns: int = 0) -> None:
        """Put a message into its lane. The first of a lane also starts: it is matched, or its transfer begins.

        Args:
            message: The message.
            request: Transfer of the message, if one is under way already; the message is the first of its lane then.
            now_ns: Start time of that transfer; 0: without one, the present is taken.
        """
        context, inbox, peer = self.context, self.communicator, message.peer
        shared, first = inbox.shared, inbox.enqueue(message)
        # record it
        if shared.intercept is not None:
            shared.intercept.on_issued(inbox, message)
        message.priority += self.stream.priority
        message.issued_ns = message.started_ns = now_ns = now_ns or context.now_ns()
        try:
            call_: object = message.call
        except AttributeError:  # its input does not exist yet
            call_ = None
        known = self._known.get((message.receives, peer, message.tag)) or self.known_calls(message)
        message.record = context.flight.record_issue(message, known, call_, message.seq, now_ns)
        if message.deadline_s is not None:
            context.deadlines.add(message, message.deadline_s)
        context.outstanding.operations[message] = None
        # let it arrive
        if not first:
            message._enter(QUEUED)
            message.lock_arrays()
        elif isinstance(message.input, Future):
            start_operation(message)
        else:
            # inlined from `start_operation`, and a message with another process from `Inbox.match`, for a short latency
            message.state, lane = MATCHING, message.lane
            if request is not None and request.ended:
                end_message(message, request)
            elif request is not None:
                request.done = message.on_transfer_end
                self.attach_request(message, request)
            # not for a wire, or the inbox must look at it first: at returned messages, lost ranks, early reports
            elif (
                peer is None or not lane.by_wire or lane.returned  # type: ignore[union-attr]
                or shared.intercept is not None or shared.finished_ranks or shared.early_reports or shared.broken_errors
            ):  # fmt: skip
                inbox.arrive(message)
            else:
                self.begin_transfer(message)

    def begin_transfer(self, message: Message[Any]) -> None:
        """Begin the transfer of a message over the wire to its peer. A small send may end at once.

        The message is the first of its lane, and has its call. An error of the wire fails the message; none is raised.
        """
        call, source, place, flat, signed = message.call, message.source, message.place, message.flat, self.signed
        context, peer, name = self.context, cast("int", message.peer), cast("Lane", message.lane).name
        # inlined from `wire_tag`, for a short latency
        tag = wire_tag(name) if name[2] >> TAG_BITS else name[0] << TAG_BITS | name[2]
        wire = message.wire = cast("Wire", self.wires[peer] if peer in self.wires else self.wire(peer))
        message.algorithm, peer = MESSAGE_ALGORITHM, message.peer_rank
        if signed is None or signed[0] is not call or signed[1] != place or signed[2] is not flat:
            signed = self.signed = call, place, flat, signature_of(call, place, flat=flat)
        try:
            # a send; a receive of any length, whose memory is made when its message comes; a receive of known length
            if source is not None:
                data = source if message.tree_memory is None else message.tree_memory
                view = memoryview(data.reshape(-1).view(uint8))  # type: ignore[arg-type]
                request = wire.begin_send(
                    peer, tag, view, priority=(message.priority << 64) + message.issued_ns, signature=signed[3],
                    done=message.on_transfer_end,
                )  # fmt: skip
            elif call.dtype is None:
                message.lock_arrays()
                request = wire.begin_recv(
                    peer, tag, None, OPEN, signature=signed[3], done=message.on_transfer_end,
                    allocate=partial(allocate_receive_memory, message),
                )  # fmt: skip
            else:
                message.pattern, out = call, cast("Array", message.out)
                if call.form:
                    message.lock_arrays()
                    data = cast("Array", cast(ReceiveBuffers, message.buffers).message)
                else:
                    if message.target is None:
                        message.target = out.view()
                    if not (flat or message.locked):  # nobody else has the array of a flat one
                        message.locked = context.locks.lock((out,), out)
                    data = message.target
                view = memoryview(data.reshape(-1).view(uint8))  # type: ignore[arg-type]
                request = wire.begin_recv(
                    peer, tag, view, data.nbytes, signature=signed[3], done=message.on_transfer_end
                )
        except Exception as error:  # no memory, or no wire between the ranks
            self.communicator.fail_broken_wire(message, error)
            return
        if request is None:  # a send that has left
            message.finish(context.now_ns(), message.describe_meeting(call, message.started_ns))
        elif not request.ended:  # an ended one has called `on_transfer_end`
            self.attach_request(message, request)

    def attach_request(self, message: Message[Any], request: Request) -> None:
        """Let a message run, and end, with a transfer that is under way.

        A task that awaits a message from or to another process polls the wire before it sleeps.
        """
        message.request = request
        if message.state is MATCHING:
            message.state = RUNNING
        if not (message.receives or message.flat):
            message.lock_arrays()
        if (here := self.communicator.here) is not None and message.peer_rank not in here:
            message.poll = message.poll_before_sleep

    def arrive(self, message: Message[Any]) -> None:
        """Match a message whose input exists now."""
        self.communicator.arrive(message)

    def lane_name(self, message: Message[Any]) -> LaneName:
        """Return the name of the lane of a message. A receive that has no sender yet gets group rank 0 in its place."""
        own, peer = self.group.rank, message.peer or 0
        return (self.group_id, own, message.tag, peer) if message.receives else (self.group_id, peer, message.tag, own)

    def queue_name(self, receive: Message[Any]) -> QueueName:
        """Return the name of the queue of receives from any source with the tag of `receive`."""
        return QueueName(self.group_id, self.group.rank, receive.tag)

    def known_calls(self, message: Message[Any]) -> Known:
        """Return the calls that the flight record knows of a message's direction, peer and tag; make them if needed."""
        ends = message.receives, message.peer, message.tag
        known = self._known.get(ends)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                del self._known[next(iter(self._known))]
            known = self._known[ends] = Known()
        return known

    # -- calls of other threads ----------------------------------------------------------------------------------------

    def begin_from_thread(self, message: Message[Any]) -> None:
        """Begin a message that another thread than the loop's issues: at once in that thread, or else soon on the loop.

        Only the loop can begin a send whose input is a future.
        """
        in_place = None if isinstance(message.input, Future) else partial(self._begin_in_place, message)
        message.issue_from_thread(in_place, partial(self.begin, message))

    def _begin_in_place(self, message: Message[Any]) -> bool:
        """Begin a message in this thread if that takes no step that only the loop may do. Return whether it has begun.

        The conditions: the wire accepts calls from any thread, the lane of the message is empty, no receive from any
        source waits for such a message, and no task is woken by its deadline or waits for the end of the rank.
        """
        context, peer = self.context, message.peer
        if context.closed or peer is None or context.deadlines.needs_earlier_wakeup(message.deadline_s):
            return False
        wire = self.wires[peer] if peer in self.wires else self.wire(peer)
        # `label[1]`: the world ranks of the group
        if wire is None or not wire.takes_threads(self.group.label[1][peer]):
            return False
        inbox, name = self.communicator, self.lane_name(message)
        # Without the sender, its last part, the name of a lane is that of a queue of receives from any source.
        if context.outstanding.draining or name in inbox.lanes or name[:3] in inbox.queues:
            return False
        self.begin(message)
        return True


class Messages:
    """Sends and receives of one rank on one group, which this object keeps in use.

    Any thread of the process may send and receive. A call from a thread other than the event loop's is checked at once
    and its arrays are locked at once. That thread also begins the message if it can (`begin_from_thread`); otherwise
    the loop does so later, in the order of the calls.

    Args:
        group: The rank in its group.
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
        self._ports: dict[Stream, MessagePort] = {}
        self._known_messages: dict[object, KnownMessage] = {}

    def with_default_stream(self, stream: Stream, group: GroupRank) -> Self:
        """Return the messages of the same group, with another default stream.

        Args:
            stream: The stream of calls that name none.
            group: The rank in the group object that has this default.
        """
        other = copy(self)
        other._group, other._streams = group, self._streams.with_default_stream(stream)
        other._ports, other._known_messages = {}, {}
        return other

    def _open_port(self, stream: Stream) -> MessagePort:
        port = self._ports[stream] = MessagePort(self._context, self._inbox, stream, self._group, ref(self._use))
        return port

    def reissue(
        self, key: object, tensor: Any, timeout_s: float, caller: FrameType, *, waits: bool
    ) -> Message[Any] | int | None:
        """Begin a message like an earlier one, from any thread, unless that needs the event loop.

        Args:
            key: The key under which `keep_for_reissue` has kept the earlier message.
            tensor: A contiguous CPU tensor of PyTorch, with the dtype and size of the earlier message.
            timeout_s: Time in seconds within which the message must end.
            caller: Frame of the program's line, the same line as before.
            waits: Whether the thread waits for the message next.

        Returns:
            See `KnownMessage.begin`.
        """
        known = self._known_messages.get(key)
        try:
            address = 0 if known is None else tensor.data_ptr()
        except RuntimeError:  # torch has no address for it
            address = 0
        if known is None or not address:  # address 0: a tensor without elements, or with its memory freed
            return None
        data = bytes_at(address, known.nbytes)
        begin = partial(self._begin_known_message, known, data, tensor, timeout_s, caller, waits=waits)
        return self._context.handover.run_in_place(begin, None)

    def _begin_known_message(
        self, known: KnownMessage, data: memoryview, tensor: Any, timeout_s: float, caller: FrameType, *, waits: bool
    ) -> Message[Any] | int | None:
        """Begin a message in the loop's place, unless it needs the loop; see `reissue` and `KnownMessage.begin`."""
        context = self._context
        if (
            context.closed
            or context.deadlines.needs_earlier_wakeup(timeout_s)
            or not known.wire.takes_threads(known.peer)
        ):
            return None
        return known.begin(data, context.step, partial(known.make_future, tensor, timeout_s, caller), waits=waits)

    def keep_for_reissue(self, key: object, message: Message[Any], priority: int = 0) -> None:
        """Keep the facts of a message, so that later messages like it begin faster (`reissue`).

        Nothing is kept of the first message in a lane, of a receive from any source, or before the wire is known.

        Args:
            key: A value for all that the messages share: line, ends, tag, dtype, shape, stream, priority and name.
            message: The message, which has its call.
            priority: Priority that the caller gave the message, without that of its stream.
        """
        # not `message.peer`: that of a receive from any source is set once a sender is chosen
        peer = message.given_peer
        wire = None if peer is None else message.messages.wires.get(peer)
        # `seq` is 0 for the first message in a lane
        if peer is not None and wire is not None and message.seq and key not in self._known_messages:
            if len(self._known_messages) >= _MOST_KNOWN:
                self._known_messages.clear()
            self._known_messages[key] = KnownMessage(message, peer, wire, priority)

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
        """Check the arguments of a send, and begin it. Return its future.

        `flat`: whether the receiver's array may have another shape with the same number of elements. All else: see
        `Exchanges.send`. If `call_site` is None, the line of the caller's caller is recorded.
        """
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
        port = self._ports.get(lane) or self._open_port(lane)
        message: Message[Any] = Message(port, False, dst, tag, x, None, priority, name, timeout_s, caller, flat)
        key: object = None
        if type(x) is ndarray and x.flags.carray:
            message.source, message.call = x, call(P2P.text, None, x.dtype, x.shape, 2)
            if port.wires.get(dst) is not None:  # a send like an earlier one over this wire takes a shorter path
                key = port, dst, tag, message.call, priority, message.name, message.place
                known = self._known_messages.get(key)
                if known is not None and get_ident() == context.thread and self._begin_known_send(known, message):
                    return message
        elif isinstance(x, Future):
            check_same_world(x, context.thread)
        else:
            prepare_input(message)
        if get_ident() == context.thread:
            port.begin(message)
        else:
            port.begin_from_thread(message)
        if key is not None and not flat:
            self.keep_for_reissue(key, message, priority)
        return message

    @staticmethod
    def _begin_known_send(known: KnownMessage, message: Message[Any]) -> bool:
        """Return whether the send has begun; it may also have ended. On the loop's thread only."""
        data = memoryview(cast("Array", message.source).reshape(-1).view(uint8))  # type: ignore[arg-type]
        begun = known.begin(data, message.step, lambda: message)
        if type(begun) is int:  # it has left, and never was in its lane
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
        """Check the arguments of a receive, and begin it. Return its future. If `src` is None, any rank may send.

        `flat`: whether the sender's array may have another shape with the same number of elements. All else: see
        `Exchanges.recv`. If `call_site` is None, the line of the caller's caller is recorded.
        """
        caller, tags = _getframe(2) if call_site is None else call_site, MOST_TAGS if flat else TAGS
        context, group, out, buffers = self._context, self._group, like, None
        if type(like) is ndarray:
            check_dtype(like.dtype, "like")
        else:
            out = make_receive_target(like, context.arrays)
            if type(out) is ReceiveBuffers:
                buffers, out = out, out.packed  # the packed arrays are received as one
        peer = 0 if src is None else src  # any valid rank, for the check
        if not (type(peer) is type(tag) is int and 0 <= peer < group.size and 0 <= tag < tags):
            check_peer(group, "src", peer, tag, tags)
            src, tag = None if src is None else int(src), int(tag)
        lane = self._streams.default if stream is None else self._streams.find(stream)
        port = self._ports.get(lane) or self._open_port(lane)
        message: Message[Any] = Message(port, True, src, tag, None, out, priority, name, timeout_s, caller, flat)
        message.buffers = buffers
        if out is not None and not (type(out) is ndarray and out.flags.carray):
            set_output_array(message)
        out = message.out
        if buffers is None and type(out) is ndarray:
            message.call = call(P2P.text, None, out.dtype, out.shape, 2)
        else:
            prepare_input(message)
        if get_ident() == context.thread:
            port.begin(message)
        else:
            port.begin_from_thread(message)
        return message
