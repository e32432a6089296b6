"""Collectives between processes of one host, out of each other's memory, run by the engine of the process.

The engine is compiled code (`transports/shared_memory/native`): it executes a table of ranges to read from each rank,
which is made here, without Python, in a thread of its own or in one that waits. Other operations, such as sums of 8-bit
floats, travel as programs.
Cost: each input is read once by every rank that needs it, and each result written once; one to three meetings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from math import prod
from threading import get_ident
from typing import TYPE_CHECKING, cast

import numpy as np

from transports import LinkLostError, PlainSignature, SignatureMismatchError, Transport
from transports.base import OPERATIONS
from transports.patience import Patience
from transports.shared_memory import engine
from transports.shared_memory.board import Board

from ...collectives.call import Call
from ...collectives.kinds import Collective
from ...collectives.reduce import Reducer
from ...defaults import SLICED_BYTES
from ..communicator import Communicator
from ..handover import Handover, OperationRun
from ..match import CHANNEL_BITS, Match
from ..memory.arrays import held
from ..operation import Operation
from ..plan import CallPlan
from ..state import MATCHING
from .host_bytes import address_of, array_at
from .pulls import Pull, collecting_pulls, gives, needed_positions, pulls, reduced_slice, result_pulls, rings, unread
from .workers import Workers

if TYPE_CHECKING:  # not there without a compiler
    from transports.shared_memory.engine import Engine, Run, Table

# Flags of a table, see native/collectives.c.
_GIVES, _RINGS, _SLICES, _SHARED, _FROM_ONE, _NEEDS_ALL, _LOOKS = 1, 2, 4, 8, 16, 32, 64
# Reductions with partial results of another dtype than the result, by number in native/arithmetic.c.
_NARROW = {"float16": 1, "bfloat16": 2}
_MEANS = {"i": 3, "u": 4}


class HostMemory:
    """Plans of operations with ranks in several processes of this host.

    Args:
        transport: Transport, with the memory that ranks share.
        workers: Threads that do large work of one process.
        program: Chooses a program, if ranks turn out to have no space for a board.

    Attributes:
        patience: Time for which the loop looks before it sleeps.
        given: Numbers and tags of the last operations in which a rank here only gave, by communicator and position.
    """

    program: Callable[[Communicator, Call, Operation], CallPlan]

    def __init__(
        self, transport: Transport, workers: Workers, program: Callable[[Communicator, Call, Operation], CallPlan]
    ) -> None:
        self._transport, self._workers, self.program = transport, workers, program
        self._boards: dict[Communicator, Board | None] = {}
        self.given: dict[Communicator, dict[int, deque[tuple[int, int]]]] = {}
        self.patience: Patience = Patience(0.0)

    def plan(self, communicator: Communicator, call: Call, operation: Operation) -> HostPlan | None:
        """Return the plan of one rank's operations with a call; None if the engine cannot run it."""
        if communicator not in self._boards:
            self._boards[communicator] = self._open(communicator, operation)
        board = self._boards[communicator]
        if board is None or not (call.reducer is None or _reducer(call.reducer, call.size)):
            return None
        return HostPlan(self, communicator, board, call, communicator.members.index(operation.context.rank))

    def unmet(self, communicator: Communicator) -> Iterator[tuple[int, int, PlainSignature]]:
        """Yield rows that ranks here have not read, and that are of other calls; as `BaseEngine.unmet`."""
        board, members, tag_base = self._boards.get(communicator), communicator.members, communicator.history.id << 24
        if board is None or not (board.ready and board.usable) or board.lost is not None:
            return
        for position, given in self.given.get(communicator, {}).items():
            last = given[-1][0] if given else 0
            for seq, own_tag in list(given):
                tags = {other: board.row_tag(other, seq) for other in range(len(members)) if other != position}
                if all(tags.values()) or seq <= last - OPERATIONS:
                    given.remove((seq, own_tag))
                for other in [other for other, tag in tags.items() if tag and tag >> 24 != own_tag >> 24]:
                    with suppress(LinkLostError):  # invalid data: operations that read it fail
                        theirs = board.row_signature(other, seq)
                        yield tag_base | (seq & 0xFFFF) << CHANNEL_BITS, members[other], theirs

    def close(self, communicator: Communicator) -> None:
        """Free the memory of a communicator that no rank of this process uses any more."""
        board = self._boards.pop(communicator, None)
        self.given.pop(communicator, None)
        if board is not None:
            board.close()

    def _open(self, communicator: Communicator, operation: Operation) -> Board | None:
        """Return the board of a communicator on this host; None if there is none."""
        if operation.port.stream.window > OPERATIONS // 2:
            return None
        board = self._transport.board(communicator.key.tag_base(), communicator.members)
        if board is not None:
            self._workers.share(board.processes)
            self.patience = Patience(board.look_s)
        return board


