"""The door of a process: sockets that listen for the others, at first and whenever one of them is to come again."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import trio

from transports.failures import TransportError


class Door:
    """Where the others can knock.

    Args:
        addresses: Local address of each rail.
        unix: Whether there is a Unix socket, too.
        pending: How many connections may be on their way in at once.
        stays: Whether it may be opened again: its ports are kept while nobody listens.

    Attributes:
        addresses: As passed.
        ports: One for each address; 0 before it was first opened.
        unix: Name of the Unix socket; empty if there is none.
    """

    def __init__(self, addresses: Sequence[str], *, unix: bool, pending: int, stays: bool) -> None:
        self.addresses = tuple(addresses)
        self.ports: tuple[int, ...] = (0,) * len(self.addresses)
        self.unix = f"overlap-{secrets.token_hex(16)}" if unix else ""
        self._pending, self._stays = pending, stays
        self._kept: list[socket.socket] = []  # by which the ports stay this process's own while nobody listens

    def close(self) -> None:
        """Give the ports back."""
        for kept in self._kept:
            kept.close()
        self._kept.clear()

    def open(self) -> list[socket.socket]:
        """Listen, at first or once more, where the others know this process to be.

        Raises:
            TransportError: That cannot be.
        """
        listeners: list[socket.socket] = []
        first = not self._kept
        try:
            for address, port in zip(self.addresses, self.ports, strict=True):
                listeners.append(_bound(address, port))
            if self.unix:
                listeners.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                # an abstract name: it needs no file, so nothing is left whatever ends this process
                listeners[-1].bind("\0" + self.unix)
            self.ports = tuple(listener.getsockname()[1] for listener in listeners[: len(self.addresses)])
            if first and self._stays:
                self._kept += map(_bound, self.addresses, self.ports)
            for listener in listeners:
                listener.setblocking(False)
                listener.listen(self._pending)
        except OSError as error:
            for listener in listeners:
                listener.close()
            if first:
                self.close()
            raise TransportError(f"cannot listen at {', '.join(self.addresses)}: {error.strerror}") from error
        return listeners

    async def serve(
        self, listeners: Sequence[socket.socket], take: Callable[[socket.socket], Awaitable[object]]
    ) -> None:
        """Let a task of its own take every connection that comes."""
        # bounds what strangers can make this process do at once; members that come meanwhile wait in the system's queue
        pending = trio.CapacityLimiter(self._pending)

        async def take_one(connection: socket.socket, token: object) -> None:
            try:
                await take(connection)
            finally:
                pending.release_on_behalf_of(token)

        async def accept(listener: socket.socket) -> None:
            while True:
                await pending.acquire_on_behalf_of(token := object())
                try:
                    connection = await _accepted(listener)
                except BaseException:
                    pending.release_on_behalf_of(token)
                    raise
                nursery.start_soon(take_one, connection, token)

        async with trio.open_nursery() as nursery:
            for listener in listeners:
                nursery.start_soon(accept, listener)


async def _accepted(listener: socket.socket) -> socket.socket:
    while True:
        await trio.lowlevel.wait_readable(listener)
        with suppress(BlockingIOError, ConnectionAbortedError):  # who knocked has left again
            return listener.accept()[0]


def _bound(address: str, port: int) -> socket.socket:
    """Return a socket of a port, which others may share as long as none of them listens."""
    made = socket.socket(family(address), socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, port))
    except BaseException:
        made.close()
        raise
    return made


def family(address: str) -> socket.AddressFamily:
    """Return the family of an IP address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
