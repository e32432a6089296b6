"""Links: each leads to one other process, and moves the messages that its matching engine names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence

import trio

from transports.base import describe_ranks
from transports.buffers import BounceBuffers
from transports.matching import Engine, Lane, Limits, Receive, Send

# A goodbye waits so long for the next sign of progress: longer than a busy machine keeps a process from running,
# shorter than anybody waits for a program to end.
_PATIENCE_S = 2.0


class Link(ABC):
    """The connection to one other process.

    Args:
        member: Its index.
        ranks: Its ranks.
        local: The ranks of this process.
        limits: The limits that both have agreed on.
        memory: For messages that are lent.

    Attributes:
        engine: The state of the messages between the two.
        name: Of the other process, for people.
        memory: For messages that are lent.
        progress: Less `traffic` than this within two seconds is no progress.
    """

    progress = 1

    def __init__(
        self, member: int, ranks: Sequence[int], local: Sequence[int], limits: Limits, memory: BounceBuffers
    ) -> None:
        self.member = member
        self.name = f"process {member} ({describe_ranks(tuple(ranks))})"
        self.memory = memory
        self.engine = Engine(self.name, ranks, local, limits, memory)
        self._changed: trio.Event | None = None

    @abstractmethod
    def settle(self) -> None:
        """Transmit the messages of the engine as far as that needs no waiting, and see to it that the rest follows."""

    def post(self, send: Send) -> None:
        """Send a message when its turn comes, which may be now."""
        self.engine.outgoing.announce(send)
        self.settle()

    def send_now(self, lane: Lane, view: memoryview) -> bool:
        """Send a small message whole, before all others; return False, with nothing done, if that is impossible."""
        return False

    def look(self) -> None:  # noqa: B027 - most have nothing to do
        """Take in messages that have come, where no task does that in time; called before a wait."""

    def catch_up(self) -> bool:
        """Move the bytes that are ready, for a task that is about to sleep; return whether any were."""
        return False

    def take_back(self, end: Send | Receive) -> None:
        """Withdraw a call, if it has not ended; its end is told all the same, at once or later."""
        if not end.ended:
            self.engine.withdraw(end)
            self.settle()

    # -- leaving ------------------------------------------------------------------------------------------------------

    def give_up_waiting(self) -> None:
        """Fail every operation that has not met its other end; this side closes."""
        self.engine.close()
        self.settle()

    async def leave(self) -> None:  # noqa: B027 - a wire without connections has nobody to tell
        """Finish the operations that both sides have begun, and say goodbye; ends by itself."""

    def traffic(self) -> Mapping[Hashable, int]:
        """Return how much has moved on each connection, see `until`."""
        return {}

    def note_change(self) -> None:
        """Let a wait of `until` look again."""
        if self._changed is not None:
            self._changed.set()

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait for a condition, as long as something moves."""
        seen: dict[Hashable, int] = {}
        while not done() and self._progresses(seen):
            with trio.move_on_after(_PATIENCE_S):
                while not done():
                    self._changed = trio.Event()
                    await self._changed.wait()
        self._changed = None

    def _progresses(self, seen: dict[Hashable, int]) -> bool:
        """Return whether a connection has moved enough since it was seen, or never was."""
        moved = self.traffic()
        progress = [count - seen.get(one, -self.progress) for one, count in moved.items()]
        seen.update(moved)
        return max(progress, default=0) >= self.progress