class HostPlan(CallPlan):
    """Runs the operations of one rank, at a group position, out of the memory of the processes of this host.

    Args:
        communicator: Of the group and stream.
        board: Memory in which the group's ranks meet.
        call: The call.
    """

    memory: HostMemory
    communicator: Communicator
    board: Board
    call: Call
    position: int
    engine: Engine
    submit: Callable[..., Run | None] | None

    def __init__(self, memory: HostMemory, communicator: Communicator, board: Board, call: Call, position: int) -> None:
        self.memory, self.communicator, self.board = memory, communicator, board
        self.call, self.position = call, position
        self.lasts: bool = not call.counts  # uneven blocks seldom repeat
        self.takes_memory: bool = not call.shared
        self.tag_base: int = communicator.key.tag_base(*call.key)  # a row shows whether its rank issued this call
        given = memory.given.setdefault(communicator, {}).setdefault(position, deque(maxlen=OPERATIONS))
        self.noted: deque[tuple[int, int]] = given
        self.gives_only: bool = not call.receives_at(position)
        self._pending: HostRun | None = None  # started by `finish_now`

    def __str__(self) -> str:
        return "memory of this host, one result" if self.call.shared else "memory of this host"

    @cached_property
    def table(self) -> Table:
        """Table for the engine."""
        return _table(self.call, self.position)

    @cached_property
    def input_bytes(self) -> int:
        """Bytes of the input of a rank that has one."""
        return 0 if self.call.dtype is None else prod(self.call.shape or ()) * self.call.dtype.itemsize

    def takes_threads(self) -> bool:
        """Whether the board is ready for use; before, it takes a task."""
        board = self.board
        return board.ready and board.usable and board.lost is None

    def finish_now(self, operation: Operation) -> bool:
        """Begin, and end if all needed ranks have arrived, and no error occurs."""
        board = self.board
        if not (board.ready and board.usable and board.lost is None):
            return False
        run = HostRun(self, operation)
        try:
            run.submit()
        except Exception:  # no memory: `start` raises the error
            return False
        if self.submit is None and self.takes_memory:
            self.engine, self.submit = board.engine, board.submitter(self.table)
        if run.run is None or run.run.state != engine.DONE:
            self._pending = run
            return False
        if self.call.shared:
            run.take_result()
        if self.gives_only or self.noted:
            self.record_end(operation)
        operation.finish(operation.context.now_ns(), operation.describe(self.call, operation.started_ns))
        return True

    def make_spare(self, operation: Operation) -> OperationRun:
        """Return an end in the engine, to be used again and again."""
        return HostRun(self, operation)

    def record_end(self, operation: Operation) -> None:
        """Note an operation in which the rank only gave; with another, compare the calls of the others in those.

        A rank that only gives reads no row, and rows are soon used again.
        """
        if self.gives_only:
            self.noted.append((operation.seq, self.tag_base))
        elif self.noted:
            for tag, src, theirs in list(self.memory.unmet(self.communicator)):
                compare = partial(self.communicator.compare_unmet, tag >> CHANNEL_BITS & 0xFFFF, src, theirs)
                if get_ident() == operation.context.thread:
                    compare()
                else:
                    operation.context.from_thread(compare)

    def start(self, match: Match, operation: Operation) -> None:
        """Begin as soon as the board is ready, unless `finish_now` has begun."""
        run, self._pending = self._pending, None
        if run is not None and run.operation is operation:
            run.wait(match)
            return
        run = HostRun(self, operation)
        run.wait(match)
        if self.board.ready or self.board.lost is not None:
            run.begin()
        else:
            self.board.open(self.position, run.begin)

    def look(self, match: Match, operation: Operation) -> bool:
        """Let an operation without an array wait for the row of another rank, unless the board is not ready."""
        if not self.takes_threads():
            return False
        run = HostLook(self, operation)
        run.wait(match)
        run.begin()
        return True


