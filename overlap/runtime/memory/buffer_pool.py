"""Pool of array memory: results, scratch and staging reuse pages that are mapped, and often in a cache.

Fresh pages cost more than the operation: touching them for the first time takes 0.25 to 0.5 ms a MiB, a sum over memory
that is there 0.04. So the memory of a dropped array is kept and handed out again, as caching allocators do.

**When an array's memory is free.** The pool owns *roots*, arrays of bytes, and hands out a view of one. Views of
that view, in any shape or dtype, memory views, exports (DLPack, `ctypes`, tensors of other libraries) all hold a
reference to the view or to the root, directly or not. So the memory is free once the reference count of the root is
what it was when only the pool knew it. The end of the view that was handed out does not mean that, because slices of it
that are still alive refer to the root alone. It is only a hint of which root to look at.
"""

from __future__ import annotations

import platform
import sys
import threading
import weakref
from collections import deque
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
# Idle memory is let go after so long without use, so that one huge array of a start is not kept for ever.
IDLE_NS = 60 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPoolStatistics:
    """Figures of a pool so far."""

    limit_bytes: int  # Idle memory that it may keep
    held_bytes: int  # Idle memory that it keeps now, with roots that slices of dropped arrays still use
    used_bytes: int  # Memory of arrays that have been handed out and not dropped
    hits: int  # Arrays made in memory that had been used before
    misses: int  # Arrays for which new memory was needed
    dropped: int  # Pieces of idle memory that were let go, because of the limit or of their age


# Idle roots of a size to look at before a new one is made: some may still be in use through slices.
_TRIES = 4
# The next `empty` sorts returned memory in. Large arrays, and many of them, do not wait for that: they may exceed the
# limit, and there may be no next `empty`.
_AT_ONCE_BYTES, _AT_ONCE = 4 << 20, 16
# Reference counts are exact only there, and only under the GIL.
_COUNTS_REFERENCES = platform.python_implementation() == "CPython" and getattr(sys, "_is_gil_enabled", lambda: True)()


class _Lease(weakref.ref["Array"]):
    """The pool's record of a root: a weak reference to the array that was made in it last."""

    __slots__ = ("nbytes", "root", "since_ns")
    root: Root  # The memory
    nbytes: int  # Its size
    since_ns: int  # When that array was dropped


def _unused_count() -> int:
    """Return the reference count of a root that only the pool knows, counted just as later."""
    array = np.empty(0, np.uint8)
    lease = _Lease(array)
    lease.root = np.empty(1, np.uint8)
    return getrefcount(lease.root)


_UNUSED = _unused_count()


