"""One control connection: messages out through a bounded queue, messages in as they come, and its silence watched."""

from __future__ import annotations

import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import trio

from ..errors import OverlapError
from .frames import FrameReader, encode
from .messages import Message, MessageError
from .silence import ProcessState, state_of

#: How long an outage of the network may last, unless a run says otherwise: who cannot be reached is named soon.
OUTAGE_S = 4.0
#: Of one `receive_some`, and about that of one `send_all`; a frame fits.
_BITE_BYTES = 64 * 1024
#: Bulk waits while more than this is queued, so that a short message never queues behind more than that.
_ROOM_BYTES = 256 * 1024
#: A kernel that can be reached has acknowledged something within this: it is asked every second (`rendezvous.sockets`).
_ANSWERED_LIMIT_MS = 5000
#: Where Linux tells how long ago that was, a number of 32 bits in milliseconds: `tcpi_last_ack_recv` of tcp_info.
_LAST_ACKNOWLEDGED = struct.Struct("@56xI")


class OutboxFullError(OverlapError):
    """More would wait to be sent than may: the other side does not read, or this side never lets the loop run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a member may be silent."""

    beat_s: float = 0.5  # Every member gives a sign of life this often
    suspect_s: float = 5.0  # A silence this long is reported, once
    silence_s: float = 15.0  # A silence this long is a loss
    answering_s: float = 300.0  # The same of a process on another host that answers; as long as a deadlock may last
    # A host of which nothing arrives for so long, not even that the kernel has heard, is lost.
    outage_s: float = OUTAGE_S


class ControlLink:
    """A control connection to another member. Sending never waits; `write` and `read` run as tasks.

    Attributes:
        stream: The connection; whoever made the link closes it.
        heard_s: When something was last heard, in Trio's time.
        suspected: Whether its present silence has been reported.
        process: Names the process at the other end; empty as long as that is not known.
    """

    def __init__(self, stream: trio.abc.Stream, *, limit_bytes: int) -> None:
        self.stream = stream
        self.heard_s = trio.current_time()
        self.suspected = False
        self.process = ""
        self._limit_bytes = limit_bytes
        self._outbox: deque[bytes] = deque()
        self._unsent_bytes = 0  # queued, or on its way into the socket
        self._filled = trio.Event()
        self._emptier = trio.lowlevel.ParkingLot()
        self._reading = trio.CancelScope()
        self._ended = trio.Event()
        self._over: str | None = None
        self._mute = False  # nothing more can be sent

    @property
    def over(self) -> bool:
        """Whether nothing more will be heard: it was cut, has broken or has ended."""
        return self._over is not None

    def send(self, message: Message) -> None:
        """Queue a message; if the other side has hung up, it goes nowhere.

        Raises:
            OutboxFullError: Too much is queued.
            MessageError: It cannot be written.
        """
        frame = encode(message)
        if self._mute:
            return
        if self._unsent_bytes + len(frame) > self._limit_bytes:
            raise OutboxFullError(f"{self._unsent_bytes} bytes wait to be sent, the limit is {self._limit_bytes}")
        self._outbox.append(frame)
        self._unsent_bytes += len(frame)
        self._filled.set()

    def cut(self, reason: str) -> None:
        """Listen no more: `read` returns this reason. What is queued still leaves."""
        if self._over is None:
            self._over = reason
            self._reading.cancel()
            self._emptier.unpark_all()

    async def room(self) -> None:
        """Wait until little is queued, or the connection is over."""
        while self._unsent_bytes > _ROOM_BYTES and self._over is None:
            await self._emptier.park()
        await trio.lowlevel.checkpoint()

    async def flush(self) -> None:
        """Wait until everything queued has been handed to the system."""
        while self._unsent_bytes:
            await self._emptier.park()
        await trio.lowlevel.checkpoint()

    async def hang_up(self) -> None:
        """Wait until the other side has everything that was queued, and has hung up.

        Closing a socket that holds unread bytes throws away those on their way out; so this side reads on until then.
        """
        self._mute = True
        await self.flush()
        if isinstance(self.stream, trio.SocketStream) and not self._ended.is_set():
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self.stream.send_eof()
            await self._ended.wait()

    async def write(self) -> None:
        """Send what is queued, for as long as the connection lasts."""
        try:
            while True:
                while self._outbox:
                    await self._send_some()
                self._filled = trio.Event()
                await self._filled.wait()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._break(error)

    async def read(self, handle: Callable[[Message], None]) -> str:
        """Pass on each message that comes, until the connection is over.

        Args:
            handle: What to do with a message; a `MessageError` that it raises ends the connection.

        Returns:
            Why it is over.
        """
        reader = FrameReader()
        with self._reading:
            try:
                while data := await self.stream.receive_some(_BITE_BYTES):
                    self.heard_s, self.suspected = trio.current_time(), False
                    for message in reader.feed(data):
                        handle(message)
                self._mute = True
                self.cut("its connection ended without a goodbye")
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                self._break(error)
            except MessageError as error:
                self.cut(f"it sent {error}")
            finally:
                self._ended.set()
        await trio.lowlevel.checkpoint_if_cancelled()
        assert self._over is not None, "reading ends only by a cut, or by the caller's cancellation"
        return self._over

    def answering(self) -> str:
        """Return the address of the host at the other end if its kernel acknowledges what it gets; else nothing."""
        stream = self.stream.transport_stream if isinstance(self.stream, trio.SSLStream) else self.stream
        if sys.platform == "linux" and isinstance(stream, trio.SocketStream):
            with suppress(OSError, struct.error):  # it is closed by now
                told = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACKNOWLEDGED.size)
                if _LAST_ACKNOWLEDGED.unpack(told)[0] <= _ANSWERED_LIMIT_MS:
                    return str(stream.socket.getpeername()[0])
        return ""

    def _break(self, error: Exception) -> None:
        self._mute = True
        self._outbox.clear()
        self._unsent_bytes = 0
        self.cut(f"its connection broke ({error.__cause__ or error})")
        self._emptier.unpark_all()

    async def _send_some(self) -> None:
        bite = bytearray()
        while self._outbox and len(bite) < _BITE_BYTES:
            bite += self._outbox.popleft()
        await self.stream.send_all(bite)
        self._unsent_bytes -= len(bite)
        self._emptier.unpark_all()


