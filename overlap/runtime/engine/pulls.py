"""What each rank takes from the others where it can read their inputs: a collective as a list of pulls. Pure.

Every collective is one: whoever gets a result reads what it is made of, and writes it once. Only an all-reduce is worth
dividing: each rank reduces a slice, and then takes the others' slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

from ...collectives.call import Call
from ...collectives.kinds import Collective


class Pull(NamedTuple):
    """A range of elements of a result: what it is folded from, in the order of ranks, or copied from if that is one."""

    start: int  # Where it begins in the result
    size: int  # How many elements
    sources: tuple[tuple[int, int], ...]  # Position of each rank, and where the range begins in what it gives


def pulls(call: Call, position: int) -> Sequence[Pull]:
    """Return what makes the result of the rank at a position."""
    return _PULLS[call.kind](call, position, prod(call.shape or ()))


def reduced(call: Call, position: int) -> Pull:
    """Return the slice of an all-reduce that the rank at a position reduces."""
    start, stop = _slice(call, position)
    return Pull(start, stop - start, tuple((other, start) for other in range(call.size)))


def collected(call: Call) -> list[Pull]:
    """Return what makes the whole result, once every rank has its slice where it lies in the result."""
    slices = [(other, *_slice(call, other)) for other in range(call.size)]
    return [Pull(start, stop - start, ((other, start),)) for other, start, stop in slices]


def laid(call: Call, position: int) -> list[Pull]:
    """Return what the rank at a position puts into a result that all share."""
    size = prod(call.shape or ())
    if call.kind is Collective.ALL_REDUCE:
        return [reduced(call, position)]
    if call.kind is Collective.BROADCAST:
        return [Pull(0, size, ((position, 0),))] if position == call.root else []
    if not call.counts:
        return [Pull(position * size, size, ((position, 0),))]
    row = prod(call.result_shape[1:])
    return [Pull(sum(call.counts[:position]) * row, call.counts[position] * row, ((position, 0),))]


def gives(call: Call, position: int) -> bool:
    """Whether anybody reads the input of the rank at a position."""
    if call.kind in (Collective.BROADCAST, Collective.SCATTER):
        return position == call.root
    if call.kind is Collective.PERMUTE:
        return any(src == position for src, _ in call.pairs)
    return call.kind is not Collective.BARRIER


def _slice(call: Call, position: int) -> tuple[int, int]:
    size = prod(call.shape or ())
    return position * size // call.size, (position + 1) * size // call.size


def _folded(call: Call, size: int, start: int = 0) -> list[Pull]:
    return [Pull(0, size, tuple((other, start) for other in range(call.size)))]


def _all_reduce(call: Call, position: int, size: int) -> list[Pull]:
    return _folded(call, size)


def _reduce(call: Call, position: int, size: int) -> list[Pull]:
    return _folded(call, size) if position == call.root else []


def _reduce_scatter(call: Call, position: int, size: int) -> list[Pull]:
    block = size // call.size
    return _folded(call, block, position * block)


def _all_gather(call: Call, position: int, size: int) -> list[Pull]:
    return [Pull(other * size, size, ((other, 0),)) for other in range(call.size)]


def _gather(call: Call, position: int, size: int) -> list[Pull]:
    return _all_gather(call, position, size) if position == call.root else []


def _all_to_all(call: Call, position: int, size: int) -> list[Pull]:
    block = size // call.size
    return [Pull(other * block, block, ((other, position * block),)) for other in range(call.size)]


def _broadcast(call: Call, position: int, size: int) -> list[Pull]:
    return [Pull(0, size, ((call.root, 0),))]


def _scatter(call: Call, position: int, size: int) -> list[Pull]:
    block = size // call.size
    return [Pull(0, block, ((call.root, position * block),))]


def _permute(call: Call, position: int, size: int) -> list[Pull]:
    return [Pull(0, size, ((src, 0),)) for src, dst in call.pairs if dst == position]


def _barrier(call: Call, position: int, size: int) -> list[Pull]:
    return []


_PULLS: dict[Collective, Callable[[Call, int, int], list[Pull]]] = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.REDUCE: _reduce,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.ALL_GATHER: _all_gather,
    Collective.GATHER: _gather,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.BROADCAST: _broadcast,
    Collective.SCATTER: _scatter,
    Collective.PERMUTE: _permute,
    Collective.BARRIER: _barrier,
}
