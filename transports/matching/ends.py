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
    lane_fields,
)
from transports.request import Request
from transports.signature import PlainSignature, Signature
from transports.wire import OPEN

Lane: TypeAlias = "tuple[int, int, int]"  # (src, dst, tag)
_T = TypeVar("_T")


class MessageEnd(Request):
    """The common part of sends and receives: one end of a message.

    The wire that makes an end sets its `done` and `_withdraw`, see `Request`.

    Attributes:
        lane: (src, dst, tag): messages of one lane are received in the order in which they were sent.
        signature: What the caller sends or expects; None: anything.
        memory: Pool to which the release of a delivery returns the memory.
    """

    lane: Lane
    signature: Signature | None
    memory: BounceBuffers
    done: Callable[[Any], None] | None = None
    _withdraw: Callable[[Any], None] | None = None

    def lose(self, reason: str) -> None:
        """Fail with `LinkLostError`, because the other process is lost."""
        self.end(LinkLostError(reason, **lane_fields(self.lane)))

    def close(self) -> None:
        """Fail with `TransportClosedError`, because this side has closed."""
        self.end(TransportClosedError("the transport has been closed", **lane_fields(self.lane)))

    def refused_error(self) -> TransportError:
        """Return the error of a message whose receiver has no memory for it."""
        return TransportError("the receiver has refused the message", **lane_fields(self.lane))

    def mismatch(self, theirs: PlainSignature, *, sent_bytes: int, expected_bytes: int) -> TransportError | None:
        """Compare this end with the other end of the message; return the error of a difference, or None.

        After a difference, `self.theirs` is the other end's signature.

        Args:
            theirs: Signature of the other end.
            sent_bytes: Length that the sender names.
            expected_bytes: Length that the receiver names.
        """
        if self.signature is not None and not self.signature.agrees(theirs.fingerprint):
            self.theirs: PlainSignature | None = theirs
            return SignatureMismatchError(theirs, **lane_fields(self.lane))
        if sent_bytes == expected_bytes:
            return None
        self.theirs = theirs
        return LengthMismatchError(sent_bytes=sent_bytes, expected_bytes=expected_bytes, **lane_fields(self.lane))

    def delivery(self) -> Delivery:
        """Return the received message on loan; the release gives the memory back."""
        loan = self.loan
        assert loan is not None, "a receive without a buffer gets memory on loan"
        if loan.readonly:  # the message arrived with its announcement, in memory of its own
            return Delivery(loan)
        return Delivery(loan[: self.nbytes].toreadonly(), partial(self.memory.release, loan))


class Progress(Enum):
    """The progress of a send."""

    WAITING = auto()  #: not announced yet
    OFFERED = auto()  #: announced, not accepted yet
    FLOWING = auto()  #: accepted, or pushed without being asked: its chunks leave, and it cannot be cancelled
    ENDED = auto()


WAITING, OFFERED, FLOWING, ENDED = Progress  # `Progress.WAITING` takes 0.2 us to look up, for each message


