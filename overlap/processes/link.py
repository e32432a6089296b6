"""Control link: one connection between a member and the coordinator, with a bounded queue of messages to send."""

from __future__ import annotations

import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import trio

from transports.matching.protocol import BROKEN_PROTOCOL

from .messages import FrameReader, Message, MessageError, encode

#: Of one `receive_some`, and about that of one `send_all`; a frame fits.
_BITE_BYTES = 64 * 1024
#: A kernel that can be reached has acknowledged something within this: it is asked every second (`sockets`).
_ANSWERED_LIMIT_MS = 5000
#: Where Linux tells how long ago that was, a number of 32 bits in milliseconds: `tcpi_last_ack_recv` of tcp_info.
_LAST_ACKNOWLEDGED = struct.Struct("@56xI")


class ControlLink:
    """A control connection. Sending never waits; `write` and `read` run as tasks.

    Args:
        stream: The connection; its owner closes it.
        limit_bytes: How much may wait to be sent. A peer that does not read loses the link, rather than this process
            its memory.

    Attributes:
        heard_s: When something was last heard, in Trio's time.
        suspected: Whether its present silence has been reported.
        process: Names the process at the other end; empty as long as that is not known.
    """

    def __init__(self, stream: trio.abc.Stream, *, limit_bytes: int) -> None:
        self.stream = stream
        self.heard_s: float = trio.current_time()
        self.suspected: bool = False
        self.process: str = ""
        self._limit_bytes = limit_bytes
        self._outbox: deque[bytes] = deque()
        self._unsent_bytes = 0  # bytes that are queued, or on their way into the socket
        self._filled = trio.Event()
        self._emptied = trio.Event()
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
            MessageError: It cannot be written.
        """
        frame = encode(message)
        if self._mute:
            return
        if self._unsent_bytes + len(frame) > self._limit_bytes:
            waiting = f"{self._unsent_bytes} bytes wait to be sent, the limit is {self._limit_bytes}"
            self.cut(f"it does not read what it is sent: {waiting}")
            return
        self._outbox.append(frame)
        self._unsent_bytes += len(frame)
        self._filled.set()

    def cut(self, reason: str) -> None:
        """Listen no more: `read` returns this reason. What is queued still leaves."""
        if self._over is None:
            self._over = reason
            self._reading.cancel()

    async def flush(self) -> None:
        """Wait until everything queued has been handed to the system."""
        while self._unsent_bytes:
            await self._emptied.wait()
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
            handle: Takes a message; a `MessageError` that it raises ends the connection.

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
                self.cut(f"it sent {error}; {BROKEN_PROTOCOL}")
            finally:
                self._ended.set()
        await trio.lowlevel.checkpoint_if_cancelled()
        assert self._over is not None, "reading ends only by a cut, or by the caller's cancellation"
        return self._over

    def answering(self) -> str:
        """Return the address of the host at the other end if its kernel acknowledges what it gets; else nothing."""
        stream = self.stream.transport_stream if isinstance(self.stream, trio.SSLStream) else self.stream
        if sys.platform == "linux" and isinstance(stream, trio.SocketStream):
            with suppress(OSError, struct.error):  # the connection is closed by now
                told = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACKNOWLEDGED.size)
                if _LAST_ACKNOWLEDGED.unpack(told)[0] <= _ANSWERED_LIMIT_MS:
                    return str(stream.socket.getpeername()[0])
        return ""

    def _break(self, error: Exception) -> None:
        self._mute = True
        self._outbox.clear()
        self._unsent_bytes = 0
        self.cut(f"its connection broke ({error.__cause__ or error})")
        self._emptied.set()

    async def _send_some(self) -> None:
        bite = bytearray()
        while self._outbox and len(bite) < _BITE_BYTES:
            bite += self._outbox.popleft()
        await self.stream.send_all(bite)
        if self._unsent_bytes:  # otherwise the connection has broken in the meantime
            self._unsent_bytes -= len(bite)
        if not self._unsent_bytes:
            self._emptied.set()
            self._emptied = trio.Event()
