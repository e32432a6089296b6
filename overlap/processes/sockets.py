"""Endpoints and their sockets: parsing, listening, dialling, and the process that holds a port."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import trio

from transports.meeting import keep_alive

from ..errors import OverlapError, UsageError

Endpoint = tuple[str, int]

#: How long an outage of the network may last, unless a run says otherwise: a host that cannot be reached is named soon.
OUTAGE_S = 4.0

#: Lost packets are sent again at least this often, so that a connection goes on soon after its link is back. By
#: default each pause is twice as long as the one before: a link that was down for 7 s is used after 12.6 (RFC 6298).
_LONGEST_REPEAT_MS = 1000
#: linux/tcp.h, since Linux 6.15; Python has no name for it.
_TCP_RTO_MAX_MS = 44
#: A full world of 256 processes may dial at once.
_BACKLOG = 512


class ListenError(OverlapError):
    """Member 0 cannot listen at the endpoint."""


def parse_endpoint(text: str) -> Endpoint:
    """Read ``HOST:PORT``.

    >>> parse_endpoint("node-0.example:29400"), parse_endpoint("[::1]:29400")
    (('node-0.example', 29400), ('::1', 29400))

    Raises:
        UsageError: It is not of that form.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed) or (bracketed and ":" not in host):
        raise UsageError(f"endpoint: expected HOST:PORT, or [ADDRESS]:PORT for IPv6, got '{text}'")
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise UsageError(f"endpoint: the port must be 0 ... 65535, got '{port}' in '{text}'")
    return host.removeprefix("[").removesuffix("]"), int(port)


def format_endpoint(endpoint: Endpoint) -> str:
    """Write ``HOST:PORT``.

    >>> format_endpoint(("::1", 29400))
    '[::1]:29400'
    """
    host, port = endpoint
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def listen(endpoint: Endpoint) -> trio.SocketListener:
    """Listen at an endpoint of this machine.

    Raises:
        ListenError: Another socket listens there, or it is no address of this machine.
    """
    try:
        found = await trio.socket.getaddrinfo(*endpoint, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = trio.socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the last world's connections linger
            await bound.bind(address)
            bound.listen(_BACKLOG)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        raise ListenError(_complaint(endpoint, error)) from error
    return trio.SocketListener(bound)


def listening(host: str, *, backlog: int = _BACKLOG) -> socket.socket:
    """Return a socket that listens at a free port of an address of this machine.

    Raises:
        ListenError: It is no address of this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=backlog)
    except OSError as error:
        raise ListenError(_complaint((host, 0), error)) from error


def local_address(endpoint: Endpoint) -> str:
    """Return the address of this machine from which an endpoint is reached: others reach this process there."""
    family, kind, protocol, _, address = socket.getaddrinfo(*endpoint, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # connecting a datagram socket sends nothing
        return str(probe.getsockname()[0])


def _complaint(endpoint: Endpoint, error: OSError) -> str:
    where = f"cannot listen at {format_endpoint(endpoint)}"
    if error.errno == errno.EADDRINUSE:
        holder = port_holder(endpoint[1])
        if holder is not None and holder.startswith(f"process {os.getpid()} "):
            return f"{where}: something else in this process listens there, such as torch's store; choose another port"
        return f"{where}: port {endpoint[1]} is taken{f' by {holder}' if holder else ''}; choose another one"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{where}: not an address of this machine; name one that the process of node 0 has"
    return f"{where}: {error.strerror or error}"


async def dial(endpoint: Endpoint, outage_s: float = OUTAGE_S) -> trio.SocketStream:
    """Connect to an endpoint; the connection breaks if its host answers nothing for `outage_s`.

    Raises:
        OSError: Nobody is there.
    """
    try:
        stream = await trio.open_tcp_stream(*endpoint)
    except OSError as error:
        raise _first_cause(error) from error
    try:
        tune(stream, outage_s)
        if stream.socket.getsockname() == stream.socket.getpeername():
            # TCP connects a socket to itself when its own port happens to be the one that it looks for
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    except OSError:
        await trio.aclose_forcefully(stream)
        raise
    return stream


def _first_cause(error: OSError) -> OSError:
    """Return the error of the first address, in place of a summary of all."""
    cause = error.__cause__
    if isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    if isinstance(cause, OSError) and cause.errno:
        return OSError(cause.errno, os.strerror(cause.errno))
    return error


def tune(stream: trio.SocketStream, outage_s: float = OUTAGE_S) -> None:
    """Let short messages leave at once, and let a connection break whose host answers nothing for `outage_s`."""
    keep_alive(stream.setsockopt, outage_s, outage_s)
    if sys.platform == "linux":
        with suppress(OSError):  # an older kernel
            stream.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _LONGEST_REPEAT_MS)


def port_holder(port: int) -> str | None:
    """Name the process that listens on a TCP port of this machine, if the system tells.

    Returns:
        Such as ``process 4711 (python train.py)``, or None.
    """
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for process in Path("/proc").glob("[0-9]*") if wanted else ():
        try:
            if any(os.readlink(descriptor) in wanted for descriptor in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"process {process.name} ({command[:60]})"
        except OSError:  # the process has ended meanwhile, or belongs to another user
            continue
    return None


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for columns in map(str.split, lines):
            if columns[3] == "0A" and int(columns[1].rpartition(":")[2], 16) == port:  # 0A: LISTEN
                yield columns[9]
