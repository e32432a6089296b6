"""Rounds of regular algorithms, which are the same for every rank, without their tables.

In such an algorithm all ranks send equally many messages of the same sizes, and receive as much over the network as
they send. So rank 0 represents all: its messages return to it, and a thousand of its messages in a step are one row
with a count of a thousand. If wires join some nodes, as in an UltraServer, one such unit represents all: messages
inside the unit stay as they are, and a message to another unit returns to the corresponding rank of this unit.
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
    """Messages of one step from the ranks of one unit, as columns of a `Round`."""

    src: Ints  # (rows,) sender: rank of the unit, from 0
    dst: Ints  # (rows,) receiver: rank of the unit, or its counterpart in another unit if the row is far; ascending
    count: Floats  # (rows,) number of messages in each row
    far: NDArray[np.bool_]  # (rows,) whether the row goes to another unit

    def sorted_by_receiver(self) -> Rows:
        """Return these rows, sorted by receiver."""
        order = np.argsort(self.dst, kind="stable")
        return Rows(src=self.src[order], dst=self.dst[order], count=self.count[order], far=self.far[order])

    def comparison_key(self) -> bytes:
        """Return a key that is equal for two steps if and only if all their messages are equal."""
        return b"".join(column.tobytes() for column in (self.src, self.dst, self.count, self.far))


class Unit:
    """The ranks of one unit, which represents many equal units with consecutive ranks.

    Args:
        size: Number of ranks of all units.
        ring: Ranks of this unit in the order in which a ring visits them, before it goes on to the next unit.

    Attributes:
        size: Number of ranks of all units.
        places: Number of ranks of one unit.
    """

    size: int
    places: int

    def __init__(self, size: int, ring: Sequence[int]) -> None:
        self.size, self.places = size, len(ring)
        self._ring, self._own = np.asarray(ring, np.int64), np.arange(len(ring))

    def rows_to_all(self) -> Rows:
        """Return a message from every rank to every other; messages to one place in all other units are one row."""
        src, dst = (grid.reshape(-1) for grid in np.meshgrid(self._own, self._own))
        others = src != dst
        near, far = self._make_rows(src[others], dst[others]), self._make_rows(src, dst + self.places)
        # Number of other units. `far` has the messages to one of them; their counts are multiplied.
        elsewhere = self.size // self.places - 1
        if not elsewhere:
            return near
        return Rows(
            src=np.concatenate([near.src, far.src]),
            dst=np.concatenate([near.dst, far.dst]),
            count=np.concatenate([near.count, far.count * elsewhere]),
            far=np.concatenate([near.far, far.far]),
        ).sorted_by_receiver()

    def rows_ahead(self, distance: int) -> Rows:
        """Return a message from every rank r to rank r + distance; after the last rank comes rank 0."""
        return self._make_rows(self._own, self._own + distance)

    def rows_to_opposite(self, distance: int) -> Rows:
        """Return a message from every rank r to rank r XOR distance; the number of ranks is a power of two."""
        return self._make_rows(self._own, self._own ^ distance)

    def rows_to_following(self) -> Rows:
        """Return a message from every rank to the next rank of the ring."""
        return self._make_rows(self._ring, np.append(self._ring[1:], self._ring[0] + self.places))

    def _make_rows(self, src: Ints, to: Ints) -> Rows:
        """Return a message from each rank `src` of this unit to rank `to`, counted through all units."""
        units_ahead, dst = np.divmod(to, self.places)
        far = units_ahead % (self.size // self.places) != 0  # after the last unit comes this unit again
        return Rows(src=src, dst=dst, count=np.ones(len(src)), far=far).sorted_by_receiver()


_SlotsAndRounds: TypeAlias = tuple[int, list[Round]]  # slots, rounds
_NONE: Ints = np.zeros(0, np.int64)


def regular_rounds(collective: str, algorithm: str, size: int, ring: Sequence[int] = (0,)) -> Rounds | None:
    """Return the rounds as the ranks of the first unit see them; None if not all units do the same in the algorithm.

    Args:
        collective: Name of the collective.
        algorithm: Name of the algorithm.
        size: Number of ranks of all units. A unit has `len(ring)` consecutive ranks.
        ring: Ranks of the first unit in the order in which a ring visits them.

    Returns:
        Rounds over the ranks of the first unit; messages to other units have `far` set.

    Cost: one round for each different step of the algorithm.
    """
    make = _ALGORITHMS.get((collective, algorithm))
    # `size & (size - 1)` is 0 for powers of two alone.
    if make is None or size < 2 or (algorithm in _POWERS and size & (size - 1)):
        return None
    slots, rounds = make(Unit(size, ring))
    return Rounds(size=len(ring), slots=slots, rounds=tuple(rounds))


def _make_round(
    unit: Unit, rows: Rows | None = None, slots: float = 0.0, *, passed_on: bool = False, repeat: int = 1, **work: float
) -> Round:
    """Return a round of a unit's ranks, which all do the same work; `rows` None: without messages.

    `passed_on` says whether ranks reduce messages and pass the sums on, as in a ring. `work` has the amounts of each
    rank by the names in `rounds.AMOUNTS`, in slots; 0 if left out.
    """
    rows = Rows(src=_NONE, dst=_NONE, count=np.zeros(0), far=np.zeros(0, np.bool_)) if rows is None else rows
    ends = rows.src, rows.dst, rows.count * float(slots)
    return replace(
        _make_equal_round(unit.places, ends, repeat=repeat, passed_on=passed_on, **work), count=rows.count, far=rows.far
    )


def _make_equal_round(
    size: int, ends: tuple[Ints, Ints, Floats], *, repeat: int = 1, passed_on: bool = False, **work: float
) -> Round:
    """Return a round with the same work for all ranks; `ends` are sender, receiver and slots of each message.

    Other arguments: see `_make_round`.
    """
    src, dst, sent = ends
    amounts = {name: np.full(size, work.pop(name, 0.0)) for name in AMOUNTS}
    assert not work, f"a round has no {work}"
    return Round(repeat=repeat, passed_on=passed_on, src=src, dst=dst, sent=sent, **amounts)


def _mesh_steps(unit: Unit) -> tuple[Round, Round]:
    """Return the step of a mesh that reduces, and the step that spreads the sums.

    A rank reduces by reading each of `size` operands once, and writing the sum once.
    """
    rows, size = unit.rows_to_all(), unit.size
    return _make_round(unit, rows, 1, added=size - 1, adding=size + 1), _make_round(unit, rows, 1, moving=size)


def _doubling_steps(unit: Unit) -> tuple[list[Round], list[Round]]:
    """Return the steps that halve (reduce), longest messages first, and the steps that double (spread the sums)."""
    steps = [(1 << bit, unit.rows_to_opposite(1 << bit)) for bit in range(unit.size.bit_length() - 1)]
    halving = [_make_round(unit, rows, length, added=length, adding=3 * length) for length, rows in reversed(steps)]
    return halving, [_make_round(unit, rows, length, moving=2 * length) for length, rows in steps]


def _ring_steps(unit: Unit) -> tuple[Round, Round]:
    """Return the steps of a ring that reduce, as one repeated round, and the steps that spread the sums."""
    rows, steps = unit.rows_to_following(), unit.size - 1
    back = _make_round(unit, rows, 1, repeat=steps, added=1, adding=3, passed_on=True)
    return back, _make_round(unit, rows, 1, repeat=steps, moving=2)


def _prepend_block_copy(unit: Unit, rounds: Iterable[Round]) -> list[Round]:
    """Return a round in which each rank copies its own block to its output, then the given rounds."""
    copy = _make_round(unit, local=2)
    return [copy, *rounds]


def _one_shot_rounds(unit: Unit) -> _SlotsAndRounds:
    """Return the rounds of an all-reduce in which every rank sends its vector to all others, and adds all of them."""
    size = unit.size
    adding = _make_round(unit, repeat=size - 1, local_added=1, local=3)
    return 1, [_make_round(unit, unit.rows_to_all(), 1, moving=size), adding]


def _recursive_doubling_rounds(unit: Unit) -> _SlotsAndRounds:
    """Return the rounds of an all-reduce that exchanges whole vectors at distances 1, 2, 4, ..."""
    steps = (unit.rows_to_opposite(1 << bit) for bit in range(unit.size.bit_length() - 1))
    return 1, [_make_round(unit, rows, 1, repeat=times, added=1, adding=3) for rows, times in _join_equal_steps(steps)]


def _bruck_rounds(unit: Unit) -> _SlotsAndRounds:
    """Return the rounds of Bruck's all-to-all: step t sends, packed, the blocks whose distance has bit t set."""
    distance, bits = np.arange(unit.size), range((unit.size - 1).bit_length())
    amounts = [int((distance >> bit & 1).sum()) for bit in bits]
    packed = [
        _make_round(unit, unit.rows_ahead(1 << bit), amount, moving=2 * amount, local=2 * amount)
        for bit, amount in zip(bits, amounts, strict=True)
    ]
    return unit.size, [*packed, _make_round(unit, local=2 * unit.size)]


