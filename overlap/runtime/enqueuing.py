"""From an operation that is checked to one that is under way: what all have, their numbers, and other threads' ways."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Protocol, Self, TypeAlias

import numpy as np

from ..collectives.reduce import Array
from ..errors import PeerFailedError, UsageError, shown
from ..flight.recorder import Known
from .communicator import Communicator
from .communicators import Communicators
from .context import RankContext
from .deadlines import check_timeout
from .future import Failure, Future, is_elsewhere, settle, tell
from .group_checks import check_one_a_rank, check_rank
from .match import Key
from .operation import CollectiveFuture, Lane, Port
from .request import Members
from .stream import Stream, Streams

Ends: TypeAlias = "tuple[bool, int, int, int]"  # whether this is the receiver's end; source, destination, tag
Asked: TypeAlias = "tuple[bool, int, int, Stream | str | None]"  # the same; peer, tag and stream, as a call names them


class Places(Protocol):
    """Where ranks meet."""

    def communicator(self, key: Key, name: str, members: tuple[int, ...]) -> Communicator:
        """Return where the members meet."""

    @property
    def communicators(self) -> Communicators:
        """Where all ranks meet."""


class Enqueuer:
    """Checks what all operations of one rank on one group have, numbers them, and hands them to their streams.

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
        around: Places,
        streams: Streams,
        group: Members,
        ranks: tuple[int, ...],
        occurrence: int,
    ) -> None:
        self._context, self._around, self._streams = context, around, streams
        self._group, self._ranks, self._occurrence = group, ranks, occurrence
        self._ports: dict[Stream | str | None, Port] = {}
        self._opened: dict[Stream, Port] = {}
        self._messages: dict[Ends, Known] = {}  # the calls that the flight record has words for
        self._lasting: dict[Asked, tuple[Port, Lane]] = {}  # of messages, and the lane that it had

    def preferring(self, stream: Stream) -> Self:
        """Return one that issues the same group's operations, those that name no stream on this one."""
        other = copy(self)
        other._streams, other._ports, other._lasting = self._streams.preferring(stream), {}, {}
        return other

    def _prepare(self, operation: CollectiveFuture[Array], timeout_s: float | None) -> None:
        """Check what all operations have; nothing has happened yet if that raises."""
        context = self._context
        if context.ending.failure is not None:
            raise context.ending.peer_failed()
        if not isinstance(operation.priority, int):
            raise UsageError(f"priority: expected an integer, lower is more urgent, got {shown(operation.priority)}")
        if operation.exact is not False or operation.shared is not False or operation.insisted is not None:
            self._check_options(operation)
        if timeout_s is not None:
            check_timeout(timeout_s)
            operation.deadline_s = timeout_s
        operation.group, operation.context, operation.step = self._group, context, context.step
        out, x = operation.out, operation.input
        if out is not None and not (type(out) is np.ndarray and out.flags.carray):
            operation.take_output()
        if not isinstance(x, Future):
            operation.prepare()
        elif is_elsewhere(x, context.thread):
            raise UsageError(f"x: {x.label} belongs to another world; pass its result")

    def _check_options(self, operation: CollectiveFuture[Array]) -> None:
        """Check what few operations have."""
        if type(operation.exact) is not bool:
            raise UsageError(f"exact: expected True or False, got {shown(operation.exact)}")
        if type(operation.shared) is not bool:
            raise UsageError(f"shared: expected True or False, got {shown(operation.shared)}")
        if operation.shared and operation.out is not None:
            raise UsageError("out: a result that ranks share lies where all of them find it; pass out= or shared=True")
        if operation.insisted is not None:
            from ..cost.select import check_algorithm_for  # and with it the generators

            size = self._group.size
            check_algorithm_for(operation.op, operation.insisted, size, exact=operation.exact)
            operation.insisted = operation.insisted if size > 1 else None  # a rank that is alone needs none

    def _enqueue(self, operation: CollectiveFuture[Array], port: Port) -> None:
        operation.port, lane = port, port.stream
        operation.seq = seq = port.next_seq
        port.next_seq = seq + 1
        operation.priority += lane.priority
        context = self._context
        operation.issued_ns = operation.started_ns = now_ns = context.now_ns()
        try:
            call: object = operation.call
        except AttributeError:  # its input is not there yet
            call = None
        operation.record = context.flight.issued(operation, port.known, call, seq, now_ns)
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
