"""Messages that leave for one other process, and their order whenever the wire has room.

Answers to the other side leave first, then announcements, then chunks; each in order of urgency. So small
messages pass long ones at every chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sized
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from transports.matching.ends import FLOWING, OFFERED, WAITING, Lane, Send
from transports.matching.protocol import PLACES, Limits, Message, MessageKind, ProtocolError
from transports.signature import PlainSignature, Signature


class Chunk(NamedTuple):
    """A piece of a long message, still in its sender's memory."""

    send: Send
    offset: int
    nbytes: int

    @property
    def view(self) -> memoryview:
        """Bytes of the chunk; only before the end of the send."""
        assert self.send.view is not None, "a flowing message keeps its bytes"
        return self.send.view[self.offset : self.offset + self.nbytes]


class Outgoing:
    """Queues of everything that this process has to send to another one.

    Args:
        limits: The limits that both sides have agreed on.

    Attributes:
        sends: Messages that were offered or pushed, and have not ended, by number.
        queues: The queues of answers, of announcements and of chunks; nothing is due while all are empty.
    """

    def __init__(self, limits: Limits) -> None:
        self.sends: dict[int, Send] = {}
        self._limits = limits
        self._answers: deque[Message] = deque()
        self._announcing: list[tuple[int, int, Send]] = []  # heap of (urgency, serial, send)
        self._in_lane: dict[Lane, tuple[int, int]] = {}  # number of messages to announce, and the urgency of the last
        self._flowing: list[tuple[int, int, Send]] = []  # heap of (priority, number, send)
        self.queues: tuple[Sized, ...] = (self._answers, self._announcing, self._flowing)
        self._serial = count()  # order of calls: breaks ties of urgency in `_announcing`
        self._numbers = count()  # numbers of announcements and signatures, in the order in which they leave
        # the signatures that the other process keeps, and the index of each in its table
        self._places: dict[Signature | None, int] = {None: 0}
        self._given_up: set[int] = set()  # offers that this side has abandoned
        self._credit_bytes = limits.budget_bytes  # bytes that may still leave before the other side asks for them
        # longest message that can leave as a single chunk, which announces it
        self._whole_bytes = min(limits.push_bytes, limits.chunk_bytes) if limits.ordered else 0

    # -- calls of this process ----------------------------------------------------------------------------------------

    @property
    def waiting_sends(self) -> Iterator[Send]:
        """Every message that the receiver has not accepted."""
        yield from (send for _, _, send in self._announcing if send.progress is WAITING)
        yield from (send for send in self.sends.values() if send.progress is OFFERED)

    def reserve_eager(self, view: memoryview, signature: Signature | None = None) -> tuple[int, int] | None:
        """Reserve a number and credit for a small message that leaves at once.

        The caller transmits it, as an `EAGER` message, before anything else.

        Args:
            view: Bytes of the message.
            signature: What the message is; None: anything.

        Returns:
            The number of the message, and the index of the signature in the table of the other process. None, with
            nothing reserved, if the message must queue.
        """
        nbytes = view.nbytes + self._limits.overhead_bytes
        if view.nbytes > self._limits.eager_bytes or self._announcing or self._credit_bytes < nbytes:
            return None
        place = self._places.get(signature)
        if place is None:
            return None
        self._credit_bytes -= nbytes
        return next(self._numbers), place

    def reserve_immediate_send(self, send: Send) -> bool:
        """Reserve a number and credit for a longer message that leaves at once as one chunk; False if it must queue.

        The caller has made sure that nothing else is due, and transmits the chunk, which announces the message as well.
        """
        nbytes = send.nbytes
        cost_bytes = nbytes + self._limits.overhead_bytes
        place = self._places.get(send.signature)
        fits = self._limits.eager_bytes < nbytes <= self._whole_bytes and self._credit_bytes >= cost_bytes
        if not fits or place is None:
            return False
        send.place = place
        self._credit_bytes -= cost_bytes
        send.number = next(self._numbers)
        self.sends[send.number] = send
        send.progress, send.next_offset, send.pushed = FLOWING, nbytes, True
        return True

    def queue_announcement(self, send: Send) -> None:
        """Queue a message; `next_message` announces it later.

        It stays behind all queued messages of its lane: if one of them is less urgent, the message gets that urgency.
        """
        queued, urgency = self._in_lane.get(send.lane, (0, send.priority))
        # a higher number is less urgent
        urgency = max(urgency, send.priority)
        self._in_lane[send.lane] = (queued + 1, urgency)
        heappush(self._announcing, (urgency, next(self._serial), send))

    def withdraw(self, send: Send) -> bool:
        """Cancel a message; return whether it has ended.

        False if the receiver has accepted it. False, too, if it was offered: then the receiver is asked to drop it.
        """
        if send.progress is WAITING:
            send.end(withdrawn=True)
            return True
        if send.progress is OFFERED and not send.cancelled:
            send.cancelled = True
            self.queue_answer(MessageKind.WITHDRAW, send.number)
        return False

    def queue_answer(self, kind: MessageKind, *fields: int, text: bytes | None = None) -> None:
        """Queue a message of the protocol, which leaves before announcements and chunks.

        Args:
            kind: Kind of the message.
            fields: The fields of this kind, see `MessageKind`.
            text: The payload; None: the message has none.
        """
        self._answers.append((kind, fields, None if text is None else memoryview(text)))

    # -- transmission -------------------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether any message could leave now."""
        return any(self.queues)

    @property
    def due_bytes(self) -> int:
        """Bytes of accepted or pushed messages that have not left. Cost: O(messages)."""
        return sum(max(0, send.nbytes - send.next_offset) for *_, send in self._flowing if send.progress is FLOWING)

    def next_message(self) -> Message | None:
        """Return the next message to transmit: an answer, a signature or an announcement; None if none is due.

        The payload is a copy, because the sender of a small message may overwrite its buffer from now on.
        """
        if self._answers:
            return self._answers.popleft()
        while self._announcing:
            send = self._announcing[0][2]
            if send.progress is WAITING:
                place = self._places.get(send.signature)
                if place is None:
                    # the send stays in the queue, and is announced by the next call
                    return self._make_signature_message(send.signature)
                send.place = place
            heappop(self._announcing)
            queued, urgency = self._in_lane.pop(send.lane)
            if queued > 1:
                self._in_lane[send.lane] = (queued - 1, urgency)
            if send.progress is WAITING:
                return self._make_announcement(send)
        return None

    def _make_signature_message(self, signature: Signature | None) -> Message:
        """Return the message that adds a signature to the other process's table; a full table starts again from 1."""
        assert signature is not None, "no signature has a place from the beginning"
        if len(self._places) >= PLACES:
            self._places = {None: 0}
        place = self._places[signature] = len(self._places)
        return MessageKind.SIGNATURE, (next(self._numbers), place, signature.fingerprint), memoryview(signature.text)

    def _make_announcement(self, send: Send) -> Message:
        """Return the announcement of a message: whole if it is small, pushed within the credit, otherwise offered."""
        number, nbytes = next(self._numbers), send.nbytes
        cost_bytes = nbytes + self._limits.overhead_bytes
        # Small: the bytes leave with the announcement, and the send ends.
        if nbytes <= self._limits.eager_bytes and self._credit_bytes >= cost_bytes:
            self._credit_bytes -= cost_bytes
            assert send.view is not None, "a message that waits keeps its bytes"
            payload = memoryview(bytes(send.view))
            send.end()
            return MessageKind.EAGER, (number, *send.lane, send.place), payload
        send.number = number
        self.sends[number] = send
        # Longer: the chunks follow unasked. Otherwise they wait until a receive accepts the offer.
        if nbytes <= self._limits.push_bytes and self._credit_bytes >= cost_bytes:
            self._credit_bytes -= cost_bytes
            send.pushed = True
            self._queue_chunks(send)
            return MessageKind.PUSH, (number, *send.lane, nbytes, send.place), None
        send.progress = OFFERED
        return MessageKind.OFFER, (number, *send.lane, nbytes, send.place), None

    def next_chunk(self) -> Chunk | None:
        """Return the next chunk of the most urgent message whose chunks may leave; None if there is none."""
        # a send that has ended stays in the heap until it comes first
        while self._flowing:
            send = self._flowing[0][2]
            if send.progress is FLOWING:
                break
            heappop(self._flowing)
        else:
            return None
        offset = send.next_offset
        send.next_offset += self._limits.chunk_bytes
        if send.next_offset >= send.nbytes:  # beyond the end, behind a shorter last piece
            heappop(self._flowing)
        return Chunk(send, offset, min(self._limits.chunk_bytes, send.nbytes - offset))

    def end_departed_send(self, send: Send) -> None:
        """End a send that has left completely and that the receiver does not confirm."""
        if self.sends.pop(send.number, None) is not None:
            send.end()

    # -- answers of the other process ---------------------------------------------------------------------------------

    def handle_accept(self, number: int) -> None:
        """Queue the chunks of a message, because the receiver has a buffer for it."""
        send = self._find_answered_send(number)
        if send is None:
            return
        if not send.nbytes:
            raise ProtocolError(f"peer accepted message {number}, which has no bytes")
        self._queue_chunks(send)

    def _queue_chunks(self, send: Send) -> None:
        """Let the chunks of a message leave, in the order of priorities."""
        send.progress = FLOWING
        heappush(self._flowing, (send.priority, send.number, send))

    def handle_refuse(self, number: int, expected_bytes: int, fingerprint: int, text: bytes = b"") -> None:
        """Fail a send, because the receiver expects another length or another call, or has no memory for the message.

        Args:
            number: Number of the message.
            expected_bytes: Length that the receiver expects.
            fingerprint: Fingerprint of the receiver's signature.
            text: Text of the receiver's signature.
        """
        send = self._find_answered_send(number)
        if send is not None:
            del self.sends[number]
            theirs = PlainSignature(fingerprint, text)
            error = send.mismatch(theirs, sent_bytes=send.nbytes, expected_bytes=expected_bytes)
            send.end(error or send.refused_error())

    def handle_withdrawn(self, number: int) -> None:
        """End a cancelled send, because the receiver has dropped the offer."""
        send = self._find_answered_send(number)
        if send is None:
            return
        if not send.cancelled:
            raise ProtocolError(f"peer dropped offer {number}, which was not cancelled")
        del self.sends[number]
        send.end(withdrawn=True)

    def handle_taken(self, number: int) -> None:
        """End a send, because all of its bytes have arrived."""
        if number in self._given_up:
            self._given_up.remove(number)
            return
        send = self.sends.get(number)
        # a message without bytes is never accepted: its arrival is reported while it is still offered
        flows = send is not None and send.nbytes
        if send is None or send.progress is not (FLOWING if flows else OFFERED):
            raise ProtocolError(f"peer reports the arrival of message {number}, which it had not accepted")
        if flows and (send.next_offset < send.nbytes or not self._limits.confirms(send.nbytes)):
            raise ProtocolError(f"peer reports the arrival of message {number}, which has not left completely")
        del self.sends[number]
        send.end()

    def handle_credit(self, nbytes: int) -> None:
        """Add credit, because ranks of the other process have received this much eager and pushed data."""
        sent_bytes = self._limits.budget_bytes - self._credit_bytes  # and not reported as received yet
        if nbytes > sent_bytes:
            raise ProtocolError(f"peer reported {nbytes} bytes as received, but only {sent_bytes} were outstanding")
        self._credit_bytes += nbytes

    def _find_answered_send(self, number: int) -> Send | None:
        """Return the offered send that an answer is about; None if this side has abandoned it.

        Raise `ProtocolError` if no offer of this number waits for an answer.
        """
        if number in self._given_up:
            self._given_up.remove(number)
            return None
        send = self.sends.get(number)
        if send is None or send.progress is not OFFERED:
            raise ProtocolError(f"peer answered offer {number}, which does not wait for an answer")
        return send

    # -- how it ends --------------------------------------------------------------------------------------------------

    def remove_unmatched(self) -> list[Send]:
        """Remove and return the unaccepted messages; the other side is asked to drop their offers."""
        unaccepted = list(self.waiting_sends)
        self._announcing.clear()
        self._in_lane.clear()
        for send in unaccepted:
            if self.sends.pop(send.number, None) is not None:
                self._given_up.add(send.number)
                self.queue_answer(MessageKind.ABANDON, send.number)
        return unaccepted

    def clear(self) -> list[Send]:
        """Empty all queues, and return the sends that had not ended."""
        unfinished = list(dict.fromkeys((*self.waiting_sends, *self.sends.values())))
        self.sends.clear()
        self._announcing.clear()
        self._in_lane.clear()
        self._answers.clear()
        self._flowing.clear()
        return unfinished