class BufferPool:
    """Allocator of arrays in the memory of dropped arrays.

    An array from here is like one of `np.empty`, but for its `base`, which is not None, so that `ndarray.resize`
    refuses it. It belongs to the caller and may outlive the pool. Any thread may make and drop arrays.

    A take costs about 2.5 us where `np.empty` costs 0.3, so arrays below `SMALLEST_BYTES` come from there. Memory is
    kept in four sizes an octave, so that an array wastes at most a quarter; idle memory is bounded by `limit_bytes`,
    least recently used first to go, and by `IDLE_NS`. Where reference counts are inexact (no GIL, not CPython), all
    arrays are new.

    Args:
        limit_bytes: How much idle memory to keep; 0 keeps none.
        now_ns: Clock for the age of idle memory.
    """

    def __init__(self, limit_bytes: int = DEFAULT_LIMIT_BYTES, *, now_ns: Callable[[], int] = monotonic_ns) -> None:
        self._limit_bytes = limit_bytes if _COUNTS_REFERENCES else 0
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._leased: dict[int, _Lease] = {}  # by id; a weak reference that is dropped would not call back
        self._returned: deque[_Lease] = deque()  # the arrays are gone; not yet sorted in
        self._idle: dict[int, deque[_Lease]] = {}  # by size, least recently used first
        self._idle_bytes = self._used_bytes = self._hits = self._misses = self._dropped = 0
        self._sweep_ns = now_ns() + IDLE_NS

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        """Return a C-contiguous array of arbitrary content.

        Args:
            shape: Shape of the array.
            dtype: Dtype of the array; any but those that hold Python objects.

        Raises:
            MemoryError: If there is no memory even when all idle memory has been freed.
        """
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < SMALLEST_BYTES or nbytes > self._limit_bytes or dtype.hasobject:
            return np.empty(shape, dtype)
        step = nbytes.bit_length() - 3
        size = -(-nbytes >> step) << step
        with self._lock:
            if self._returned:
                self._sort_in()
            root = self._reuse(size)
            if root is None:
                root = self._allocate(size)
            array: Array = np.ndarray(shape, dtype, root)
            lease = _Lease(array, self._came_back)
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
        """Return figures of its memory and its use."""
        with self._lock:
            self._sort_in()
            return BufferPoolStatistics(
                limit_bytes=self._limit_bytes,
                held_bytes=self._idle_bytes,
                used_bytes=self._used_bytes,
                hits=self._hits,
                misses=self._misses,
                dropped=self._dropped,
            )

    def close(self) -> None:
        """Let all idle memory go and keep none any more; arrays that are in use stay valid."""
        with self._lock:
            self._limit_bytes = 0
            self._sort_in()
            self._leased.clear()

    # -- below: with the lock held ---------------------------------------------------------------------------------

    def _reuse(self, size: int) -> Root | None:
        """Return memory of a size that no array uses; None if there is none."""
        idle = self._idle.get(size)
        for _ in range(_TRIES):
            if not idle:
                break
            lease = idle.pop()  # the last one used: its pages may be in a cache
            if getrefcount(lease.root) == _UNUSED:
                self._hits += 1
                self._idle_bytes -= size
                return lease.root
            idle.appendleft(lease)  # slices of the array are alive: later, or never
        self._misses += 1
        return None

    def _allocate(self, size: int) -> Root:
        """Return new memory; if the system has none, drop all idle memory first."""
        try:
            return np.empty(size, np.uint8)
        except MemoryError:
            self._drop_idle(0, 0)
        return np.empty(size, np.uint8)

    def _sort_in(self) -> None:
        """Sort returned memory in by size."""
        now_ns = self._now_ns()
        while self._returned:
            lease = self._returned.popleft()
            self._leased.pop(id(lease), None)
            lease.since_ns, size = now_ns, lease.nbytes
            idle = self._idle.get(size)
            if idle is None:
                idle = self._idle[size] = deque()
            idle.append(lease)
            self._used_bytes -= size
            self._idle_bytes += size
        if self._idle_bytes > self._limit_bytes or now_ns >= self._sweep_ns:
            self._sweep_ns = now_ns + IDLE_NS // 4
            self._drop_idle(self._limit_bytes, now_ns - IDLE_NS)

    def _drop_idle(self, limit_bytes: int, since_ns: int) -> None:
        """Drop the least recently used memory: more than a limit, and all that has been idle since before a moment."""
        while self._idle_bytes:
            oldest = min(filter(None, self._idle.values()), key=lambda idle: idle[0].since_ns)
            if self._idle_bytes <= limit_bytes and oldest[0].since_ns > since_ns:
                return
            self._idle_bytes -= oldest.popleft().nbytes
            self._dropped += 1

    # -- any thread, in the midst of anything ------------------------------------------------------------------------

    @finalizer
    def _came_back(self, lease: _Lease) -> None:
        """Note that an array is gone; the garbage collector may call this while this thread holds the lock."""
        self._returned.append(lease)
        if lease.nbytes < _AT_ONCE_BYTES and len(self._returned) < _AT_ONCE:
            return
        if self._lock.acquire(blocking=False):  # else the holder, or the next caller, sorts it in
            try:
                self._sort_in()
            finally:
                self._lock.release()
