"""Kinds of collectives: shapes of inputs and results, and blocks of different sizes. Pure shapes, no data.

A *block* is the unit of a collective's semantics: `all_gather` takes one block and returns n, `reduce_scatter` the
other way round, `all_reduce` works on one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias
from zlib import crc32

import numpy as np

from ..errors import UsageError, shown

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traits:
    scatters: bool = False  # the input holds one block for each rank
    gathers: bool = False  # the result holds one block of each rank
    reduces: bool = False
    rooted: bool = False
    busbw_factor: str = "1"  # "2(n-1)/n", "(n-1)/n" or "1", as nccl-tests defines bus bandwidth


class Collective(Enum):
    """Every operation of a group. The value is its public name."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    PERMUTE = "permute"
    BARRIER = "barrier"
    P2P = "send/recv"

    traits: _Traits
    text: str  # the value: that of an enum takes three times as long to read

    def bus_factor(self, ranks: int) -> float:
        """Return busbw / algbw for a group of `ranks` (nccl-tests: doc/PERFORMANCE.md)."""
        return {"1": 1.0, "(n-1)/n": (ranks - 1) / ranks, "2(n-1)/n": 2 * (ranks - 1) / ranks}[self.traits.busbw_factor]


_TRAITS = {
    Collective.ALL_REDUCE: _Traits(reduces=True, busbw_factor="2(n-1)/n"),
    Collective.REDUCE_SCATTER: _Traits(reduces=True, scatters=True, busbw_factor="(n-1)/n"),
    Collective.ALL_GATHER: _Traits(gathers=True, busbw_factor="(n-1)/n"),
    Collective.ALL_TO_ALL: _Traits(scatters=True, gathers=True, busbw_factor="(n-1)/n"),
    Collective.BROADCAST: _Traits(rooted=True),
    Collective.REDUCE: _Traits(reduces=True, rooted=True),
    Collective.GATHER: _Traits(gathers=True, rooted=True),
    Collective.SCATTER: _Traits(scatters=True, rooted=True),
    Collective.PERMUTE: _Traits(),
    Collective.BARRIER: _Traits(),
    Collective.P2P: _Traits(),
}
for _kind, _traits in _TRAITS.items():
    _kind.traits, _kind.text = _traits, _kind.value

# Members as plain names: each operation reads its kind, and reading a member of an enum takes ten times as long.
(
    ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, BROADCAST, REDUCE, GATHER, SCATTER, PERMUTE, BARRIER, P2P
) = Collective  # fmt: skip


def check_input(kind: Collective, shape: Shape, ranks: int) -> None:
    """Refuse shapes that the collective cannot cut into blocks.

    Raises:
        UsageError: If axis 0 is missing, or not divisible by the number of ranks where it must be.
    """
    traits = kind.traits
    if (traits.scatters or traits.gathers) and not shape:
        raise UsageError(f"x: {kind.value} works along axis 0, got a 0-dimensional array; pass x.reshape(1)")
    if traits.scatters and shape[0] % ranks:
        raise UsageError(
            f"x: {kind.value} needs axis 0 divisible by the group's {ranks} ranks, got shape {shape}; pad it"
        )


