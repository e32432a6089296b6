"""A transport in one file: a bare TCP connection between every two processes. What a stranger's package would hold."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Self

import trio

from transports.factory import Bootstrap
from transports.frame import CHUNK_BYTES, EAGER_BYTES, Frame, pack, parse
from transports.handshake import greet, welcome
from transports.identity import Hello
from transports.matched import MatchedLink, MatchedTransport
from transports.matching import Limits, MessageKind, ProtocolError

LIMITS = Limits(eager_bytes=EAGER_BYTES, chunk_bytes=CHUNK_BYTES)


class PlainLink(MatchedLink):
    """One other process: the engine says what travels, this moves it."""

    stream: trio.SocketStream

    def flush(self) -> None:
        self.due.set()

    async def write(self) -> None:
        self.due = trio.Event()
        with suppress(trio.BrokenResourceError):  # the reader sees that, too
            await self.write_all()

    async def write_all(self) -> None:
        while True:
            if (message := self.engine.outgoing.next_message()) is not None:
                kind, fields, payload = message
                body = bytes(payload or b"")
                await self.stream.send_all(pack(kind, *fields, payload_bytes=len(body)) + body)
            elif (chunk := self.engine.outgoing.next_chunk()) is not None:
                piece = chunk.view
                head = pack(MessageKind.CHUNK, chunk.send.number, chunk.offset, payload_bytes=chunk.nbytes)
                await self.stream.send_all(head)
                await self.stream.send_all(piece)
            elif self.closing and self.engine.quiet:
                await self.stream.send_eof()
                return
            else:
                await self.due.wait()
                self.due = trio.Event()

    async def read(self) -> None:
        try:
            await self.read_all()
            reason = "has left"
        except (ProtocolError, trio.BrokenResourceError) as error:
            reason = f"is lost: {error}"
        self.engine.end(f"{self.name} {reason}", keep_arrived=True)

    async def read_all(self) -> None:
        buffer = bytearray()
        while data := await self.stream.receive_some():
            buffer += data
            while (frame := parse(buffer, 0, len(buffer))) is not None and frame[2] + frame[3] <= len(buffer):
                self.hear(frame, buffer)
                del buffer[: frame[2] + frame[3]]
            self.flush()

    def hear(self, frame: Frame, buffer: bytearray) -> None:
        kind, fields, start, nbytes, _ = frame
        payload = memoryview(bytes(buffer[start : start + nbytes]))
        if kind == MessageKind.EAGER:
            self.engine.incoming.handle_eager(fields, payload)
        elif kind == MessageKind.CHUNK:
            number, offset = fields
            self.engine.incoming.chunk_memory(number, offset, nbytes)[:] = payload
            self.engine.incoming.count_chunk(number, offset, nbytes)
        else:
            self.engine.handle(kind, [*fields, bytes(payload)] if nbytes else fields)

    due = trio.Event()
    closing = False


class PlainTcp(MatchedTransport):
    """Joins processes by connections that prove the secret, encrypt nothing, and survive nothing."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        super().__init__(bootstrap.member, bootstrap.placement)
        self.bootstrap = bootstrap
        self.links = self.make_links(lambda i, ranks: PlainLink(i, ranks, self.ranks, LIMITS, self.memory))

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        await self.connect()
        self.state = None
        async with trio.open_nursery() as nursery:
            for link in self.links.values():
                nursery.start_soon(link.write)
                nursery.start_soon(link.read)
            try:
                yield self
            finally:  # what both ends have begun is finished, and the others see us leave
                nursery.cancel_scope.shield = True
                nursery.cancel_scope.deadline = trio.current_time() + 2.0
                await self.aclose()
        for link in self.links.values():
            await trio.aclose_forcefully(link.stream)

    async def aclose(self) -> None:
        self.state = "has been closed"
        for link in self.links.values():
            link.closing = True
            link.engine.close()
            link.flush()
        await trio.lowlevel.cancel_shielded_checkpoint()

    async def connect(self) -> None:
        """Listen, tell the others where, dial those above, and wait for those below."""
        (listener,) = await trio.open_tcp_listeners(0, host=self.bootstrap.host)
        async with listener:
            mine = f"{self.bootstrap.host} {listener.socket.getsockname()[1]}"
            everybody = await self.bootstrap.exchange("plain tcp", mine.encode())
            for member, address in enumerate(everybody[self.member + 1 :], self.member + 1):
                host, port = address.decode().split()
                self.links[member].stream = stream = await trio.open_tcp_stream(host, int(port))
                await greet(stream, self.hello(), self.bootstrap.secret)
            for _ in range(self.member):
                stream = await listener.accept()
                said = await welcome(stream, self.bootstrap.secret, lambda hello: self.hello())
                self.links[said.member].stream = stream

    def hello(self) -> Hello:
        job, epoch, members = self.bootstrap.job, self.bootstrap.epoch, len(self.placement)
        return Hello(role="plain tcp", job=job, epoch=epoch, member=self.member, members=members)


make = PlainTcp
