"""Collectives as tables of pulls, for ranks that can read each other's inputs, in one process or several. Pure.

A pull says from which inputs a range of a result is read. Every rank with a result reads these inputs, and writes the
result once. Only an all-reduce is worth dividing between processes: each rank reduces a slice, and then reads the
slices of the other ranks.
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
"""(group rank, first element of a range in the input or in the result of that rank)."""


class Pull(NamedTuple):
    """A range of elements of a rank's result: reduced from several inputs in the order of ranks, or copied from one."""

    start: int  # First element in the result
    size: int  # Number of elements
    sources: tuple[Place, ...]  # Ranges of `size` elements of inputs


class MemoryMove(NamedTuple):
    """A pull together with all ranks that have this pull."""

    size: int  # Number of elements
    sources: tuple[Place, ...]  # Ranges of inputs
    targets: tuple[Place, ...]  # Ranges of results


# Collectives whose result is the same on all ranks.
_ALIKE = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.BROADCAST)

# Collectives in which the ranks read different parts of an input.
_CUTTING = (Collective.ALL_TO_ALL, Collective.REDUCE_SCATTER, Collective.SCATTER)

# Largest groups with cached moves: the moves of an all-to-all grow with the square of the ranks.
_KEPT_RANKS = 32


def pulls(call: Call, position: int) -> Sequence[Pull]:
    """Return the pulls that make the result of the rank at a position of the group; [] if the rank gets none."""
    return _PULLS[call.kind](call, position, prod(call.shape or ()))


def moves(call: Call) -> Sequence[MemoryMove]:
    """Return the moves that make the results of all ranks; of a shared result, those of the first rank alone."""
    return _make_moves(call) if call.counts or call.size > _KEPT_RANKS else _cached_moves(call)


def _make_moves(call: Call) -> Sequence[MemoryMove]:
    """Do the work of `moves`, without a cache."""
    positions = range(1 if call.shared else call.size)
    # Ranks with equal results have the same pulls.
    sharing = [positions] if call.kind in _ALIKE else [(position,) for position in positions]
    return [
        MemoryMove(size, sources, tuple((position, start) for position in group))
        for group in sharing
        for start, size, sources in pulls(call, group[0])
        if size
    ]


_cached_moves = lru_cache(maxsize=256)(_make_moves)


def reduced_slice(call: Call, position: int) -> Pull:
    """Return the pull of the slice that the rank at a position reduces in an all-reduce."""
    start, stop = _slice_bounds(call, position)
    return Pull(start, stop - start, tuple((other, start) for other in range(call.size)))


def collecting_pulls(call: Call) -> list[Pull]:
    """Return the pulls that collect the slices of an all-reduce, each from the result of the rank that reduced it."""
    slices = [(other, *_slice_bounds(call, other)) for other in range(call.size)]
    return [Pull(start, stop - start, ((other, start),)) for other, start, stop in slices]


def shared_result_pulls(call: Call, position: int) -> list[Pull]:
    """Return the pulls by which the rank at a position writes its part of a result that all ranks share.

    In an all-reduce the part is its slice; in a broadcast the root writes everything; in an all-gather its own block.
    """
    if call.kind is Collective.ALL_REDUCE:
        return [reduced_slice(call, position)]
    if call.kind is Collective.BROADCAST:
        return list(pulls(call, position)) if position == call.root else []
    return [pulls(call, position)[position]]


def is_input_read(call: Call, position: int) -> bool:
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
    """Return the positions of the other ranks whose inputs a rank reads; None if it waits for all other ranks."""
    if call.kind is Collective.BARRIER or call.shared:
        return None
    ranks = {rank for pull in pulls(call, position) for rank, _ in pull.sources} - {position}
    return None if len(ranks) == call.size - 1 else tuple(sorted(ranks))


@lru_cache(maxsize=256)
def unread_input_range(call: Call, position: int) -> tuple[int, int]:
    """Return the elements [start, stop) of a rank's own input that no other rank reads; (0, 0) if there are none."""
    if call.kind in _CUTTING:
        for pull in pulls(call, position):
            for rank, start in pull.sources:
                if rank == position:
                    return start, start + pull.size
    return 0, 0


