"""Rounds of regular algorithms, which are the same for every rank, without their tables.

Ranks of such an algorithm send as many messages of the same sizes, and receive over the network what they send over it.
So rank 0 represents all: its messages come back to itself, and a thousand of them in a step are one row with a count of
a thousand. If wires join some nodes, as in an UltraServer, the nodes of one such unit represent all: messages among
them stay among them, and a message to another unit comes back to the same place in theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..collectives.placement import Floats, Ints
from .rounds import AMOUNTS, Round, Rounds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Messages of one step, in the columns of a `Round`."""

    src: Ints  # (rows,) rank of the unit that sends
    dst: Ints  # (rows,) rank of the unit that receives, or its counterpart in another unit; ascending
    count: Floats  # (rows,) number of messages in each row
    far: NDArray[np.bool_]  # (rows,) whether the row goes to another unit

    def in_order(self) -> Rows:
        """Return these rows, sorted by receiver."""
        order = np.argsort(self.dst, kind="stable")
        return Rows(src=self.src[order], dst=self.dst[order], count=self.count[order], far=self.far[order])

    def key(self) -> bytes:
        """Return bytes that two steps share exactly if all their messages are equal."""
        return b"".join(column.tobytes() for column in (self.src, self.dst, self.count, self.far))


class Unit:
    """Ranks of one unit, of many equal units one after the other.

    Args:
        size: Ranks of all units.
        ring: Ranks of this unit in the order in which a ring passes them, before it goes on to the next unit.

    Attributes:
        size: ranks of all units.
        places: ranks of one of them.
    """

    size: int
    places: int

    def __init__(self, size: int, ring: Sequence[int]) -> None:
        self.size, self.places = size, len(ring)
        self._ring, self._own = np.asarray(ring, np.int64), np.arange(len(ring))

    def no_messages(self) -> Rows:
        """Return rows without any message."""
        return self._make_rows(self._own[:0], self._own[:0])

    def every_pair(self) -> Rows:
        """Return a message from every rank to every other, in one row if they go to the same place of other units."""
        src, dst = (grid.reshape(-1) for grid in np.meshgrid(self._own, self._own))
        others = src != dst
        near, far = self._make_rows(src[others], dst[others]), self._make_rows(src, dst + self.places)
        elsewhere = self.size // self.places - 1
        if not elsewhere:
            return near
        return Rows(
            src=np.concatenate([near.src, far.src]),
            dst=np.concatenate([near.dst, far.dst]),
            count=np.concatenate([near.count, far.count * elsewhere]),
            far=np.concatenate([near.far, far.far]),
        ).in_order()

    def ahead(self, distance: int) -> Rows:
        """Return a message from every rank to the rank at a distance; the ranks form a circle."""
        return self._make_rows(self._own, self._own + distance)

    def opposite(self, distance: int) -> Rows:
        """Return a message from every rank across one edge of a cube; the ranks are a power of two."""
        return self._make_rows(self._own, self._own ^ distance)

    def following(self) -> Rows:
        """Return a message from every rank to the next one of the ring."""
        return self._make_rows(self._ring, np.append(self._ring[1:], self._ring[0] + self.places))

    def _make_rows(self, src: Ints, to: Ints) -> Rows:
        """Return messages from ranks of this unit; a rank `to` beyond its end belongs to another unit."""
        other, dst = np.divmod(to, self.places)
        far = other % (self.size // self.places) != 0
        return Rows(src=src, dst=dst, count=np.ones(len(src)), far=far).in_order()


_SlotsAndRounds: TypeAlias = tuple[int, list[Round]]  # slots, rounds


def regular_rounds(collective: str, algorithm: str, size: int, ring: Sequence[int] = (0,)) -> Rounds | None:
    """Return the rounds of the first ranks of an algorithm over `size` ranks; None if ranks differ.

    Args:
        collective: Name of the collective.
        algorithm: Name of the algorithm.
        size: Number of ranks: equal units, one after the other, of as many ranks as `ring` has.
        ring: Ranks of the first unit in the order in which a ring passes them.

    Cost: one round for each different step of the algorithm.
    """
    make = _ALGORITHMS.get((collective, algorithm))
    if make is None or size < 2 or (algorithm in _POWERS and size & (size - 1)):
        return None
    slots, rounds = make(Unit(size, ring))
    return Rounds(size=len(ring), slots=slots, rounds=tuple(rounds))


def _make_round(
    unit: Unit, rows: Rows | None = None, slots: float = 0.0, *, passed_on: bool = False, repeat: int = 1, **work: float
) -> Round:
    """Return a round of a unit's ranks: messages of `slots` slots by `rows`, and the same `work` for each rank."""
    rows = unit.no_messages() if rows is None else rows
    ends = rows.src, rows.dst, rows.count * float(slots)
    return replace(
        _equal_round(unit.places, ends, repeat=repeat, passed_on=passed_on, **work), count=rows.count, far=rows.far
    )


def _equal_round(
    size: int, ends: tuple[Ints, Ints, Floats], *, repeat: int = 1, passed_on: bool = False, **work: float
) -> Round:
    """Return a round with the same `work` for all ranks, given by the names of a round's amounts."""
    src, dst, sent = ends
    amounts = {name: np.full(size, work.pop(name, 0.0)) for name in AMOUNTS}
    assert not work, f"a round has no {work}"
    return Round(repeat=repeat, passed_on=passed_on, src=src, dst=dst, sent=sent, **amounts)


def _mesh_steps(unit: Unit) -> tuple[Round, Round]:
    """Return a step that reduces and one that spreads. A reduction reads each operand, and writes the sum once."""
    rows, size = unit.every_pair(), unit.size
    return _make_round(unit, rows, 1, added=size - 1, adding=size + 1), _make_round(unit, rows, 1, moving=size)


def _doubling_steps(unit: Unit) -> tuple[list[Round], list[Round]]:
    """Return the steps of halving, longest first, and the steps of doubling."""
    steps = [(1 << bit, unit.opposite(1 << bit)) for bit in range(unit.size.bit_length() - 1)]
    halving = [_make_round(unit, rows, length, added=length, adding=3 * length) for length, rows in reversed(steps)]
    return halving, [_make_round(unit, rows, length, moving=2 * length) for length, rows in steps]


def _ring_steps(unit: Unit) -> tuple[Round, Round]:
    """Return the steps of a ring that reduce, and the steps that spread the sums."""
    rows, steps = unit.following(), unit.size - 1
    back = _make_round(unit, rows, 1, repeat=steps, added=1, adding=3, passed_on=True)
    return back, _make_round(unit, rows, 1, repeat=steps, moving=2)


def _copy_own_block(unit: Unit, rounds: Iterable[Round]) -> list[Round]:
    """Return rounds that follow a copy of each rank's own block to its output."""
    copy = _make_round(unit, local=2)
    return [copy, *rounds]


def _one_shot_rounds(unit: Unit) -> _SlotsAndRounds:
    """Return the rounds of an all-reduce in which every rank sends all data to all others, and adds up what arrives."""
    size = unit.size
    adding = _make_round(unit, repeat=size - 1, local_added=1, local=3)
    return 1, [_make_round(unit, unit.every_pair(), 1, moving=size), adding]


def _recursive_doubling_rounds(unit: Unit) -> _SlotsAndRounds:
    """Return the rounds of an all-reduce that exchanges all data across each edge of a cube."""
    steps = (unit.opposite(1 << bit) for bit in range(unit.size.bit_length() - 1))
    return 1, [_make_round(unit, rows, 1, repeat=times, added=1, adding=3) for rows, times in _join_equal_steps(steps)]


def _bruck_rounds(unit: Unit) -> _SlotsAndRounds:
    """Return the rounds of Bruck's all-to-all: each sends the packed blocks whose distance has a certain bit."""
    distance, bits = np.arange(unit.size), range((unit.size - 1).bit_length())
    amounts = [int((distance >> bit & 1).sum()) for bit in bits]
    packed = [
        _make_round(unit, unit.ahead(1 << bit), amount, moving=2 * amount, local=2 * amount)
        for bit, amount in zip(bits, amounts, strict=True)
    ]
    return unit.size, [*packed, _make_round(unit, local=2 * unit.size)]


def _direct_rounds(unit: Unit) -> _SlotsAndRounds:
    return unit.size, _copy_own_block(unit, [_make_round(unit, unit.every_pair(), 1, moving=2 * (unit.size - 1))])


def _pairwise_rounds(unit: Unit) -> _SlotsAndRounds:
    """Return the rounds of an all-to-all that sends one block in each step, to ranks ever further ahead."""
    steps = (unit.ahead(distance) for distance in range(1, unit.size))
    rounds = (_make_round(unit, rows, 1, repeat=times, moving=2) for rows, times in _join_equal_steps(steps))
    return unit.size, _copy_own_block(unit, rounds)


def _join_equal_steps(steps: Iterable[Rows]) -> Iterator[tuple[Rows, int]]:
    """Yield equal steps in a row as one, with their number."""
    for _, run in groupby(steps, key=Rows.key):
        rows, *more = run
        yield rows, 1 + len(more)


def _chunk_collectives(name: str) -> Iterator[tuple[tuple[str, str], Callable[[Unit], _SlotsAndRounds]]]:
    """Yield the three collectives that a pattern gives, in which every rank owns a chunk."""

    def both_steps(unit: Unit) -> tuple[list[Round], list[Round]]:
        """Return the steps that reduce, and the steps that spread, each a list."""
        if name == "rdh":
            return _doubling_steps(unit)
        back, forth = _mesh_steps(unit) if name == "mesh" else _ring_steps(unit)
        return [back], [forth]

    yield ("all_reduce", name), lambda unit: (unit.size, [*chain.from_iterable(both_steps(unit))])
    yield ("reduce_scatter", name), lambda unit: (unit.size, both_steps(unit)[0])
    yield ("all_gather", name), lambda unit: (unit.size, _copy_own_block(unit, both_steps(unit)[1]))


_POWERS = ("rdh", "recursive_doubling")
_ALGORITHMS: Mapping[tuple[str, str], Callable[[Unit], _SlotsAndRounds]] = {
    **dict(_chunk_collectives("mesh")),
    **dict(_chunk_collectives("rdh")),
    **dict(_chunk_collectives("ring")),
    ("all_reduce", "one_shot"): _one_shot_rounds,
    ("all_reduce", "recursive_doubling"): _recursive_doubling_rounds,
    ("all_to_all", "mesh"): _direct_rounds,
    ("all_to_all", "pairwise"): _pairwise_rounds,
    ("all_to_all", "bruck"): _bruck_rounds,
}


def ring_rounds(collective: str, orders: Sequence[Sequence[int]]) -> Rounds:
    """Return the rounds of the schedule of a ring, or of several side by side.

    Args:
        collective: "all_reduce", "reduce_scatter" or "all_gather".
        orders: The rings, each a sequence of all ranks.
    """
    path = np.asarray(orders, np.int64)
    size, parts = path.shape[1], path.shape[0]
    following = np.roll(path, -1, axis=1)
    key, message = np.unique((following * size + path).reshape(-1), return_inverse=True)
    sent = np.bincount(message, minlength=len(key)).astype(np.float64)
    ends = key % size, key // size, sent
    adding = _equal_round(size, ends, repeat=size - 1, passed_on=True, added=parts, adding=3 * parts)
    moving = _equal_round(size, ends, repeat=size - 1, moving=2 * parts)
    if collective == "all_gather":
        first = _equal_round(size, ends, moving=2 * parts, local=2 * parts)
        rounds = (first, replace(moving, repeat=size - 2)) if size > 2 else (first,)
    else:
        rounds = (adding,) if collective == "reduce_scatter" else (adding, moving)
    return Rounds(size=size, slots=parts * size, rounds=rounds)
