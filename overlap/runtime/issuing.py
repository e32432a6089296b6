"""From a call to an operation that is under way: checks, the port it goes through, its number, and its stream."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from threading import get_ident
from typing import Protocol, TypeAlias, TypeVar, cast

import numpy as np

from ..collectives.counts import check_counts
from ..collectives.kinds import Collective
from ..collectives.reduce import Array
from ..errors import GroupAbortedError, PeerFailedError, UsageError, in_one_line, shown
from ..flight.recorder import Known
from .any_source import AnyReceive
from .arguments import receive_like
from .communicator import Communicator
from .communicators import Communicators
from .context import RankContext
from .deadlines import check_timeout
from .derived import Derived
from .future import Failure, Future, is_elsewhere, settle, tell
from .group_checks import check_one_a_rank, check_pairs, check_peer, check_rank, check_root
from .match import Key
from .operation import CollectiveFuture, Port
from .outstanding import Issued
from .request import Members
from .stream import MessageLane, Stream, Streams
from .trees import is_tree, packs, unpacked

__all__ = ["Issuer", "Surroundings"]

_FORMS = (list, tuple, dict)
# Sources and destinations of messages, with their tags, of which something is remembered; a tag for each message is no
# reason to remember more.
_PEERS = 256

T = TypeVar("T")

_Ends: TypeAlias = "tuple[bool, int, int, int]"  # whether this is the receiver's end; source, destination, tag


class Surroundings(Protocol):
    """What the groups of a rank find around them: its world, as they see it.

    Attributes:
        issuer: What issues their operations.
    """

    issuer: type[Issuer]

    def communicator(self, key: Key, name: str, members: tuple[int, ...]) -> Communicator:
        """Return where the members meet."""

    @property
    def communicators(self) -> Communicators:
        """Where all ranks meet."""

    def check_group(self, ranks: tuple[int, ...]) -> None:
        """Raise `topology.TopologyError` unless the cluster allows such a group."""

    def notes(self, key: object, seq: int) -> dict[int, list[int]]:
        """Return what ranks of this process tell each other besides an operation, where arrays have no data."""


class Issuer:
    """Issues the operations of one rank on one group.

    Any thread of the process may issue. What a thread that does not run the event loop issues is checked at once, its
    arrays are locked at once, and it is numbered when the loop comes to it: in the order of the calls.

    Args:
        context: Of the rank.
        around: Its world.
        streams: Of the rank.
        group: Whose operations these are.
        ranks: World ranks of the group, in its order.
        occurrence: Tells apart groups of the same ranks.
    """

    def __init__(
        self,
        context: RankContext,
        around: Surroundings,
        streams: Streams,
        group: Members,
        ranks: tuple[int, ...],
        occurrence: int,
    ) -> None:
        self._context, self._around, self._streams = context, around, streams
        self._group, self._ranks, self._occurrence = group, ranks, occurrence
        self._ports: dict[Stream | str | None, Port] = {}
        self._opened: dict[Stream, Port] = {}
        self._messages: dict[_Ends, Known] = {}  # the calls that the flight record has words for
        self._lasting: dict[_Ends, Port] = {}

    def issue(
        self, operation: CollectiveFuture[Array], stream: Stream | str | None, timeout_s: float | None = None
    ) -> CollectiveFuture[Array]:
        """Check, number and start an operation: at once if its stream has room, which short latencies need."""
        kind = operation.kind
        if type(operation.input) in _FORMS and is_tree(operation.input):
            return self._issue_tree(operation, stream, timeout_s)
        if kind.traits.rooted:
            check_root(self._group, operation)
        elif kind is Collective.PERMUTE:
            operation.pairs = check_pairs(self._group, operation.pairs)
        elif operation.counts is not None:
            operation.counts = check_counts(kind, operation.counts, self._group.size)
        self._prepare(operation, timeout_s)
        if get_ident() == self._context.thread:
            try:
                port = self._ports.get(stream)
            except TypeError:  # not hashable, and so no stream, which is said where streams are found
                port = None
            self._enqueue(operation, port or self._open_port(stream))
        elif not self._enqueue_here(operation, self._opened.get(self._streams.find(stream))):
            self._enqueue_soon(operation, partial(self._open_port, self._streams.find(stream)))
        return operation

    def _issue_tree(
        self, operation: CollectiveFuture[Array], stream: Stream | str | None, timeout_s: float | None
    ) -> CollectiveFuture[Array]:
        """Issue one operation for the arrays of a tree, or one for each dtype that is reduced."""
        if operation.out is not None or operation.counts is not None:
            raise UsageError("x: a list or dict of arrays takes neither out= nor counts=; its results are new arrays")
        if operation.shared:
            raise UsageError("x: a list or dict of arrays cannot be shared; issue a call with shared=True for each")
        tree, arrays, thread = operation.input, self._context.arrays, self._context.thread
        made = packs(operation.kind, tree, self._group.size, arrays)
        parts = [operation, *(copy(operation) for _ in made[1:])]
        for part, pack in zip(parts, made, strict=True):
            part.input = pack.packed
        found: Derived[object] = Derived(parts, unpacked(tree, made, arrays), thread)
        for part in parts:
            self.issue(part, stream, timeout_s)
        return cast("CollectiveFuture[Array]", found)

    def send(
        self,
        operation: CollectiveFuture[Array],
        dst: int,
        tag: int,
        stream: Stream | str | None,
        timeout_s: float | None = None,
    ) -> CollectiveFuture[Array]:
        """Check and start the sender's end of a message."""
        if operation.input is None:
            raise UsageError("x: send needs an array, got None")
        check_peer(self._group, "dst", dst, tag)
        return self._start_message(operation, (self._group.rank, int(dst)), tag, stream, timeout_s)

    def receive(
        self,
        operation: CollectiveFuture[Array],
        like: object,
        src: int | None,
        tag: int,
        stream: Stream | str | None,
        timeout_s: float | None = None,
    ) -> Issued[Array]:
        """Check and start the receiver's end of a message, or wait for whoever sends one."""
        if src is None:
            return self._receive_any(operation, like, tag, stream, timeout_s)
        check_peer(self._group, "src", src, tag)
        operation.out = cast("Array", receive_like(like, self._context.arrays))  # until its memory is found
        return self._start_message(operation, (int(src), self._group.rank), tag, stream, timeout_s)

    def _receive_any(
        self,
        operation: CollectiveFuture[Array],
        like: object,
        tag: int,
        stream: Stream | str | None,
        timeout_s: float | None,
    ) -> AnyReceive:
        """Receive from whoever sends: the array is checked and locked now, and the source found later."""
        check_peer(self._group, "src", 0, tag)
        self._around.communicators.check_any_source()
        context, lane = self._context, self._streams.find(stream)
        operation.out = cast("Array", receive_like(like, context.arrays))
        self._prepare(operation, timeout_s)
        operation.deadline_s = None  # that of what is returned counts
        operation.lock()
        mine = self._group.rank
        keys = [Key(self._ranks, self._occurrence, "", src, mine, tag) for src in range(self._group.size)]

        def receive(src: int) -> None:
            self._enqueue(operation, self._message_port(True, (src, mine), tag, lane))

        found = AnyReceive(context, self._around.communicators, self._group, keys, operation, receive)
        found.deadline_s = timeout_s
        if get_ident() == context.thread:
            found.start()
        else:
            context.from_thread(found.start)
        return found

    def _start_message(
        self,
        operation: CollectiveFuture[Array],
        ends: tuple[int, int],
        tag: int,
        stream: Stream | str | None,
        timeout_s: float | None,
    ) -> CollectiveFuture[Array]:
        which = operation.input is None, ends, tag, self._streams.find(stream)
        self._prepare(operation, timeout_s)
        if get_ident() == self._context.thread:
            self._enqueue(operation, self._message_port(*which))
        else:
            self._enqueue_soon(operation, partial(self._message_port, *which))
        return operation

    def _prepare(self, operation: CollectiveFuture[Array], timeout_s: float | None) -> None:
        """Check what all operations have; nothing has happened yet if that raises."""
        context = self._context
        if context.ending.failure is not None:
            raise context.ending.peer_failed()
        if not isinstance(operation.priority, int):
            raise UsageError(f"priority: expected an integer, lower is more urgent, got {shown(operation.priority)}")
        if type(operation.exact) is not bool:
            raise UsageError(f"exact: expected True or False, got {shown(operation.exact)}")
        if type(operation.shared) is not bool:
            raise UsageError(f"shared: expected True or False, got {shown(operation.shared)}")
        if operation.insisted is not None:
            operation.insisted = self._checked_algorithm(operation)
        if timeout_s is not None:
            check_timeout(timeout_s)
            operation.deadline_s = timeout_s
        operation.group, operation.context, operation.step = self._group, context, context.step
        out = operation.out
        if out is not None and operation.shared:
            raise UsageError("out: a result that ranks share lies where all of them find it; pass out= or shared=True")
        if out is not None and not (type(out) is np.ndarray and out.flags.carray):
            operation.take_output()
        x = operation.input
        if not isinstance(x, Future):
            operation.prepare()
        elif is_elsewhere(x, context.thread):
            raise UsageError(f"x: {x.label} belongs to another world; pass its result")

    def _checked_algorithm(self, operation: CollectiveFuture[Array]) -> str | None:
        """Return the algorithm that is asked for; None for a rank that is alone, which needs none."""
        from ..collectives.select import check_algorithm_for  # and with it the generators

        size = self._group.size
        check_algorithm_for(operation.op, operation.insisted, size, exact=operation.exact)
        return operation.insisted if size > 1 else None

    def _enqueue(self, operation: CollectiveFuture[Array], port: Port) -> None:
        operation.port, lane = port, port.stream
        operation.seq = port.next_seq
        port.next_seq += 1
        operation.priority += lane.priority
        context = self._context
        operation.issued_ns = operation.started_ns = now_ns = context.now_ns()
        try:
            call: object = operation.call
        except AttributeError:  # its input is not there yet
            call = None
        operation.record = context.flight.issued(operation, port.known, call, operation.seq, now_ns)
        if operation.deadline_s is not None:
            context.expire(operation, operation.deadline_s)
        lane.enqueue(operation)

    def _enqueue_here(self, operation: CollectiveFuture[Array], port: Port | None) -> bool:
        """Issue from another thread what takes no task, if the loop sleeps; False if it is the loop's to do."""
        context = self._context
        if port is None or isinstance(operation.input, Future) or not context.handover.enter():
            return False
        try:
            here = (
                not context.closed
                and port.stream.has_room
                and not port.stream.listens
                and not context.deadlines.wakes(operation.deadline_s)
                and port.communicator.at_once(operation)
            )
            if here:
                self._enqueue(operation, port)
            return here
        finally:
            context.handover.leave()

    def _enqueue_soon(self, operation: CollectiveFuture[Array], find_port: Callable[[], Port]) -> None:
        """Issue from another thread: what it may not touch any more is locked at once, the rest is for the loop."""
        operation.lock()
        try:
            self._context.from_thread(self._enqueue_late, operation, find_port)
        except PeerFailedError:
            operation.release()
            raise

    def _enqueue_late(self, operation: CollectiveFuture[Array], find_port: Callable[[], Port]) -> None:
        if not self._context.closed:
            self._enqueue(operation, find_port())
            return
        operation.release()
        settle(operation, None, Failure(self._context.ending.peer_failed(), seen=True))
        tell(operation)

    def _open_port(self, stream: Stream | str | None) -> Port:
        known = self._streams.find(stream)
        port = self._opened.get(known)
        if port is None:
            key = Key(self._ranks, self._occurrence, known.name)
            communicator = self._around.communicator(key, self._group.name, self._ranks)
            port = communicator.port(self._context, known, self._group.rank)
            self._opened[known] = port
        self._ports[stream] = self._ports[known] = port
        return port

    def _message_port(self, receives: bool, ends: tuple[int, int], tag: int, stream: Stream) -> Port:
        """Return this end of the messages of one (source, destination, tag): strict FIFO, in no stream's window."""
        which = (receives, *ends, tag)
        kept = self._lasting.get(which)
        if kept is not None and not kept.communicator.closed and _goes_within(kept, stream):
            return kept
        src, dst = self._ranks[ends[0]], self._ranks[ends[1]]
        communicator = self._around.communicator(
            Key(self._ranks, self._occurrence, "", *ends, tag), self._group.name, (src, dst)
        )
        towards = (f" from rank {src}" if receives else f" to rank {dst}") + (f" with tag {tag}" if tag else "")
        port = communicator.message_port(self._context, stream, int(receives), towards)
        port.known = _remembered(self._messages, which, Known)
        if communicator.lasts:
            self._lasting.pop(which, None)
            _remembered(self._lasting, which, lambda: port)
        return port

    def abort(self, error: BaseException | str | None) -> None:
        """Abort the group, here and elsewhere."""
        rank, name = self._context.rank, self._group.name
        why = "" if error is None else f": {error if isinstance(error, str) else in_one_line(error)}"
        cause = error if isinstance(error, BaseException) else None
        message = f"group '{name}' was aborted by rank {rank}{why}"

        def aborted() -> GroupAbortedError:
            made = GroupAbortedError(message, culprit=rank)
            made.__cause__ = cause
            return made

        abort = partial(self._around.communicators.abort, self._ranks, self._occurrence, aborted)
        if get_ident() == self._context.thread:
            abort()
        else:
            self._context.from_thread(abort)

    def preferring(self, stream: Stream) -> Issuer:
        """Return one that issues the same group's operations, those that name no stream on this one."""
        other = copy(self)
        other._streams, other._ports = self._streams.preferring(stream), {}
        return other

    # -- what calls ask ----------------------------------------------------------------------------------------

    @property
    def thread(self) -> int:
        """Ident of the event loop's thread."""
        return self._context.thread

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return self._group.size

    def is_rank(self, root: int) -> bool:
        """Whether this rank is the root of a call.

        Raises:
            UsageError: If there is no such rank.
        """
        check_rank(self._group, "root", root)
        return root == self._group.rank

    def check_rank(self, argument: str, rank: int) -> None:
        """Raise `UsageError` unless it is a rank of the group."""
        check_rank(self._group, argument, rank)

    def check_count(self, argument: str, values: object) -> None:
        """Raise `UsageError` unless there is one for each rank."""
        check_one_a_rank(self._group, argument, values)


def _remembered(known: dict[_Ends, T], which: _Ends, make: Callable[[], T]) -> T:
    """Return what is known of some messages, made anew if nothing is; the oldest are forgotten."""
    found = known.get(which)
    if found is None:
        if len(known) >= _PEERS:
            del known[next(iter(known))]
        found = known[which] = make()
    return found


def _goes_within(port: Port, stream: Stream) -> bool:
    """Whether what is issued on a stream may take the lane of some messages: it is the stream's, or in use."""
    lane = port.stream
    return isinstance(lane, MessageLane) and (lane.within is stream or not lane.idle)
