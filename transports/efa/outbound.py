"""What leaves for one other process: who may go next, on whichever rail has room. No waiting, no sockets.

Order of leaving: what answers the other side, then announcements, then chunks; each of these the most urgent first. So
small frames pass long messages at every chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import outcome

from transports.base import LengthMismatchError
from transports.efa.messages import Lane, Send, Stage
from transports.frame import CHUNK_BYTES, EAGER_BYTES, FrameError, Kind, pack

if TYPE_CHECKING:
    from transports.efa.rail import Rail

__all__ = ["BUDGET_BYTES", "OVERHEAD_BYTES", "Chunk", "Entry", "Outbound"]

#: Eager data that one process may have lying unreceived at another, before it must ask for each further message.
BUDGET_BYTES = 16 << 20
#: What one waiting message costs beyond its bytes, so that empty ones are not free either.
OVERHEAD_BYTES = 256
#: Small frames that are due together leave in one system call, up to about this much.
_BATCH_BYTES = 64 << 10


class Chunk(NamedTuple):
    """A piece of a long message, still in its sender's memory."""

    send: Send
    offset: int
    nbytes: int


#: What a rail keeps until it has arrived: a small frame, a chunk by reference, None for what need not be repeated.
Entry: TypeAlias = "bytes | Chunk | None"


