"""Addresses of a process, as the others get them: interfaces, Unix sockets, and the identity of its host."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import msgpack
import trio

from transports.failures import ArgumentError, TransportError

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_LIMIT_BYTES = 16 << 10
#: How many rails there may be to one process.
RAILS_LIMIT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """The addresses of one process."""

    host: str  # Identity of the host; processes with the same one can use Unix sockets; empty if unknown
    unix: str  # Name of the Unix socket; empty if it has none
    tcp: tuple[tuple[str, int], ...] = ()  # Address and port for each rail
    lasting: bool = False  # Whether connections may end before their processes do, even inside a host
    cores: frozenset[int] = frozenset()  # Cores of its host that the process may use

    def pack(self) -> bytes:
        """Return the address as bytes for `unpack`."""
        bits = sum(1 << core for core in self.cores)
        cores = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
        packed: bytes = msgpack.packb((self.host, self.unix, self.tcp, self.lasting, cores))
        return packed

    @classmethod
    def unpack(cls, packed: bytes, member: int) -> PeerAddress:
        """Return the address of another process from its bytes.

        Raises:
            TransportError: The bytes are no address.
        """
        try:
            if len(packed) > _LIMIT_BYTES:
                raise ValueError(f"{len(packed)} bytes")
            host, unix, tcp, lasting, cores = msgpack.unpackb(packed, use_list=False)
            rails = tuple((str(ip_address(address)), _check_port(port)) for address, port in tcp)
            if not (isinstance(host, str) and isinstance(unix, str) and len(rails) <= RAILS_LIMIT):
                raise ValueError(f"host {host!r}, unix {unix!r}, {len(rails)} rails")
            if not isinstance(lasting, bool):
                raise ValueError(f"lasting {lasting!r}")
            if not isinstance(cores, bytes):
                raise ValueError(f"cores {cores!r}")
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise TransportError(
                f"process {member} sent no valid address: {error}; this is a bug in overlap, please report it"
            ) from error
        bits = int.from_bytes(cores, "little")
        usable = frozenset(core for core in range(bits.bit_length()) if bits >> core & 1)
        return cls(host=host, unix=unix, tcp=rails, lasting=lasting, cores=usable)

    def may_part(self, peer: PeerAddress) -> bool:
        """Whether a single connection between two processes may end before they do; the same on both sides.

        A Unix socket may not: it lives in the memory of its host. Nor may TCP from an address to itself within one
        network namespace, which uses no wire. `lasting` on either side overrides that.
        """
        if not self.host or self.host != peer.host:
            return True
        unix = bool(self.unix and peer.unix)
        return not unix and (self.lasting or peer.lasting or self.tcp[0][0] != peer.tcp[0][0])


def _check_port(port: object) -> int:
    """Return a port number from another process; `ValueError` for anything else."""
    if type(port) is not int or not 0 < port < 2**16:
        raise ValueError(f"port {port!r}")
    return port


def describe_ends(connection: socket.socket) -> str:
    """Return both addresses of a TCP connection, for people; empty for a Unix socket."""
    if connection.family == socket.AF_UNIX:
        return ""
    here, there = connection.getsockname(), connection.getpeername()
    return f"{here[0]}:{here[1]} to {there[0]}:{there[1]}"


def host_identity() -> str:
    """Return the identity that processes must share to reach each other's Unix sockets: boot, namespace, user."""
    kernel = kernel_identity("net")
    return f"{kernel} {os.getuid()}" if kernel else ""


def kernel_identity(namespace: str) -> str:
    """Return the identity of the running kernel and a namespace of this process, such as "net"; empty if unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink(f'/proc/self/ns/{namespace}')}"
    return ""


def rail_names(rails: int | Sequence[str], host: str) -> tuple[str, ...]:
    """Return the name or local address of each rail.

    Raises:
        ArgumentError: No rails, or too many.
    """
    names = (host,) * rails if isinstance(rails, int) else tuple(rails)
    if not 0 < len(names) <= RAILS_LIMIT:
        raise ArgumentError(f"rails is {rails!r}; name 1 to {RAILS_LIMIT} of them")
    return names


async def resolve_address(name: str) -> str:
    """Return the address of a network interface or a host name; an IP address is returned unchanged.

    Raises:
        ArgumentError: No interface or host has this name.
    """
    await trio.lowlevel.checkpoint()
    with suppress(ValueError):
        return str(ip_address(name))
    interfaces = [interface for _, interface in socket.if_nameindex()]
    try:
        if name in interfaces:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            return socket.inet_ntoa(reply[20:24])
        # the system's resolver may take seconds; it has a thread of its own
        return str((await trio.socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))[0][4][0])
    except OSError as error:
        raise ArgumentError(
            f"rail {name!r} has no address ({error.strerror}); interfaces here are {', '.join(interfaces)}"
        ) from error
