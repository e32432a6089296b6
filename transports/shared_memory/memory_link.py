"""The link to another process of this host: calls of messages, and the end of the process.

The engine matches and moves messages; here are their calls, by rank. The socket carries no bytes: it ends with the
other process.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from transports.buffers import BounceBuffers, Buffer
from transports.failures import (
    LinkLostError,
    TransportClosedError,
    TransportError,
)
from transports.matched import PeerLink
from transports.matching.ends import Lane, MessageEnd
from transports.matching.protocol import BROKEN_PROTOCOL
from transports.patience import Patience
from transports.request import Done
from transports.shared_memory.engine import (
    CORRUPT,
    DONE,
    MISMATCH,
    NO_MEMORY,
    PENDING,
    SIZED,
    WITHDRAWN,
)
from transports.shared_memory.segment import Segment
from transports.signature import PlainSignature, Signature
from transports.wire import OPEN

if TYPE_CHECKING:
    from transports.shared_memory.engine import Engine, Op

#: Second word of the note by which a process says goodbye; in a note for a board it is a rank.
GOODBYE = 1 << 32
# Length in the refusal of a receive of any length, see native/engine.h.
_NO_LENGTH = OPEN - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another process of this host: its socket, memory and rings."""

    socket: socket.socket  # Ends with the other process
    pid: int  # Id of the other process
    readable: bool  # Whether each process may read the memory of the other
    segment: Segment  # Shared memory of the other process
    bell: int  # Descriptor that wakes the other process
    messages_out: memoryview  # Ring of the messages that leave
    messages_in: memoryview  # Ring of the messages that arrive


class MemoryRequest(MessageEnd):
    """A send or a receive under way.

    Args:
        link: The link to the other process.
        lane: Source, destination and tag.
        nbytes: Length of the message.
        done: Called once at the end, with this call.
        receives: Whether the call is a receive.
        loan: Memory for a receive without a buffer.
        signature: Signature of the caller's call; None: open.

    Attributes:
        op: The operation of the engine.
        lane: Source, destination and tag.
        link: The link to the other process.
        receives: Whether the call is a receive.
        allocate: Returns memory for a message of any length, see `Wire.begin_recv`.
    """

    op: Op
    link: MemoryLink
    receives: bool

    def __init__(
        self,
        link: MemoryLink,
        lane: Lane,
        nbytes: int,
        done: Done,
        *,
        receives: bool,
        loan: memoryview | None = None,
        signature: Signature | None = None,
    ) -> None:
        self.link, self.lane, self.memory = link, lane, link.memory
        self.nbytes, self.done, self.receives, self.loan, self.signature = nbytes, done, receives, loan, signature
        self.allocate: Callable[[Any], Buffer] | None = None

    def withdraw(self) -> None:
        """Cancel the call if it has not matched."""
        if not self.ended:
            self.link.engine.withdraw(self.op)
            if self.op.state == WITHDRAWN:  # any other end is reported by the engine
                self.settle()

    def look(self) -> bool:
        """Poll for a moment, if recent polls were successful."""
        patience = self.link.patience
        if not self.ended and (look_s := patience.take()) > 0:
            patience.learn(came=self.link.engine.wait(self.op, look_s, look_s) != PENDING)
            self.settle()
        return True

    def wait(self, seconds: float) -> bool:
        """Wait in the engine, which moves all messages under way."""
        return self.link.engine.wait(self.op, seconds) != PENDING

    def settle(self) -> None:
        """Record the end, if the engine has ended the operation."""
        if self.ended or self.op.state == PENDING:
            return
        if self.op.state == SIZED:
            self._accept()
        else:
            self._end(self.op.state)

    on_end = settle

    def settle_in_thread(self) -> bool:
        """Record a successful end in the calling thread; False if a task has to be woken."""
        if self.link.leaves or self.op.state != DONE:  # those ends wake a task, or end the link
            return False
        self.settle()
        return True

    def close(self) -> None:
        """Fail an unmatched call, because this process leaves."""
        src, dst, tag = self.lane
        if self.ended:  # a thread was interrupted before it removed the call
            self.link.calls.pop(self, None)
        elif not self.op.met:
            self.error = TransportClosedError("the transport has been closed", src=src, dst=dst, tag=tag)
            self.withdraw()

    def _accept(self) -> None:
        """Get memory for the message that a receive of any length has met, and receive it."""
        engine, sized = self.link.engine, self.op
        fingerprint, text, self.nbytes = sized.theirs
        self.theirs = PlainSignature(fingerprint, text)
        try:
            if self.allocate is None:
                self.loan = memory = self.link.memory.take(self.nbytes)
            else:
                memory = self.make_memory(self.allocate)
        except Exception as error:  # the caller's own, or no memory
            engine.accept(sized, None, None)
            self._end(SIZED, error)
            return
        if sized.queued:  # a waiting thread has found it
            engine.forget(sized)
        self.op = engine.accept(sized, None, memory, self)
        self.link.register(self)

    def _end(self, state: int, error: Exception | None = None) -> None:
        """Record the end of the operation, release its loan after a failure, and call the callback."""
        if self.op.queued:  # a waiting thread has ended it
            self.link.engine.forget(self.op)
        self.link.calls.pop(self, None)
        self.link.count += 1
        withdrawn = state == WITHDRAWN and self.error is None
        if state == DONE:
            error = None  # it has matched, perhaps while this process closed
        elif state == WITHDRAWN:
            error = self.error
        else:
            error = error or self._make_error(state)
        if self.loan is not None and state != DONE:
            self.link.memory.release(self.loan)
        self.link.record_change()
        self.end(error, withdrawn=withdrawn)

    def _make_error(self, state: int) -> TransportError:
        """Return the error of a state; a corrupt peer is given up."""
        if state == MISMATCH:
            fingerprint, text, peer_bytes = self.op.theirs
            peer_bytes = self.nbytes if peer_bytes == _NO_LENGTH else peer_bytes
            sent, expected = (peer_bytes, self.nbytes) if self.receives else (self.nbytes, peer_bytes)
            theirs = PlainSignature(fingerprint, text)
            return self.mismatch(theirs, sent_bytes=sent, expected_bytes=expected) or self.refused_error()
        if state == NO_MEMORY:
            src, dst, tag = self.lane
            return LinkLostError("out of memory for early messages; receive messages sooner", src=src, dst=dst, tag=tag)
        if state == CORRUPT:
            self.link.lose(f"it wrote invalid data into shared memory; {BROKEN_PROTOCOL}", evident=True)
        return self.link.loss_error(self.lane)


