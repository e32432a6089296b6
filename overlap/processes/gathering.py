"""Bytes of any size from every member to member 0, which fetches them piece by piece: as fast as it takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import trio

from ..errors import OverlapError
from .messages import BLOB_LIMIT_BYTES, Brought, Done, Fetch, Message, Offer, Offered, Piece, Pull

#: What may be under way to member 0 at once, and so wait in its memory.
_WINDOW_BYTES = 1 << 20

Take: TypeAlias = Callable[[int, bytes], Awaitable[None]]
"""Takes the next bytes of a member; the next ones are not asked for before it returns."""


class Gathering:
    """One gather, as this member sees it.

    Args:
        name: What it is called.
        turn: How many of that name came before.
        post: Sends a message to the coordinator.
    """

    def __init__(self, name: str, turn: int, post: Callable[[Message], None]) -> None:
        self._name, self._turn, self._post = name, turn, post
        self._offers: dict[int, int] = {}
        self._arrived: deque[bytes] = deque()
        self._wanted_bytes = 0
        self._error: OverlapError | None = None
        self._over = False
        self._news = trio.Event()

    def hear(self, message: Pull | Offered | Brought) -> None:
        """Take in what the coordinator sends."""
        match message:
            case Pull():
                self._wanted_bytes += message.nbytes
            case Offered():
                self._offers[message.member] = message.nbytes
            case Brought():
                self._arrived.append(message.blob)
        self._news.set()

    def end(self, error: OverlapError | None = None) -> None:
        """Take note that it is over, or that it fails."""
        if not self._over:
            self._over, self._error = True, error
            self._news.set()

    async def send(self, mine: bytes, room: Callable[[], Awaitable[None]]) -> None:
        """Send what is asked for, until member 0 has what it wants."""
        if not self._over:
            self._post(Offer(name=self._name, turn=self._turn, nbytes=len(mine)))
        sent_bytes = 0
        while not self._over:
            end = min(self._wanted_bytes, len(mine), sent_bytes + BLOB_LIMIT_BYTES)
            if sent_bytes < end:
                await room()
                self._post(Piece(name=self._name, turn=self._turn, blob=mine[sent_bytes:end]))
                sent_bytes = end
            else:
                await self._wait()
        self._check()

    async def collect(self, mine: bytes, members: int, take: Take) -> None:
        """Fetch from one member after the other, as member 0."""
        try:
            await take(0, mine)
            for member in range(1, members):
                while member not in self._offers:
                    await self._wait()
                for fetched in range(0, self._offers[member], _WINDOW_BYTES):
                    await self._fetch(member, min(_WINDOW_BYTES, self._offers[member] - fetched), take)
        finally:
            self._post(Done(name=self._name, turn=self._turn))

    async def _fetch(self, member: int, nbytes: int, take: Take) -> None:
        self._post(Fetch(member=member, name=self._name, turn=self._turn, nbytes=nbytes))
        while nbytes:
            while not self._arrived:
                await self._wait()
            blob = self._arrived.popleft()
            nbytes -= len(blob)
            await take(member, blob)

    async def _wait(self) -> None:
        """Wait for news, and raise if they are bad."""
        self._check()
        self._news = trio.Event()
        await self._news.wait()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
