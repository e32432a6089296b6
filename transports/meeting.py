"""Meetings of processes: doors that listen, dialling, and the proof of membership on both sides of a connection.

Of each pair of processes the lower member dials, and the higher one listens. `Meeting` is the part that sockets, shared
memory and connections that come back have in common; a transport adds the connections that it needs.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Generic, TypeAlias, TypeVar

import trio

from transports.failures import ArgumentError, LinkLostError, TransportError
from transports.handshake import greet, welcome
from transports.identity import Hello, Identity

Found = TypeVar("Found")
Place: TypeAlias = "tuple[int, int]"  # (member, index): one of the connections to another process
Stream: TypeAlias = "trio.SocketStream | trio.SSLStream[trio.abc.Stream]"


class Meeting(Generic[Found]):
    """The meeting of one process with others of its world.

    Args:
        mine: This process.
        role: The purpose of the connections.
        join_s: How long to wait for all processes.

    Attributes:
        mine: As passed.
        door: Listens for the others.
        found: The result of the meeting at each place.
        refused: Why connections were refused.

    Raises:
        ArgumentError: The secret is empty, or a file of the certificates is wrong.
    """

    mine: Identity
    join_s: float

    def __init__(self, mine: Identity, role: str, *, join_s: float) -> None:
        if not mine.secret:
            raise ArgumentError("the secret is empty; without one anybody is a member")
        if mine.tls is not None:
            mine.tls.check()
        self.mine, self.join_s = mine, join_s
        self.door: Door = Door((), unix=False, pending=0, stays=False)
        self.found: dict[Place, Found] = {}
        self.refused: list[str] = []
        self._role = role
        self._wanted: frozenset[Place] = frozenset()
        self._reserved: set[Place] = set()
        self._complete = trio.Event()
        self._failure: TransportError | None = None

    async def gather(
        self,
        wanted: Iterable[Place],
        listeners: Sequence[socket.socket],
        dial: Callable[[int, int], Awaitable[Found]],
        serve: Callable[[socket.socket], Awaitable[object]],
    ) -> frozenset[Place]:
        """Meet the others, and return the places that are still missing after `join_s`.

        Args:
            wanted: One place for each connection.
            listeners: Sockets of the door.
            dial: Connects to a member that listens, given its place.
            serve: Takes a connection of a member that dials, and calls `settle`.

        Raises:
            TransportError: A connection failed, or a process is lost.
        """
        self._wanted = frozenset(wanted)
        if self._wanted:
            with trio.move_on_after(self.join_s):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.door.serve, listeners, serve)
                    for place in self._wanted:
                        if place[0] > self.mine.member:
                            nursery.start_soon(self._dial, dial, place)
                    await self._complete.wait()
                    nursery.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure
        return self._wanted - self.found.keys()

    async def _dial(self, dial: Callable[[int, int], Awaitable[Found]], place: Place) -> None:
        try:
            self.settle(place, await dial(*place))
        except TransportError as error:
            self.fail(error)

    def settle(self, place: Place, found: Found) -> None:
        """Note the result at a place; the meeting ends with the last one."""
        self.found[place] = found
        if self._wanted <= self.found.keys():
            self._complete.set()

    def fail(self, error: TransportError) -> None:
        """End the meeting with an error, the first of which counts."""
        self._failure = self._failure or error
        self._complete.set()

    def lose(self, member: int, reason: str) -> None:
        """Fail because a process will not come."""
        self.fail(LinkLostError(f"process {member} is lost: {reason}"))

    # -- connections --------------------------------------------------------------------------------------------------

    def hello(self, detail: str = "") -> Hello:
        """Return the introduction of this process on a connection."""
        return self.mine.hello(self._role, detail)

    async def greet(
        self, connection: socket.socket, member: int, where: object, detail: str = "", *, deadline_s: float
    ) -> tuple[Stream, Hello]:
        """Connect a socket with another process that listens; return its stream and the answer.

        Args:
            connection: The socket. The caller keeps it, and closes it if this raises.
            member: The other process.
            where: Its address.
            detail: Which connection this is to be.
            deadline_s: For the handshake.

        Raises:
            HandshakeError: The other process refused.
            LinkLostError: It cannot be reached.
        """
        try:
            await trio.socket.from_stdlib_socket(connection).connect(where)
            stream = self._stream(connection, serving=False)
            return stream, await greet(stream, self.hello(detail), self.mine.secret, deadline_s=deadline_s)
        except OSError as error:
            raise LinkLostError(f"process {member} cannot be reached: {error.strerror}") from error

    async def welcome(
        self, connection: socket.socket, judge: Callable[[Hello], Hello | str], *, deadline_s: float
    ) -> Stream:
        """Shake hands with a process that has dialled this one; arguments and errors as of `handshake.welcome`."""
        stream = self._stream(connection, serving=True)
        await welcome(stream, self.mine.secret, judge, deadline_s=deadline_s)
        return stream

    def _stream(self, connection: socket.socket, *, serving: bool) -> Stream:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
        return stream if self.mine.tls is None else self.mine.tls.wrap(stream, serving=serving)

    def stranger(self, hello: Hello) -> str:
        """Return why a process is no member of this world; empty if it is one."""
        return self.mine.refusal(hello, self._role)

    def unexpected(self, hello: Hello) -> str:
        """Return the refusal of a member that has no reason to dial this process."""
        which = f", {hello.role} {hello.detail!r}" if hello.detail else ""
        return f"process {hello.member}{which} is not expected to call process {self.mine.member}"

    def admit(self, hello: Hello, index: int) -> Hello | str:
        """Reserve a place for a member that dials; return the answer, or why it is refused."""
        place = hello.member, index
        if reason := self.stranger(hello):
            return reason
        if place not in self._wanted or hello.member >= self.mine.member:
            return self.unexpected(hello)
        if place in self._reserved:
            return f"{hello.role} {hello.detail} of process {hello.member} has already joined"
        self._reserved.add(place)
        return self.hello(hello.detail)

    def release(self, place: Place) -> None:
        """Free a reserved place: its connection came to nothing."""
        self._reserved.discard(place)


class Door:
    """The sockets of a process that listen for the others, at first and whenever one of them is to come again.

    Args:
        addresses: Local address of each rail.
        unix: Whether there is a Unix socket, too.
        pending: How many connections may be on their way in at once.
        stays: Whether it may be opened again: its ports are kept while nothing listens.

    Attributes:
        addresses: As passed.
        ports: One for each address; 0 before it was first opened.
        unix: Name of the Unix socket; empty if there is none.
    """

    def __init__(self, addresses: Sequence[str], *, unix: bool, pending: int, stays: bool) -> None:
        self.addresses: tuple[str, ...] = tuple(addresses)
        self.ports: tuple[int, ...] = (0,) * len(self.addresses)
        self.unix: str = f"overlap-{secrets.token_hex(16)}" if unix else ""
        self._pending, self._stays = pending, stays
        self._kept: list[socket.socket] = []  # bound sockets that keep the ports while nothing listens

    def close(self) -> None:
        """Give the ports back."""
        for kept in self._kept:
            kept.close()
        self._kept.clear()

    def open(self) -> list[socket.socket]:
        """Listen at the addresses that the others know, at first or once more.

        Raises:
            TransportError: A port cannot be had.
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
        """Take every connection in a task of its own."""
        # bounds the work of strangers at once; members that come meanwhile wait in the system's queue
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
        with suppress(BlockingIOError, ConnectionAbortedError):  # the dialler has left again
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
