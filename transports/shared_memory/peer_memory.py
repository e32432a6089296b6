"""System calls of Linux between processes of one host: reading another one's memory, and sleeping on a shared word.

``process_vm_readv`` copies once. The kernel allows it among processes of one user and one PID namespace, unless a
security module forbids it; Yama, which Ubuntu switches on, wants the process that is read to agree (`allow`). futex(2)
wakes a thread of another process without an event loop in between: 10 us there and back, 35 us with a descriptor and a
loop (measured between two processes).
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from transports.buffers import Buffer

_PR_SET_PTRACER = 0x59616D61  # linux/prctl.h
_ANY = ctypes.c_ulong(-1)

#: Whether threads can sleep on words of shared memory here.
WORDS = sys.platform == "linux" and platform.machine() == "x86_64"

_FUTEX = 202  # of x86-64
_WAIT, _WAKE = 0, 1
_ALL = (1 << 31) - 1
_MASK = (1 << 32) - 1


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    vector = ctypes.POINTER(_Vector)
    libc.process_vm_readv.argtypes = [
        ctypes.c_int, vector, ctypes.c_ulong, vector, ctypes.c_ulong, ctypes.c_ulong
    ]  # fmt: skip
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    libc.syscall.argtypes = [
        ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32
    ]  # fmt: skip
    libc.syscall.restype = ctypes.c_long
    return libc


def address_of(buffer: Buffer) -> int:
    """Return where the bytes of a buffer begin in this process."""
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]  # type: ignore[arg-type]
    return address


def read(pid: int, address: int, into: Buffer) -> None:
    """Fill a buffer from another process's memory. Other threads run meanwhile.

    Args:
        pid: The process, as this one sees it.
        address: Where to begin, in its memory.
        into: C-contiguous and writable.

    Raises:
        OSError: It is gone, may not be read, or has no such memory.
    """
    left = _view(into)
    while left.nbytes:
        count = _read(pid, address, address_of(left), left.nbytes)
        address += count
        left = left[count:]


def _view(into: Buffer) -> memoryview:
    view = memoryview(into)  # type: ignore[arg-type]
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _read(pid: int, address: int, target: int, nbytes: int) -> int:
    here, there = _Vector(target, nbytes), _Vector(address, nbytes)
    count: int = _libc().process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if count <= 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code) if count else "nothing could be read")
    return count


def allow() -> None:
    """Let processes of the same user read this one, where Yama asks for that; elsewhere they may already.

    MPI libraries do it, too. It holds until this process ends.
    """
    with suppress(OSError, ValueError, AttributeError):
        if int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii")) == 1:
            _libc().prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)


class Word:
    """A word of shared memory on which threads sleep until a thread of any process writes it.

    Args:
        memory: Its four bytes, aligned, in memory that several processes map.
    """

    def __init__(self, memory: memoryview) -> None:
        self._word, self._address = memory.cast("I"), address_of(memory)

    @property
    def value(self) -> int:
        """The value that was written last."""
        return self._word[0]

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleep until the word is written, or for a limited time; not at all if it differs from `seen`. Any thread."""
        seconds, rest = divmod(max(0, int(timeout_s * 1e9)), 10**9)
        limit = _Timespec(seconds, rest)
        _libc().syscall(_FUTEX, self._address, _WAIT, seen, ctypes.addressof(limit), None, 0)

    def wake(self) -> None:
        """Write a new value, and wake the threads that sleep on the word. Any thread of any process."""
        self._word[0] = perf_counter_ns() & _MASK
        _libc().syscall(_FUTEX, self._address, _WAKE, _ALL, None, None, 0)
