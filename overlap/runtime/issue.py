"""Issues operations: checks a call, numbers it, and hands it to a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from sys import _getframe
from threading import get_ident
from typing import Any, Self, TypeAlias, TypeVar, cast

from numpy import ndarray

from ..collectives.call import call
from ..collectives.kinds import P2P, PERMUTE, Collective, check_counts
from ..errors import GroupAbortedError, PeerFailedError, UsageError, in_one_line, shown
from ..flight.recorder import Known
from .arguments import check_options, check_pairs, check_peer, check_root, prepare, receive_like, take_output
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
from .tree_operation import PartLane, TreeOperation, check_tree, tree_future
from .trees import is_tree

K = TypeVar("K")
T = TypeVar("T")

# Ends of a message: whether this is the receiver's end, the peer (None: any source), and the tag.
Ends: TypeAlias = "tuple[bool, int | None, int]"

# Most peers and tags with cached ports: a program may use a new tag for each message.
_PORTS = 256
_FORMS = (list, tuple, dict)


class Issuer:
    """Issues the operations of one rank on one group.

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
        self._ports: dict[Stream | str | None, tuple[OperationPort, StreamLike]] = {}
        self._message_ports: dict[tuple[Ends, Stream | str | None], tuple[OperationPort, StreamLike]] = {}
        self._opened: dict[Stream, OperationPort] = {}
        self._part_ports: dict[
            tuple[OperationPort, int], OperationPort
        ] = {}  # of parts, by port of the whole and place
        self._messages: dict[Ends, Known] = {}  # calls with fields in the flight record

    def preferring(self, stream: Stream, group: Member) -> Self:
        """Return an issuer of the same group for another place object, with another default stream."""
        other = copy(self)
        other.group, other._streams = group, self._streams.preferring(stream)
        other._ports, other._message_ports = {}, {}
        return other

    # -- collectives ---------------------------------------------------------------------------------------------

    def issue(
        self,
        kind: Collective,
        x: object,
        out: object,
        stream: Stream | str | None,
        priority: int,
        name: str | None,
        timeout_s: float | None,
        call_site: CallSite | None,
        algorithm: str | None = None,
        op: str | None = None,
        root: int = 0,
        exact: bool = False,
        *,
        counts: object = None,
        shared: bool = False,
        pairs: Sequence[tuple[int, int]] = (),
    ) -> CollectiveFuture[Any]:
        """Check, number and start a collective: at once if its stream has room, which short latencies need.

        The call site is the caller of the calling method, unless it is given.
        """
        caller = _getframe(2) if call_site is None else call_site
        future_class: type[CollectiveFuture[Any]] = CollectiveFuture
        tree = False
        if type(x) is not ndarray:
            tree = isinstance(x, _FORMS) and is_tree(x)
            if tree:
                x = tree_future(x, self.context)
            if tree or isinstance(x, Future) or (x is None and out is None and kind.traits.rooted):
                future_class = TreeOperation  # a rooted call without an array: the root may have a tree
        operation = future_class(
            kind,
            x,
            out,
            caller,
            priority,
            name,
            op,
            root,
            algorithm,
            counts,
            exact,
            shared,
            pairs,  # type: ignore[arg-type]  # `start` checks the pairs
        )
        if future_class is not CollectiveFuture:
            cast("TreeOperation", operation).issue_part = self._issue_part
            if tree:
                check_tree(operation)
        return self.start(operation, stream, timeout_s)

    def start(
        self,
        operation: CollectiveFuture[Any],
        stream: Stream | str | None,
        timeout_s: float | None,
        ends: Ends | None = None,
    ) -> CollectiveFuture[Any]:
        """Check, number and start an operation that exists already; an error leaves no trace.

        Args:
            stream: The caller's `stream` argument.
            timeout_s: Time within which it must end.
        """
        context, group, kind = self.context, self.group, operation.kind
        if context.closed:
            raise context.ended()
        # check the arguments
        if kind.traits.rooted:
            check_root(group, operation)
        elif kind is PERMUTE:
            operation.pairs = check_pairs(group, operation.pairs)
        elif operation.counts is not None:
            operation.counts = check_counts(kind, operation.counts, group.size)
        if type(operation.priority) is not int and not isinstance(operation.priority, int):
            raise UsageError(f"priority: expected an integer, lower is more urgent, got {shown(operation.priority)}")
        if operation.exact is not False or operation.shared is not False or operation.requested_algorithm is not None:
            check_options(group, operation)
        if timeout_s is not None:
            check_timeout(timeout_s)
            operation.deadline_s = timeout_s
        # set its rank and its arrays: `prepare` finds its input, and the call that all ranks must agree on
        rank, step = STEP_OF_TASK.get()
        operation.member, operation.context, operation.step = group, context, step if rank is context else context.step
        out, x = operation.out, operation.input
        if out is not None and not (type(out) is ndarray and out.flags.carray):
            take_output(operation)
        if type(x) is ndarray and out is None and x.flags.carray and kind is not P2P and operation.counts is None:
            operation.source = x  # inlined from `prepare` for the most frequent inputs
            try:
                operation.call = call(
                    kind.text, operation.reduction, x.dtype, x.shape, group.size, operation.root, operation.pairs, (),
                    operation.exact, operation.shared, operation.requested_algorithm, "",
                )  # fmt: skip
            except TypeError:  # not hashable
                prepare(operation)  # raises the error
        elif isinstance(x, Future):
            check_here(x, context.thread)
        else:
            prepare(operation)
        # find its port, which numbers it: mostly opened by an earlier call
        if ends is not None and not (type(ends[1]) is type(ends[2]) is int):  # 1.0 would be the same key as 1
            ends = self._check_ends(ends)
        if get_ident() != context.thread:
            self._enqueue_elsewhere(operation, ends, stream)
            return operation
        try:
            port, lane = self._ports[stream] if ends is None else self._message_ports[ends, stream]
            usable = port.stream is lane and not port.communicator.closed
        except (KeyError, TypeError):  # not hashable, so no stream: `Streams.find` raises
            usable = False
        self._enqueue(operation, port if usable else self._open_port(ends, stream))
        return operation

    def _issue_part(self, part: CollectiveFuture[Any], position: int, port_of_whole: OperationPort, seq: int) -> None:
        """Issue a part of a tree, with the number of its operation."""
        port = self._part_ports.get((port_of_whole, position))
        if port is None:
            name, window = port_of_whole.stream.name, port_of_whole.stream.window
            key = Key(self._ranks, self._occurrence, name, tag=position)
            communicator = self._communicators.get_or_make(key, self.group.name, self._ranks)
            port = communicator.port(self.context, PartLane(name, window, self.context.outstanding), self.group.rank)
            port.group, self._part_ports[port_of_whole, position] = self.group.label, port
        port.next_seq = seq
        self._enqueue(part, port)

    def _open_port(self, ends: Ends | None, stream: Stream | str | None) -> OperationPort:
        """Return the port of a stream, or of the messages to or from a peer.

        Raises:
            UsageError: If there is no such stream, or no such peer.
        """
        named = self._streams.find(stream)
        if ends is not None:
            return self._message_port(self._check_ends(ends), named, stream)
        port = self._opened.get(named)
        if port is None:
            key = Key(self._ranks, self._occurrence, named.name)
            communicator = self._communicators.get_or_make(key, self.group.name, self._ranks)
            port = self._opened[named] = communicator.port(self.context, named, self.group.rank)
            port.group = self.group.label
        self._ports[stream] = port, named
        return port

    def abort(self, error: BaseException | str | None) -> None:
        """Abort the group, here and in other processes."""
        rank, name = self.context.rank, self.group.name
        why = "" if error is None else f": {error if isinstance(error, str) else in_one_line(error)}"
        cause = error if isinstance(error, BaseException) else None
        message = f"group '{name}' was aborted by rank {rank}{why}"

        def aborted() -> GroupAbortedError:
            aborted_error = GroupAbortedError(message, culprit=rank)
            aborted_error.__cause__ = cause
            return aborted_error

        abort = partial(self._communicators.abort, self._ranks, self._occurrence, aborted)
        if get_ident() == self.context.thread:
            abort()
        else:
            self.context.from_thread(abort)

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

    # -- all operations ------------------------------------------------------------------------------------------

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
        x = operation.input
        if type(x) is not ndarray and (isinstance(x, Future) or isinstance(operation, TreeOperation)):
            activate(operation)
        else:  # inlined from `activate`, for a short latency
            operation.state = MATCHING
            port.communicator.arrive(operation)

    def _enqueue_elsewhere(
        self, operation: CollectiveFuture[Any], ends: Ends | None, stream: Stream | str | None
    ) -> None:
        """Issue from another thread: in the place of the sleeping loop if no task starts, else soon on the loop.

        The arrays are locked at once.
        """
        late = isinstance(operation.input, Future) or (type(operation) is TreeOperation and operation.parts)
        if not late and self.context.handover.in_place(partial(self._enqueue_in_place, operation, ends, stream), False):
            return
        self._streams.find(stream)
        if ends is not None:
            self._check_ends(ends)
        operation.lock()
        try:
            self.context.from_thread(self._enqueue_late, operation, ends, stream)
        except PeerFailedError:
            operation.release()
            raise

    def _enqueue_in_place(
        self, operation: CollectiveFuture[Any], ends: Ends | None, stream: Stream | str | None
    ) -> bool:
        """Enqueue an operation in this thread, if nothing needs the event loop; False: it must."""
        context = self.context
        try:
            port, lane = self._ports[stream] if ends is None else self._message_ports[ends, stream]
        except (KeyError, TypeError):
            return False
        operation.port = port  # which executors read
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

    def _enqueue_late(self, operation: CollectiveFuture[Any], ends: Ends | None, stream: Stream | str | None) -> None:
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
