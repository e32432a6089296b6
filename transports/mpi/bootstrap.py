"""The MPI library, and an all-gather of a few bytes over it before any transport is open."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING, cast

import numpy as np
import trio

from transports.factory import Exchange
from transports.failures import TransportError

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI


def mpi() -> ModuleType:
    """Import and return the module ``mpi4py.MPI``.

    Raises:
        ImportError: It is not installed; the message says how to.
    """
    try:
        return import_module("mpi4py.MPI")
    except ModuleNotFoundError as error:
        raise ImportError("mpi4py is not installed: pip install mpi4py") from error


def world() -> MPI.Intracomm:
    """Return the communicator of all processes that the launcher started."""
    return cast("MPI.Intracomm", mpi().COMM_WORLD)


_job_broken = threading.Event()
"""Set once a process of the job has been lost, or has left without agreement."""


def mark_broken() -> None:
    """Record that a process of the job is lost, or has left without agreement."""
    _job_broken.set()


def exit_if_broken(code: int) -> None:
    """End this process at once, after its exit handlers, if its job has broken.

    MPI_Finalize, which mpi4py calls at the very end, waits for all processes of a job, also for one that is lost.
    """
    if _job_broken.is_set():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


#: Between two looks at a collective operation of MPI; jobs do not start often.
LOOK_S = 1e-3


async def introduce(data: bytes, *, comm: MPI.Intracomm | None = None) -> list[bytes]:
    """Exchange a few bytes with all processes; return the bytes of each process, by its rank in the communicator.

    A collective: every process must call it, and in the same order as its other collectives on the communicator. To
    be cancelled in the middle of it makes the communicator useless.

    Args:
        data: The bytes of this process.
        comm: The processes; by default all that the launcher started.

    Raises:
        ImportError: mpi4py is not installed.
    """
    comm = world() if comm is None else comm
    lengths = np.zeros(comm.Get_size(), np.int64)
    await wait_for(comm.Iallgather(np.array([len(data)], np.int64), lengths))
    everything = bytearray(int(lengths.sum()))
    await wait_for(comm.Iallgatherv([data, mpi().BYTE], [everything, lengths.tolist(), mpi().BYTE]))
    ends = np.cumsum(lengths).tolist()
    return [bytes(everything[end - length : end]) for end, length in zip(ends, lengths.tolist(), strict=True)]


def exchange(comm: MPI.Intracomm | None = None) -> Exchange:
    """Return the all-gather for the addresses of other transports and of the control plane.

    The function returned is a collective as `introduce` is, and raises `TransportError` if processes call it with
    different names.
    """

    async def exchange_all(name: str, data: bytes) -> list[bytes]:
        """Exchange bytes under a name, which all processes must agree on."""
        label = name.encode() + b"\0"
        messages = await introduce(label + data, comm=comm)
        for member, message in enumerate(messages):
            if not message.startswith(label):
                theirs = message.partition(b"\0")[0].decode(errors="replace")
                raise TransportError(
                    f"process {member} exchanges {theirs!r}, this one {name!r}; run one program in all"
                )
        return [message[len(label) :] for message in messages]

    return exchange_all


async def wait_for(request: MPI.Request) -> None:
    """Wait for a request of MPI, without blocking the event loop and in no hurry."""
    while not request.Test():  # noqa: ASYNC110 - MPI has nothing else to wait for
        await trio.sleep(LOOK_S)
    await trio.lowlevel.checkpoint()
