"""Collectives between processes of one host, out of each other's memory, carried out by the engine of the process.

The engine is compiled code (`transports/shared_memory/native`): it executes a table of what a rank takes from whom,
which is made here, without Python, in a thread of its own or in one that waits. What it does not do, such as sums of
8-bit floats, travels as programs.
Cost: each input is read once by whoever needs it, and each result written once; one to three meetings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from math import prod
from threading import get_ident
from typing import cast

import numpy as np
from trio import RunFinishedError

from transports import LinkLostError, Transport
from transports.common import OPERATIONS, Board
from transports.patience import Patience
from transports.shared_memory import engine

from ...collectives.call import Call
from ...collectives.kinds import Collective
from ...collectives.reduce import Reducer
from ..communicator import Communicator
from ..executor import Executor
from ..handover import Handover, Run
from ..match import Match
from ..memory.arrays import held
from ..operation import Operation
from .host_bytes import address_of, array_at
from .pulls import Pull, collected, gives, laid, needed, pulls, reduced, rings, unread
from .workers import Workers

# From here each of three or more ranks reduces a slice only, as `SLICED_BYTES` of native/collectives.c says.
_SLICED_BYTES = 64 << 10
# Flags of a table, as native/collectives.c has them.
_GIVES, _RINGS, _SLICES, _SHARED, _FROM_ONE, _NEEDS_ALL = 1, 2, 4, 8, 16, 32
# How results whose partial results have another dtype are reduced, as native/arithmetic.c numbers it.
_NARROW = {"float16": 1, "bfloat16": 2}
_MEANS = {"i": 3, "u": 4}
_EVER_S = 1e9


class HostMemory:
    """Executors of operations whose ranks are in several processes of this host.

    Args:
        transport: Knows who has memory in common.
        workers: The threads that do large work of one process.
        program: Chooses a program, for ranks that turn out to have no room for a board.

    Attributes:
        program: As given.
        patience: How long the loop looks before it sleeps.
    """

    program: Callable[[Communicator, Call, Operation], Executor]

    def __init__(
        self, transport: Transport, workers: Workers, program: Callable[[Communicator, Call, Operation], Executor]
    ) -> None:
        self._transport, self._workers, self.program = transport, workers, program
        self._boards: dict[Communicator, Board | None] = {}
        self.patience: Patience = Patience(0.0)

    def executor(self, communicator: Communicator, call: Call, operation: Operation) -> Executor | None:
        """Return how one rank's operations with a call are carried out; None if the engine cannot do it."""
        if communicator not in self._boards:
            self._boards[communicator] = self._open(communicator, operation)
        board = self._boards[communicator]
        if board is None or not (call.reducer is None or _reducer(call.reducer, call.size)):
            return None
        return HostExecutor(self, communicator, board, call, communicator.members.index(operation.context.rank))

    def close(self, communicator: Communicator) -> None:
        """Give back the memory of a communicator; no rank, of any process, uses it any more."""
        board = self._boards.pop(communicator, None)
        if board is not None:
            board.close()

    def _open(self, communicator: Communicator, operation: Operation) -> Board | None:
        if operation.port.stream.window > OPERATIONS // 2:
            return None
        board = self._transport.board(communicator.key.tag_base(), communicator.members)
        if board is not None:
            self._workers.share(board.processes)
            self.patience = Patience(board.look_s)
        return board