class HostRun(OperationRun):
    """One rank's end of an operation in the engine; also the operation's `scope`."""

    __slots__ = ("_match", "_over", "_plan")

    def __init__(self, plan: HostPlan, operation: Operation) -> None:
        self._plan, self.operation = plan, operation
        self._match: Match | None = None
        self.run: Run | None = None
        self._over = False
        self.memory: object = None

    # -- beginning -----------------------------------------------------------------------------------------------------

    def wait(self, match: Match) -> None:
        """Wait for the end of a matched operation; the loop's thread, or one in its place."""
        self._match = match
        self.operation.start_moving(self)
        self.operation.poll = self.look_before_sleeping
        self.on_end()  # the engine reports no end before `submit` returns

    def match_late(self) -> None:
        """Match the operation with its communicator, and end it if the engine has; the loop's thread only."""
        plan, operation = self._plan, self.operation
        if operation.state is MATCHING:
            plan._pending = self
            plan.communicator.arrive(operation, plan)
            context = operation.context
            if operation.deadline_s is not None and not operation.done:
                context.deadlines.add(operation, operation.deadline_s)
        if self._match is None:  # it has failed
            plan._pending = None
            self.cancel()

    def begin(self) -> None:
        """Submit the operation, now that the board is ready or lost; the loop's thread, or one in its place."""
        if self._over:
            return
        board = self._plan.board
        if not board.ready:  # and never will be
            self._settle(self._error(engine.LOST))
            return
        if not board.usable:
            self._fall_back()
            return
        try:
            self.submit()
        except Exception as error:
            self._settle(error)
            return
        self.on_end()

    def submit(self) -> None:
        """Let the engine start with the memory or the arrays of the operation."""
        plan, operation = self._plan, self.operation
        number, home, waited_for = operation.seq, 0, False
        if operation.memory is not None:
            source, target, self.memory, waited_for = operation.memory
        else:
            source, target, home = self._find_arrays()
        signature = plan.signature if plan.place == operation.place else plan.sign(operation.place)
        self.run = plan.board.submit(
            plan.table, self, number, plan.tag_base + ((number & 0xFFFF) << 8), source, target, operation.priority,
            plan.input_bytes, home, signature=signature, waited_for=waited_for,
        )  # fmt: skip

    def _find_arrays(self) -> tuple[int, int, int]:
        """Return the addresses of the input, of the result, and of the memory for a result that all share.

        A missing one is 0: the operation has no such array, or another rank provides the memory.
        """
        plan, operation = self._plan, self.operation
        call, home = plan.call, 0
        if call.shared:
            nbytes = prod(call.result_at(plan.position)) * cast("np.dtype[np.generic]", call.dtype).itemsize
            if nbytes and operation.seq % call.size == plan.position:  # the turn of this rank to provide the memory
                home = plan.board.loan_to_all(nbytes) or 0
        else:
            operation.fit(call)
        source, target = self.memory = operation.source, operation.target
        start = 0 if source is None else address_of(source)
        return start, 0 if target is None or call.shared else address_of(target), home

    # -- waiting -------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> int:
        """State of the end in the engine."""
        return engine.PENDING if self.run is None else self.run.state

    def look_before_sleeping(self) -> None:
        """Wait for a moment, on the loop's thread, before a task sleeps until the end of the operation.

        If other ranks live in this process, they may be the missing ones, and it is their turn.
        """
        if self.run is None or self._over:
            return
        patience = self._plan.memory.patience
        if self.run.state == engine.PENDING and self._plan.communicator.here == 1 and (look_s := patience.take()) > 0:
            patience.learn(came=self._plan.board.engine.wait(self.run, look_s, look_s) != engine.PENDING)
        self.on_end()

    def look_here(self, handover: Handover, longest_s: float | None) -> None:
        """Wait, in a thread that waits for the operation, without the interpreter; then end it in the loop's place."""
        run, board = self.run, self._plan.board
        if run is not None:
            handover.wait_in_engine(
                lambda limit_s: board.engine.wait(run, limit_s, board.look_s) != engine.PENDING,
                longest_s,
                self._ended_in_place,
                self.on_end,
            )

    def _ended_in_place(self) -> bool:
        """Whether the engine has ended the operation, so that this thread may end it without the event loop."""
        if self.operation.end_wakes_loop or self.run is None or self.run.state != engine.DONE:
            return False
        self.on_end()
        return True

    # -- ending --------------------------------------------------------------------------------------------------------

    def on_end(self) -> None:
        """End the operation if the engine has ended it; the loop's thread, or one in its place."""
        state = self.state
        if self._over or self._match is None or state == engine.PENDING:
            return
        if state == engine.CANCELLED:
            self._close()
            self.operation.stopped()
            self._plan.communicator.ended(self._match, self.operation)
        elif state == engine.HOMELESS:
            self._fall_back()
        elif state != engine.DONE:
            self._settle(self._error(state))
        elif self.operation.end_wakes_loop and get_ident() != self.operation.context.thread:
            self.operation.context.from_thread(self.on_end)
        else:
            self._settle(None)

    def _settle(self, error: BaseException | None) -> None:
        """End the operation with the result of the engine, or with an error."""
        assert self._match is not None, "this is a bug in overlap: an operation ends before its match"
        if error is None:
            try:
                self.take_result()
            except Exception as raised:
                error = raised
        if error is None:
            self._plan.record_end(self.operation)
        self._close()
        self.operation.stopped()
        self._plan.communicator.settle(self._match, self.operation, error)

    def take_result(self) -> None:
        """Set the shared result of the operation, at the address that the engine has found."""
        plan = self._plan
        if not plan.call.shared or self.operation.done:
            return
        dtype, shape = cast("np.dtype[np.generic]", plan.call.dtype), plan.call.result_at(plan.position)
        nbytes, owner = prod(shape) * dtype.itemsize, self.operation.seq % plan.call.size
        if not nbytes:
            self.operation.out = self.operation.target = np.empty(shape, dtype)
            return
        assert self.run is not None, "this is a bug in overlap: a result before its operation"
        home = self.run.home
        release = plan.board.make_release(plan.position, owner, home, nbytes)
        self.operation.out = held(plan.board.loan_view(owner, home, nbytes).toreadonly(), shape, dtype, release)
        self.operation.target = self.operation.out

    def _error(self, state: int) -> BaseException:
        """Return the error of a state in which the engine has ended an operation."""
        if state == engine.NO_MEMORY:
            return MemoryError(
                f"{self.operation.label}: there is no memory for its pieces; use smaller arrays, or fewer at once"
            )
        if state == engine.CORRUPT:
            return LinkLostError(
                "a process of this host wrote invalid data into its board; install the same overlap for all processes"
            )
        if state == engine.MISMATCH:
            assert self.run is not None, "this is a bug in overlap: a mismatch without an operation"
            position, members = self.run.position, self._plan.communicator.members
            try:
                theirs = self._plan.board.row_signature(position, self.operation.seq)
            except LinkLostError as error:
                return error
            return SignatureMismatchError(theirs, src=members[position], dst=members[self._plan.position], tag=0)
        return LinkLostError(self._plan.board.lost or "the memory of a process of this host cannot be read")

    def _fall_back(self) -> None:
        """Let a program run the operation, which takes tasks."""
        context, communicator = self.operation.context, self._plan.communicator
        if get_ident() != context.thread:
            context.from_thread(self._fall_back)
            return
        if self._over:
            return
        if self.operation.memory is not None:
            self._use_arrays()
        self._close()
        self.operation.scope = None
        if not self.operation.done:
            assert self._match is not None, "this is a bug in overlap: an operation falls back before its match"
            plan = self._plan.memory.program(communicator, self._plan.call, self.operation)
            communicator.start_end(self._match, self.operation, plan)

    def _use_arrays(self) -> None:
        """Make arrays, which a program needs, for memory that was submitted without any."""
        call, operation = self._plan.call, self.operation
        assert operation.memory is not None, "this is a bug in overlap: an operation without memory has no arrays"
        source, target, operation.caller_out, _ = operation.memory  # the owner is held as long as arrays are in use
        operation.memory = None
        if source:
            operation.input = operation.source = array_at(source, call.shape or (), call.dtype)
        if target:
            same = target == source and call.kind is Collective.ALL_REDUCE
            out = operation.source if same else array_at(target, call.result_at(self._plan.position), call.dtype)
            operation.out = out

    def cancel(self) -> None:
        """End, once no memory of this rank is touched any more."""
        if self._over or (self.run is not None and not self._plan.board.engine.cancel(self.run)):
            return
        self._close()
        self.operation.stopped()
        if self._match is not None:
            self._plan.communicator.ended(self._match, self.operation)

    def _close(self) -> None:
        """Take the operation from the board, and release its memory."""
        self._over = True
        if self.run is not None and self.run.queued:  # a thread has waited for it
            self._plan.board.engine.forget(self.run)
        self.memory = None


