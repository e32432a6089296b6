"""Member 0 as the host of a world: it listens, lets members join, and passes their messages on.

Rejected connections disturb no member. `Members` decides what happens; this module has the sockets and tasks.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter_ns

import trio

from transports.handshake import HandshakeError, welcome
from transports.identity import Hello

from .identity import FRESH, RendezvousConfig, format_epoch
from .link import ControlLink, MemberLinks
from .members import Members, MembershipPhase
from .sockets import format_endpoint, listen, set_socket_options
from .wire import Join, MemberLost, MemberNotice, Message, Refused

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
        config: Configuration of member 0.
        deliver: Called with each message to member 0.
        report: Prints a line for the user.

    Attributes:
        members: State of all members, which decides on the actions.
    """

    def __init__(
        self, config: RendezvousConfig, deliver: Callable[[Message], None], report: Callable[[str], None]
    ) -> None:
        to_member_0, self._messages_for_member_0 = trio.open_memory_channel[Message](math.inf)
        super().__init__(config, to_member_0.send_nowait, report)
        self.members: Members = Members(config)
        self._handle = deliver
        self._hello = config.greeting
        self._handshakes: dict[trio.CancelScope, None] = {}  # handshakes under way, the oldest first

    async def start_and_join(self, nursery: trio.Nursery) -> None:
        """Listen as member 0; return when all members have joined.

        Args:
            nursery: Owner of the connections; cancelling it closes them.

        Raises:
            ListenError: This process cannot listen at the endpoint.
            JoinError: A member did not join in time.
        """
        config = self._config
        # the launcher may have passed a socket that listens already
        listener = listen(config.endpoint) if config.listener is None else config.listener.dup()
        nursery.start_soon(self.accept_connections, trio.SocketListener(trio.socket.from_stdlib_socket(listener)))
        nursery.start_soon(self.watch_silences, self.members.judge_silences)
        nursery.start_soon(self.deliver_to_member_0)
        # member 0 itself, which has no connection and so no address
        self.perform_actions(self.members.add_connection(0, ""))
        self.receive(0, Join(detail=config.detail, process=config.process))
        with trio.move_on_after(config.timeout_s):
            while not self.settled.is_set():
                with trio.move_on_after(config.progress_s) as pause:
                    await self.settled.wait()
                if pause.cancelled_caught:
                    self.perform_actions(self.members.report_progress())
            await trio.lowlevel.checkpoint()
        if not self.settled.is_set():
            self.perform_actions(self.members.give_up_joining())
            with trio.move_on_after(LAST_MESSAGE_S):
                await self.hang_up()
        self.check_world_starts()

    async def accept_connections(self, listener: trio.SocketListener) -> None:
        """Accept connections, and serve each in a task, until cancelled.

        Args:
            listener: Socket that listens at the endpoint; closed at the end.
        """
        async with listener, trio.open_nursery() as nursery:
            while True:
                try:
                    stream = await listener.accept()
                except OSError as error:
                    if error.errno not in _EXHAUSTED:
                        raise
                    await trio.sleep(_EXHAUSTED_PAUSE_S)
                else:
                    nursery.start_soon(self._serve_connection, stream)

    def send(self, message: Message) -> None:
        """Act on a message of member 0."""
        self.receive(0, message)

    def receive(self, member: int, message: Message) -> None:
        """Act on a message of a member."""
        self.perform_actions(self.members.receive(member, message, perf_counter_ns()))

    async def deliver_to_member_0(self) -> None:
        """Pass messages to member 0, until cancelled; notices and losses only after they were sent to other members.

        After such a message, the program of member 0 may end this process. Without the message, the others would see
        only that end, and blame member 0. A member that does not read delays delivery by `LAST_MESSAGE_S` at most.
        """
        while True:
            queued = [await self._messages_for_member_0.receive()]
            while self._messages_for_member_0.statistics().current_buffer_used:
                queued.append(self._messages_for_member_0.receive_nowait())
            if any(isinstance(message, MemberLost | MemberNotice) for message in queued):
                with trio.move_on_after(LAST_MESSAGE_S):
                    for link in list(self.links.values()):
                        await link.flush()
            for message in queued:
                self._handle(message)

    async def _serve_connection(self, connection: trio.SocketStream) -> None:
        """Shake hands on a new connection, and serve the member until the connection ends."""
        address = _peer_address_text(connection)
        tls = self._config.tls
        stream = connection if tls is None else tls.wrap(connection, serving=True)
        try:
            async with stream:
                set_socket_options(connection, self._config.patience.outage_s)
                hello = await self._shake_hands(stream)
                # A process of another epoch got this one's epoch in the handshake, and tries again later.
                if hello.epoch == self._hello.epoch or self._accepts_any_attempt(hello):
                    await self.serve_member(stream, address, hello.member)
        except HandshakeError as error:
            self.perform_actions(self.members.report_failed_handshake(address, error.why, str(error)))
        except (OSError, trio.BrokenResourceError):
            pass  # the other side left before the handshake

    async def _shake_hands(self, stream: trio.abc.Stream) -> Hello:
        """Return the hello of the other side.

        If too many handshakes are under way, the oldest is given up: a member needs milliseconds, and would try again.
        """
        if len(self._handshakes) >= 2 * self._config.members + 8:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cancel()
        with trio.CancelScope() as scope:
            self._handshakes[scope] = None
            try:
                return await welcome(stream, self._config.secret, self._answer_hello)
            finally:
                self._handshakes.pop(scope, None)
        # reached only when the scope was cancelled, as the oldest one
        raise HandshakeError("it sent nothing while too many others waited; a process tries again", why="crowded")

    def _answer_hello(self, hello: Hello) -> Hello | str:
        """Return this host's hello, or why the other side is refused, as text.

        A process of a later epoch is not refused: it gets this host's hello, sees the epoch, and tries again later.
        """
        own_hello = self._hello
        if (hello.role, hello.job) != (own_hello.role, own_hello.job):
            return f"job '{hello.job}' refused, this is job '{own_hello.job}'"
        if self._accepts_any_attempt(hello):
            own_hello = replace(own_hello, epoch=hello.epoch)
        elif hello.epoch < own_hello.epoch and hello.detail != FRESH:
            return f"epoch {format_epoch(hello.epoch)} refused, current is {format_epoch(own_hello.epoch)}"
        if hello.epoch == own_hello.epoch and hello.members != own_hello.members:
            return f"expected {own_hello.members} processes, this one was started with {hello.members}"
        return own_hello

    def _accepts_any_attempt(self, hello: Hello) -> bool:
        """Whether both sides are in their first world, and not all have joined: all then agree on an attempt number."""
        return FRESH == hello.detail == self._hello.detail and self.members.phase is MembershipPhase.GATHERING

    async def serve_member(self, stream: trio.abc.Stream, address: str, member: int) -> None:
        """Serve one member, and send it the reason if this side ends the connection.

        Args:
            stream: Connection to the member, after the handshake.
            address: Address of the other end, for messages.
            member: Number of the member, from its hello. It is refused if the member has a connection already.
        """
        link = ControlLink(stream, limit_bytes=_OUTBOX_LIMIT_BYTES)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.write)
            self.perform_actions(self.members.add_connection(member, address), link)
            is_refused = link.over
            if not is_refused:
                self.links[member] = link
            reason = await link.read(lambda message: self.receive(member, message))
            if not is_refused:
                del self.links[member]
                self.perform_actions(self.members.end_link(member, reason))
            link.send(Refused(reason=reason))
            with trio.move_on_after(LAST_MESSAGE_S):
                await link.flush()
            nursery.cancel_scope.cancel()


def _peer_address_text(connection: trio.SocketStream) -> str:
    try:
        return format_endpoint(connection.socket.getpeername()[:2])
    except OSError:
        return "an address that is no longer connected"
