"""The short cut inside one process: when all ranks of a group share memory, no program needs to run.

Once the last rank has arrived, a collective is nothing but a list of transfers: one or more source views, folded in
rank order, written to one or more target views. Large ones are cut in pieces for the worker threads.
Cost: each input is read once and each output written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from ...collectives.call import Call
from ...collectives.counts import blocks_given, blocks_got
from ...collectives.kinds import Collective
from ...collectives.reduce import Array, Reducer
from ..match import Unfit
from ..operation import Operation
from .workers import PIECE_BYTES


@dataclass(frozen=True, slots=True)
class Transfer:
    """Fold `sources` (all of one shape) and write the outcome to every target.

    A target may be the memory of the source of the same rank: all sources are read before the first target but
    `targets[0]`, which accumulates, is written; `exclusive` says that `targets[0]` overlaps no source but the first.
    """

    sources: Sequence[Array]
    targets: Sequence[Array]
    reducer: Reducer | None = None
    exclusive: bool = True

    def run(self) -> None:
        """Do it, in the calling thread."""
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
        sources = [source.reshape(-1) for source in self.sources]
        targets = [target.reshape(-1) for target in self.targets]
        length = max(1, PIECE_BYTES // max(1, sources[0].itemsize))
        for start in range(0, sources[0].size, length):
            part = slice(start, start + length)
            yield Transfer(
                [source[part] for source in sources], [target[part] for target in targets], self.reducer, self.exclusive
            ).run


# Up to here a new array costs less than finding out where to accumulate; beyond, its pages cost more than the sum.
_TINY_BYTES = 16 << 10


def run_here(operations: Sequence[Operation], pattern: Call) -> None:
    """Carry out one small collective in the calling thread, given every member's end in group order."""
    if pattern.kind is Collective.ALL_REDUCE and pattern.nbytes <= _TINY_BYTES:
        _all_reduce_here(operations, pattern)
        return
    fit_all(operations, pattern)
    for transfer in _PLANS[pattern.kind](operations):
        for piece in transfer.cut() if pattern.nbytes > PIECE_BYTES else (transfer.run,):
            piece()


def pieces(operations: Sequence[Operation], pattern: Call) -> list[Callable[[], None]]:
    """Cut one collective for the worker threads."""
    fit_all(operations, pattern)
    return [piece for transfer in _PLANS[pattern.kind](operations) for piece in transfer.cut()]


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


def _all_reduce(operations: Sequence[Operation]) -> list[Transfer]:
    call = operations[0].call
    targets = [_target(o) for o in _written(operations, call)]
    return [Transfer([_source(o) for o in operations], targets, call.reducer)]


def _reduce(operations: Sequence[Operation]) -> list[Transfer]:
    root = operations[operations[0].call.root]
    in_place = root.port.position > 0 and np.may_share_memory(_target(root), _source(root))
    return [Transfer([_source(o) for o in operations], [_target(root)], root.call.reducer, exclusive=not in_place)]


def _reduce_scatter(operations: Sequence[Operation]) -> list[Transfer]:
    blocks = [_blocks_given(o) for o in operations]
    return [Transfer([block[i] for block in blocks], [_target(o)], o.call.reducer) for i, o in enumerate(operations)]


def _all_gather(operations: Sequence[Operation]) -> list[Transfer]:
    targets = [_blocks_got(o) for o in _written(operations, operations[0].call)]
    return [Transfer([_source(o)], [target[i] for target in targets]) for i, o in enumerate(operations)]


def _all_to_all(operations: Sequence[Operation]) -> list[Transfer]:
    n = len(operations)
    sources = [_blocks_given(o) for o in operations]
    targets = [_blocks_got(o) for o in operations]
    return [Transfer([sources[i][j]], [targets[j][i]]) for i in range(n) for j in range(n)]


def _broadcast(operations: Sequence[Operation]) -> list[Transfer]:
    root = operations[operations[0].call.root]
    return [Transfer([_source(root)], [_target(o) for o in _written(operations, root.call)])]


def _gather(operations: Sequence[Operation]) -> list[Transfer]:
    targets = _blocks(_target(operations[operations[0].call.root]), len(operations))
    return [Transfer([_source(o)], [target]) for o, target in zip(operations, targets, strict=True)]


def _scatter(operations: Sequence[Operation]) -> list[Transfer]:
    sources = _blocks(_source(operations[operations[0].call.root]), len(operations))
    return [Transfer([source], [_target(o)]) for o, source in zip(operations, sources, strict=True)]


def _permute(operations: Sequence[Operation]) -> list[Transfer]:
    pairs = operations[0].call.pairs
    return [Transfer([_source(operations[src])], [_target(operations[dst])]) for src, dst in pairs]


def _barrier(operations: Sequence[Operation]) -> list[Transfer]:
    return []


def _p2p(operations: Sequence[Operation]) -> list[Transfer]:
    sender, receiver = operations
    return [Transfer([_source(sender)], [_target(receiver)])]


_PLANS: dict[Collective, Callable[[Sequence[Operation]], list[Transfer]]] = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.REDUCE: _reduce,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.ALL_GATHER: _all_gather,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.BROADCAST: _broadcast,
    Collective.GATHER: _gather,
    Collective.SCATTER: _scatter,
    Collective.PERMUTE: _permute,
    Collective.BARRIER: _barrier,
    Collective.P2P: _p2p,
}


def _written(operations: Sequence[Operation], pattern: Call) -> Sequence[Operation]:
    """Return the ends whose results are written: all, or the first for all of them."""
    return operations[:1] if pattern.shared else operations


def _source(operation: Operation) -> Array:
    assert operation.source is not None, "every rank that is read from has passed an array"
    return operation.source


def _target(operation: Operation) -> Array:
    assert operation.target is not None, "every rank that is written to has a result array"
    return operation.target


def _blocks_given(operation: Operation) -> list[Array]:
    """Cut what a rank gives into the blocks of all ranks."""
    return _blocks_of(_source(operation), operation, blocks_given)


def _blocks_got(operation: Operation) -> list[Array]:
    """Cut what a rank gets into the blocks of all ranks."""
    return _blocks_of(_target(operation), operation, blocks_got)


def _blocks_of(
    array: Array, operation: Operation, order: Callable[[Collective, int, int], Sequence[int]]
) -> list[Array]:
    call = operation.call
    if not call.counts:
        return _blocks(array, call.size)
    return _cut(array, [call.counts[block] for block in order(call.kind, call.size, operation.port.position)])


def _cut(array: Array, rows: Sequence[int]) -> list[Array]:
    """Cut axis 0 in blocks of so many rows."""
    return [array[stop - length : stop] for stop, length in zip(accumulate(rows), rows, strict=True)]


def _blocks(array: Array, count: int) -> list[Array]:
    """Cut axis 0 in `count` equal blocks; `np.split` takes ten times as long."""
    rows = len(array) // count
    return [array[at * rows : (at + 1) * rows] for at in range(count)]
