"""A rail: one connection to another process, with a reading task, and a task that writes when the system has room.

A caller writes from its own task if the rail is idle, without waiting, and the writing task continues when the system
has room again. So a cancellation never tears a frame.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
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


class Rail(ABC):
    """One connection to another process.

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
        self._parts: Sequence[bytes | memoryview] = ()
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
        return False

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

    @abstractmethod
    def put(self, head: bytes, payload: memoryview) -> None:
        """Write a small message, whose buffer may change after the call; the rail is idle."""

    @abstractmethod
    def start_writing(self) -> None:
        """Write due frames without waiting; the rail is idle."""

    @abstractmethod
    async def write_on(self) -> None:
        """Wait for room and write more; called until the rail is idle."""

    def _rest(self) -> None:
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

    def stalled_ticks(self) -> int:
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

    @abstractmethod
    async def read_on(self) -> bool:
        """Wait for bytes, and handle their frames; False at the end."""

    def catch_up(self) -> bool:
        """Write and read ahead of the tasks; return whether anything moved."""
        return False

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
            while await self.read_on():
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
                await (self._sleep() if self.idle else self.write_on())
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


def describe_error(error: BaseException) -> str:
    """Return a short text for an error of a connection; one text for the reader and the writer of a closed one."""
    cause = error.__cause__ or error
    if isinstance(cause, (BrokenPipeError, ConnectionResetError)):  # the reader sees the same end
        return _ENDED
    strerror = getattr(cause, "strerror", None)
    return str(strerror or cause or type(cause).__name__)
