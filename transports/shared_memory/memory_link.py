"""The link to another process of this host: packets name a message, and its receiver reads it where it lies.

Packets go through rings of shared memory. A process that sleeps is rung. The socket carries nothing: that it ends tells
that the other process has.
"""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from heapq import heappop, heappush
from threading import get_ident
from time import perf_counter

import trio

from transports.buffers import BounceBuffers
from transports.matched import Link
from transports.matching import Lane, Limits, MessageKind, ProtocolError
from transports.packets import Packets
from transports.shared_memory.ordering import fence
from transports.shared_memory.peer_memory import address_of, read
from transports.shared_memory.ring import InRing, OutRing, spare_words
from transports.shared_memory.segment import Segment
from transports.shared_memory.slots import SLOT_BYTES, Places, Slots

#: Messages up to this length travel in a packet, longer ones in a slot if one is empty. Where slots are too small, or
#: all of them full, messages are read where they lie, which takes a packet back.
EAGER_BYTES = 64 << 10


class Kind(IntEnum):
    """The kinds of packets besides those of `MessageKind`. An `OFFER` has two more fields here: the address of the
    message in its sender's memory, and its urgency. A `CHUNK` lies in a slot: number, offset, nbytes, slot."""

    BYE = 64  #: nothing more will come
    FREED = 65  #: slot: its chunk has been copied
    TOLD = 66  #: three integers for boards, see `MemoryLink.hear_told`
    PLACED = 67  #: number, src, dst, tag, nbytes, slot: all of a message lies there


_PACKETS = Packets(
    {MessageKind.OFFER: 7, MessageKind.CHUNK: 4, Kind.BYE: 0, Kind.FREED: 1, Kind.TOLD: 3, Kind.PLACED: 6}
)
pack, unpack = _PACKETS.pack, _PACKETS.unpack

# Packets that are acted upon before other tasks may run: about 2 ms.
_PACKETS_AT_ONCE = 256
# A message up to this length is read when it is matched; a longer one by a task, which yields after each piece. A
# thread in the loop's place reads a whole piece at once: 1 MiB there and back takes 3.7 ms instead of 5.0 (busy cores).
_AT_ONCE_BYTES = 256 << 10
# Pieces of long messages are read for so long before other tasks may run, or other threads take the loop's place: four
# of them or so. A turn of the loop between any two takes a third of the time of reading one.
_READING_S = 1e-3
# What a thread acts on in the loop's place.
_FOR_THREADS = (
    MessageKind.EAGER, MessageKind.OFFER, MessageKind.ACCEPT, MessageKind.TAKEN, MessageKind.CREDIT, Kind.PLACED
)  # fmt: skip
_SETTLES_OFFER = (MessageKind.TAKEN, MessageKind.REFUSE, MessageKind.WITHDRAWN)
_MIDDLE = 1 << 63  # priorities are sent as unsigned integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another process of this host, as joining has found it."""

    socket: socket.socket  # Its end is the other side's
    pid: int  # The other process
    readable: bool  # Whether each of the two may read the other's memory
    segment: Segment  # Memory of the other process's
    bell: int  # Descriptor that wakes the other process
    packets_out: memoryview  # Ring of the packets that leave
    packets_in: memoryview  # Ring of those that come
    outbox: memoryview  # Slots for messages that leave
    inbox: memoryview  # Slots in which they come
    mail_out: memoryview  # Ring of messages that threads send to its mailbox
    mail_in: memoryview  # Ring of those that come


def _limits(readable: bool) -> Limits:
    return Limits(eager_bytes=EAGER_BYTES, chunk_bytes=SLOT_BYTES, fetched=readable)


