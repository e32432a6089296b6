"""Addresses of a process, as the others get them, and the identity of its host."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import msgspec

from transports.failures import TransportError

#: How many rails there may be to one process.
RAILS_LIMIT = 64
_Port = Annotated[int, msgspec.Meta(gt=0, lt=2**16)]
_Core = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """The addresses of one process."""

    host: str  # Identity of the host; processes with the same one can use Unix sockets; empty if unknown
    unix: str  # Name of the Unix socket; empty if it has none
    # Address and port for each rail
    tcp: Annotated[tuple[tuple[str, _Port], ...], msgspec.Meta(max_length=RAILS_LIMIT)] = ()
    lasting: bool = False  # Whether connections may end before their processes do, even inside a host
    cores: frozenset[_Core] = frozenset()  # Cores of its host that the process may use

    def __post_init__(self) -> None:
        for address, _ in self.tcp:
            ip_address(address)

    def pack(self) -> bytes:
        """Return the address as bytes for `unpack`."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, packed: bytes, member: int) -> PeerAddress:
        """Return the address of another process from its bytes.

        Raises:
            TransportError: The bytes are no address.
        """
        try:
            return msgspec.msgpack.decode(packed, type=cls)
        except msgspec.DecodeError as error:
            raise TransportError(
                f"process {member} sent no valid address: {error}; this is a bug in overlap, please report it"
            ) from error

    def may_part(self, peer: PeerAddress) -> bool:
        """Whether a single connection between two processes may end before they do; the same on both sides.

        A Unix socket may not: it lives in the memory of its host. Nor may TCP from an address to itself within one
        network namespace, which uses no wire. `lasting` on either side overrides that.
        """
        if not self.host or self.host != peer.host:
            return True
        unix = bool(self.unix and peer.unix)
        return not unix and (self.lasting or peer.lasting or self.tcp[0][0] != peer.tcp[0][0])


def host_identity() -> str:
    """Return the identity that processes must share to reach each other's Unix sockets: boot, namespace, user.

    It is empty if it is unknown.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/net')} {os.getuid()}"
    return ""
