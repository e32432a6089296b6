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
from ..communicator import Communicator
from ..handover import Handover, OperationRun
from ..match import CHANNEL_BITS, Match
from ..memory.arrays import array_in_loan
from ..operation import Operation
from ..plan import CallPlan
from ..state import MATCHING
from .host_bytes import array_at
from .pulls import (
    Pull,
    collecting_pulls,
    is_input_read,
    needed_positions,
    pulls,
    reduced_slice,
    shared_result_pulls,
    unread_input_range,
)
from .workers import Workers

if TYPE_CHECKING:  # not there without a compiler
    from transports.shared_memory.engine import Run, Table

# Flags of a table, see native/collectives.c.
_GIVES, _RINGS, _SLICES, _SHARED, _FROM_ONE, _NEEDS_ALL, _LOOKS, _ALWAYS_SLICES = 1, 2, 4, 8, 16, 32, 64, 128
# Slices cost a second meeting of all ranks. So inputs that are copied are only sliced from the first length on, if all
# ranks together then read at least so many bytes fewer as the second says.
_LEAST_SLICED_BYTES, _LEAST_SAVED_BYTES = 64 << 10, 8 << 20
# Reductions whose partial results have another dtype than the result: their numbers in native/arithmetic.c.
_NARROW = {"float16": 1, "bfloat16": 2}
_MEANS = {"i": 3, "u": 4}


