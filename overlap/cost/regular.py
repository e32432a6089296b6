"""What one node does where all do the same: rounds of algorithms that look alike from every rank, without their table.

Ranks of such an algorithm send as many messages of the same sizes, and what one of them sends over the network another
one sends to it. So rank 0 stands for all: its messages come back to itself, and a thousand of them in a step are one
row that counts for a thousand. Where wires join some nodes, as in an UltraServer, the nodes of one such unit stand for
all: what they send each other stays among them, and what goes to another unit comes back to the same place in theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TypeAlias

import numpy as np

from ..collectives.placement import Floats
from .regularrows import Rows, Unit
from .rounds import Round, Rounds

_Made: TypeAlias = tuple[int, list[Round]]  # slots, rounds


def regular_rounds(collective: str, algorithm: str, size: int, ring: Sequence[int] = (0,)) -> Rounds | None:
    """Return what the first ranks do of an algorithm over `size` ranks; None if others do something else.

    Args:
        collective: Its name.
        algorithm: Its name.
        size: Ranks: as many units, one after the other, of as many ranks as `ring` has.
        ring: Ranks of the first unit in the order in which a ring passes them.

    Cost: as many rounds as the algorithm has different steps.
    """
    make = _ALGORITHMS.get((collective, algorithm))
    if make is None or size < 2 or (algorithm in _POWERS and size & (size - 1)):
        return None
    slots, rounds = make(Unit(size, ring))
    return Rounds(size=len(ring), slots=slots, rounds=tuple(rounds))


def _round(
    unit: Unit,
    rows: Rows | None = None,
    sent: float = 0.0,
    *,
    repeat: int = 1,
    added: float = 0.0,
    local_added: float = 0.0,
    moving: float = 0.0,
    adding: float = 0.0,
    local: float = 0.0,
    passed_on: bool = False,
) -> Round:
    rows = unit.nobody() if rows is None else rows

    def of_each(amount: float) -> Floats:
        return np.full(unit.places, amount, np.float64)

    return Round(
        repeat=repeat,
        passed_on=passed_on,
        src=rows.src,
        dst=rows.dst,
        sent=rows.count * float(sent),
        count=rows.count,
        far=rows.far,
        added=of_each(added),
        local_added=of_each(local_added),
        moving=of_each(moving),
        adding=of_each(adding),
        local=of_each(local),
    )


def _mesh(unit: Unit) -> tuple[Round, Round]:
    """Return a step that reduces and one that spreads: of a reduction's operands each is read, and the sum kept."""
    rows, size = unit.everybody(), unit.size
    return _round(unit, rows, 1, added=size - 1, adding=size + 1), _round(unit, rows, 1, moving=size)


def _doubling(unit: Unit) -> tuple[list[Round], list[Round]]:
    """Return the steps that halve, longest first, and those that double."""
    steps = [(1 << bit, unit.opposite(1 << bit)) for bit in range(unit.size.bit_length() - 1)]
    halving = [_round(unit, rows, length, added=length, adding=3 * length) for length, rows in reversed(steps)]
    return halving, [_round(unit, rows, length, moving=2 * length) for length, rows in steps]


def _ring(unit: Unit) -> tuple[Round, Round]:
    rows, steps = unit.following(), unit.size - 1
    back = _round(unit, rows, 1, repeat=steps, added=1, adding=3, passed_on=True)
    return back, _round(unit, rows, 1, repeat=steps, moving=2)


def _own(unit: Unit, rounds: Iterable[Round]) -> list[Round]:
    """Return the same after each rank has copied its own block to its output."""
    copy = _round(unit, local=2)
    return [copy, *rounds]


def _one_shot(unit: Unit) -> _Made:
    size = unit.size
    adding = _round(unit, repeat=size - 1, local_added=1, local=3)
    return 1, [_round(unit, unit.everybody(), 1, moving=size), adding]


def _recursive_doubling(unit: Unit) -> _Made:
    steps = (unit.opposite(1 << bit) for bit in range(unit.size.bit_length() - 1))
    return 1, [_round(unit, rows, 1, repeat=times, added=1, adding=3) for rows, times in _runs(steps)]


def _bruck(unit: Unit) -> _Made:
    distance, bits = np.arange(unit.size), range((unit.size - 1).bit_length())
    amounts = [int((distance >> bit & 1).sum()) for bit in bits]
    packed = [
        _round(unit, unit.ahead(1 << bit), amount, moving=2 * amount, local=2 * amount)
        for bit, amount in zip(bits, amounts, strict=True)
    ]
    return unit.size, [*packed, _round(unit, local=2 * unit.size)]


def _direct(unit: Unit) -> _Made:
    return unit.size, _own(unit, [_round(unit, unit.everybody(), 1, moving=2 * (unit.size - 1))])


def _pairwise(unit: Unit) -> _Made:
    steps = (unit.ahead(distance) for distance in range(1, unit.size))
    return unit.size, _own(unit, (_round(unit, rows, 1, repeat=times, moving=2) for rows, times in _runs(steps)))


def _runs(steps: Iterable[Rows]) -> Iterator[tuple[Rows, int]]:
    """Yield steps that are alike in a row as one, and how many they are."""
    for _, run in groupby(steps, key=Rows.key):
        rows, *more = run
        yield rows, 1 + len(more)


def _spread(name: str) -> Iterator[tuple[tuple[str, str], Callable[[Unit], _Made]]]:
    """Yield the three collectives that a pattern gives, in which every rank owns a chunk."""

    def both(unit: Unit) -> tuple[list[Round], list[Round]]:
        if name == "rdh":
            return _doubling(unit)
        back, forth = _mesh(unit) if name == "mesh" else _ring(unit)
        return [back], [forth]

    yield ("all_reduce", name), lambda unit: (unit.size, [*both(unit)[0], *both(unit)[1]])
    yield ("reduce_scatter", name), lambda unit: (unit.size, both(unit)[0])
    yield ("all_gather", name), lambda unit: (unit.size, _own(unit, both(unit)[1]))


_POWERS = ("rdh", "recursive_doubling")
_ALGORITHMS: Mapping[tuple[str, str], Callable[[Unit], _Made]] = {
    **dict(_spread("mesh")),
    **dict(_spread("rdh")),
    **dict(_spread("ring")),
    ("all_reduce", "one_shot"): _one_shot,
    ("all_reduce", "recursive_doubling"): _recursive_doubling,
    ("all_to_all", "mesh"): _direct,
    ("all_to_all", "pairwise"): _pairwise,
    ("all_to_all", "bruck"): _bruck,
}
