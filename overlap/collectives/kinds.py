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

from ..errors import UsageError, argument_text

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traits:
    """Properties of a collective."""

    scatters: bool = False  # the input holds one block for each rank
    gathers: bool = False  # the result holds one block of each rank
    reduces: bool = False  # blocks of all ranks are combined by an operator
    rooted: bool = False  # one rank, the root, is the only sender or the only receiver
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
    text: str  # the same as `value`, which takes three times as long to read

    def bus_factor(self, ranks: int) -> float:
        """Return the ratio of bus bandwidth to algorithm bandwidth in a group (nccl-tests: doc/PERFORMANCE.md)."""
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
    """Return the shape of the result on a rank that gets one.

    Args:
        kind: The collective.
        shape: Shape of one rank's input; in a scatter, of the root's.
        ranks: Number of ranks in the group.
    """
    traits = kind.traits
    if traits.scatters and not traits.gathers:
        return (shape[0] // ranks, *shape[1:])
    if traits.gathers and not traits.scatters:
        return (shape[0] * ranks, *shape[1:])
    return shape


Counts: TypeAlias = tuple[int, ...]
"""Rows (entries along axis 0) of every block, where blocks differ in size: by rank; in an all-to-all by source rank and
then destination rank."""

# Number of counts that a message lists in full. A longer list is cut and ends in a checksum, to compare two lists by.
_SHOWN = 16


def input_blocks(kind: Collective, ranks: int, rank: int) -> range:
    """Return the numbers of the blocks that make up a rank's input, in their order.

    Blocks are numbered as `counts` lists them: by rank, or in an all-to-all source * ranks + destination. Of 3 ranks,
    rank 1 gives block 1 to an all-gather, blocks 0 to 2 to a reduce-scatter, and blocks 3 to 5 to an all-to-all.

    Args:
        kind: An all-gather, reduce-scatter or all-to-all.
        ranks: Number of ranks.
        rank: The rank.
    """
    if kind is Collective.ALL_GATHER:
        return range(rank, rank + 1)
    return range(ranks) if kind is Collective.REDUCE_SCATTER else range(rank * ranks, (rank + 1) * ranks)


def result_blocks(kind: Collective, ranks: int, rank: int) -> range:
    """Return the numbers of the blocks that make up a rank's result, in their order; arguments: see `input_blocks`.

    Of 3 ranks, rank 1 gets blocks 0 to 2 of an all-gather, block 1 of a reduce-scatter, and blocks 1, 4 and 7 of an
    all-to-all.
    """
    if kind is Collective.REDUCE_SCATTER:
        return range(rank, rank + 1)
    return range(ranks) if kind is Collective.ALL_GATHER else range(rank, ranks * ranks, ranks)


def check_counts(kind: Collective, counts: object, ranks: int) -> Counts:
    """Return the argument `counts` of a caller as a flat tuple of ints; a table is flattened row after row.

    Args:
        kind: The collective.
        counts: The argument: a list with a number for each rank; for an all-to-all a table, source by destination.
        ranks: Number of ranks in the group.

    Raises:
        UsageError: The argument has another shape or type, or a number is negative.
    """
    shape = (ranks, ranks) if kind is Collective.ALL_TO_ALL else (ranks,)
    numbers = f"a table of {ranks} x {ranks} numbers" if len(shape) > 1 else f"{ranks} numbers"
    try:
        rows = np.asarray(counts)
    except (TypeError, ValueError):  # rows of the table differ in length
        rows = np.empty(0)
    if rows.shape != shape or (rows.dtype.kind not in "iu"):
        raise UsageError(f"counts: {kind.value} on {ranks} ranks needs {numbers} of rows, got {argument_text(counts)}")
    flat = tuple(rows.reshape(-1).tolist())
    if min(flat) < 0:
        raise UsageError(
            f"counts: expected numbers of rows from 0, got {min(flat)} in {describe_counts(flat, kind, ranks)}"
        )
    return flat


def agreed_shape(kind: Collective, shape: Shape, counts: Counts, ranks: int, rank: int) -> tuple[Shape, Counts]:
    """Return the shape and the counts that all ranks must agree on, from one rank's input and its counts.

    If blocks differ in size, inputs differ in shape: the common shape is that of all blocks together. If all blocks
    have one size, it is the input's shape, and the counts are ().

    Args:
        kind: The collective.
        shape: Shape of the rank's input.
        counts: Rows of every block.
        ranks: Number of ranks in the group.
        rank: Group rank.

    Raises:
        UsageError: The input has another number of rows than `counts` gives this rank.
    """
    if not shape:
        check_input(kind, shape, ranks)
    given = input_blocks(kind, ranks, rank)
    rows = sum(counts[given.start : given.stop])
    if shape[0] != rows:
        raise UsageError(f"x: counts says {rows} rows for rank {rank}, got shape {shape}; pass that many rows")
    if min(counts) == max(counts):
        return shape, ()
    return (sum(counts), *shape[1:]), counts


def result_row_count(kind: Collective, counts: Counts, ranks: int, rank: int) -> int:
    """Return the number of rows of a rank's result.

    Args:
        kind: The collective.
        counts: Rows of every block.
        ranks: Number of ranks.
        rank: The rank.
    """
    got = result_blocks(kind, ranks, rank)
    return sum(counts[got.start : got.stop : got.step])


def largest_row_count(kind: Collective, shape: Shape, counts: Counts, ranks: int) -> int:
    """Return the number of rows of the largest input or result of any rank, which counts as the collective's size.

    Args:
        kind: The collective.
        shape: Shape of all blocks together.
        counts: Rows of every block.
        ranks: Number of ranks in the group.

    Raises:
        UsageError: The collective takes no counts, or they do not fit the number of ranks or axis 0 of `shape`.
    """
    fits = len(counts) == (ranks * ranks if kind is Collective.ALL_TO_ALL else ranks)
    if kind not in _WITH_COUNTS or not fits or min(counts) < 0 or not shape or shape[0] != sum(counts):
        raise UsageError(
            f"counts: {describe_counts(counts, kind, ranks)} do not make {kind.value} of {shape} on {ranks} ranks; "
            "they must be 0 or more, and add up to axis 0"
        )
    if kind is not Collective.ALL_TO_ALL:
        return shape[0]
    table = [counts[at : at + ranks] for at in range(0, len(counts), ranks)]
    # A line of the table is the input of a rank, a column is a result.
    return max(*map(sum, table), *map(sum, zip(*table, strict=True)))


_WITH_COUNTS = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)


def describe_counts(counts: Counts, kind: Collective, ranks: int) -> str:
    """Return counts as text: "[4, 5]", or for an all-to-all "[[1, 2], [3, 4]]".

    More than 16 counts are cut, and end in their number, sum and checksum.

    Args:
        counts: Rows of every block.
        kind: The collective.
        ranks: Number of ranks in the group.
    """
    if len(counts) > _SHOWN:
        first = ", ".join(map(str, counts[:_SHOWN]))
        return f"[{first}, ... {len(counts)} in all, sum {sum(counts)}, crc {crc32(repr(counts).encode()):08x}]"
    if kind is Collective.ALL_TO_ALL and len(counts) == ranks * ranks:
        return str([list(counts[at : at + ranks]) for at in range(0, len(counts), ranks)])
    return str(list(counts))