def _direct_rounds(unit: Unit) -> _SlotsAndRounds:
    """Return the rounds of an all-to-all in which every rank sends all its blocks at once."""
    moving = 2 * (unit.size - 1)  # each received block is read once and written once
    return unit.size, _prepend_block_copy(unit, [_make_round(unit, unit.rows_to_all(), 1, moving=moving)])


def _pairwise_rounds(unit: Unit) -> _SlotsAndRounds:
    """Return the rounds of an all-to-all that sends one block in each step, at distances 1, 2, 3, ..."""
    steps = (unit.rows_ahead(distance) for distance in range(1, unit.size))
    rounds = (_make_round(unit, rows, 1, repeat=times, moving=2) for rows, times in _join_equal_steps(steps))
    return unit.size, _prepend_block_copy(unit, rounds)


def _join_equal_steps(steps: Iterable[Rows]) -> Iterator[tuple[Rows, int]]:
    """Yield (step, number of times that it occurs in a row) for each run of equal steps."""
    for _, run in groupby(steps, key=Rows.comparison_key):
        rows, *more = run
        yield rows, 1 + len(more)


def _list_chunk_rounds(name: str) -> Iterator[tuple[tuple[str, str], Callable[[Unit], _SlotsAndRounds]]]:
    """Yield ((collective, algorithm), function that makes its rounds) for the three collectives of a pattern.

    `name` is "rdh", "mesh" or "ring".
    """

    def make_both_steps(unit: Unit) -> tuple[list[Round], list[Round]]:
        """Return two lists: the steps that reduce, and the steps that spread the sums."""
        if name == "rdh":
            return _doubling_steps(unit)
        back, forth = _mesh_steps(unit) if name == "mesh" else _ring_steps(unit)
        return [back], [forth]

    yield ("all_reduce", name), lambda unit: (unit.size, [*chain.from_iterable(make_both_steps(unit))])
    yield ("reduce_scatter", name), lambda unit: (unit.size, make_both_steps(unit)[0])
    yield ("all_gather", name), lambda unit: (unit.size, _prepend_block_copy(unit, make_both_steps(unit)[1]))