class HostMemory:
    """Makes the plans of operations with ranks in several processes of this host.

    Args:
        transport: Transport, which has the memory that processes share.
        workers: Worker threads of this process.
        make_program_plan: Makes the plan of a call as a program, for ranks that have no memory for a board.

    Attributes:
        patience: Time for which the event loop polls before it sleeps.
        unread: By communicator and position of a rank of this process: (number, tag) of the last operations in which
            the rank read no other row, because other ranks only read its input.
    """

    def __init__(
        self,
        transport: Transport,
        workers: Workers,
        make_program_plan: Callable[[Communicator, Call, Operation], CallPlan],
    ) -> None:
        self._transport, self._workers = transport, workers
        self.make_program_plan = make_program_plan
        self._boards: dict[Communicator, Board | None] = {}
        self.unread: dict[Communicator, dict[int, deque[tuple[int, int]]]] = {}
        self.patience: Patience = Patience(0.0)

    def make_plan(self, communicator: Communicator, call: Call, operation: Operation) -> HostPlan | None:
        """Return the plan of one rank's operations with a call, or None if the engine cannot run the call.

        The first call of a communicator opens the communicator's board. Arguments: see `BaseEngine.make_plan`.
        """
        if communicator not in self._boards:
            self._boards[communicator] = self._open_board(communicator, operation)
        board = self._boards[communicator]
        if board is None or (call.reducer is not None and _packed_reducer(call.reducer, call.size) is None):
            return None
        return HostPlan(self, communicator, board, call, communicator.members.index(operation.context.rank))

    def find_differing_rows(self, communicator: Communicator) -> Iterator[tuple[int, int, PlainSignature]]:
        """Yield rows of other ranks that differ from the call of a rank here, which has not read them.

        Yields:
            Tag of the operation, world rank that wrote the row, and signature of its call; see
            `BaseEngine.unmet_signatures`.
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

    def close_board(self, communicator: Communicator) -> None:
        """Free the board of a communicator that no rank of this process uses any more."""
        board = self._boards.pop(communicator, None)
        self.unread.pop(communicator, None)
        if board is not None:
            board.close()

    def _open_board(self, communicator: Communicator, operation: Operation) -> Board | None:
        """Return the board, or None if the communicator cannot have one.

        The reasons: a member on another host, no memory, or a window with more operations in flight than a board has
        rows.
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
        self._started_early: HostRun | None = None  # run that `try_to_finish` has started, before the match exists

    def __str__(self) -> str:
        return "memory of this host, one result" if self.call.shared else "memory of this host"

    @cached_property
    def table(self) -> Table:
        """Ranges to read, for the engine; see `_make_table`."""
        return _make_table(self.call, self.position)

    @cached_property
    def input_bytes(self) -> int:
        """Bytes of a rank's input; 0 for a call without data."""
        return 0 if self.call.dtype is None else prod(self.call.shape or ()) * self.call.dtype.itemsize

    def runs_in_any_thread(self) -> bool:
        """Whether the board is ready, so that operations need no task."""
        return self.board.ready and self.board.usable and self.board.lost is None

    def try_to_finish(self, operation: Operation) -> bool:
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
            self.engine: engine.Engine = board.engine
            self.submit: Callable[..., Run | None] | None = board.make_submitter(self.table)
        if run.run is None or run.run.state != engine.DONE:
            self._started_early = run
            return False
        if self.call.shared:
            run.set_shared_result()
        if self.gives_only or self.noted:
            self.record_end(operation)
        operation.finish(operation.context.now_ns(), operation.describe_meeting(self.call, operation.started_ns))
        return True

    def make_spare_run(self, operation: Operation) -> OperationRun:
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
            for tag, src, theirs in list(self.memory.find_differing_rows(self.communicator)):
                compare = partial(self.communicator.compare_unmet_call, tag >> CHANNEL_BITS & 0xFFFF, src, theirs)
                if get_ident() == operation.context.thread:
                    compare()
                else:
                    operation.context.post_to_loop(compare)

    def start(self, match: Match, operation: Operation) -> None:
        """Let the engine run the operation once all ranks have opened the board. See `CallPlan.start`.

        If `try_to_finish` has already started it, only attach the match.
        """
        run, self._started_early = self._started_early, None
        if run is not None and run.operation is operation:
            run.attach_match(match)
            return
        run = HostRun(self, operation)
        run.attach_match(match)
        if self.board.ready or self.board.lost is not None:
            run.begin()
        else:
            self.board.open(self.position, run.begin)

    def learn_shape_from_row(self, match: Match, operation: Operation) -> bool:
        """Let an operation without an array wait until another rank's row shows dtype and shape.

        Return False, and do nothing, if the board is not ready. See `BaseEngine.watch_remote_call`.
        """
        if not self.runs_in_any_thread():
            return False
        run = HostShapeWait(self, operation)
        run.attach_match(match)
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

    __slots__ = ("_is_over", "_match", "_plan")

    def __init__(self, plan: HostPlan, operation: Operation) -> None:
        self._plan = plan
        self.operation: Operation = operation
        self._match: Match | None = None
        self.run: Run | None = None
        self._is_over = False
        self.memory: object = None

    # -- beginning -----------------------------------------------------------------------------------------------------

    def attach_match(self, match: Match) -> None:
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
        if self._is_over:
            return
        board = self._plan.board
        if not board.ready:  # the board is lost
            self._settle(self._make_error(engine.LOST))
            return
        if not board.usable:
            self._run_as_program()
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
            source, target, home = self._find_addresses()
        signature = plan.signature if plan.place == operation.place else plan.signature_at(operation.place)
        self.run = plan.board.submit(
            plan.table, self, number, plan.tag_base + ((number & 0xFFFF) << 8), source, target, operation.priority,
            plan.input_bytes, home, signature=signature, waited_for=waited_for,
        )  # fmt: skip

    def _find_addresses(self) -> tuple[int, int, int]:
        """Return the addresses of input and result, and the offset of a shared result in this process's shared memory.

        0 stands for none: there is no such array, or another rank provides the memory of the shared result.
        """
        plan, operation = self._plan, self.operation
        call, home = plan.call, 0
        if call.shared:
            nbytes = prod(call.result_shape_at(plan.position)) * cast("np.dtype[np.generic]", call.dtype).itemsize
            # Ranks provide the memory in turn, so that each gives an equal part of its memory.
            if nbytes and operation.seq % call.size == plan.position:
                home = plan.board.loan_to_all(nbytes) or 0
        else:
            operation.prepare_result(call)
        source, target = self.memory = operation.source, operation.target
        start = 0 if source is None else engine.address_of(source)
        return start, 0 if target is None or call.shared else engine.address_of(target), home

    # -- waiting -------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> int:
        """State of the operation in the engine: a constant of `engine`, such as `engine.PENDING`."""
        return engine.PENDING if self.run is None else self.run.state

    def look_before_sleeping(self) -> None:
        """Poll for a moment, on the event loop's thread, before a task sleeps until the end of the operation.

        If this process has other ranks of the group, do not poll: they may be the missing ones, and need the thread.
        """
        if self.run is None or self._is_over:
            return
        patience, alone = self._plan.memory.patience, self._plan.communicator.local_count == 1
        if self.run.state == engine.PENDING and alone and (look_s := patience.next_poll_s()) > 0:
            patience.record_poll(came=self._plan.board.engine.wait(self.run, look_s, look_s) != engine.PENDING)
        self.on_end()

    def wait_in_engine(self, handover: Handover, longest_s: float | None) -> None:
        """Wait for the operation in the calling thread, without the GIL, and end it in place of the event loop.

        See `OperationRun.wait_in_engine`.
        """
        run, board = self.run, self._plan.board
        if run is not None:
            handover.wait_and_end_operation(
                lambda limit_s: board.engine.wait(run, limit_s, board.look_s) != engine.PENDING,
                longest_s,
                self._end_if_finished,
                self.on_end,
            )

    def _end_if_finished(self) -> bool:
        """Return False if the engine has not finished the operation, or only the loop may end it."""
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
        if self._is_over or self._match is None or state == engine.PENDING:
            return
        if state == engine.CANCELLED:  # the operation has failed or was cancelled before: only count its end
            self._release_memory()
            self._plan.communicator.count_ended(self._match, self.operation)
        elif state == engine.HOMELESS:  # no rank had memory for the shared result
            self._run_as_program()
        elif state != engine.DONE:
            self._settle(self._make_error(state))
        elif self.operation.end_wakes_loop and get_ident() != self.operation.context.thread:
            self.operation.context.post_to_loop(self.on_end)
        else:
            self._settle(None)

    def _settle(self, error: BaseException | None) -> None:
        assert self._match is not None, "this is a bug in overlap: an operation ends before its match"
        if error is None:
            try:
                self.set_shared_result()
            except Exception as raised:
                error = raised
        if error is None:
            self._plan.record_end(self.operation)
        self._release_memory()
        self._plan.communicator.settle(self._match, self.operation, error)

    def set_shared_result(self) -> None:
        """Set the result of a `shared=True` operation: a read-only array in the memory that one of the ranks loans.

        The owner of this memory is the rank whose turn it was (see `_find_addresses`). The loan is released once the
        array and all views of it are gone. Does nothing if the result is not shared.
        """
        plan = self._plan
        if not plan.call.shared or self.operation.done:
            return
        dtype, shape = cast("np.dtype[np.generic]", plan.call.dtype), plan.call.result_shape_at(plan.position)
        nbytes, owner = prod(shape) * dtype.itemsize, self.operation.seq % plan.call.size
        if not nbytes:
            self.operation.out = self.operation.target = np.empty(shape, dtype)
            return
        assert self.run is not None, "this is a bug in overlap: a result before its operation"
        home = self.run.home  # offset of the result in the owner's memory
        release = plan.board.make_loan_release(plan.position, owner, home, nbytes)
        self.operation.out = array_in_loan(
            plan.board.view_of_loan(owner, home, nbytes).toreadonly(), shape, dtype, release
        )
        self.operation.target = self.operation.out

    def _make_error(self, state: int) -> BaseException:
        """Return the error for a state in which the engine has ended the operation."""
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

    def _run_as_program(self) -> None:
        """Run the operation as a program, because the engine cannot. Continues on the event loop's thread."""
        context, communicator = self.operation.context, self._plan.communicator
        if get_ident() != context.thread:
            context.post_to_loop(self._run_as_program)
            return
        if self._is_over:
            return
        if self.operation.memory is not None:
            self._set_arrays_from_addresses()
        self._release_memory()
        assert self._match is not None, "this is a bug in overlap: an operation falls back before its match"
        if self.operation.done:  # it has failed or was cancelled in the meantime
            communicator.count_ended(self._match, self.operation)
        else:
            plan = self._plan.memory.make_program_plan(communicator, self._plan.call, self.operation)
            communicator.start_end(self._match, self.operation, plan)

    def _set_arrays_from_addresses(self) -> None:
        """Make arrays in the memory with which the operation was issued, because a program needs arrays."""
        call, operation = self._plan.call, self.operation
        assert operation.memory is not None, "this is a bug in overlap: an operation without memory has no arrays"
        source, target, operation.caller_out, _ = operation.memory  # `caller_out` keeps the memory alive
        operation.memory = None
        if source:
            operation.input = operation.source = array_at(source, call.shape or (), call.dtype)
        if target:
            same = target == source and call.kind is Collective.ALL_REDUCE
            out = operation.source if same else array_at(target, call.result_shape_at(self._plan.position), call.dtype)
            operation.out = out

    def cancel(self) -> None:
        """Cancel the operation in the engine, and end it once the engine no longer uses memory of this rank."""
        # `cancel` returns False if the engine is at work on the operation: it then reports the end later.
        if self._is_over or (self.run is not None and not self._plan.board.engine.cancel(self.run)):
            return
        self._release_memory()
        if self._match is not None:
            self._plan.communicator.count_ended(self._match, self.operation)

    def _release_memory(self) -> None:
        """Release the memory, and record that the operation's bytes have stopped moving."""
        self._is_over = True
        # A waiting thread may have seen the end first: then remove it from the ends that the event loop has yet to see.
        if self.run is not None and self.run.queued:
            self._plan.board.engine.forget(self.run)
        self.memory = None
        self.operation.on_bytes_stopped()


