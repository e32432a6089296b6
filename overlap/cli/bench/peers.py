"""Starts a peer's ranks as processes, one peer at a time, and reads what they measured."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import ml_dtypes

from ... import OverlapError, UsageError
from .peer import Spec
from .process import Child, environment
from .sampling import Times, slowest

__all__ = ["PEERS", "Peer", "PeerResult", "PeerUnavailableError", "measure_peer", "peers_named"]

TIMEOUT_S = 600.0
"""Absolute, for all rows of one peer: gloo needs about a minute for the slowest table here."""

_OPS = ("sum", "prod", "max", "min")


class PeerUnavailableError(OverlapError):
    """A peer cannot be measured here; the message says why and, if something is missing, how to install it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A library to compare with.

    Attributes:
        name: As `--vs` takes it.
        module: What must be installed.
        packages: What pip installs for that.
        start: Starts all ranks, given the size of the world, the interpreter's arguments, and where errors go. The
            first process returned is the one whose stdout tells the result.
    """

    name: str
    module: str
    packages: str
    start: Callable[[int, Sequence[str], IO[bytes]], list[Child]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    """What a peer measured.

    Attributes:
        name: Of the peer.
        version: Library and version.
        times: One for each row, in order.
        wrong: Elements that were not as expected, for each row.
    """

    name: str
    version: str
    times: tuple[Times, ...]
    wrong: tuple[int, ...]


def peers_named(text: str) -> list[Peer]:
    """Read a list such as `gloo,mpi`.

    Raises:
        UsageError: If a name is unknown.
    """
    names = text.split(",")
    for name in names:
        if name not in PEERS:
            raise UsageError(f"--vs: {name!r} is unknown; known are {', '.join(PEERS)}")
    return [PEERS[name] for name in dict.fromkeys(names)]


def measure_peer(peer: Peer, spec: Spec) -> PeerResult:
    """Run a peer's ranks to their end and return what they measured.

    Raises:
        PeerUnavailableError: If the peer is not installed, or does not finish properly.
    """
    if find_spec(peer.module) is None:
        raise PeerUnavailableError(f"{peer.name}: {peer.module} is not installed: pip install {peer.packages}")
    if spec.op not in _OPS or hasattr(ml_dtypes, spec.dtype):
        raise PeerUnavailableError(f"{peer.name}: has no {spec.op} of {spec.dtype}")
    command = ["-m", "overlap.cli.bench.peer", peer.name, spec.to_json()]
    with ExitStack() as stack:
        errors = stack.enter_context(TemporaryFile())
        ranks = peer.start(spec.ranks, command, errors)
        for rank in ranks:
            stack.callback(rank.end)
        told = _told(peer, ranks, errors)
    return _result(peer, told, spec)


def _told(peer: Peer, ranks: Sequence[Child], errors: IO[bytes]) -> bytes:
    try:
        told, _ = ranks[0].communicate(timeout=TIMEOUT_S)
        codes = [rank.wait(timeout=TIMEOUT_S) for rank in ranks]
    except subprocess.TimeoutExpired:
        raise PeerUnavailableError(f"{peer.name}: not finished after {TIMEOUT_S:g} s, given up") from None
    if any(codes):
        errors.seek(0)
        # The first rank to fail writes first; the others only lose their connections.
        reason = re.search(r"\w*(?:Error|Exception): .*", errors.read().decode(errors="replace"))
        raise PeerUnavailableError(f"{peer.name}: failed: {reason[0].strip() if reason else f'exit codes {codes}'}")
    return told


def _result(peer: Peer, told: bytes, spec: Spec) -> PeerResult:
    answer = json.loads(told.splitlines()[-1])
    rows = answer["rows"]
    batches = [spec.sampling().batch(case.size_bytes) for case in spec.cases()]
    return PeerResult(
        name=peer.name,
        version=answer["version"],
        times=tuple(slowest(row["samples_ns"], batch=batch) for row, batch in zip(rows, batches, strict=True)),
        wrong=tuple(row["wrong"] for row in rows),
    )


def _start_gloo(ranks: int, command: Sequence[str], errors: IO[bytes]) -> list[Child]:
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
    return [
        _spawn([sys.executable, *command], errors, world | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]


def _start_mpi(ranks: int, command: Sequence[str], errors: IO[bytes]) -> list[Child]:
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise PeerUnavailableError("mpi: there is no mpiexec: pip install mpich")
    # Without `-m mpi4py` a rank that raises leaves the others waiting for ever.
    return [_spawn([mpiexec, "-n", str(ranks), sys.executable, "-m", "mpi4py", *command], errors, {})]


def _spawn(command: Sequence[str], errors: IO[bytes], variables: Mapping[str, str]) -> Child:
    environ = environment() | {"OMP_NUM_THREADS": "1"} | dict(variables)
    return Child(command, environ, errors=errors)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


PEERS = {
    "gloo": Peer(name="gloo", module="torch", packages="torch", start=_start_gloo),
    "mpi": Peer(name="mpi", module="mpi4py", packages="mpi4py mpich", start=_start_mpi),
}
