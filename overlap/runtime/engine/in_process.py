"""Collectives inside one process: ranks that share memory need no program.

Once the last rank has arrived, a collective is a list of transfers: one or more source views, folded in rank order, are
written to one or more target views. Large transfers are cut in pieces for the worker threads.
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
from .pulls import MemoryMove, moves
from .workers import PIECE_BYTES, Workers


class InMemory:
    """Runs operations with all ranks in this process, out of each other's memory; worker threads do large work."""

    def __init__(self, workers: Workers, token: TrioToken) -> None:
        self.workers: Workers = workers
        self._token = token
        self._in_flight = 0
        self._idle = trio.Event()

    def begin(self, match: Match, operation: Operation, call: Call) -> None:
        """Let worker threads run all ends of a large operation."""
        operation.lock()
        operations = match.ends
        work = pieces(operations, call)
        done = partial(self._done, match, operation.started_ns)
        self.workers.submit(
            work,
            lambda error: self._token.run_sync_soon(done, error),
            priority=min(operation.urgency for operation in operations),
        )
        self._in_flight += 1  # the end is delivered on this thread, so it cannot be earlier
        for operation in operations:
            operation.start_moving(self)

    def cancel(self) -> None:
        """Do nothing: the work of threads is not stopped, but waited for."""

    def _done(self, match: Match, met_ns: int, error: BaseException | None) -> None:
        """End all operations of a match, with an error if the transfers failed."""
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()
        operations = match.ends
        for operation in operations:
            operation.stopped()
        end_ns, meeting = perf_counter_ns(), operations[0].describe(cast("Call", match.pattern), met_ns)
        for operation in operations:
            if error is None:
                operation.finish(end_ns, meeting)
            else:
                operation.fail(Failure(error))

    async def until_idle(self) -> None:
        """Wait for the running reductions."""
        while self._in_flight:
            self._idle = trio.Event()
            await self._idle.wait()


class InProcessPlan(CallPlan):
    """Runs the operations of all ranks with one call: small ones at once, large ones in worker threads.

    Args:
        memory: Arrays of the ranks of this process.
    """

    together = True

    def __init__(self, memory: InMemory, call: Call, ranks: int) -> None:
        super().__init__(call)
        self._memory, self._quietly = memory, memory.workers.quiet.run
        self._at_once = call.work_bytes * ranks <= INLINE_BYTES

    def __str__(self) -> str:
        return "memory of this process"

    def start(self, match: Match, operation: Operation) -> None:
        """Run all ends, now that the last one has arrived."""
        operations: list[Operation] = match  # type: ignore[assignment]  # a call of `cast` takes time
        # a single rank may have its result where its input is
        idle = len(operations) == 1 and operation.out is operation.source is not None
        if not (idle or self._at_once):
            self._memory.begin(match, operation, self.call)
            return
        self._quietly(run_here, operations, self.call)
        end_ns, meeting = perf_counter_ns(), operations[0].describe(self.call, operation.started_ns)
        for end in operations:
            end.finish(end_ns, meeting)


@dataclass(frozen=True, slots=True)
class MemoryTransfer:
    """Fold of `sources` (flat, of one size) into every target.

    A target may be the memory of the source of the same rank: all sources are read before the first target but
    `targets[0]`, which accumulates, is written; `exclusive` says that `targets[0]` overlaps no source but the first.
    """

    sources: Sequence[Array]
    targets: Sequence[Array]
    reducer: Reducer | None = None
    exclusive: bool = True

    def run(self) -> None:
        """Fold and write, in the calling thread."""
        targets = self.targets
        if self.reducer is None:
            value = self.sources[0]
            for target in targets:
                target[...] = value
            return
        total = targets[0] if self.exclusive else np.empty_like(targets[0])
        self.reducer.fold(self.sources, total)
        for target in targets[1:] if self.exclusive else targets:
            target[...] = total

    def cut(self) -> Iterator[Callable[[], None]]:
        """Cut into pieces of about `PIECE_BYTES`, each of which may run in any thread."""
        length = max(1, PIECE_BYTES // max(1, self.sources[0].itemsize))
        for start in range(0, self.sources[0].size, length):
            part = slice(start, start + length)
            sources, targets = [source[part] for source in self.sources], [target[part] for target in self.targets]
            yield MemoryTransfer(sources, targets, self.reducer, self.exclusive).run


# Up to here a new array costs less than the choice of a place to accumulate; beyond, its pages cost more than the sum.
_TINY_BYTES = 16 << 10
_SOURCE = attrgetter("source")


def run_here(operations: Sequence[Operation], pattern: Call) -> None:
    """Run one small collective in the calling thread, given every member's end in group order."""
    if pattern.kind is ALL_REDUCE and pattern.nbytes <= _TINY_BYTES:  # into one new array, copied to everybody
        total = pattern.reducer.total(list(map(_SOURCE, operations)))  # type: ignore[union-attr]  # it reduces
        for operation in operations:
            out, target = operation.out, operation.target
            if out is None:
                operation.out = total if pattern.shared else total.copy()
            else:
                (out if target is None else target)[...] = total
        return
    fit_all(operations, pattern)
    for transfer in _transfers(operations, pattern):
        for piece in transfer.cut() if pattern.nbytes > PIECE_BYTES else (transfer.run,):
            piece()


def pieces(operations: Sequence[Operation], pattern: Call) -> list[Callable[[], None]]:
    """Cut one collective into pieces for the worker threads."""
    fit_all(operations, pattern)
    return [piece for transfer in _transfers(operations, pattern) for piece in transfer.cut()]


def fit_all(operations: Sequence[Operation], pattern: Call) -> None:
    """Make the array of every rank's result.

    Raises:
        Unfit: If there is no memory for an array.
    """
    for operation in operations[:1] if pattern.shared else operations:
        try:
            operation.fit(pattern)
        except Exception as error:
            raise Unfit(operation) from error
    if pattern.shared:
        for operation in operations:
            operation.out, operation.target = operations[0].out, operations[0].target


def _transfers(operations: Sequence[Operation], pattern: Call) -> list[MemoryTransfer]:
    """Return a collective as transfers between the arrays of its ranks."""
    inputs = [None if operation.source is None else operation.source.reshape(-1) for operation in operations]
    results = [None if operation.target is None else operation.target.reshape(-1) for operation in operations]
    return [_transfer(move, inputs, results, pattern.reducer) for move in moves(pattern)]


def _transfer(
    move: MemoryMove, inputs: Sequence[Array | None], results: Sequence[Array | None], reducer: Reducer | None
) -> MemoryTransfer:
    """Return a move with slices of the ranks' arrays."""
    size, from_ranks, to_ranks = move
    sources = [inputs[rank][start : start + size] for rank, start in from_ranks]  # type: ignore[index]  # all of these
    targets = [results[rank][start : start + size] for rank, start in to_ranks]  # type: ignore[index]  # have arrays
    first = to_ranks[0][0]
    exclusive = reducer is None or not first or not np.may_share_memory(targets[0], sources[first])
    return MemoryTransfer(sources, targets, reducer, exclusive)