class HostLook(HostRun):
    """Wait of a rank without an array for the row of the root; it posts none."""

    __slots__ = ()

    def submit(self) -> None:
        """Let the engine look for the row."""
        plan, operation = self._plan, self.operation
        tag = (operation.seq & 0xFFFF) << CHANNEL_BITS  # of no call: every row is of another one
        self.run = plan.board.submit(
            _looking_table(plan.position, plan.call.size, plan.call.root), self, operation.seq, tag, 0, 0,
            operation.priority, 0, 0, signature=plan.sign(operation.place),
        )  # fmt: skip

    def _settle(self, error: BaseException | None) -> None:
        """Start the operation with the call of the row that the engine has found."""
        if not isinstance(error, SignatureMismatchError):
            super()._settle(error)
            return
        assert self._match is not None, "this is a bug in overlap: an operation ends before its match"
        self._close()
        self.operation.stopped()
        self._plan.communicator.learn(self._match, self.operation, error)


# -- tables ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _reducer(reducer: Reducer, size: int) -> tuple[object, object, int, int, bytes, int] | None:
    """Return a reducer for the engine: numpy's loops, and the divisor; None if the engine cannot run it."""
    dtype, kind = reducer.dtype, reducer.accumulator
    narrow = _NARROW.get(dtype.name, 0) or (_MEANS.get(dtype.kind, 0) if reducer.divides else 0)
    if not (isinstance(reducer.combine, np.ufunc) and (reducer.plain or narrow)):  # the engine runs numpy's loops only
        return None
    divides = reducer.divides and kind.kind in "fc"
    divisor = np.array(size, kind).tobytes() if divides else b""
    packed = reducer.combine, np.true_divide if divides else None, kind.num, dtype.itemsize, divisor, narrow
    try:
        engine.Table(0, size, 0, 0, 0, (0, 0), bytes(size), [], [], [], packed)
    except (LookupError, ValueError, TypeError):
        return None
    return packed


