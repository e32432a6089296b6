"""The link to another process of this host: messages that the engine carries, and the end of the process.

The engine matches and moves messages; here are their calls, by rank. The socket carries nothing: that it ends tells
that the other process has.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import trio

from transports.base import Envelope
from transports.buffers import BounceBuffers, Delivery
from transports.failures import LengthMismatchError, LinkLostError, TransportClosedError
from transports.linked import Link
from transports.matching import Lane
from transports.patience import Patience
from transports.shared_memory.engine import (
    CORRUPT,
    DONE,
    MISMATCH,
    NO_MEMORY,
    PENDING,
    WITHDRAWN,
)
from transports.shared_memory.segment import Segment
from transports.starter import Call

if TYPE_CHECKING:
    from transports.shared_memory.engine import Engine, Op

#: Second word of the note by which a process says goodbye; in a note for a board it is a rank.
GOODBYE = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another process of this host, as joining has found it."""

    socket: socket.socket  # Its end is the other side's
    pid: int  # The other process
    readable: bool  # Whether each of the two may read the other's memory
    segment: Segment  # Memory of the other process's
    bell: int  # Descriptor that wakes the other process
    messages_out: memoryview  # Ring of the messages that leave
    messages_in: memoryview  # Ring of those that come


class MemoryCall(Call):
    """A send or a receive under way.

    Args:
        link: The way to the other process.
        lane: Source, destination and tag.
        nbytes: Length of the message.
        done: Called once, with this.
        receives: Whether it is a receive.
        lent: The place of a receive without one.

    Attributes:
        op: The engine's end of it.
        lane: As passed.
        link: As passed.
        receives: As passed.
    """

    __slots__ = ("_done", "_lent", "_nbytes", "ended", "error", "lane", "link", "op", "receives", "withdrawn")

    op: Op
    link: MemoryLink
    lane: Lane
    receives: bool

    def __init__(
        self,
        link: MemoryLink,
        lane: Lane,
        nbytes: int,
        done: Callable[[Call], None],
        *,
        receives: bool,
        lent: memoryview | None = None,
    ) -> None:
        self.link, self.lane = link, lane
        self._nbytes, self._done, self.receives, self._lent = nbytes, done, receives, lent
        self.ended = self.withdrawn = False
        self.error: LinkLostError | LengthMismatchError | TransportClosedError | None = None

    @property
    def envelope(self) -> Envelope:
        """The message without its bytes."""
        src, dst, tag = self.lane
        return Envelope(src=src, dst=dst, tag=tag, nbytes=self._nbytes)

    def withdraw(self) -> None:
        """Take the call back, unless its other end has met it."""
        if not self.ended:
            self.link.engine.withdraw(self.op)
            if self.op.state == WITHDRAWN:  # any other end is reported by the engine
                self.settle()

    def look(self) -> bool:
        """Wait for a moment, if that has helped lately."""
        patience = self.link.patience
        if not self.ended and (look_s := patience.take()) > 0:
            patience.learn(came=self.link.engine.wait(self.op, look_s, look_s) != PENDING)
            self.settle()
        return True

    def wait(self, seconds: float) -> bool:
        """Wait in the engine, and move what is under way."""
        return self.link.engine.wait(self.op, seconds) != PENDING

    def settle(self) -> None:
        """Note the end, if it has come."""
        if not self.ended and self.op.state != PENDING:
            self._end(self.op.state)

    on_end = settle

    def settle_in_thread(self) -> bool:
        """Note a good end likewise, unless a task waits for that."""
        if self.link.leaves or self.op.state != DONE:  # that wakes a task, or ends the link
            return False
        self.settle()
        return True

    def close(self) -> None:
        """End because this process leaves, if nothing has met it."""
        src, dst, tag = self.lane
        if self.ended:  # a thread was interrupted before it could say so
            self.link.calls.pop(self, None)
        elif not self.op.met:
            self.error = TransportClosedError("the transport has been closed", src=src, dst=dst, tag=tag)
            self.withdraw()

    def _end(self, state: int) -> None:
        self.ended = True
        if self.op.queued:  # it was ended by a thread that waited
            self.link.engine.forget(self.op)
        self.link.calls.pop(self, None)
        self.link.count += 1
        if state == WITHDRAWN:
            self.withdrawn = self.error is None
        elif state != DONE:
            self.error = self._failure(state)
        else:
            self.error = None  # it was met while this process closed
        if self._lent is not None and state != DONE:
            self.link.memory.give_back(self._lent)
        self.link.note_change()
        self._done(self)

    def _failure(self, state: int) -> LinkLostError | LengthMismatchError:
        src, dst, tag = self.lane
        if state == MISMATCH:
            other = self.op.call[1]
            sent, expected = (other, self._nbytes) if self.receives else (self._nbytes, other)
            return LengthMismatchError(src=src, dst=dst, tag=tag, sent_bytes=sent, expected_bytes=expected)
        if state == NO_MEMORY:
            return LinkLostError("there is no memory for messages that come before others", src=src, dst=dst, tag=tag)
        if state == CORRUPT:
            self.link.lose("it wrote what cannot be true into the memory of this host", evident=True)
        return self.link.loss(self.lane)

    def delivery(self) -> Delivery:
        """Lend the message."""
        lent = self._lent
        assert lent is not None, "a receive without a place is lent memory"
        return Delivery(lent[: self._nbytes].toreadonly(), partial(self.link.memory.give_back, lent))