def _slice_bounds(call: Call, position: int) -> tuple[int, int]:
    """Return the elements [start, stop) that the rank reduces in an all-reduce."""
    size = prod(call.shape or ())
    return position * size // call.size, (position + 1) * size // call.size


def _fold_pulls(call: Call, size: int, start: int = 0) -> list[Pull]:
    """Return the pull of a whole result, reduced from `size` elements of every rank's input, from `start` on."""
    return [Pull(0, size, tuple((other, start) for other in range(call.size)))]


def _reduce_scatter_pulls(call: Call, position: int, size: int) -> list[Pull]:
    """Return the pull that reduces the rank's block; see `_PULLS` for the arguments."""
    start, stop = _block_bounds(call, size // call.size)[position : position + 2]
    return _fold_pulls(call, stop - start, start)


def _all_gather_pulls(call: Call, size: int) -> list[Pull]:
    """Pull each rank's whole input: `size` elements, unless the call has counts."""
    blocks = pairwise(_block_bounds(call, size))
    return [Pull(start, stop - start, ((other, 0),)) for other, (start, stop) in enumerate(blocks)]


def _all_to_all_pulls(call: Call, position: int, size: int) -> list[Pull]:
    """Return a pull of the block that each rank has for this one. Equal blocks are parts of `size` elements."""
    if not call.counts:
        block = size // call.size
        return [Pull(other * block, block, ((other, position * block),)) for other in range(call.size)]
    ranges, offset = [], 0
    for other, bounds in enumerate(_uneven_block_bounds(call)):
        start, stop = bounds[position : position + 2]
        ranges.append(Pull(offset, stop - start, ((other, start),)))
        offset += stop - start
    return ranges


def _block_bounds(call: Call, equal_elements: int) -> list[int]:
    """Return the first element of each rank's block, as the call's counts or `equal_elements` say, and the end."""
    row = prod(call.result_shape[1:])
    sizes = [count * row for count in call.counts] if call.counts else [equal_elements] * call.size
    return [0, *accumulate(sizes)]


@lru_cache(maxsize=8)
def _uneven_block_bounds(call: Call) -> list[list[int]]:
    """Return for each rank the first element of each block of its input, and the end of the last one."""
    n, row = call.size, prod(call.result_shape[1:])  # `counts` is a table with n lines of n numbers, flattened
    return [[0, *accumulate(count * row for count in call.counts[at : at + n])] for at in range(0, n * n, n)]


def _scatter_pulls(call: Call, position: int, size: int) -> list[Pull]:
    """Pull the rank's block from the root; see `_PULLS` for the arguments."""
    block = size // call.size
    return [Pull(0, block, ((call.root, position * block),))]


# Pulls by kind: functions of the call, the position of the rank, and the elements of an input.
_PULLS: dict[Collective, Callable[[Call, int, int], list[Pull]]] = {
    Collective.ALL_REDUCE: lambda call, _, size: _fold_pulls(call, size),
    Collective.REDUCE: lambda call, position, size: _fold_pulls(call, size) if position == call.root else [],
    Collective.REDUCE_SCATTER: _reduce_scatter_pulls,
    Collective.ALL_GATHER: lambda call, _, size: _all_gather_pulls(call, size),
    Collective.GATHER: lambda call, position, size: _all_gather_pulls(call, size) if position == call.root else [],
    Collective.ALL_TO_ALL: _all_to_all_pulls,
    Collective.BROADCAST: lambda call, _, size: [Pull(0, size, ((call.root, 0),))],
    Collective.SCATTER: _scatter_pulls,
    Collective.PERMUTE: lambda call, to, size: [Pull(0, size, ((src, 0),)) for src, dst in call.pairs if dst == to],
    Collective.BARRIER: lambda _, __, ___: [],
    # the sender is at position 0, the receiver at 1
    Collective.P2P: lambda _, position, size: [Pull(0, size, ((0, 0),))] if position == 1 else [],
}
