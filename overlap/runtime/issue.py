"""Issues operations: checks a call, numbers it, and hands it to a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from sys import _getframe
from threading import get_ident
from typing import Any, Self, TypeAlias, TypeVar, cast

import numpy as np

from ..collectives.kinds import P2P, PERMUTE, Collective, check_counts
from ..errors import GroupAbortedError, PeerFailedError, UsageError, in_one_line, shown
from ..flight.recorder import Known
from .arguments import check_options, check_pairs, check_peer, check_root, prepare, receive_like, take_output
from .communicators import Communicators
from .context import STEP_OF_TASK, RankContext
from .derived import check_here
from .future import Failure, Future, conclude
from .match import Key
from .operation import NOWHERE, CollectiveFuture, Lane, Member, Port
from .outstanding import CallSite, check_timeout
from .receive import ReceiveFuture
from .received import Received, Room
from .state import ISSUED
from .stream import MessageLane, Stream, Streams
from .tree_operation import PartLane, TreeOperation, check_tree, resolved
from .trees import is_tree

K = TypeVar("K")
T = TypeVar("T")

_Ends: TypeAlias = "tuple[bool, int, int, int]"  # whether this is the receiver's end; source, destination, tag
# Receiver's end or not; peer (None: any source), tag, stream as called.
_Asked: TypeAlias = "tuple[bool, int | None, int, Stream | str | None]"

# Peers and tags whose ports are kept. A program may use a new tag for each message: the oldest ports are dropped.
_PEERS = 256
_FORMS = (list, tuple, dict)


class Issuer:
    """Issues the operations of one rank on one group.

    Any thread of the process may issue. A call from a thread other than the event loop's is checked at once and its
    arrays are locked at once; the loop numbers it later, in the order of the calls, or that thread does so itself, in
    the place of a loop that sleeps.

    Args:
        context: Of the rank.
        communicators: Of the world.
        streams: Of the rank.
        group: The rank's place in the group of the operations.
        ranks: World ranks of the group, in its order.
        occurrence: Tells apart groups of the same ranks.
        use: Kept as long as the rank may issue on the group.

    Attributes:
        context: As given.
        group: As given.
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
        self._ports: dict[Stream | str | None, Port] = {}
        self._opened: dict[Stream, Port] = {}
        self._part_ports: dict[tuple[Port, int], Port] = {}  # of parts, by port of the whole and place
        self._messages: dict[_Ends, Known] = {}  # the calls that the flight record has words for
        self._lasting: dict[_Asked, tuple[Port, Lane]] = {}  # the port of a message call, and the lane it had

    def preferring(self, stream: Stream, group: Member) -> Self:
        """Return an issuer of the same group, as another object has it, whose default stream is another one."""
        other = copy(self)
        other.group, other._streams, other._ports, other._lasting = group, self._streams.preferring(stream), {}, {}
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

        The call site is the caller of a method that calls this one, unless it is given.
        """
        caller = _getframe(2) if call_site is None else call_site
        made: type[CollectiveFuture[Any]] = CollectiveFuture
        tree = False
        if type(x) is not np.ndarray:
            if isinstance(x, Future):
                made = TreeOperation
            elif isinstance(x, _FORMS) and is_tree(x):
                made, x, tree = TreeOperation, resolved(x, self.context), True
            elif x is None and out is None and kind.traits.rooted:  # the root may have a tree
                made = TreeOperation
        operation = made(
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
        if isinstance(operation, TreeOperation):
            operation.issue_part = self._issue_part
        if tree:
            check_tree(operation)
        return self.start(operation, stream, timeout_s)

    def start(
        self, operation: CollectiveFuture[Any], stream: Stream | str | None, timeout_s: float | None
    ) -> CollectiveFuture[Any]:
        """Check, number and start a collective that exists already."""
        kind = operation.kind
        if kind.traits.rooted:
            check_root(self.group, operation)
        elif kind is PERMUTE:
            operation.pairs = check_pairs(self.group, operation.pairs)
        elif operation.counts is not None:
            operation.counts = check_counts(kind, operation.counts, self.group.size)
        self._prepare(operation, timeout_s)
        if get_ident() == self.context.thread:
            try:
                port = self._ports.get(stream)
            except TypeError:  # not hashable, so no stream: `Streams.find` says so
                port = None
            self._enqueue(operation, port or self._open_port(stream))
        else:
            known = self._streams.find(stream)
            if not self._enqueue_here(operation, partial(self._opened.get, known)):
                self._enqueue_soon(operation, partial(self._open_port, known))
        return operation

    def _issue_part(self, part: CollectiveFuture[Any], place: int, whole: Port, seq: int) -> None:
        """Issue a part of a tree, with the number of its operation."""
        port = self._part_ports.get((whole, place))
        if port is None:
            port = self._part_ports[whole, place] = self._open_part_port(whole, place)
        port.next_seq = seq
        self._enqueue(part, port)

    def _open_part_port(self, whole: Port, place: int) -> Port:
        name, window = whole.stream.name, whole.stream.window
        key = Key(self._ranks, self._occurrence, name, tag=place)
        communicator = self._communicators.open(key, self.group.name, self._ranks)
        port = communicator.port(self.context, PartLane(name, window, self.context.outstanding), self.group.rank)
        port.group = self.group.label
        return port

    def _open_port(self, stream: Stream | str | None) -> Port:
        known = self._streams.find(stream)
        port = self._opened.get(known)
        if port is None:
            key = Key(self._ranks, self._occurrence, known.name)
            communicator = self._communicators.open(key, self.group.name, self._ranks)
            port = communicator.port(self.context, known, self.group.rank)
            port.group = self.group.label
            self._opened[known] = port
        self._ports[stream] = self._ports[known] = port
        return port

    def abort(self, error: BaseException | str | None) -> None:
        """Abort the group, here and in other processes."""
        rank, name = self.context.rank, self.group.name
        why = "" if error is None else f": {error if isinstance(error, str) else in_one_line(error)}"
        cause = error if isinstance(error, BaseException) else None
        message = f"group '{name}' was aborted by rank {rank}{why}"

        def aborted() -> GroupAbortedError:
            made = GroupAbortedError(message, culprit=rank)
            made.__cause__ = cause
            return made

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
        if type(x) is not np.ndarray and isinstance(x, _FORMS):
            x = resolved(x, self.context)
        operation: CollectiveFuture[Any] = CollectiveFuture(
            P2P, x, None, caller, priority, "send" if name is None else name
        )
        self._prepare(operation, timeout_s)
        return self._start_message(operation, False, dst, tag, stream)

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
        """Check and start the receiver's end of a message; without a source, look for a sender first."""
        caller = _getframe(2) if call_site is None else call_site
        name = "recv" if name is None else name
        if src is None:
            self._communicators.check_any_source(self._ranks, told=like is not None)
        out = receive_like(like, self.context.arrays)
        operation: CollectiveFuture[Any]
        if type(out) is Room:
            operation = Received(out.packed, caller, priority, name, (self, src, tag, stream))
            operation.expect(out)
            self._prepare(operation, timeout_s)
            operation.call = out.call
        else:
            operation = ReceiveFuture(out, caller, priority, name, (self, src, tag, stream))
            self._prepare(operation, timeout_s)
        return self._start_message(operation, True, src, tag, stream)

    def receivers_port(self, operation: ReceiveFuture[object]) -> Port:
        """Return the port of the messages from the source of a receive, which may have been closed since."""
        assert operation.request is not None, "nobody has taken the message"
        _, _, tag, asked = operation.request
        stream = cast("Stream | str | None", asked)
        return self._message_port((True, operation.port.src, tag, stream), self._streams.find(stream))

    def receive_again(self, operation: ReceiveFuture[object]) -> None:
        """Issue a receive that has given its place back; the loop's thread only."""
        assert operation.request is not None, "nobody has taken the message"
        _, src, tag, asked = operation.request
        if operation.out is not None and not (type(operation.out) is np.ndarray and operation.out.flags.carray):
            take_output(operation)
        self._start_message(operation, True, src, tag, cast("Stream | str | None", asked))

    def _start_message(
        self, operation: CollectiveFuture[Any], receives: bool, peer: int | None, tag: int, stream: Stream | str | None
    ) -> CollectiveFuture[Any]:
        """Start one end of a message to or from a peer."""
        asked = receives, peer, tag, stream
        here = get_ident() == self.context.thread
        if type(peer) is int and type(tag) is int:  # 1.0 would be the same key as 1
            if not here:
                if self._enqueue_here(operation, partial(self._known_port, asked)):
                    return operation
            elif (port := self._known_port(asked)) is not None:
                self._enqueue(operation, port)
                return operation
        check_peer(self.group, "src" if receives else "dst", 0 if receives and peer is None else peer, tag)
        within = self._streams.find(stream)
        if here:
            self._enqueue(operation, self._message_port(asked, within))
        else:
            self._enqueue_soon(operation, partial(self._message_port, asked, within))
        return operation

    def _known_port(self, asked: _Asked) -> Port | None:
        """Return the port of an earlier call with the same peer, tag and stream, if it is still open."""
        try:
            port, lane = self._lasting[asked]
        except (KeyError, TypeError):  # not hashable, so no stream: `Streams.find` says so
            return None
        return port if port.stream is lane and not port.communicator.closed else None

    def _message_port(self, asked: _Asked, stream: Stream) -> Port:
        """Return this end of the messages of one (source, destination, tag): strict FIFO, in no stream's window."""
        receives, peer, tag, _ = asked
        if peer is None:
            return self._any_port(tag, stream)
        ends = (int(peer), self.group.rank) if receives else (self.group.rank, int(peer))
        src, dst = self._ranks[ends[0]], self._ranks[ends[1]]
        key = Key(self._ranks, self._occurrence, "", *ends, tag)
        communicator = self._communicators.open(key, self.group.name, (src, dst))
        towards = (f" from rank {src}" if receives else f" to rank {dst}") + (f" with tag {tag}" if tag else "")
        port = communicator.message_port(self.context, stream, int(receives), towards)
        port.group = self.group.name, communicator.members, tag  # the timeline's group: sender and receiver
        port.known, port.src = _remembered(self._messages, (receives, *ends, tag), Known), ends[0]
        lane = port.stream
        if communicator.lasts and isinstance(lane, MessageLane) and lane.within is stream:
            self._lasting.pop(asked, None)
            _remembered(self._lasting, asked, lambda: (port, lane))
        return port

    def _any_port(self, tag: int, stream: Stream) -> Port:
        """Return this end of the messages of one tag from any source."""
        ranks, mine = self._ranks, self.group.rank
        keys = [Key(ranks, self._occurrence, "", src, mine, tag) for src in range(len(ranks))]
        return self._communicators.any_port(self.context, stream, keys, partial(self._take, stream, tag))

    def _take(self, stream: Stream, tag: int, operation: CollectiveFuture[Any], src: int) -> None:
        """Let a receive from any source go on as a receive from the rank that it has chosen."""
        chosen = self._message_port((True, src, tag, stream), stream)
        self.context.flight.ended(operation.record, self.context.now_ns())
        lane = operation.port.stream
        lane.finished(operation, None)
        operation.priority -= lane.priority
        operation._enter(ISSUED)
        self._enqueue(operation, chosen)

    # -- all operations ------------------------------------------------------------------------------------------

    def _prepare(self, operation: CollectiveFuture[Any], timeout_s: float | None) -> None:
        """Check the arguments that all operations have; an error leaves no trace."""
        context = self.context
        if context.ending.failure is not None:
            raise context.ending.peer_failed()
        if not isinstance(operation.priority, int):
            raise UsageError(f"priority: expected an integer, lower is more urgent, got {shown(operation.priority)}")
        if operation.exact is not False or operation.shared is not False or operation.insisted is not None:
            check_options(self.group, operation)
        if timeout_s is not None:
            check_timeout(timeout_s)
            operation.deadline_s = timeout_s
        operation.member, operation.context, operation.step = self.group, context, context.step
        rank, step = STEP_OF_TASK.get()
        if rank is context:
            operation.step = step
        out, x = operation.out, operation.input
        if out is not None and not (type(out) is np.ndarray and out.flags.carray):
            take_output(operation)
        if not isinstance(x, Future):
            prepare(operation)
        else:
            check_here(x, context.thread)

    def _enqueue(self, operation: CollectiveFuture[Any], port: Port) -> None:
        operation.port, lane = port, port.stream
        operation.seq = seq = port.next_seq
        port.next_seq = seq + 1
        operation.priority += lane.priority
        context = self.context
        operation.issued_ns = operation.started_ns = now_ns = context.now_ns()
        try:
            call: object = operation.call
        except AttributeError:  # its input is not there yet
            call = None
        operation.record = context.flight.issued(operation, port.known, call, seq, now_ns)
        if operation.deadline_s is not None:
            context.expire(operation, operation.deadline_s)
        lane.enqueue(operation)

    def _enqueue_here(self, operation: CollectiveFuture[Any], find_port: Callable[[], Port | None]) -> bool:
        """Issue from another thread an operation that starts no task, if the loop sleeps; False: the loop must."""
        if isinstance(operation.input, Future) or (type(operation) is TreeOperation and operation.parts):
            return False
        return self.context.handover.in_place(partial(self._enqueue_in_place, operation, find_port), False)

    def _enqueue_in_place(self, operation: CollectiveFuture[Any], find_port: Callable[[], Port | None]) -> bool:
        context, port = self.context, find_port()
        if port is None:
            return False
        operation.port = port  # which plans look at
        here = (
            not context.closed
            and port.stream.has_room
            and not port.stream.listens
            and not context.deadlines.wakes(operation.deadline_s)
            and port.communicator.at_once(operation)
        )
        if here:
            self._enqueue(operation, port)
        else:
            operation.port = NOWHERE
        return here

    def _enqueue_soon(self, operation: CollectiveFuture[Any], find_port: Callable[[], Port]) -> None:
        """Issue from another thread: the arrays are locked at once, and the loop does the rest."""
        operation.lock()
        try:
            self.context.from_thread(self._enqueue_late, operation, find_port)
        except PeerFailedError:
            operation.release()
            raise

    def _enqueue_late(self, operation: CollectiveFuture[Any], find_port: Callable[[], Port]) -> None:
        if operation.done:  # cancelled in the meantime
            return
        if not self.context.closed:
            self._enqueue(operation, find_port())
            return
        operation.release()
        conclude(operation, None, Failure(self.context.ending.peer_failed(), seen=True))


def _remembered(known: dict[K, T], which: K, make: Callable[[], T]) -> T:
    """Return the entry of a key, made if there is none; the oldest entry goes when there are too many."""
    found = known.get(which)
    if found is None:
        if len(known) >= _PEERS:
            del known[next(iter(known))]
        found = known[which] = make()
    return found
