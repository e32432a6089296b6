"""Factories of transports, ours and those of other packages, and their argument."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from transports.base import Transport
    from transports.tls import Tls

#: All-gather among the processes of a world, before any transport is open: called with a name and bytes, returns what
#: each process gave, in the order of their indices. All must call it with the same names. 48 KiB are always allowed.
Exchange: TypeAlias = Callable[[str, bytes], Awaitable[list[bytes]]]


def _say_nothing(line: str) -> None:
    pass


def _none() -> Collection[int]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrap:
    """The knowledge of a process about its world before a transport joins it to the others."""

    member: int  # Index of this process
    placement: Sequence[Sequence[int]]  # The ranks of each process, by index
    exchange: Exchange  # All-gather among the processes: how they tell each other their addresses
    # Known to members only; at least one byte where processes meet over sockets.
    secret: bytes = field(default=b"", repr=False)
    job: str = ""  # Name of the world; a transport refuses connections of others
    epoch: int = 0  # Which of the job's successive worlds
    host: str = "127.0.0.1"  # Address of this machine at which the other processes reach it
    tls: Tls | None = None  # Encrypts what leaves the process; None: nothing is encrypted
    # Choices of the user, by name, such as ``rails``, ``peer_direct``, ``unix``; a transport takes those that it
    # has and leaves the rest alone.
    options: Mapping[str, object] = field(default_factory=dict)
    # Takes a line for the user, about processes that are lost and the like.
    report: Callable[[str], None] = _say_nothing
    # Takes what a timeline should show, the moment it happens, such as the loss of a connection.
    note: Callable[[str], None] = _say_nothing
    # Which processes another transport turns out to reach, asked when this one is opened; both processes of a pair know
    # it alike. A transport that was made for the rest need not join them.
    spared: Callable[[], Collection[int]] = _none
    # Whether somebody else notices which processes are lost and which are only busy. A transport need not judge their
    # silence then, and must not: a program may keep its event loop busy for as long as it wants.
    watched: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this process."""
        return tuple(self.placement[self.member])


#: Makes one process's end of a fabric, not open yet. It waits for nobody: addresses are exchanged when the transport is
#: opened. Raises `ArgumentError` for options that cannot be meant, also when it is opened.
Factory: TypeAlias = "Callable[[Bootstrap], Transport]"
