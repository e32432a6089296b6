"""A rail: one connection to another process, with a reading task, and a task that writes when the system has room.

A caller writes from its own task if the rail is idle, without waiting, and the writing task continues when the system
has room again. So a cancellation never tears a frame.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

import trio
from trio.lowlevel import Abort, RaiseCancelT, Task, current_task, reschedule, wait_task_rescheduled

from transports.efa.departures import Entry
from transports.efa.joining import ProvedSocket
from transports.efa.reading import Reading
from transports.efa.sharing import RailRate, RailState
from transports.efa.tcp import LOST_S, Health, tcp_info, unsent_bytes
from transports.frame import LOCAL_CHUNK_BYTES, DamageError, FrameError, pack
from transports.handshake import is_local
from transports.matching import Chunk, MessageKind, ProtocolError, Send
from transports.matching.protocol import BROKEN_PROTOCOL

if TYPE_CHECKING:
    from transports.efa.efa_link import EfaLink

# Frames that may arrive before an acknowledgement lets the other side release their memory. With 64 the memory left the
# caches: all_reduce of 64 KiB between two processes over TCP took 185 us in place of 160.
_ACKNOWLEDGE_EVERY = 16

# Small frames that are due together leave in one system call, up to about this length.
_BATCH_BYTES = 64 << 10

_ENDED = "the connection ended"

# Why reading pauses: the socket has no more bytes, other tasks should run, or the connection has ended.
_EMPTY, _OTHERS_FIRST, _END = range(3)


class Rail:
    """One connection to another process: a socket, tried first and waited for only if it is not ready.

    Args:
        owner: The link to that process.
        index: Number of the connection.
        connection: The connection.
        keep: Whether frames are kept until they have arrived, because another rail could repeat them.
        staged: Whether payloads pass through a buffer of the rail, instead of leaving from and arriving in the
            caller's memory.

    Attributes:
        socket: The connection.
        ends: The two addresses, for people; empty for Unix sockets.
        idle: Nothing is being written; any caller may write.
        dead: The connection has been closed, for whatever reason.
        written_bytes: Bytes that the system has taken.
        read_bytes: Bytes that have been read.
        farewell: The other side has sent its goodbye.
        acknowledge: An acknowledgement of arrived frames is due.
        bye_due: A goodbye is due, after all other frames.
        bye_sent: The goodbye has been sent.
        leaving: The chunk that is being written.
        reading: Received bytes whose frames have not been handled.
        receive: Reads available bytes; `BlockingIOError` if there are none, 0 at the end.
    """

    def __init__(self, owner: EfaLink, index: int, connection: ProvedSocket, *, keep: bool, staged: bool) -> None:
        self.owner: EfaLink = owner
        self.index: int = index
        self.socket: socket.socket = connection.socket
        self.ends: str = connection.ends
        self.idle: bool = True
        self.dead: bool = False
        self.written_bytes: int = 0
        self.read_bytes: int = 0
        self.farewell: bool = False
        self.acknowledge: bool = False
        self.bye_due: bool = False
        self.bye_sent: bool = False
        self.leaving: Chunk | None = None
        self.receive: Callable[[memoryview], int] = self.socket.recv_into
        self._parts: Sequence[bytes | memoryview] = ()
        self._blocked = False
        self._hint_bytes = 1  # least available bytes at which the system reports readability
        self._takes_hints = connection.socket.family != socket.AF_UNIX  # Unix sockets wake their reader for every piece
        self._keep = keep
        self._kept: deque[Entry] = deque()
        self._released_frames = 0  # frames before the kept ones, which have arrived
        self._staging = memoryview(bytearray(LOCAL_CHUNK_BYTES)) if staged else None
        self._rate = RailRate()
        self._scope = trio.CancelScope()
        self._sleeper: Task | None = None
        self._acknowledged_frames = 0
        self._stalled_calls = 0
        self._health = Health()
        self._seen_written_bytes = 0
        self.reading: Reading = Reading(owner.engine, partial(owner.handle_frame, self), staged=staged)

    # -- frames that leave --------------------------------------------------------------------------------------------

    def keep(self, entry: Entry) -> None:
        """Keep a sent frame until it is acknowledged, if another rail could repeat frames."""
        if self._keep:
            self._kept.append(entry)

    def release_arrived(self, count: int) -> None:
        """Release the first `count` frames of the rail, which have arrived."""
        if not self._keep:
            return
        if not self._released_frames <= count <= self._released_frames + len(self._kept):
            raise FrameError(
                f"peer acknowledges {count} frames, and {self._released_frames + len(self._kept)} were sent; "
                "install the same overlap in every process"
            )
        while self._released_frames < count:
            self.owner.departures.release_entry(self._kept.popleft())
            self._released_frames += 1

    def pop_unarrived(self, count: int) -> deque[Entry]:
        """Return the kept frames after the first `count`, which will never arrive; nothing is kept afterwards."""
        self.release_arrived(count)
        entries, self._kept = self._kept, deque()
        return entries

    def measure_state(self) -> RailState:
        """Return the measured rate of the rail, and the bytes that wait on it."""
        state = self._rate.sample(perf_counter(), self.written_bytes, unsent_bytes(self.socket))
        return state._replace(waiting_bytes=state.waiting_bytes + self.unwritten_bytes)

    def observe(self) -> None:
        """Take a sample of the rate of the rail, if bytes waited on it before."""
        if self._rate.measures:
            self.measure_state()

    @property
    def unwritten_bytes(self) -> int:
        """Bytes of begun frames that the system has not taken."""
        return sum(map(len, self._parts))

    @property
    def owes(self) -> bool:
        """Whether a frame about this rail itself is due: an acknowledgement or the goodbye."""
        return self.acknowledge or self.bye_due

    def pull_frames(self) -> list[bytes | memoryview]:
        """Return the frames to write next: small ones and at most one chunk; empty if nothing is due."""
        if self.bye_sent:
            return []
        small = self._pull_small_frames()
        chunk = None if self.bye_sent or self.owner.defers_to_others(self) else self.owner.departures.next_chunk()
        if chunk is None:
            return [small[0] if len(small) == 1 else b"".join(small)] if small else []
        head, piece = self.chunk_parts(chunk)
        return [b"".join((*small, head)), piece]

    def push(self, send: Send) -> bool:
        """Write a message of one chunk at once, in one frame; False if it must queue."""
        if not self.idle or self.owes or not self.owner.departures.reserve_push(send):
            return False
        self._write_parts(self.chunk_parts(Chunk(send, 0, send.nbytes)))
        if not self.idle:
            self.wake_writer()
        return True

    def chunk_parts(self, chunk: Chunk) -> tuple[bytes, memoryview]:
        """Return header and bytes of a chunk that leaves now; it is kept for a repetition."""
        self.leaving = chunk
        self.keep(chunk)
        piece = self._in_buffer(chunk.view)
        return self.owner.departures.pack_chunk_header(chunk, piece), piece

    def count_written(self) -> None:
        """Count the pulled frames, which the system has taken."""
        chunk, self.leaving = self.leaving, None
        if chunk is None:
            return
        if self._kept and self._kept[-1] is chunk:
            self._kept[-1] = self.owner.departures.entry_to_keep(chunk)
        self.owner.departures.count_written(chunk)

    def _pull_small_frames(self) -> list[bytes]:
        """Return due small frames, up to `_BATCH_BYTES`, and the frames about this rail."""
        frames: list[bytes] = []
        room_bytes = 0 if self.owner.defers_to_others(self, small=True) else _BATCH_BYTES
        while room_bytes > 0 and (frame := self.owner.departures.next_frame()) is not None:
            frames.append(frame)
            self.keep(frame)
            room_bytes -= len(frame)
        return frames + self.own_frames() if self.owes else frames

    def own_frames(self) -> list[bytes]:
        """Return the frames about this rail itself; the goodbye is the last frame of all."""
        frames = []
        if self.acknowledge:
            self.acknowledge = False
            self._acknowledged_frames = self.reading.arrived
            frames.append(pack(MessageKind.ALIVE, self._acknowledged_frames))
            self.keep(None)
        if self.bye_due and not self.owner.departures.due:
            self.bye_due, self.bye_sent = False, True
            frames.append(pack(MessageKind.BYE))
            self.keep(None)
        return frames

    def _in_buffer(self, piece: memoryview) -> memoryview:
        """Return the bytes of a chunk, as a copy in the staging buffer if the rail has one."""
        if self._staging is None:
            return piece
        self._staging[: piece.nbytes] = piece
        return self._staging[: piece.nbytes]

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

    def start_writing(self) -> None:
        """Write due frames until the system takes no more, two chunks at most."""
        self.idle = False  # a small message ends when it is pulled: later messages leave behind it
        self._write_next_parts()
        if not (self.idle or self._blocked or self.dead):
            self._write_next_parts()
        if not self.idle:
            self.wake_writer()

    async def write_more(self) -> None:
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
            self._go_idle()

    def _write_parts(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write the parts of frames, and update whether the rail is idle."""
        self._transmit(parts)
        if self.dead:
            return
        if not self._blocked:
            self.count_written()
        self.idle = not (self._blocked or self.owes or (self.owner.departures.due and not self.bye_sent))
        if self.idle:
            self._go_idle()

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

    def _go_idle(self) -> None:
        """Be idle, because nothing is due; once the goodbye has been written, close the writing direction."""
        self.idle = True
        if self.bye_sent:
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)

    def wake_writer(self) -> None:
        """Wake the writing task if it sleeps."""
        task, self._sleeper = self._sleeper, None
        if task is not None:
            reschedule(task)

    async def _sleep(self) -> None:
        """Suspend the writing task until `wake_writer`."""
        self._sleeper = current_task()
        await wait_task_rescheduled(self._wake_cancelled)

    def _wake_cancelled(self, _: RaiseCancelT) -> Abort:
        self._sleeper = None
        return Abort.SUCCEEDED

    def count_stalled_ticks(self) -> int:
        """Return the number of successive calls between which frames waited and the system took nothing."""
        moved = self.idle or self.written_bytes != self._seen_written_bytes
        self._stalled_calls = 0 if moved else self._stalled_calls + 1
        self._seen_written_bytes = self.written_bytes
        return self._stalled_calls

    def check_health(self) -> str:
        """Die if the other end's kernel has acknowledged nothing for too long; return a message about lost packets."""
        seen = tcp_info(self.socket)
        losses = self._health.record_losses(self.socket, seen)
        if self._health.unacknowledged_s(seen, monotonic()) >= LOST_S:
            self.die(f"nothing sent over it was acknowledged for {LOST_S:g} s")
        return losses

    # -- frames that arrive -------------------------------------------------------------------------------------------

    async def read_more(self) -> bool:
        """Wait for bytes and handle their frames; return False at the end of the connection.

        Lets other tasks run after each chunk.
        """
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

    def count_read(self, count: int) -> None:
        """Count bytes that were read and handled, and let answers leave."""
        self.read_bytes += count
        self.owner.silent_ticks = 0
        if self._keep and self.reading.arrived - self._acknowledged_frames >= _ACKNOWLEDGE_EVERY:
            self.acknowledge = True
        self.owner.flush()

    async def _let_others_run(self) -> None:
        """Handle the remaining frames, and let other tasks run in between."""
        while True:
            await trio.lowlevel.checkpoint()
            if not self._handle_frames():
                return

    def _handle_frames(self) -> bool:
        """Handle remaining frames; True if other tasks should run before the rest."""
        unfinished = self.reading.handle_frames()
        self.owner.flush()
        return unfinished

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read and write until the rail is dead."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write_until_dead)
                    await self.read_until_dead()
                    nursery.cancel_scope.cancel()
        finally:
            self.die("it was given up")

    async def read_until_dead(self) -> None:
        """Read and handle frames, until the connection ends or the peer breaks the protocol."""
        try:
            while await self.read_more():
                pass
            if self.reading.within_chunk:
                raise EOFError
        except (ProtocolError, EOFError, OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._die_from_error(error)
        else:
            self.die(_ENDED)

    def _die_from_error(self, error: Exception) -> None:
        """Close the connection, because reading has failed with an error."""
        if isinstance(error, ProtocolError):
            advice = "" if isinstance(error, FrameError) else f"; {BROKEN_PROTOCOL}"
            if isinstance(error, DamageError):
                advice = "; check the memory of this host" if is_local(self.socket) else "; check the network"
            self.die(f"a bad frame: {error}{advice}", evident=True)
        else:
            self.die("the connection ended within a frame" if isinstance(error, EOFError) else describe_error(error))

    async def _write_until_dead(self) -> None:
        """Write due frames, and sleep while nothing is due; an error closes the rail."""
        try:
            while True:
                await (self._sleep() if self.idle else self.write_more())
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.die(describe_error(error))

    def die(self, reason: str, *, evident: bool = False) -> None:
        """Close the connection at once; other rails repeat frames that have not arrived. Twice is harmless."""
        if self.dead:
            return
        self.dead = self.reading.stopped = True
        self.idle, self._parts = False, ()
        self.cut()
        self._scope.cancel()
        self.owner.rail_lost(self, reason, evident=evident)

    def cut(self) -> None:
        """Close the connection without waiting, and wake the tasks that wait for it."""
        trio.lowlevel.notify_closing(self.socket)
        self.socket.close()


class StreamRail(Rail):
    """A rail over an encrypted stream: everything is copied, and only the writing task writes.

    Args:
        owner: The link.
        index: Number of the rail.
        connection: Its connection.
        keep: Whether frames are remembered until they are acknowledged.
        staged: Whether payloads pass through a buffer of the rail.
    """

    def __init__(self, owner: EfaLink, index: int, connection: ProvedSocket, *, keep: bool, staged: bool) -> None:
        super().__init__(owner, index, connection, keep=keep, staged=staged)
        assert connection.encrypted is not None, "a bare socket is faster as a SocketRail"
        self._stream = connection.encrypted

    def put(self, head: bytes, payload: memoryview) -> None:
        """Queue a small message for the writing task."""
        self.owner.departures.add(b"".join((head, payload)))
        self.start_writing()

    def push(self, send: Send) -> bool:
        """Return False: only the writing task writes."""
        return False

    def catch_up(self) -> bool:
        """Return False: only the tasks read and write."""
        return False

    def start_writing(self) -> None:
        """Let the writing task write due frames."""
        self.idle = False
        self.wake_writer()

    async def write_more(self) -> None:
        """Write due frames; without any, the rail is idle."""
        parts = self.pull_frames()
        if parts:
            await self._stream.send_all(b"".join(parts))
            self.written_bytes += sum(len(part) for part in parts)
            self.count_written()
            return
        self._go_idle()
        await trio.lowlevel.checkpoint()

    async def read_more(self) -> bool:
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


def describe_error(error: BaseException) -> str:
    """Return a short text for an error of a connection; one text for the reader and the writer of a closed one."""
    cause = error.__cause__ or error
    if isinstance(cause, (BrokenPipeError, ConnectionResetError)):  # the reader sees the same end
        return _ENDED
    strerror = getattr(cause, "strerror", None)
    return str(strerror or cause or type(cause).__name__)


def _drop_bytes(parts: Sequence[bytes | memoryview], count: int) -> Sequence[bytes | memoryview]:
    rest: list[bytes | memoryview] = []
    for part in parts:
        if count < len(part):
            rest.append(memoryview(part)[count:])
        count = max(0, count - len(part))
    return rest