class HostExecutor(Executor):
    """Carries out operations of one rank out of the memory of the processes of this host.

    Args:
        memory: That of the process.
        communicator: Of the ranks.
        board: Theirs.
        call: The call: kind, sizes and dtype.
        position: Of the rank in the group.

    Attributes:
        memory: As given.
        communicator: As given.
        board: As given.
        call: As given.
        position: As given.
    """

    memory: HostMemory
    communicator: Communicator
    board: Board
    call: Call
    position: int

    def __init__(self, memory: HostMemory, communicator: Communicator, board: Board, call: Call, position: int) -> None:
        self.memory, self.communicator, self.board = memory, communicator, board
        self.call, self.position = call, position
        self.lasts: bool = not call.counts  # uneven blocks seldom repeat
        self._begun: HostRun | None = None  # by `finish_now`, and to be started

    def __str__(self) -> str:
        return "memory of this host, one result" if self.call.shared else "memory of this host"

    @cached_property
    def table(self) -> engine.Table:
        """Return what the engine executes."""
        return _table(self.call, self.position)

    @cached_property
    def input_bytes(self) -> int:
        """Bytes of the input of a rank that gives any."""
        return 0 if self.call.dtype is None else prod(self.call.shape or ()) * self.call.dtype.itemsize

    def takes_threads(self) -> bool:
        """Whether the board can be used; before, it takes a task."""
        board = self.board
        return board.ready and board.usable and board.lost is None

    def finish_now(self, operation: Operation) -> bool:
        """Begin, and end if all have come whom this rank needs, and that does not fail."""
        if not self.takes_threads():
            return False
        run = HostRun(self, operation)
        try:
            run.submit_arrays()
        except Exception:  # no memory: `start` fails with that
            return False
        if run.finish_at_once():
            return True
        self._begun = run
        return False

    def start(self, match: Match, operation: Operation) -> None:
        """Begin as soon as the board is there, unless `finish_now` has begun it."""
        run, self._begun = self._begun, None
        if run is not None and run.operation is operation:
            run.wait(match)
            return
        run = HostRun(self, operation)
        run.wait(match)
        if self.board.ready:
            run.begin()
        else:
            self.board.open(self.position, run.begin)