class MemoryLink(Link):
    """Another process of this host.

    Args:
        member: Its index.
        ranks: Its ranks.
        memory: For messages that are lent.
        peer: The process, as joining has found it.
        engine: Of this process.
        patience: How long a task waits for a message before it sleeps.
        report: Takes a line about its loss.

    Attributes:
        peer: As passed.
        engine: As passed.
        calls: The sends and receives under way.
        gone: Why nothing more can be sent to the other process or expected from it; None while it is there.
        count: Number of calls that have ended.
        on_loss: Called once nothing more can be expected of it.
        take_in: Takes in what the engine has for the event loop.
    """

    peer: Peer
    memory: BounceBuffers
    engine: Engine
    patience: Patience

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
        self.peer, self.memory, self.engine, self.patience = peer, memory, engine, patience
        self.calls: dict[MemoryCall, None] = {}
        self.gone: str | None = None
        self.on_loss: Callable[[], None] = lambda: None
        self.take_in: Callable[[], object] = lambda: None
        self._report = report
        self._evident = self._has_left = self._said_goodbye = self._dead = False
        self.count: int = 0

    # -- messages -----------------------------------------------------------------------------------------------------

    def begin_send(self, lane: Lane, view: memoryview, priority: int, done: Callable[[Call], None]) -> Call | None:
        """Begin a send; None if it is over."""
        if self.gone is not None:
            raise self.loss(lane)
        src, dst, tag = lane
        call = MemoryCall(self, lane, view.nbytes, done, receives=False)
        call.op = self.engine.send(self.member, tag, 0, b"", None, view.nbytes, view, src << 32 | dst, priority, call)
        if call.op.state == DONE and not call.op.queued:
            self.count += 1
            return None
        return self._begun(call)

    def begin_receive(self, lane: Lane, out: memoryview | None, nbytes: int, done: Callable[[Call], None]) -> Call:
        """Begin a receive."""
        src, dst, tag = lane
        if self.gone is not None and not self._has_left:
            raise self.loss(lane)
        lent = self.memory.take(nbytes) if out is None else None
        place = out if lent is None else lent
        call = MemoryCall(self, lane, nbytes, done, receives=True, lent=lent)
        call.op = self.engine.receive(self.member, tag, 0, None, nbytes, place, src << 32 | dst, call)
        return self._begun(call)

    def tell(self, key: int, rank: int, told: int) -> None:
        """Tell the boards of the other process three integers."""
        if not self._dead:
            self.engine.note(self.member, key, rank, told)

    def _begun(self, call: MemoryCall) -> MemoryCall:
        if call.op.state == PENDING or call.op.queued:
            self.calls[call] = None
        else:
            call.settle()
        return call

    @property
    def leaves(self) -> bool:
        """Whether this process leaves: a task waits for the calls under way."""
        return self._changed is not None

    def loss(self, lane: Lane) -> LinkLostError:
        """Return the error of a message of which nothing more can be expected."""
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
                self._hear_end()

    def _hear_end(self) -> None:
        """Act on the end of the other process, after all that it has written."""
        try:
            came = self.peer.socket.recv(1)
        except BlockingIOError:
            return
        except OSError as error:
            self._ended(str(error.strerror))
            return
        self.take_in()  # a goodbye
        self._ended("a packet that came by its socket" if came else "its process has ended", evident=bool(came))

    def on_goodbye(self) -> None:
        """Note that the other process sends nothing more, and takes nothing more in."""
        self._has_left = True
        self._end(f"{self.name} has left")

    def _ended(self, reason: str, *, evident: bool = False) -> None:
        if self._has_left or self._said_goodbye:
            self._cut()
        else:
            self.lose(reason, evident=evident)

    def lose(self, reason: str, *, evident: bool = False) -> None:
        """Give the process up: every operation with its ranks fails."""
        if self.gone is None:
            self._report(f"{self.name} is lost: {reason}")
        self.give_up(reason, evident=evident)

    def give_up(self, reason: str, *, evident: bool = False) -> None:
        """Give the process up without a report to the user, who has been told."""
        self._evident = self._evident or (self.gone is None and evident)
        self._end(f"{self.name} is lost: {reason}")
        self._cut()

    def _end(self, reason: str) -> None:
        """Fail the calls under way: nothing more can be expected. What has come can still be received."""
        if self.gone is None:
            self.gone = reason
            self.engine.lose(self.member)
            for call in sorted(self.calls, key=_sends):  # who waits both ways should name what did not come
                call.settle()
            self.on_loss()

    def _cut(self) -> None:
        if not self._dead:
            self._dead = True
            trio.lowlevel.notify_closing(self.peer.socket)
            self.peer.socket.close()
        self.note_change()

    # -- leaving ------------------------------------------------------------------------------------------------------

    def give_up_waiting(self) -> None:
        """Fail every call that nothing has met."""
        for call in tuple(self.calls):
            call.close()

    async def leave(self) -> None:
        """Finish messages that both sides have begun, say goodbye, and wait until the other has ended, too."""
        await self.until(lambda: not self.calls or self.gone is not None)
        self._said_goodbye = True
        self.gone = self.gone or "this side has closed"
        if not self._dead:
            goodbye = self.engine.note(self.member, 0, GOODBYE, 0, _Change(self))
            await self.until(lambda: goodbye.state != PENDING)
            with suppress(OSError):
                self.peer.socket.shutdown(socket.SHUT_WR)
            await self.until(lambda: self._dead)
        self._cut()
        self.engine.lose(self.member)
        for call in tuple(self.calls):
            call.settle()

    def traffic(self) -> Mapping[Hashable, int]:
        """Return the number of calls that have ended."""
        return {None: self.count}


@dataclass(frozen=True, slots=True)
class _Change:
    """Owner of a note, whose end is a change for who leaves."""

    link: MemoryLink

    def on_end(self) -> None:
        self.link.note_change()


def _sends(call: MemoryCall) -> bool:
    return not call.receives
