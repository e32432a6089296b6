"""Blocks of different sizes: how many rows each has, checked, and what follows from it. Pure numbers.

`counts` has one number a rank for `all_gather` (what it gives) and `reduce_scatter` (what it gets), and a table for
`all_to_all`: row i is what rank i sends to each. Blocks are numbered as they stand there, tables flattened. Blocks that
do not differ are not uneven: their counts are `()`, as where nobody says any.
"""

from __future__ import annotations

from typing import TypeAlias
from zlib import crc32

import numpy as np

from ..errors import UsageError, shown
from .kinds import Collective, Shape, check_input

Counts: TypeAlias = tuple[int, ...]

# Numbers that a message shows; of more, a checksum tells whether two lists differ.
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
    """Return what a caller says, as plain numbers.

    Raises:
        UsageError: If it is no list of one number a rank, or no table with a row and a column a rank.
    """
    wanted = (ranks, ranks) if kind is Collective.ALL_TO_ALL else (ranks,)
    what = f"a table of {ranks} x {ranks} numbers" if len(wanted) > 1 else f"{ranks} numbers"
    try:
        rows = np.asarray(counts)
    except (TypeError, ValueError):  # its rows differ in length
        rows = np.empty(0)
    if rows.shape != wanted or (rows.dtype.kind not in "iu"):
        raise UsageError(f"counts: {kind.value} on {ranks} ranks needs {what} of rows, got {shown(counts)}")
    flat = tuple(rows.reshape(-1).tolist())
    if min(flat) < 0:
        raise UsageError(f"counts: expected numbers of rows from 0, got {min(flat)} in {described(flat, kind, ranks)}")
    return flat


def normal(kind: Collective, shape: Shape, counts: Counts, ranks: int, rank: int) -> tuple[Shape, Counts]:
    """Return what all ranks say alike, given one rank's input and its counts.

    With blocks that differ that is the shape of everything together; otherwise it is the input's, and no counts.

    Raises:
        UsageError: If the input does not have the rows that the counts say.
    """
    if not shape:
        check_input(kind, shape, ranks)
    given = blocks_given(kind, ranks, rank)
    rows = sum(counts[given.start : given.stop])
    if shape[0] != rows:
        raise UsageError(f"x: counts says {rows} rows for rank {rank}, got shape {shape}")
    if min(counts) == max(counts):
        return shape, ()
    return (sum(counts), *shape[1:]), counts


def result_rows(kind: Collective, counts: Counts, ranks: int, rank: int) -> int:
    """Return how many rows a rank's result has."""
    got = blocks_got(kind, ranks, rank)
    return sum(counts[got.start : got.stop : got.step])


def whole_rows(kind: Collective, shape: Shape, counts: Counts, ranks: int) -> int:
    """Return the rows of the largest input or result, which is what the cost of a collective is counted by.

    Raises:
        UsageError: If these counts and the shape of everything together cannot belong to one call.
    """
    fits = len(counts) == (ranks * ranks if kind is Collective.ALL_TO_ALL else ranks)
    if kind not in _TAKING or not fits or min(counts) < 0 or not shape or shape[0] != sum(counts):
        raise UsageError(
            f"counts: {described(counts, kind, ranks)} do not make {kind.value} of {shape} on {ranks} ranks"
        )
    if kind is not Collective.ALL_TO_ALL:
        return shape[0]
    table = [counts[at : at + ranks] for at in range(0, len(counts), ranks)]
    return max(*map(sum, table), *map(sum, zip(*table, strict=True)))


_TAKING = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)


def described(counts: Counts, kind: Collective, ranks: int) -> str:
    """Return counts for people to read; of many, what tells them from others."""
    if len(counts) > _SHOWN:
        first = ", ".join(map(str, counts[:_SHOWN]))
        return f"[{first}, ... {len(counts)} in all, sum {sum(counts)}, crc {crc32(repr(counts).encode()):08x}]"
    if kind is Collective.ALL_TO_ALL and len(counts) == ranks * ranks:
        return str([list(counts[at : at + ranks]) for at in range(0, len(counts), ranks)])
    return str(list(counts))
