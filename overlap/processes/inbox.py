"""Messages that wait for a task of the program: notices and losses in an inbox, and answers to one request."""

from __future__ import annotations

from collections import deque
from typing import Self, TypeAlias

import trio

from ..errors import OverlapError
from .messages import Contributions, MemberLost, MemberNotice

#: Messages that may wait. At a hundred messages in a second, the program has ten minutes to read them.
INBOX_LIMIT = 65536

#: A notice of another member, or the loss of one.
News: TypeAlias = MemberNotice | MemberLost


class MemberLostError(OverlapError):
    """An exchange or barrier cannot end, because a member is lost or has left.

    Attributes:
        member: The lost member.
        how: The end of a sentence about it: that it is lost, and why, or has left.
    """

    member: int
    how: str

    def __init__(self, *, member: int, how: str, doing: str) -> None:
        self.member, self.how = member, how
        super().__init__(f"{doing}: process {member} {how}")


class InboxFullError(OverlapError):
    """Messages were dropped because the program did not read them in time."""


class PendingAnswer:
    """Answer to one request, in one or more messages, for which one task waits."""

    def __init__(self, doing: str) -> None:
        self.doing = doing
        self._arrived: deque[Contributions] = deque()
        self._error: OverlapError | None = None
        self._news = trio.Event()

    def put(self, message: Contributions) -> None:
        """Add a message."""
        self._arrived.append(message)
        self._news.set()

    def fail(self, error: OverlapError) -> None:
        """Raise an error from the next wait, unless there is one already."""
        self._error = self._error or error
        self._news.set()

    async def next(self) -> Contributions:
        """Return the next message."""
        while not self._arrived:
            if self._error is not None:
                raise self._error
            self._news = trio.Event()
            await self._news.wait()
        return self._arrived.popleft()


class Inbox:
    """Notices and losses in the order of arrival; iterate over it in one task."""

    def __init__(self) -> None:
        self._waiting: deque[News] = deque()
        self._arrived = trio.Event()
        self._closed = False
        self._dropped = 0

    def put(self, news: News) -> None:
        """Add a message, or drop a notice if the inbox is full; losses are few, and always fit."""
        if len(self._waiting) >= INBOX_LIMIT and isinstance(news, MemberNotice):
            self._dropped += 1
        else:
            self._waiting.append(news)
        self._arrived.set()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def close(self) -> None:
        """End the iteration after the messages that wait now."""
        self._closed = True
        self._arrived.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> News:
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
