"""Calls as plain lists of numbers and names, to be told to other processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from ..collectives.call import Call, Pairs, call, uneven_call
from ..collectives.kinds import Collective
from ..errors import OverlapError


def pack(asked: Call) -> list[object]:
    """Return the list that `unpack` makes an equal call of."""
    dtype = None if asked.dtype is None else str(asked.dtype)
    shape = None if asked.shape is None else list(asked.shape)
    pairs, counts = [list(pair) for pair in asked.pairs], list(asked.counts)
    how = [asked.exact, asked.shared, asked.algorithm]
    return [asked.kind.value, asked.op, dtype, shape, asked.size, asked.root, pairs, counts, *how]


def unpack(told: Sequence[object]) -> Call:
    """Return the call that a list stands for.

    Raises:
        OverlapError: If it stands for none.
    """
    try:
        kind, op, dtype, shape, size, root, pairs, counts, exact, shared, algorithm = told
        find = uneven_call if counts else call
        return find(
            Collective(kind).value,
            cast("str | None", op),
            None if dtype is None else _dtype(str(dtype)),
            None if shape is None else tuple(int(length) for length in cast("list[int]", shape)),
            int(cast(int, size)),
            int(cast(int, root)),
            _pairs(cast("list[list[int]]", pairs)),
            tuple(int(rows) for rows in cast("list[int]", counts)),
            bool(exact),
            bool(shared),
            None if algorithm is None else str(algorithm),
        )
    except (TypeError, ValueError, OverlapError) as error:
        raise OverlapError(f"a process told of a call that cannot be meant: {error}") from error


def _pairs(told: list[list[int]]) -> Pairs:
    return tuple((int(src), int(dst)) for src, dst in told)


def _dtype(name: str) -> np.dtype[np.generic]:
    if name.startswith(("bfloat", "float8", "float6", "float4", "int2", "int4", "uint2", "uint4")):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name, None) or name)
    return np.dtype(name)
