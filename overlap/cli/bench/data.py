"""Test data and right answers: small integers, so that every dtype holds them and every sum is exact."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ... import OPS
from ...collectives.reduce import Array

SEED = 1

PERIOD = 8191
"""Elements after which the data repeats: a prime, so that a block in a wrong place is noticed."""

_WIDE = {"b": np.bool_, "i": np.int64, "u": np.uint64, "c": np.complex128}  # the rest, all of them floats: float64


@lru_cache(maxsize=64)
def pattern(rank: int, dtype: np.dtype[np.generic]) -> Array:
    """Return the `PERIOD` elements that the input of `rank` repeats: 1, 2 and 3 by seed, or both values of bool."""
    low, high = (0, 2) if dtype.kind == "b" else (1, 4)
    return np.random.default_rng((SEED, rank)).integers(low, high, PERIOD).astype(dtype)


@lru_cache(maxsize=16)
def reduction(ranks: int, op: str, dtype: np.dtype[np.generic]) -> Array:
    """Return what the patterns of all ranks reduce to, worked out in 64 bits and rounded once."""
    wide = _WIDE.get(dtype.kind, np.float64)
    total = OPS[op].reduce(np.stack([pattern(rank, dtype) for rank in range(ranks)]).astype(wide), axis=0, dtype=wide)
    if op == "mean" and dtype.kind == "c":
        total = total.astype(dtype) / ranks  # numpy multiplies by a reciprocal, so 64 bits would round differently
    elif op == "mean":
        total = total // ranks if dtype.kind in "iu" else total / ranks
    reduced: Array = total.astype(dtype)
    return reduced


def tiled(repeated: Array, first: int, count: int) -> Array:
    """Return elements `first` to `first + count` of a pattern that repeats without end."""
    return np.resize(np.roll(repeated, -(first % PERIOD)), count)


def wrong_elements(result: Array, expected: Array) -> int:
    """Count the elements of `result` that are not exactly those of `expected`, of the same length."""
    return int(np.count_nonzero(result.reshape(-1) != expected))
