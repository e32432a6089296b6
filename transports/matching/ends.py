"""One end of a message: its bytes, its progress, and its result. A waiting caller sets `wake`."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Self, TypeAlias

from transports.base import Envelope
from transports.buffers import BounceBuffers
from transports.failures import LengthMismatchError, LinkLostError, TransportClosedError, TransportError

Lane: TypeAlias = "tuple[int, int, int]"  # (src, dst, tag)


class _End:
    """The common part of sends and receives.

    Attributes:
        lane: (src, dst, tag): messages of one lane are received in the order in which they were sent.
        view: The caller's bytes; None once it has ended, for their owner may resize them from there on.
        nbytes: Their length.
        ended: It is over: done, withdrawn, or failed.
        withdrawn: It was taken back in time, as if it had never been.
        error: The error with which it failed.
        wake: Called once when it ends, with this.
    """

    lane: Lane
    view: memoryview | None
    nbytes: int

    ended: bool = False
    withdrawn: bool = False
    error: TransportError | None = None
    wake: Callable[[Self], None] | None = None

    @property
    def envelope(self) -> Envelope:
        """The ranks, the tag and the length of the message."""
        src, dst, tag = self.lane
        return Envelope(src=src, dst=dst, tag=tag, nbytes=self.nbytes)

    def end(self: Self) -> None:
        """Release the bytes, and wake the waiting caller."""
        self.ended = True
        self.view = None
        wake, self.wake = self.wake, None
        if wake is not None:
            wake(self)

    def undo(self) -> None:
        """End as if it had never been."""
        self.withdrawn = True
        self.end()

    def fail(self, error: TransportError) -> None:
        """End with an error."""
        self.error = error
        self.end()

    def lose(self, reason: str) -> None:
        """Fail because the other process is gone."""
        src, dst, tag = self.lane
        self.fail(LinkLostError(reason, src=src, dst=dst, tag=tag))

    def close(self) -> None:
        """Fail because this side has closed."""
        src, dst, tag = self.lane
        self.fail(TransportClosedError("the transport has been closed", src=src, dst=dst, tag=tag))

    def disagree(self, *, sent_bytes: int, expected_bytes: int) -> None:
        """Fail because the two ends name different lengths."""
        src, dst, tag = self.lane
        self.fail(LengthMismatchError(sent_bytes=sent_bytes, expected_bytes=expected_bytes, src=src, dst=dst, tag=tag))


class Progress(Enum):
    """The progress of a send."""

    WAITING = auto()  #: to be announced
    OFFERED = auto()  #: for the receiver
    FLOWING = auto()  #: accepted; from here on it is finished first, whatever is cancelled
    ENDED = auto()


WAITING, OFFERED, FLOWING, ENDED = Progress  # asking the enumeration takes 0.2 us, for each message


class Send(_End):
    """A message that leaves. A cancelled one that was offered waits for the receiver to say whether it came in time.

    Attributes:
        priority: As passed; any integer.
        progress: From its announcement to its end.
        number: Of its announcement.
        next_offset: Bytes before it have been handed to the wire.
        cancelled: The caller has given up, and waits to hear whether that was in time.
    """

    progress: Progress = WAITING
    number = -1
    next_offset = 0
    cancelled = False

    def __init__(self, lane: Lane, view: memoryview, priority: int) -> None:
        self.lane = lane
        self.view: memoryview = view
        self.nbytes: int = view.nbytes
        self.priority = priority

    def end(self) -> None:
        """Release the bytes, and wake the waiting caller."""
        self.progress = ENDED
        super().end()

    def lose(self, reason: str) -> None:
        """Fail because the other process is gone; a cancellation that was waiting to hear of it was in time."""
        if self.cancelled and self.progress is OFFERED:
            self.undo()
        else:
            super().lose(reason)


class Receive(_End):
    """A message that is wanted.

    Attributes:
        lend: The caller takes the memory that the message is in.
        lent: That memory, at the end.
        matched: A message has been found for it; from here on it is finished first, whatever is cancelled.
        missing_bytes: Bytes that have not arrived yet.
        consume: Takes each chunk of a lent message as it comes: its offset, and its bytes, which are there for the
            length of the call. Only where chunks come one after the other, see `Limits.ordered`.
        rolling: Its chunks arrive in the same memory, one after the other.
        detour: Where its bytes arrive, if they began to before it was there; they are copied at the end.
        seen: Offsets of the chunks that have arrived.
    """

    lent: memoryview | None = None
    missing_bytes: int

    matched: bool = False
    detour: memoryview | None = None
    consume: Callable[[int, memoryview], None] | None = None
    rolling = False

    def __init__(self, lane: Lane, view: memoryview | None, nbytes: int) -> None:
        self.lane = lane
        self.view = view
        self.nbytes = self.missing_bytes = nbytes
        self.lend: bool = view is None
        self.seen: set[int] = set()

    def take(self, payload: memoryview) -> None:
        """End with a message whose bytes are here; they are copied, unless they are immutable."""
        if payload.nbytes != self.nbytes:
            self.disagree(sent_bytes=payload.nbytes, expected_bytes=self.nbytes)
            return
        if self.view is None:
            self.lent = payload if type(payload.obj) is bytes else memoryview(bytes(payload))
        else:
            self.view[:] = payload
        self.matched = True
        self.end()

    def consume_seen(self, chunk_bytes: int) -> None:
        """Hand over the chunks that came before the receive."""
        if self.consume is not None and self.view is not None:
            for offset in sorted(self.seen):
                self.consume(offset, self.view[offset : min(offset + chunk_bytes, self.nbytes)])

    def land(self, memory: BounceBuffers) -> None:
        """End with all chunks here; give a detour back to `memory`."""
        if self.detour is not None:
            assert self.view is not None, "a lending receive takes the memory as it is"
            self.view[:] = self.detour[: self.nbytes]
            memory.give_back(self.detour)
            self.detour = None
        self.finish(self.view if self.lend else None)

    def finish(self, lent: memoryview | None) -> None:
        """End with the message in its place."""
        self.matched = True
        self.lent = lent
        self.end()
