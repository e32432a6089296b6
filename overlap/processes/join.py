"""Joining a world of several processes, and the membership of a process in it.

Member 0 is the host, which listens at an endpoint; the other members are its clients. The connection lives in an event
loop in a thread of its own, which answers while the program is busy. Messages for the program are passed to the
program's event loop, in the order of arrival.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from time import perf_counter_ns
from typing import Self, TypeVar

import trio
from trio.lowlevel import TrioToken, current_trio_token

from transports.failures import REPORT_BUG
from transports.handshake import HandshakeError

from ..errors import UsageError
from ..tasks import open_background_nursery
from ..threads import start_thread
from .clock import ClockOffset, CoordinatorClock
from .host import LAST_MESSAGE_S, Host
from .identity import JoinError, RendezvousConfig, format_epoch
from .launchers import is_loopback
from .link import ControlLink, MemberLinks
from .members import Client, News, View
from .sockets import NoListenerError, dial_and_greet, format_endpoint
from .wire import BLOB_LIMIT_BYTES, BODY_LIMIT_BYTES, Bye, Contribution, MemberLost, Message, Notice

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_OUTBOX_LIMIT_BYTES = 64 * 2**20

T = TypeVar("T")


@asynccontextmanager
async def join(config: RendezvousConfig, *, report: Callable[[str], None]) -> AsyncIterator[Membership]:
    """Join a world of several processes for the length of an ``async with``.

    The connection lives in a thread of its own, so that a busy program does not count as lost. If the block ends
    without `Membership.leave`, by an error or not, the other members count this one as lost.

    Args:
        config: Endpoint, identity and time limits.
        report: Prints a line for the user about missing or silent members, or rejected connections. It is called in the
            thread of the connection.

    Raises:
        JoinError: The world did not start, or has refused this process.
        ListenError: This is member 0, and it cannot listen at the endpoint.
        ArgumentError: A TLS file is missing or wrong.
    """
    joining = join_in_this_loop(config, report=report, home=current_trio_token())
    async with enter_in_own_thread("overlap membership", joining) as membership:
        yield membership


@asynccontextmanager
async def join_in_this_loop(
    config: RendezvousConfig, *, report: Callable[[str], None], home: TrioToken | None = None
) -> AsyncIterator[Membership]:
    """Join a world as `join` does, with the connection in this event loop.

    Args:
        config: Endpoint, identity and time limits.
        report: Prints a line for the user.
        home: Token of the event loop in which the membership is used; None: this one.
    """
    if config.tls is not None:
        config.tls.check()
    membership = Membership(config, home or current_trio_token())
    async with open_background_nursery() as nursery:
        services = await nursery.start(_hold_nursery_open)
        # member 0 is the host
        kind = _ClientConnection if config.member else Host
        connections = kind(config, membership.pass_to_program, report)
        try:
            await connections.start_and_join(services)
            membership.send, membership.host_clock = connections.send, connections.clock
            try:
                yield membership
            finally:  # even when cancelled: the cause of a failure, sent just before, must reach other members
                with trio.move_on_after(LAST_MESSAGE_S, shield=True):
                    await membership.flush()
                    await connections.hang_up()
        finally:
            services.cancel_scope.cancel()


async def _hold_nursery_open(task_status: trio.TaskStatus[trio.Nursery]) -> None:
    """Open a nursery that ends only when its own scope is cancelled, and report it by `task_status`."""
    # A cancelled caller would not get the nursery, and could not end it. So a cancellation is raised before it opens;
    # there is no checkpoint between this one and `started`.
    await trio.lowlevel.checkpoint_if_cancelled()
    with trio.CancelScope(shield=True):
        async with trio.open_nursery() as nursery:
            task_status.started(nursery)
            await trio.sleep_forever()


class Membership:
    """A process in a world of several, made by `join`. Use it in the event loop that has joined.

    ``async for news in membership`` yields each notice of another member, and each loss of a member, once.

    It carries control messages only: small ones, in order, through member 0. Arrays travel over a transport.

    Attributes:
        member: Index of this process.
        members: Number of processes.
        on_loss: Called with each loss of a member when the report arrives, before ``async for`` yields it.
        send: Sends a message to member 0; called in the event loop of the connection.
        host_clock: Samples of member 0's clock; None on member 0.
    """

    def __init__(self, config: RendezvousConfig, home: TrioToken) -> None:
        """To be called in the event loop of the connection; `home` is the token of the program's loop."""
        self.member: int = config.member
        self.members: int = config.members
        self.on_loss: Callable[[MemberLost], object] = lambda lost: None
        self.send: Callable[[Message], None] = lambda message: None
        self.host_clock: CoordinatorClock | None = None
        self._home, self._connection_loop = home, current_trio_token()
        self._view = View(config.members)
        self._changed = trio.Event()  # set, and replaced, whenever a message arrives

    def __repr__(self) -> str:
        gone = f", {len(self._view.gone)} gone" if self._view.gone else ""
        return f"<Membership: {self.member} of {self.members}{gone}>"

    @property
    def clock_offset(self) -> ClockOffset:
        """Offset of member 0's ``time.perf_counter_ns`` from this process's: the best estimate so far."""
        samples = self.host_clock
        return ClockOffset(offset_ns=0, error_ns=0) if samples is None else samples.best_offset_at(perf_counter_ns())

    async def exchange(self, name: str, part: bytes = b"", *, doing: str = "") -> list[bytes]:
        """Send a part to all members, and return the parts of all members, in member order.

        The k-th exchange of a name on one member belongs to the k-th of that name on the others. If this call is
        cancelled, the other members get their results nevertheless.

        Args:
            name: Name of the exchange, the same on all members.
            part: At most 48 KiB.
            doing: Begins error messages; "": they name the exchange.

        Raises:
            UsageError: At once: the part is too long, or this member has left.
            MemberLostError: A member is lost or has left before it has sent its part.
        """
        doing = doing or f"exchange '{name}'"
        if len(part) > BLOB_LIMIT_BYTES:
            size = f"{len(part)} bytes, the limit is {BLOB_LIMIT_BYTES}"
            raise UsageError(f"{doing}: the part has {size}; {REPORT_BUG}")
        self._view.check_all_present(doing)
        turn = self._view.begin_exchange(name)
        try:
            self._send_soon(Contribution(name=name, turn=turn, blob=bytes(part)))
            return await self._wait_until_found(lambda: self._view.exchange_parts(name, turn, doing))
        finally:
            self._view.end_exchange(name, turn)

    async def barrier(self, name: str) -> None:
        """Return when all members have arrived at the barrier of this name.

        Raises:
            MemberLostError: A member is lost or has left.
        """
        await self.exchange(f"barrier {name}", doing=f"barrier '{name}'")

    def send_notice(self, body: bytes) -> None:
        """Send bytes to all other members, which get them by ``async for``, in the order of the calls.

        Returns at once; any thread may call it. After this member has left, or member 0 is lost, it has no effect.

        Args:
            body: At most 60 KiB.

        Raises:
            UsageError: The body is longer.
        """
        if len(body) > BODY_LIMIT_BYTES:
            raise UsageError(f"notice: has {len(body)} bytes, the limit is {BODY_LIMIT_BYTES}; {REPORT_BUG}")
        self._send_soon(Notice(body=body))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> News:
        """Wait for the next notice or loss of another member, and return it; only one task may wait.

        Ends after this member has left, or member 0 is lost.
        """
        await self._wait_until_found(lambda: self._view.news or self._view.over or None)
        if not self._view.news:
            raise StopAsyncIteration
        return self._view.news.popleft()

    @property
    def unread(self) -> bool:
        """Whether a notice or a loss waits to be read."""
        return bool(self._view.news)

    async def leave(self) -> None:
        """Leave the world, so that the other members do not count the end of this process as a loss.

        On member 0 this returns when all others have left or are lost, because member 0 passes on their messages.
        """
        if not self._view.over:
            self._send_soon(Bye())
        await self._wait_until_found(lambda: self._view.over or None)

    def pass_to_program(self, message: Message) -> None:
        """Pass a message to the program's event loop; called in the loop of the connection."""
        with suppress(trio.RunFinishedError):
            self._home.run_sync_soon(self._receive, message)

    async def flush(self) -> None:
        """Wait until all messages of this member have been passed to the connection, in the order of the calls."""
        done = trio.Event()
        self._connection_loop.run_sync_soon(done.set)
        await done.wait()

    def _send_soon(self, message: Message) -> None:
        """Send a message to member 0, in the order of the calls, from any thread."""
        with suppress(trio.RunFinishedError):
            # `self.send` is looked up only when this runs, because `join_in_this_loop` replaces it
            self._connection_loop.run_sync_soon(lambda: self.send(message))

    def _receive(self, message: Message) -> None:
        """Act on a message of member 0, in the program's event loop, and notify tasks that wait for one."""
        if (loss := self._view.apply_message(message)) is not None:
            self.on_loss(loss)
        self._changed.set()
        self._changed = trio.Event()

    async def _wait_until_found(self, find: Callable[[], T | None]) -> T:
        """Call `find` now, and after each message, until its result is not None; return the result."""
        await trio.lowlevel.checkpoint()
        while (found := find()) is None:
            await self._changed.wait()
        return found


