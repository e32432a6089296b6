"""The system call of Linux that reads another process's memory.

``process_vm_readv`` copies once. The kernel allows it among processes of one user and one PID namespace, unless a
security module forbids it; Yama, which Ubuntu switches on, wants the process that is read to agree (`allow`).
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from transports.buffers import Buffer

_PR_SET_PTRACER = 0x59616D61  # linux/prctl.h
_ANY = ctypes.c_ulong(-1)


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    vector = ctypes.POINTER(_Vector)
    libc.process_vm_readv.argtypes = [
        ctypes.c_int, vector, ctypes.c_ulong, vector, ctypes.c_ulong, ctypes.c_ulong
    ]  # fmt: skip
    libc.process_vm_readv.restype = ctypes.c_ssize_t
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
