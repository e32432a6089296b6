"""The link to another process of this host: its requests under way, and the loss or the goodbye of the process.

The engine matches and moves messages. The link's socket carries no bytes: its end shows that the other process has
ended.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from transports.buffers import BounceBuffers, Buffer
from transports.failures import LinkLostError, TransportClosedError, TransportError, lane_fields
from transports.matched import PeerLink
from transports.matching.ends import Lane, MessageEnd
from transports.matching.protocol import BROKEN_PROTOCOL
from transports.patience import Patience
from transports.request import Done
from transports.shared_memory.engine import CORRUPT, DONE, MISMATCH, NO_MEMORY, PENDING, SIZED, WITHDRAWN
from transports.shared_memory.segment import Segment
from transports.signature import PlainSignature, Signature
from transports.wire import OPEN

if TYPE_CHECKING:
    from transports.shared_memory.engine import Engine, Op

#: Second word of the note by which a process says goodbye; in a note for a board it is a rank.
GOODBYE = 1 << 32
# Stands for the length where a receive of any length has refused a message, see native/engine.h.
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
    """A send or a receive under way, carried out by an operation of the engine.

    Args:
        link: The link to the other process.
        lane: (src, dst, tag) of the message.
        nbytes: Length of the message; `OPEN`: any.
        done: Called once with this request at its end.
        receives: Whether the request is a receive.
        loan: Memory for a receive without a buffer.
        signature: What the message is; None: anything.

    Attributes:
        op: The operation of the engine.
        lane: (src, dst, tag) of the message.
        link: The link to the other process.
        receives: Whether the request is a receive.
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
        end: MessageEnd = self  # the base class, which declares most of the attributes
        self.link, end.lane, end.memory = link, lane, link.memory
        end.nbytes, end.done, self.receives, self.loan, end.signature = nbytes, done, receives, loan, signature
        self.allocate: Callable[[Any], Buffer] | None = None

    def withdraw(self) -> None:
        """Cancel the request if it has not matched."""
        if not self.ended:
            self.link.engine.withdraw(self.op)
            self.matched: bool = bool(self.op.met)
            if self.op.state == WITHDRAWN:  # any other end is reported by the engine
                self.settle()

    def look(self) -> bool:
        """Poll for a moment, if recent polls were successful; return True, as this wire can poll."""
        patience = self.link.patience
        if not self.ended and (look_s := patience.next_poll_s()) > 0:
            # the second duration is how long the engine polls before it sleeps: here the whole time
            patience.record_poll(came=self.link.engine.wait(self.op, look_s, look_s) != PENDING)
            if self.op.state in (DONE, SIZED):
                self.settle()
        return True

    def wait(self, seconds: float) -> bool:
        """Wait in the engine for the end, `seconds` at most; return whether it came. See `Request.wait`."""
        return self.link.engine.wait(self.op, seconds) != PENDING

    def settle(self) -> None:
        """End this request if the engine has ended its operation; or make memory for a receive of any length."""
        if self.ended or self.op.state == PENDING:
            return
        if self.op.state == SIZED:
            self._allocate_and_accept()
        else:
            self._end_in_state(self.op.state)

    on_end = settle

    def settle_in_thread(self) -> bool:
        """End this request in the calling thread if it was successful; False if the event loop has to end it."""
        # these ends wake a task, or end the link, which only the event loop may do
        if self.link.is_leaving or self.op.state != DONE:
            return False
        self.settle()
        return True

    def close(self) -> None:
        """Fail an unmatched request, because this process leaves."""
        if self.ended:  # a thread was interrupted before it removed the request
            self.link.calls.pop(self, None)
        elif not self.op.met:
            closed = TransportClosedError("the transport has been closed", **lane_fields(self.lane))
            self.error: Exception | None = closed
            self.withdraw()

    def _allocate_and_accept(self) -> None:
        """Make memory for the message that a receive of any length has met, and let the engine receive it there.

        If the memory cannot be made, the message is refused, and the receive fails.
        """
        engine, sized = self.link.engine, self.op
        fingerprint, text, nbytes = sized.theirs
        self.nbytes: int = nbytes
        self.theirs: PlainSignature | None = PlainSignature(fingerprint, text)
        try:
            if self.allocate is None:
                self.loan = memory = self.link.memory.take(self.nbytes)
            else:
                memory = self.make_memory(self.allocate)
        except Exception as error:  # of `allocate`, or a lack of memory
            # without memory, the engine refuses the message
            engine.accept(sized, None, None)
            self._end_in_state(SIZED, error)
            return
        if sized.queued:  # the engine would report this end to the event loop, too
            engine.forget(sized)
        self.op = engine.accept(sized, None, memory, self)
        self.link.register_request(self)

    def _end_in_state(self, state: int, error: Exception | None = None) -> None:
        """End this request after its operation, and call `done`. After a failure, memory for a loan is released.

        Without an error, which is why no memory could be made for the message, the state of the operation decides.
        """
        if self.op.queued:  # the engine would report this end to the event loop, too
            self.link.engine.forget(self.op)
        self.link.calls.pop(self, None)
        self.link.count += 1
        # `close` sets the error and withdraws the request: such an end is a failure
        withdrawn = state == WITHDRAWN and self.error is None
        if state == DONE:
            error = None  # the message has arrived, even if `close` was called since
        elif state == WITHDRAWN:
            error = self.error
        else:
            error = error or self._make_error(state)
        if self.loan is not None and state != DONE:
            self.link.memory.release(self.loan)
        self.link.record_change()
        self.end(error, withdrawn=withdrawn)

    def _make_error(self, state: int) -> TransportError:
        """Return the error of an operation in a state of failure. After `CORRUPT`, the peer is given up as well."""
        if state == MISMATCH:
            fingerprint, text, peer_bytes = self.op.theirs
            peer_bytes = self.nbytes if peer_bytes == _NO_LENGTH else peer_bytes
            sent, expected = (peer_bytes, self.nbytes) if self.receives else (self.nbytes, peer_bytes)
            theirs = PlainSignature(fingerprint, text)
            return self.mismatch(theirs, sent_bytes=sent, expected_bytes=expected) or self.refused_error()
        if state == NO_MEMORY:
            reason = "out of memory for early messages; receive messages sooner"
            return LinkLostError(reason, **lane_fields(self.lane))
        if state == CORRUPT:
            self.link.lose(f"it wrote invalid data into shared memory; {BROKEN_PROTOCOL}", evident=True)
        return self.link.peer_gone_error(self.lane)


