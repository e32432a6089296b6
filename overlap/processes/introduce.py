"""Introduction of the processes of an MPI job: MPI sends the endpoint and the secret, if no variable has them."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys

import msgpack
import trio

from ..errors import UsageError
from .place import ProcessPlace
from .sockets import listen

_LOOK_S = 1e-3  # between two looks at an operation of MPI, which offers nothing to wait for
_CARD_BYTES = 1024  # a name of a host has 255 bytes at most
# Program of a child: kills the process with the id argv[2], and prints the line argv[3], unless the child's input ends
# within argv[1] seconds.
_WATCHER = """\
import os, select, signal, sys
if not select.select([0], [], [], float(sys.argv[1]))[0]:
    os.write(2, sys.argv[3].encode() + b"\\n")
    os.kill(int(sys.argv[2]), signal.SIGKILL)
"""


async def introduce_by_mpi(
    own_place: ProcessPlace, timeout_s: float
) -> tuple[tuple[str, int], bytes, socket.socket | None]:
    """Send the endpoint and the secret of process 0 to the other processes through MPI, which is not used after that.

    MPI waits for ever if a process ends before it has started MPI, in a C function that keeps the GIL. So a child
    process kills this one after `timeout_s`, and prints a line about the reason.

    Args:
        own_place: Place of this process.
        timeout_s: Limit in seconds.

    Returns:
        The endpoint, as host and port; the secret; and on process 0 the socket that listens there, on others None.

    Raises:
        UsageError: mpi4py is not installed, or its library does not belong to the launcher.
    """
    fact = f"MPI did not bring {own_place.processes} processes together within {timeout_s:g} s"
    cause = "one has ended, or does not call overlap.run; look at its output"
    line = f"overlap: process {own_place.process}: {fact}: {cause}"
    arguments = ("-S", "-E", "-c", _WATCHER, str(timeout_s), str(os.getpid()), line)
    watcher = subprocess.Popen([sys.executable, *arguments], stdin=subprocess.PIPE)  # noqa: ASYNC220 - takes a moment
    try:
        return await _broadcast_endpoint(own_place)
    finally:
        # closes the input of the child, which then ends, and waits for it
        watcher.communicate()


async def _broadcast_endpoint(own_place: ProcessPlace) -> tuple[tuple[str, int], bytes, socket.socket | None]:
    """Broadcast the endpoint and the secret of process 0; result and errors are those of `introduce_by_mpi`."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # mpi4py without a library
        fact = f"{own_place.source} started {own_place.processes} processes and has set no endpoint where they meet"
        advice = "pip install mpi4py to let MPI introduce them, or set MASTER_ADDR and MASTER_PORT"
        raise UsageError(f"{fact}: {advice}") from None
    seen = MPI.COMM_WORLD.Get_size()
    if seen != own_place.processes:
        library = MPI.Get_library_version().split("\n")[0].split(",")[0].strip()
        raise UsageError(
            f"{own_place.source} started {own_place.processes} processes, and the library of mpi4py ({library[:60]}) "
            f"sees {seen}: it is not the launcher's; start with the mpiexec that belongs to it, install an mpi4py that "
            "was built for the launcher's library, or set MASTER_ADDR and MASTER_PORT"
        )
    listener, card = None, bytearray(_CARD_BYTES)
    if own_place.process == 0:
        host = socket.gethostname() if own_place.nodes > 1 else "127.0.0.1"
        listener = listen((host, 0))
        packed = msgpack.packb([host, listener.getsockname()[1], secrets.token_bytes(32)])
        card[: len(packed)] = packed
    request = MPI.COMM_WORLD.Ibcast([card, MPI.BYTE], root=0)
    while not request.Test():  # noqa: ASYNC110
        await trio.sleep(_LOOK_S)
    unpacker = msgpack.Unpacker()
    unpacker.feed(card)
    host, port, secret = unpacker.unpack()
    return (str(host), int(port)), bytes(secret), listener
