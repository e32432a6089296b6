"""Arrays without data: shape and dtype, and no memory, for models that fit no memory at all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..collectives.reduce import Array
from ..errors import UsageError


def shape_only(shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
    """Return an array that has a shape and a dtype, and one element for all its places: a read-only zero.

    Views and slices of it take no memory either. Anything that computes with it makes real arrays of that shape.

    >>> everything = shape_only((70_000_000_000,), np.float32)
    >>> everything.nbytes, everything[:3].tolist()
    (280000000000, [0.0, 0.0, 0.0])

    Args:
        shape: Of the array.
        dtype: Of the array; its elements must be numbers.

    Raises:
        UsageError: If there can be no such array.
    """
    kind = np.dtype(dtype)
    sides = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(shape)
    if kind.hasobject or (sides and min(sides) < 0):
        raise UsageError(f"shape_only: there is no array of {kind} {sides} without data")
    # A tenth of the time of np.broadcast_to, and simulations make one for every result of every rank.
    return np.ndarray(sides, kind, bytes(kind.itemsize), 0, (0,) * len(sides))
