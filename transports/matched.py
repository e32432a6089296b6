"""Transports between processes, as an asynchronous shell around matching engines.

A transport derives from `MatchedTransport`, makes a `MatchedLink` for every other process, and moves the messages of
its engine; wires, order, cancellation, credits and lengths are done here and in `transports.matching`.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transports.buffers import BounceBuffers, Buffer, as_bytes
from transports.failures import LinkLostError
from transports.linked import LinkedTransport, LinkedWire, PeerLink
from transports.matching import Engine, Lane, Limits, Receive, Send
from transports.request import Done, Request
from transports.signature import Signature
from transports.wire import Envelope, Wire


class MatchedLink(PeerLink):
    """The connection to one other process, which moves the messages that its matching engine names.

    Args:
        member: Index of the other process.
        ranks: Ranks of the other process.
        local: Ranks of this process.
        limits: The limits that both processes have agreed on.
        memory: Buffers for received messages that the caller gets on loan.

    Attributes:
        engine: The state of the messages between the two processes.
        memory: The same buffers.
    """

    def __init__(
        self, member: int, ranks: Sequence[int], local: Sequence[int], limits: Limits, memory: BounceBuffers
    ) -> None:
        super().__init__(member, ranks)
        self.memory = memory
        self.engine: Engine = Engine(self.name, ranks, local, limits, memory)

    @abstractmethod
    def flush(self) -> None:
        """Transmit messages of the engine without waiting, and let a task transmit the rest."""

    def queue_send(self, send: Send) -> None:
        """Queue a message, and let the link transmit due messages."""
        self.engine.outgoing.announce(send)
        self.flush()

    def send_now(self, lane: Lane, view: memoryview, signature: Signature | None = None) -> bool:
        """Send a small message whole, before all others; return False if that is impossible now."""
        return False

    def look(self) -> None:
        """Receive arrived messages, on a link without a task for that; called before a wait."""

    def catch_up(self) -> bool:
        """Move the bytes that are ready, for a task that is about to sleep; return whether any moved."""
        return False

    def withdraw(self, end: Send | Receive) -> None:
        """Cancel a call that has not ended; its callback is called all the same, at once or later."""
        if not end.ended:
            self.engine.withdraw(end)
            self.flush()

    def give_up_waiting(self) -> None:
        """Fail every unmatched send and receive, because this process leaves."""
        self.engine.close()
        self.flush()


class MatchedTransport(LinkedTransport[MatchedLink]):
    """A transport with a matching engine for every other process.

    Args:
        member: Index of this process.
        placement: The ranks of each process, by index.
        joins_itself: Whether it also carries messages among the ranks of this process.

    Attributes:
        memory: Buffers of messages on loan.
        at_once_bytes: Longer messages never leave at once, see `MatchedLink.send_now`.
    """

    at_once_bytes: int = sys.maxsize

    def __init__(self, member: int, placement: Sequence[Sequence[int]], *, joins_itself: bool = False) -> None:
        super().__init__(member, placement, joins_itself=joins_itself)
        self.memory: BounceBuffers = BounceBuffers()

    def make_wire(self, rank: int) -> Wire:
        """Return the wire of a rank."""
        return _MatchedWire(self, rank)


class _MatchedWire(LinkedWire[MatchedTransport]):
    """The wire of one rank."""

    def begin_send(
        self, dst: int, tag: int, data: Buffer, *, priority: int = 0, signature: Signature | None = None, done: Done
    ) -> Request | None:
        """Send at once if that needs no waiting, or begin a send."""
        view, transport = as_bytes(data), self._transport
        lane = (self.rank, dst, tag)
        link = transport.link(lane, dst)
        if link.engine.gone is not None and (error := link.engine.lost(lane)) is not None:
            raise error
        if view.nbytes <= transport.at_once_bytes and link.send_now(lane, view, signature):
            return None
        send = Send(lane, view, priority, signature)
        send.done, send._withdraw = done, link.withdraw
        link.queue_send(send)
        return send

    def begin_recv(
        self,
        src: int,
        tag: int,
        out: Buffer | None,
        nbytes: int,
        *,
        signature: Signature | None = None,
        done: Done,
        consume: Callable[[int, memoryview], None] | None = None,
        allocate: Callable[[Any], Buffer] | None = None,
    ) -> Request:
        """Match an arrived message, or queue a receive."""
        view = None if out is None else as_bytes(out, name="out", writable=True)
        lane = (src, self.rank, tag)
        link = self._transport.link(lane, src)
        link.look()
        receive = Receive(lane, view, nbytes, signature)
        receive.done, receive._withdraw, receive.memory = done, link.withdraw, link.memory
        receive.consume, receive.allocate = consume, allocate
        if link.engine.receive(receive):
            link.flush()
        return receive

    def catch_up(self, peer: int) -> bool:
        """Move the bytes from and to a peer that are ready."""
        return self._transport.link((self.rank, peer, 0), peer).catch_up()

    def unexpected(self, tag: int | None = None) -> list[Envelope]:
        """Return the messages for this rank that no receive has met."""
        for link in self._transport.links.values():
            link.look()
        engines = [link.engine for link in self._transport.links.values()]
        return [each for engine in engines for each in engine.incoming.unexpected(self.rank, tag)]

    def lost(self, src: int, tag: int = 0) -> LinkLostError | None:
        """Return the error of a receive from a process that is lost or has left."""
        lane = (src, self.rank, tag)
        return self._transport.link(lane, src).engine.lost(lane)

    @contextmanager
    def watch(self, notify: Callable[[], None]) -> Iterator[None]:
        """Call a function, for the length of a block, whenever a message arrives or a link ends."""
        watchers = [link.engine.incoming.watchers for link in self._transport.links.values()]
        for each in watchers:
            each.append(notify)
        try:
            yield
        finally:
            for each in watchers:
                each.remove(notify)
