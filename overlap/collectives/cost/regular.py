"""What one node does where all do the same: rounds of algorithms that look alike from every rank, without their table.

Ranks of such an algorithm send as many messages of the same sizes, and what one of them sends over the network another
one sends to it. So rank 0 stands for all: its messages come back to itself, and a thousand of them in a step are one
row that counts for a thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import numpy as np

from ..placement import Floats
from .rounds import Round, Rounds

__all__ = ["regular_rounds"]

_Made: TypeAlias = tuple[int, list[Round]]  # slots, rounds


def regular_rounds(collective: str, algorithm: str, size: int) -> Rounds | None:
    """Return what rank 0 does of an algorithm over `size` ranks, as rounds of one rank; None if ranks differ.

    Cost: as many rounds as the algorithm has different steps.
    """
    make = _ALGORITHMS.get((collective, algorithm))
    if make is None or size < 2 or (algorithm in _POWERS and size & (size - 1)):
        return None
    slots, rounds = make(size)
    return Rounds(size=1, slots=slots, rounds=tuple(rounds))


def _round(
    messages: int = 0,
    sent: float = 0.0,
    *,
    repeat: int = 1,
    added: float = 0.0,
    local_added: float = 0.0,
    moving: float = 0.0,
    adding: float = 0.0,
    local: float = 0.0,
) -> Round:
    row = np.zeros(1 if messages else 0, np.int64)
    return Round(
        repeat=repeat,
        src=row,
        dst=row,
        sent=np.full(len(row), float(sent)),
        count=np.full(len(row), float(messages)),
        far=np.ones(len(row), np.bool_),
        added=_of_one(added),
        local_added=_of_one(local_added),
        moving=_of_one(moving),
        adding=_of_one(adding),
        local=_of_one(local),
    )


def _of_one(amount: float) -> Floats:
    return np.full(1, amount, np.float64)


def _mesh(size: int) -> tuple[Round, Round]:
    """Return a step that reduces and one that spreads: of a reduction's operands each is read, and the sum kept."""
    others = size - 1
    return _round(others, others, added=others, adding=size + 1), _round(others, others, moving=size)


def _doubling(size: int) -> tuple[list[Round], list[Round]]:
    """Return the steps that halve, longest first, and those that double."""
    lengths = [1 << bit for bit in range(size.bit_length() - 1)]
    halving = [_round(1, length, added=length, adding=3 * length) for length in reversed(lengths)]
    return halving, [_round(1, length, moving=2 * length) for length in lengths]


def _ring(size: int) -> tuple[Round, Round]:
    return _round(1, 1, repeat=size - 1, added=1, adding=3), _round(1, 1, repeat=size - 1, moving=2)


def _own(rounds: list[Round]) -> list[Round]:
    """Return the same after each rank has copied its own block to its output."""
    copy = _round(local=2)
    return [copy, *rounds]


def _one_shot(size: int) -> _Made:
    return 1, [_round(size - 1, size - 1, moving=size), _round(repeat=size - 1, local_added=1, local=3)]


def _recursive_doubling(size: int) -> _Made:
    return 1, [_round(1, 1, repeat=size.bit_length() - 1, added=1, adding=3)]


def _bruck(size: int) -> _Made:
    distance = np.arange(size)
    amounts = [int((distance >> bit & 1).sum()) for bit in range((size - 1).bit_length())]
    packed = [_round(1, amount, moving=2 * amount, local=2 * amount) for amount in amounts]
    return size, [*packed, _round(local=2 * size)]


def _direct(size: int) -> _Made:
    return size, _own([_round(size - 1, size - 1, moving=2 * (size - 1))])


def _pairwise(size: int) -> _Made:
    return size, _own([_round(1, 1, repeat=size - 1, moving=2)])


def _spread(name: str) -> Iterator[tuple[tuple[str, str], Callable[[int], _Made]]]:
    """Yield the three collectives that a pattern gives, in which every rank owns a chunk."""

    def both(size: int) -> tuple[list[Round], list[Round]]:
        if name == "rdh":
            return _doubling(size)
        back, forth = _mesh(size) if name == "mesh" else _ring(size)
        return [back], [forth]

    yield ("all_reduce", name), lambda size: (size, [*both(size)[0], *both(size)[1]])
    yield ("reduce_scatter", name), lambda size: (size, both(size)[0])
    yield ("all_gather", name), lambda size: (size, _own(both(size)[1]))


_POWERS = ("rdh", "recursive_doubling")
_ALGORITHMS: Mapping[tuple[str, str], Callable[[int], _Made]] = {
    **dict(_spread("mesh")),
    **dict(_spread("rdh")),
    **dict(_spread("ring")),
    ("all_reduce", "one_shot"): _one_shot,
    ("all_reduce", "recursive_doubling"): _recursive_doubling,
    ("all_to_all", "mesh"): _direct,
    ("all_to_all", "pairwise"): _pairwise,
    ("all_to_all", "bruck"): _bruck,
}
