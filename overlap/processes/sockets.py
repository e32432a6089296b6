"""Endpoints and their sockets: parsing, listening, dialling, meeting, and the process that listens at a port."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress

import trio

from transports.handshake import HandshakeError, greet
from transports.identity import Hello
from transports.meeting import set_keep_alive_options
from transports.tls import Tls

from ..errors import OverlapError, UsageError
from ..kernel_facts import PROC

Endpoint = tuple[str, int]

#: Longest outage of the network, by default. It is short, so that an unreachable host is reported soon.
OUTAGE_S = 4.0

#: Longest pause before lost packets are sent again, so that a connection goes on soon after its link is back. By
#: default each pause is twice as long as the one before: after an outage of 7 s, it goes on at 12.6 s (RFC 6298).
_LONGEST_REPEAT_MS = 1000
#: linux/tcp.h, since Linux 6.15; Python has no name for it.
_TCP_RTO_MAX_MS = 44
#: Connections that wait to be accepted: a world of 256 processes may dial at once.
_BACKLOG = 512

#: Limit of one attempt to connect: a host whose packets are lost never refuses.
_DIAL_LIMIT_S = 5.0


class ListenError(OverlapError):
    """Member 0 cannot listen at the endpoint."""


def parse_endpoint(text: str) -> Endpoint:
    """Read ``HOST:PORT``.

    >>> parse_endpoint("node-0.example:29400"), parse_endpoint("[::1]:29400")
    (('node-0.example', 29400), ('::1', 29400))

    Raises:
        UsageError: The text is not of that form.
    """
    host, _, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not host or is_bracketed != (":" in host):
        raise UsageError(f"expected HOST:PORT, or [ADDRESS]:PORT for IPv6, got '{text}'")
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise UsageError(f"the port must be 0 ... 65535, got '{port}' in '{text}'")
    return host.removeprefix("[").removesuffix("]"), int(port)


def format_endpoint(endpoint: Endpoint) -> str:
    """Write ``HOST:PORT``.

    >>> format_endpoint(("::1", 29400))
    '[::1]:29400'
    """
    host, port = endpoint
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_address(endpoint: Endpoint) -> str:
    """Return the local IP address from which this host reaches an endpoint. May block, as it may ask a name server."""
    family, kind, protocol, _, address = socket.getaddrinfo(*endpoint, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # a datagram socket sends nothing for that
        return str(probe.getsockname()[0])


def listen(endpoint: Endpoint, *, backlog: int = _BACKLOG) -> socket.socket:
    """Return a socket that listens at an endpoint of this machine; at a free port for port 0.

    Raises:
        ListenError: Another program listens there, or it is no address of this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(*endpoint, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # works although connections of the last world at this port may still be closing
        return socket.create_server(address, family=family, backlog=backlog)
    except OSError as error:
        raise ListenError(_listen_failure_text(endpoint, error)) from error


def _listen_failure_text(endpoint: Endpoint, error: OSError) -> str:
    """The text names the process that has the port if the system shows it."""
    start = f"cannot listen at {format_endpoint(endpoint)}"
    if error.errno == errno.EADDRINUSE:
        holder = find_port_holder(endpoint[1])
        if holder is not None and holder.startswith(f"process {os.getpid()} "):
            return f"{start}: something else in this process listens there, such as torch's store; choose another port"
        return f"{start}: port {endpoint[1]} is taken{f' by {holder}' if holder else ''}; choose another one"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{start}: not an address of this machine; name one that the process of node 0 has"
    return f"{start}: {os.strerror(error.errno) if error.errno else error}; choose another endpoint"


async def dial(endpoint: Endpoint, outage_s: float = OUTAGE_S) -> trio.SocketStream:
    """Connect to an endpoint; the connection breaks if the other host answers nothing for `outage_s`.

    Raises:
        OSError: Nothing listens at the endpoint, or its host cannot be reached.
    """
    try:
        stream = await trio.open_tcp_stream(*endpoint)
    except OSError as error:
        raise _first_address_error(error) from error
    try:
        set_socket_options(stream, outage_s)
        if stream.socket.getsockname() == stream.socket.getpeername():
            # On one host, TCP may connect a socket to itself, if the system gives it the port of the endpoint.
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    except OSError:
        await trio.aclose_forcefully(stream)
        raise
    return stream


class NoListenerError(HandshakeError):
    """Nothing listens at an endpoint, or its host does not answer."""


async def dial_and_greet(
    endpoint: Endpoint, hello: Hello, secret: bytes, *, tls: Tls | None, outage_s: float
) -> tuple[trio.abc.Stream, Hello]:
    """Connect to a listener and shake hands, once; return the connection, and the listener's hello.

    Args:
        endpoint: Host and port of the listener.
        hello: Hello of this process.
        secret: Known to both sides.
        tls: Encrypts the connection; None: it is not encrypted.
        outage_s: The connection breaks if the other host answers nothing for so many seconds.

    Raises:
        NoListenerError: Nothing listens there; another attempt may succeed.
        HandshakeError: The listener hung up, or refused this process.
    """
    try:
        with trio.fail_after(_DIAL_LIMIT_S):
            connection = await dial(endpoint, outage_s)
    except (OSError, trio.TooSlowError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "it does not answer"
        raise NoListenerError(reason, why="silent") from error
    stream = connection if tls is None else tls.wrap(connection, serving=False)
    try:
        return stream, await greet(stream, hello, secret)
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise


def _first_address_error(error: OSError) -> OSError:
    """Return the error of a host's first address, in place of Trio's error about all its addresses."""
    cause = error.__cause__
    if isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    if isinstance(cause, OSError) and cause.errno:
        return OSError(cause.errno, os.strerror(cause.errno))
    return error


def set_socket_options(stream: trio.SocketStream, outage_s: float) -> None:
    """Let a connection send short messages at once, and break if the other host answers nothing for `outage_s`."""
    set_keep_alive_options(stream.setsockopt, outage_s, outage_s)  # Trio has set TCP_NODELAY
    if sys.platform == "linux":
        with suppress(OSError):  # an older kernel
            stream.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _LONGEST_REPEAT_MS)


def find_port_holder(port: int) -> str | None:
    """Return the process that listens at a TCP port of this machine, such as ``process 4711 (python train.py)``.

    None if no process listens there, or the process belongs to another user.
    """
    links = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for process in PROC.glob("[0-9]*") if links else ():
        try:
            if any(os.readlink(descriptor) in links for descriptor in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"process {process.name} ({command[:60]})"
        except OSError:  # the process has ended, or belongs to another user
            continue
    return None


def _listening_inodes(port: int) -> Iterator[str]:
    """Yield the inodes of the sockets that listen at a TCP port, from the tables of the kernel."""
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for columns in map(str.split, lines):
            if columns[3] == "0A" and int(columns[1].rpartition(":")[2], 16) == port:  # 0A: LISTEN
                yield columns[9]