class MemoryLink(PeerLink):
    """The link to another process of this host.

    Args:
        member: Index of the process.
        ranks: Ranks of the process.
        memory: Buffers of messages on loan.
        peer: Socket, memory and rings of the process.
        engine: Engine of this process.
        patience: How long a task polls for a message before it sleeps.
        report: Prints a line about the loss of the process.

    Attributes:
        ranks: Ranks of the process.
        peer: Socket, memory and rings of the process.
        engine: Engine of this process.
        calls: The sends and receives under way.
        gone: Why the process can be reached no more; None while it can.
        has_left: Whether the process has said goodbye: arrived messages stay.
        count: Number of calls that have ended.
        on_loss: Called when the process is lost or has left.
        deliver_events: Delivers ends and notes of the engine.
    """

    peer: Peer
    memory: BounceBuffers
    engine: Engine
    patience: Patience
    has_left: bool

    def __init__(
        self,
        member: int,
        ranks: Sequence[int],
        memory: BounceBuffers,
        peer: Peer,
        engine: Engine,
        patience: Patience,
        report: Callable[[str], None],
    ) -> None:
        super().__init__(member, ranks)
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.peer, self.memory, self.engine, self.patience = peer, memory, engine, patience
        self.calls: dict[MemoryRequest, None] = {}
        self.gone: str | None = None
        self.on_loss: Callable[[], None] = lambda: None
        self.deliver_events: Callable[[], object] = lambda: None
        self._report = report
        self._evident = self.has_left = self._goodbye_sent = self._dead = False
        self.count: int = 0

    # -- messages -----------------------------------------------------------------------------------------------------

    def send_note(self, key: int, rank: int, note: int) -> None:
        """Send a note about the rows of a rank to the boards of the other process."""
        if not self._dead:
            self.engine.note(self.member, key, rank, note)

    def register(self, call: MemoryRequest) -> MemoryRequest:
        """Keep a new call until its end; record an end that it has already reached."""
        if call.op.state == PENDING or call.op.queued:
            self.calls[call] = None
        else:
            call.settle()
        return call

    def on_end(self) -> None:
        """Wake the task that leaves: the goodbye note, which this link owns, has been sent."""
        self.record_change()

    @property
    def leaves(self) -> bool:
        """Whether this process leaves: a task waits for the calls under way."""
        return self._changed is not None

    def loss_error(self, lane: Lane) -> LinkLostError:
        """Return the error of a message with the lost process."""
        src, dst, tag = lane
        error = LinkLostError(self.gone or f"{self.name} is lost", src=src, dst=dst, tag=tag)
        error.evident = self._evident
        return error

    # -- the other process --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Wait until the other process has ended."""
        with suppress(trio.ClosedResourceError):
            while not self._dead:
                await trio.lowlevel.wait_readable(self.peer.socket)
                self._receive_end()

    def _receive_end(self) -> None:
        """Read the end of the socket, which follows the last message, and handle the end of the process."""
        try:
            packet = self.peer.socket.recv(1)
        except BlockingIOError:
            return
        except OSError as error:
            self._handle_process_end(str(error.strerror))
            return
        self.deliver_events()  # perhaps a goodbye
        self._handle_process_end(
            "it sent bytes on its socket" if packet else "its process has ended", evident=bool(packet)
        )

    def on_goodbye(self) -> None:
        """Handle the goodbye: the other process sends and receives no more."""
        self.has_left = True
        self._end(f"{self.name} has left")

    def _handle_process_end(self, reason: str, *, evident: bool = False) -> None:
        """Handle the end of the other process: a loss, unless one side has said goodbye."""
        if self.has_left or self._goodbye_sent:
            self._close_socket()
        else:
            self.lose(reason, evident=evident)

    def lose(self, reason: str, *, evident: bool = False) -> None:
        """Report the loss of the process to the user, and end all calls with the process."""
        if self.gone is None:
            self._report(f"{self.name} is lost: {reason}")
        self.give_up(reason, evident=evident)

    def give_up(self, reason: str, *, evident: bool = False) -> None:
        """End all calls with the process without a report, and close its socket."""
        self._evident = self._evident or (self.gone is None and evident)
        self._end(f"{self.name} is lost: {reason}")
        self._close_socket()

    def _end(self, reason: str) -> None:
        """Fail the calls under way; messages that have arrived can still be received."""
        if self.gone is None:
            self.gone = reason
            self.engine.lose(self.member)
            # receives first: their errors name the missing message
            for call in sorted(self.calls, key=lambda call: not call.receives):
                call.settle()
            self.on_loss()

    def _close_socket(self) -> None:
        """Close the socket, once, and wake the task that leaves."""
        if not self._dead:
            self._dead = True
            trio.lowlevel.notify_closing(self.peer.socket)
            self.peer.socket.close()
        self.record_change()

    # -- leaving ------------------------------------------------------------------------------------------------------

    def give_up_waiting(self) -> None:
        """Fail every call that has not matched, because this process leaves."""
        for call in tuple(self.calls):
            call.close()

    async def leave(self) -> None:
        """Finish matched messages, send a goodbye, and wait until the other process has ended, too."""
        await self.until(lambda: not self.calls or self.gone is not None)
        self._goodbye_sent = True
        self.gone = self.gone or "this side has closed"
        if not self._dead:
            goodbye = self.engine.note(self.member, 0, GOODBYE, 0, self)
            await self.until(lambda: goodbye.state != PENDING)
            with suppress(OSError):
                self.peer.socket.shutdown(socket.SHUT_WR)
            await self.until(lambda: self._dead)
        self._close_socket()
        self.engine.lose(self.member)
        for call in tuple(self.calls):
            call.settle()

    def progress_counts(self) -> Mapping[Hashable, int]:
        """Return the number of calls that have ended."""
        return {None: self.count}
