"""Arrays as bytes, and bytes as arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod

import numpy as np

from ...collectives.reduce import Array


def bytes_of(array: Array) -> memoryview:
    """Return the bytes of a contiguous array."""
    return memoryview(array.view(np.uint8))  # type: ignore[arg-type]


def address_of(array: Array) -> int:
    """Return the address of an array in this process."""
    address: int = array.__array_interface__["data"][0]
    return address


def array_at(address: int, shape: Sequence[int], dtype: np.dtype[np.generic] | None) -> Array:
    """Return an array at an address of this process; the caller holds its memory."""
    assert dtype is not None, "this is a bug in overlap: an array without a dtype"
    memory = (ctypes.c_char * (prod(shape) * dtype.itemsize)).from_address(address)
    return as_numbers(memoryview(memory).cast("B"), dtype).reshape(shape)


def as_numbers(view: memoryview, dtype: np.dtype[np.generic]) -> Array:
    """Return bytes as numbers."""
    return np.frombuffer(view, np.uint8).view(dtype)
