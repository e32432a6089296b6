"""Arrays that are read-only for good, lie in borrowed memory or in memory common to processes, or have no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ...collectives.reduce import Array
from ...errors import UsageError


class Metadata(np.ndarray[Any, Any]):
    """Numbers that this package itself sends, such as sizes, digests and packed objects, and no program."""


def metadata(values: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> Array:
    """Return an array of `Metadata`; in the memory of `values`, if that is an array of the dtype."""
    return np.asarray(values, dtype).view(Metadata)


def read_only(array: Array) -> Array:
    """Return an array of the same memory, which cannot be made writable again; `array` must be C-contiguous."""
    if not array.flags.writeable or not array.size:
        array.flags.writeable = False
        return array
    view = memoryview(array.reshape(-1).view(np.uint8)).toreadonly()  # type: ignore[arg-type]
    return np.frombuffer(view, np.uint8).view(array.dtype).reshape(array.shape)


class _Memory:
    """Owner of borrowed memory, to which an array and all its views refer: it is freed after the last of them.

    numpy lets views refer to the first object below them that is no array, or to the array above it.
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


def held(view: memoryview, shape: tuple[int, ...], dtype: np.dtype[np.generic], dropped: Callable[[], None]) -> Array:
    """Return an array in borrowed memory.

    Args:
        view: The memory: as many bytes as the array has, at least one; the array is read-only if this is.
        shape: Shape of the array.
        dtype: Dtype of the array.
        dropped: Called once, in any thread and in the midst of anything, when the array and all views of it, of
            whatever kind, are gone.
    """
    assert view.nbytes == prod(shape) * dtype.itemsize, "an array fills its memory"
    flat = np.asarray(_Memory(view, dropped))
    return flat.view(dtype).reshape(shape)


# Smaller arrays are copied to common memory when they are sent, which takes fewer exchanges.
_LEAST_BYTES = 1 << 20


def common_array(
    loan: Callable[[int], tuple[memoryview, Callable[[], None]] | None],
    dtype: np.dtype[np.generic],
    shape: int | Sequence[int],
) -> Array | None:
    """Return an array of zeros in common memory; None where there is none, or it would not help.

    Args:
        loan: Returns the memory of so many bytes, and a function that gives it back.
        dtype: Dtype of the array.
        shape: Shape of the array.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    nbytes = prod(sizes) * dtype.itemsize
    loaned = loan(nbytes) if nbytes > _LEAST_BYTES else None
    if loaned is None:
        return None
    array = held(loaned[0], sizes, dtype, loaned[1])
    array.reshape(-1).view("u1")[...] = 0
    return array


def shape_only(shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
    """Return an array that has a shape and a dtype, and one element in memory, a read-only zero.

    Views and slices of it take no memory either. Anything that computes with it makes real arrays of that shape.

    >>> everything = shape_only((70_000_000_000,), np.float32)
    >>> everything.nbytes, everything[:3].tolist()
    (280000000000, [0.0, 0.0, 0.0])

    Args:
        shape: Shape of the array.
        dtype: Dtype of the array; its elements must be numbers.

    Raises:
        UsageError: If there can be no such array.
    """
    kind = np.dtype(dtype)
    sides = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(shape)
    if kind.hasobject or (sides and min(sides) < 0):
        raise UsageError(f"shape_only: expected sides from 0 and a dtype of numbers, got {kind} {sides}")
    # A tenth of the time of np.broadcast_to, and simulations make one for every result of every rank.
    return np.ndarray(sides, kind, bytes(kind.itemsize), 0, (0,) * len(sides))