class Send(MessageEnd):
    """A message that leaves. When an offer is cancelled, the receiver decides whether that was in time.

    Args:
        lane: (src, dst, tag) of the message.
        view: The payload.
        priority: Lower is more urgent; any integer.
        signature: What the message is; None: anything.

    Attributes:
        priority: The priority of the arguments.
        progress: How far the send has come.
        number: Number of the announcement; -1 before it.
        pushed: Whether the chunks leave before the receiver asks for them.
        next_offset: Number of bytes that have been passed to the wire, from the start of the message.
        cancelled: The caller has cancelled an offer, and waits for the receiver's answer.
        place: Index of the signature in the table of signatures that the other process keeps; 0: no signature.
    """

    progress: Progress = WAITING
    number = -1
    place = 0
    pushed = False
    next_offset = 0
    cancelled = False

    def __init__(self, lane: Lane, view: memoryview, priority: int, signature: Signature | None = None) -> None:
        end: MessageEnd = self  # the base class, which declares most of the attributes
        end.lane, end.view, end.nbytes, end.signature = lane, view, view.nbytes, signature
        self.priority: int = priority

    def end(self, error: Exception | None = None, *, withdrawn: bool = False) -> None:
        """End the send, see `Request.end`.

        Args:
            error: Why the send has failed; None: the message was moved, or was withdrawn.
            withdrawn: Whether the send was cancelled before it met its receive.
        """
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
        lane: (src, dst, tag) of the message.
        view: The caller's buffer for the payload; None: memory is taken from a pool when a message matches.
        nbytes: Expected length; `OPEN`: any.
        signature: What the message must be; None: anything.

    Attributes:
        wants_loan: Whether the caller has passed no buffer, and gets the memory of the message on loan.
        loan: The memory of such a message, set at the end.
        missing_bytes: Number of bytes that have not arrived yet.
        consume: Called with the offset and the bytes of each chunk of a loaned message as it arrives; the bytes are
            valid until it returns. Called only if chunks arrive in order, see `Limits.ordered`.
        rolling: Whether all chunks are read into the same memory one after the other, because `consume` reads each.
        detour: Pool memory of a message that began to arrive before the receive; it is copied to `view` at the end.
        allocate: Returns memory for a message of any length, see `Wire.begin_recv`.
        seen: Offsets of the chunks that have arrived.
    """

    missing_bytes: int
    detour: memoryview | None = None
    consume: Callable[[int, memoryview], None] | None = None
    allocate: Callable[[Any], Buffer] | None = None
    rolling = False

    def __init__(self, lane: Lane, view: memoryview | None, nbytes: int, signature: Signature | None = None) -> None:
        end: MessageEnd = self  # the base class, which declares some of the attributes
        end.lane, self.view, end.signature = lane, view, signature
        end.nbytes = self.missing_bytes = nbytes
        self.wants_loan: bool = view is None
        self.seen: set[int] = set()

    def refusal(self, sent_bytes: int, theirs: PlainSignature) -> Exception | None:
        """Return why this receive refuses a message, as an error; None if it takes the message.

        A receive of any length gets the length and the signature of the message here, and its memory from `allocate`;
        an error of `allocate` is returned.

        Args:
            sent_bytes: Length of the message.
            theirs: Signature of the sender.
        """
        if self.nbytes == sent_bytes and (self.signature is None or self.signature.agrees(theirs.fingerprint)):
            return None
        # a receive of any length differs by its signature alone
        expected_bytes = sent_bytes if self.nbytes == OPEN else self.nbytes
        error = self.mismatch(theirs, sent_bytes=sent_bytes, expected_bytes=expected_bytes)
        if error is not None or self.nbytes != OPEN:
            return error
        end: MessageEnd = self
        end.theirs, end.nbytes, self.missing_bytes = theirs, sent_bytes, sent_bytes
        if self.allocate is None:
            return None
        try:
            self.view = self.make_memory(self.allocate)
        except Exception as raised:  # the caller's own
            return raised
        self.wants_loan = False
        return None

    def finish_with_payload(self, payload: memoryview) -> None:
        """End with the whole payload: copied to the caller's buffer, or on loan. A loan of `bytes` is not copied."""
        if self.view is None:
            self.loan = payload if type(payload.obj) is bytes else memoryview(bytes(payload))
        else:
            self.view[:] = payload
        self.matched: bool = True
        self.end()

    def consume_early_chunks(self, chunk_bytes: int) -> None:
        """Call `consume` for the chunks of `chunk_bytes` each that arrived before the receive."""
        if self.consume is not None and self.view is not None:
            for offset in sorted(self.seen):
                self.consume(offset, self.view[offset : min(offset + chunk_bytes, self.nbytes)])

    def finish_chunks(self, memory: BounceBuffers) -> None:
        """End, because all chunks have arrived. If they arrived in `detour`, copy them to the caller's buffer.

        Args:
            memory: Pool to which `detour` returns.
        """
        if self.detour is not None:
            assert self.view is not None, "a receive without a buffer has no detour"
            self.view[:] = self.detour[: self.nbytes]
            memory.release(self.detour)
            self.detour = None
        self.finish(self.view if self.wants_loan else None)

    def finish(self, loan: memoryview | None) -> None:
        """End without an error.

        Args:
            loan: Memory of a message on loan; None: the message is in the caller's buffer.
        """
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
