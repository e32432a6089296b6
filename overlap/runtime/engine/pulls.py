"""Collectives as tables of pulls, for ranks that can read each other's inputs, in one process or several. Pure.

Every rank with a result reads the inputs of the result, and writes it once. Only an all-reduce is worth dividing
between processes: each rank reduces a slice, and then reads the slices of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple, TypeAlias

from ...collectives.call import Call
from ...collectives.kinds import Collective

Place: TypeAlias = tuple[int, int]
"""Position of a rank, and the first element of a range in its input, or in its result."""


class Pull(NamedTuple):
    """A range of elements of a result: folded from several inputs in the order of ranks, or copied from one."""

    start: int  # First element in the result
    size: int  # Number of elements
    sources: tuple[Place, ...]


class MemoryMove(NamedTuple):
    """A pull of one rank, or of several with the same pull."""

    size: int  # Number of elements
    sources: tuple[Place, ...]
    targets: tuple[Place, ...]


# Collectives whose result is the same on all ranks.
_ALIKE = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.BROADCAST)

# Collectives in which each rank reads another part of an input.
_CUTTING = (Collective.ALL_TO_ALL, Collective.REDUCE_SCATTER, Collective.SCATTER)
# Collectives in which a rank reads from one other.
_FROM_ONE = (Collective.BROADCAST, Collective.SCATTER, Collective.PERMUTE)

# Largest groups with cached moves: the moves of an all-to-all grow with the square of the ranks.
_KEPT_RANKS = 32


def pulls(call: Call, position: int) -> Sequence[Pull]:
    """Return the pulls that make the result of the rank at a position."""
    return _PULLS[call.kind](call, position, prod(call.shape or ()))


def moves(call: Call) -> Sequence[MemoryMove]:
    """Return the pulls of all ranks that write a result; for a shared result, of the first rank only."""
    return _moves(call) if call.counts or call.size > _KEPT_RANKS else _kept_moves(call)


def _moves(call: Call) -> Sequence[MemoryMove]:
    """Return the moves of all ranks; ranks with equal results share one."""
    positions = range(1 if call.shared else call.size)
    if call.kind in _ALIKE:
        return [
            MemoryMove(size, sources, tuple((position, start) for position in positions))
            for start, size, sources in pulls(call, 0)
            if size
        ]
    return [
        MemoryMove(size, sources, ((position, start),))
        for position in positions
        for start, size, sources in pulls(call, position)
        if size
    ]


_kept_moves = lru_cache(maxsize=256)(_moves)


def reduced_slice(call: Call, position: int) -> Pull:
    """Return the slice of an all-reduce that the rank at a position reduces."""
    start, stop = _slice(call, position)
    return Pull(start, stop - start, tuple((other, start) for other in range(call.size)))


def collecting_pulls(call: Call) -> list[Pull]:
    """Return the pulls of the whole result, once every rank has its slice in place in its result."""
    slices = [(other, *_slice(call, other)) for other in range(call.size)]
    return [Pull(start, stop - start, ((other, start),)) for other, start, stop in slices]


def result_pulls(call: Call, position: int) -> list[Pull]:
    """Return the pulls with which the rank at a position fills its part of a shared result."""
    if call.kind is Collective.ALL_REDUCE:
        return [reduced_slice(call, position)]
    if call.kind is Collective.BROADCAST:
        return list(pulls(call, position)) if position == call.root else []
    return [pulls(call, position)[position]]


def gives(call: Call, position: int) -> bool:
    """Whether another rank reads the input of the rank at a position."""
    if call.kind in (Collective.BROADCAST, Collective.SCATTER):
        return position == call.root
    if call.kind in (Collective.REDUCE, Collective.GATHER):
        return position != call.root
    if call.kind is Collective.PERMUTE:
        return any(src == position for src, _ in call.pairs)
    return call.kind is not Collective.BARRIER


@lru_cache(maxsize=256)
def needed_positions(call: Call, position: int) -> tuple[int, ...] | None:
    """Return the positions of the ranks with inputs that a rank needs; None: it waits for all."""
    if call.kind is Collective.BARRIER or call.shared:
        return None
    ranks = {rank for pull in pulls(call, position) for rank, _ in pull.sources} - {position}
    return None if len(ranks) == call.size - 1 else tuple(sorted(ranks))


@lru_cache(maxsize=256)
def unread(call: Call, position: int) -> tuple[int, int]:
    """Return the range of its own input that no other rank reads, as its first element and the one after its last."""
    if call.kind in _CUTTING:
        for pull in pulls(call, position):
            for rank, start in pull.sources:
                if rank == position:
                    return start, start + pull.size
    return 0, 0


def rings(call: Call, position: int) -> bool:
    """Whether other ranks wait for the input of the rank at a position, and perhaps for no other input."""
    return call.kind in _FROM_ONE and gives(call, position)


def _slice(call: Call, position: int) -> tuple[int, int]:
    """Return the bounds of the slice of an all-reduce that the rank at a position reduces."""
    size = prod(call.shape or ())
    return position * size // call.size, (position + 1) * size // call.size


def _fold(call: Call, size: int, start: int = 0) -> list[Pull]:
    """Return the pull that adds up one range of the inputs of all ranks."""
    return [Pull(0, size, tuple((other, start) for other in range(call.size)))]


def _reduce_scatter(call: Call, position: int, size: int) -> list[Pull]:
    start, stop = _blocks(call, size // call.size)[position : position + 2]
    return _fold(call, stop - start, start)


def _all_gather(call: Call, size: int) -> list[Pull]:
    blocks = pairwise(_blocks(call, size))
    return [Pull(start, stop - start, ((other, 0),)) for other, (start, stop) in enumerate(blocks)]


def _all_to_all(call: Call, position: int, size: int) -> list[Pull]:
    """Return the pulls of a rank's blocks from all ranks, of equal or of given lengths."""
    if call.counts:
        return _uneven_all_to_all(call, position)
    block = size // call.size
    return [Pull(other * block, block, ((other, position * block),)) for other in range(call.size)]


