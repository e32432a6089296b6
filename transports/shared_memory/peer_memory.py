"""The system call of Linux that reads another process's memory.

``process_vm_readv`` copies once. The kernel allows it among processes of one user and one PID namespace, unless a
security module forbids it. Under Yama, which Ubuntu enables, the process that is read has to permit it: see
`permit_reading`.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from transports.buffers import Buffer, as_bytes

_PR_SET_PTRACER = 0x59616D61  # linux/prctl.h
_ANY = ctypes.c_ulong(-1)


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


@cache
def _libc() -> ctypes.CDLL:
    """Declare the argument types of `process_vm_readv`, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    vector = ctypes.POINTER(_Vector)
    libc.process_vm_readv.argtypes = [
        ctypes.c_int, vector, ctypes.c_ulong, vector, ctypes.c_ulong, ctypes.c_ulong
    ]  # fmt: skip
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc


def buffer_address(buffer: Buffer) -> int:
    """Return the address of a buffer in this process."""
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]  # type: ignore[arg-type]
    return address


def read_memory(pid: int, address: int, into: Buffer) -> None:
    """Fill a buffer with bytes of another process's memory.

    Args:
        pid: Id of the process.
        address: Address of the first byte in the memory of that process.
        into: The buffer to fill: C-contiguous, writable, shorter than a page.

    Raises:
        OSError: The process has ended, may not be read, or has no such memory.
    """
    nbytes = as_bytes(into).nbytes
    here, there = _Vector(buffer_address(into), nbytes), _Vector(address, nbytes)
    # one piece here, one piece there, no flags
    if _libc().process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) != nbytes:
        raise OSError(ctypes.get_errno(), "the memory of another process could not be read")


def permit_reading() -> None:
    """Permit processes of the same user to read this process's memory, until it ends, if Yama requires a permission.

    Without Yama they need none. MPI libraries give the same permission.
    """
    with suppress(OSError, ValueError, AttributeError):
        if int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii")) == 1:
            _libc().prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)
