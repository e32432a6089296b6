"""Control link: one connection between a member and the coordinator, with a bounded queue of messages to send.

`MemberLinks` performs the actions of a machine of `members` on its connections.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

import trio

from transports.tcp import tcp_info

from ..kernel_facts import ProcessState, process_state
from .clock import CoordinatorClock
from .identity import JoinError, RendezvousConfig
from .members import Action, Complete, CutConnection, GiveUp, PrintLine, SendControl, Silence
from .wire import FrameReader, Join, Message, MessageError, Ready, broken_protocol_reason, encode_frame

#: Most bytes of one `receive_some`, and about the size of one `send_all`; a frame fits.
_READ_BYTES = 64 * 1024
#: A reachable kernel has acknowledged bytes within this time: keep-alive asks it every second (`sockets`).
_ANSWERED_LIMIT_S = 5.0
_ENDED = "its connection ended without a goodbye"


class ControlLink:
    """A control connection. `send` never waits; its owner runs `write` and `read` as tasks.

    Args:
        stream: The connection; the owner of the link closes it.
        limit_bytes: Most bytes that may wait to be sent. If the peer does not read, the link is cut at this limit, so
            that this process does not run out of memory.

    Attributes:
        last_received_s: Time of the last received bytes, on Trio's clock.
        process: Identity of the process at the other end, see `kernel_facts.process_identity`; "" until it has sent it.
    """

    def __init__(self, stream: trio.abc.Stream, *, limit_bytes: int) -> None:
        self.stream = stream
        self.last_received_s: float = trio.current_time()
        self.process: str = ""
        self._limit_bytes = limit_bytes
        self._outbox: deque[bytes] = deque()
        self._unsent_bytes = 0  # bytes that are queued, or on their way into the socket
        self._has_messages = trio.Event()
        self._all_sent = trio.Event()
        self._reading = trio.CancelScope()
        self._ended = trio.Event()  # set when `read` has ended
        self._end_reason: str | None = None
        self._sends_nothing = False  # no further message can be sent

    @property
    def over(self) -> bool:
        """Whether no further message will be received: the link was cut, has broken or has ended."""
        return self._end_reason is not None

    def send(self, message: Message) -> None:
        """Queue a message. If too many bytes wait, cut the link instead; after a hang-up, do nothing.

        Raises:
            MessageError: The message cannot be encoded.
        """
        frame = encode_frame(message)
        if self._sends_nothing:
            return
        if self._unsent_bytes + len(frame) > self._limit_bytes:
            waiting = f"{self._unsent_bytes} bytes wait to be sent, the limit is {self._limit_bytes}"
            self.end_reading(f"it does not read what it is sent: {waiting}")
            return
        self._outbox.append(frame)
        self._unsent_bytes += len(frame)
        self._has_messages.set()

    def end_reading(self, reason: str) -> None:
        """Let `read` end and return `reason`, unless another reason came first. Queued messages are still sent."""
        if self._end_reason is None:
            self._end_reason = reason
            self._reading.cancel()

    async def flush(self) -> None:
        """Wait until all queued messages have been passed to the system, or the connection has broken."""
        while self._unsent_bytes:
            await self._all_sent.wait()
        await trio.lowlevel.checkpoint()

    async def hang_up(self) -> None:
        """Wait until the other side has received all queued messages, and has hung up.

        Closing a socket with unread bytes discards the bytes on their way out, so this side reads until then.
        """
        self._sends_nothing = True
        await self.flush()
        if isinstance(self.stream, trio.SocketStream) and not self._ended.is_set():
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self.stream.send_eof()
            await self._ended.wait()

    async def write(self) -> None:
        """Send queued messages, until the connection ends."""
        try:
            while True:
                while self._outbox:
                    await self._send_batch()
                # no message is missed: no other task runs between the last look at the queue and this line
                self._has_messages = trio.Event()
                await self._has_messages.wait()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._end_after_error(error)

    async def read(self, handle: Callable[[Message], None]) -> str:
        """Pass each received message to `handle`, until the connection ends or is cut.

        Args:
            handle: Called with each message, in their order.

        Returns:
            Why it ended, as the end of a sentence about the peer: "its connection ended without a goodbye".
        """
        reader = FrameReader()
        with self._reading:
            try:
                while data := await self.stream.receive_some(_READ_BYTES):
                    self.last_received_s = trio.current_time()
                    for message in reader.feed(data):
                        if isinstance(message, Join | Ready):
                            self.process = message.process
                        handle(message)
                self._sends_nothing = True
                self.end_reading(_ENDED)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                self._end_after_error(error)
            except MessageError as error:
                self.end_reading(broken_protocol_reason(error))
            finally:
                self._ended.set()
        await trio.lowlevel.checkpoint_if_cancelled()
        assert self._end_reason is not None, "reading ends only by a cut, or by the caller's cancellation"
        return self._end_reason

    def answering_host(self) -> str:
        """Return the address of the peer's host if that host's kernel has acknowledged bytes lately; otherwise ""."""
        stream = self.stream.transport_stream if isinstance(self.stream, trio.SSLStream) else self.stream
        if isinstance(stream, trio.SocketStream):
            seen = tcp_info(stream.socket)
            if seen is not None and seen.since_ack_s <= _ANSWERED_LIMIT_S:
                with suppress(OSError):  # the connection is closed by now
                    return str(stream.socket.getpeername()[0])
        return ""

    def _end_after_error(self, error: Exception) -> None:
        """End the link because its connection broke: drop unsent messages, and notify the tasks that wait for them."""
        self._sends_nothing = True
        self._outbox.clear()
        self._unsent_bytes = 0
        cause = error.__cause__ or error
        # the kernel of a process that has ended resets a connection with bytes that the process has not read
        self.end_reading(_ENDED if isinstance(cause, ConnectionResetError) else f"its connection broke ({cause})")
        self._all_sent.set()

    async def _send_batch(self) -> None:
        """Send the first queued messages, up to about `_READ_BYTES`, in one write."""
        data = bytearray()
        while self._outbox and len(data) < _READ_BYTES:
            data += self._outbox.popleft()
        await self.stream.send_all(data)
        if self._unsent_bytes:  # otherwise the connection has broken in the meantime
            self._unsent_bytes -= len(data)
        if not self._unsent_bytes:
            self._all_sent.set()
            self._all_sent = trio.Event()


class MemberLinks:
    """The control links of a member, and the actions on them.

    Member 0 has a link to each other member; each other member has one link, to member 0.

    Attributes:
        links: Links to connected members, by member.
        settled: Set once all members have joined, or it is clear that the world does not start.
        clock: Samples of member 0's clock; None on member 0, and before the world starts.

    Args:
        config: Configuration of this member.
        deliver: Called with each message to this member.
        report: Prints a line for the user.
    """

    def __init__(
        self, config: RendezvousConfig, deliver: Callable[[Message], None], report: Callable[[str], None]
    ) -> None:
        self.links: dict[int, ControlLink] = {}
        self.settled: trio.Event = trio.Event()
        self.clock: CoordinatorClock | None = None
        self._config, self._deliver, self._report = config, deliver, report
        self._failure: GiveUp | None = None

    def perform_actions(self, actions: Iterable[Action], link: ControlLink | None = None) -> None:
        """Perform actions of `Members`.

        Args:
            actions: The actions, in their order.
            link: Link that `CutConnection` cuts, for a new connection that is not in `links` yet; None: that of the
                member.
        """
        for action in actions:
            match action:
                # to this member itself: there is no connection
                case SendControl(self._config.member, message):
                    self._deliver(message)
                case SendControl(member, message):
                    self.links[member].send(message)
                case CutConnection(member, reason):
                    (link or self.links[member]).end_reading(reason)
                case PrintLine(line):
                    self._report(line)
                case GiveUp():
                    self._failure = action
                    self.settled.set()
                case Complete():
                    self.settled.set()

    async def hang_up(self) -> None:
        """Wait until the other ends have received all messages that were queued for them, and have hung up."""
        async with trio.open_nursery() as nursery:
            for link in self.links.values():
                nursery.start_soon(link.hang_up)

    def check_world_starts(self) -> None:
        """Raise `JoinError` if the world does not start."""
        if self._failure is not None:
            raise JoinError(self._failure.reason, missing=self._failure.missing)

    async def watch_silences(self, judge: Callable[[dict[int, Silence]], Iterable[Action]]) -> None:
        """Look for silent members at each beat (`SilenceLimits.beat_s`), and perform the actions of `judge`; for ever.

        Time in which this process itself did not run (stopped, swapped out, its loop blocked) does not count as silence
        of others, because their messages wait in the sockets.

        Args:
            judge: Called with the silence of each silent member, by member; returns actions.
        """
        limits = self._config.patience
        while True:
            due_s = trio.current_time() + limits.beat_s
            await trio.sleep_until(due_s)
            now_s = trio.current_time()
            silences: dict[int, Silence] = {}
            for member, link in self.links.items():
                # this beat came late by `now_s - due_s`, and that time is not counted as silence
                link.last_received_s += now_s - due_s
                silent_s = now_s - link.last_received_s
                if not link.over and silent_s >= limits.suspect_s:
                    state = process_state(link.process)
                    host = link.answering_host() if state is ProcessState.ELSEWHERE else ""
                    silences[member] = Silence(silent_s=silent_s, state=state, host=host)
            self.perform_actions(judge(silences))