def _uneven_all_to_all(call: Call, position: int) -> list[Pull]:
    """Return the pulls of a rank's blocks from all ranks, of given lengths."""
    ranges, offset = [], 0
    for other, starts in enumerate(_given_starts(call)):
        start, stop = starts[position : position + 2]
        ranges.append(Pull(offset, stop - start, ((other, start),)))
        offset += stop - start
    return ranges


def _blocks(call: Call, block: int) -> list[int]:
    """Return the first element of the block of each rank, and the end of the last one."""
    row = prod(call.result_shape[1:])
    sizes = [count * row for count in call.counts] if call.counts else [block] * call.size
    return [0, *accumulate(sizes)]


@lru_cache(maxsize=8)
def _given_starts(call: Call) -> list[list[int]]:
    """Return for each rank the first element of each block of its input, and the end of the last one."""
    n, row = call.size, prod(call.result_shape[1:])
    return [[0, *accumulate(count * row for count in call.counts[at : at + n])] for at in range(0, n * n, n)]


def _scatter(call: Call, position: int, size: int) -> list[Pull]:
    block = size // call.size
    return [Pull(0, block, ((call.root, position * block),))]


# Pulls by kind: functions of the call, the position of the rank, and the elements of an input.
_PULLS: dict[Collective, Callable[[Call, int, int], list[Pull]]] = {
    Collective.ALL_REDUCE: lambda call, _, size: _fold(call, size),
    Collective.REDUCE: lambda call, position, size: _fold(call, size) if position == call.root else [],
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.ALL_GATHER: lambda call, _, size: _all_gather(call, size),
    Collective.GATHER: lambda call, position, size: _all_gather(call, size) if position == call.root else [],
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.BROADCAST: lambda call, _, size: [Pull(0, size, ((call.root, 0),))],
    Collective.SCATTER: _scatter,
    Collective.PERMUTE: lambda call, to, size: [Pull(0, size, ((src, 0),)) for src, dst in call.pairs if dst == to],
    Collective.BARRIER: lambda _, __, ___: [],
    Collective.P2P: lambda _, position, size: [Pull(0, size, ((0, 0),))] if position == 1 else [],
}