class MemoryLink(Link):
    """Another process of this host.

    Args:
        member: Its index.
        ranks: Its ranks.
        local: The ranks of this process.
        memory: For messages that are lent.
        peer: The process, as joining has found it.
        report: Takes a line about its loss.

    Attributes:
        peer: As passed.
        on_loss: Called once nothing more can be expected of it.
        hear_told: Takes what the other process tells the boards of this one.
        ring: Wakes the other process, if it sleeps.
    """

    def __init__(
        self,
        member: int,
        ranks: Sequence[int],
        local: Sequence[int],
        memory: BounceBuffers,
        peer: Peer,
        report: Callable[[str], None],
    ) -> None:
        super().__init__(member, ranks, local, _limits(peer.readable), memory)
        self.peer = peer
        self.on_loss: Callable[[], None] = lambda: None
        self.hear_told: Callable[[Sequence[int]], None] = lambda fields: None
        self.ring: Callable[[], None] = lambda: None
        self._report = report
        self._packets_out, self._packets_in = OutRing(peer.packets_out), InRing(peer.packets_in)
        self._rings = False  # packets were written of which the other process may have to be told
        self._out, self._in = (Slots(None if peer.readable else memory) for memory in (peer.outbox, peer.inbox))
        self._places_out, self._places_in = (
            Places(memory, spare_words(words)) if peer.readable else None
            for memory, words in ((peer.outbox, peer.packets_out), (peer.inbox, peer.packets_in))
        )
        self._own: deque[bytes] = deque()  # packets that are not the engine's
        self._stuck: bytes | None = None  # a packet that the full ring did not take
        self._addresses: dict[int, tuple[int, int]] = {}  # of offers, by number; and their urgency
        self._fetching: list[tuple[int, int, int]] = []  # heap of (urgency, number, offset)
        self._reading = self._settling = self._again = False
        self._visited = False  # a thread catches up, and comes again or leaves the rest to the loop
        self._farewell = self._said_bye = self._dead = False
        self._work = trio.Event()
        self._count = 0
        self._thread, self._token = get_ident(), trio.lowlevel.current_trio_token()  # of the event loop

    # -- departures ---------------------------------------------------------------------------------------------------

    def tell(self, *fields: int) -> None:
        """Tell three integers to the boards of the other process."""
        self._own.append(pack(Kind.TOLD, *fields))
        self.settle()

    def send_now(self, lane: Lane, view: memoryview) -> bool:
        """Send a small message in a packet, or a larger one in a slot, if nothing waits."""
        if self._stuck is not None or self._own or self._dead or self._settling or self.engine.outgoing.due:
            return False
        if view.nbytes > EAGER_BYTES:
            return self._place(lane, view)
        number = self.engine.outgoing.eager(view)
        if number is None:
            return False
        self._put(pack(MessageKind.EAGER, number, *lane), view)
        self._ring()
        return True

    def _place(self, lane: Lane, view: memoryview) -> bool:
        slot = None if self._places_out is None else self._places_out.put(view)
        if slot is None:
            return False
        self._put(pack(Kind.PLACED, self.engine.outgoing.placed(), *lane, view.nbytes, slot))
        self._ring()
        return True

    def settle(self) -> None:
        """Send due packets, as far as the ring takes them, and read small messages."""
        self._again = True
        if self._settling:
            return
        if not self._own and self._stuck is None and not self.engine.outgoing.due:  # as for most packets
            if self._rings:
                self._ring()
            if self._changed is not None:
                self._changed.set()
            return
        self._settling = True
        try:
            while self._again and not self._dead:
                self._again = False
                if self._stuck is not None:
                    self._put_stuck(self._stuck)
                while self._stuck is None and not self._dead and (packet := self._next()) is not None:
                    self._put(packet)
        finally:
            self._settling = False
        self._ring()
        if self._changed is not None:  # without a call, for every message comes by here
            self._changed.set()

    def _next(self) -> bytes | None:
        if self._own:
            return self._own.popleft()
        while (message := self.engine.outgoing.next_message()) is not None:
            kind, fields, payload = message
            if payload is not None:
                return pack(kind, *fields) + payload
            if kind is MessageKind.OFFER:
                return self._offer(fields)
            if kind is MessageKind.ACCEPT and self.peer.readable:
                self._fetch(fields[0])
                continue
            if kind in _SETTLES_OFFER:
                self._addresses.pop(fields[0], None)
            return pack(kind, *fields)
        return self._next_piece()

    def _offer(self, fields: tuple[int, ...]) -> bytes:
        send = self.engine.outgoing.sends[fields[0]]
        address = address_of(send.view) if send.view else 0
        urgency = min(max(send.priority, -_MIDDLE), _MIDDLE - 1) + _MIDDLE
        return pack(MessageKind.OFFER, *fields, address, urgency)

    def _next_piece(self) -> bytes | None:
        """Copy a piece of an accepted message into a slot, where the other side may not read it where it lies."""
        chunk = self.engine.outgoing.next_chunk() if self._out.free else None
        if chunk is None:
            return None
        slot = self._out.fill(chunk.view)
        return pack(MessageKind.CHUNK, chunk.send.number, chunk.offset, chunk.nbytes, slot)

    def _put(self, head: bytes, payload: bytes | memoryview = b"") -> None:
        if self._packets_out.write(head, payload):
            self._count += 1
            self._rings = True
        else:
            self._stuck = head + payload
            self._packets_out.say_full(True)
            fence()
            self._put_stuck(self._stuck)  # room may have been made before that could be known

    def _put_stuck(self, packet: bytes) -> None:
        if self._packets_out.write(packet):
            self._stuck = None
            self._packets_out.say_full(False)
            self._count += 1
            self._rings = True

    def _ring(self) -> None:
        """Let the other process know of packets, if it sleeps."""
        if self._rings:
            self._rings = False
            fence()
            self.ring()

    # -- arrivals -----------------------------------------------------------------------------------------------------

    @property
    def takes_threads(self) -> bool:
        """Whether a thread that has the loop's place may send and take in packets: that wakes no task."""
        busy = self._settling or self._reading or self._dead or self._stuck is not None
        return (
            not busy and self.engine.gone is None and self._changed is None and not self.engine.incoming.watchers.calls
        )

    def catch_up(self) -> bool:
        """Act on packets that have come, and read a piece of a long message."""
        before, here = self._count, get_ident() == self._thread
        self._visited = not here
        try:
            self.look()
            if self._fetching and (here or self.takes_threads):
                self._read_some()
        finally:
            self._visited = False
        return self._count > before

    @property
    def news(self) -> bool:
        """Whether packets have come, or there is more of a long message to read."""
        return self.waits or bool(self._fetching)

    @property
    def waits(self) -> bool:
        """Whether packets have come, or there is room again for one that waits."""
        return self._packets_in.waits or (self._stuck is not None and self._packets_out.drained)

    def look(self) -> None:
        """Act on packets that have come."""
        here = get_ident() == self._thread
        self._drain(here=here)
        if here and self._fetching:
            self._read_on()

    def _drain(self, *, here: bool = True) -> bool:
        """Act on the packets that are there; False if there may be more.

        Args:
            here: Whether this is the loop's thread; another one leaves to it whatever may wake a task.
        """
        if self._reading or not (here or self.takes_threads):
            return self._reading
        self._reading = True
        dropped = broken = False
        try:
            for _ in range(_PACKETS_AT_ONCE):
                packet = None if self._dead else self._packets_in.peek()
                if packet is None:
                    return True
                kind, fields, payload = unpack(packet)
                if not here and kind not in _FOR_THREADS:
                    return False
                self._count += 1
                self._hear(kind, fields, payload)
                self._packets_in.drop()
                dropped = True
        except ProtocolError as error:
            if here:  # the loop comes to it, too
                self._ended(f"a bad packet: {error}", evident=True)
            return True
        except BaseException as error:
            broken = not isinstance(error, Exception)  # by a handler of signals: the packet may be half done
            raise
        finally:
            self._reading = broken
            self._rings = self._rings or (dropped and self._packets_in.wanted)
            self.settle()
        return False

    def _hear(self, kind: int, fields: tuple[int, ...], payload: memoryview) -> None:
        if kind == Kind.BYE:
            self._farewell = True
            if self.engine.gone is None:
                self.engine.end(f"{self.name} has left", keep_arrived=True)
                self.on_loss()
        elif kind == Kind.FREED:
            self._out.freed(*fields)
        elif self.engine.gone is not None:
            pass
        elif kind == MessageKind.EAGER:
            self.engine.incoming.eager(fields, payload)
        elif kind == MessageKind.OFFER:
            self._addresses[fields[0]] = fields[5:]  # type: ignore[assignment]
            self.engine.hear(kind, fields[:5])
        elif kind == Kind.PLACED:
            self._hear_placed(*fields)
        elif kind == MessageKind.CHUNK:
            self._copy(*fields)
        elif kind == Kind.TOLD:
            self.hear_told(fields)
        else:
            self.engine.hear(kind, fields)

    def _hear_placed(self, number: int, src: int, dst: int, tag: int, nbytes: int, slot: int) -> None:
        places = self._places_in
        if places is None:
            raise ProtocolError(f"message {number} lies in a slot for pieces")
        view = places.view(slot, nbytes)
        self.engine.incoming.placed(number, (src, dst, tag), view, partial(places.emptied, slot))

    def _copy(self, number: int, offset: int, nbytes: int, slot: int) -> None:
        """Take a piece out of a slot."""
        self.engine.incoming.place(number, offset, nbytes)[:] = self._in.view(slot, nbytes)
        self._own.append(pack(Kind.FREED, slot))
        self.engine.incoming.filled(number, offset, nbytes)

    # -- reading where it lies ----------------------------------------------------------------------------------------

    def _fetch(self, number: int) -> None:
        """Read a matched message; a long one is left to a task, but one of a single piece to a thread that looks."""
        receive = self.engine.incoming.filling.get(number)
        alone = not self._fetching and get_ident() != self._thread
        if receive is None or receive.nbytes <= (SLOT_BYTES if alone else _AT_ONCE_BYTES):
            self._read_piece(number, 0)
            return
        heappush(self._fetching, (self._addresses[number][1], number, 0))
        if not self._visited:
            self._read_on()

    def _read_on(self) -> None:
        """Let a task read the rest of long messages; a thread may read pieces as well, as long as it looks."""
        if get_ident() == self._thread:
            self._work.set()
        else:
            self._token.run_sync_soon(self._read_on, idempotent=True)

    def _read_piece(self, number: int, offset: int) -> bool:
        """Read the next piece of a message; return whether more are left."""
        receive = self.engine.incoming.filling.get(number)
        if receive is None:  # its sender has closed
            self._addresses.pop(number, None)
            return False
        nbytes = min(SLOT_BYTES, receive.nbytes - offset)
        try:
            read(self.peer.pid, self._addresses[number][0] + offset, self.engine.incoming.place(number, offset, nbytes))
        except OSError as error:
            gone = error.errno == errno.ESRCH
            reason = "its process has ended" if gone else f"its memory cannot be read: {error.strerror}"
            if get_ident() == self._thread:
                self._ended(reason)
            else:
                self._token.run_sync_soon(self._ended, reason)
            return False
        self._count += 1
        more = offset + nbytes < receive.nbytes
        self.engine.incoming.filled(number, offset, nbytes)
        return more

    async def _read_pieces(self) -> None:
        while True:
            await self._work.wait()
            self._work = trio.Event()
            while self._fetching and not self._dead:
                self._read_some()
                await trio.lowlevel.checkpoint()

    def _read_some(self) -> None:
        until_s = perf_counter() + _READING_S
        while self._fetching and not self._dead:
            self._read_next()
            if perf_counter() >= until_s:
                return

    def _read_next(self) -> None:
        """Read the next piece of the most urgent long message."""
        urgency, number, offset = heappop(self._fetching)
        if self._read_piece(number, offset):
            heappush(self._fetching, (urgency, number, offset + SLOT_BYTES))
        self.settle()

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read packets and long messages until the other side has ended."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read_pieces)
            with suppress(trio.ClosedResourceError):
                while not self._dead:
                    await trio.lowlevel.wait_readable(self.peer.socket)
                    await self._hear_end()
            nursery.cancel_scope.cancel()

    async def _hear_end(self) -> None:
        """Act on the end of the other process, after all that it has said."""
        try:
            said = self.peer.socket.recv(1)
        except BlockingIOError:
            return
        except OSError as error:
            self._ended(str(error.strerror))
            return
        while not self._drain():
            await trio.lowlevel.checkpoint()
        if not self._dead:
            self._ended("a packet that came by its socket" if said else "its process has ended", evident=bool(said))

    def _ended(self, reason: str, *, evident: bool = False) -> None:
        if self._farewell or self._said_bye:
            self._cut()
        else:
            self.lose(reason, evident=evident)

    def lose(self, reason: str, *, evident: bool = False) -> None:
        """Give the process up: every operation with its ranks fails."""
        if self.engine.gone is None:
            self._report(f"{self.name} is lost: {reason}")
        self.give_up(reason, evident=evident)

    def give_up(self, reason: str, *, evident: bool = False) -> None:
        """Give the process up without a report to the user, who has been told."""
        if self.engine.gone is None:
            self.engine.end(f"{self.name} is lost: {reason}", evident=evident)
            self.on_loss()
        self._cut()

    def _cut(self) -> None:
        if not self._dead:
            self._dead = True
            self._own.clear()
            self._fetching.clear()
            trio.lowlevel.notify_closing(self.peer.socket)
            self.peer.socket.close()
        self.note_change()

    # -- leaving ------------------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Finish messages that both sides have begun, say goodbye, and wait until the other side has, too."""
        await self.until(lambda: self.engine.gone is not None or (self.engine.quiet and self._idle))
        self._said_bye = True
        gone, self.engine.gone = self.engine.gone, self.engine.gone or "this side has closed"
        if not self._dead:
            self._own.append(pack(Kind.BYE))
            self.settle()
            await self.until(lambda: self._dead or (self._idle and self._half_closed()))
            await self.until(lambda: self._dead)
        self._cut()
        self.engine.end(gone or "this side has closed")

    @property
    def _idle(self) -> bool:
        return not self._own and self._stuck is None

    def _half_closed(self) -> bool:
        with suppress(OSError):
            self.peer.socket.shutdown(socket.SHUT_WR)
        return True

    def traffic(self) -> dict[Hashable, int]:
        """Return the number of packets and pieces that have moved."""
        return {None: self._count}
