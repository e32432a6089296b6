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
from trio.lowlevel import ParkingLot

from transports.address import RAILS_LIMIT
from transports.efa.departures import Entry
from transports.efa.joining import ProvedSocket
from transports.efa.reading import ReadBuffer
from transports.efa.sharing import RailRate, RailState
from transports.frame import LOCAL_CHUNK_BYTES, SAME_OVERLAP, DamageError, FrameError, pack
from transports.handshake import is_peer_local
from transports.matching import Chunk, MessageKind, ProtocolError, Send
from transports.matching.protocol import BROKEN_PROTOCOL
from transports.tcp import LOST_S, Health, tcp_info, unsent_bytes

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
    """One connection to another process, over a socket. A task waits for the socket only if a first try finds it busy.

    Args:
        owner: The link to that process.
        index: Number of the rail in the link, see `EfaLink`.
        connection: The connection.
        keep: Whether frames are kept until they have arrived, because another rail could repeat them.
        staged: Whether payloads are copied through a buffer of the rail. False: they leave from, and arrive in, the
            caller's memory.

    Attributes:
        slot: `index` modulo `RAILS_LIMIT`; a rail and its replacements have the same slot.
        socket: The socket of the connection.
        ends: The two addresses, for messages to people; empty for Unix sockets.
        idle: Whether nothing is being written, so that any caller may write.
        dead: Whether this side has closed the connection, for whatever reason.
        written_bytes: Bytes that the system has taken.
        read_bytes: Bytes that have been read.
        farewell: Whether the other side has sent its goodbye.
        acknowledge: Whether an acknowledgement of arrived frames is due.
        bye_due: Whether a goodbye is due, after all other frames.
        bye_sent: Whether the goodbye has been sent.
        leaving: The chunk that is being written, or None.
        reading: Received bytes whose frames have not been handled.
        rate: Measures the rate of the rail.
        receive: Reads available bytes into a buffer and returns their number, 0 at the end of the connection. Raises
            `BlockingIOError` if none are available.
    """

    def __init__(self, owner: EfaLink, index: int, connection: ProvedSocket, *, keep: bool, staged: bool) -> None:
        self.owner: EfaLink = owner
        self.index: int = index
        self.slot: int = index % RAILS_LIMIT
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
        self._parts: Sequence[bytes | memoryview] = ()  # bytes of begun frames that the system has not taken
        self._blocked = False  # whether the system took less than it was given
        self._least_wake_bytes = 1  # available bytes from which on the system reports readability
        self._wakes_late = connection.socket.family != socket.AF_UNIX  # Unix sockets wake their reader for every piece
        self._keeps_frames = keep
        self._unacknowledged_entries: deque[Entry] = deque()
        self._released_frames = 0  # number of sent frames before those in `_unacknowledged_entries`: they have arrived
        self._staging = memoryview(bytearray(LOCAL_CHUNK_BYTES)) if staged else None
        self.rate: RailRate = RailRate()
        self._scope = trio.CancelScope()
        self._sleep = ParkingLot()  # where the writing task sleeps while nothing is due
        self._acknowledged_frames = 0  # number of arrived frames that this side has acknowledged
        self._stalled_calls = 0
        self._health = Health()
        self._seen_written_bytes = 0
        self.reading: ReadBuffer = ReadBuffer(owner.engine, partial(owner.handle_frame, self), staged=staged)

    # -- frames that leave --------------------------------------------------------------------------------------------

    def keep_entry(self, entry: Entry) -> None:
        """Keep a sent frame until it is acknowledged, if another rail could repeat it.

        Args:
            entry: The frame. None stands for a frame that is never repeated; it is kept only for the count of frames.
        """
        if self._keeps_frames:
            self._unacknowledged_entries.append(entry)

    def release_arrived_frames(self, count: int) -> None:
        """Release the kept frames among the first `count` of the rail, because these have arrived.

        Raises:
            FrameError: Fewer frames were sent, or more have been acknowledged before.
        """
        if not self._keeps_frames:
            return
        sent_frames = self._released_frames + len(self._unacknowledged_entries)
        if not self._released_frames <= count <= sent_frames:
            raise FrameError(f"peer acknowledges {count} frames, and {sent_frames} were sent; {SAME_OVERLAP}")
        while self._released_frames < count:
            self.owner.departures.release_entry(self._unacknowledged_entries.popleft())
            self._released_frames += 1

    def pop_missing_frames(self, count: int) -> deque[Entry]:
        """Return the frames after the first `count` of the rail, which never arrive; nothing is kept afterwards."""
        self.release_arrived_frames(count)
        entries, self._unacknowledged_entries = self._unacknowledged_entries, deque()
        return entries

    def measure_state(self) -> RailState:
        """Return the measured rate of the rail, and the bytes that wait on it."""
        state = self.rate.add_sample(perf_counter(), self.written_bytes, unsent_bytes(self.socket))
        return state._replace(waiting_bytes=state.waiting_bytes + self.unwritten_bytes)

    @property
    def unwritten_bytes(self) -> int:
        """Bytes of begun frames that the system has not taken."""
        return sum(map(len, self._parts))

    @property
    def owes_rail_frames(self) -> bool:
        """Whether a frame about this rail itself is due: an acknowledgement or the goodbye."""
        return self.acknowledge or self.bye_due

    def take_due_frames(self) -> list[bytes | memoryview]:
        """Take the frames to write next from their queues, small ones and at most one chunk.

        Returns:
            One or two buffers for one system call: all small frames with the header of the chunk, then the bytes of the
            chunk. Empty if nothing is due.
        """
        if self.bye_sent:
            return []
        small = self._take_small_frames()
        # the small frames may have ended with the goodbye, after which nothing is sent
        chunk = None if self.bye_sent or self.owner.defers_to_others(self) else self.owner.departures.next_chunk()
        if chunk is None:
            return [b"".join(small)] if small else []
        head, piece = self.prepare_chunk(chunk)
        return [b"".join((*small, head)), piece]

    def write_pushed(self, send: Send) -> bool:
        """Write a message of one chunk at once, in one frame; False if it must queue."""
        if not self.idle or self.owes_rail_frames or not self.owner.departures.reserve_immediate_send(send):
            return False
        self._write_parts(self.prepare_chunk(Chunk(send, 0, send.nbytes)))
        if not self.idle:
            self._sleep.unpark()
        return True

    def prepare_chunk(self, chunk: Chunk) -> tuple[bytes, memoryview]:
        """Return header and bytes of a chunk that leaves now, and keep the chunk in case it must be repeated."""
        self.leaving = chunk
        self.keep_entry(chunk)
        piece = chunk.view
        if self._staging is not None:
            self._staging[: piece.nbytes] = piece
            piece = self._staging[: piece.nbytes]
        return self.owner.departures.pack_chunk_header(chunk, piece), piece

    def record_frames_written(self) -> None:
        """Record that the system has taken all frames of `take_due_frames`; a chunk among them may end its send."""
        chunk, self.leaving = self.leaving, None
        if chunk is None:
            return
        if self._unacknowledged_entries and self._unacknowledged_entries[-1] is chunk:
            self._unacknowledged_entries[-1] = self.owner.departures.entry_to_keep(chunk)
        self.owner.departures.count_written_chunk(chunk)

    def _take_small_frames(self) -> list[bytes]:
        """Take due small frames from their queue, up to about `_BATCH_BYTES`, and add those about this rail itself."""
        frames: list[bytes] = []
        left_bytes = 0 if self.owner.defers_to_others(self, small=True) else _BATCH_BYTES
        while left_bytes > 0 and (frame := self.owner.departures.next_frame()) is not None:
            frames.append(frame)
            self.keep_entry(frame)
            left_bytes -= len(frame)
        return frames + self.take_rail_frames() if self.owes_rail_frames else frames

    def take_rail_frames(self) -> list[bytes]:
        """Return the due frames about this rail itself: an acknowledgement, and the goodbye if nothing else is due."""
        frames = []
        if self.acknowledge:
            self.acknowledge = False
            self._acknowledged_frames = self.reading.arrived_frames
            frames.append(pack(MessageKind.ALIVE, self._acknowledged_frames))
            self.keep_entry(None)
        if self.bye_due and not self.owner.departures.due:
            self.bye_due, self.bye_sent = False, True
            frames.append(pack(MessageKind.BYE))
            self.keep_entry(None)
        return frames

    def write_eager(self, head: bytes, payload: memoryview) -> None:
        """Write a small message at once. The rail must be idle. The buffer of the message may change after the call."""
        if self._keeps_frames:
            frame = b"".join((head, payload))
            self.keep_entry(frame)
            self._transmit((frame,))
        else:
            self._transmit((head, payload))  # without joining the two, which takes 3 us for 64 KiB
        if self._blocked and not self.dead:
            # the caller may overwrite its buffer, so the rest is copied
            self._parts, self.idle = tuple(map(bytes, self._parts)), False
            self._sleep.unpark()

    def start_writing(self) -> None:
        """Write due frames until the system takes no more, two chunks at most."""
        # A small message ends when it is taken from its queue, before it is written. Its callback may send another
        # message, which must not overtake it.
        self.idle = False
        self._write_next_parts()
        # the first chunk has left whole: a second one may follow before other tasks run
        if not (self.idle or self._blocked or self.dead):
            self._write_next_parts()
        if not self.idle:
            self._sleep.unpark()

    async def wait_and_write(self) -> None:
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
        parts = self._parts or self.take_due_frames()
        if parts:
            self._write_parts(parts)
        else:
            self._go_idle()

    def _write_parts(self, parts: Sequence[bytes | memoryview]) -> None:
        """Update whether the rail is idle, too."""
        self._transmit(parts)
        if self.dead:
            return
        if not self._blocked:
            self.record_frames_written()
        # The rail stays busy while the system takes no more, while a frame about the rail is due, or while messages are
        # due and the goodbye has not ended them.
        is_more_due = self.owes_rail_frames or (self.owner.departures.due and not self.bye_sent)
        self.idle = not (self._blocked or is_more_due)
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
        """Close the writing direction, too, if the goodbye has been written."""
        self.idle = True
        if self.bye_sent:
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)

    def count_stalled_ticks(self) -> int:
        """Return how many calls in a row, this one included, found that frames waited and the system took no bytes."""
        moved = self.idle or self.written_bytes != self._seen_written_bytes
        self._stalled_calls = 0 if moved else self._stalled_calls + 1
        self._seen_written_bytes = self.written_bytes
        return self._stalled_calls

    def check_health(self) -> str:
        """Close the rail if its bytes have not been acknowledged by the other kernel for `LOST_S`.

        Returns:
            A text about lost packets for the user, once; otherwise "".
        """
        seen = tcp_info(self.socket)
        losses = self._health.record_losses(self.socket, seen)
        if self._health.unacknowledged_s(seen, monotonic()) >= LOST_S:
            self.die(f"nothing sent over it was acknowledged for {LOST_S:g} s")
        return losses

    # -- frames that arrive -------------------------------------------------------------------------------------------

    async def wait_and_read(self) -> bool:
        """Wait for bytes, and handle their frames; return False at the end of the connection.

        Other tasks may run after each chunk.
        """
        if self.dead:
            raise trio.ClosedResourceError
        if self._wakes_late:
            self._set_least_wake_bytes(self.reading.least_wake_bytes)
        await trio.lowlevel.wait_readable(self.socket)
        while (stop := self._read_available()) == _OTHERS_FIRST:
            await self._handle_remaining_frames()
        return stop != _END

    def catch_up(self) -> bool:
        """Write and read without waiting; return whether any bytes moved.

        Nothing happens while the reading task has frames left to handle, because later ones must not overtake them.
        """
        if self.dead or self.reading.has_unhandled_frames:
            return False
        before = self.read_bytes + self.written_bytes
        # Several messages are left to the writing task, so that an urgent one can come in between.
        if not self.idle and len(self.owner.engine.outgoing.sends) <= 1:
            self._write_next_parts()
        try:
            self._read_available()  # the reading task finds the rest in the socket
            while self.reading.has_unhandled_frames:  # frames that were read here must be handled before later ones
                self._handle_some_frames()
            if self._least_wake_bytes > 1:  # else the reading task might wait for more bytes than the peer will send
                self._set_least_wake_bytes(self.reading.least_wake_bytes)
        except (ProtocolError, OSError, trio.ClosedResourceError) as error:
            self._die_from_error(error)
        return self.read_bytes + self.written_bytes != before

    def _read_available(self) -> int:
        """Read a chunk at most, and handle frames; return why reading pauses: `_EMPTY`, `_OTHERS_FIRST` or `_END`."""
        reading, read_bytes, stop = self.reading, 0, _EMPTY
        while True:
            target = reading.read_target()
            try:
                count = self.receive(target)
            except BlockingIOError:
                break
            if not count:
                stop = _END
                break
            read_bytes += count
            full = count == target.nbytes
            # The view is dropped before the bytes are handled: the end of a message gives the memory back to its owner,
            # who may resize the array only without views.
            del target
            if reading.handle_received(count) or read_bytes >= LOCAL_CHUNK_BYTES:
                stop = _OTHERS_FIRST
                break
            # Go on only if the target was full, so that more bytes may be available, and if a task waits for frames.
            if not (full and (reading.within_chunk or self.owner.expects_frames)):
                break
        if read_bytes:
            self.count_read_bytes(read_bytes)
        return stop

    def _set_least_wake_bytes(self, nbytes: int) -> None:
        """Let the system report readability from this many bytes on."""
        if nbytes != self._least_wake_bytes:
            self._least_wake_bytes = nbytes
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def count_read_bytes(self, count: int) -> None:
        """Count bytes that were read and handled, and let answers leave."""
        self.read_bytes += count
        self.owner.silent_ticks = 0
        if self._keeps_frames and self.reading.arrived_frames - self._acknowledged_frames >= _ACKNOWLEDGE_EVERY:
            self.acknowledge = True
        self.owner.flush()

    async def _handle_remaining_frames(self) -> None:
        """Let other tasks run in between."""
        await trio.lowlevel.checkpoint()
        while self._handle_some_frames():
            await trio.lowlevel.checkpoint()

    def _handle_some_frames(self) -> bool:
        """Handle remaining frames; return whether other tasks should run before the rest."""
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
            # after any other end this does nothing
            self.die("it was given up")

    async def read_until_dead(self) -> None:
        """Read and handle frames, until the connection ends or the peer breaks the protocol."""
        try:
            while await self.wait_and_read():
                pass
        except (ProtocolError, OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._die_from_error(error)
        else:
            self.die("the connection ended within a frame" if self.reading.within_chunk else _ENDED)

    def _die_from_error(self, error: Exception) -> None:
        """Close the connection, because reading has failed with an error."""
        if isinstance(error, ProtocolError):
            advice = "" if isinstance(error, FrameError) else f"; {BROKEN_PROTOCOL}"
            if isinstance(error, DamageError):
                advice = "; check the memory of this host" if is_peer_local(self.socket) else "; check the network"
            self.die(f"a bad frame: {error}{advice}", evident=True)
        else:
            self.die(describe_error(error))

    async def _write_until_dead(self) -> None:
        """Write due frames, and sleep while nothing is due; an error closes the rail."""
        try:
            while True:
                await (self._sleep.park() if self.idle else self.wait_and_write())
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.die(describe_error(error))

    def die(self, reason: str, *, evident: bool = False) -> None:
        """Close the connection at once; other rails repeat frames that have not arrived. A second call does nothing.

        Args:
            reason: Why, for messages.
            evident: Whether this side has seen the fault itself, see `LinkLostError`.
        """
        if self.dead:
            return
        self.dead = self.reading.stopped = True
        # a dead rail is never idle, so no caller writes on it
        self.idle, self._parts = False, ()
        self.close_socket()
        self._scope.cancel()
        self.owner.remove_lost_rail(self, reason, evident=evident)

    def close_socket(self) -> None:
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

    def write_eager(self, head: bytes, payload: memoryview) -> None:
        """Queue a small message for the writing task."""
        self.owner.departures.queue_frame(b"".join((head, payload)))
        self.start_writing()

    def write_pushed(self, send: Send) -> bool:
        """Return False: only the writing task writes."""
        return False

    def catch_up(self) -> bool:
        """Return False: only the tasks read and write."""
        return False

    def start_writing(self) -> None:
        """Let the writing task write due frames."""
        self.idle = False
        self._sleep.unpark()

    async def wait_and_write(self) -> None:
        """Write due frames; without any, the rail is idle."""
        parts = self.take_due_frames()
        if parts:
            await self._stream.send_all(b"".join(parts))
            self.written_bytes: int = self.written_bytes + sum(len(part) for part in parts)
            self.record_frames_written()
            return
        self._go_idle()
        await trio.lowlevel.checkpoint()

    async def wait_and_read(self) -> bool:
        """Wait for bytes and handle their frames; return False at the end of the connection.

        Other tasks run before the return if so many frames had come that some are left for later.

        Raises:
            ProtocolError: If a frame is invalid or damaged.
            OSError, trio.BrokenResourceError: If the connection is lost.
            trio.ClosedResourceError: If it has been closed here.
        """
        target = self.reading.read_target()
        data = await self._stream.receive_some(target.nbytes)
        target[: len(data)] = data
        del target  # the owner of full memory may resize it
        if data:
            unfinished = self.reading.handle_received(len(data))
            self.count_read_bytes(len(data))
            if unfinished:
                await self._handle_remaining_frames()
        return bool(data)


def describe_error(error: BaseException) -> str:
    """Return a short text for an error of a connection, the same for the reader and the writer of a closed one."""
    cause = error.__cause__ or error
    if isinstance(cause, (BrokenPipeError, ConnectionResetError)):  # the reader sees the same end
        return _ENDED
    strerror = getattr(cause, "strerror", None)
    return str(strerror or cause or type(cause).__name__)


def _drop_bytes(parts: Sequence[bytes | memoryview], count: int) -> Sequence[bytes | memoryview]:
    """Return the parts of frames without their first `count` bytes."""
    rest: list[bytes | memoryview] = []
    for part in parts:
        if count < len(part):
            rest.append(memoryview(part)[count:])
        count = max(0, count - len(part))
    return rest
