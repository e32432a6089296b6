"""Member 0 as the host of a world: it listens, lets members in, and carries their messages.

Rejected connections disturb no member. `Coordinator` decides about each message; this is the side with
sockets and tasks.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import trio
from trio.lowlevel import TrioToken

from transports.handshake import HandshakeError, welcome
from transports.identity import Hello

from .coordinator import Coordinator, RefusedError
from .identity import FRESH, JoinError, RendezvousConfig, name_epoch
from .link import ControlLink
from .member import Membership
from .messages import Join, MemberLost, MemberNotice, Message, Refused
from .silence import watch
from .sockets import format_endpoint, listen, tune

#: The membership, and a function that waits until everything sent has arrived and ends the connections.
Entered: TypeAlias = tuple[Membership, Callable[[], Awaitable[None]]]

#: Most bytes that may wait to be sent to one member.
_OUTBOX_LIMIT_BYTES = 64 * 2**20
#: Longest time to send a refusal, or a message that may be the last one.
LAST_MESSAGE_S = 1.0
#: Pause while the system has no descriptor left for a connection.
_EXHAUSTED_PAUSE_S = 0.1
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
#: Number of different refusals that are reported; others are only counted.
_REPORTED_LIMIT = 8
#: Number of refusals that the error repeats: a refused process may be the missing one.
_REPEATED_LIMIT = 3


class Acceptor:
    """Accepts connections, shakes hands, and lets the coordinator act on the messages of members.

    Attributes:
        links: Links of the connected members.
        reasons: A line for each reason of a rejection, up to a limit.
    """

    def __init__(
        self,
        listener: trio.SocketListener,
        coordinator: Coordinator,
        config: RendezvousConfig,
        report: Callable[[str], None],
    ) -> None:
        self.links: dict[int, ControlLink] = {}
        self.reasons: list[str] = []
        self._open_listener, self._coordinator, self._config, self._report = listener, coordinator, config, report
        self._hello = config.greeting
        self._reported: set[str] = set()
        self._pending: dict[trio.CancelScope, None] = {}  # handshakes under way, the oldest first
        self._pending_limit = 2 * config.members + 8

    async def attend(self) -> None:
        """Accept connections for ever; run it as a task."""
        async with self._open_listener, trio.open_nursery() as nursery:
            while True:
                try:
                    stream = await self._open_listener.accept()
                except OSError as error:
                    if error.errno not in _EXHAUSTED:
                        raise
                    await trio.sleep(_EXHAUSTED_PAUSE_S)
                else:
                    nursery.start_soon(self._serve_connection, stream)

    def lose(self, member: int, reason: str) -> None:
        """End the connection of a member, which gets the reason."""
        self.links[member].cut(reason)

    async def hang_up(self) -> None:
        """Wait until members have received all messages that were queued for them, and have hung up."""
        async with trio.open_nursery() as nursery:
            for link in self.links.values():
                nursery.start_soon(link.hang_up)

    async def _serve_connection(self, connection: trio.SocketStream) -> None:
        """Shake hands on a new connection, and serve the member until the connection ends."""
        address = _name_peer(connection)
        tls = self._config.tls
        stream = connection if tls is None else tls.wrap(connection, serving=True)
        try:
            async with stream:
                tune(connection, self._config.patience.outage_s)
                hello = await self._shake_hands(stream)
                if hello.epoch == self._hello.epoch or self._accepts_any_attempt(hello):
                    await self._serve_member(stream, address, hello.member)
        except HandshakeError as error:
            self._reject(address, error)
        except (OSError, trio.BrokenResourceError):
            pass  # the other side left before the handshake

    async def _shake_hands(self, stream: trio.abc.Stream) -> Hello:
        """Shake hands. If too many handshakes wait, the oldest is given up: members take milliseconds, and retry."""
        if len(self._pending) >= self._pending_limit:
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

    def _validate_hello(self, theirs: Hello) -> Hello | str:
        """Return this host's hello, or a reason to refuse; a process of a later epoch gets this one, and waits."""
        ours = self._hello
        if (theirs.role, theirs.job) != (ours.role, ours.job):
            return f"job '{theirs.job}' refused, this is job '{ours.job}'"
        if self._accepts_any_attempt(theirs):
            ours = replace(ours, epoch=theirs.epoch)
        elif theirs.epoch < ours.epoch and theirs.detail != FRESH:
            return f"epoch {name_epoch(theirs.epoch)} refused, current is {name_epoch(ours.epoch)}"
        if theirs.epoch == ours.epoch and theirs.members != ours.members:
            return f"expected {ours.members} processes, this one was started with {theirs.members}"
        return ours

    def _accepts_any_attempt(self, theirs: Hello) -> bool:
        """Whether both sides are fresh, and the world is not complete: they agree on the attempt when all have met."""
        return FRESH == theirs.detail == self._hello.detail and not self._coordinator.complete

    async def _serve_member(self, stream: trio.abc.Stream, address: str, member: int) -> None:
        """Serve one member, and send it the reason if this side ends the connection."""
        link = ControlLink(stream, limit_bytes=_OUTBOX_LIMIT_BYTES)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.write)
            reason = await self._converse(link, address, member)
            link.send(Refused(reason=reason))
            with trio.move_on_after(LAST_MESSAGE_S):
                await link.flush()
            nursery.cancel_scope.cancel()

    async def _converse(self, link: ControlLink, address: str, member: int) -> str:
        """Let the coordinator handle the messages of a member until the connection ends; return the reason."""

        def handle(message: Message) -> None:
            """Handle one message; end the connection if the coordinator refuses the member."""
            if isinstance(message, Join):
                link.process = message.process
            try:
                self._coordinator.handle(member, message)
            except RefusedError as error:
                self._refuse(address, str(error))
                link.cut(str(error))

        try:
            self._coordinator.attach(member, link.send)
        except RefusedError as error:
            self._refuse(address, str(error))
            return str(error)
        self.links[member] = link
        try:
            reason = await link.read(handle)
        finally:
            self.links.pop(member, None)
        self._coordinator.detach(member, reason)
        return reason

    def _reject(self, address: str, error: HandshakeError) -> None:
        """Report a failed handshake, once for each kind of failure; a member that gave up tries again, unreported."""
        if error.why == "refused":
            self._refuse(address, str(error))
        elif error.why != "left":  # a member that gave up tries again
            line = f"turned away {address}: {error} (others like it are only counted)"
            # A member on a busy host is late as well, and tries again; the error of a missing member repeats this.
            self._report_once(error.why, line, aloud=error.why != "silent")

    def _refuse(self, address: str, reason: str) -> None:
        """Report, once for each reason, that a process was refused."""
        self._report_once(reason, f"refused {address}: {reason}")

    def _report_once(self, key: str, line: str, *, aloud: bool = True) -> None:
        """Add a line to `reasons`, and print it if `aloud`, unless one with this key was added before."""
        if key not in self._reported and len(self._reported) < _REPORTED_LIMIT:
            self._reported.add(key)
            self.reasons.append(line)
            if aloud:
                self._report(line)


