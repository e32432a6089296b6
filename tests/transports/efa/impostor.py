"""A process that knows the secret and speaks as it pleases: raw frames to a real Efa."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from transports import Efa
from transports.address import PeerAddress
from transports.frame import Frame, pack, parse
from transports.handshake import greet
from transports.identity import Hello
from transports.matching import MessageKind

from .processes import SECRET, Table


class Impostor:
    """Rank 0 in process 0, at the bare end of a connection to an Efa with ranks 1 and 2."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._got = bytearray()

    async def say(self, kind: int, *fields: int, payload: bytes = b"") -> None:
        await self.stream.send_all(pack(kind, *fields, payload_bytes=len(payload)) + payload)

    async def hear(self) -> tuple[int, list[int], bytes]:
        """Return the next frame that is no sign of life."""
        while (frame := self._next()) is None or frame[0] == MessageKind.ALIVE:
            if frame is None:
                more = await self.stream.receive_some()
                if not more:
                    raise EOFError
                self._got += more
        return frame

    def _next(self) -> tuple[int, list[int], bytes] | None:
        frame: Frame | None = parse(self._got, 0, len(self._got))
        if frame is None or frame[2] + frame[3] > len(self._got):
            return None
        kind, fields, at, nbytes, _ = frame
        payload = bytes(self._got[at : at + nbytes])
        del self._got[: at + nbytes]
        return kind, fields, payload

    async def is_hung_up_on(self) -> bool:
        """Read until the other side closes."""
        try:
            while await self.stream.receive_some():
                pass
        except trio.BrokenResourceError:
            pass
        return True


def hello(**other: object) -> Hello:
    said: dict[str, object] = {"role": "rail", "job": "", "epoch": 0, "member": 0, "members": 2, "detail": "0"}
    return Hello(**{**said, **other})  # type: ignore[arg-type]


async def dial(card: PeerAddress) -> trio.SocketStream:
    return await trio.open_tcp_stream(*card.tcp[0])


class Victim:
    """A real Efa (process 1, ranks 1 and 2) and what it takes to call it.

    Attributes:
        reports: The lines it has reported.
        entered: It is open.
    """

    def __init__(self, **settings: object) -> None:
        self.table = Table(2)
        self._rails = int(str(settings.get("rails", 1)))
        self.reports: list[str] = []
        self.efa = Efa(
            member=1,
            placement=[[0], [1, 2]],
            exchange=self.table.of(1),
            report=self.reports.append,
            **{"secret": SECRET, "unix": False, **settings},  # type: ignore[arg-type]
        )

    async def card(self) -> PeerAddress:
        """Wait for its address, and give it one that it never needs."""
        mine = PeerAddress(host="", unix="", tcp=(("127.0.0.1", 1),) * self._rails)
        return PeerAddress.unpack((await self.table.of(0)("rail", mine.pack()))[1], 1)


@asynccontextmanager
async def confronted(**settings: object) -> AsyncIterator[tuple[Impostor, Victim]]:
    """Let an impostor join a real Efa."""
    victim = Victim(**settings)
    leave = trio.Event()
    entered = trio.Event()

    async def stay() -> None:
        async with victim.efa.open():
            entered.set()
            await leave.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stay)
        stream = await dial(await victim.card())
        stream.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await greet(stream, hello(), SECRET)
        await entered.wait()
        try:
            yield Impostor(stream), victim
        finally:
            await trio.aclose_forcefully(stream)
            leave.set()
