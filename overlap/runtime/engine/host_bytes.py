"""Arrays as bytes, and scratch memory of threads that read the memory of other processes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from math import prod
from typing import overload

import numpy as np

from ...collectives.reduce import Array

_scratch = threading.local()


class Sources(Sequence[Array]):
    """Inputs of ranks, each read when its turn comes, so that it is still in the cache when it is added."""

    def __init__(self, reads: Sequence[Callable[[], Array]]) -> None:
        self._reads = reads

    def __len__(self) -> int:
        return len(self._reads)

    @overload
    def __getitem__(self, index: int) -> Array: ...
    @overload
    def __getitem__(self, index: slice) -> Sources: ...
    def __getitem__(self, index: int | slice) -> Array | Sources:
        return self._reads[index]() if isinstance(index, int) else Sources(self._reads[index])


def bytes_of(array: Array) -> memoryview:
    """Return the bytes of a contiguous array."""
    return memoryview(array.view(np.uint8))  # type: ignore[arg-type]


def address_of(array: Array) -> int:
    """Return the address of an array in this process."""
    address: int = array.__array_interface__["data"][0]
    return address


def array_at(address: int, shape: Sequence[int], dtype: np.dtype[np.generic] | None) -> Array:
    """Return the array that lies at an address of this process, whose memory the caller keeps."""
    assert dtype is not None, "what lies there has a dtype"
    memory = (ctypes.c_char * (prod(shape) * dtype.itemsize)).from_address(address)
    return typed(memoryview(memory).cast("B"), dtype).reshape(shape)


def typed(view: memoryview, dtype: np.dtype[np.generic]) -> Array:
    """Return bytes as numbers."""
    return np.frombuffer(view, np.uint8).view(dtype)


def room_for(index: int, nbytes: int) -> memoryview:
    """Return memory of this thread's own for one of the pieces that it adds up."""
    rooms: dict[int, memoryview] = _scratch.__dict__.setdefault("rooms", {})
    room = rooms.get(index)
    if room is None or room.nbytes < nbytes:
        room = rooms[index] = memoryview(np.empty(nbytes, np.uint8))  # type: ignore[arg-type]
    return room[:nbytes]
