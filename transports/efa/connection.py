"""The two kinds of rail: over a bare socket, and over an encrypted stream."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import trio

from transports.efa.joining import ProvedSocket
from transports.efa.rail import Rail, describe_error
from transports.frame import LOCAL_CHUNK_BYTES
from transports.matching import Chunk, ProtocolError, Send

if TYPE_CHECKING:
    from transports.efa.efa_link import EfaLink

# Why reading pauses: the socket has no more bytes, other tasks should run, or the connection has ended.
_EMPTY, _OTHERS_FIRST, _END = range(3)


class SocketRail(Rail):
    """A rail over a non-blocking socket, tried first and waited for only if it is not ready.

    Attributes:
        socket: The socket.
        receive: Reads available bytes; `BlockingIOError` if there are none, 0 at the end.
    """

    idle: bool
    written_bytes: int

    def __init__(self, owner: EfaLink, index: int, connection: ProvedSocket, *, keep: bool, staged: bool) -> None:
        super().__init__(owner, index, connection, keep=keep, staged=staged)
        self.receive: Callable[[memoryview], int] = self.socket.recv_into
        self._blocked = False
        self._hint_bytes = 1  # least available bytes at which the system reports readability
        self._takes_hints = connection.socket.family != socket.AF_UNIX  # Unix sockets wake their reader for every piece

    def put(self, head: bytes, payload: memoryview) -> None:
        """Write a small message at once; its buffer may change after the call. The rail is idle."""
        if self._keep:
            frame = b"".join((head, payload))
            self.keep(frame)
            self._transmit((frame,))
        else:
            self._transmit((head, payload))  # to join 64 KiB first takes 3 us
        if self._blocked and not self.dead:
            self._parts, self.idle = tuple(map(bytes, self._parts)), False
            self.wake_writer()

    def push(self, send: Send) -> bool:
        """Write a message of one chunk at once, in one frame; False if it must queue."""
        if not self.idle or self.owes or not self.owner.departures.reserve_push(send):
            return False
        self._write_parts(self.chunk_parts(Chunk(send, 0, send.nbytes)))
        if not self.idle:
            self.wake_writer()
        return True

    def start_writing(self) -> None:
        """Write due frames until the system takes no more, two chunks at most."""
        self.idle = False  # a small message ends when it is pulled: later messages leave behind it
        self._write_next_parts()
        if not (self.idle or self._blocked or self.dead):
            self._write_next_parts()
        if not self.idle:
            self.wake_writer()

    async def write_on(self) -> None:
        """Wait until the system takes more bytes, or let other tasks run after it took a chunk; then write more."""
        if self._blocked and not self.dead:
            await trio.lowlevel.wait_writable(self.socket)
        else:
            await trio.lowlevel.checkpoint()
        if self.dead:
            raise trio.ClosedResourceError
        self._write_next_parts()
        self.owner.flush()  # other rails take the frames that this one leaves

    def _write_next_parts(self) -> None:
        """Write unfinished parts, or the next due frames; the rail is idle if there are none."""
        parts = self._parts or self.pull_frames()
        if parts:
            self._write_parts(parts)
        else:
            self._rest()

    def _write_parts(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write the parts of frames, and update whether the rail is idle."""
        self._transmit(parts)
        if self.dead:
            return
        if not self._blocked:
            self.count_written()
        self.idle = not (self._blocked or self.owes or (self.owner.departures.due and not self.bye_sent))
        if self.idle:
            self._rest()

    def _transmit(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write as many bytes of the parts as the system takes; keep the rest for later."""
        try:
            count = self.socket.send(parts[0]) if len(parts) == 1 else self.socket.sendmsg(parts)
        except BlockingIOError:
            count = 0
        except OSError as error:
            self.die(describe_error(error))
            return
        self.written_bytes += count
        self._blocked = count < sum(map(len, parts))
        self._parts = _drop_bytes(parts, count) if self._blocked else ()

    async def read_on(self) -> bool:
        """Wait for bytes and handle their frames; let other tasks run after each chunk."""
        if self.dead:
            raise trio.ClosedResourceError
        if self._takes_hints:
            self._hint(self.reading.hint_bytes)
        await trio.lowlevel.wait_readable(self.socket)
        while (stop := self._read_available()) == _OTHERS_FIRST:
            await self._let_others_run()
        return stop != _END

    def catch_up(self) -> bool:
        """Write and read without waiting; never while a frame is being handled."""
        if self.dead or self.reading.behind:
            return False
        before = self.read_bytes + self.written_bytes
        # Several messages are left to the writing task, so that an urgent one can come in between.
        if not (self.idle or self.owner.departures.contended):
            self._write_next_parts()
        try:
            self._read_available()  # the reading task finds the rest in the socket
            while self.reading.behind:  # frames that were read here must be handled before later ones
                self._handle_frames()
            if self._hint_bytes > 1:  # else the reading task might wait for more bytes than the peer will send
                self._hint(self.reading.hint_bytes)
        except (ProtocolError, OSError, trio.ClosedResourceError) as error:
            self._die_from_error(error)
        return self.read_bytes + self.written_bytes != before

    def _read_available(self) -> int:
        """Read available bytes, a chunk at most, and handle their frames."""
        reading, read_bytes, stop = self.reading, 0, _EMPTY
        while True:
            room = reading.room()
            try:
                count = self.receive(room)
            except BlockingIOError:
                break
            if not count:
                stop = _END
                break
            read_bytes += count
            full = count == room.nbytes
            del room  # the owner of full memory may resize it
            if reading.handle_received(count) or read_bytes >= LOCAL_CHUNK_BYTES:
                stop = _OTHERS_FIRST
                break
            if not (full and (reading.within_chunk or self.owner.expects_frames)):
                break
        if read_bytes:
            self.count_read(read_bytes)
        return stop

    def _hint(self, nbytes: int) -> None:
        """Let the system report readability from this many bytes on."""
        if nbytes != self._hint_bytes:
            self._hint_bytes = nbytes
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)


class StreamRail(Rail):
    """A rail over an encrypted stream: everything is copied, and only the writing task writes."""

    idle: bool
    written_bytes: int

    def __init__(self, owner: EfaLink, index: int, connection: ProvedSocket, *, keep: bool, staged: bool) -> None:
        super().__init__(owner, index, connection, keep=keep, staged=staged)
        assert connection.encrypted is not None, "a bare socket is faster as a SocketRail"
        self._stream = connection.encrypted

    def put(self, head: bytes, payload: memoryview) -> None:
        """Queue a small message for the writing task."""
        self.owner.departures.add(b"".join((head, payload)))
        self.start_writing()

    def start_writing(self) -> None:
        """Let the writing task write due frames."""
        self.idle = False
        self.wake_writer()

    async def write_on(self) -> None:
        """Write due frames; without any, the rail is idle."""
        parts = self.pull_frames()
        if parts:
            await self._stream.send_all(b"".join(parts))
            self.written_bytes += sum(len(part) for part in parts)
            self.count_written()
            return
        self._rest()
        await trio.lowlevel.checkpoint()

    async def read_on(self) -> bool:
        """Wait for bytes and handle their frames."""
        room = self.reading.room()
        data = await self._stream.receive_some(room.nbytes)
        room[: len(data)] = data
        del room  # the owner of full memory may resize it
        if data:
            unfinished = self.reading.handle_received(len(data))
            self.count_read(len(data))
            if unfinished:
                await self._let_others_run()
        return bool(data)


def _drop_bytes(parts: Sequence[bytes | memoryview], count: int) -> Sequence[bytes | memoryview]:
    """Return `parts` without their first `count` bytes."""
    rest: list[bytes | memoryview] = []
    for part in parts:
        if count < len(part):
            rest.append(memoryview(part)[count:])
        count = max(0, count - len(part))
    return rest
