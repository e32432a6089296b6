"""Issues messages: checks a call, numbers it, and hands it to its lane."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from sys import _getframe
from threading import get_ident
from typing import Any, Self, TypeAlias, TypeVar, cast

from numpy import ndarray

from ..collectives.kinds import P2P
from ..errors import PeerFailedError, UsageError, shown
from ..flight.recorder import Known
from .arguments import check_peer, prepare, receive_like, take_output
from .communicators import Communicators
from .context import STEP_OF_TASK, RankContext
from .derived import check_here
from .failure import Failure
from .future import Future
from .match import Key
from .operation import NOWHERE, CollectiveFuture, Member, OperationPort, StreamLike
from .outstanding import CallSite, check_timeout
from .receive import ReceiveFuture
from .received import ReceiveBuffers, TreeReceive
from .settling import conclude
from .state import ISSUED, MATCHING
from .stream import MessageLane, Stream, Streams, activate
from .tree_operation import tree_future

K = TypeVar("K")
T = TypeVar("T")

# Ends of a message: whether this is the receiver's end, the peer (None: any source), and the tag.
Ends: TypeAlias = "tuple[bool, int | None, int]"

# Most peers and tags with cached ports: a program may use a new tag for each message.
_PORTS = 256
_FORMS = (list, tuple, dict)


class Issuer:
    """Issues the messages of one rank on one group.

    Any thread of the process may issue. A call from a thread other than the event loop's is checked at once and its
    arrays are locked at once; the loop numbers it later, in the order of the calls, or that thread does so itself, in
    the place of a loop that sleeps.

    Args:
        occurrence: Number of the group among groups of the same ranks.
        use: Reference that is held as long as the rank may issue on the group.
    """

    context: RankContext
    group: Member

    def __init__(
        self,
        context: RankContext,
        communicators: Communicators,
        streams: Streams,
        group: Member,
        ranks: tuple[int, ...],
        occurrence: int,
        use: object,
    ) -> None:
        self.context, self.group, self._use = context, group, use
        self._communicators, self._streams = communicators, streams
        self._ranks, self._occurrence = ranks, occurrence
        # Ports of earlier calls with their lanes, by the `stream` argument of the call.
        self._message_ports: dict[tuple[Ends, Stream | str | None], tuple[OperationPort, StreamLike]] = {}
        self._messages: dict[Ends, Known] = {}  # calls with fields in the flight record

    def preferring(self, stream: Stream, group: Member) -> Self:
        """Return an issuer of the same group for another place object, with another default stream."""
        other = copy(self)
        other.group, other._streams = group, self._streams.preferring(stream)
        other._message_ports = {}
        return other

    def start(
        self,
        operation: CollectiveFuture[Any],
        stream: Stream | str | None,
        timeout_s: float | None,
        ends: Ends,
    ) -> CollectiveFuture[Any]:
        """Check, number and start a message; an error leaves no trace.

        Args:
            stream: The caller's `stream` argument.
            timeout_s: Time within which it must end.
        """
        context = self.context
        if context.closed:
            raise context.ended()
        if type(operation.priority) is not int and not isinstance(operation.priority, int):
            raise UsageError(f"priority: expected an integer, lower is more urgent, got {shown(operation.priority)}")
        if timeout_s is not None:
            check_timeout(timeout_s)
            operation.deadline_s = timeout_s
        # set its rank and its arrays: `prepare` finds its input, and the call that all ranks must agree on
        rank, step = STEP_OF_TASK.get()
        operation.member, operation.context = self.group, context
        operation.step = step if rank is context else context.step
        out, x = operation.out, operation.input
        if out is not None and not (type(out) is ndarray and out.flags.carray):
            take_output(operation)
        if isinstance(x, Future):
            check_here(x, context.thread)
        else:
            prepare(operation)
        # find its port, which numbers it: mostly opened by an earlier call
        if not (type(ends[1]) is type(ends[2]) is int):  # 1.0 would be the same key as 1
            ends = self._check_ends(ends)
        if get_ident() != context.thread:
            self._enqueue_elsewhere(operation, ends, stream)
            return operation
        try:
            port, lane = self._message_ports[ends, stream]
            usable = port.stream is lane and not port.communicator.closed
        except (KeyError, TypeError):  # not hashable, so no stream: `Streams.find` raises
            usable = False
        self._enqueue(operation, port if usable else self._open_port(ends, stream))
        return operation

    def _open_port(self, ends: Ends, stream: Stream | str | None) -> OperationPort:
        """Return the port of the messages to or from a peer.

        Raises:
            UsageError: If there is no such stream, or no such peer.
        """
        return self._message_port(self._check_ends(ends), self._streams.find(stream), stream)

    # -- messages ------------------------------------------------------------------------------------------------

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
    ) -> CollectiveFuture[Any]:
        """Check and start the sender's end of a message."""
        if x is None:
            raise UsageError("x: send needs an array or a tree of arrays, got None")
        caller = _getframe(2) if call_site is None else call_site
        if type(x) is not ndarray and isinstance(x, _FORMS):
            x = tree_future(x, self.context)
        operation: CollectiveFuture[Any] = CollectiveFuture(
            P2P, x, None, caller, priority, "send" if name is None else name
        )
        return self.start(operation, stream, timeout_s, (False, dst, tag))

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
    ) -> CollectiveFuture[Any]:
        """Check and start the receiver's end of a message. Without a source, a sender is chosen first."""
        caller = _getframe(2) if call_site is None else call_site
        name = "recv" if name is None else name
        out = receive_like(like, self.context.arrays)
        operation: CollectiveFuture[Any]
        if type(out) is ReceiveBuffers:
            operation = TreeReceive(out.packed, caller, priority, name, (self, src, tag, stream))
            operation.expect(out)
        else:
            operation = ReceiveFuture(out, caller, priority, name, (self, src, tag, stream))
        return self.start(operation, stream, timeout_s, (True, src, tag))

    def receivers_port(self, operation: ReceiveFuture[object]) -> OperationPort:
        """Return the port of the messages from the source of a receive, which may have been closed since."""
        assert operation.request is not None, (
            "this is a bug in overlap: a receive whose message was taken has no request"
        )
        _, _, tag, stream = operation.request
        return self._open_port((True, operation.port.src, tag), cast("Stream | str | None", stream))

    def receive_again(self, operation: ReceiveFuture[object]) -> None:
        """Issue a receive again that has given its place back; the loop's thread only."""
        assert operation.request is not None, (
            "this is a bug in overlap: a receive whose message was taken has no request"
        )
        _, src, tag, stream = operation.request
        if operation.out is not None and not (type(operation.out) is ndarray and operation.out.flags.carray):
            take_output(operation)
        self._enqueue(operation, self._open_port((True, src, tag), cast("Stream | str | None", stream)))

    def _check_ends(self, ends: Ends) -> Ends:
        """Return the ends of a message as plain numbers; raise `UsageError` unless there is such a peer and tag."""
        receives, peer, tag = ends
        check_peer(self.group, "src" if receives else "dst", 0 if receives and peer is None else peer, tag)
        return receives, None if peer is None else int(peer), int(tag)

    def _message_port(self, ends: Ends, within: Stream, stream: Stream | str | None) -> OperationPort:
        """Return this end of the messages of one (source, destination, tag): strict FIFO, in no stream's window."""
        receives, peer, tag = ends
        if peer is None:
            return self._any_port(tag, within)
        pair = (peer, self.group.rank) if receives else (self.group.rank, peer)
        src, dst = self._ranks[pair[0]], self._ranks[pair[1]]
        key = Key(self._ranks, self._occurrence, "", *pair, tag)
        communicator = self._communicators.get_or_make(key, self.group.name, (src, dst))
        towards = (f" from rank {src}" if receives else f" to rank {dst}") + (f" with tag {tag}" if tag else "")
        port = communicator.message_port(self.context, within, int(receives), towards)
        port.group = self.group.name, communicator.members, tag  # the timeline's group: sender and receiver
        port.known, port.src = _cached_entry(self._messages, ends, Known), pair[0]
        lane = port.stream
        if communicator.lasts and isinstance(lane, MessageLane) and lane.within is within:
            self._message_ports.pop((ends, stream), None)
            _cached_entry(self._message_ports, (ends, stream), lambda: (port, lane))
        return port

    def _any_port(self, tag: int, stream: Stream) -> OperationPort:
        """Return this end of the messages of one tag from any source."""
        ranks, own = self._ranks, self.group.rank
        keys = [Key(ranks, self._occurrence, "", src, own, tag) for src in range(len(ranks))]
        return self._communicators.any_port(self.context, stream, keys, partial(self._take, stream, tag))

    def _take(self, stream: Stream, tag: int, operation: CollectiveFuture[Any], src: int) -> None:
        """Continue a receive from any source as a receive from the chosen rank."""
        chosen = self._message_port((True, src, tag), stream, stream)
        self.context.flight.ended(operation.record, self.context.now_ns())
        lane = operation.port.stream
        lane.finished(operation, None)
        operation.priority -= lane.priority
        operation._enter(ISSUED)
        self._enqueue(operation, chosen)

    # -- both ends -----------------------------------------------------------------------------------------------

    def _enqueue(self, operation: CollectiveFuture[Any], port: OperationPort) -> None:
        """Number an operation, and match it with the other ranks' operations as soon as its stream has room."""
        context, lane, seq = self.context, port.stream, port.next_seq
        operation.port, operation.seq, port.next_seq = port, seq, seq + 1
        operation.priority += lane.priority
        operation.issued_ns = operation.started_ns = now_ns = context.now_ns()
        try:
            call_: object = operation.call
        except AttributeError:  # its input does not exist yet
            call_ = None
        operation.record = context.flight.issued(operation, port.known, call_, seq, now_ns)
        if operation.deadline_s is not None:
            context.expire(operation, operation.deadline_s)
        if not lane.admit(operation):
            return
        if isinstance(operation.input, Future):
            activate(operation)
        else:  # inlined from `activate`, for a short latency
            operation.state = MATCHING
            port.communicator.arrive(operation)

    def _enqueue_elsewhere(self, operation: CollectiveFuture[Any], ends: Ends, stream: Stream | str | None) -> None:
        """Issue from another thread: in the place of the sleeping loop if no task starts, else soon on the loop.

        The arrays are locked at once.
        """
        late = isinstance(operation.input, Future)
        if not late and self.context.handover.in_place(partial(self._enqueue_in_place, operation, ends, stream), False):
            return
        self._streams.find(stream)
        self._check_ends(ends)
        operation.lock()
        try:
            self.context.from_thread(self._enqueue_late, operation, ends, stream)
        except PeerFailedError:
            operation.release()
            raise

    def _enqueue_in_place(self, operation: CollectiveFuture[Any], ends: Ends, stream: Stream | str | None) -> bool:
        """Enqueue an operation in this thread, if nothing needs the event loop; False: it must."""
        context = self.context
        try:
            port, lane = self._message_ports[ends, stream]
        except (KeyError, TypeError):
            return False
        operation.port = port  # which plans read
        in_place = (
            not context.closed
            and lane is port.stream
            and not port.communicator.closed
            and lane.has_room
            and not lane.end_wakes
            and not context.deadlines.wakes(operation.deadline_s)
            and port.communicator.needs_no_task(operation)
        )
        if in_place:
            self._enqueue(operation, port)
        else:
            operation.port = NOWHERE
        return in_place

    def _enqueue_late(self, operation: CollectiveFuture[Any], ends: Ends, stream: Stream | str | None) -> None:
        """Enqueue an operation on the event loop, after a call in another thread; fail it if the rank has ended."""
        if operation.done:  # cancelled in the meantime
            return
        if not self.context.closed:
            self._enqueue(operation, self._open_port(ends, stream))
            return
        operation.release()
        conclude(operation, None, Failure(self.context.ended(), seen=True))


def _cached_entry(cache: dict[K, T], key: K, make: Callable[[], T]) -> T:
    """Return the entry of a key, made if there is none; the oldest entry is dropped when there are too many."""
    entry = cache.get(key)
    if entry is None:
        if len(cache) >= _PORTS:
            del cache[next(iter(cache))]
        entry = cache[key] = make()
    return entry
