"""Messages from one other process, and the receives that wait for them.

Announcements may overtake each other on the way; they are put in the order of their numbers before they are matched, so
that messages of a lane meet receives in the order of the calls on both sides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from time import perf_counter_ns

from transports.buffers import BounceBuffers
from transports.matching.ends import Lane, Receive, pop_first
from transports.matching.protocol import PLACES, Limits, MessageKind, ProtocolError
from transports.signature import OPEN_SIGNATURE, TEXT_BYTES, PlainSignature
from transports.wire import OPEN, Envelope


@dataclass(slots=True, kw_only=True)
class Arrival:
    """A message that no receive has met yet. An eager one has a payload, a pushed one `pushed`, an offer neither."""

    number: int
    nbytes: int
    payload: bytes | None = None
    pushed: Receive | None = None  # A placeholder that collects the chunks until a receive meets the message
    signature: PlainSignature = OPEN_SIGNATURE
    place: int = 0  # Index of the signature in the table of the sender's signatures
    since_ns: int = 0  # Time of the announcement; a receive from any source takes the oldest message

    @property
    def whole(self) -> bool:
        """Whether the whole message has arrived."""
        return self.payload is not None if self.pushed is None else not self.pushed.missing_bytes

    @property
    def is_offer(self) -> bool:
        """Whether no bytes follow until a receive accepts the message."""
        return self.payload is None and self.pushed is None


class Budget:
    """Counts the eager and pushed bytes of the other process that wait here for their receives.

    Bytes that ranks have received are returned to the sender as credit: it may send that many again.

    Args:
        limits: The limits of both sides.
        answer: Sends a protocol message to the other process; called with its kind and its fields.
    """

    def __init__(self, limits: Limits, answer: Callable[..., None]) -> None:
        self._answer = answer
        self._budget_bytes, self._overhead_bytes = limits.budget_bytes, limits.overhead_bytes
        self._used_bytes = 0  # as the other side sees it
        self._free_bytes = 0  # received by ranks, and not yet returned to the sender as credit
        self._report_bytes = limits.budget_bytes // 4

    def count_arrived(self, nbytes: int) -> None:
        """Count a message that arrived and waits for its receive.

        Raises:
            ProtocolError: The budget is exceeded.
        """
        self._used_bytes += nbytes + self._overhead_bytes
        if self._used_bytes > self._budget_bytes:
            raise ProtocolError(f"peer sent more eager data than the agreed {self._budget_bytes} bytes")

    def count_received(self, nbytes: int) -> None:
        """Count a waiting message that a rank has received; send credit once that makes a quarter of the budget.

        Args:
            nbytes: Length of the message, as it was passed to `count_arrived`.
        """
        self._free_bytes += nbytes + self._overhead_bytes
        if self._free_bytes >= self._report_bytes:
            self._used_bytes -= self._free_bytes
            self._answer(MessageKind.CREDIT, self._free_bytes)
            self._free_bytes = 0


class Incoming:
    """Messages from one other process, and the receives that wait for them or are being filled.

    Args:
        srcs: Ranks of the other process.
        dsts: Ranks of this process.
        limits: The limits that both have agreed on.
        memory: Pool of buffers for messages that arrive before their receive, or are received on loan.
        answer: Sends a protocol message to the other process; called with its kind and its fields.

    Attributes:
        arrived: Messages without a receive, by lane. No entry is empty.
        posted: Receives without a message, by lane. No entry is empty.
        filling: Matched receives with missing bytes, by number.
        watchers: Callbacks for messages that arrive without a receive, and for the end of the link.
        flush_answers: Called when an answer should leave at once, before the receive that caused it ends.
    """

    def __init__(
        self,
        srcs: Iterable[int],
        dsts: Iterable[int],
        limits: Limits,
        memory: BounceBuffers,
        answer: Callable[..., None],
    ) -> None:
        self.arrived: dict[Lane, deque[Arrival]] = {}
        self.posted: dict[Lane, deque[Receive]] = {}
        self.filling: dict[int, Receive] = {}
        self.watchers: list[Callable[[], None]] = []
        self.flush_answers: Callable[[], None] = _do_nothing
        self._srcs = frozenset(srcs)
        self._dsts = frozenset(dsts)
        self._limits = limits
        self._whole_bytes = min(limits.push_bytes, limits.chunk_bytes)  # longest pushed message of a single chunk
        # whether the chunks of a message arrive in order
        self._in_order = limits.push_bytes > 0 and limits.ordered
        self._memory = memory
        self._answer = answer
        self._next_number = 0  # of the announcement or signature whose turn it is
        # by number: announcements and signatures that wait for their turn, as the functions that handle them
        self._early_arrivals: dict[int, Callable[[], None]] = {}
        self._signatures: dict[int, PlainSignature] = {0: OPEN_SIGNATURE}  # of the other process, by place
        self._offers: dict[int, Lane] = {}  # the offers in `arrived`
        self._withdrawn: set[int] = set()  # withdrawals that overtook their offer
        self._budget = Budget(limits, answer)

    @property
    def awaited(self) -> bool:
        """Whether a receive or a watcher waits for a message that has not arrived completely."""
        return bool(self.posted or self.filling or self.watchers)

    # -- announcements ------------------------------------------------------------------------------------------------

    def handle_eager(self, fields: Sequence[int], payload: memoryview) -> None:
        """Handle an `EAGER` message.

        Args:
            fields: Number, source, destination, tag, and place of the signature.
            payload: Bytes of the message, which are valid only during the call.
        """
        number, src, dst, tag, place = fields
        lane = (src, dst, tag)
        if number != self._next_number or lane not in self.posted:
            self._budget.count_arrived(payload.nbytes)
            self._add_announcement(number, lane, payload.nbytes, place, bytes(payload))
            return
        self._next_number += 1  # the fast path: it is the message's turn, and a receive waits
        self._budget.count_arrived(payload.nbytes)
        self._budget.count_received(payload.nbytes)
        theirs = self._find_signature(number, place)
        receive = pop_first(self.posted, lane)
        error = receive.refusal(payload.nbytes, theirs)
        if error is None:
            receive.finish_with_payload(payload)
        else:
            receive.end(error)
        if self._early_arrivals:
            self._handle_due_announcements()

    def handle_signature(self, number: int, place: int, fingerprint: int, text: bytes = b"") -> None:
        """Add a signature, which later announcements name by its place, to the table when its number is next.

        Args:
            number: Number of this message; signatures and announcements are counted together.
            place: Index of the signature in the table.
            fingerprint: Fingerprint of the signature.
            text: Text of the signature.

        Raises:
            ProtocolError: The place or the length is out of range, or the number is repeated.
        """
        if not 0 < place < PLACES or len(text) > TEXT_BYTES:
            raise ProtocolError(f"peer sent a signature of {len(text)} bytes for place {place}")
        self._check_number(number)
        self._early_arrivals[number] = partial(self._signatures.__setitem__, place, PlainSignature(fingerprint, text))
        self._handle_due_announcements()

    def _find_signature(self, number: int, place: int) -> PlainSignature:
        """Return the signature at a place of the table; raise `ProtocolError` if the sender has sent none for it."""
        theirs = self._signatures.get(place)
        if theirs is None:
            raise ProtocolError(f"peer sent message {number} with signature {place}, which it has not sent before")
        return theirs

    def handle_offer(self, number: int, src: int, dst: int, tag: int, nbytes: int, place: int) -> None:
        """Handle the announcement of a long message whose bytes wait for a receive.

        Args:
            number: Number of the announcement.
            src: Sending rank.
            dst: Receiving rank.
            tag: Tag of the message.
            nbytes: Length of the message.
            place: Index of the signature in the table of the sender's signatures.

        Raises:
            ProtocolError: The announcement is repeated, names wrong ranks, or is one of too many.
        """
        self._add_announcement(number, (src, dst, tag), nbytes, place, None)

    def handle_push(self, number: int, src: int, dst: int, tag: int, nbytes: int, place: int) -> None:
        """Handle the announcement of a pushed message, and take memory for the message if no receive waits.

        Arguments are as of `handle_offer`. Nothing happens if a chunk of the message has already announced it.

        Raises:
            ProtocolError: The message is longer than pushed ones may be, names wrong ranks, or exceeds the budget.
        """
        lane = (src, dst, tag)
        if number < self._next_number or number in self._early_arrivals:
            return  # a chunk has announced it: over another rail, or sent again after the loss of one
        if nbytes > self._limits.push_bytes:
            limit_bytes = self._limits.push_bytes
            message = f"message {number} (to rank {dst}, tag {tag}) of {nbytes} bytes"
            raise ProtocolError(f"rank {src} pushed {message}; the limit is {limit_bytes}")
        if self._match_at_once(number, lane, nbytes, place) is not None:
            return
        self._check_announcement(number, lane)
        self._budget.count_arrived(nbytes)
        pushed = Receive(lane, None, nbytes)
        self.filling[number] = pushed
        # otherwise `_handle_due_announcements` matches it with a waiting receive, which has memory
        if number != self._next_number or lane not in self.posted:
            pushed.view = self._memory.take(nbytes)
        arrival = Arrival(number=number, nbytes=nbytes, place=place, pushed=pushed)
        self._early_arrivals[number] = partial(self._handle_announcement, lane, arrival)
        self._handle_due_announcements()

    def pushed_chunk_memory(
        self, chunk_bytes: int, number: int, src: int, dst: int, tag: int, nbytes: int, place: int, offset: int
    ) -> memoryview:
        """Return the memory for a chunk of a pushed message; the first of its chunks to arrive announces it.

        Args:
            chunk_bytes: Length of the chunk.
            number: Number of the announcement.
            src: Sending rank.
            dst: Receiving rank.
            tag: Tag of the message.
            nbytes: Length of the message.
            place: Index of the signature in the table of the sender's signatures.
            offset: Offset of the chunk in the message.

        Raises:
            ProtocolError: As of `handle_push` and `chunk_memory`.
        """
        if number >= self._next_number and number not in self._early_arrivals:
            # the usual case: the message is a single chunk, and may meet its receive without an announcement
            if chunk_bytes == nbytes <= self._whole_bytes:
                receive = self._match_at_once(number, (src, dst, tag), nbytes, place)
                if receive is not None and receive.view is not None:
                    return receive.view[:nbytes]
            self.handle_push(number, src, dst, tag, nbytes, place)
        return self.chunk_memory(number, offset, chunk_bytes)

    def _match_at_once(self, number: int, lane: Lane, nbytes: int, place: int) -> Receive | None:
        """Match a pushed message with a waiting receive without delay, if it is the message's turn and both agree.

        The returned receive now waits for the chunks in `filling`. None, with nothing changed, if there is none.
        `place` is that of the signature in the sender's table.
        """
        posted = self.posted.get(lane)
        if posted is None or number != self._next_number or not 0 < nbytes == posted[0].nbytes:
            return None
        if self._early_arrivals:
            return None
        if posted[0].refusal(nbytes, self._find_signature(number, place)) is not None:
            return None
        # The message takes no memory here, but the sender has used credit for it, which is returned at once.
        self._budget.count_arrived(nbytes)
        self._budget.count_received(nbytes)
        self._next_number += 1
        receive = self.filling[number] = posted.popleft()
        if not posted:
            del self.posted[lane]
        receive.matched = True
        if receive.wants_loan:
            self._allocate_memory(receive)
        return receive

    def handle_withdraw(self, number: int) -> None:
        """Drop an offer that the sender has cancelled, and confirm it. If a receive has matched it, nothing happens."""
        if self.drop_offer(number):
            self._answer(MessageKind.WITHDRAWN, number)

    def drop_offer(self, number: int) -> bool:
        """Drop an offer that waits for a receive; return whether it was dropped now.

        An offer that has not arrived yet is dropped on arrival; an offer that a receive has matched stays. Both return
        False.

        Raises:
            ProtocolError: The number is far beyond those that have arrived.
        """
        if number >= self._next_number:
            if number - self._next_number > self._limits.waiting:
                raise ProtocolError(f"peer took back offer {number}, beyond the window of {self._limits.waiting}")
            self._withdrawn.add(number)
            return False
        lane = self._offers.pop(number, None)
        if lane is None:
            return False
        queue = self.arrived[lane]
        queue.remove(next(arrival for arrival in queue if arrival.number == number))
        if not queue:
            del self.arrived[lane]
        return True

    def _add_announcement(self, number: int, lane: Lane, nbytes: int, place: int, payload: bytes | None) -> None:
        """Add an announcement, and handle all whose turn has come. An eager message has a payload, an offer none.

        `place` is that of the signature in the sender's table.
        """
        self._check_announcement(number, lane)
        if len(self._early_arrivals) + len(self._offers) >= self._limits.waiting:
            raise ProtocolError(f"peer announced more than {self._limits.waiting} messages that no rank receives")
        arrival = Arrival(number=number, nbytes=nbytes, place=place, payload=payload)
        self._early_arrivals[number] = partial(self._handle_announcement, lane, arrival)
        self._handle_due_announcements()

    def _check_announcement(self, number: int, lane: Lane) -> None:
        """Raise `ProtocolError` if the number is repeated, or if the ranks do not belong to the two processes."""
        self._check_number(number)
        if lane[0] not in self._srcs or lane[1] not in self._dsts:
            raise ProtocolError(f"peer sent a message of ranks that it does not join: {lane[0]} to {lane[1]}")

    def _check_number(self, number: int) -> None:
        """Raise `ProtocolError` if an announcement or a signature is repeated."""
        if number < self._next_number or number in self._early_arrivals:
            raise ProtocolError(f"peer announced message {number} twice")

    def _handle_due_announcements(self) -> None:
        """Handle early announcements in the order of their numbers, up to the first that is missing."""
        while (early := self._early_arrivals.pop(self._next_number, None)) is not None:
            self._next_number += 1
            early()

    def _handle_announcement(self, lane: Lane, arrival: Arrival) -> None:
        """Match the message whose turn it is with a waiting receive, or keep it; drop it if it is a withdrawn offer."""
        arrival.signature = self._find_signature(arrival.number, arrival.place)
        if arrival.number in self._withdrawn and arrival.is_offer:
            self._withdrawn.remove(arrival.number)
            self._answer(MessageKind.WITHDRAWN, arrival.number)
        elif lane in self.posted:
            self._match_with_arrival(pop_first(self.posted, lane), arrival)
        else:
            arrival.since_ns = perf_counter_ns()
            self.arrived.setdefault(lane, deque()).append(arrival)
            if arrival.is_offer:
                self._offers[arrival.number] = lane
            self.notify_watchers()

    def notify_watchers(self) -> None:
        """Call the callbacks of all tasks that wait for any message."""
        for notify in tuple(self.watchers):
            notify()

    def unexpected(self, dst: int, tag: int | None) -> Iterator[Envelope]:
        """Yield the messages for rank `dst` that no receive has met; only those of `tag`, unless it is None."""
        for (src, receiver, its_tag), queue in self.arrived.items():
            if receiver == dst and tag in (None, its_tag):
                for arrival in queue:
                    since_ns, signature = arrival.since_ns, arrival.signature
                    yield Envelope(
                        src=src, dst=dst, tag=its_tag, nbytes=arrival.nbytes, since_ns=since_ns, signature=signature
                    )

    # -- receives -----------------------------------------------------------------------------------------------------

    def match_arrived(self, receive: Receive) -> None:
        """Match a receive with the oldest arrived message of its lane."""
        arrival = pop_first(self.arrived, receive.lane)
        self._offers.pop(arrival.number, None)
        self._match_with_arrival(receive, arrival)

    def withdraw_receive(self, receive: Receive) -> bool:
        """Cancel a receive; False if a message has matched it."""
        if receive.matched:
            return False
        queue = self.posted[receive.lane]
        queue.remove(receive)
        if not queue:
            del self.posted[receive.lane]
        receive.end(withdrawn=True)
        return True

    def _match_with_arrival(self, receive: Receive, arrival: Arrival) -> None:
        """Finish the receive, wait for missing bytes, or answer an offer."""
        if not arrival.is_offer:
            self._budget.count_received(arrival.nbytes)
        error = receive.refusal(arrival.nbytes, arrival.signature)
        # A receive of any length (`theirs` is set): only the peer has named the length, which may be more than the
        # memory of this host. So memory is taken before the offer is accepted.
        if error is None and arrival.is_offer and arrival.nbytes and receive.theirs is not None and receive.wants_loan:
            try:
                self._allocate_memory(receive)
            except (MemoryError, ValueError, OverflowError) as raised:
                error = raised
        if error is not None:
            self._refuse_arrival(receive, arrival)
            receive.end(error)
        elif arrival.payload is not None:
            receive.finish_with_payload(memoryview(arrival.payload))
        elif arrival.pushed is not None:
            self._match_pushed(receive, arrival, arrival.pushed)
        # an offer without bytes: there are none to ask for
        elif not arrival.nbytes:
            self._answer(MessageKind.TAKEN, arrival.number)
            receive.finish(memoryview(b"") if receive.wants_loan else None)
        else:
            receive.matched = True
            self.filling[arrival.number] = receive
            if receive.wants_loan and receive.view is None:
                self._allocate_memory(receive)
            self._answer(MessageKind.ACCEPT, arrival.number)

    def _refuse_arrival(self, receive: Receive, arrival: Arrival) -> None:
        """Drop a message that its receive refuses; the sender of an offer gets the receiver's length and signature."""
        pushed, signature = arrival.pushed, receive.signature or OPEN_SIGNATURE
        if pushed is not None and pushed.view is None and pushed.loan is None:
            pushed.view = self._memory.take(arrival.nbytes)  # for the bytes that still arrive, and are dropped
        elif arrival.is_offer:
            expected_bytes = arrival.nbytes if receive.nbytes == OPEN else receive.nbytes
            self._answer(MessageKind.REFUSE, arrival.number, expected_bytes, signature.fingerprint, text=signature.text)

    def _allocate_memory(self, receive: Receive) -> None:
        """Take memory for a receive without a buffer: for one chunk only if `consume` reads each as it arrives."""
        receive.rolling = receive.consume is not None and self._in_order
        nbytes = min(receive.nbytes, self._limits.chunk_bytes) if receive.rolling else receive.nbytes
        receive.view = self._memory.take(nbytes)

    def _match_pushed(self, receive: Receive, arrival: Arrival, pushed: Receive) -> None:
        """Let a receive take over state and memory of `pushed`, a placeholder with the chunks so far."""
        receive.matched = True
        receive.seen, receive.missing_bytes = pushed.seen, pushed.missing_bytes
        arrived = pushed.view if pushed.loan is None else pushed.loan
        if not receive.wants_loan:
            receive.detour = arrived
        elif arrived is None:
            self._allocate_memory(receive)
        else:
            receive.view = arrived
            if self._in_order:
                receive.consume_early_chunks(self._limits.chunk_bytes)
        if receive.missing_bytes:
            self.filling[arrival.number] = receive
        else:
            receive.finish_chunks(self._memory)

    # -- chunks -------------------------------------------------------------------------------------------------------

    def chunk_memory(self, number: int, offset: int, nbytes: int) -> memoryview:
        """Return the memory into which the bytes of a chunk are read.

        Args:
            number: Number of the message.
            offset: Offset of the chunk in the message.
            nbytes: Length of the chunk.

        Raises:
            ProtocolError: No receive expects the chunk, its offset or length is wrong, or it has arrived already.
        """
        receive = self.filling.get(number)
        if receive is None or receive.view is None:
            raise ProtocolError(f"peer sent a chunk of message {number}, which no receive has accepted")
        chunk_bytes = self._limits.chunk_bytes
        rest_bytes = receive.nbytes - offset
        fits = nbytes == rest_bytes if rest_bytes < chunk_bytes else nbytes == chunk_bytes
        if not fits or offset % chunk_bytes or offset in receive.seen:
            raise ProtocolError(f"message {number} has no chunk of {nbytes} bytes at {offset}, or received it already")
        if receive.rolling:
            return receive.view[:nbytes]
        return (receive.view if receive.detour is None else receive.detour)[offset : offset + nbytes]

    def count_chunk(self, number: int, offset: int, nbytes: int) -> None:
        """Count a chunk that has completely arrived; the last one ends the receive. Arguments are as of `chunk_memory`.

        Raises:
            ProtocolError: The chunk has arrived before, perhaps over another rail.
        """
        receive = self.filling.get(number)
        if receive is None or offset in receive.seen:
            raise ProtocolError(f"peer sent the chunk of message {number} at {offset} twice")
        receive.seen.add(offset)
        receive.missing_bytes -= nbytes
        if receive.consume is not None and receive.view is not None and self._in_order:
            start = 0 if receive.rolling else offset
            receive.consume(offset, receive.view[start : start + nbytes])
        if not receive.missing_bytes:
            del self.filling[number]
            if self._limits.confirms(receive.nbytes):
                self._answer(MessageKind.TAKEN, number)
                # before the receive ends, because its callback may keep the event loop busy
                self.flush_answers()
            receive.finish_chunks(self._memory)

    # -- how it ends --------------------------------------------------------------------------------------------------

    def remove_unmatched(self) -> list[Receive]:
        """Remove the receives that no message has matched, and return them."""
        receives = list(chain.from_iterable(self.posted.values()))
        self.posted.clear()
        return receives

    def clear(self, *, keep_arrived: bool) -> list[Receive]:
        """Drop all messages and receives, and return the unfinished receives.

        If `keep_arrived`, messages that have arrived completely stay: later receives may take them.
        """
        unfinished = [*self.remove_unmatched(), *self.filling.values()]
        self.filling.clear()
        self._early_arrivals.clear()
        self._offers.clear()
        self._withdrawn.clear()
        whole = {lane: deque(arrival for arrival in queue if arrival.whole) for lane, queue in self.arrived.items()}
        self.arrived = {lane: queue for lane, queue in whole.items() if queue and keep_arrived}
        return unfinished


def _do_nothing() -> None:
    """Do nothing, as the default of `flush_answers`: answers leave with later messages."""
