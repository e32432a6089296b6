"""Collectives inside one process: ranks that share memory need no program.

Once the last rank has arrived, a collective is a list of transfers. A transfer reduces one or more source views in rank
order, and writes the result to one or more target views. Large transfers are cut in pieces for the worker threads.

Cost: each input is read once and each output written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from time import perf_counter_ns
from typing import cast

import numpy as np
import trio
from trio.lowlevel import TrioToken

from ...collectives.call import Call
from ...collectives.kinds import ALL_REDUCE
from ...collectives.reduce import Array, Reducer
from ...defaults import INLINE_BYTES
from ..failure import Failure
from ..match import Match, Unfit
from ..operation import Operation
from ..plan import CallPlan
from .pulls import moves
from .workers import PIECE_BYTES, Workers


class InMemory:
    """Runs large operations whose ranks are all in this process: worker threads read and write the ranks' arrays.

    Args:
        workers: The worker threads.
        token: Token of the event loop, on which operations end.
    """

    def __init__(self, workers: Workers, token: TrioToken) -> None:
        self.workers: Workers = workers
        self._token = token
        self._in_flight = 0
        self._idle = trio.Event()

    def start_in_workers(self, match: Match, operation: Operation, call: Call) -> None:
        """Start a large operation of all ranks in worker threads.

        Args:
            match: The match. Its `ends` are the ranks' operations, in group order; of a message, sender and receiver.
            operation: The operation that arrived last, whose arrays are not locked yet.
            call: The call that all ranks agree on.

        Raises:
            Unfit: There is no memory for the result of a rank.
        """
        operation.lock_arrays()
        operations = match.ends
        done = partial(self._token.run_sync_soon, self._end_operations, match, operation.started_ns)
        self.workers.submit(
            make_transfer_pieces(operations, call), done, priority=min(end.urgency for end in operations)
        )
        self._in_flight += 1  # `_end_operations` runs on this thread, so it cannot have run before this line
        for operation in operations:
            operation.start_moving(self)

    def cancel(self) -> None:
        """Do nothing: worker threads are not stopped, so the operation ends when their work has ended."""

    def _end_operations(self, match: Match, met_ns: int, error: BaseException | None = None) -> None:
        """End the operations of all ranks; `error` is the first one of the transfers."""
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()
        operations = match.ends
        for operation in operations:
            operation.on_bytes_stopped()
        end_ns, meeting = perf_counter_ns(), operations[0].describe_meeting(cast("Call", match.pattern), met_ns)
        for operation in operations:
            if error is None:
                operation.finish(end_ns, meeting)
            else:
                operation.fail(Failure(error))

    async def wait_until_idle(self) -> None:
        """Wait for the running reductions."""
        while self._in_flight:
            self._idle = trio.Event()
            await self._idle.wait()


class InProcessPlan(CallPlan):
    """Runs the operations of all ranks with one call: small ones at once, large ones in worker threads.

    Args:
        memory: Runs large operations.
        call: The call.
        ranks: Number of ranks, for the size of the work.
    """

    runs_all_ranks = True

    def __init__(self, memory: InMemory, call: Call, ranks: int) -> None:
        super().__init__(call)
        self._memory, self._run_without_warnings = memory, memory.workers.without_warnings.run
        self._runs_at_once = call.work_bytes * ranks <= INLINE_BYTES

    def __str__(self) -> str:
        return "memory of this process"

    def start(self, match: Match, operation: Operation) -> None:
        """Run the operations of all ranks in the match; `operation` is the one that arrived last."""
        operations: list[Operation] = match  # type: ignore[assignment]  # a call of `cast` takes time
        # A single rank whose result array is its input has nothing to do.
        result_is_input = len(operations) == 1 and operation.out is operation.source is not None
        if not (result_is_input or self._runs_at_once):
            self._memory.start_in_workers(match, operation, self.call)
            return
        self._run_without_warnings(run_in_this_thread, operations, self.call)
        end_ns, meeting = perf_counter_ns(), operations[0].describe_meeting(self.call, operation.started_ns)
        for end in operations:
            end.finish(end_ns, meeting)


def copy_array(target: Array, source: Array) -> None:
    """Copy by plain stores, after which the caches have the target."""
    target[...] = source


@dataclass(frozen=True, slots=True)
class MemoryTransfer:
    """Reduction of several arrays, or copy of one array, into one or more targets.

    A target may share memory with a source of the same rank. So the sum is formed first, in `targets[0]` if that is
    `exclusive`, else in new memory; then it is copied to the other targets.

    A processor reads a line of memory before it writes to it, unless the write bypasses the caches. Of arrays that fill
    the caches, writing so takes a third less time.
    """

    sources: Sequence[Array]  # Flat arrays of one size, in rank order; a single one if `reducer` is None
    targets: Sequence[Array]  # Flat arrays of the same size
    reducer: Reducer | None = None  # None: copy
    exclusive: bool = True  # Whether the sum is formed in `targets[0]`, which no source shares except `sources[0]`
    copy: Callable[[Array, Array], None] = copy_array  # Writes the second array into the first

    def run(self) -> None:
        """Reduce or copy, in the calling thread."""
        value, targets = self.sources[0], self.targets
        if self.reducer is not None:
            value = targets[0] if self.exclusive else np.empty_like(targets[0])
            self.reducer.reduce_into(self.sources, value)
            targets = targets[1:] if self.exclusive else targets
        for target in targets:
            self.copy(target, value)

    def cut_in_pieces(self) -> Iterator[Callable[[], None]]:
        """Yield functions that each carry out a piece of about `PIECE_BYTES`, in any thread and any order."""
        length = max(1, PIECE_BYTES // max(1, self.sources[0].itemsize))
        for start in range(0, self.sources[0].size, length):
            part = slice(start, start + length)
            sources, targets = [source[part] for source in self.sources], [target[part] for target in self.targets]
            yield MemoryTransfer(sources, targets, self.reducer, self.exclusive, self.copy).run


# Up to this size a new array for the sum costs less time than to find a target for it; beyond, its pages cost more.
_TINY_BYTES = 16 << 10
# From this size of all results on, writing past the caches is faster than having the results in them.
_UNCACHED_BYTES = 64 << 20
_SOURCE = attrgetter("source")


def run_in_this_thread(operations: Sequence[Operation], pattern: Call) -> None:
    """Run one collective of all ranks in the calling thread; `out` of each operation is then the result.

    Args:
        operations: The operations of all ranks, in group order.
        pattern: The call that the ranks agree on.

    Raises:
        Unfit: There is no memory for the result of a rank.
    """
    if pattern.kind is ALL_REDUCE and pattern.nbytes <= _TINY_BYTES:  # sum up in one new array, and copy that
        total = pattern.reducer.reduce_to_new(list(map(_SOURCE, operations)))  # type: ignore[union-attr]  # it reduces
        for operation in operations:
            out, target = operation.out, operation.target
            if out is None:
                operation.out = total if pattern.shared else total.copy()
            else:
                (out if target is None else target)[...] = total
        return
    make_result_arrays(operations, pattern)
    for transfer in _make_transfers(operations, pattern):
        for piece in transfer.cut_in_pieces() if pattern.nbytes > PIECE_BYTES else (transfer.run,):
            piece()


def make_transfer_pieces(operations: Sequence[Operation], pattern: Call) -> list[Callable[[], None]]:
    """Make the result arrays of one collective, and return its transfers as functions for the worker threads.

    Arguments and errors: see `make_result_arrays`.
    """
    make_result_arrays(operations, pattern)
    return [piece for transfer in _make_transfers(operations, pattern) for piece in transfer.cut_in_pieces()]


def make_result_arrays(operations: Sequence[Operation], pattern: Call) -> None:
    """Set the result array of every rank's operation; for a shared result, one array for all.

    Args:
        operations: The operations of all ranks, in group order.
        pattern: The call that the ranks agree on.

    Raises:
        Unfit: There is no memory for an array.
    """
    for operation in operations[:1] if pattern.shared else operations:
        try:
            operation.prepare_result(pattern)
        except Exception as error:
            raise Unfit(operation) from error
    if pattern.shared:
        for operation in operations:
            operation.out, operation.target = operations[0].out, operations[0].target


def _make_transfers(operations: Sequence[Operation], pattern: Call) -> list[MemoryTransfer]:
    inputs = [None if operation.source is None else operation.source.reshape(-1) for operation in operations]
    results = [None if operation.target is None else operation.target.reshape(-1) for operation in operations]
    copy = _choose_copy(inputs, results[:1] if pattern.shared else results)
    transfers = []
    for size, from_ranks, to_ranks in moves(pattern):
        sources = [inputs[rank][start : start + size] for rank, start in from_ranks]  # type: ignore[index]  # all these
        targets = [results[rank][start : start + size] for rank, start in to_ranks]  # type: ignore[index]  # have arrays
        first, _ = to_ranks[0]
        first_in_place = pattern.reducer is not None and first and np.may_share_memory(targets[0], sources[first])
        exclusive = copy is copy_array and not first_in_place
        transfers.append(MemoryTransfer(sources, targets, pattern.reducer, exclusive, copy))
    return transfers


def _choose_copy(inputs: Sequence[Array | None], results: Sequence[Array | None]) -> Callable[[Array, Array], None]:
    """Return a copy that bypasses the caches if the results fill them, and no input, just read, is overwritten."""
    if sum(result.nbytes for result in results if result is not None) < _UNCACHED_BYTES:
        return copy_array
    pairs = zip(inputs, results, strict=False)
    if any(x is not None and out is not None and np.may_share_memory(x, out) for x, out in pairs):
        return copy_array
    from transports.shared_memory import engine  # imported here, because its package imports much

    return engine.copy_uncached if engine.BUILT else copy_array
