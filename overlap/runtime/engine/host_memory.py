"""Collectives between processes of one host, out of each other's memory, run by the engine of the process.

The engine is compiled code (`transports/shared_memory/native`). For each operation it executes a table, made here, of
the ranges to read from each rank. It runs without Python, in a thread of its own or in one that waits. Operations that
the engine lacks, such as sums of 8-bit floats, run as programs.

The ranks of a group meet on a board: memory with a row for each rank and operation, in which the rank writes its call
and the address of its input.

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
from .pulls import Pull, collecting_pulls, is_read, needed_positions, pulls, reduced_slice, result_pulls, unread_range
from .workers import Workers

if TYPE_CHECKING:  # not there without a compiler
    from transports.shared_memory.engine import Run, Table

# Flags of a table, see native/collectives.c.
_GIVES, _RINGS, _SLICES, _SHARED, _FROM_ONE, _NEEDS_ALL, _LOOKS = 1, 2, 4, 8, 16, 32, 64
# Reductions whose partial results have another dtype than the result: their numbers in native/arithmetic.c.
_NARROW = {"float16": 1, "bfloat16": 2}
_MEANS = {"i": 3, "u": 4}


class HostMemory:
    """Makes the plans of operations with ranks in several processes of this host.

    Args:
        transport: Transport, which has the memory that processes share.
        workers: Worker threads of this process.
        program: Makes the plan of a call as a program, for ranks that have no memory for a board.

    Attributes:
        patience: Time for which the event loop polls before it sleeps.
        unread: By communicator and position of a rank of this process: (number, tag) of the last operations in which
            the rank read no other row, because other ranks only read its input.
    """

    def __init__(
        self, transport: Transport, workers: Workers, program: Callable[[Communicator, Call, Operation], CallPlan]
    ) -> None:
        self._transport, self._workers = transport, workers
        self.program = program
        self._boards: dict[Communicator, Board | None] = {}
        self.unread: dict[Communicator, dict[int, deque[tuple[int, int]]]] = {}
        self.patience: Patience = Patience(0.0)

    def plan(self, communicator: Communicator, call: Call, operation: Operation) -> HostPlan | None:
        """Return the plan of one rank's operations with a call, or None if the engine cannot run the call.

        The first call of a communicator opens the communicator's board. Arguments: see `BaseEngine.plan`.
        """
        if communicator not in self._boards:
            self._boards[communicator] = self._open(communicator, operation)
        board = self._boards[communicator]
        if board is None or (call.reducer is not None and _packed_reducer(call.reducer, call.size) is None):
            return None
        return HostPlan(self, communicator, board, call, communicator.members.index(operation.context.rank))

    def unmet(self, communicator: Communicator) -> Iterator[tuple[int, int, PlainSignature]]:
        """Yield rows of other ranks that differ from the call of a rank here, which has not read them.

        Yields:
            Tag of the operation, world rank that wrote the row, and signature of its call; see `BaseEngine.unmet`.
        """
        board, members, tag_base = self._boards.get(communicator), communicator.members, communicator.history.id << 24
        if board is None or not (board.ready and board.usable) or board.lost is not None:
            return
        for position, unread in self.unread.get(communicator, {}).items():
            last, _ = unread[-1] if unread else (0, 0)
            for seq, own_tag in list(unread):
                tags = {other: board.row_tag(other, seq) for other in range(len(members)) if other != position}
                # All other ranks have written their rows, or have used them again for later operations.
                if all(tags.values()) or seq <= last - OPERATIONS:
                    unread.remove((seq, own_tag))
                # The upper 40 bits of a tag identify the call; tag 0: the rank has not written the row.
                differing = [other for other, tag in tags.items() if tag and tag >> 24 != own_tag >> 24]
                for other in differing:
                    with suppress(LinkLostError):  # invalid data in the row: operations that read it fail
                        theirs = board.row_signature(other, seq)
                        yield tag_base | (seq & 0xFFFF) << CHANNEL_BITS, members[other], theirs

    def close(self, communicator: Communicator) -> None:
        """Free the board of a communicator that no rank of this process uses any more."""
        board = self._boards.pop(communicator, None)
        self.unread.pop(communicator, None)
        if board is not None:
            board.close()

    def _open(self, communicator: Communicator, operation: Operation) -> Board | None:
        """Open and return the board of a communicator, or return None if it cannot have one.

        That is the case if a member is on another host, if there is no memory for a board, or if the window of the
        stream allows more operations in flight than a board has rows for.
        """
        if operation.port.stream.window > OPERATIONS // 2:  # see `runtime/stream.py` on windows and spans
            return None
        board = self._transport.board(communicator.key.tag_base(), communicator.members)
        if board is not None:
            self._workers.limit_threads(board.processes)
            self.patience = Patience(board.look_s)
        return board


class HostPlan(CallPlan):
    """Runs the operations of one rank with one call, out of the memory of the processes of this host.

    Args:
        memory: Maker of the plan.
        communicator: Communicator of the group and stream.
        board: Memory in which the group's ranks meet.
        call: The call.
        position: Group rank.

    Attributes:
        takes_memory: Whether an operation may be issued with addresses in place of arrays (`Operation.memory`).
        tag_base: Tag of the call in rows: a row of a rank shows by it whether the rank issued this call.
        gives_only: Whether other ranks only read this rank's input, and it receives nothing.
        noted: (number, tag) of operations in which the rank read no row; see `HostMemory.unread`.
    """

    def __init__(self, memory: HostMemory, communicator: Communicator, board: Board, call: Call, position: int) -> None:
        super().__init__(call)
        self.memory = memory
        self.communicator = communicator
        self.board = board
        self.position = position
        self.lasts: bool = not call.counts  # uneven blocks seldom repeat
        self.takes_memory: bool = not call.shared
        self.tag_base: int = communicator.key.tag_base(*call.key)
        unread = memory.unread.setdefault(communicator, {}).setdefault(position, deque(maxlen=OPERATIONS))
        self.noted: deque[tuple[int, int]] = unread
        self.gives_only: bool = not call.receives_at(position)
        self._started_early: HostRun | None = None  # run that `finish_now` has started, before the match exists

    def __str__(self) -> str:
        return "memory of this host, one result" if self.call.shared else "memory of this host"

    @cached_property
    def table(self) -> Table:
        """Ranges to read, for the engine; see `_table`."""
        return _table(self.call, self.position)

    @cached_property
    def input_bytes(self) -> int:
        """Bytes of a rank's input; 0 for a call without data."""
        return 0 if self.call.dtype is None else prod(self.call.shape or ()) * self.call.dtype.itemsize

    def takes_threads(self) -> bool:
        """Whether the board is ready, so that operations need no task."""
        return self.board.ready and self.board.usable and self.board.lost is None

    def finish_now(self, operation: Operation) -> bool:
        """Start the operation, and finish it if all ranks that it needs have arrived.

        Return whether it has finished well. If not, `start` continues what was started here.
        """
        board = self.board
        if not (board.ready and board.usable and board.lost is None):
            return False
        run = HostRun(self, operation)
        try:
            run.submit()
        except Exception:  # such as lack of memory: `start` tries again, and reports the error
            return False
        if self.submit is None and self.takes_memory:
            self.engine, self.submit = board.engine, board.submitter(self.table)
        if run.run is None or run.run.state != engine.DONE:
            self._started_early = run
            return False
        if self.call.shared:
            run.set_shared_result()
        if self.gives_only or self.noted:
            self.record_end(operation)
        operation.finish(operation.context.now_ns(), operation.describe(self.call, operation.started_ns))
        return True

    def make_spare(self, operation: Operation) -> OperationRun:
        """Return a run that serves `operation`, and is used again for later operations of the same call."""
        return HostRun(self, operation)

    def record_end(self, operation: Operation) -> None:
        """Record the end of an operation, so that differing calls are found even in operations that read no row.

        A rank whose input is only read by others cannot compare calls itself: note the operation. At the end of another
        operation, compare the rows of the noted ones, before these rows are used again.
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
        """Let the engine run the operation once all ranks have opened the board. See `CallPlan.start`.

        If `finish_now` has already started it, only attach the match.
        """
        run, self._started_early = self._started_early, None
        if run is not None and run.operation is operation:
            run.attach(match)
            return
        run = HostRun(self, operation)
        run.attach(match)
        if self.board.ready or self.board.lost is not None:
            run.begin()
        else:
            self.board.open(self.position, run.begin)

    def look(self, match: Match, operation: Operation) -> bool:
        """Let an operation without an array wait until another rank's row shows dtype and shape.

        Return False, and do nothing, if the board is not ready. See `BaseEngine.look`.
        """
        if not self.takes_threads():
            return False
        run = HostLook(self, operation)
        run.attach(match)
        run.begin()
        return True


class HostRun(OperationRun):
    """One rank's operation in the engine. It is also the operation's `scope`, by which the operation is cancelled.

    Args:
        plan: The plan of the operation.
        operation: The operation of the rank.

    Attributes:
        run: Handle of the operation in the engine; None before `submit`.
        memory: Keeps input and result alive while the engine uses them.
    """

    __slots__ = ("_match", "_over", "_plan")

    def __init__(self, plan: HostPlan, operation: Operation) -> None:
        self._plan, self.operation = plan, operation
        self._match: Match | None = None
        self.run: Run | None = None
        self._over = False
        self.memory: object = None

    # -- beginning -----------------------------------------------------------------------------------------------------

    def attach(self, match: Match) -> None:
        """Connect the run with the operation's match; from now on the run ends the operation.

        Called on the event loop's thread, or on a thread in its place.
        """
        self._match = match
        self.operation.start_moving(self)
        self.operation.poll = self.look_before_sleeping
        self.on_end()  # the engine may have finished already, in `submit`

    def match_late(self) -> None:
        """Match an operation that `submit` has started without a match. Called on the event loop's thread only."""
        plan, operation = self._plan, self.operation
        if operation.state is MATCHING:
            plan._started_early = self
            plan.communicator.arrive(operation, plan)
            context = operation.context
            if operation.deadline_s is not None and not operation.done:
                context.deadlines.add(operation, operation.deadline_s)
        if self._match is None:  # the operation has failed, so `start` has not attached a match
            plan._started_early = None
            self.cancel()

    def begin(self) -> None:
        """Submit the operation, or end it with an error if the board is lost.

        Called on the event loop's thread, or on a thread in its place.
        """
        if self._over:
            return
        board = self._plan.board
        if not board.ready:  # the board is lost
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
        """Start the operation in the engine, with its addresses (`Operation.memory`) or its arrays."""
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
        """Return the address of the input, the address of the result, and the offset of memory for a shared result.

        0 stands for none: the operation has no such array, or another rank provides the memory of the shared result.
        The offset counts from the start of the memory that this process shares with others.
        """
        plan, operation = self._plan, self.operation
        call, home = plan.call, 0
        if call.shared:
            nbytes = prod(call.result_at(plan.position)) * cast("np.dtype[np.generic]", call.dtype).itemsize
            # Ranks provide the memory in turn, so that each gives an equal part of its memory.
            if nbytes and operation.seq % call.size == plan.position:
                home = plan.board.loan_to_all(nbytes) or 0
        else:
            operation.fit(call)
        source, target = self.memory = operation.source, operation.target
        start = 0 if source is None else address_of(source)
        return start, 0 if target is None or call.shared else address_of(target), home

    # -- waiting -------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> int:
        """State of the operation in the engine: a constant of `engine`, such as `engine.PENDING`."""
        return engine.PENDING if self.run is None else self.run.state

    def look_before_sleeping(self) -> None:
        """Poll for a moment, on the event loop's thread, before a task sleeps until the end of the operation.

        If this process has other ranks of the group, do not poll: they may be the missing ones, and need the thread.
        """
        if self.run is None or self._over:
            return
        patience, alone = self._plan.memory.patience, self._plan.communicator.local_count == 1
        if self.run.state == engine.PENDING and alone and (look_s := patience.take()) > 0:
            patience.learn(came=self._plan.board.engine.wait(self.run, look_s, look_s) != engine.PENDING)
        self.on_end()

    def wait_here(self, handover: Handover, longest_s: float | None) -> None:
        """Wait for the operation in the calling thread, without the GIL, and end it in place of the event loop.

        See `OperationRun.wait_here`.
        """
        run, board = self.run, self._plan.board
        if run is not None:
            handover.wait_and_end(
                lambda limit_s: board.engine.wait(run, limit_s, board.look_s) != engine.PENDING,
                longest_s,
                self._end_in_place,
                self.on_end,
            )

    def _end_in_place(self) -> bool:
        """End the operation if the engine has finished it; return False if it has not, or only the loop may end it."""
        if self.operation.end_wakes_loop or self.run is None or self.run.state != engine.DONE:
            return False
        self.on_end()
        return True

    # -- ending --------------------------------------------------------------------------------------------------------

    def on_end(self) -> None:
        """End the operation if the engine has ended it; otherwise do nothing.

        Called on the event loop's thread, or on a thread in its place.
        """
        state = self.state
        if self._over or self._match is None or state == engine.PENDING:
            return
        if state == engine.CANCELLED:  # the operation has failed or was cancelled before: only count its end
            self._close()
            self._plan.communicator.ended(self._match, self.operation)
        elif state == engine.HOMELESS:  # no rank had memory for the shared result
            self._fall_back()
        elif state != engine.DONE:
            self._settle(self._error(state))
        elif self.operation.end_wakes_loop and get_ident() != self.operation.context.thread:
            self.operation.context.from_thread(self.on_end)
        else:
            self._settle(None)

    def _settle(self, error: BaseException | None) -> None:
        """End the operation with the engine's result, or if `error` is not None, with this error."""
        assert self._match is not None, "this is a bug in overlap: an operation ends before its match"
        if error is None:
            try:
                self.set_shared_result()
            except Exception as raised:
                error = raised
        if error is None:
            self._plan.record_end(self.operation)
        self._close()
        self._plan.communicator.settle(self._match, self.operation, error)

    def set_shared_result(self) -> None:
        """Set the result of a `shared=True` operation: a read-only array in the memory that one of the ranks loans.

        The owner of this memory is the rank whose turn it was (see `_find_arrays`). The loan is released once the array
        and all views of it are gone. Does nothing if the result is not shared.
        """
        plan = self._plan
        if not plan.call.shared or self.operation.done:
            return
        dtype, shape = cast("np.dtype[np.generic]", plan.call.dtype), plan.call.result_at(plan.position)
        nbytes, owner = prod(shape) * dtype.itemsize, self.operation.seq % plan.call.size
        if not nbytes:
            self.operation.out = self.operation.target = np.empty(shape, dtype)
            return
        assert self.run is not None, "this is a bug in overlap: a result before its operation"
        home = self.run.home  # offset of the result in the owner's memory
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
        """Run the operation as a program instead, because the engine cannot. Continues on the event loop's thread."""
        context, communicator = self.operation.context, self._plan.communicator
        if get_ident() != context.thread:
            context.from_thread(self._fall_back)
            return
        if self._over:
            return
        if self.operation.memory is not None:
            self._use_arrays()
        self._close()
        assert self._match is not None, "this is a bug in overlap: an operation falls back before its match"
        if self.operation.done:  # it has failed or was cancelled in the meantime
            communicator.ended(self._match, self.operation)
        else:
            plan = self._plan.memory.program(communicator, self._plan.call, self.operation)
            communicator.start_end(self._match, self.operation, plan)

    def _use_arrays(self) -> None:
        """Set the arrays of an operation that was issued with addresses, as a program needs arrays."""
        call, operation = self._plan.call, self.operation
        assert operation.memory is not None, "this is a bug in overlap: an operation without memory has no arrays"
        source, target, operation.caller_out, _ = operation.memory  # `caller_out` keeps the memory alive
        operation.memory = None
        if source:
            operation.input = operation.source = array_at(source, call.shape or (), call.dtype)
        if target:
            same = target == source and call.kind is Collective.ALL_REDUCE
            out = operation.source if same else array_at(target, call.result_at(self._plan.position), call.dtype)
            operation.out = out

    def cancel(self) -> None:
        """Cancel the operation in the engine, and end it once the engine no longer uses memory of this rank."""
        # `cancel` returns False if the engine is at work on the operation: it then reports the end later.
        if self._over or (self.run is not None and not self._plan.board.engine.cancel(self.run)):
            return
        self._close()
        if self._match is not None:
            self._plan.communicator.ended(self._match, self.operation)

    def _close(self) -> None:
        """Release the memory of the operation, and record that its bytes have stopped moving."""
        self._over = True
        # A waiting thread may have seen the end first: then remove it from the ends that the event loop has yet to see.
        if self.run is not None and self.run.queued:
            self._plan.board.engine.forget(self.run)
        self.memory = None
        self.operation.stopped()


