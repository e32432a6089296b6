"""Identity of a process in its world, and its introduction on a connection."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transports.tls import Tls


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message on a connection. When packed, it has at most `handshake.HELLO_LIMIT_BYTES` bytes."""

    role: str  # The purpose of the connection
    job: str  # Name of the world
    epoch: int  # Number of the world among the job's successive worlds
    member: int  # Index of this process
    members: int  # How many processes there are
    detail: str = ""  # Further facts that the role needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Index and world of a process, and the secret that proves its membership."""

    member: int  # Index of this process
    members: int  # How many processes there are
    # Shared by members only; at least one byte where processes connect over sockets.
    secret: bytes = field(default=b"", repr=False)
    job: str = ""  # Name of the world; connections of other worlds are refused
    epoch: int = 0  # Number of the world among the job's successive worlds
    tls: Tls | None = None  # Encrypts connections, on all members or none; None: not encrypted

    def make_hello(self, role: str, detail: str = "") -> Hello:
        """Return the hello of this process for a connection.

        Args:
            role: The purpose of the connection.
            detail: Further facts that the role needs.
        """
        return Hello(role=role, job=self.job, epoch=self.epoch, member=self.member, members=self.members, detail=detail)

    def refusal_reason(self, theirs: Hello, role: str) -> str:
        """Return why a hello is refused: its role, job, epoch or number of members differs; "" if all agree.

        Args:
            theirs: Hello of the other side.
            role: The expected purpose of the connection.
        """
        ours = self.make_hello(role)
        for name in ("role", "job", "epoch", "members"):
            if getattr(theirs, name) != getattr(ours, name):
                return f"{name} {getattr(theirs, name)!r} refused; here it is {getattr(ours, name)!r}"
        return ""