def result_shape(kind: Collective, shape: Shape, ranks: int) -> Shape:
    """Return the shape that a rank which receives a result gets, for an input of `shape`."""
    traits = kind.traits
    if traits.scatters and not traits.gathers:
        return (shape[0] // ranks, *shape[1:])
    if traits.gathers and not traits.scatters:
        return (shape[0] * ranks, *shape[1:])
    return shape


Counts: TypeAlias = tuple[int, ...]

# Counts that a message lists in full; longer lists end in a checksum, to compare two lists by.
_SHOWN = 16


def blocks_given(kind: Collective, ranks: int, rank: int) -> range:
    """Return the numbers of the blocks that make up a rank's input, in their order."""
    if kind is Collective.ALL_GATHER:
        return range(rank, rank + 1)
    return range(ranks) if kind is Collective.REDUCE_SCATTER else range(rank * ranks, (rank + 1) * ranks)


def blocks_got(kind: Collective, ranks: int, rank: int) -> range:
    """Return the numbers of the blocks that make up a rank's result, in their order."""
    if kind is Collective.REDUCE_SCATTER:
        return range(rank, rank + 1)
    return range(ranks) if kind is Collective.ALL_GATHER else range(rank, ranks * ranks, ranks)


def check_counts(kind: Collective, counts: object, ranks: int) -> Counts:
    """Return the counts of a caller as plain numbers.

    Raises:
        UsageError: If it is no list of one number a rank, or no table with a row and a column a rank.
    """
    shape = (ranks, ranks) if kind is Collective.ALL_TO_ALL else (ranks,)
    numbers = f"a table of {ranks} x {ranks} numbers" if len(shape) > 1 else f"{ranks} numbers"
    try:
        rows = np.asarray(counts)
    except (TypeError, ValueError):  # its rows differ in length
        rows = np.empty(0)
    if rows.shape != shape or (rows.dtype.kind not in "iu"):
        raise UsageError(f"counts: {kind.value} on {ranks} ranks needs {numbers} of rows, got {shown(counts)}")
    flat = tuple(rows.reshape(-1).tolist())
    if min(flat) < 0:
        raise UsageError(
            f"counts: expected numbers of rows from 0, got {min(flat)} in {describe_counts(flat, kind, ranks)}"
        )
    return flat


def agreed_shape(kind: Collective, shape: Shape, counts: Counts, ranks: int, rank: int) -> tuple[Shape, Counts]:
    """Return the shape and the counts that all ranks must agree on, from one rank's input and its counts.

    If blocks differ, that is the shape of all blocks together; otherwise the input's shape, and no counts.

    Raises:
        UsageError: If the input does not have the rows that the counts say.
    """
    if not shape:
        check_input(kind, shape, ranks)
    given = blocks_given(kind, ranks, rank)
    rows = sum(counts[given.start : given.stop])
    if shape[0] != rows:
        raise UsageError(f"x: counts says {rows} rows for rank {rank}, got shape {shape}; pass that many rows")
    if min(counts) == max(counts):
        return shape, ()
    return (sum(counts), *shape[1:]), counts


def result_rows(kind: Collective, counts: Counts, ranks: int, rank: int) -> int:
    """Return the number of rows of a rank's result."""
    got = blocks_got(kind, ranks, rank)
    return sum(counts[got.start : got.stop : got.step])


def whole_rows(kind: Collective, shape: Shape, counts: Counts, ranks: int) -> int:
    """Return the number of rows of the largest input or result, by which the cost of a collective is counted.

    Raises:
        UsageError: If these counts and the shape of everything together cannot belong to one call.
    """
    fits = len(counts) == (ranks * ranks if kind is Collective.ALL_TO_ALL else ranks)
    if kind not in _TAKING or not fits or min(counts) < 0 or not shape or shape[0] != sum(counts):
        raise UsageError(
            f"counts: {describe_counts(counts, kind, ranks)} do not make {kind.value} of {shape} on {ranks} ranks; "
            "they must be 0 or more, and add up to axis 0"
        )
    if kind is not Collective.ALL_TO_ALL:
        return shape[0]
    table = [counts[at : at + ranks] for at in range(0, len(counts), ranks)]
    return max(*map(sum, table), *map(sum, zip(*table, strict=True)))


_TAKING = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)


def describe_counts(counts: Counts, kind: Collective, ranks: int) -> str:
    """Return counts as text; long lists are cut, and end in a checksum."""
    if len(counts) > _SHOWN:
        first = ", ".join(map(str, counts[:_SHOWN]))
        return f"[{first}, ... {len(counts)} in all, sum {sum(counts)}, crc {crc32(repr(counts).encode()):08x}]"
    if kind is Collective.ALL_TO_ALL and len(counts) == ranks * ranks:
        return str([list(counts[at : at + ranks]) for at in range(0, len(counts), ranks)])
    return str(list(counts))
