"""A word of shared memory to sleep on: whoever writes it wakes a thread elsewhere, with no event loop in between.

That is a futex(2) of Linux. Measured between two processes: 10 us there and back, 35 with a descriptor and a loop.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from time import perf_counter_ns

from transports.shared_memory.peer_memory import address_of

#: Whether there are such words here.
WORDS = sys.platform == "linux" and platform.machine() == "x86_64"

_FUTEX = 202  # of x86-64
_WAIT, _WAKE = 0, 1
_ALL = (1 << 31) - 1
_MASK = (1 << 32) - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.syscall.argtypes = [
        ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32
    ]  # fmt: skip
    libc.syscall.restype = ctypes.c_long
    return libc


class Word:
    """Four bytes that several processes map.

    Args:
        memory: They, aligned.
    """

    def __init__(self, memory: memoryview) -> None:
        self._word, self._address = memory.cast("I"), address_of(memory)

    @property
    def value(self) -> int:
        """What was written last."""
        return self._word[0]

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleep until somebody writes it, for so long at most; not at all if it is not what was seen. Any thread."""
        seconds, rest = divmod(max(0, int(timeout_s * 1e9)), 10**9)
        limit = _Timespec(seconds, rest)
        _libc().syscall(_FUTEX, self._address, _WAIT, seen, ctypes.addressof(limit), None, 0)

    def wake(self) -> None:
        """Write what nobody has seen, and wake who sleeps on it. Any thread of any process."""
        self._word[0] = perf_counter_ns() & _MASK
        _libc().syscall(_FUTEX, self._address, _WAKE, _ALL, None, None, 0)
