"""A membership that lives in a loop of its own, used from that of the ranks.

So signs of life, the messages of others, and what is told from other threads go on whatever keeps the ranks' loop busy.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import TypeAlias

import trio

from ..errors import UsageError, in_one_line
from ..notice import notify
from .clock import ClockOffset
from .frames import check_body
from .gathering import Take
from .inbox import Inbox, Lost, News
from .member import Membership
from .messages import Body, MessageError
from .own_loop import OwnLoop, call_in


class ThreadedMembership:
    """Does what `Membership` does, and raises what that raises.

    Attributes:
        member: Index of this process.
        members: How many there are.
        on_loss: Called with each loss of a member at once, before it is read among the messages; or None.
    """

    def __init__(self, loop: OwnLoop, there: Membership) -> None:
        self.member, self.members = there.member, there.members
        self._loop, self._there = loop, there
        self._inbox = Inbox()
        self.on_loss: Callable[[Lost], object] | None = None

    def say_when_asked(self, glimpse: Callable[[int], bytes]) -> None:
        """Let a function say what the ranks of this process do, for those who look on; it is called in that loop."""
        self._there.glimpse = glimpse

    @property
    def clock(self) -> ClockOffset:
        """How far this process's ``time.perf_counter_ns`` is from member 0's, as well as is known now."""
        return self._there.clock

    async def exchange(self, name: str, mine: bytes) -> list[bytes]:
        """Give `mine` to all members, and return what each of them gave, in member order."""
        return await self._loop.call(self._there.exchange, name, mine)

    async def barrier(self, name: str) -> None:
        """Return when all members have come to the barrier of this name."""
        await self._loop.call(self._there.barrier, name)

    async def gather(self, name: str, mine: bytes, take: Take) -> None:
        """Bring bytes of any size to member 0, a piece at a time; there `take` is called in this loop."""
        async with trio.open_nursery() as nursery:
            failure = await self._gathered(name, mine, take, nursery)
        if failure is not None:
            raise failure

    async def _gathered(self, name: str, mine: bytes, take: Take, nursery: trio.Nursery) -> Exception | None:
        async def take_here(member: int, blob: bytes) -> None:
            await call_in(self._loop.home, nursery, take, member, blob)

        try:
            await self._loop.call(self._there.gather, name, mine, take_here)
        except Exception as error:  # raised where no nursery wraps it
            return error
        return None

    def tell(self, message: Mapping[str, object]) -> None:
        """Let all other members know something; any thread. Returns at once.

        That too much waits to be sent is told to the user: who told it is busy with something else by then.
        """
        body = dict(message)
        try:
            check_body(body)
        except MessageError as error:
            raise UsageError(f"message: {error}") from error
        self._loop.call_soon(self._tell, body)

    def messages(self) -> AsyncIterator[News]:
        """Iterate over what others tell, and each loss of a member; for one task."""
        return self._inbox

    async def leave(self) -> None:
        """Say goodbye: the others do not take the end of this process for a loss."""
        await self._loop.call(self._there.leave)

    async def forward(self) -> None:
        """Pass on what comes; a task of the membership's loop, for as long as that lasts."""
        home = self._loop.home
        async for news in self._there.messages():
            home.run_sync_soon(self._take, news)
        home.run_sync_soon(self._inbox.close)

    def _take(self, news: News) -> None:
        if self.on_loss is not None and isinstance(news, Lost):
            self.on_loss(news)
        self._inbox.put(news)

    def _tell(self, body: Body) -> None:
        try:
            self._there.tell(body)
        except Exception as error:
            notify(f"the other processes cannot be told of '{body.get('what')}': {in_one_line(error)}")


AnyMembership: TypeAlias = Membership | ThreadedMembership
