"""Arrays that nobody can write to, whoever else has their memory; and arrays in memory that is borrowed."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[np.generic]


def read_only(array: Array) -> Array:
    """Return an array of the same memory, which cannot be made writable again; `array` must be C-contiguous."""
    if not array.flags.writeable or not array.size:
        array.flags.writeable = False
        return array
    view = memoryview(array.reshape(-1).view(np.uint8)).toreadonly()  # type: ignore[arg-type]
    return np.frombuffer(view, np.uint8).view(array.dtype).reshape(array.shape)


class _Memory:
    """What an array in borrowed memory refers to, and all its views with it: when this goes, nobody has one.

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
        shape: Of the array.
        dtype: Of the array.
        dropped: Is called once, in any thread and in the midst of anything, when neither the array nor any view of it,
            of whatever kind, is left.
    """
    assert view.nbytes == prod(shape) * dtype.itemsize, "it fills its memory"
    flat = np.asarray(_Memory(view, dropped))
    return flat.view(dtype).reshape(shape)
