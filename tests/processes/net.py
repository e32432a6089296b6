"""A network in memory that Trio's sockets are made of: late, in pieces, cut, silent, as a seed decides."""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any

import trio

Address = tuple[str, int]

# What a socket takes before it makes the sender wait.
BUFFER_BYTES = 256 << 10
# How long a system tries to reach a host that does not answer; `overlap.processes.sockets` asks for about that.
UNANSWERED_S = 5.0


@dataclass(eq=False)
class Process:
    """Whose sockets they are.

    Attributes:
        name: For the log.
        dead: It was killed: whatever it still says goes nowhere.
        silent: Nothing reaches it or leaves it.
    """

    name: str
    dead: bool = False
    silent: bool = False
    sockets: list[FakeSocket] = field(default_factory=list)


PROCESS: ContextVar[Process] = ContextVar("process")
"""The one that the running task belongs to: tasks inherit it from who starts them."""


@dataclass(eq=False)
class Pipe:
    """One direction of a connection."""

    net: Net
    sender: Process
    receiver: Process
    pieces: deque[tuple[float, bytes]] = field(default_factory=deque)
    waiting_bytes: int = 0
    last_s: float = 0.0
    ended: bool = False  # no more will be sent
    broken: int = 0  # an errno
    news: trio.Event = field(default_factory=trio.Event)

    def tell(self) -> None:
        self.news.set()
        self.news = trio.Event()

    @property
    def stopped(self) -> bool:
        return self.sender.silent or self.receiver.silent

    def put(self, data: bytes) -> None:
        """Let bytes arrive after those before them."""
        self.last_s = max(self.last_s, trio.current_time() + self.net.latency_s())
        self.pieces.append((self.last_s, data))
        self.waiting_bytes += len(data)
        self.tell()

    @property
    def due_s(self) -> float:
        """When the next bytes, or the end, can be read."""
        if self.stopped:
            return inf
        if self.pieces:
            return self.pieces[0][0]
        return -inf if self.ended else inf

    def get_now(self, most_bytes: int) -> bytes | None:
        """Return what has arrived, b"" at the end; None if nothing has."""
        if self.due_s <= trio.current_time():
            return self._taken(most_bytes) if self.pieces else b""
        if self.broken:
            raise OSError(self.broken, os.strerror(self.broken))
        return None

    @property
    def full(self) -> bool:
        return self.waiting_bytes >= BUFFER_BYTES

    def put_now(self, data: bytes) -> int:
        """Take some bytes; 0 if there is no room."""
        if self.broken:
            raise OSError(self.broken, os.strerror(self.broken))
        if self.sender.dead or self.full:
            return 0
        count = self.net.bite(len(data))
        self.put(data[:count])
        return count

    async def readable(self) -> None:
        """Wait until `get_now` gives something, or this end is closed, or news that may be that."""
        if self.due_s > trio.current_time() and not self.broken:
            with trio.move_on_at(self.due_s):
                await self.news.wait()

    def _taken(self, most_bytes: int) -> bytes:
        _, data = self.pieces.popleft()
        count = min(most_bytes, self.net.bite(len(data)))
        if count < len(data):
            self.pieces.appendleft((0.0, data[count:]))
        self.waiting_bytes -= count
        self.tell()
        return data[:count]