_POWERS = ("rdh", "recursive_doubling")
_ALGORITHMS: Mapping[tuple[str, str], Callable[[Unit], _SlotsAndRounds]] = {
    **dict(_list_chunk_rounds("mesh")),
    **dict(_list_chunk_rounds("rdh")),
    **dict(_list_chunk_rounds("ring")),
    ("all_reduce", "one_shot"): _one_shot_rounds,
    ("all_reduce", "recursive_doubling"): _recursive_doubling_rounds,
    ("all_to_all", "mesh"): _direct_rounds,
    ("all_to_all", "pairwise"): _pairwise_rounds,
    ("all_to_all", "bruck"): _bruck_rounds,
}


def ring_rounds(collective: str, orders: Sequence[Sequence[int]]) -> Rounds:
    """Return the rounds of a ring, or of several rings that each carry one part of every chunk.

    Args:
        collective: "all_reduce", "reduce_scatter" or "all_gather".
        orders: The rings, each a sequence of all ranks.
    """
    path = np.asarray(orders, np.int64)
    size, parts = path.shape[1], path.shape[0]
    following = np.roll(path, -1, axis=1)
    # An edge that several rings use is one message. The key receiver * size + sender sorts messages by receiver.
    key, message = np.unique((following * size + path).reshape(-1), return_inverse=True)
    sent = np.bincount(message, minlength=len(key)).astype(np.float64)
    ends = key % size, key // size, sent
    adding = _make_equal_round(size, ends, repeat=size - 1, passed_on=True, added=parts, adding=3 * parts)
    moving = _make_equal_round(size, ends, repeat=size - 1, moving=2 * parts)
    if collective == "all_gather":
        first = _make_equal_round(size, ends, moving=2 * parts, local=2 * parts)
        # In the first of the size - 1 steps each rank also copies its own block.
        rounds = (first, replace(moving, repeat=size - 2)) if size > 2 else (first,)
    else:
        rounds = (adding,) if collective == "reduce_scatter" else (adding, moving)
    return Rounds(size=size, slots=parts * size, rounds=rounds)
