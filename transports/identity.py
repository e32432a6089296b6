"""Identity of a process among those of its world, and the introduction that it gives on a connection."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transports.tls import Tls


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The introduction of one side of a connection; at most `handshake.HELLO_LIMIT_BYTES` when packed."""

    role: str  # The purpose of the connection
    job: str  # Name of the world
    epoch: int  # Which of the job's successive worlds
    member: int  # Index of this process
    members: int  # How many processes there are
    detail: str = ""  # Further facts that the role needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A process among those of one world, with its proof of that."""

    member: int  # Index of this process
    members: int  # How many processes there are
    # Known to members only; at least one byte where processes meet over sockets.
    secret: bytes = field(default=b"", repr=False)
    job: str = ""  # Name of the world; connections of others are refused
    epoch: int = 0  # Which of the job's successive worlds
    tls: Tls | None = None  # Encrypts what leaves the process, on all members or none; None: nothing is encrypted

    def hello(self, role: str, detail: str = "") -> Hello:
        """Return the introduction of this process on a connection."""
        return Hello(role=role, job=self.job, epoch=self.epoch, member=self.member, members=self.members, detail=detail)

    def refusal(self, theirs: Hello, role: str) -> str:
        """Return why the other side of a connection is not of this world; empty if it is."""
        mine = self.hello(role)
        for name in ("role", "job", "epoch", "members"):
            if getattr(theirs, name) != getattr(mine, name):
                return f"{name} {getattr(theirs, name)!r} refused; here it is {getattr(mine, name)!r}"
        return ""
