"""Collectives inside one process: ranks that share memory need no program.

Once the last rank has arrived, a collective is a list of transfers: one or more source views, folded in rank order, are
written to one or more target views. Large transfers are cut in pieces for the worker threads.
Cost: each input is read once and each output written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...collectives.call import Call
from ...collectives.kinds import Collective
from ...collectives.reduce import Array, Reducer
from ..match import Unfit
from ..operation import Operation
from .pulls import Move, moves
from .workers import PIECE_BYTES


@dataclass(frozen=True, slots=True)
class Transfer:
    """Folds `sources` (flat, of one size) and writes the outcome to every target.

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
            yield Transfer(sources, targets, self.reducer, self.exclusive).run


# Up to here a new array costs less than finding out where to accumulate; beyond, its pages cost more than the sum.
_TINY_BYTES = 16 << 10


def run_here(operations: Sequence[Operation], pattern: Call) -> None:
    """Carry out one small collective in the calling thread, given every member's end in group order."""
    if pattern.kind is Collective.ALL_REDUCE and pattern.nbytes <= _TINY_BYTES:
        _all_reduce_here(operations, pattern)
        return
    fit_all(operations, pattern)
    for transfer in _transfers(operations, pattern):
        for piece in transfer.cut() if pattern.nbytes > PIECE_BYTES else (transfer.run,):
            piece()


def pieces(operations: Sequence[Operation], pattern: Call) -> list[Callable[[], None]]:
    """Cut one collective for the worker threads."""
    fit_all(operations, pattern)
    return [piece for transfer in _transfers(operations, pattern) for piece in transfer.cut()]


def fit_all(operations: Sequence[Operation], pattern: Call) -> None:
    """Give every rank the array of its result.

    Raises:
        Unfit: If there is no memory for one.
    """
    for operation in _written(operations, pattern):
        try:
            operation.fit(pattern)
        except Exception as error:
            raise Unfit(operation) from error
    if pattern.shared:
        for operation in operations:
            operation.out, operation.target = operations[0].out, operations[0].target


def _all_reduce_here(operations: Sequence[Operation], pattern: Call) -> None:
    """Reduce into one new array and copy it to everybody: the shortest way for the smallest and most frequent case."""
    combine = pattern.reducer
    assert combine is not None
    total = combine.total([operation.source for operation in operations])  # type: ignore[misc]
    for operation in operations:
        if operation.out is None:
            operation.out = total if pattern.shared else total.copy()
        else:
            target = operation.out if operation.target is None else operation.target
            target[...] = total


def _transfers(operations: Sequence[Operation], pattern: Call) -> list[Transfer]:
    """Return a collective as transfers between the arrays of its ranks."""
    given = [None if operation.source is None else operation.source.reshape(-1) for operation in operations]
    got = [None if operation.target is None else operation.target.reshape(-1) for operation in operations]
    return [_transfer(move, given, got, pattern.reducer) for move in moves(pattern)]


def _transfer(
    move: Move, given: Sequence[Array | None], got: Sequence[Array | None], reducer: Reducer | None
) -> Transfer:
    size, from_ranks, to_ranks = move
    sources = [given[rank][start : start + size] for rank, start in from_ranks]  # type: ignore[index]  # all of these
    targets = [got[rank][start : start + size] for rank, start in to_ranks]  # type: ignore[index]  # have arrays
    first = to_ranks[0][0]
    exclusive = reducer is None or not first or not np.may_share_memory(targets[0], sources[first])
    return Transfer(sources, targets, reducer, exclusive)


def _written(operations: Sequence[Operation], pattern: Call) -> Sequence[Operation]:
    """Return the ends whose results are written: all, or the first for all of them."""
    return operations[:1] if pattern.shared else operations
