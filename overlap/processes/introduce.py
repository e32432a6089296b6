"""Meeting point of the processes of an MPI job, sent by MPI where the launcher has set none."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys

import msgpack
import trio

from ..errors import UsageError
from .identity import JOIN_TIMEOUT_S
from .place import ProcessPlace
from .sockets import listen

_LOOK_S = 1e-3  # between two looks at an operation of MPI, which offers nothing to wait for
_CARD_BYTES = 1024  # a name of a host has 255 bytes at most
# Ends its parent, unless its input ends within a time: seconds, pid and line are its arguments.
_WATCHER = """\
import os, select, signal, sys
if not select.select([0], [], [], float(sys.argv[1]))[0]:
    os.write(2, sys.argv[3].encode() + b"\\n")
    os.kill(int(sys.argv[2]), signal.SIGKILL)
"""


async def introduce_by_mpi(
    own_place: ProcessPlace, timeout_s: float = JOIN_TIMEOUT_S
) -> tuple[tuple[str, int], bytes, socket.socket | None]:
    """Send the endpoint and the secret of process 0 to the others through MPI; later bytes take other ways.

    Args:
        own_place: Place of this process.
        timeout_s: After it a child ends this process, with a line. MPI waits for ever for a process that has ended
            before it started MPI; it does so in a C function that keeps the GIL, and again at a usual exit.

    Returns:
        The endpoint, the secret, and the listening socket on process 0.

    Raises:
        UsageError: mpi4py is not installed, or its library is not that of the launcher.
    """
    line = (
        f"overlap: process {own_place.process}: MPI did not bring {own_place.processes} processes together within "
        f"{timeout_s:g} s: one has ended, or does not call overlap.run; look at its output"
    )
    arguments = ("-S", "-E", "-c", _WATCHER, str(timeout_s), str(os.getpid()), line)
    watcher = subprocess.Popen([sys.executable, *arguments], stdin=subprocess.PIPE)  # noqa: ASYNC220 - takes a moment
    try:
        return await _introduce(own_place)
    finally:
        watcher.communicate()


async def _introduce(own_place: ProcessPlace) -> tuple[tuple[str, int], bytes, socket.socket | None]:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # mpi4py without a library
        raise UsageError(
            f"{own_place.source} started {own_place.processes} processes and has set no endpoint where they meet: "
            "pip install mpi4py to let MPI introduce them, or set MASTER_ADDR and MASTER_PORT"
        ) from None
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