class MemoryLink(PeerLink):
    """The link to another process of this host.

    Args:
        member: Index of the process.
        ranks: Ranks of the process.
        memory: Pool of buffers for messages that are received on loan.
        peer: Socket, memory and rings of the process.
        engine: Engine of this process.
        patience: How long a task polls for a message before it sleeps.
        report: Prints a line about the loss of the process.

    Attributes:
        ranks: Ranks of the process.
        peer: Socket, memory and rings of the process.
        engine: Engine of this process.
        calls: The requests under way, as keys; the values are None.
        gone: Why no message can pass any more: the process is lost or has left. None while messages can pass.
        has_left: Whether the process has sent its goodbye. Messages that have arrived can still be received then.
        count: Number of requests that have ended, as a sign of progress.
        on_loss: Called when the process is lost or has left.
        deliver_events: Delivers ends and notes of the engine, see `EngineEvents`.
    """

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
        self.peer = peer
        self.memory = memory
        self.engine = engine
        self.patience = patience
        self.calls: dict[MemoryRequest, None] = {}
        self.gone: str | None = None
        self.on_loss: Callable[[], None] = lambda: None
        self.deliver_events: Callable[[], object] = lambda: None
        self._report = report
        self.has_left: bool = False
        self._evident = self._goodbye_sent = self._dead = False
        self.count: int = 0

    # -- messages -----------------------------------------------------------------------------------------------------

    def send_note(self, key: int, rank: int, note: int) -> None:
        """Send a note about the rows of a rank to the boards of the other process, unless the link has ended.

        Args:
            key: Number of the group.
            rank: The rank that the note is about.
            note: Offset and flags of the rows, see `transports.shared_memory.board`.
        """
        if not self._dead:
            self.engine.note(self.member, key, rank, note)

    def register_request(self, call: MemoryRequest) -> MemoryRequest:
        """Keep a new request until its end, and return it; if its operation has ended already, end the request now."""
        if call.op.state == PENDING or call.op.queued:
            self.calls[call] = None
        else:
            call.settle()
        return call

    def on_end(self) -> None:
        """Wake the task in `leave`, because the goodbye note, which this link owns, has been sent."""
        self.record_change()

    @property
    def is_leaving(self) -> bool:
        """Whether this process is leaving: a task waits in `leave`."""
        return self._changed is not None

    def peer_gone_error(self, lane: Lane) -> LinkLostError:
        """Return the error of a message with the lost process."""
        error = LinkLostError(self.gone or f"{self.name} is lost", **lane_fields(lane))
        error.evident = self._evident
        return error

    # -- the other process --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Wait until the other process has ended."""
        with suppress(trio.ClosedResourceError):
            while not self._dead:
                await trio.lowlevel.wait_readable(self.peer.socket)
                self._handle_socket_end()

    def _handle_socket_end(self) -> None:
        """Unless one side has sent a goodbye before, the other process is lost."""
        try:
            packet = self.peer.socket.recv(1)
        except BlockingIOError:
            return
        except OSError as error:
            reason, evident = str(error.strerror), False
        else:
            self.deliver_events()  # perhaps a goodbye
            reason, evident = ("it sent bytes on its socket", True) if packet else ("its process has ended", False)
        if self.has_left or self._goodbye_sent:
            self._close_socket()
        else:
            self.lose(reason, evident=evident)

    def on_goodbye(self) -> None:
        """Handle the goodbye of the other process, which does not send or receive any more."""
        self.has_left = True
        self._fail_calls(f"{self.name} has left")

    def lose(self, reason: str, *, evident: bool = False) -> None:
        """Fail all calls with the process, and report its loss to the user, unless it was already lost or had left.

        Arguments are as of `give_up`.
        """
        if self.gone is None:
            self._report(f"{self.name} is lost: {reason}")
        self.give_up(reason, evident=evident)

    def give_up(self, reason: str, *, evident: bool = False) -> None:
        """Fail all calls with the process without a report, and close its socket.

        Args:
            reason: The cause, for messages.
            evident: Whether this side has seen the fault itself, see `LinkLostError`.
        """
        if self.gone is None:  # only the first reason counts: later ones may be its consequences
            self._evident = evident
        self._fail_calls(f"{self.name} is lost: {reason}")
        self._close_socket()

    def _fail_calls(self, reason: str) -> None:
        """Fail the calls under way; messages that have arrived can still be received."""
        if self.gone is None:
            self.gone = reason
            self.engine.lose(self.member)
            # receives first: their errors name the missing message
            for call in sorted(self.calls, key=lambda call: not call.receives):
                call.settle()
            self.on_loss()

    def _close_socket(self) -> None:
        """Close the socket, once, and notify the task in `leave`."""
        if not self._dead:
            self._dead = True
            trio.lowlevel.notify_closing(self.peer.socket)
            self.peer.socket.close()
        self.record_change()

    # -- leaving ------------------------------------------------------------------------------------------------------

    def fail_unmatched(self) -> None:
        """Fail every request that has not matched, because this process leaves."""
        for call in tuple(self.calls):
            call.close()

    async def leave(self) -> None:
        """Finish matched messages, send a goodbye, and wait until the other process has ended, too."""
        await self.wait_until(lambda: not self.calls or self.gone is not None)
        self._goodbye_sent = True
        self.gone = self.gone or "this side has closed"
        if not self._dead:
            # this link owns the note: `on_end` is called once it has been sent
            goodbye = self.engine.note(self.member, 0, GOODBYE, 0, self)
            await self.wait_until(lambda: goodbye.state != PENDING)
            with suppress(OSError):
                self.peer.socket.shutdown(socket.SHUT_WR)
            await self.wait_until(lambda: self._dead)
        self._close_socket()
        self.engine.lose(self.member)
        for call in tuple(self.calls):
            call.settle()

    def progress_counts(self) -> Mapping[Hashable, int]:
        """Return the number of requests that have ended, as the count of the only connection."""
        return {None: self.count}
