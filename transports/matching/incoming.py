"""Messages from one other process, and the receives that wait for them.

Announcements may overtake each other on the way; they are put in the order of their numbers before they are matched, so
that messages of a lane meet receives in the order of the calls on both sides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import chain, count

from transports.base import Envelope
from transports.buffers import BounceBuffers
from transports.matching.arrivals import Arrival, Budget, Overtaking, Watchers, any_of, pop
from transports.matching.ends import Lane, Receive
from transports.matching.protocol import Limits, MessageKind, ProtocolError

_TURNS = count()  # of the messages of all other processes together


class Incoming:
    """Arrivals, receives, and the messages that are being filled.

    Args:
        srcs: Ranks of the other process.
        dsts: Ranks of this process.
        limits: The limits that both have agreed on.
        memory: For messages that are lent.
        answer: Sends an answer to the other process.

    Attributes:
        arrived: Messages without a receive, by lane. No entry is empty.
        posted: Receives without a message, by lane. No entry is empty.
        filling: Receives whose bytes are on the way, by number.
        watchers: Callbacks for messages that arrive.
        said: Called when an answer should leave at once, before the receive that caused it ends.
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
        self.watchers: Watchers = Watchers()
        self.said: Callable[[], None] = _nothing
        self._srcs = frozenset(srcs)
        self._dsts = frozenset(dsts)
        self._limits = limits
        self._overtakes = not limits.ordered
        self._whole_bytes = min(limits.push_bytes, limits.chunk_bytes)
        # whether the chunks of a message come one after the other
        self._in_order = limits.push_bytes > 0 and limits.ordered
        self._memory = memory
        self._answer = answer
        self._line: dict[int, Receive] = {}  # matched, by number, until one of the places is free
        self._next_number = 0
        self._early: dict[int, tuple[Lane, Arrival]] = {}  # before their turn
        self._overtaking = Overtaking(limits, memory)
        self._offers: dict[int, Lane] = {}  # the offers in `arrived`
        self._withdrawn: set[int] = set()  # before they were offered
        self._budget = Budget(limits, answer)

    @property
    def waiting(self) -> Iterator[Receive]:
        """Every receive without a message."""
        return chain.from_iterable(self.posted.values())

    @property
    def moving(self) -> bool:
        """Whether a receive has met a message that is not all here."""
        return bool(self.filling or self._line)

    @property
    def wanted(self) -> bool:
        """Whether a call waits for a message that has not come, or not come whole."""
        return bool(self.posted or self.filling or self._line or self.watchers.calls)

    @property
    def held_bytes(self) -> int:
        """The memory of messages without a receive."""
        return sum(arrival.held_bytes for arrival in chain.from_iterable(self.arrived.values()))

    # -- announcements ------------------------------------------------------------------------------------------------

    def eager(self, fields: Sequence[int], payload: memoryview) -> None:
        """Take a message with its bytes, which are copied."""
        number, src, dst, tag = fields
        lane = (src, dst, tag)
        if number != self._next_number or lane not in self.posted:
            self._budget.spend(payload.nbytes)
            self._announced(number, lane, payload.nbytes, bytes(payload))
            return
        self._next_number += 1  # the short way: its turn has come, and a receive waits
        self._budget.pass_on(payload.nbytes)
        pop(self.posted, lane).take(payload)
        if self._early:
            self._catch_up()

    def offer(self, number: int, src: int, dst: int, tag: int, nbytes: int) -> None:
        """Take the announcement of a long message."""
        self._announced(number, (src, dst, tag), nbytes, None)

    def push(self, number: int, src: int, dst: int, tag: int, nbytes: int) -> None:
        """Take the announcement of a long message that follows unasked, and make room for it if no receive waits."""
        lane = (src, dst, tag)
        if nbytes > self._limits.push_bytes:
            raise ProtocolError(f"message {number} comes unasked, with {nbytes} bytes")
        if self._met(number, lane, nbytes) is not None:
            return
        if number != self._next_number and self._limits.ordered:
            raise ProtocolError(f"message {number} comes unasked, before its turn")
        self._check(number, lane)
        self._budget.spend(nbytes)
        pushed = Receive(lane, None, nbytes)
        self.filling[number] = pushed
        if number != self._next_number or lane not in self.posted:
            pushed.view = self._memory.take(nbytes)
        self._early[number] = lane, Arrival(number=number, nbytes=nbytes, pushed=pushed)
        self._catch_up()
        for offset in self._overtaking.whole(number):
            self._move(number, offset)

    def push_with(self, first_bytes: int, number: int, src: int, dst: int, tag: int, nbytes: int) -> memoryview:
        """Take the announcement of a message that comes with its first chunk, and return the memory of that."""
        if first_bytes == nbytes <= self._whole_bytes:
            receive = self._met(number, (src, dst, tag), nbytes)
            if receive is not None and receive.view is not None:
                return receive.view[:nbytes]
        self.push(number, src, dst, tag, nbytes)
        return self.place(number, 0, first_bytes)

    def _met(self, number: int, lane: Lane, nbytes: int) -> Receive | None:
        """Take the short way: return the waiting receive of that length if the turn of the message has come."""
        posted = self.posted.get(lane)
        if posted is None or number != self._next_number or not 0 < nbytes == posted[0].nbytes:
            return None
        if self._early or (self._overtakes and self._overtaking):
            return None
        self._budget.pass_on(nbytes)
        self._next_number += 1
        receive = self.filling[number] = posted.popleft()
        if not posted:
            del self.posted[lane]
        receive.matched = True
        if receive.lend:
            self._make_room(receive)
        return receive

    def withdraw(self, number: int) -> None:
        """Forget an offer without a receive; with one, the message is finished instead."""
        if self._forgotten(number):
            self._answer(MessageKind.WITHDRAWN, number)

    def abandoned(self, number: int) -> Receive | None:
        """Forget an offer; return the receive that has accepted it and waits in vain."""
        if self._forgotten(number):
            return None
        receive = self.filling.pop(number, None) or self._line.pop(number, None)
        self._accept_next()
        return receive

    def _forgotten(self, number: int) -> bool:
        """Forget an offer if it waits here; one that is still on its way is forgotten when it comes."""
        if number >= self._next_number:
            if number - self._next_number > self._limits.waiting:
                raise ProtocolError(f"offer {number} is withdrawn long before its turn")
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

    def _announced(self, number: int, lane: Lane, nbytes: int, payload: bytes | None) -> None:
        self._check(number, lane)
        if len(self._early) + len(self._offers) >= self._limits.waiting:
            raise ProtocolError(f"more than {self._limits.waiting} messages wait to be received")
        self._early[number] = lane, Arrival(number=number, nbytes=nbytes, payload=payload)
        self._catch_up()

    def _check(self, number: int, lane: Lane) -> None:
        if number < self._next_number or number in self._early:
            raise ProtocolError(f"message {number} is announced twice")
        if lane[0] not in self._srcs or lane[1] not in self._dsts:
            raise ProtocolError(f"a message from rank {lane[0]} to rank {lane[1]}, who do not live there and here")

    def _catch_up(self) -> None:
        while (early := self._early.pop(self._next_number, None)) is not None:
            self._next_number += 1
            self._arrive(*early)

    def _arrive(self, lane: Lane, arrival: Arrival) -> None:
        if arrival.number in self._withdrawn and arrival.payload is None and arrival.pushed is None:
            self._withdrawn.remove(arrival.number)
            self._answer(MessageKind.WITHDRAWN, arrival.number)
        elif lane in self.posted:
            self._match(pop(self.posted, lane), arrival)
        else:
            arrival.turn = next(_TURNS)
            self.arrived.setdefault(lane, deque()).append(arrival)
            if arrival.payload is None and arrival.pushed is None:
                self._offers[arrival.number] = lane
            self.watchers.wake(lane)

    def first_of(self, wanted: Container[Lane], free_bits: int) -> tuple[int, Envelope] | None:
        """Return the oldest message without a receive, and its turn; None without one.

        Args:
            wanted: The lanes that count, as `any_of` names them.
            free_bits: How many low bits of the tag may differ.
        """
        waiting = [(queue[0].turn, lane) for lane, queue in self.arrived.items() if any_of(lane, free_bits) in wanted]
        if not waiting:
            return None
        turn, lane = min(waiting)
        src, dst, tag = lane
        return turn, Envelope(src=src, dst=dst, tag=tag, nbytes=self.arrived[lane][0].nbytes)

    # -- receives -----------------------------------------------------------------------------------------------------

    def take(self, receive: Receive) -> None:
        """Give a receive the oldest message of its lane, which has `arrived`."""
        arrival = pop(self.arrived, receive.lane)
        self._offers.pop(arrival.number, None)
        self._match(receive, arrival)

    def post(self, receive: Receive) -> None:
        """Queue a receive."""
        queue = self.posted.get(receive.lane)
        if queue is None:
            queue = self.posted[receive.lane] = deque()
        queue.append(receive)

    def forget(self, receive: Receive) -> bool:
        """Take a receive back; False if it has met its message."""
        if receive.matched:
            return False
        queue = self.posted[receive.lane]
        queue.remove(receive)
        if not queue:
            del self.posted[receive.lane]
        receive.undo()
        return True

    def _match(self, receive: Receive, arrival: Arrival) -> None:
        """Bring a receive and an arrival together."""
        if arrival.payload is not None:
            self._budget.free(arrival.nbytes)
            receive.take(memoryview(arrival.payload))
        elif arrival.pushed is not None:
            self._adopt(receive, arrival, arrival.pushed)
        elif arrival.nbytes != receive.nbytes:
            self._answer(MessageKind.REFUSE, arrival.number, receive.nbytes)
            receive.disagree(sent_bytes=arrival.nbytes, expected_bytes=receive.nbytes)
        elif not arrival.nbytes:
            self._answer(MessageKind.TAKEN, arrival.number)
            receive.finish(memoryview(b"") if receive.lend else None)
        else:
            receive.matched = True
            if self._line or not self._has_place:
                self._line[arrival.number] = receive
            else:
                self._accept(arrival.number, receive)

    @property
    def _has_place(self) -> bool:
        return self._limits.places is None or len(self.filling) < self._limits.places

    def _accept_next(self) -> None:
        """Accept the messages that are next in line, as far as there are places."""
        while self._line and self._has_place:
            number = next(iter(self._line))
            self._accept(number, self._line.pop(number))

    def _accept(self, number: int, receive: Receive) -> None:
        self.filling[number] = receive
        if receive.lend:
            self._make_room(receive)
        self._answer(MessageKind.ACCEPT, number)

    def _make_room(self, receive: Receive) -> None:
        """Give a receive that lends the memory in which its message arrives."""
        receive.rolling = receive.consume is not None and self._in_order
        nbytes = min(receive.nbytes, self._limits.chunk_bytes) if receive.rolling else receive.nbytes
        receive.view = self._memory.take(nbytes)

    def _adopt(self, receive: Receive, arrival: Arrival, pushed: Receive) -> None:
        """Give a receive a pushed message, all or part of which may be here."""
        self._budget.free(arrival.nbytes)
        if arrival.nbytes != receive.nbytes:
            receive.disagree(sent_bytes=arrival.nbytes, expected_bytes=receive.nbytes)
            if pushed.view is None and pushed.lent is None:  # its bytes still come, and are dropped
                pushed.view = self._memory.take(arrival.nbytes)
            return
        receive.matched = True
        receive.seen, receive.missing_bytes = pushed.seen, pushed.missing_bytes
        came = pushed.view if pushed.lent is None else pushed.lent
        if not receive.lend:
            receive.detour = came
        elif came is None:
            self._make_room(receive)
        else:
            receive.view = came
            if self._in_order:
                receive.consume_seen(self._limits.chunk_bytes)
        if receive.missing_bytes:
            self.filling[arrival.number] = receive
        else:
            receive.land(self._memory)

    # -- chunks -------------------------------------------------------------------------------------------------------

    def place(self, number: int, offset: int, nbytes: int) -> memoryview:
        """Return the memory of a chunk.

        Raises:
            ProtocolError: No receive expects it, or it is there already.
        """
        if self._overtakes and (self._overtaking.has(number, offset) or self._may_overtake(number)):
            return self._overtaking.place(number, offset, nbytes)
        return self._belongs(number, offset, nbytes)

    def _may_overtake(self, number: int) -> bool:
        """Whether a chunk may belong to a message that is yet to be announced."""
        return number >= self._next_number and number not in self._early

    def _belongs(self, number: int, offset: int, nbytes: int) -> memoryview:
        receive = self.filling.get(number)
        if receive is None or receive.view is None:
            raise ProtocolError(f"a chunk of message {number}, which nobody has accepted")
        chunk_bytes = self._limits.chunk_bytes
        left_bytes = receive.nbytes - offset
        fits = nbytes == left_bytes if left_bytes < chunk_bytes else nbytes == chunk_bytes
        if not fits or offset % chunk_bytes or offset in receive.seen:
            raise ProtocolError(f"message {number} has no chunk of {nbytes} bytes at {offset}, or had it already")
        if receive.rolling:
            return receive.view[:nbytes]
        return (receive.view if receive.detour is None else receive.detour)[offset : offset + nbytes]

    def filled(self, number: int, offset: int, nbytes: int) -> None:
        """Note that a chunk is in its place."""
        if self._overtakes and self._overtaking.has(number, offset):
            self._overtaking.filled(number, offset)
            if number in self.filling:
                self._move(number, offset)
            return
        receive = self.filling.get(number)
        if receive is None or offset in receive.seen:
            raise ProtocolError(f"the chunk of message {number} at {offset} has come twice")
        receive.seen.add(offset)
        receive.missing_bytes -= nbytes
        if receive.consume is not None and receive.view is not None and self._in_order:
            receive.consume(
                offset, receive.view[:nbytes] if receive.rolling else receive.view[offset : offset + nbytes]
            )
        if not receive.missing_bytes:
            del self.filling[number]
            if self._limits.confirms(receive.nbytes):
                self._answer(MessageKind.TAKEN, number)
                self.said()
            receive.land(self._memory)
            if self._line:
                self._accept_next()

    def _move(self, number: int, offset: int) -> None:
        """Put a chunk that came before its announcement into place."""
        nbytes = self._overtaking.length(number, offset)
        self._overtaking.move(number, offset, self._belongs(number, offset, nbytes))
        self.filled(number, offset, nbytes)

    # -- how it ends --------------------------------------------------------------------------------------------------

    def give_up_waiting(self) -> list[Receive]:
        """Forget the receives without a message, and return them."""
        left = list(self.waiting)
        self.posted.clear()
        return left

    def clear(self, *, keep_arrived: bool, keep_moving: bool) -> list[Receive]:
        """Forget everything, except whole messages or messages under way; return the receives that had not ended."""
        left = [*self.waiting, *self._line.values()]
        self.posted.clear()
        self._line.clear()
        if not keep_moving:
            left += self.filling.values()
            self.filling.clear()
        self._early.clear()
        self._overtaking.clear()
        self._offers.clear()
        self._withdrawn.clear()
        whole = {lane: deque(a for a in queue if a.whole) for lane, queue in self.arrived.items()}
        self.arrived = {lane: queue for lane, queue in whole.items() if queue and keep_arrived}
        return left


def _nothing() -> None:
    pass
