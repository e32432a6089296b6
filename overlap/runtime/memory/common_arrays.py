"""Arrays that lie where other processes of this host read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from .read_only import held

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[np.generic]

# What is smaller is copied to such memory when it is sent: that takes fewer meetings.
_LEAST_BYTES = 1 << 20


def common_array(
    lend: Callable[[int], tuple[memoryview, Callable[[], None]] | None],
    dtype: np.dtype[np.generic],
    shape: int | Sequence[int],
) -> Array | None:
    """Return an array of zeros; None where there is no such memory, or it would not help.

    Args:
        lend: Returns so many bytes, and what gives them back.
        dtype: Of the array.
        shape: Of the array.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    nbytes = prod(sizes) * dtype.itemsize
    lent = lend(nbytes) if nbytes > _LEAST_BYTES else None
    if lent is None:
        return None
    array = held(lent[0], sizes, dtype, lent[1])
    array.reshape(-1).view("u1")[...] = 0
    return array
