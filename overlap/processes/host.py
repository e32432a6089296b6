"""Member 0 as the host of a world: it listens, lets members in, and carries their messages.

Rejected connections disturb no member. `Members` decides about each stimulus; this is the side with sockets and tasks.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from time import perf_counter_ns
from typing import TypeAlias

import trio

from transports.handshake import HandshakeError, welcome
from transports.identity import Hello

from .clock import CoordinatorClock
from .identity import FRESH, RendezvousConfig, name_epoch
from .link import ControlLink, MemberLinks, watch_silences
from .members import Members, MembershipPhase
from .sockets import format_endpoint, listen, set_socket_options
from .wire import Join, MemberLost, MemberNotice, Message, Refused

#: Functions that send a message to member 0, and that wait until everything sent has arrived and end the connections;
#: and member 0's clock, on other members.
Entered: TypeAlias = tuple[Callable[[Message], None], Callable[[], Awaitable[None]], CoordinatorClock | None]

#: Most bytes that may wait to be sent to one member.
_OUTBOX_LIMIT_BYTES = 64 * 2**20
#: Longest time to send a refusal, or a message that may be the last one.
LAST_MESSAGE_S = 1.0
#: Pause while the system has no descriptor left for a connection.
_EXHAUSTED_PAUSE_S = 0.1
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}


class Host(MemberLinks):
    """Accepts connections, shakes hands, and performs the actions of `Members`.

    Args:
        listener: Where members connect.
        config: Who takes part, and the secret.
        report: Prints a line for the user.

    Attributes:
        members: Decides.
    """

    def __init__(self, listener: trio.SocketListener, config: RendezvousConfig, report: Callable[[str], None]) -> None:
        to_member_0, self._of_member_0 = trio.open_memory_channel[Message](math.inf)
        super().__init__(0, to_member_0.send_nowait, report)
        self.members: Members = Members(config)
        self._listener, self._config = listener, config
        self._hello = config.greeting
        self._pending: dict[trio.CancelScope, None] = {}  # handshakes under way, the oldest first

    async def attend(self) -> None:
        """Accept connections for ever; run it as a task."""
        async with self._listener, trio.open_nursery() as nursery:
            while True:
                try:
                    stream = await self._listener.accept()
                except OSError as error:
                    if error.errno not in _EXHAUSTED:
                        raise
                    await trio.sleep(_EXHAUSTED_PAUSE_S)
                else:
                    nursery.start_soon(self._serve_connection, stream)

    async def watch(self) -> None:
        """Judge the silence of members for ever; run it as a task."""
        judge = self.members.judge_silences
        await watch_silences(self.links, self._config.patience, lambda silences: self.act(judge(silences)))

    async def hang_up(self) -> None:
        """Wait until members have received all messages that were queued for them, and have hung up."""
        async with trio.open_nursery() as nursery:
            for link in self.links.values():
                nursery.start_soon(link.hang_up)

    def receive(self, member: int, message: Message) -> None:
        """Act on a message of a member."""
        self.act(self.members.receive(member, message, perf_counter_ns()))

    async def deliver(self, handle: Callable[[Message], None]) -> None:
        """Pass messages on to member 0, but a notice or a loss only after it was sent to the other members.

        The program of member 0 may end this process because of it. The others would then see that end alone, and blame
        it. A member that does not read delays the message by `LAST_MESSAGE_S`; later messages wait behind it.
        """
        while True:
            queued = [await self._of_member_0.receive()]
            while self._of_member_0.statistics().current_buffer_used:
                queued.append(self._of_member_0.receive_nowait())
            if any(isinstance(message, MemberLost | MemberNotice) for message in queued):
                with trio.move_on_after(LAST_MESSAGE_S):
                    for link in list(self.links.values()):
                        await link.flush()
            for message in queued:
                handle(message)

    async def _serve_connection(self, connection: trio.SocketStream) -> None:
        """Shake hands on a new connection, and serve the member until the connection ends."""
        address = _name_peer(connection)
        tls = self._config.tls
        stream = connection if tls is None else tls.wrap(connection, serving=True)
        try:
            async with stream:
                set_socket_options(connection, self._config.patience.outage_s)
                hello = await self._shake_hands(stream)
                if hello.epoch == self._hello.epoch or self._accepts_any_attempt(hello):
                    await self.serve_member(stream, address, hello.member)
        except HandshakeError as error:
            self.act(self.members.reject(address, error.why, str(error)))
        except (OSError, trio.BrokenResourceError):
            pass  # the other side left before the handshake

    async def _shake_hands(self, stream: trio.abc.Stream) -> Hello:
        """Shake hands. If too many handshakes wait, the oldest is given up: members take milliseconds, and retry."""
        if len(self._pending) >= 2 * self._config.members + 8:
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            oldest.cancel()
        with trio.CancelScope() as scope:
            self._pending[scope] = None
            try:
                return await welcome(stream, self._config.secret, self._validate_hello)
            finally:
                self._pending.pop(scope, None)
        raise HandshakeError("it sent nothing while too many other connections waited", why="crowded")

    def _validate_hello(self, hello: Hello) -> Hello | str:
        """Return this host's hello, or a reason to refuse; a process of a later epoch gets this one, and waits."""
        own_hello = self._hello
        if (hello.role, hello.job) != (own_hello.role, own_hello.job):
            return f"job '{hello.job}' refused, this is job '{own_hello.job}'"
        if self._accepts_any_attempt(hello):
            own_hello = replace(own_hello, epoch=hello.epoch)
        elif hello.epoch < own_hello.epoch and hello.detail != FRESH:
            return f"epoch {name_epoch(hello.epoch)} refused, current is {name_epoch(own_hello.epoch)}"
        if hello.epoch == own_hello.epoch and hello.members != own_hello.members:
            return f"expected {own_hello.members} processes, this one was started with {hello.members}"
        return own_hello

    def _accepts_any_attempt(self, hello: Hello) -> bool:
        """Whether both sides are fresh, and the world is not complete: they agree on the attempt when all have met."""
        return FRESH == hello.detail == self._hello.detail and self.members.phase is MembershipPhase.GATHERING

    async def serve_member(self, stream: trio.abc.Stream, address: str, member: int) -> None:
        """Serve one member, and send it the reason if this side ends the connection."""
        link = ControlLink(stream, limit_bytes=_OUTBOX_LIMIT_BYTES)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.write)
            self.act(self.members.connect(member, address), link)
            is_refused = link.over
            if not is_refused:
                self.links[member] = link
            reason = await link.read(lambda message: self.receive(member, message))
            if not is_refused:
                del self.links[member]
                self.act(self.members.end_link(member, reason))
            link.send(Refused(reason=reason))
            with trio.move_on_after(LAST_MESSAGE_S):
                await link.flush()
            nursery.cancel_scope.cancel()


