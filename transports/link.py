"""The way to another process, as a transport between processes makes one for each: what its messages need of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Protocol

import trio

from transports.base import describe_ranks
from transports.bounce import BounceBuffers
from transports.matching import Engine, Lane, Limits, Receive, Send


class Link(ABC):
    """The way to one other process.

    Args:
        member: Its index.
        ranks: Its ranks.
        local: The ranks of this process.
        limits: What both have agreed on.
        memory: For messages that are lent.

    Attributes:
        engine: What is known of the messages between the two.
        name: Of the other process, for people.
        memory: For messages that are lent.
    """

    def __init__(
        self, member: int, ranks: Sequence[int], local: Sequence[int], limits: Limits, memory: BounceBuffers
    ) -> None:
        self.member = member
        self.name = f"process {member} ({describe_ranks(tuple(ranks))})"
        self.memory = memory
        self.engine = Engine(self.name, ranks, local, limits, memory)

    @abstractmethod
    def settle(self) -> None:
        """Transmit what the engine has to say, as far as that needs no waiting, and see to it that the rest follows."""

    def post(self, send: Send) -> None:
        """Send a message when its turn comes, which may be now."""
        self.engine.outgoing.announce(send)
        self.settle()

    def send_now(self, lane: Lane, view: memoryview) -> bool:
        """Send a small message whole, before all that waits; False if that cannot be, and nothing has happened."""
        return False

    def look(self) -> None:  # noqa: B027 - most have nothing to do
        """Take in what has come, where nothing else does that in time; called before a wait."""

    def catch_up(self) -> bool:
        """Move what can be, though a task would do so soon, and say if anything was: who may sleep calls this."""
        return False

    def take_back(self, end: Send | Receive) -> None:
        """Withdraw a call, if it has not ended; its end is told all the same, at once or later."""
        if not end.ended:
            self.engine.withdraw(end)
            self.settle()


class Leaving(Protocol):
    """A link that says goodbye."""

    def give_up_waiting(self) -> None:
        """Fail what has not met its other end."""

    async def leave(self) -> None:
        """Finish the rest, and say goodbye; ends by itself."""


async def take_leave(links: Collection[Leaving]) -> None:
    """Leave other processes, of all of them at once.

    Shielded: it ends by itself, and who is cancelled half-way through a goodbye looks like one that crashed.
    """
    for link in links:
        link.give_up_waiting()
    with trio.CancelScope(shield=True):
        async with trio.open_nursery() as nursery:
            for link in links:
                nursery.start_soon(link.leave)
