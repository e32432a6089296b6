"""Joining as any other member: find member 0, be let in, and stay connected to it for as long as the world lasts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import perf_counter_ns

import trio

from transports.handshake import HandshakeError, greet

from .clock import CoordinatorClock
from .identity import JoinError, RendezvousConfig, name_absent, name_epoch
from .link import ControlLink, OutboxFullError, watch
from .member import Membership
from .messages import Goodbye, Join, Message, Ping, Pong, Ready, Refused, Waiting
from .sockets import dial, format_endpoint

#: Questions for the time before joining: enough that one of them did not wait in any queue.
_CLOCK_SAMPLES = 16
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
#: A host whose packets are lost somewhere never refuses.
_DIAL_LIMIT_S = 5.0
_OUTBOX_LIMIT_BYTES = 64 * 2**20


async def join_as_client(config: RendezvousConfig, nursery: trio.Nursery, report: Callable[[str], None]) -> Membership:
    """Return when this member, and all others, have joined.

    Args:
        config: Of a member other than 0.
        nursery: Where the connection lives; cancelling it closes it.
        report: Gets lines for the user.

    Raises:
        JoinError: Member 0 cannot be reached or refused, or somebody did not come in time.
    """
    client = _Client(config, report)
    with trio.move_on_after(config.timeout_s):
        return await client.enter(nursery)
    raise client.too_late()


class _Client:
    """What one member knows on its way in, and how it passes on what it hears once it is inside."""

    def __init__(self, config: RendezvousConfig, report: Callable[[str], None]) -> None:
        self._config, self._report = config, report
        self._where = format_endpoint(config.endpoint)
        self._trouble = "no attempt came to an end"
        self._missing: list[int] = []
        self._went: list[int] = []
        self._reached, self._inside = False, False
        self._refusal: str | None = None
        self._settled = trio.Event()  # inside or refused
        self._clock = CoordinatorClock()

    async def enter(self, nursery: trio.Nursery) -> Membership:
        """Find the host, and return when it says that all have joined."""
        nursery.start_soon(self._report_trouble)
        stream = await self._reach()
        self._reached = True
        self._link = ControlLink(stream, limit_bytes=_OUTBOX_LIMIT_BYTES)
        self._membership = Membership(
            member=self._config.member,
            members=self._config.members,
            clock=self._clock,
            post=self._link.send,
            room=self._link.room,
            hang_up=self._link.hang_up,
        )
        for task in (self._link.write, self._listen, self._beat, self._watch):
            nursery.start_soon(task)
        await self._settled.wait()
        if self._refusal is not None:
            raise JoinError(self._refusal, missing=self._missing)
        return self._membership

    def too_late(self) -> JoinError:
        """Say what the time was spent waiting for."""
        within = f"within {self._config.timeout_s:g} s"
        if self._reached and not self._missing:
            return JoinError(f"process 0 at {self._where} did not let this process in {within}", missing=[0])
        if self._reached:
            reason = name_absent(self._missing, self._went, self._config.timeout_s)
            return JoinError(reason, missing=self._missing)
        return JoinError(f"process 0 could not be reached at {self._where} {within}: {self._trouble}", missing=[0])

    async def _reach(self) -> trio.abc.Stream:
        """Try until it succeeds or makes no sense: processes start in any order."""
        pause_s = _FIRST_PAUSE_S
        while True:
            stream = await self._try()
            if stream is not None:
                return stream
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _try(self) -> trio.abc.Stream | None:
        """Connect and shake hands once; None if it may go better the next time."""
        try:
            with trio.fail_after(_DIAL_LIMIT_S):
                connection = await dial(self._config.endpoint, self._config.patience.outage_s)
        except (OSError, trio.TooSlowError) as error:
            self._trouble = (error.strerror if isinstance(error, OSError) else None) or "it does not answer"
            return None
        tls = self._config.tls
        stream = connection if tls is None else tls.wrap(connection, serving=False)
        welcome = False
        try:
            welcome = await self._shake_hands(stream)
        finally:
            if not welcome:
                await trio.aclose_forcefully(stream)
        return stream if welcome else None

    async def _shake_hands(self, stream: trio.abc.Stream) -> bool:
        config = self._config
        try:
            host = await greet(stream, config.hello, config.secret)
        except HandshakeError as error:
            self._trouble = str(error)
            if error.why in ("left", "silent"):
                return False
            raise JoinError(f"process 0 at {self._where}: {error}") from error
        if host.epoch != config.epoch:  # it refuses those that come late; so this one is early
            theirs, mine = name_epoch(host.epoch), name_epoch(config.epoch)
            self._trouble = f"epoch {theirs} has not ended there, this is epoch {mine}"
            return False
        return True

    async def _listen(self) -> None:
        async with self._link.stream:
            reason = await self._link.read(self._receive)
            if self._inside:
                self._membership.lose(0, reason)
            else:
                self._refuse(f"process 0 at {self._where}: {reason}")

    def _receive(self, message: Message) -> None:
        match message:
            case Refused():
                self._link.cut(message.reason if not self._inside else f"has shut this process out: {message.reason}")
            case Ready():
                self._inside, self._link.process = True, message.process
                self._settled.set()
            case Waiting():
                self._missing, self._went = message.missing, message.went
            case _:
                self._membership.receive(message)
                if isinstance(message, Pong) and not self._inside:
                    self._ask_on()
                elif isinstance(message, Goodbye):  # hang up: member 0 waits for that, so that its last words arrive
                    self._link.cut("has let this process go")

    def _ask_on(self) -> None:
        """Ask for the time until that is known well, and then to be let in."""
        if len(self._clock) < _CLOCK_SAMPLES:
            self._link.send(Ping(sent_ns=perf_counter_ns()))
        elif len(self._clock) == _CLOCK_SAMPLES:
            self._link.send(Join(detail=self._config.detail, process=self._config.process))

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        self._settled.set()

    async def _beat(self) -> None:
        """Give signs of life, which are questions for the time; the first one begins the series of `_ask_on`."""
        with suppress(OutboxFullError):  # what is in the queue is a sign of life too
            while True:
                self._link.send(Ping(sent_ns=perf_counter_ns()))
                await trio.sleep(self._config.patience.beat_s)

    async def _watch(self) -> None:
        def lose(_: int, reason: str) -> None:
            self._link.cut(reason)

        config = self._config
        await watch({0: self._link}, config.patience, report=self._report, lose=lose, name=config.name)

    async def _report_trouble(self) -> None:
        while True:
            await trio.sleep(self._config.progress_s)
            if self._reached:
                return
            self._report(f"process {self._config.member} waits for process 0 at {self._where}: {self._trouble}")
