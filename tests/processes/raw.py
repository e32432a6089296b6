"""The sockets of the system, as rails use them, made of the simulated network."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trio

from overlap.processes import sockets
from transports import meeting
from transports.efa import joining

from .net import PROCESS, FakeSocket, Net


class RawSocket:
    """A non-blocking socket, or one that listens."""

    net: Net  # of the run

    def __init__(self, family: int = socket.AF_INET, kind: int = 0, *, inner: FakeSocket | None = None) -> None:
        self.family = socket.AF_INET
        self.inner = inner or FakeSocket(self.net, PROCESS.get())
        self.inner.is_rail = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def setblocking(self, blocking: bool) -> None: ...

    def setsockopt(self, *args: Any) -> None: ...

    def bind(self, address: tuple[str, int]) -> None:
        host, port = address
        self.inner.here = host, port or self.inner.net.free_port()

    def accept(self) -> tuple[RawSocket, Any]:
        if not self.inner.backlog:
            raise BlockingIOError
        found = self.inner.backlog.popleft()
        return RawSocket(inner=found), found.there

    def send(self, data: Any) -> int:
        self._check_open()
        assert self.inner.out is not None
        count = self.inner.out.put_now(bytes(data))
        if not count:
            raise BlockingIOError
        return count

    def sendmsg(self, parts: Any) -> int:
        return self.send(b"".join(parts))

    def recv_into(self, view: memoryview) -> int:
        self._check_open()
        assert self.inner.into is not None
        data = self.inner.into.get_now(view.nbytes)
        if data is None:
            raise BlockingIOError
        view[: len(data)] = data
        return len(data)

    def _check_open(self) -> None:
        if self.inner.closed:
            raise OSError(9, "closed")

    async def readable(self) -> None:
        await trio.lowlevel.checkpoint()
        inner = self.inner
        if inner.backlog is not None:
            while not inner.backlog and not inner.closed:
                inner.knocked = trio.Event()
                await inner.knocked.wait()
        else:
            assert inner.into is not None
            while not inner.closed and not inner.into.broken and inner.into.due_s > trio.current_time():
                await inner.into.readable()
        if inner.closed:
            raise trio.ClosedResourceError

    async def writable(self) -> None:
        await trio.lowlevel.checkpoint()
        pipe = self.inner.out
        assert pipe is not None
        while not self.inner.closed and not pipe.broken and (pipe.full or pipe.sender.dead):
            await pipe.news.wait()
        if self.inner.closed:
            raise trio.ClosedResourceError


class _Module:
    """The module `socket`, but for what it makes."""

    socket = RawSocket

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)

    @staticmethod
    def create_server(address: tuple[str, int], *, family: int, backlog: int) -> RawSocket:
        server = RawSocket(family)
        server.inner.is_rail = False
        server.bind(address)
        if server.inner.here in server.net.listening:
            raise OSError(errno.EADDRINUSE, "taken")
        server.inner.listen(backlog)
        return server


@contextmanager
def raw_sockets(net: Net) -> Iterator[None]:
    """Let rails find the simulated network when they ask for sockets of the system."""
    readable, writable, closing = trio.lowlevel.wait_readable, trio.lowlevel.wait_writable, trio.lowlevel.notify_closing
    wrapped = trio.socket.from_stdlib_socket

    async def wait_readable(it: Any) -> None:
        await (it.readable() if isinstance(it, RawSocket) else readable(it))

    async def wait_writable(it: Any) -> None:
        await (it.writable() if isinstance(it, RawSocket) else writable(it))

    def notify_closing(it: Any) -> None:
        if not isinstance(it, RawSocket):
            closing(it)

    def from_stdlib_socket(it: Any) -> Any:
        return it.inner if isinstance(it, RawSocket) else wrapped(it)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RawSocket, "net", net, raising=False)
        for module in (meeting, joining, sockets):
            patched.setattr(module, "socket", _Module())
        patched.setattr(trio.lowlevel, "wait_readable", wait_readable)
        patched.setattr(trio.lowlevel, "wait_writable", wait_writable)
        patched.setattr(trio.lowlevel, "notify_closing", notify_closing)
        patched.setattr(trio.socket, "from_stdlib_socket", from_stdlib_socket)
        yield