class HostShapeWait(HostRun):
    """Wait of a rank without an array for the row of the root. The rank writes no row of its own."""

    __slots__ = ()

    def submit(self) -> None:
        """Let the engine wait until the root has written its row."""
        plan, operation = self._plan, self.operation
        tag = (operation.seq & 0xFFFF) << CHANNEL_BITS  # without a call, so that every row differs from it
        self.run: Run | None = plan.board.submit(
            _table_until_root_writes(plan.position, plan.call.size, plan.call.root), self, operation.seq, tag, 0, 0,
            operation.priority, 0, 0, signature=plan.signature_at(operation.place),
        )  # fmt: skip

    def _settle(self, error: BaseException | None) -> None:
        """Start the operation with the call in the root's row, which the engine reports as a mismatch."""
        if not isinstance(error, SignatureMismatchError):
            super()._settle(error)
            return
        assert self._match is not None, "this is a bug in overlap: an operation ends before its match"
        self._release_memory()
        self._plan.communicator.start_with_board_row(self._match, self.operation, error)


# -- tables ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _packed_reducer(reducer: Reducer, size: int) -> tuple[object, object, int, int, bytes, int] | None:
    """Return a reducer in the form that the engine's tables take; None if the engine cannot run it.

    The values: numpy's ufunc; the ufunc that divides, or None; the number of the accumulator's dtype; the item size of
    the arrays; the divisor (`size`) as bytes; the number of the narrow dtype (`_NARROW`, `_MEANS`), or 0.
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
    """Return the table with which a rank reads no data, and only waits for the root's row."""
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
    """Return a table without ranges. `needed` has a byte for each rank: 1 if its row is waited for, else 0."""
    nbytes = result_bytes = 0
    unread = (0, 0)
    return engine.Table(position, size, size, flags, nbytes, result_bytes, unread, needed, [], [], [], reducer)


