"""Pool of array memory: results, scratch and staging buffers reuse pages that are mapped, and often in a cache.

Fresh pages cost more than an operation: the first access takes 0.25 to 0.5 ms a MiB, a sum over mapped memory 0.04 ms.
So the memory of a dropped array is kept and used for later arrays, as caching allocators do.

**When an array's memory is free.** The pool owns *roots*, arrays of bytes, and returns a view of a root. Views of that
view, in any shape or dtype, memory views and exports (DLPack, `ctypes`, tensors of other libraries) all hold a
reference to the view or to the root. So the memory is free once the reference count of the root is what it was when
only the pool referred to it. When the returned view itself is gone, the memory may still be in use, because slices of
the view refer to the root alone. The end of the view only tells the pool which root to check.
"""

from __future__ import annotations

import platform
import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from sys import getrefcount
from time import monotonic_ns
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...collectives.reduce import Array
from ..interrupts import finalizer

Root: TypeAlias = NDArray[np.uint8]

# Idle memory a world keeps: the results of a full window (8) of 64 MiB operations on two ranks.
DEFAULT_LIMIT_BYTES = 1 << 30
# Below, `np.empty` is quicker: glibc keeps smaller blocks (its thresholds for mmap and for trimming the heap are this
# size). Measured, us to make and fill arrays that are dropped by 8 or 32 at once, `np.empty` against the pool:
# 64 KiB 2.4 and 3.4 against 5; 128 KiB 5 and 28 against 8 and 9; 256 KiB 55 and 78 against 16; 1 MiB 320 against 67.
SMALLEST_BYTES = 128 << 10
# Idle memory is freed after this time without use, so that one huge array at the start is not kept for ever.
IDLE_NS = 60 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPoolStatistics:
    """Figures of a pool so far."""

    limit_bytes: int  # Limit of idle memory that the pool keeps
    held_bytes: int  # Idle memory that the pool keeps now, including memory that slices of dropped arrays still use
    used_bytes: int  # Memory of arrays that the pool has made and that are still alive
    hits: int  # Number of arrays made in memory that had been used before
    misses: int  # Number of arrays for which new memory was needed
    dropped: int  # Number of pieces of idle memory that were freed, because of the limit or of their age


# Idle roots of a size to look at before a new one is made: some may still be in use through slices.
_TRIES = 4
# Returned memory is collected by the next `empty`; at once, if it is from a large array or from this many arrays, as it
# may exceed the limit, and there may be no next `empty`.
_AT_ONCE_BYTES, _AT_ONCE = 4 << 20, 16
# Whether reference counts are exact.
_COUNTS_REFERENCES = platform.python_implementation() == "CPython" and getattr(sys, "_is_gil_enabled", lambda: True)()


class _Lease(weakref.ref["Array"]):
    """The pool's record of a root; itself a weak reference to the array that was last made in the root."""

    __slots__ = ("idle_since_ns", "nbytes", "root")
    root: Root  # The memory
    nbytes: int  # Size of the memory
    idle_since_ns: int  # Time since which the memory has been idle


def _count_unused_references() -> int:
    """Return what `getrefcount(lease.root)` returns if only a lease refers to the root."""
    array = np.empty(0, np.uint8)
    lease = _Lease(array)
    lease.root = np.empty(1, np.uint8)
    return getrefcount(lease.root)


_UNUSED_COUNT = _count_unused_references()


