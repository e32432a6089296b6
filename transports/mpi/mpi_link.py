"""The link to another process, or to this one itself, over MPI: messages become headers and pieces on the wire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from transports.buffers import BounceBuffers
from transports.failures import LinkLostError
from transports.matched import MatchedLink
from transports.matching import Chunk, Lane, Limits, MessageKind, ProtocolError
from transports.matching.protocol import BROKEN_PROTOCOL
from transports.mpi.wire import BYE, CHUNK_BYTES, EAGER_BYTES, HEADERS, SLOTS, Wire

#: Eager bytes from one process that another has not consumed, at most.
CREDIT_BYTES = 16 << 20

#: Eager bytes from all senders together, unless that leaves a sender too little for a few messages.
TOTAL_CREDIT_BYTES = 256 << 20

#: Cost of an eager message beside its payload: its header here and its place in the receiver's memory.
OVERHEAD_BYTES = HEADERS.head_bytes + 200

#: Pieces under way at once, to one process or of one receive: enough to keep the wire full while a finished one is
#: noticed, few enough for a more urgent message to get its turn soon.
WINDOW = 4


def limits(members: int, *, credit_bytes: int = CREDIT_BYTES, chunk_bytes: int = CHUNK_BYTES) -> Limits:
    """Return the limits that a world of this many processes agrees on."""
    return Limits(
        eager_bytes=EAGER_BYTES,
        chunk_bytes=chunk_bytes,
        budget_bytes=max(4 * EAGER_BYTES, min(credit_bytes, TOTAL_CREDIT_BYTES // members)),
        overhead_bytes=OVERHEAD_BYTES,
        places=SLOTS,
        confirmed=False,  # MPI reports when a piece has left
    )


class MpiLink(MatchedLink):
    """The link to one process of the communicator.

    Args:
        member: Index of the process.
        ranks: Ranks of the process.
        local: The ranks of this process.
        agreed: The limits.
        memory: Buffers of messages on loan.
        wire: Sends and receives headers and pieces.
        look: Polls for headers.
        stir: Called whenever a message is sent or waited for, so that MPI is polled more often.
        failed: Called when the wire fails.

    Attributes:
        bye_sent: This side has sent its goodbye.
        lost: The process is lost without a goodbye, and gets none.
    """

    def __init__(
        self,
        member: int,
        ranks: Sequence[int],
        local: Sequence[int],
        agreed: Limits,
        memory: BounceBuffers,
        *,
        wire: Wire,
        look: Callable[[], None] = lambda: None,
        stir: Callable[[], None] = lambda: None,
        failed: Callable[[LinkLostError], None],
    ) -> None:
        super().__init__(member, ranks, local, agreed, memory)
        self.bye_sent: bool = False
        self.lost: bool = False
        self._chunk_bytes = agreed.chunk_bytes
        self._wire = wire
        self._look, self._stir, self._failed = look, stir, failed
        self._slots = list(range(SLOTS))  # free slots, for messages from the other process
        self._landing: dict[int, _Landing] = {}  # by number of the announcement
        self._their_slots: dict[int, int] = {}  # of messages to the other process, by number of the announcement
        self._unsent_bytes: dict[int, int] = {}  # of messages to the other process, by number
        self._flying = 0

    # -- departures ---------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Transmit due messages within the window."""
        try:
            self._send_headers()
            self._send_chunks()
        except LinkLostError as error:
            self._failed(error)
        self._stir()

    def send_now(self, lane: Lane, view: memoryview) -> bool:
        """Send a small message inside its header, if its receiver has room for it."""
        number = self.engine.outgoing.reserve_eager(view)
        if number is None and view.nbytes <= EAGER_BYTES:
            self.look()  # credit may have arrived
            self.engine.require_alive(lane)
            number = self.engine.outgoing.reserve_eager(view)
        if number is None:
            return False
        try:
            self._send_header(MessageKind.EAGER, (number, *lane), view)
        except LinkLostError as error:
            self._failed(error)
            self.engine.require_alive(lane)
        return True

    def look(self) -> None:
        """Poll for headers, and poll more often from now on."""
        self._look()
        self._stir()

    def send_bye(self) -> None:
        """Send the goodbye, unless the process is lost."""
        if self.bye_sent or self.lost:
            return
        self.bye_sent = True
        try:
            self._wire.send_header(self.member, HEADERS.pack(BYE))
        except LinkLostError as error:
            self._failed(error)

    def _send_headers(self) -> None:
        """Send due messages as headers; drop them if the process is gone or this side has sent its goodbye."""
        while (message := self.engine.outgoing.next_message()) is not None:
            if self.engine.gone is None and not self.bye_sent:
                self._send_header(*message)

    def _send_header(self, kind: MessageKind, fields: tuple[int, ...], payload: memoryview | None) -> None:
        """Send a header; an acceptance also names the slot of the message's pieces."""
        if kind == MessageKind.ACCEPT:
            fields = (*fields, self._assign_slot(fields[0]))
        header = HEADERS.pack(kind, *fields)
        self._wire.send_header(self.member, header if payload is None else b"".join((header, payload)))

    def _send_chunks(self) -> None:
        """Send due pieces, as long as fewer than `WINDOW` are under way."""
        while self._flying < WINDOW and (chunk := self.engine.outgoing.next_chunk()) is not None:
            number = chunk.send.number
            self._flying += 1
            self._unsent_bytes.setdefault(number, chunk.send.nbytes)
            self._wire.send(self.member, self._their_slots[number], chunk.view, partial(self._on_chunk_sent, chunk))

    def _on_chunk_sent(self, chunk: Chunk) -> None:
        """Count a piece that has left; the last one of a message ends its send."""
        number = chunk.send.number
        self._flying -= 1
        self._unsent_bytes[number] -= chunk.nbytes
        if not self._unsent_bytes[number]:
            del self._unsent_bytes[number], self._their_slots[number]
            self.engine.outgoing.end_departed(chunk.send)
        self.settle()

    # -- arrivals -----------------------------------------------------------------------------------------------------

    def handle(self, message: memoryview) -> None:
        """Handle a header. A process that breaks the protocol is lost."""
        if self.engine.gone is not None:
            return
        try:
            self._handle_header(*HEADERS.unpack(message))
        except ProtocolError as error:
            self.give_up(f"{self.name} breaks the protocol: {error}; {BROKEN_PROTOCOL}")
        self.settle()

    def give_up(self, reason: str) -> None:
        """Fail all calls with the process, because it is lost."""
        self.lost = True
        self._cancel_all_receives()
        self.engine.end(reason)

    def _handle_header(self, kind: int, fields: tuple[int, ...], payload: memoryview) -> None:
        """Handle a header by its kind; `ProtocolError` if it is invalid."""
        if kind == MessageKind.EAGER:
            self.engine.incoming.handle_eager(fields, payload)
        elif kind == BYE:
            self.engine.end(f"{self.name} has left", keep_arrived=True, keep_moving=True)
        else:
            if kind == MessageKind.ACCEPT:
                self._record_slot(*fields)
            elif kind == MessageKind.ABANDON:
                self._cancel_receives(*fields)
            self.engine.handle(kind, fields[:1] if kind == MessageKind.ACCEPT else fields)

    def _record_slot(self, number: int, slot: int) -> None:
        """Record the slot that the receiver has named for the pieces of a message."""
        if slot >= SLOTS:
            raise ProtocolError(f"ACCEPT names slot {slot} of {SLOTS}")
        if number in self.engine.outgoing.sends:
            self._their_slots.setdefault(number, slot)

    def _assign_slot(self, number: int) -> int:
        """Take a slot for a message that is about to be accepted, and post receives for its pieces; return the slot."""
        slot = self._slots.pop()
        receive = self.engine.incoming.filling[number]
        landing = self._landing[number] = _Landing(slot, receive.nbytes)
        self._post_receives(number, landing)
        return slot

    def _post_receives(self, number: int, landing: _Landing) -> None:
        """Post receives for the next pieces of a message, up to `WINDOW` at once."""
        while landing.posted_bytes < landing.nbytes and len(landing.cancels) < WINDOW:
            offset = landing.posted_bytes
            nbytes = min(self._chunk_bytes, landing.nbytes - offset)
            landing.posted_bytes += nbytes
            piece = self.engine.incoming.chunk_memory(number, offset, nbytes)
            done = partial(self._on_piece_arrived, number, offset, nbytes)
            landing.cancels.append(self._wire.receive(self.member, landing.slot, piece, done))

    def _on_piece_arrived(self, number: int, offset: int, nbytes: int) -> None:
        """Count an arrived piece, and post the next receive; the last piece frees the slot."""
        landing = self._landing.get(number)
        if landing is None:
            return  # the process has been given up
        landing.cancels.pop(0)  # pieces of a slot arrive in order
        self._post_receives(number, landing)
        if not landing.cancels:
            del self._landing[number]
            self._slots.append(landing.slot)
        self.engine.incoming.count_chunk(number, offset, nbytes)
        self.settle()

    def _cancel_receives(self, number: int) -> None:
        """Cancel the receives of a message that its sender has abandoned, and free its slot."""
        landing = self._landing.pop(number, None)
        if landing is not None:
            for cancel in reversed(landing.cancels):
                cancel()
            self._slots.append(landing.slot)

    def _cancel_all_receives(self) -> None:
        """Cancel the receives of all messages that are arriving."""
        for number in list(self._landing):
            self._cancel_receives(number)

    def lose(self, reason: str) -> None:
        """Fail all waiting calls, because the wire has failed."""
        self.lost = True
        self._landing.clear()
        self.engine.end(reason)


class _Landing:
    """A message that arrives in pieces.

    Attributes:
        slot: The slot that it occupies.
        nbytes: Length of the message.
        posted_bytes: Offset of the next piece without a receive.
        cancels: Functions that cancel the posted receives, the oldest first.
    """

    __slots__ = ("cancels", "nbytes", "posted_bytes", "slot")

    def __init__(self, slot: int, nbytes: int) -> None:
        self.slot = slot
        self.nbytes = nbytes
        self.posted_bytes = 0
        self.cancels: list[Callable[[], None]] = []