class HostLook(HostRun):
    """Wait of a rank without an array for the row of the root. The rank writes no row of its own."""

    __slots__ = ()

    def submit(self) -> None:
        """Let the engine wait until the root has written its row."""
        plan, operation = self._plan, self.operation
        tag = (operation.seq & 0xFFFF) << CHANNEL_BITS  # without a call, so that every row differs from it
        self.run = plan.board.submit(
            _table_until_root_writes(plan.position, plan.call.size, plan.call.root), self, operation.seq, tag, 0, 0,
            operation.priority, 0, 0, signature=plan.sign(operation.place),
        )  # fmt: skip

    def _settle(self, error: BaseException | None) -> None:
        """Start the operation with the call in the root's row, which the engine reports as a mismatch."""
        if not isinstance(error, SignatureMismatchError):
            super()._settle(error)
            return
        assert self._match is not None, "this is a bug in overlap: an operation ends before its match"
        self._close()
        self._plan.communicator.start_by_row(self._match, self.operation, error)


# -- tables ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _packed_reducer(reducer: Reducer, size: int) -> tuple[object, object, int, int, bytes, int] | None:
    """Return a reducer in the form that the engine's tables take; None if the engine cannot run it.

    Args:
        reducer: The reducer.
        size: Number of ranks, by which a mean is divided.

    Returns:
        Six values: numpy's ufunc; the ufunc that divides, or None; the number of the accumulator's dtype; the item size
        of the arrays; the divisor as bytes; the number of the narrow dtype (`_NARROW`, `_MEANS`), or 0.
    """
    dtype, kind = reducer.dtype, reducer.accumulator
    narrow = _NARROW.get(dtype.name, 0) or (_MEANS.get(dtype.kind, 0) if reducer.divides else 0)
    if not (isinstance(reducer.combine, np.ufunc) and (reducer.plain or narrow)):  # the engine runs numpy's loops only
        return None
    divides = reducer.divides and kind.kind in "fc"
    divisor = np.array(size, kind).tobytes() if divides else b""
    packed = reducer.combine, np.true_divide if divides else None, kind.num, dtype.itemsize, divisor, narrow
    try:  # making a table without data shows whether the engine has these ufuncs for the dtype
        _table_without_data(0, size, needed=bytes(size), reducer=packed)
    except (LookupError, ValueError, TypeError):
        return None
    return packed