class BufferPool:
    """Allocator of arrays in the memory of dropped arrays.

    An array of the pool is like one of `np.empty`, except that its `base` is not None, so that `ndarray.resize` refuses
    it. It belongs to the caller and may outlive the pool. Any thread may make and drop arrays.

    `empty` costs about 2.5 us, `np.empty` 0.3, so arrays below `SMALLEST_BYTES` come from `np.empty`. Memory has four
    sizes between one power of two and the next, so that an array wastes at most a quarter. Idle memory beyond
    `limit_bytes` is freed, the least recently used first; so is memory that has been idle for `IDLE_NS`. If reference
    counts are inexact (no GIL, not CPython), the pool keeps no memory.

    Args:
        limit_bytes: Limit of idle memory; 0 keeps none.
        now_ns: Clock for the age of idle memory.
    """

    def __init__(self, limit_bytes: int = DEFAULT_LIMIT_BYTES, *, now_ns: Callable[[], int] = monotonic_ns) -> None:
        self._limit_bytes = limit_bytes if _COUNTS_REFERENCES else 0
        self._now_ns = now_ns
        self._lock = threading.Lock()
        # Leases of arrays that are alive, by id: a weak reference that is dropped itself would not call back.
        self._leased: dict[int, _Lease] = {}
        self._returned: deque[_Lease] = deque()  # leases whose array is gone, and that are not yet in `_idle`
        self._idle: defaultdict[int, deque[_Lease]] = defaultdict(deque)  # by size, least recently used first
        self._idle_bytes = self._used_bytes = self._hits = self._misses = self._dropped = 0
        self._next_sweep_ns = now_ns() + IDLE_NS

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        """Return a C-contiguous array of arbitrary content, as `np.empty` does.

        Args:
            shape: Shape of the array.
            dtype: Dtype of the array.

        Raises:
            MemoryError: There is no memory, even after all idle memory was freed.
        """
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < SMALLEST_BYTES or nbytes > self._limit_bytes or dtype.hasobject:
            return np.empty(shape, dtype)
        # Round up to a number with at most three significant bits: four sizes from one power of two to the next.
        step = nbytes.bit_length() - 3
        size = -(-nbytes >> step) << step
        with self._lock:
            if self._returned:
                self._collect_returned_memory()
            root = self._take_root(size)
            array: Array = np.ndarray(shape, dtype, root)
            lease = _Lease(array, self._on_array_dropped)
            lease.root, lease.nbytes = root, size
            self._leased[id(lease)] = lease
            self._used_bytes += size
        return array

    def copy(self, array: Array) -> Array:
        """Return a C-contiguous copy of an array."""
        copied = self.empty(array.shape, array.dtype)
        copied[...] = array
        return copied

    def statistics(self) -> BufferPoolStatistics:
        """Return figures of the pool's memory and use so far."""
        with self._lock:
            self._collect_returned_memory()
            return BufferPoolStatistics(
                limit_bytes=self._limit_bytes,
                held_bytes=self._idle_bytes,
                used_bytes=self._used_bytes,
                hits=self._hits,
                misses=self._misses,
                dropped=self._dropped,
            )

    def close(self) -> None:
        """Free all idle memory, and keep none from now on. Arrays that are in use stay valid."""
        with self._lock:
            self._limit_bytes = 0
            self._collect_returned_memory()
            self._leased.clear()

    # -- below: with the lock held ---------------------------------------------------------------------------------

    def _take_root(self, size: int) -> Root:
        """Return idle memory of this size, or new memory if there is none."""
        idle = self._idle[size]
        for _ in range(min(_TRIES, len(idle))):
            lease = idle.pop()  # the most recently used: its pages may be in a cache
            if getrefcount(lease.root) == _UNUSED_COUNT:
                self._hits += 1
                self._idle_bytes -= size
                return lease.root
            idle.appendleft(lease)  # slices of the dropped array are still alive
        self._misses += 1
        try:
            return np.empty(size, np.uint8)
        except MemoryError:  # free all idle memory, and try again
            self._free_idle_memory(0, 0)
        return np.empty(size, np.uint8)

    def _collect_returned_memory(self) -> None:
        """Move the memory of dropped arrays to the idle memory of its size, and free what exceeds limit or age."""
        now_ns = self._now_ns()
        while self._returned:
            lease = self._returned.popleft()
            self._leased.pop(id(lease), None)
            lease.idle_since_ns = now_ns
            self._idle[lease.nbytes].append(lease)
            self._used_bytes -= lease.nbytes
            self._idle_bytes += lease.nbytes
        if self._idle_bytes > self._limit_bytes or now_ns >= self._next_sweep_ns:
            self._next_sweep_ns = now_ns + IDLE_NS // 4
            self._free_idle_memory(self._limit_bytes, now_ns - IDLE_NS)

    def _free_idle_memory(self, limit_bytes: int, idle_since_ns: int) -> None:
        """Free what exceeds the limit, the least recently used first, and all that is idle since then or longer."""
        while self._idle_bytes:
            oldest = min(filter(None, self._idle.values()), key=lambda idle: idle[0].idle_since_ns)
            if self._idle_bytes <= limit_bytes and oldest[0].idle_since_ns > idle_since_ns:
                return
            self._idle_bytes -= oldest.popleft().nbytes
            self._dropped += 1

    # -- any thread, in the midst of anything ------------------------------------------------------------------------

    @finalizer
    def _on_array_dropped(self, lease: _Lease) -> None:
        """The garbage collector may call this while the lock is held."""
        self._returned.append(lease)
        if lease.nbytes < _AT_ONCE_BYTES and len(self._returned) < _AT_ONCE:
            return
        if self._lock.acquire(blocking=False):  # otherwise a later call collects it
            try:
                self._collect_returned_memory()
            finally:
                self._lock.release()
