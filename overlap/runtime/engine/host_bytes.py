"""Arrays as bytes, and bytes as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ...collectives.reduce import Array
from ..memory.foreign import bytes_at


def bytes_of(array: Array) -> memoryview:
    """Return the bytes of a contiguous array."""
    return memoryview(array.view(np.uint8))  # type: ignore[arg-type]


def array_at(address: int, shape: Sequence[int], dtype: np.dtype[np.generic] | None) -> Array:
    """Return an array in the memory at an address of this process. The caller keeps the memory alive.

    Args:
        address: Address of the first byte.
        shape: Shape of the array; the memory has as many bytes.
        dtype: Dtype of the array; never None, which the type of `Call.dtype` allows.
    """
    assert dtype is not None, "this is a bug in overlap: an array without a dtype"
    return bytes_as_array(bytes_at(address, prod(shape) * dtype.itemsize), dtype).reshape(shape)


def bytes_as_array(view: memoryview, dtype: np.dtype[np.generic]) -> Array:
    """Return the bytes of a view as an array of a dtype, without a copy."""
    return np.frombuffer(view, np.uint8).view(dtype)
