"""Worlds of several members as tasks of one process, over loopback."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import trio

from overlap.processes.identity import RendezvousConfig, SilenceLimits
from overlap.processes.join import Membership, join_in_this_loop
from overlap.processes.link import ControlLink, MemberLinks
from overlap.processes.members import Action, CutConnection, Members, PrintLine, Silence
from overlap.processes.sockets import Endpoint
from overlap.processes.wire import FrameReader, Join, Message, Ping, Pong, encode_frame
from tests.waiting import Lines, run
from transports.handshake import greet, welcome
from transports.identity import Hello

SECRET = b"the secret of these tests"
#: A process of the test machine may be busy elsewhere for long; silence is not what most tests are about.
UNSHAKEN = SilenceLimits(beat_s=0.2, suspect_s=60, silence_s=120)


@contextmanager
def listening() -> Iterator[socket.socket]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield listener


@dataclass
class Company:
    """Says how to join one world, and collects what its members report."""

    listener: socket.socket
    members: int
    lines: Lines = field(default_factory=Lines)

    @property
    def endpoint(self) -> Endpoint:
        host, port = self.listener.getsockname()
        return host, port

    def config(self, member: int, **changes: object) -> RendezvousConfig:
        arguments = {
            "job": "digits",
            "member": member,
            "members": self.members,
            "endpoint": self.endpoint,
            "secret": SECRET,
            "detail": "overlap 0.1.0, local",
            "listener": None if member else self.listener,
            "patience": UNSHAKEN,
            **changes,
        }
        return RendezvousConfig(**arguments)  # type: ignore[arg-type]

    async def attend(self, member: int, main: Callable[[Membership], Awaitable[None]], **changes: object) -> None:
        async with join_in_this_loop(self.config(member, **changes), report=self.lines.append) as membership:
            await main(membership)

    async def all_attend(self, main: Callable[[Membership], Awaitable[None]]) -> None:
        async with trio.open_nursery() as nursery:
            for member in range(self.members):
                nursery.start_soon(self.attend, member, main)


MakeCompany: TypeAlias = Callable[[int], Company]


def meet(members: int, main: Callable[[Membership], Awaitable[None]], *, leave: bool = True) -> list[str]:
    """Run `main` on every member of a world, and return what was reported."""

    async def body(membership: Membership) -> None:
        await main(membership)
        if leave:
            await membership.leave()

    with listening() as listener:
        company = Company(listener, members)
        run(partial(company.all_attend, body))
    return company.lines


async def wait_and_leave(membership: Membership) -> None:
    await membership.barrier("all here")
    await membership.leave()


async def watch(
    member: int, link: ControlLink, config: RendezvousConfig, report: Callable[[str], None],
    lose: Callable[[int, str], None],
) -> None:  # fmt: skip
    """Watch the silence of one member, as member 0 does."""
    members = Members(config)
    members.add_connection(member, "")

    def judge(silences: dict[int, Silence]) -> list[Action]:
        actions = members.judge_silences(silences)
        for action in actions:
            if isinstance(action, CutConnection):
                lose(action.member, action.reason)
        return [action for action in actions if isinstance(action, PrintLine)]

    watched = MemberLinks(config, lambda message: None, report)
    watched.links[member] = link
    await watched.watch_silences(judge)


class Puppet:
    """A member that knows the secret and says only what a test lets it say."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._reader = FrameReader()
        self._heard: list[Message] = []

    @classmethod
    async def enter(cls, company: Company, member: int, *, process: str = "") -> Puppet:
        """Shake hands and join; the world may not be complete yet."""
        stream = await trio.open_tcp_stream(*company.endpoint)
        await greet(stream, Hello(role="member", job="digits", epoch=0, member=member, members=company.members), SECRET)
        puppet = cls(stream)
        await puppet.say(encode_frame(Join(detail="overlap 0.1.0, local", process=process)))
        return puppet

    @classmethod
    async def receive(cls, company: Company) -> Puppet:
        """Be the host: accept one connection, and shake hands; the first answer to a question for the time follows."""
        async with trio.SocketListener(trio.socket.from_stdlib_socket(company.listener.dup())) as listener:
            stream = await listener.accept()
        mine = Hello(role="member", job="digits", epoch=0, member=0, members=company.members)
        await welcome(stream, SECRET, lambda _: mine)
        return cls(stream)

    async def answer(self) -> None:
        asked = await self.hear(Ping)
        assert isinstance(asked, Ping)
        await self.say(encode_frame(Pong(sent_ns=asked.sent_ns, server_ns=1)))

    async def say(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def hear(self, kind: type[Message]) -> Message | None:
        """Return the next message of a kind, or None when the connection is over."""
        while True:
            while self._heard:
                message = self._heard.pop(0)
                if isinstance(message, kind):
                    return message
            try:
                data = await self.stream.receive_some()
            except trio.BrokenResourceError:
                return None
            if not data:
                return None
            self._heard += self._reader.feed(data)