async def watch(
    links: Mapping[int, ControlLink],
    patience: Patience,
    *,
    report: Callable[[str], None],
    lose: Callable[[int, str], None],
    name: Callable[[int], str] = "process {}".format,
) -> None:
    """Report members that are silent, and lose those that stay so, unless their kernel says that they run.

    Of another host's processes it cannot be asked; one whose host answers, while it is silent itself, has longer.

    Time in which this process itself did not run (stopped, swapped out, its loop blocked) is not counted as a silence
    of others: what they said then waits in the sockets.

    Args:
        links: By member; read anew on every beat.
        patience: How long is too long.
        report: Gets one line for each silence that is suspect.
        lose: Gets the member, and what to call the reason.
        name: Names a member to the user.
    """
    while True:
        due_s = trio.current_time() + patience.beat_s
        await trio.sleep_until(due_s)
        now_s = trio.current_time()
        for member, link in list(links.items()):
            link.heard_s += now_s - due_s
            silent_s = now_s - link.heard_s
            if link.over or silent_s < patience.suspect_s:
                continue
            state = state_of(link.process)
            host = link.answering() if state is ProcessState.ELSEWHERE else ""
            if not link.suspected:
                link.suspected = True
                suspicion = _suspicion(state, host, patience)
                report(f"{name(member)} has been silent for {patience.suspect_s:g} s: {suspicion}")
            limit_s = patience.answering_s if host else patience.silence_s
            if silent_s >= limit_s and state is not ProcessState.RUNS:
                known = f"; its host {host} answers" if host else _KNOWN.get(state, "")
                lose(member, f"no sign of life for {limit_s:g} s{known}")


_KNOWN = {ProcessState.STOPPED: "; it is stopped", ProcessState.GONE: "; it has ended"}


def _suspicion(state: ProcessState, host: str, patience: Patience) -> str:
    if state is ProcessState.RUNS:
        return "it runs, but a call in it keeps the GIL; it is waited for"
    if host:
        why = f"its host {host} answers: it is stopped, or a call in it keeps the GIL"
        return f"{why}; it is waited for, and counts as lost after {patience.answering_s:g} s"
    lost = f"it counts as lost after {patience.silence_s:g} s"
    return f"{_SUSPECTED[state]}; {lost}"


_SUSPECTED = {
    ProcessState.STOPPED: "it is stopped",
    ProcessState.GONE: "it has ended, and something else keeps its connection",
    ProcessState.ELSEWHERE: "it may be stopped, or in a call that keeps the GIL, or its host is gone",
    ProcessState.UNKNOWN: "it may be stopped, or in a call that keeps the GIL",
}
