"""Where one member finds what others have told it, until somebody reads it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Self, TypeAlias

import trio

from ..errors import OverlapError
from .messages import Body

#: Messages that may wait. A world that hears a hundred in a second has ten minutes to read them.
INBOX_LIMIT = 65536


class InboxFullError(OverlapError):
    """More messages came than anybody read; those after the limit are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A member has gone without a goodbye."""

    member: int  # Which one. If it is member 0, nothing more will be heard of anybody.
    reason: str  # How it went


#: What a member told and who it was, or that one is lost.
News: TypeAlias = tuple[int, Body] | Lost


class Inbox:
    """What has come and was not read, in order; iterate over it in one task."""

    __slots__ = ("_arrived", "_closed", "_dropped", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[News] = deque()
        self._arrived = trio.Event()
        self._closed = False
        self._dropped = 0

    def put(self, news: News) -> None:
        """Add something, unless it is closed or full; losses always find room, there are few."""
        if self._closed:
            return
        if len(self._waiting) >= INBOX_LIMIT and not isinstance(news, Lost):
            self._dropped += 1
        else:
            self._waiting.append(news)
        self._arrived.set()

    def close(self) -> None:
        """Let the iteration end after what is waiting now."""
        self._closed = True
        self._arrived.set()

    def __aiter__(self) -> Self:
        """Return itself."""
        return self

    async def __anext__(self) -> News:
        """Return the next one.

        Raises:
            InboxFullError: Some were dropped; raised once, after those that had room.
        """
        await trio.lowlevel.checkpoint()
        while not self._waiting:
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                raise InboxFullError(f"{dropped} messages were dropped: {INBOX_LIMIT} were waiting to be read")
            if self._closed:
                raise StopAsyncIteration
            self._arrived = trio.Event()
            await self._arrived.wait()
        return self._waiting.popleft()