async def enter_as_host(
    config: RendezvousConfig, nursery: trio.Nursery, deliver: Callable[[Message], None], report: Callable[[str], None]
) -> Entered:
    """Listen as member 0; return when all members have joined.

    Args:
        config: Configuration of member 0.
        nursery: Owner of the connections; cancelling it closes them.
        deliver: Receives the messages to member 0.
        report: Prints lines for the user.

    Raises:
        ListenError: This process cannot listen at the endpoint.
        JoinError: A member did not join in time.
    """
    # the launcher may have passed it on
    listener = listen(config.endpoint) if config.listener is None else config.listener.dup()
    host = Host(trio.SocketListener(trio.socket.from_stdlib_socket(listener)), config, report)
    nursery.start_soon(host.attend)
    nursery.start_soon(host.watch)
    nursery.start_soon(host.deliver, deliver)
    host.act(host.members.connect(0, ""))
    host.receive(0, Join(detail=config.detail, process=config.process))
    with trio.move_on_after(config.timeout_s):
        while not host.settled.is_set():
            with trio.move_on_after(config.progress_s) as pause:
                await host.settled.wait()
            if pause.cancelled_caught:
                host.act(host.members.report_progress())
        await trio.lowlevel.checkpoint()
    if not host.settled.is_set():
        host.act(host.members.give_up())
        with trio.move_on_after(LAST_MESSAGE_S):
            await host.hang_up()
    host.check()
    return lambda message: host.receive(0, message), host.hang_up, None


def _name_peer(connection: trio.SocketStream) -> str:
    try:
        return format_endpoint(connection.socket.getpeername()[:2])
    except OSError:
        return "an address that is no longer connected"
