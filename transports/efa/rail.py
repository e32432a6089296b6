"""A rail: one connection to another process, with a task that reads and a task that writes what did not go at once.

Writing is synchronous as far as the system takes bytes: whoever has something to say writes it from its own task if the
rail is idle, and the writing task goes on when the system has room again. So a frame is never torn by a cancellation.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections import deque
from time import monotonic, perf_counter
from typing import Protocol

import trio
from trio.lowlevel import Abort, RaiseCancelT, Task, current_task, reschedule, wait_task_rescheduled

from transports.efa.acknowledged import Flight, look
from transports.efa.departures import Departures, Entry
from transports.efa.queueing import unsent_bytes
from transports.efa.sharing import Pace, Standing
from transports.frame import (
    CHUNK_BYTES,
    EAGER_BYTES,
    HEADER_LIMIT_BYTES,
    PREFIX_BYTES,
    FrameError,
    FrameKind,
    damaged,
    pack,
    parse,
)
from transports.matching import Chunk, ProtocolError

__all__ = ["Owner", "Rail"]

# Room for two of the longest small frames, so that one that has come in part never fills it.
_READ_BYTES = 2 * (PREFIX_BYTES + HEADER_LIMIT_BYTES + EAGER_BYTES)
# After a chunk probably comes another: read its header and little of its bytes, which must be copied once more.
_HEAD_BYTES = 256
# So many small frames are acted upon before others may run: about 2 ms.
_FRAMES_AT_ONCE = 256
# So many frames may arrive before the other side is told, and can let go of them.
_ACKNOWLEDGE_EVERY = 64


# In the middle of a chunk, waking up for every segment costs a tenth of the speed (64 MiB both ways over loopback TCP).
_WORTH_WAKING_BYTES = 128 << 10


_MISMATCH = "what was received does not match its checksum"

# Small frames that are due together leave in one system call, up to about this much.
_BATCH_BYTES = 64 << 10


class Owner(Protocol):
    """What a rail needs of the link that it is part of.

    Attributes:
        departures: What may leave on it.
        silent_ticks: Set to 0 whenever the other process is heard.
    """

    departures: Departures
    silent_ticks: int

    def take(self, rail: Rail, kind: int, fields: list[int], payload: memoryview) -> None:
        """Act on a frame that is no chunk."""

    def spares(self, rail: Rail, *, small: bool = False) -> bool:
        """Whether other rails would bring the next chunk, or small frames, sooner than this one."""

    def place(self, number: int, offset: int, nbytes: int) -> memoryview:
        """Return where a chunk belongs."""

    def filled(self, number: int, offset: int, nbytes: int) -> None:
        """Note that a chunk is in its place."""

    def message(self, number: int) -> str:
        """Say which message comes in chunks under a number, for people."""

    def settle(self) -> None:
        """Let idle rails take what is due."""

    def rail_died(self, rail: Rail, reason: str, *, evident: bool = False) -> None:
        """Go on without a rail; it is `evident` to this side what was wrong, see `LinkLostError`."""


class Rail(ABC):
    """One connection.

    Args:
        owner: The link to the process at its other end.
        index: Which of the connections to it.
        keep: Whether frames are kept until they have arrived, because another rail could repeat them.
        staged: Whether payloads pass through a buffer of the rail, instead of leaving from and arriving in the
            caller's memory.

    Attributes:
        socket: What carries its bytes.
        idle: Nothing is being written; whoever has something to say may.
        dead: It has been closed, for whatever reason.
        arrived: How many frames have arrived on it.
        written_bytes: How much the system has taken.
        read_bytes: How much has been read.
        farewell: The other side has said that nothing more will come.
        acknowledge: The other side is to be told how many frames have arrived.
        say_bye: Say that nothing more will come, after all that is due.
        bye_said: That has been said.
        leaving: The chunk that is being written.
    """

    socket: socket.socket

    def __init__(self, owner: Owner, index: int, *, keep: bool, staged: bool) -> None:
        self.owner = owner
        self.index = index
        self.idle = True
        self.dead = False
        self.arrived = 0
        self.written_bytes = 0
        self.read_bytes = 0
        self.farewell = False
        self.acknowledge = False
        self.say_bye = False
        self.bye_said = False
        self.leaving: Chunk | None = None
        self._keep = keep
        self._kept: deque[Entry] = deque()
        self._kept_before = 0  # frames that left earlier and are known to have arrived
        self._staging = memoryview(bytearray(CHUNK_BYTES)) if staged else None
        self._arriving = memoryview(bytearray(CHUNK_BYTES)) if staged else None
        self._pace = Pace()
        self._scope = trio.CancelScope()
        self._sleeper: Task | None = None
        self._acknowledged = 0
        self._stalled = 0
        self._flight = Flight()
        self._seen_written_bytes = 0

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
            self._kept.popleft()
            self._kept_before += 1

    def unarrived(self, count: int) -> deque[Entry]:
        """Return what has not arrived, when no more than `count` frames ever will."""
        self.acknowledged(count)
        left, self._kept = self._kept, deque()
        return left

    def standing(self) -> Standing:
        """Return how fast it is, and how much waits on it."""
        return self._pace.standing(perf_counter(), self.written_bytes, unsent_bytes(self.socket))

    @property
    def owes(self) -> bool:
        """Whether a frame is due that belongs on this rail."""
        return self.acknowledge or self.say_bye

    def pull(self) -> list[bytes | memoryview]:
        """Return what to write next: small frames, and at most one chunk; empty if nothing is due or may follow."""
        if self.bye_said:
            return []
        small = self._small()
        chunk = None if self.bye_said or self.owner.spares(self) else self.owner.departures.next_chunk()
        if chunk is None:
            return [small[0] if len(small) == 1 else b"".join(small)] if small else []
        self.leaving = chunk
        self.keep(chunk)
        piece = self._staged(chunk.view)
        head = pack(
            FrameKind.CHUNK,
            chunk.send.number,
            chunk.offset,
            payload_bytes=chunk.nbytes,
            payload_checksum=self.owner.departures.checksum_of(piece),
        )
        return [b"".join((*small, head)), piece]

    def written(self) -> None:
        """Note that the system has taken all of what was pulled."""
        chunk, self.leaving = self.leaving, None
        if chunk is not None:
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
            self._acknowledged = self.arrived
            frames.append(pack(FrameKind.ALIVE, self.arrived))
            self.keep(None)
        if self.say_bye and not self.owner.departures.due:
            self.say_bye, self.bye_said = False, True
            frames.append(pack(FrameKind.BYE))
            self.keep(None)
        return frames

    def _staged(self, piece: memoryview) -> memoryview:
        """Return where the bytes of a chunk leave from: themselves, or a copy."""
        if self._staging is None:
            return piece
        self._staging[: piece.nbytes] = piece
        return self._staging[: piece.nbytes]

    @abstractmethod
    def put(self, frame: bytes) -> None:
        """Write a small frame; the rail is idle."""

    @abstractmethod
    def start_writing(self) -> None:
        """Write what is due, as far as that needs no waiting; the rail is idle."""

    @abstractmethod
    async def write_on(self) -> None:
        """Wait for room and write more; called again until the rail is idle. Ends a sleep without work."""

    def wake_writer(self) -> None:
        """Let the writing task go on."""
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
        """Count the calls of this for which it was writing and nothing went."""
        moved = self.idle or self.written_bytes != self._seen_written_bytes
        self._stalled = 0 if moved else self._stalled + 1
        self._seen_written_bytes = self.written_bytes
        return self._stalled

    def unacknowledged_s(self) -> float:
        """Return for how many seconds the other end's kernel has acknowledged nothing of what is under way."""
        return self._flight.unacknowledged_s(look(self.socket), monotonic())

    # -- frames that arrive -------------------------------------------------------------------------------------------

    @abstractmethod
    async def read_some(self, into: memoryview, *, hint_bytes: int = 1) -> int:
        """Read at least a byte; return how many, 0 at the end.

        Args:
            into: Where to.
            hint_bytes: Fewer are not worth waking up for; they come for certain.
        """

    async def _read(self) -> None:
        buffer = bytearray(_READ_BYTES)
        view = memoryview(buffer)
        start = end = 0
        wanted = _READ_BYTES
        while True:
            while (frame := parse(buffer, start, end)) is not None:
                kind, fields, payload_at, payload_bytes, payload_checksum = frame
                after = payload_at + payload_bytes
                if kind == FrameKind.CHUNK:
                    ready = min(after, end)
                    await self._read_chunk(fields, payload_bytes, payload_checksum, view[payload_at:ready])
                    start, wanted = ready, _HEAD_BYTES
                elif after <= end:
                    payload = view[payload_at:after]
                    if kind == FrameKind.EAGER and damaged(payload, payload_checksum):
                        raise FrameError(f"{message_of(*fields[1:])} came damaged: {_MISMATCH}")
                    self.count_arrival()
                    self.owner.take(self, kind, fields, payload)
                    self._go_on()  # unless acting on it has shown that the rail is dead
                    start = after
                    if self.arrived % _FRAMES_AT_ONCE == 0:
                        await self._let_others_run()
                else:
                    break
            self.owner.settle()
            if start == end:
                start = end = 0
            elif start > _READ_BYTES // 2:
                view[: end - start] = view[start:end]
                start, end = 0, end - start
            count = await self.read_some(view[end : max(end + 1, min(end + wanted, _READ_BYTES))])
            if not count:
                return
            wanted = _READ_BYTES
            end += count
            self._heard(count)

    async def _let_others_run(self) -> None:
        self.owner.settle()
        await trio.lowlevel.checkpoint()
        self._go_on()

    async def _read_chunk(self, fields: list[int], nbytes: int, expected: bytes, ready: memoryview) -> None:
        """Read the bytes of a chunk to where they belong, the first of which are there already."""
        number, offset = fields
        place = self.owner.place(number, offset, nbytes)
        target = place if self._arriving is None else self._arriving[:nbytes]
        target[: ready.nbytes] = ready
        done = ready.nbytes
        while done < nbytes:
            count = await self.read_some(target[done:], hint_bytes=min(nbytes - done, _WORTH_WAKING_BYTES))
            if not count:
                raise EOFError
            done += count
            self._heard(count)
        if damaged(target, expected):
            piece = f"bytes {offset} to {offset + nbytes} of {self.owner.message(number)}"
            raise FrameError(f"{piece} came damaged: {_MISMATCH}")
        if self._arriving is not None:
            place[:] = target
        self.count_arrival()
        self.owner.filled(number, offset, nbytes)

    def _go_on(self) -> None:
        """Read no more of a dead rail: how many frames have arrived has been told; the others bring the rest."""
        if self.dead:
            raise trio.ClosedResourceError

    def _heard(self, count: int) -> None:
        self._go_on()
        self.read_bytes += count
        self.owner.silent_ticks = 0

    def count_arrival(self) -> None:
        """Note that a frame has arrived whole; tell the other side now and then."""
        self.arrived += 1
        if self._keep and self.arrived - self._acknowledged >= _ACKNOWLEDGE_EVERY:
            self._acknowledged = self.arrived
            self.acknowledge = True

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
        """Read and act on what comes, until the connection ends or deserves to."""
        try:
            await self._read()
        except ProtocolError as error:
            self.die(f"a bad frame: {error}", evident=True)
        except EOFError:
            self.die("the connection ended within a frame")
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.die(describe(error))
        else:
            self.die("the connection ended")

    async def _write_on(self) -> None:
        try:
            while True:
                await (self._sleep() if self.idle else self.write_on())
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.die(describe(error))

    def die(self, reason: str, *, evident: bool = False) -> None:
        """Close it at once; what has not arrived is the others' to repeat. Twice is harmless."""
        if self.dead:
            return
        self.dead = True
        self.idle = False
        self.cut()
        self._scope.cancel()
        self.owner.rail_died(self, reason, evident=evident)

    @abstractmethod
    def cut(self) -> None:
        """Close the connection."""

    @abstractmethod
    async def release(self) -> None:
        """Free what is left of it."""


def message_of(src: int, dst: int, tag: int) -> str:
    """Say which message is meant, for people."""
    return f"the message from rank {src} to rank {dst}, tag {tag},"


def describe(error: BaseException) -> str:
    """Say briefly what went wrong with a connection."""
    cause = error.__cause__ or error
    strerror = getattr(cause, "strerror", None)
    return str(strerror or cause or type(cause).__name__)