def _make_table(call: Call, position: int) -> Table:
    """Return the ranges of bytes that the engine reads from each rank to make this rank's result.

    The table of an all-reduce also has slices, unless the ranks share one result. The engine uses them for long arrays
    of many ranks, and for those that it reads in place: each rank reduces its own slice, and then collects those of the
    other ranks.
    """
    kind, itemsize = call.kind, 1 if call.dtype is None else call.dtype.itemsize
    nbytes = 0 if call.dtype is None else prod(call.shape or ()) * itemsize
    has_slices = kind is Collective.ALL_REDUCE and not call.shared
    own_slice = reduced_slice(call, position)
    ranges = shared_result_pulls(call, position) if call.shared else pulls(call, position)
    has_result = call.shared or any(pull.size for pull in ranges)
    unread_start, unread_stop = unread_input_range(call, position)
    # without slices each rank reads all inputs; with slices, parts that are as long as two inputs together
    saved = call.size * (call.size - 2) * nbytes
    always_slices = has_slices and nbytes >= _LEAST_SLICED_BYTES and saved > _LEAST_SAVED_BYTES
    # With slices, other ranks read the whole input except the slice that this rank reduces.
    if always_slices:
        unread_start, unread_stop = own_slice.start, own_slice.start + own_slice.size
    needed = needed_positions(call, position)  # None: all
    gives, from_root = is_input_read(call, position), kind in (Collective.BROADCAST, Collective.SCATTER)
    conditions = {
        _NEEDS_ALL: needed is None,
        # Other ranks read this rank's input. In a shared result each rank writes its own part, except in an all-reduce.
        _GIVES: gives and (kind is Collective.ALL_REDUCE or not call.shared),
        # A rank may wait for this rank alone, so that this rank has to wake it.
        _RINGS: gives and (from_root or kind is Collective.PERMUTE),
        _SLICES: has_slices,
        _ALWAYS_SLICES: always_slices,
        _SHARED: call.shared,
        _FROM_ONE: from_root,
    }
    return engine.Table(
        position,
        call.size,
        _count_active_ranks(call),
        sum(flag for flag, holds in conditions.items() if holds),
        nbytes,
        prod(call.result_shape_at(position)) * itemsize if has_result else 0,
        (unread_start * itemsize, unread_stop * itemsize),
        bytes(needed is None or other in needed for other in range(call.size)),
        _pulls_in_bytes(ranges, itemsize),
        _pulls_in_bytes([own_slice] if has_slices else [], itemsize),
        _pulls_in_bytes(collecting_pulls(call) if has_slices else [], itemsize),
        None if call.reducer is None else _packed_reducer(call.reducer, call.size),
    )


def _count_active_ranks(call: Call) -> int:
    """Return the number of ranks that move bytes; the other ranks only wait, and leave their cores to those."""
    if call.kind is Collective.BROADCAST:
        return max(1, call.size - 1)
    return 1 if call.kind in (Collective.REDUCE, Collective.GATHER) else call.size


def _pulls_in_bytes(ranges: Sequence[Pull], itemsize: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Return pulls as the engine takes them, without empty ones: (start, size, [(rank, start), ...])."""
    return [
        (start * itemsize, size * itemsize, [(rank, at * itemsize) for rank, at in sources])
        for start, size, sources in ranges
        if size
    ]
