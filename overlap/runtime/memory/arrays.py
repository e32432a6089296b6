"""Arrays that are read-only for good, are in loaned memory or in memory that processes share, or have no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ...collectives.reduce import Array
from ...errors import UsageError


class Metadata(np.ndarray[Any, Any]):
    """Array that overlap itself sends, not the program: sizes, digests, packed objects."""


def metadata(values: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> Array:
    """Return values as a `Metadata` array: a view of `values` if that is an array of the dtype, else a copy."""
    return np.asarray(values, dtype).view(Metadata)


def as_read_only(array: Array) -> Array:
    """Return a view of a C-contiguous array that is read-only, and cannot be made writable again.

    An array that is read-only already, or empty, is returned itself.
    """
    if not array.flags.writeable or not array.size:
        array.flags.writeable = False
        return array
    view = memoryview(array.reshape(-1).view(np.uint8)).toreadonly()  # type: ignore[arg-type]
    return np.frombuffer(view, np.uint8).view(array.dtype).reshape(array.shape)


class _LoanedMemory:
    """Owner of loaned memory. Arrays in the memory and their views refer to it: after the last of them it is freed.

    (The `base` of a view is this object, or an array whose `base` is this object.)

    Args:
        view: The memory.
        dropped: Called when this object is freed.
    """

    __slots__ = ("__array_interface__", "_dropped", "_view")

    def __init__(self, view: memoryview, dropped: Callable[[], None]) -> None:
        self._view, self._dropped = view, dropped
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        self.__array_interface__: dict[str, Any] = {
            "shape": (view.nbytes,), "typestr": "|u1", "data": (address, view.readonly), "version": 3
        }  # fmt: skip

    def __del__(self) -> None:
        self._dropped()


def array_in_loan(
    view: memoryview, shape: tuple[int, ...], dtype: np.dtype[np.generic], dropped: Callable[[], None]
) -> Array:
    """Return an array in loaned memory.

    Args:
        view: The memory, with exactly the bytes of the array, at least one. If it is read-only, so is the array.
        shape: Shape of the array.
        dtype: Dtype of the array.
        dropped: Called once, when the array and all views of it are gone; in any thread, and at any point of a program,
            as the garbage collector may run anywhere.
    """
    assert view.nbytes == prod(shape) * dtype.itemsize, "an array fills its memory"
    flat = np.asarray(_LoanedMemory(view, dropped))
    return flat.view(dtype).reshape(shape)


# Up to this size it is quicker to copy an array to shared memory when it is sent.
_LEAST_BYTES = 1 << 20


def common_array(
    loan: Callable[[int], tuple[memoryview, Callable[[], None]] | None],
    dtype: np.dtype[np.generic],
    shape: int | Sequence[int],
) -> Array | None:
    """Return an array of zeros in memory that processes of this host share; None if there is none, or for small arrays.

    Args:
        loan: Takes a number of bytes, and returns such memory and the function that releases it, or None.
        dtype: Dtype of the array.
        shape: Shape of the array.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    nbytes = prod(sizes) * dtype.itemsize
    loaned = loan(nbytes) if nbytes > _LEAST_BYTES else None
    if loaned is None:
        return None
    array = array_in_loan(loaned[0], sizes, dtype, loaned[1])
    array.reshape(-1).view("u1")[...] = 0
    return array


def shape_only(shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
    """Return a read-only array of zeros with a shape and a dtype, and only one element in memory.

    Views and slices of the array take no memory either. A computation with the array makes real arrays of its shape.

    >>> everything = shape_only((70_000_000_000,), np.float32)
    >>> everything.nbytes, everything[:3].tolist()
    (280000000000, [0.0, 0.0, 0.0])

    Args:
        shape: Shape of the array.
        dtype: Dtype of the array; its elements must be numbers.

    Raises:
        UsageError: A side is negative, or the dtype is of Python objects.
    """
    kind = np.dtype(dtype)
    sides = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(shape)
    if kind.hasobject or (sides and min(sides) < 0):
        raise UsageError(f"shape_only: expected sides from 0 and a dtype of numbers, got {kind} {sides}")
    # This takes a tenth of the time of np.broadcast_to; simulations make such an array for every result of every rank.
    return np.ndarray(sides, kind, bytes(kind.itemsize), 0, (0,) * len(sides))