class HostRun(Run):
    """One rank's end of an operation that the engine carries out. It is the operation's `scope`, too.

    Attributes:
        operation: As given.
    """

    __slots__ = ("_addresses", "_executor", "_match", "_memory", "_over", "_run", "operation")

    operation: Operation

    def __init__(self, executor: HostExecutor, operation: Operation) -> None:
        self._executor, self.operation = executor, operation
        self._match: Match | None = None
        self._run: engine.Run | None = None
        self._over = False
        self._memory: object = None  # kept as long as the engine may touch it
        self._addresses = 0, 0  # of the input and of the result

    # -- beginning -----------------------------------------------------------------------------------------------------

    def wait(self, match: Match) -> None:
        """Be the end of a matched operation under way; the loop's thread, or one in its place."""
        self._match = match
        self.operation.moves(self)
        self.operation.look = self.look_before_sleeping
        self.on_end()  # the engine tells nobody of what has ended before `submit` returned

    def begin(self) -> None:
        """Submit the operation, now that the board is there; the loop's thread, or one in its place."""
        if self._over:
            return
        if not self._executor.board.usable:
            self._fall_back()
            return
        try:
            self.submit_arrays()
        except Exception as error:
            self._settle(error)
            return
        self.on_end()

    def submit_arrays(self) -> None:
        """Let the engine begin with the arrays of the operation."""
        executor, operation = self._executor, self.operation
        call, home = executor.call, 0
        if call.shared:
            nbytes = prod(call.result_at(executor.position)) * cast("np.dtype[np.generic]", call.dtype).itemsize
            if nbytes and operation.seq % call.size == executor.position:  # the turn of this rank to give the memory
                home = executor.board.loan_to_all(nbytes) or 0
        else:
            operation.fit(call)
        source, target = operation.source, operation.target
        start = 0 if source is None else address_of(source)
        end = 0 if target is None or call.shared else address_of(target)
        self.submit(start, end, (source, target), home)

    def submit(self, source: int, target: int, memory: object, home: int = 0, *, waited_for: bool = False) -> None:
        """Let the engine begin.

        Args:
            source: Address of the input; 0: there is none.
            target: Address of the result; 0: there is none.
            memory: Owns both.
            home: Where the memory for a shared result is that this rank gives.
            waited_for: Whether this thread waits for it at once.
        """
        executor, operation = self._executor, self.operation
        number, self._memory, self._addresses = operation.seq, memory, (source, target)
        self._run = executor.board.submit(
            executor.table, self, number, executor.communicator.tag(executor.call, number), source, target,
            operation.priority, executor.input_bytes, home, waited_for=waited_for,
        )  # fmt: skip

    def finish_at_once(self) -> bool:
        """Finish the operation if the engine has done it already, before anybody waits for it."""
        if self.state != engine.DONE:
            return False
        operation, self._memory = self.operation, None
        self.take_result()
        operation.finish(operation.context.now_ns(), operation.describe(self._executor.call, operation.started_ns))
        return True

    # -- waiting -------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> int:
        """The state of the engine's end."""
        return engine.PENDING if self._run is None else self._run.state

    def look_before_sleeping(self) -> None:
        """Wait for a moment, on the loop's thread, before a task sleeps that waits for the operation.

        Where other ranks live in this process, they may be those who have not come, and it is their turn.
        """
        if self._run is None or self._over:
            return
        patience = self._executor.memory.patience
        if (
            self._run.state == engine.PENDING
            and self._executor.communicator.here == 1
            and (look_s := patience.take()) > 0
        ):
            patience.learn(came=self._executor.board.wait(self._run, look_s, look_s) != engine.PENDING)
        self.on_end()

    def look_here(self, handover: Handover, longest_s: float | None) -> None:
        """Wait, in a thread that waits for the operation, without the interpreter; then end it in the loop's place."""
        if self._run is None:
            return
        board, settled = self._executor.board, False
        try:
            board.wait(self._run, _EVER_S if longest_s is None else longest_s, board.look_s)
            settled = self._run.state == engine.PENDING or handover.in_place(self._ended_in_place, False)
        finally:  # a handler of signals may raise anywhere
            if not settled:
                with suppress(RunFinishedError):  # nobody waits any more
                    handover.post(self.on_end)

    def _ended_in_place(self) -> bool:
        if self.operation.heard or self._run is None or self._run.state != engine.DONE:
            return False
        self.on_end()
        return True

    # -- ending --------------------------------------------------------------------------------------------------------

    def on_end(self) -> None:
        """End the operation if the engine has; the loop's thread, or one in its place."""
        state = self.state
        if self._over or self._match is None or state == engine.PENDING:
            return
        if state == engine.CANCELLED:
            self._close()
            self.operation.stopped()
            self._executor.communicator.ended(self._match, self.operation)
        elif state == engine.HOMELESS:
            self._fall_back()
        elif state != engine.DONE:
            self._settle(self._error(state))
        elif self.operation.heard and get_ident() != self.operation.context.thread:
            self.operation.context.from_thread(self.on_end)
        else:
            self._settle(None)

    def _settle(self, error: BaseException | None) -> None:
        assert self._match is not None, "it has begun to wait"
        if error is None:
            try:
                self.take_result()
            except Exception as raised:
                error = raised
        self._close()
        self.operation.stopped()
        self._executor.communicator.settle(self._match, self.operation, error)

    def take_result(self) -> None:
        """Give the operation the result that all share, which lies where the engine has found it."""
        executor = self._executor
        if not executor.call.shared or self.operation.done:
            return
        dtype, shape = cast("np.dtype[np.generic]", executor.call.dtype), executor.call.result_at(executor.position)
        nbytes, owner = prod(shape) * dtype.itemsize, self.operation.seq % executor.call.size
        if not nbytes:
            self.operation.out = self.operation.target = np.empty(shape, dtype)
            return
        assert self._run is not None, "it has ended"
        home = self._run.home
        release = executor.board.make_release(executor.position, owner, home, nbytes)
        self.operation.out = held(executor.board.mapped(owner, home, nbytes).toreadonly(), shape, dtype, release)
        self.operation.target = self.operation.out

    def _error(self, state: int) -> BaseException:
        if state == engine.NO_MEMORY:
            return MemoryError(f"{self.operation.label}: there is no memory for pieces of it")
        if state == engine.CORRUPT:
            return LinkLostError("a process of this host wrote into its board what cannot be true")
        return LinkLostError(self._executor.board.lost or "the memory of a process of this host cannot be read")

    def _fall_back(self) -> None:
        """Let a program do it, which takes tasks."""
        context, communicator = self.operation.context, self._executor.communicator
        if get_ident() != context.thread:
            context.from_thread(self._fall_back)
            return
        if self._over:
            return
        if self.operation.source is None and self.operation.target is None:
            self._use_arrays()
        self._close()
        self.operation.scope = None
        if not self.operation.done:
            assert self._match is not None, "it has begun to wait"
            executor = self._executor.memory.program(communicator, self._executor.call, self.operation)
            communicator.start_end(self._match, self.operation, executor)

    def _use_arrays(self) -> None:
        """Give the operation arrays, which a program needs, of memory that was submitted without any."""
        (source, target), call, operation = self._addresses, self._executor.call, self.operation
        operation.given = self._memory  # as long as the operation may touch it
        if source:
            operation.input = operation.source = array_at(source, call.shape or (), call.dtype)
        if target:
            same = target == source and call.kind is Collective.ALL_REDUCE
            out = operation.source if same else array_at(target, call.result_at(self._executor.position), call.dtype)
            operation.out = out

    def cancel(self) -> None:
        """End, once nothing of this rank's is touched any more."""
        if self._over or (self._run is not None and not self._executor.board.cancel(self._run)):
            return
        self._close()
        self.operation.stopped()
        if self._match is not None:
            self._executor.communicator.ended(self._match, self.operation)

    def _close(self) -> None:
        self._over = True
        if self._run is not None and self._run.queued:  # a thread has waited for it
            self._executor.board.forget(self._run)
        self._memory = None


