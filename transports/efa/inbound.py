"""What comes from one other process, and the receives that wait for it. No waiting, no sockets.

Announcements may overtake each other on different rails; they are put in the order of their numbers before they are
matched, so that messages of a lane meet receives in the order of the calls on both sides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from transports.base import LengthMismatchError
from transports.efa.messages import Lane, Receive
from transports.efa.outbound import BUDGET_BYTES, OVERHEAD_BYTES
from transports.frame import CHUNK_BYTES, FrameError, Kind
from transports.rooms import Rooms

__all__ = ["Arrival", "Inbound"]

#: Offers that may wait here, and announcements that may be early. A program with a million sends under way has other
#: worries; a process that goes on for ever has lost its mind.
_OFFERS_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A message that has arrived before its receive: its bytes, or (None) an offer of them."""

    number: int
    nbytes: int
    payload: bytes | None


class Inbound:
    """Arrivals, receives, and what is being filled.

    Args:
        srcs: Ranks of the other process.
        dsts: Ranks of this process.
        rooms: Memory for messages that are lent.
        answer: Says something to the other process.

    Attributes:
        arrived: What no receive has met, by lane. No entry is empty.
        posted: Receives that nothing has met, by lane. No entry is empty.
        filling: Receives whose bytes are on the way, by number.
    """

    def __init__(self, srcs: tuple[int, ...], dsts: tuple[int, ...], rooms: Rooms, answer: Callable[..., None]) -> None:
        self.arrived: dict[Lane, deque[Arrival]] = {}
        self.posted: dict[Lane, deque[Receive]] = {}
        self.filling: dict[int, Receive] = {}
        self._srcs = frozenset(srcs)
        self._dsts = frozenset(dsts)
        self._rooms = rooms
        self._answer = answer
        self._next_number = 0
        self._early: dict[int, tuple[Lane, int, bytes | None]] = {}
        self._offers: dict[int, Lane] = {}  # those in `arrived`
        self._withdrawn: set[int] = set()  # before they were offered
        self._used_bytes = 0  # of the budget, as the other side sees it
        self._free_bytes = 0  # of these, what it may be told to use again

    @property
    def waiting(self) -> Iterator[Receive]:
        """Every receive that nothing has met."""
        return (receive for queue in self.posted.values() for receive in queue)

    def eager(self, fields: Sequence[int], payload: memoryview) -> None:
        """Take a message with its bytes, which are copied."""
        self._used_bytes += payload.nbytes + OVERHEAD_BYTES
        if self._used_bytes > BUDGET_BYTES:
            raise FrameError(f"more eager data than the agreed {BUDGET_BYTES} bytes")
        number, src, dst, tag = fields
        lane = (src, dst, tag)
        posted = self.posted.get(lane)
        if posted is None or number != self._next_number:
            self._announced(number, lane, payload.nbytes, bytes(payload))
            return
        self._next_number += 1  # the short way: its turn has come, and a receive waits
        self._hand_over(self._pop_posted(lane), payload)
        if self._early:
            self._catch_up()

    def offer(self, number: int, src: int, dst: int, tag: int, nbytes: int) -> None:
        """Take the announcement of a long message."""
        self._announced(number, (src, dst, tag), nbytes, None)

    def withdraw(self, number: int) -> None:
        """Forget an offer that no receive has met; if one has, the message is finished instead."""
        if number >= self._next_number:
            if number - self._next_number > _OFFERS_LIMIT:
                raise FrameError(f"offer {number} is withdrawn long before its turn")
            self._withdrawn.add(number)
        elif (lane := self._offers.pop(number, None)) is not None:
            queue = self.arrived[lane]
            queue.remove(next(arrival for arrival in queue if arrival.number == number))
            if not queue:
                del self.arrived[lane]
            self._answer(Kind.WITHDRAWN, number)

    def _announced(self, number: int, lane: Lane, nbytes: int, payload: bytes | None) -> None:
        if lane[0] not in self._srcs or lane[1] not in self._dsts:
            raise FrameError(f"a message from rank {lane[0]} to rank {lane[1]}, who do not live there and here")
        if number < self._next_number or number in self._early:
            raise FrameError(f"message {number} is announced twice")
        if len(self._early) + len(self._offers) >= _OFFERS_LIMIT:
            raise FrameError(f"more than {_OFFERS_LIMIT} messages wait to be received")
        self._early[number] = (lane, nbytes, payload)
        self._catch_up()

    def _catch_up(self) -> None:
        while (early := self._early.pop(self._next_number, None)) is not None:
            lane, nbytes, payload = early
            arrival = Arrival(number=self._next_number, nbytes=nbytes, payload=payload)
            self._next_number += 1
            self._arrive(lane, arrival)

    def _arrive(self, lane: Lane, arrival: Arrival) -> None:
        if arrival.number in self._withdrawn:
            self._withdrawn.remove(arrival.number)
            self._answer(Kind.WITHDRAWN, arrival.number)
        elif lane in self.posted:
            self.match(self._pop_posted(lane), arrival)
        else:
            self.arrived.setdefault(lane, deque()).append(arrival)
            if arrival.payload is None:
                self._offers[arrival.number] = lane

    def pop_arrived(self, lane: Lane) -> Arrival:
        """Return the oldest arrival of a lane that has one."""
        queue = self.arrived[lane]
        arrival = queue.popleft()
        if not queue:
            del self.arrived[lane]
        self._offers.pop(arrival.number, None)
        return arrival

    def post(self, receive: Receive) -> None:
        """Queue a receive."""
        queue = self.posted.get(receive.lane)
        if queue is None:
            queue = self.posted[receive.lane] = deque()
        queue.append(receive)

    def forget(self, receive: Receive) -> None:
        """Take a receive out of the queue again."""
        queue = self.posted[receive.lane]
        queue.remove(receive)
        if not queue:
            del self.posted[receive.lane]

    def _pop_posted(self, lane: Lane) -> Receive:
        queue = self.posted[lane]
        receive = queue.popleft()
        if not queue:
            del self.posted[lane]
        return receive

    def match(self, receive: Receive, arrival: Arrival) -> None:
        """Bring a receive and an arrival together."""
        if arrival.payload is not None:
            self._hand_over(receive, memoryview(arrival.payload))
        elif arrival.nbytes != receive.nbytes:
            self._answer(Kind.REFUSE, arrival.number, receive.nbytes)
            receive.fail(_mismatch(receive, arrival.nbytes))
        elif not arrival.nbytes:
            self._answer(Kind.TAKEN, arrival.number)
            receive.finish(memoryview(b"") if receive.lend else None)
        else:
            receive.matched = True
            if receive.lend:
                receive.view = self._rooms.take(receive.nbytes)
            self.filling[arrival.number] = receive
            self._answer(Kind.ACCEPT, arrival.number)

    def _hand_over(self, receive: Receive, payload: memoryview) -> None:
        self._free(payload.nbytes)
        if payload.nbytes != receive.nbytes:
            receive.fail(_mismatch(receive, payload.nbytes))
        elif receive.view is None:
            receive.finish(payload if type(payload.obj) is bytes else memoryview(bytes(payload)))
        else:
            receive.view[:] = payload
            receive.finish(None)

    def _free(self, nbytes: int) -> None:
        self._free_bytes += nbytes + OVERHEAD_BYTES
        if self._free_bytes >= BUDGET_BYTES // 4:
            self._used_bytes -= self._free_bytes
            self._answer(Kind.CREDIT, self._free_bytes)
            self._free_bytes = 0

    def place(self, number: int, offset: int, nbytes: int) -> memoryview:
        """Return where a chunk belongs.

        Raises:
            FrameError: It belongs nowhere, or is there already.
        """
        receive = self.filling.get(number)
        if receive is None or receive.view is None:
            raise FrameError(f"a chunk of message {number}, which nobody has accepted")
        if offset % CHUNK_BYTES or nbytes != min(CHUNK_BYTES, receive.nbytes - offset) or offset in receive.seen:
            raise FrameError(f"message {number} has no chunk of {nbytes} bytes at {offset}, or had it already")
        return receive.view[offset : offset + nbytes]

    def filled(self, number: int, offset: int, nbytes: int) -> None:
        """Note that a chunk is in its place."""
        receive = self.filling.get(number)
        if receive is None or offset in receive.seen:
            raise FrameError(f"the chunk of message {number} at {offset} has come twice")
        receive.seen.add(offset)
        receive.missing_bytes -= nbytes
        if not receive.missing_bytes:
            del self.filling[number]
            self._answer(Kind.TAKEN, number)
            receive.finish(receive.view if receive.lend else None)

    def clear(self, *, keep_arrived: bool) -> list[Receive]:
        """Forget everything, or everything but whole messages; return the receives that had not ended."""
        left = [*self.waiting, *self.filling.values()]
        self.posted.clear()
        self.filling.clear()
        self._early.clear()
        self._offers.clear()
        whole = {lane: deque(a for a in queue if a.payload is not None) for lane, queue in self.arrived.items()}
        self.arrived = {lane: queue for lane, queue in whole.items() if queue and keep_arrived}
        return left

    def give_up_waiting(self) -> list[Receive]:
        """Forget the receives that nothing has met, and return them."""
        left = list(self.waiting)
        self.posted.clear()
        return left


def _mismatch(receive: Receive, sent_bytes: int) -> LengthMismatchError:
    src, dst, tag = receive.lane
    return LengthMismatchError(sent_bytes=sent_bytes, expected_bytes=receive.nbytes, src=src, dst=dst, tag=tag)
