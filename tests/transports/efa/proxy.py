"""A proxy inside the test between the first process, which dials, and the second: it damages, cuts, and goes down."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

import trio

from transports.address import PeerAddress
from transports.factory import Exchange

from .processes import World, opened

_PIECE_BYTES = 64 << 10


class Flip:
    """Flips one bit of what goes one way, so many bytes from the moment at which this is laid.

    Attributes:
        done: It has happened.
    """

    def __init__(self, after_bytes: int, bit: int) -> None:
        self._left_bytes, self._bit = after_bytes, bit
        self.done = False

    def work_on(self, data: bytearray) -> None:
        if not self.done and self._left_bytes < len(data):
            data[self._left_bytes] ^= 1 << self._bit
            self.done = True
        self._left_bytes -= len(data)


class Way:
    """One of the ways between the two processes: those of one rail.

    Attributes:
        address: Where it is entered.
        flips: By direction, 0 from the dialler and 1 to it.
        down: Nothing gets through any more; `cut` ends what does.
        mute: So many connections will get through from which nothing is heard at the other end.
        entered: How many connections have got through.
        turned_away: How many have not.
    """

    def __init__(self, listener: trio.SocketListener, beyond: tuple[str, int]) -> None:
        self.address: tuple[str, int] = listener.socket.getsockname()
        self.flips: dict[int, Flip] = {}
        self.down = False
        self.mute = 0
        self.entered = self.turned_away = 0
        self._listener, self._beyond = listener, beyond
        self._scopes: set[trio.CancelScope] = set()
        self._more = trio.Event()

    async def serve(self) -> None:
        await trio.serve_listeners(self._carry, [self._listener])

    async def _carry(self, near: trio.SocketStream) -> None:
        with trio.CancelScope() as scope, suppress(OSError, trio.BrokenResourceError):
            if self.down:
                self.turned_away += 1
                self._more.set()
                await trio.aclose_forcefully(near)
                return
            async with near, await trio.open_tcp_stream(*self._beyond) as far:
                self.entered += 1
                self._scopes.add(scope)
                async with trio.open_nursery() as nursery:
                    if self.mute:
                        self.mute -= 1
                    else:
                        nursery.start_soon(self._one_way, 0, near, far)
                    nursery.start_soon(self._one_way, 1, far, near)
        self._scopes.discard(scope)

    async def _one_way(self, direction: int, source: trio.SocketStream, sink: trio.SocketStream) -> None:
        with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            while data := bytearray(await source.receive_some(_PIECE_BYTES)):
                if direction in self.flips:
                    self.flips[direction].work_on(data)
                await sink.send_all(data)
            await sink.send_eof()

    async def turning_away(self, count: int) -> None:
        """Wait until so many connections have not got through."""
        while self.turned_away < count:
            self._more = trio.Event()
            await self._more.wait()

    async def go_down(self, times: int = 1) -> None:
        """Let nothing through any more, end what does, and wait until so many connections have been turned away."""
        self.down = True
        self.cut()
        await self.turning_away(times)

    def cut(self) -> None:
        """End what goes through, as a cable does that is pulled."""
        for scope in self._scopes:
            scope.cancel()


class ProxiedWorld(World):
    """Two processes, of which the first reaches the second through a proxy.

    Args:
        mute: As of every way.
        settings: As of a world.

    Attributes:
        ways: One for each rail.
    """

    def __init__(self, *, mute: int = 0, **settings: object) -> None:
        super().__init__(unix=False, **settings)
        self._mute = mute
        self.ways: list[Way] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            self.efas[0].exchange = partial(self._proxied, nursery, self.efas[0].exchange)
            async with opened(self.efas):
                yield
            nursery.cancel_scope.cancel()

    async def _proxied(self, nursery: trio.Nursery, exchange: Exchange, name: str, mine: bytes) -> Sequence[bytes]:
        own, other = await exchange(name, mine)
        address = PeerAddress.unpack(other, 1)
        for beyond in address.tcp:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            self.ways.append(Way(listener, beyond))
            self.ways[-1].mute = self._mute
            nursery.start_soon(self.ways[-1].serve)
        return [own, replace(address, tcp=tuple(way.address[:2] for way in self.ways)).pack()]