# -- tables ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _reducer(reducer: Reducer, size: int) -> tuple[object, object, int, int, bytes, int] | None:
    """Return a reducer as the engine takes it: numpy's loops, and by how many it divides; None: it cannot do it."""
    dtype, kind = reducer.dtype, reducer.accumulator
    narrow = _NARROW.get(dtype.name, 0) or (_MEANS.get(dtype.kind, 0) if reducer.divides else 0)
    if not (reducer.plain or narrow):
        return None
    divides = reducer.divides and kind.kind in "fc"
    divisor = np.array(size, kind).tobytes() if divides else b""
    found = reducer.combine, np.true_divide if divides else None, kind.num, dtype.itemsize, divisor, narrow
    try:
        engine.Table(0, size, 0, 0, 0, (0, 0), bytes(size), [], [], [], found)
    except (LookupError, ValueError, TypeError):
        return None
    return found


def _table(call: Call, position: int) -> engine.Table:
    """Return what the rank at a position takes from whom, in bytes."""
    itemsize = 1 if call.dtype is None else call.dtype.itemsize
    count = prod(call.shape or ()) if call.dtype is not None else 0
    nbytes = count * itemsize
    sums = call.kind is Collective.ALL_REDUCE and not call.shared
    take = laid(call, position) if call.shared else list(pulls(call, position)) if count else []
    gets = any(pull.size for pull in take) or call.shared
    result_bytes = prod(call.result_at(position)) * itemsize if gets else 0
    who, (start, stop) = needed(call, position), unread(call, position)
    if sums and call.size > 2 and nbytes >= _SLICED_BYTES:
        own = reduced(call, position)
        start, stop = own.start, own.start + own.size
    flags = _NEEDS_ALL if who is None else 0
    flags |= _GIVES if gives(call, position) and (sums or call.kind is Collective.ALL_REDUCE or not call.shared) else 0
    flags |= _RINGS if rings(call, position) else 0
    flags |= _SLICES if sums else 0
    flags |= _SHARED if call.shared else 0
    flags |= _FROM_ONE if call.kind in (Collective.BROADCAST, Collective.SCATTER) else 0
    slices = ([reduced(call, position)], collected(call)) if sums else ([], [])
    return engine.Table(
        position,
        call.size,
        flags,
        nbytes,
        result_bytes,
        (start * itemsize, stop * itemsize),
        bytes(who is None or other in who for other in range(call.size)),
        _in_bytes(take, itemsize),
        _in_bytes(slices[0], itemsize),
        _in_bytes(slices[1], itemsize),
        None if call.reducer is None else _reducer(call.reducer, call.size),
    )


def _in_bytes(found: Sequence[Pull], itemsize: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
    return [
        (start * itemsize, size * itemsize, [(who, at * itemsize) for who, at in sources])
        for start, size, sources in found
        if size
    ]
