"""Joining a world of several processes: member 0 is the host, at an endpoint, and the other members are its clients."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import perf_counter_ns

import trio
from trio.lowlevel import TrioToken, current_trio_token

from transports.handshake import HandshakeError

from .clock import CoordinatorClock
from .host import LAST_MESSAGE_S, Entered, enter_as_host
from .identity import JoinError, RendezvousConfig, name_epoch
from .launchers import is_loopback
from .link import ControlLink
from .member import Membership
from .messages import Goodbye, Join, MemberLost, Message, Ping, Pong, Ready, Refused, Waiting
from .silence import watch
from .sockets import NoListenerError, format_endpoint, meet
from .thread import in_own_thread

#: Pings before joining: enough that one of them did not wait in a queue.
_CLOCK_SAMPLES = 16
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_OUTBOX_LIMIT_BYTES = 64 * 2**20


@asynccontextmanager
async def join(config: RendezvousConfig, *, report: Callable[[str], None]) -> AsyncIterator[Membership]:
    """Join a world of several processes for the length of an ``async with``.

    The connection lives in a thread of its own, so that a busy program does not count as lost. A block that ends
    without `Membership.leave`, by an error or not, is a loss to the others.

    Args:
        config: Endpoint, identity and time limits.
        report: Prints lines for the user, in that thread: members that are missing or silent, rejected connections.

    Raises:
        JoinError: The world did not start, or has refused this process.
        ListenError: This is member 0, and it cannot listen at the endpoint.
        ArgumentError: A TLS file is missing or wrong.
    """
    joining = join_here(config, report=report, home=current_trio_token())
    async with in_own_thread("overlap membership", joining) as membership:
        yield membership


@asynccontextmanager
async def join_here(
    config: RendezvousConfig, *, report: Callable[[str], None], home: TrioToken | None = None
) -> AsyncIterator[Membership]:
    """Join a world as `join` does, with the connection in this event loop.

    Args:
        config: Endpoint, identity and time limits.
        report: Prints lines for the user.
        home: Token of the loop in which the membership is used; by default this one.
    """
    if config.tls is not None:
        config.tls.check()
    enter = _enter_as_client if config.member else enter_as_host
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        services = await nursery.start(_keep_open)
        try:
            membership, hang_up = await enter(config, services, home or current_trio_token(), report)
            try:
                yield membership
            finally:  # also when cancelled: other members report the cause that a failing member has sent
                with trio.move_on_after(LAST_MESSAGE_S, shield=True):
                    await membership.flush()
                    await hang_up()
        except (trio.Cancelled, GeneratorExit):
            raise
        except BaseException as error:  # raised again below, where the nursery does not wrap it
            failure = error
        finally:
            services.cancel_scope.cancel()
    if failure is not None:
        try:
            raise failure
        finally:
            failure = None  # or it would keep this frame alive, which keeps it alive


async def _keep_open(task_status: trio.TaskStatus[trio.Nursery]) -> None:
    """Start a nursery that ends only when its own scope is cancelled."""
    # A cancelled caller would not get the nursery, and so never end it; no other checkpoint follows before that.
    await trio.lowlevel.checkpoint_if_cancelled()
    with trio.CancelScope(shield=True):
        async with trio.open_nursery() as nursery:
            task_status.started(nursery)
            await trio.sleep_forever()


async def _enter_as_client(
    config: RendezvousConfig, nursery: trio.Nursery, home: TrioToken, report: Callable[[str], None]
) -> Entered:
    """Join as a member other than 0; return when all members have joined.

    Raises:
        JoinError: Member 0 cannot be reached or refused, or a member did not join in time.
    """
    client = _Client(config, home, report)
    with trio.move_on_after(config.timeout_s):
        return await client.enter(nursery)
    raise client.too_late()


class _Client:
    """The connection of a member other than 0, before and after it has joined."""

    def __init__(self, config: RendezvousConfig, home: TrioToken, report: Callable[[str], None]) -> None:
        self._config, self._home, self._report = config, home, report
        self._endpoint, self._host = format_endpoint(config.endpoint), "process 0"
        self._obstacle = "no attempt came to an end"
        self._host_is_late = False  # the host lets handshakes wait, as a process that still starts does
        self._missing: list[int] = []
        self._departed: list[int] = []
        self._reached, self._joined = False, False
        self._refusal: str | None = None
        self._settled = trio.Event()  # joined or refused
        self._clock = CoordinatorClock()

    async def enter(self, nursery: trio.Nursery) -> Entered:
        """Connect to the host, and return when all members have joined."""
        nursery.start_soon(self._report_obstacle)
        stream = await self._reach()
        self._reached = True
        self._link = ControlLink(stream, limit_bytes=_OUTBOX_LIMIT_BYTES)
        config = self._config
        self._membership = Membership(
            member=config.member, members=config.members, home=self._home, send=self._link.send, clock=self._clock
        )
        for task in (self._link.write, self._read_until_end, self._send_pings, self._watch_host):
            nursery.start_soon(task)
        await self._settled.wait()
        if self._refusal is not None:
            raise JoinError(self._refusal, missing=self._missing)
        return self._membership, self._link.hang_up

    def too_late(self) -> JoinError:
        """Return the error of a timeout, which names the missing processes."""
        within = f"within {self._config.timeout_s:g} s"
        if self._reached and not self._missing:
            return JoinError(
                f"{self._host} at {self._endpoint} did not let this process in {within}; look at its output",
                missing=[0],
            )
        if self._reached:
            return JoinError(self._config.name_absent(self._missing, self._departed), missing=self._missing)
        return JoinError(
            f"{self._host} could not be reached at {self._endpoint} {within}: {self._obstacle}; "
            "check that it runs, and that its port is open",
            missing=[0],
        )

    async def _reach(self) -> trio.abc.Stream:
        """Connect to the host, trying again until it listens: processes start in any order."""
        pause_s = _FIRST_PAUSE_S
        while (stream := await self._connect()) is None:
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return stream

    async def _connect(self) -> trio.abc.Stream | None:
        """Connect to the host and shake hands once; return None if another attempt may succeed."""
        config = self._config
        try:
            stream, host = await meet(
                config.endpoint, config.greeting, config.secret, tls=config.tls, outage_s=config.patience.outage_s
            )
        except HandshakeError as error:
            self._obstacle = str(error)
            self._host_is_late = error.why == "silent" and not isinstance(error, NoListenerError)
            if error.why in ("left", "silent"):
                return None
            raise JoinError(f"{self._host} at {self._endpoint}: {error}") from error
        if host.epoch == config.epoch:
            return stream
        theirs, ours = (
            name_epoch(host.epoch),
            name_epoch(config.epoch),
        )
        self._obstacle = f"epoch {theirs} has not ended there, this is epoch {ours}"
        await trio.aclose_forcefully(stream)
        return None

    async def _read_until_end(self) -> None:
        """Read messages until the connection ends: then member 0 is lost, or this member could not join."""
        async with self._link.stream:
            reason = await self._link.read(self._receive)
            if self._joined:
                self._membership.handle(MemberLost(member=0, reason=reason))
            else:
                self._refuse(f"{self._host} at {self._endpoint}: {reason}")

    def _receive(self, message: Message) -> None:
        """Act on a message of the coordinator, before or after this member has joined."""
        match message:
            case Refused():
                self._link.cut(message.reason if not self._joined else f"has shut this process out: {message.reason}")
            case Ready():
                self._joined, self._link.process = True, message.process
                self._membership.handle(message)
                self._settled.set()
            case Waiting():
                self._missing, self._departed = message.missing, message.departed
            case _:
                self._membership.handle(message)
                if isinstance(message, Pong) and not self._joined:
                    self._ping_or_join()
                elif isinstance(message, Goodbye):  # hang up: member 0 waits for that, so that its last messages arrive
                    self._link.cut("has let this process go")

    def _ping_or_join(self) -> None:
        """Send another ping, or the request to join once `_CLOCK_SAMPLES` answers have arrived."""
        if len(self._clock) < _CLOCK_SAMPLES:
            self._link.send(Ping(sent_ns=perf_counter_ns()))
        elif len(self._clock) == _CLOCK_SAMPLES:
            self._link.send(Join(detail=self._config.detail, process=self._config.process))

    def _refuse(self, reason: str) -> None:
        """Store why this member cannot join, and wake `enter`."""
        self._refusal = reason
        self._settled.set()

    async def _send_pings(self) -> None:
        """Send pings as signs of life; the answer to the first starts the series of `_ping_or_join`."""
        while True:
            self._link.send(Ping(sent_ns=perf_counter_ns()))
            await trio.sleep(self._config.patience.beat_s)

    async def _watch_host(self) -> None:
        """Cut the connection when the host has been silent for too long."""

        def lose(_: int, reason: str) -> None:
            """Cut the connection, with the reason of the silence."""
            self._link.cut(reason)

        config = self._config
        await watch({0: self._link}, config.patience, report=self._report, lose=lose, name=config.name)

    async def _report_obstacle(self) -> None:
        """Print why the host cannot be reached, once for each reason; look every `progress_s` seconds.

        If the host is late for all processes of a machine, process 1 alone prints that.
        """
        config, printed = self._config, set[str]()
        while not self._reached:
            await trio.sleep(config.progress_s)
            known = self._host_is_late and config.member > 1 and is_loopback(config.endpoint[0])
            if not (self._reached or known or self._obstacle in printed):
                printed.add(self._obstacle)
                member = f"process {config.member}"
                self._report(f"{member} waits for {self._host} at {self._endpoint}: {self._obstacle}")