class Outbound:
    """Everything that one process still has to say to another.

    Attributes:
        sends: Messages that were offered and have not ended, by number.
    """

    def __init__(self) -> None:
        self.sends: dict[int, Send] = {}
        self._answers: deque[bytes] = deque()
        self._announcing: list[tuple[int, int, Send]] = []  # heap of (urgency, serial, send)
        self._in_lane: dict[Lane, tuple[int, int]] = {}  # how many are announcing, and the urgency of the last
        self._flowing: list[tuple[int, int, Send]] = []  # heap of (priority, number, send)
        self._again: deque[Chunk] = deque()
        self._serial = count()
        self._next_number = 0
        self._given_up: set[int] = set()  # offers of this side, which has closed since
        self._credit_bytes = BUDGET_BYTES

    @property
    def due(self) -> bool:
        """Whether anything could leave now."""
        return bool(self._answers or self._announcing or self._again or self._flowing)

    @property
    def waiting(self) -> Iterator[Send]:
        """Every message that nobody has accepted yet."""
        yield from (send for _, _, send in self._announcing if send.stage is Stage.WAITING)
        yield from (send for send in self.sends.values() if send.stage is Stage.OFFERED)

    def eager(self, lane: Lane, view: memoryview) -> bytes | None:
        """Return the frame of a message that may leave at once, before all that waits; None if it must queue."""
        nbytes = view.nbytes
        if nbytes > EAGER_BYTES or self._announcing or self._credit_bytes < nbytes + OVERHEAD_BYTES:
            return None
        self._credit_bytes -= nbytes + OVERHEAD_BYTES
        number = self._next_number
        self._next_number += 1
        src, dst, tag = lane
        return b"".join((pack(Kind.EAGER, number, src, dst, tag, payload_bytes=nbytes), view))

    def announce(self, send: Send) -> None:
        """Queue a message. One of the same lane that is queued already stays before it, however urgent this one is."""
        queued, urgency = self._in_lane.get(send.lane, (0, send.priority))
        urgency = max(urgency, send.priority)
        self._in_lane[send.lane] = (queued + 1, urgency)
        heappush(self._announcing, (urgency, next(self._serial), send))

    def answer(self, kind: Kind, *fields: int) -> None:
        """Queue a frame without payload."""
        self._answers.append(pack(kind, *fields))

    def repeat(self, entries: Iterable[Entry]) -> int:
        """Queue again what a dead rail has lost; return how many bytes that is."""
        nbytes = 0
        for entry in entries:
            if isinstance(entry, Chunk) and entry.send.stage is not Stage.ENDED:
                self._again.append(entry)
                nbytes += entry.nbytes
            elif isinstance(entry, bytes):
                self._answers.append(entry)
                nbytes += len(entry)
        return nbytes

    def pull(self, rail: Rail) -> list[bytes | memoryview]:
        """Return what `rail` shall write next: one or more small frames, or one chunk; empty if nothing is due."""
        small = self._small(rail)
        if small:
            return [small[0] if len(small) == 1 else b"".join(small)]
        chunk = self._next_chunk()
        if chunk is None:
            return []
        rail.keep(chunk)
        assert chunk.send.view is not None, "a flowing message keeps its bytes"
        piece = chunk.send.view[chunk.offset : chunk.offset + chunk.nbytes]
        head = pack(Kind.CHUNK, chunk.send.number, chunk.offset, payload_bytes=chunk.nbytes)
        return [head, rail.staged(piece)]

    def _small(self, rail: Rail) -> list[bytes]:
        frames: list[bytes] = []
        left_bytes = _BATCH_BYTES
        while left_bytes > 0 and (frame := self._next_small()) is not None:
            frames.append(frame)
            rail.keep(frame)
            left_bytes -= len(frame)
        return frames + rail.own_frames() if rail.owes else frames

    def _next_small(self) -> bytes | None:
        if self._answers:
            return self._answers.popleft()
        while self._announcing:
            _, _, send = heappop(self._announcing)
            self._left_lane(send.lane)
            if send.stage is Stage.WAITING:
                return self._announcement(send)
        return None

    def _left_lane(self, lane: Lane) -> None:
        queued, urgency = self._in_lane.pop(lane)
        if queued > 1:
            self._in_lane[lane] = (queued - 1, urgency)

    def _announcement(self, send: Send) -> bytes:
        number, nbytes = self._next_number, send.nbytes
        self._next_number += 1
        if nbytes <= EAGER_BYTES and self._credit_bytes >= nbytes + OVERHEAD_BYTES:
            self._credit_bytes -= nbytes + OVERHEAD_BYTES
            assert send.view is not None, "a waiting message keeps its bytes"
            frame = b"".join((pack(Kind.EAGER, number, *send.lane, payload_bytes=nbytes), send.view))
            send.wake(outcome.Value(None))
            return frame
        send.number, send.stage = number, Stage.OFFERED
        self.sends[number] = send
        return pack(Kind.OFFER, number, *send.lane, nbytes)

    def _next_chunk(self) -> Chunk | None:
        while self._again:
            chunk = self._again.popleft()
            if chunk.send.stage is not Stage.ENDED:
                return chunk
        if not self._flowing:
            return None
        send = self._flowing[0][2]
        offset = send.next_offset
        send.next_offset += CHUNK_BYTES
        if send.next_offset >= send.nbytes:
            heappop(self._flowing)
        return Chunk(send, offset, min(CHUNK_BYTES, send.nbytes - offset))

    def accepted(self, number: int) -> None:
        """The receiver has named the place: let the message flow."""
        send = self._offered(number)
        if send is not None:
            send.stage = Stage.FLOWING
            heappush(self._flowing, (send.priority, number, send))

    def refused(self, number: int, expected_bytes: int) -> None:
        """The receiver wanted another length."""
        send = self._offered(number)
        if send is not None:
            del self.sends[number]
            send.fail(_mismatch(send, expected_bytes))

    def withdrawn(self, number: int) -> None:
        """The receiver has forgotten the offer, as was asked."""
        send = self._offered(number)
        if send is None:
            return
        if not send.cancelled:
            raise FrameError(f"offer {number} was withdrawn, which nobody had asked for")
        del self.sends[number]
        send.withdrawn()

    def taken(self, number: int) -> None:
        """All of a message has arrived."""
        if number in self._given_up:
            self._given_up.remove(number)
            return
        send = self.sends.get(number)
        if send is None or send.stage is not (Stage.FLOWING if send.nbytes else Stage.OFFERED):
            raise FrameError(f"message {number} is reported as taken, but was not flowing")
        if send.nbytes and send.next_offset < send.nbytes:
            raise FrameError(f"message {number} is reported as taken, but has not left yet")
        del self.sends[number]
        send.wake(outcome.Value(None))

    def credited(self, nbytes: int) -> None:
        """Eager data has been received."""
        if self._credit_bytes + nbytes > BUDGET_BYTES:
            raise FrameError(f"a credit of {nbytes} bytes is more than was ever used")
        self._credit_bytes += nbytes

    def clear(self) -> list[Send]:
        """Forget everything; return the messages that had not ended."""
        left = [*(send for _, _, send in self._announcing if send.stage is Stage.WAITING), *self.sends.values()]
        self.sends.clear()
        self._announcing.clear()
        self._in_lane.clear()
        self._flowing.clear()
        self._answers.clear()
        self._again.clear()
        return left

    def give_up_waiting(self) -> list[Send]:
        """Forget what nobody has accepted yet, and return it."""
        left = list(self.waiting)
        self._announcing.clear()
        self._in_lane.clear()
        self._given_up.update(send.number for send in left if self.sends.pop(send.number, None))
        return left

    def _offered(self, number: int) -> Send | None:
        """Return the send that an answer is for; None if this side has closed meanwhile."""
        if number in self._given_up:
            self._given_up.remove(number)
            return None
        send = self.sends.get(number)
        if send is None or send.stage is not Stage.OFFERED:
            raise FrameError(f"an answer to offer {number}, which is not waiting for one")
        return send


def _mismatch(send: Send, expected_bytes: int) -> LengthMismatchError:
    src, dst, tag = send.lane
    return LengthMismatchError(sent_bytes=send.nbytes, expected_bytes=expected_bytes, src=src, dst=dst, tag=tag)