class FakeSocket(trio.socket.SocketType):
    """A stream socket of the network."""

    def __init__(self, net: Net, owner: Process) -> None:
        self.net, self.owner = net, owner
        self.closed = False
        self.here: Address = ("0.0.0.0", 0)
        self.there: Address | None = None
        self.out: Pipe | None = None
        self.into: Pipe | None = None
        self.backlog: deque[FakeSocket] | None = None
        self.knocked = trio.Event()
        self.is_rail = False
        owner.sockets.append(self)

    # -- what trio asks of any socket --------------------------------------------------------------------------------

    family = socket.AF_INET  # type: ignore[assignment]
    type = socket.SOCK_STREAM  # type: ignore[assignment]
    proto = 0  # type: ignore[assignment]

    @property
    def did_shutdown_SHUT_WR(self) -> bool:
        return self.out is not None and self.out.ended

    def fileno(self) -> int:
        return -1 if self.closed else 1000

    def getsockopt(self, level: int, optname: int, buflen: int | None = None) -> Any:
        if buflen is not None:
            raise OSError(errno.ENOPROTOOPT, "nothing is known of what carries the bytes")
        return int(self.backlog is not None)

    def setsockopt(self, *args: Any) -> None: ...

    def getsockname(self) -> Address:
        return self.here

    def getpeername(self) -> Address:
        if self.there is None:
            raise OSError(errno.ENOTCONN, "not connected")
        return self.there

    def __repr__(self) -> str:
        return f"<{self.here} of {self.owner.name} to {self.there}>"

    # -- listening ---------------------------------------------------------------------------------------------------

    async def bind(self, address: Any) -> None:
        await trio.lowlevel.checkpoint()
        host, port = address
        self.here = host, port or self.net.free_port()
        if self.here in self.net.listening:
            raise OSError(errno.EADDRINUSE, "taken")

    def listen(self, backlog: int = 128) -> None:
        self.backlog = deque()
        self.net.listening[self.here] = self

    async def accept(self) -> tuple[Any, Any]:
        assert self.backlog is not None
        await trio.lowlevel.checkpoint()
        while not self.backlog:
            self._check_open()
            self.knocked = trio.Event()
            await self.knocked.wait()
        found = self.backlog.popleft()
        found.owner = self.owner
        return found, found.there

    # -- connecting --------------------------------------------------------------------------------------------------

    async def connect(self, address: Any) -> None:
        await trio.sleep(self.net.latency_s())
        self._check_open()
        listener = self.net.listening.get(tuple(address))
        if listener is None or listener.owner.dead:
            raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        if listener.owner.silent or self.owner.silent:
            await trio.sleep(UNANSWERED_S)
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        self.net.join(self, listener)

    # -- bytes -------------------------------------------------------------------------------------------------------

    async def send(self, data: Any, flags: int = 0) -> int:
        await trio.lowlevel.checkpoint()
        assert self.out is not None
        self._check_open()
        while not (count := self.out.put_now(bytes(data))):
            await self.out.news.wait()
            self._check_open()
        return count

    async def recv(self, buflen: int, flags: int = 0) -> bytes:
        await trio.lowlevel.checkpoint()
        assert self.into is not None
        self._check_open()
        while (data := self.into.get_now(buflen)) is None:
            await self.into.readable()
            self._check_open()
        return data

    def shutdown(self, how: int) -> None:
        self._check_open()
        assert self.out is not None
        self.out.ended = True
        self.out.tell()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self.backlog is not None:
            self.net.listening.pop(self.here, None)
            self.knocked.set()
            for each in self.backlog:  # that nobody has accepted
                each.reset()
                each.close()
        if self.out is not None and self.into is not None and not self.owner.silent:
            unread = bool(self.into.pieces)  # a system answers that with a reset, which overtakes what was sent
            self.out.ended = True
            if unread:
                self.out.pieces.clear()
                self.out.broken = errno.ECONNRESET
            self.into.broken = self.into.broken or errno.EPIPE
        for pipe in (self.out, self.into):
            if pipe is not None:
                pipe.tell()

    def _check_open(self) -> None:
        if self.closed:
            raise trio.ClosedResourceError

    def reset(self, number: int = errno.ECONNRESET) -> None:
        """Break the connection, in both directions."""
        for pipe in (self.out, self.into):
            if pipe is not None:
                pipe.pieces.clear()
                pipe.broken = number
                pipe.tell()


class Net(trio.abc.SocketFactory, trio.abc.HostnameResolver):
    """The network of one run.

    Args:
        chance: Decides everything.
        slowest_s: What a piece of data may take at most.
        pieces: Whether data is cut anywhere.
    """

    def __init__(self, chance: Random, *, slowest_s: float = 0.01, pieces: bool = True) -> None:
        self.listening: dict[Address, FakeSocket] = {}
        self._chance, self._slowest_s, self._pieces = chance, slowest_s, pieces
        self._ports = 40_000

    def latency_s(self) -> float:
        return self._chance.uniform(0, self._slowest_s)

    def bite(self, nbytes: int) -> int:
        if not self._pieces or nbytes < 2 or self._chance.random() < 0.7:
            return nbytes
        return self._chance.randint(1, nbytes)

    def free_port(self) -> int:
        self._ports += 1
        return self._ports

    def join(self, dialler: FakeSocket, listener: FakeSocket) -> None:
        accepted = FakeSocket(self, listener.owner)
        accepted.is_rail = dialler.is_rail
        dialler.here = "10.0.0.2", self.free_port()
        dialler.there = accepted.here = listener.here
        accepted.there = dialler.here
        dialler.out = accepted.into = Pipe(self, dialler.owner, listener.owner)
        dialler.into = accepted.out = Pipe(self, listener.owner, dialler.owner)
        assert listener.backlog is not None
        listener.backlog.append(accepted)
        listener.knocked.set()

    # -- what happens to processes -----------------------------------------------------------------------------------

    def kill(self, process: Process) -> None:
        """End a process: its sockets are closed by the system."""
        process.dead = True
        for each in process.sockets:
            with suppress(trio.ClosedResourceError):
                each.close()

    def cut(self, process: Process, share: float = 1.0) -> None:
        """Break the connections that a process has, or some of them."""
        for each in process.sockets:
            if not each.closed and each.out is not None and self._chance.random() < share:
                each.reset()

    async def silence(self, process: Process, for_s: float) -> None:
        """Let nothing reach a process or leave it; systems give up connections that are not answered."""
        process.silent = True
        with trio.move_on_after(min(for_s, UNANSWERED_S)):
            await trio.sleep_forever()
        if for_s > UNANSWERED_S:
            self.cut(process)
            await trio.sleep(for_s - UNANSWERED_S)
        process.silent = False
        for each in process.sockets:
            for pipe in (each.out, each.into):
                if pipe is not None:
                    pipe.tell()

    # -- what trio asks ----------------------------------------------------------------------------------------------

    def socket(self, family: Any = 0, type: Any = 0, proto: Any = 0) -> Any:
        return FakeSocket(self, PROCESS.get())

    async def getaddrinfo(self, host: Any, port: Any, *_: Any, **__: Any) -> Any:
        await trio.lowlevel.checkpoint()
        name = host.decode() if isinstance(host, bytes) else host
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (name, int(port)))]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> Any:
        await trio.lowlevel.checkpoint()
        return sockaddr