class _ClientConnection(MemberLinks):
    """The connection of a member other than 0: reaches the host, and performs the actions of `Client`.

    Args:
        config: Configuration of this member.
        deliver: Called with each message to the program of this member.
        report: Prints a line for the user.
    """

    def __init__(
        self, config: RendezvousConfig, deliver: Callable[[Message], None], report: Callable[[str], None]
    ) -> None:
        super().__init__(config, deliver, report)
        self._client = Client(config)
        self._obstacle = "no attempt came to an end"  # why the host is not reached; empty: it is reached
        self._host_is_late = False  # whether the host has let a handshake wait, as while its process still starts

    def send(self, message: Message) -> None:
        """Send a message to member 0."""
        self.links[0].send(message)

    async def start_and_join(self, nursery: trio.Nursery) -> None:
        """Connect to the host, and return when all members have joined.

        Raises:
            JoinError: The host cannot be reached or refused, or a member did not join in time.
        """
        with trio.move_on_after(self._config.timeout_s):
            nursery.start_soon(self._report_obstacle)
            stream = await self._connect_with_retries()
            self._obstacle = ""
            self.links[0] = ControlLink(stream, limit_bytes=_OUTBOX_LIMIT_BYTES)
            for task in (self.links[0].write, self._read_until_end, self._exchange_signs_of_life):
                nursery.start_soon(task)
            await self.settled.wait()
        if not self.settled.is_set():
            self.perform_actions(self._client.give_up_joining(self._obstacle))
        self.check_world_starts()
        self.clock = self._client.clock

    async def _read_until_end(self) -> None:
        """Act on the messages of member 0, and then on the end of the connection."""
        link, client = self.links[0], self._client
        async with link.stream:
            reason = await link.read(lambda message: self.perform_actions(client.receive(message, perf_counter_ns())))
            self.perform_actions(client.end_link(reason))

    async def _exchange_signs_of_life(self) -> None:
        """Send signs of life, and watch for those of the host, until cancelled."""
        self.perform_actions(self._client.ping_and_judge_silence({}, perf_counter_ns()))
        await self.watch_silences(lambda silences: self._client.ping_and_judge_silence(silences, perf_counter_ns()))

    async def _connect_with_retries(self) -> trio.abc.Stream:
        """Try again until the host listens, because processes start in any order."""
        pause_s = _FIRST_PAUSE_S
        while (stream := await self._try_to_connect()) is None:
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return stream

    async def _try_to_connect(self) -> trio.abc.Stream | None:
        """Connect and shake hands once; return None if another attempt may succeed, else raise `JoinError`."""
        config = self._config
        try:
            stream, host = await dial_and_greet(
                config.endpoint, config.greeting, config.secret, tls=config.tls, outage_s=config.patience.outage_s
            )
        except HandshakeError as error:
            self._obstacle = str(error)
            self._host_is_late = error.why == "silent" and not isinstance(error, NoListenerError)
            if error.why in ("left", "silent"):
                return None
            raise JoinError(f"process 0 at {format_endpoint(config.endpoint)}: {error}") from error
        if host.epoch == config.epoch:
            return stream
        self._obstacle = (
            f"epoch {format_epoch(host.epoch)} has not ended there, this is epoch {format_epoch(config.epoch)}"
        )
        await trio.aclose_forcefully(stream)
        return None

    async def _report_obstacle(self) -> None:
        """Print why the host cannot be reached, once for each reason; look every `progress_s` seconds until it is.

        If the host is late and on this machine, it is late for all processes here: then only process 1 prints it.
        """
        config, printed = self._config, {""}
        while self._obstacle:
            await trio.sleep(config.progress_s)
            known = self._host_is_late and config.member > 1 and is_loopback(config.endpoint[0])
            if not known and self._obstacle not in printed:
                printed.add(self._obstacle)
                where = format_endpoint(config.endpoint)
                self._report(f"process {config.member} waits for process 0 at {where}: {self._obstacle}")


