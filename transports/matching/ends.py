"""One end of a message: its bytes, its progress, and its result."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any, TypeAlias, TypeVar

from transports.buffers import BounceBuffers, Buffer, Delivery
from transports.failures import (
    LengthMismatchError,
    LinkLostError,
    SignatureMismatchError,
    TransportClosedError,
    TransportError,
)
from transports.request import Request
from transports.signature import PlainSignature, Signature
from transports.wire import OPEN

Lane: TypeAlias = "tuple[int, int, int]"  # (src, dst, tag)
_T = TypeVar("_T")


class MessageEnd(Request):
    """The common part of sends and receives; `done` is called once at the end.

    The shell around the engine sets `done`, and how an end is withdrawn.

    Attributes:
        lane: (src, dst, tag): messages of one lane are received in the order in which they were sent.
        view: The caller's bytes; None after the end, when the caller may resize its buffer.
        signature: Signature of the caller's call; None: open.
        memory: Gets the memory of a loan back.
    """

    lane: Lane
    signature: Signature | None
    view: memoryview | None = None
    memory: BounceBuffers
    done: Callable[[Any], None] | None = None
    _withdraw: Callable[[Any], None] | None = None

    def end(self, error: Exception | None = None, *, withdrawn: bool = False) -> None:
        """Release the bytes, and wake the waiting caller."""
        self.view = None
        super().end(error, withdrawn=withdrawn)

    def lose(self, reason: str) -> None:
        """Fail with `LinkLostError`, because the other process is lost."""
        src, dst, tag = self.lane
        self.end(LinkLostError(reason, src=src, dst=dst, tag=tag))

    def close(self) -> None:
        """Fail with `TransportClosedError`, because this side has closed."""
        src, dst, tag = self.lane
        self.end(TransportClosedError("the transport has been closed", src=src, dst=dst, tag=tag))

    def refused_error(self) -> TransportError:
        """Return the error of a message whose receiver has no memory for it."""
        src, dst, tag = self.lane
        return TransportError("the receiver has refused the message", src=src, dst=dst, tag=tag)

    def mismatch(self, theirs: PlainSignature, *, sent_bytes: int, expected_bytes: int) -> TransportError | None:
        """Return the error of two ends with different signatures or lengths; None if they agree.

        After an error, `theirs` has the other end's signature.
        """
        src, dst, tag = self.lane
        if self.signature is not None and not self.signature.agrees(theirs.fingerprint):
            self.theirs = theirs
            return SignatureMismatchError(theirs, src=src, dst=dst, tag=tag)
        if sent_bytes == expected_bytes:
            return None
        self.theirs = theirs
        return LengthMismatchError(sent_bytes=sent_bytes, expected_bytes=expected_bytes, src=src, dst=dst, tag=tag)

    def delivery(self) -> Delivery:
        """Return the received message on loan; the release gives the memory back."""
        loan = self.loan
        assert loan is not None, "a receive without a buffer gets memory on loan"
        if loan.readonly:  # the message arrived with its announcement, in memory of its own
            return Delivery(loan)
        return Delivery(loan[: self.nbytes].toreadonly(), partial(self.memory.release, loan))


class Progress(Enum):
    """The progress of a send."""

    WAITING = auto()  #: to be announced
    OFFERED = auto()  #: announced, not accepted yet
    FLOWING = auto()  #: accepted; from here on it finishes, whatever is cancelled
    ENDED = auto()


WAITING, OFFERED, FLOWING, ENDED = Progress  # asking the enumeration takes 0.2 us, for each message


class Send(MessageEnd):
    """A message that leaves. When an offer is cancelled, the receiver decides whether that was in time.

    Args:
        lane: Messages of the same sender and receiver.
        view: The payload.

    Attributes:
        priority: The caller's priority; any integer.
        progress: From its announcement to its end.
        number: Number of its announcement.
        pushed: Whether its chunks leave unasked.
        next_offset: Bytes before it have been passed to the wire.
        cancelled: The caller has cancelled an offer, and waits for the receiver's answer.
        place: Place of its signature in the table of the other process.
    """

    progress: Progress = WAITING
    number = -1
    place = 0
    pushed = False
    next_offset = 0
    cancelled = False

    def __init__(self, lane: Lane, view: memoryview, priority: int, signature: Signature | None = None) -> None:
        self.lane, self.view, self.nbytes, self.priority, self.signature = lane, view, view.nbytes, priority, signature

    def end(self, error: Exception | None = None, *, withdrawn: bool = False) -> None:
        """Release the bytes, and wake the waiting caller."""
        self.progress = ENDED
        super().end(error, withdrawn=withdrawn)

    def lose(self, reason: str) -> None:
        """Fail because the other process is lost; a cancelled offer without an answer ends as withdrawn."""
        if self.cancelled and self.progress is OFFERED:
            self.end(withdrawn=True)
        else:
            super().lose(reason)


class Receive(MessageEnd):
    """A message that a caller waits for.

    Args:
        lane: Messages of the same sender and receiver.
        view: Where the payload goes; None: it gets its memory at the match.
        nbytes: Expected length.
        signature: Expected call; None: any.

    Attributes:
        wants_loan: The caller has no buffer, and gets the memory of the message on loan.
        loan: That memory, at the end.
        matched: Its message has been announced; from here on it finishes, whatever is cancelled.
        missing_bytes: Bytes that have not arrived yet.
        consume: Called with the offset and the bytes of each chunk of a loaned message as it arrives; the bytes are
            valid until it returns. Only where chunks arrive in order, see `Limits.ordered`.
        rolling: All chunks arrive in the same memory, one after the other.
        detour: Memory of bytes that arrived before the receive; copied at the end.
        allocate: Returns memory for a message of any length, see `Wire.begin_recv`.
        seen: Offsets of the chunks that have arrived.
    """

    missing_bytes: int
    matched: bool = False
    detour: memoryview | None = None
    consume: Callable[[int, memoryview], None] | None = None
    allocate: Callable[[Any], Buffer] | None = None
    rolling = False

    def __init__(self, lane: Lane, view: memoryview | None, nbytes: int, signature: Signature | None = None) -> None:
        self.lane, self.view, self.signature = lane, view, signature
        self.nbytes = self.missing_bytes = nbytes
        self.wants_loan: bool = view is None
        self.seen: set[int] = set()

    def refusal(self, sent_bytes: int, theirs: PlainSignature) -> Exception | None:
        """Return the error of a message that this receive does not take; None if it does, with memory for it."""
        if self.nbytes == sent_bytes and (self.signature is None or self.signature.agrees(theirs.fingerprint)):
            return None
        expected_bytes = sent_bytes if self.nbytes == OPEN else self.nbytes
        error = self.mismatch(theirs, sent_bytes=sent_bytes, expected_bytes=expected_bytes)
        if error is not None or self.nbytes != OPEN:
            return error
        self.theirs, self.nbytes, self.missing_bytes = theirs, sent_bytes, sent_bytes
        if self.allocate is None:
            return None
        try:
            self.view = self.make_memory(self.allocate)
        except Exception as raised:  # the caller's own
            return raised
        self.wants_loan = False
        return None

    def finish_with_payload(self, payload: memoryview) -> None:
        """End with the bytes of a message, copied unless they are immutable."""
        if self.view is None:
            self.loan = payload if type(payload.obj) is bytes else memoryview(bytes(payload))
        else:
            self.view[:] = payload
        self.matched = True
        self.end()

    def consume_early_chunks(self, chunk_bytes: int) -> None:
        """Call `consume` for the chunks that arrived before the receive."""
        if self.consume is not None and self.view is not None:
            for offset in sorted(self.seen):
                self.consume(offset, self.view[offset : min(offset + chunk_bytes, self.nbytes)])

    def finish_chunks(self, memory: BounceBuffers) -> None:
        """End with all chunks arrived; bytes from before the receive are copied, and their memory released."""
        if self.detour is not None:
            assert self.view is not None, "a receive without a buffer has no detour"
            self.view[:] = self.detour[: self.nbytes]
            memory.release(self.detour)
            self.detour = None
        self.finish(self.view if self.wants_loan else None)

    def finish(self, loan: memoryview | None) -> None:
        """End with the message in the caller's buffer, or on loan."""
        self.matched = True
        self.loan = loan
        self.end()


def pop_first(queues: dict[Lane, deque[_T]], lane: Lane) -> _T:
    """Return the first entry of a lane's queue, and remove it; an empty queue is dropped."""
    queue = queues[lane]
    first = queue.popleft()
    if not queue:
        del queues[lane]
    return first
