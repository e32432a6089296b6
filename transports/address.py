"""Addresses of a process, as the others get them, and the identity of its host."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import msgspec

from transports.failures import REPORT_BUG, TransportError

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
        """Encode the address; `unpack` decodes it."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, packed: bytes, member: int) -> PeerAddress:
        """Decode the address of another process.

        Args:
            packed: Result of `pack` in that process.
            member: Index of that process, for the error.

        Raises:
            TransportError: The bytes are no address.
        """
        try:
            return msgspec.msgpack.decode(packed, type=cls)
        except msgspec.DecodeError as error:
            raise TransportError(f"process {member} sent no valid address: {error}; {REPORT_BUG}") from error

    def may_disconnect(self, peer: PeerAddress) -> bool:
        """Whether a connection to `peer` may end while both processes live; both sides get the same answer.

        False for a Unix socket, which uses no network. False, too, for TCP inside one host if both processes have the
        same address on their first rail, unless one of the two has `lasting`.
        """
        if not self.host or self.host != peer.host:
            return True
        unix = bool(self.unix and peer.unix)
        return not unix and (self.lasting or peer.lasting or self.tcp[0][0] != peer.tcp[0][0])


def host_identity() -> str:
    """Return a text that two processes have in common if they can reach each other's Unix sockets; "" if unknown.

    It consists of the boot of the host, the network namespace and the user.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/net')} {os.getuid()}"
    return ""
