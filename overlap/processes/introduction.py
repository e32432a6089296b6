"""Introduction by MPI, for processes whose launcher has told no endpoint: the MPI library knows them all."""

from __future__ import annotations

import secrets
import socket
import sys

import msgpack

from ..errors import UsageError
from .place import Place

Introduction = tuple[tuple[str, int], bytes, socket.socket | None]
"""Where to meet, the secret, and the listening socket of process 0."""


async def introduced(place: Place) -> Introduction:
    """Let process 0 listen, and tell the others the endpoint and the secret through MPI.

    Raises:
        UsageError: If mpi4py is not installed.
    """
    try:
        from transports.mpi import introduce
    except ImportError:
        raise _missing(place) from None
    listener = None
    mine = b""
    if place.process == 0:
        host = socket.gethostname() if place.nodes > 1 else "127.0.0.1"
        listener = socket.create_server((host, 0))
        mine = msgpack.packb([host, listener.getsockname()[1], secrets.token_bytes(32)])
    try:
        told = await introduce(mine)
    except ImportError:
        raise _missing(place) from None
    if len(told) != place.processes:
        raise _misfit(place, len(told))
    host, port, secret = msgpack.unpackb(told[0])
    return (str(host), int(port)), bytes(secret), listener


def _misfit(place: Place, seen: int) -> UsageError:
    library = sys.modules["mpi4py.MPI"].Get_library_version().split("\n")[0].split(",")[0].strip()
    return UsageError(
        f"{place.source} started {place.processes} processes, and the library of mpi4py ({library[:60]}) sees {seen}: "
        "it is not the launcher's; start with the mpiexec that belongs to it, install an mpi4py that was built for the "
        "launcher's library, or set MASTER_ADDR and MASTER_PORT"
    )


def _missing(place: Place) -> UsageError:
    return UsageError(
        f"{place.source} started {place.processes} processes and said nothing of where they meet: "
        "pip install mpi4py to let MPI introduce them, or set MASTER_ADDR and MASTER_PORT"
    )