@lru_cache(maxsize=256)
def _table_until_root_writes(position: int, size: int, root: int) -> Table:
    """Return the table with which a rank reads no data, and only waits until the root has written its row."""
    needed = bytes(rank == root for rank in range(size))
    return _table_without_data(position, size, flags=_LOOKS, needed=needed)


def _table_without_data(
    position: int,
    size: int,
    *,
    flags: int = 0,
    needed: bytes,
    reducer: tuple[object, object, int, int, bytes, int] | None = None,
) -> Table:
    """Return a table without ranges to read.

    Args:
        position: Group rank.
        size: Number of ranks.
        flags: Sum of flags, such as `_LOOKS`.
        needed: A byte for each rank: 1 if the rank's row is waited for, else 0.
        reducer: Result of `_packed_reducer`, or None.
    """
    nbytes = result_bytes = 0
    unread = (0, 0)
    return engine.Table(position, size, flags, nbytes, result_bytes, unread, needed, [], [], [], reducer)


def _table(call: Call, position: int) -> Table:
    """Return the table of a rank: the ranges of bytes that the engine reads from each rank to make the result.

    The table of an all-reduce also has slices, unless the ranks have one shared result. The engine uses them for long
    arrays: each rank reduces its own slice, and then collects the slices of the other ranks.

    Args:
        call: The call.
        position: Group rank.
    """
    kind, itemsize = call.kind, 1 if call.dtype is None else call.dtype.itemsize
    nbytes = 0 if call.dtype is None else prod(call.shape or ()) * itemsize
    has_slices = kind is Collective.ALL_REDUCE and not call.shared
    own_slice = reduced_slice(call, position)
    ranges = result_pulls(call, position) if call.shared else pulls(call, position)
    has_result = call.shared or any(pull.size for pull in ranges)
    unread_start, unread_stop = unread_range(call, position)
    # With slices, other ranks read the whole input except the slice that this rank reduces.
    if has_slices and call.size > 2 and nbytes >= SLICED_BYTES:
        unread_start, unread_stop = own_slice.start, own_slice.start + own_slice.size
    needed = needed_positions(call, position)  # None: all
    gives, from_root = is_read(call, position), kind in (Collective.BROADCAST, Collective.SCATTER)
    conditions = {
        _NEEDS_ALL: needed is None,
        # Other ranks read this rank's input. In a shared result each rank writes its own part, except in an all-reduce.
        _GIVES: gives and (kind is Collective.ALL_REDUCE or not call.shared),
        # A rank may wait for this rank alone, so that this rank has to wake it.
        _RINGS: gives and (from_root or kind is Collective.PERMUTE),
        _SLICES: has_slices,
        _SHARED: call.shared,
        _FROM_ONE: from_root,
    }
    return engine.Table(
        position,
        call.size,
        sum(flag for flag, holds in conditions.items() if holds),
        nbytes,
        prod(call.result_at(position)) * itemsize if has_result else 0,
        (unread_start * itemsize, unread_stop * itemsize),
        bytes(needed is None or other in needed for other in range(call.size)),
        _in_bytes(ranges, itemsize),
        _in_bytes([own_slice] if has_slices else [], itemsize),
        _in_bytes(collecting_pulls(call) if has_slices else [], itemsize),
        None if call.reducer is None else _packed_reducer(call.reducer, call.size),
    )


def _in_bytes(ranges: Sequence[Pull], itemsize: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Return pulls as the engine takes them, in bytes and without empty ones: (start, size, [(rank, start), ...])."""
    return [
        (start * itemsize, size * itemsize, [(rank, at * itemsize) for rank, at in sources])
        for start, size, sources in ranges
        if size
    ]
