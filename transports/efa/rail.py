"""A rail: one connection to another process, with a task that reads and a task that writes what did not go at once.

Writing is synchronous as far as the system takes bytes: a caller writes from its own task if the rail is idle, and the
writing task continues when the system has room again. So a cancellation never tears a frame.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections import deque
from functools import partial
from time import monotonic, perf_counter
from typing import Protocol

import trio
from trio.lowlevel import Abort, RaiseCancelT, Task, current_task, reschedule, wait_task_rescheduled

from transports.efa.departures import Departures, Entry
from transports.efa.reading import Places, Reading
from transports.efa.sharing import Pace, Standing
from transports.efa.tcp import LOST_S, Health, tcp_info, unsent_bytes
from transports.frame import LOCAL_CHUNK_BYTES, FrameError, FrameKind, pack
from transports.matching import Chunk, ProtocolError, Send

# Frames that may arrive before the other side is told, and can release their memory. With 64 the memory left the
# caches: all_reduce of 64 KiB between two processes over TCP took 185 us in place of 160.
_ACKNOWLEDGE_EVERY = 16

# Small frames that are due together leave in one system call, up to about this much.
_BATCH_BYTES = 64 << 10

_CHUNK, _PUSH = int(FrameKind.CHUNK), int(FrameKind.PUSH)  # asking an enumeration takes 0.2 us

_ENDED = "the connection ended"


class Owner(Places, Protocol):
    """The link of a rail, as the rail sees it."""

    departures: Departures  # The frames that may leave on it
    silent_ticks: int  # Set to 0 whenever the other process is heard

    @property
    def wants(self) -> bool:
        """Whether a call waits for a frame of the other process."""

    def take(self, rail: Rail, kind: int, fields: list[int]) -> None:
        """Act on a frame without payload."""

    def spares(self, rail: Rail, *, small: bool = False) -> bool:
        """Whether other rails would bring the next chunk, or small frames, sooner than this one."""

    def settle(self) -> None:
        """Let idle rails take due frames."""

    def rail_died(self, rail: Rail, reason: str, *, evident: bool = False) -> None:
        """Continue without a rail; `evident` says that this side has seen the fault, see `LinkLostError`."""


class Rail(ABC):
    """One connection.

    Args:
        owner: The link to the process at its other end.
        index: Number of the connection.
        keep: Whether frames are kept until they have arrived, because another rail could repeat them.
        staged: Whether payloads pass through a buffer of the rail, instead of leaving from and arriving in the
            caller's memory.

    Attributes:
        socket: The connection.
        ends: Its addresses, for people, if it has any.
        idle: Nothing is being written; any caller may write.
        dead: It has been closed, for whatever reason.
        written_bytes: Bytes that the system has taken.
        read_bytes: Bytes that have been read.
        farewell: The other side has said that nothing more will come.
        acknowledge: The other side is to be told how many frames have arrived.
        say_bye: Say that nothing more will come, after all that is due.
        bye_said: That has been said.
        leaving: The chunk that is being written.
        reading: Bytes that have come and have not been acted on.
    """

    socket: socket.socket
    ends: str = ""

    def __init__(self, owner: Owner, index: int, *, keep: bool, staged: bool) -> None:
        self.owner = owner
        self.index = index
        self.idle: bool = True
        self.dead: bool = False
        self.written_bytes: int = 0
        self.read_bytes: int = 0
        self.farewell: bool = False
        self.acknowledge: bool = False
        self.say_bye: bool = False
        self.bye_said: bool = False
        self.leaving: Chunk | None = None
        self._keep = keep
        self._kept: deque[Entry] = deque()
        self._kept_before = 0  # frames that left earlier and are known to have arrived
        self._staging = memoryview(bytearray(LOCAL_CHUNK_BYTES)) if staged else None
        self._pace = Pace()
        self._scope = trio.CancelScope()
        self._sleeper: Task | None = None
        self._acknowledged = 0
        self._stalled = 0
        self._health = Health()
        self._seen_written_bytes = 0
        self.reading: Reading = Reading(owner, partial(owner.take, self), staged=staged)

    # -- frames that leave --------------------------------------------------------------------------------------------

    def keep(self, entry: Entry) -> None:
        """Remember a frame until it is known to have arrived."""
        if self._keep:
            self._kept.append(entry)

    def acknowledged(self, count: int) -> None:
        """Forget frames that have arrived."""
        if not self._keep:
            return
        if not self._kept_before <= count <= self._kept_before + len(self._kept):
            raise FrameError(f"{count} frames are said to have arrived, of {self._kept_before + len(self._kept)}")
        while self._kept_before < count:
            self.owner.departures.arrived(self._kept.popleft())
            self._kept_before += 1

    def unarrived(self, count: int) -> deque[Entry]:
        """Return the kept frames after the first `count`, which will never arrive."""
        self.acknowledged(count)
        left, self._kept = self._kept, deque()
        return left

    def standing(self) -> Standing:
        """Return its rate and the bytes that wait on it."""
        standing = self._pace.standing(perf_counter(), self.written_bytes, unsent_bytes(self.socket))
        return standing._replace(waiting_bytes=standing.waiting_bytes + self.begun_bytes)

    def observe(self) -> None:
        """Measure its rate, if it is busy."""
        if self._pace.measures:
            self.standing()

    @property
    def begun_bytes(self) -> int:
        """Bytes of begun frames that the system has not taken."""
        return 0

    @property
    def owes(self) -> bool:
        """Whether a frame of this rail alone is due."""
        return self.acknowledge or self.say_bye

    def pull(self) -> list[bytes | memoryview]:
        """Return the frames to write next: small ones, and at most one chunk; empty if nothing is due or may follow."""
        if self.bye_said:
            return []
        small = self._small()
        chunk = None if self.bye_said or self.owner.spares(self) else self.owner.departures.next_chunk()
        if chunk is None:
            return [small[0] if len(small) == 1 else b"".join(small)] if small else []
        self.leaving = chunk
        self.keep(chunk)
        piece = self._staged(chunk.view)
        head = self.owner.departures.head(piece, _CHUNK, chunk.send.number, chunk.offset)
        return [b"".join((*small, head)), piece]

    def push(self, send: Send) -> bool:
        """Write a message of one chunk at once, in one frame; False if that cannot be, and nothing has happened."""
        return False

    def pushed(self, send: Send) -> list[bytes | memoryview]:
        """Return the frame of a message that leaves whole.

        Its announcement arrives with its header. It is kept as two frames, in case it must be repeated.
        """
        self.leaving = chunk = Chunk(send, 0, send.nbytes)
        if self._keep:
            self._kept += (pack(_PUSH, send.number, *send.lane, send.nbytes), chunk)
        assert send.view is not None, "a message that has not left keeps its bytes"
        piece = self._staged(send.view)
        return [self.owner.departures.head(piece, _PUSH, send.number, *send.lane, send.nbytes), piece]

    def written(self) -> None:
        """Note that the system has taken all pulled frames."""
        chunk, self.leaving = self.leaving, None
        if chunk is None:
            return
        if self._kept and self._kept[-1] is chunk:
            self._kept[-1] = self.owner.departures.kept(chunk)
        self.owner.departures.left(chunk)

    def _small(self) -> list[bytes]:
        frames: list[bytes] = []
        left_bytes = 0 if self.owner.spares(self, small=True) else _BATCH_BYTES
        while left_bytes > 0 and (frame := self.owner.departures.next_frame()) is not None:
            frames.append(frame)
            self.keep(frame)
            left_bytes -= len(frame)
        return frames + self.own_frames() if self.owes else frames

    def own_frames(self) -> list[bytes]:
        """Return the frames that belong on this rail and no other; goodbye comes last of all."""
        frames = []
        if self.acknowledge:
            self.acknowledge = False
            self._acknowledged = self.reading.arrived
            frames.append(pack(FrameKind.ALIVE, self._acknowledged))
            self.keep(None)
        if self.say_bye and not self.owner.departures.due:
            self.say_bye, self.bye_said = False, True
            frames.append(pack(FrameKind.BYE))
            self.keep(None)
        return frames

    def _staged(self, piece: memoryview) -> memoryview:
        """Return the bytes of a chunk, or a staged copy."""
        if self._staging is None:
            return piece
        self._staging[: piece.nbytes] = piece
        return self._staging[: piece.nbytes]

    @abstractmethod
    def put(self, head: bytes, payload: memoryview) -> None:
        """Write a small message, whose bytes may change from here on; the rail is idle."""

    @abstractmethod
    def start_writing(self) -> None:
        """Write due frames, as far as that needs no waiting; the rail is idle."""

    @abstractmethod
    async def write_on(self) -> None:
        """Wait for room and write more; called again until the rail is idle. Ends a sleep without work."""

    def wake_writer(self) -> None:
        """Wake the writing task."""
        task, self._sleeper = self._sleeper, None
        if task is not None:
            reschedule(task)

    async def _sleep(self) -> None:
        self._sleeper = current_task()
        await wait_task_rescheduled(self._wake_cancelled)

    def _wake_cancelled(self, _: RaiseCancelT) -> Abort:
        self._sleeper = None
        return Abort.SUCCEEDED

    def stalled_ticks(self) -> int:
        """Count successive calls during which frames waited and the system took nothing."""
        moved = self.idle or self.written_bytes != self._seen_written_bytes
        self._stalled = 0 if moved else self._stalled + 1
        self._seen_written_bytes = self.written_bytes
        return self._stalled

    def check_health(self) -> str:
        """Die if the other end's kernel has acknowledged nothing for too long; return a message about lost packets."""
        seen = tcp_info(self.socket)
        losses = self._health.note_losses(self.socket, seen)
        if self._health.unacknowledged_s(seen, monotonic()) >= LOST_S:
            self.die(f"nothing sent over it was acknowledged for {LOST_S:g} s")
        return losses

    # -- frames that arrive -------------------------------------------------------------------------------------------

    @abstractmethod
    async def read_on(self) -> bool:
        """Wait for something to come, and act on it; False at the end."""

    def catch_up(self) -> bool:
        """Write and read ahead of the tasks; return whether anything moved."""
        return False

    async def _read(self) -> None:
        while await self.read_on():
            pass
        if self.reading.within_chunk:
            raise EOFError

    def heard(self, count: int) -> None:
        """Note bytes that were read and acted on, and let the answers leave."""
        self.read_bytes += count
        self.owner.silent_ticks = 0
        if self._keep and self.reading.arrived - self._acknowledged >= _ACKNOWLEDGE_EVERY:
            self.acknowledge = True
        self.owner.settle()

    async def _let_others_run(self) -> None:
        """Act on the frames that are left, and let other tasks run in between."""
        while True:
            await trio.lowlevel.checkpoint()
            if not self._act():
                return

    def _act(self) -> bool:
        """Act on frames that are left; True if other tasks should run before the rest."""
        unfinished = self.reading.act()
        self.owner.settle()
        return unfinished

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read and write until the rail is dead."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write_on)
                    await self.read_until_dead()
                    nursery.cancel_scope.cancel()
        finally:
            self.die("it was given up")
            with trio.CancelScope(shield=True):
                await self.release()

    async def read_until_dead(self) -> None:
        """Read and act on frames, until the connection ends or breaks the rules."""
        try:
            await self._read()
        except (ProtocolError, EOFError, OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._die_of(error)
        else:
            self.die(_ENDED)

    def _die_of(self, error: Exception) -> None:
        """Close the connection because reading has failed."""
        if isinstance(error, ProtocolError):
            self.die(f"a bad frame: {error}", evident=True)
        else:
            self.die("the connection ended within a frame" if isinstance(error, EOFError) else describe(error))

    async def _write_on(self) -> None:
        try:
            while True:
                await (self._sleep() if self.idle else self.write_on())
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.die(describe(error))

    def die(self, reason: str, *, evident: bool = False) -> None:
        """Close the connection at once; other rails repeat frames that have not arrived. Twice is harmless."""
        if self.dead:
            return
        self.dead = self.reading.stopped = True
        self.idle = False
        self.cut()
        self._scope.cancel()
        self.owner.rail_died(self, reason, evident=evident)

    @abstractmethod
    def cut(self) -> None:
        """Close the connection."""

    @abstractmethod
    async def release(self) -> None:
        """Free the rest of it."""


def describe(error: BaseException) -> str:
    """Describe an error of a connection briefly; readers and writers of a closed one get one description."""
    cause = error.__cause__ or error
    if isinstance(cause, (BrokenPipeError, ConnectionResetError)):  # the reader learns of the end, or of an early one
        return _ENDED
    strerror = getattr(cause, "strerror", None)
    return str(strerror or cause or type(cause).__name__)