async def enter_as_host(
    config: RendezvousConfig, nursery: trio.Nursery, home: TrioToken, report: Callable[[str], None]
) -> Entered:
    """Listen as member 0; return when all members have joined.

    Args:
        config: Configuration of member 0.
        nursery: Owner of the connections; cancelling it closes them.
        home: Token of the loop in which the membership is used.
        report: Prints lines for the user.

    Raises:
        ListenError: This process cannot listen at the endpoint.
        JoinError: A member did not join in time.
    """
    listener = await _open_listener(config)
    coordinator = Coordinator(members=config.members, detail=config.detail, report=report, process=config.process)
    acceptor = Acceptor(listener, coordinator, config, report)
    membership = Membership(member=0, members=config.members, home=home, send=partial(coordinator.handle, 0))
    nursery.start_soon(acceptor.attend)
    watching = partial(watch, acceptor.links, config.patience, report=report, lose=acceptor.lose, name=config.name)
    nursery.start_soon(watching)
    to_member_0, of_member_0 = trio.open_memory_channel[Message](math.inf)
    nursery.start_soon(deliver_after_others, of_member_0, acceptor.links, membership.handle)
    coordinator.attach(0, to_member_0.send_nowait)
    coordinator.handle(0, Join(detail=config.detail, process=config.process))
    with trio.move_on_after(config.timeout_s):
        await _wait_for_members(config.members, coordinator, config, report)
    if not coordinator.complete:
        missing = coordinator.missing  # before the processes that joined get the refusal and leave
        reasons = [f"process 0 {line}" for line in acceptor.reasons[-_REPEATED_LIMIT:]]
        reason = "; ".join([config.name_absent(missing, sorted(coordinator.departed)), *reasons])
        coordinator.refuse_all(reason)
        with trio.move_on_after(LAST_MESSAGE_S):
            await acceptor.hang_up()
        raise JoinError(reason, missing=missing)
    return membership, acceptor.hang_up


async def deliver_after_others(
    messages: trio.MemoryReceiveChannel[Message],
    links: Mapping[int, ControlLink],
    handle: Callable[[Message], None],
) -> None:
    """Pass messages on to member 0, a notice or a loss only after it has been sent to the other members.

    The program of member 0 may end this process because of it. The others would then see that end alone, and blame it.
    A member that does not read delays the message by `LAST_MESSAGE_S`; later messages wait behind it.
    """
    while True:
        queued = [await messages.receive()]
        while messages.statistics().current_buffer_used:
            queued.append(messages.receive_nowait())
        if any(isinstance(message, MemberLost | MemberNotice) for message in queued):
            with trio.move_on_after(LAST_MESSAGE_S):
                for link in list(links.values()):
                    await link.flush()
        for message in queued:
            handle(message)


async def _open_listener(config: RendezvousConfig) -> trio.SocketListener:
    """Return a listener at the endpoint, on the socket that the launcher has passed on if there is one."""
    if config.listener is None:
        return await listen(config.endpoint)
    return trio.SocketListener(trio.socket.from_stdlib_socket(config.listener.dup()))


async def _wait_for_members(
    members: int, coordinator: Coordinator, config: RendezvousConfig, report: Callable[[str], None]
) -> None:
    """Wait until that many members have joined; report the missing ones every few seconds."""
    while len(coordinator.joined) < members:
        with trio.move_on_after(config.progress_s) as pause:
            while len(coordinator.joined) < members:
                await coordinator.changed.wait()
        if pause.cancelled_caught and len(coordinator.joined) < members:
            missing = ", ".join(map(str, coordinator.missing))
            report(f"{len(coordinator.joined)} of {coordinator.members} joined; missing {missing}")
            coordinator.send_missing()
    await trio.lowlevel.checkpoint()


def _name_peer(connection: trio.SocketStream) -> str:
    """Return the address at the other end of a connection, for messages."""
    try:
        return format_endpoint(connection.socket.getpeername()[:2])
    except OSError:
        return "an address that is no longer connected"