@asynccontextmanager
async def enter_in_own_thread(name: str, manager: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """Enter an async context manager in the event loop of a new thread, for the length of a block in this loop.

    The block gets the value of the manager. An error of the manager cancels the block, and is raised here.

    Args:
        name: Name of the thread.
        manager: The manager, which is entered and left in the other loop.
    """
    home, own_scope, entering = current_trio_token(), trio.CancelScope(), trio.CancelScope()
    started, entered, ended, left = trio.Event(), trio.Event(), trio.Event(), trio.Event()
    token: TrioToken
    value: T
    failure: BaseException | None = None

    def run_at_home(function: Callable[[], object]) -> None:
        """Call a function in the loop of the block, unless that has ended."""
        with suppress(trio.RunFinishedError):
            home.run_sync_soon(function)

    async def hold_manager() -> None:
        """Enter the manager, and leave it when the block has ended."""
        nonlocal token, value
        token = current_trio_token()
        run_at_home(started.set)
        with entering:
            async with manager as value:
                run_at_home(entered.set)
                await left.wait()

    def run_loop() -> None:
        """An error cancels the block."""
        nonlocal failure
        try:
            trio.run(hold_manager)
        except BaseException as error:
            failure = error
            run_at_home(own_scope.cancel)
        run_at_home(entered.set)
        run_at_home(ended.set)

    thread = threading.Thread(target=run_loop, name=name, daemon=True)
    start_thread(thread)
    with trio.CancelScope(shield=True):
        # from here on the thread has a token, by which this loop can end it
        await started.wait()
    with own_scope:
        try:
            await entered.wait()
            if failure is None:
                yield value
        finally:
            with suppress(trio.RunFinishedError):
                # the manager is left in order once it was entered; before that, its entry is cancelled
                token.run_sync_soon(left.set if entered.is_set() else entering.cancel)
            with trio.CancelScope(shield=True):
                await ended.wait()
            thread.join()
    if failure is not None:
        try:
            raise failure
        finally:
            failure = None  # breaks the reference cycle of the error, its traceback and this frame