@lru_cache(maxsize=256)
def _looking_table(position: int, size: int, root: int) -> Table:
    """Return the table of a rank that moves nothing, and waits for the row of the root."""
    needed = bytes(rank == root for rank in range(size))
    return engine.Table(position, size, _LOOKS, 0, 0, (0, 0), needed, [], [], [], None)


def _table(call: Call, position: int) -> Table:
    """Return the ranges that the rank at a position reads from each rank, in bytes."""
    itemsize = 1 if call.dtype is None else call.dtype.itemsize
    count = prod(call.shape or ()) if call.dtype is not None else 0
    nbytes = count * itemsize
    sums = call.kind is Collective.ALL_REDUCE and not call.shared
    ranges = result_pulls(call, position) if call.shared else list(pulls(call, position)) if count else []
    gets = any(pull.size for pull in ranges) or call.shared
    result_bytes = prod(call.result_at(position)) * itemsize if gets else 0
    sources, (start, stop) = needed_positions(call, position), unread(call, position)
    if sums and call.size > 2 and nbytes >= SLICED_BYTES:
        own = reduced_slice(call, position)
        start, stop = own.start, own.start + own.size
    flags = _NEEDS_ALL if sources is None else 0
    flags |= _GIVES if gives(call, position) and (sums or call.kind is Collective.ALL_REDUCE or not call.shared) else 0
    flags |= _RINGS if rings(call, position) else 0
    flags |= _SLICES if sums else 0
    flags |= _SHARED if call.shared else 0
    flags |= _FROM_ONE if call.kind in (Collective.BROADCAST, Collective.SCATTER) else 0
    slices = ([reduced_slice(call, position)], collecting_pulls(call)) if sums else ([], [])
    return engine.Table(
        position,
        call.size,
        flags,
        nbytes,
        result_bytes,
        (start * itemsize, stop * itemsize),
        bytes(sources is None or other in sources for other in range(call.size)),
        _in_bytes(ranges, itemsize),
        _in_bytes(slices[0], itemsize),
        _in_bytes(slices[1], itemsize),
        None if call.reducer is None else _reducer(call.reducer, call.size),
    )


def _in_bytes(ranges: Sequence[Pull], itemsize: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Return pulls in bytes, without empty ones."""
    return [
        (start * itemsize, size * itemsize, [(rank, at * itemsize) for rank, at in sources])
        for start, size, sources in ranges
        if size
    ]
