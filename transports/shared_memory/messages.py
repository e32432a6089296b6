"""Messages between ranks of processes of one host, matched and moved by the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from transports.base import Statistics
from transports.buffers import BounceBuffers, Buffer, as_bytes
from transports.failures import LinkLostError
from transports.linked import LinkedTransport, LinkedWire
from transports.patience import Patience
from transports.request import Done, Request
from transports.shared_memory.engine import EngineEvents
from transports.shared_memory.memory_link import MemoryLink
from transports.signature import PlainSignature, Signature
from transports.wire import Envelope, Wire

if TYPE_CHECKING:
    from transports.shared_memory.engine import Engine


class MemoryMessages(LinkedTransport[MemoryLink]):
    """The part of a transport that carries messages; subclasses join the other processes, and make the engine.

    Args:
        member: Index of this process.
        placement: The ranks of each process, by index.

    Attributes:
        memory: Buffers of messages on loan.
        engine: Engine of this process; None before it has joined others.
        events: Deliverer of the engine's events on the event loop.
    """

    engine: Engine | None
    events: EngineEvents | None
    patience: Patience

    def __init__(self, member: int, placement: Sequence[Sequence[int]]) -> None:
        super().__init__(member, placement)
        self.engine = self.events = None
        self.memory: BounceBuffers = BounceBuffers()
        self.patience = Patience(0.0)

    def make_wire(self, rank: int) -> Wire:
        """Return the wire of a rank."""
        return MemoryWire(self, rank)

    def deliver_events(self) -> bool:
        """Deliver events of the engine; return whether there were any. The event loop's thread only."""
        return self.events is not None and self.events.deliver_events()

    def statistics(self) -> Statistics:
        """Return the unmatched sends and receives of local ranks."""
        calls = [call for link in self.links.values() for call in link.calls if not call.op.met]
        return Statistics(
            unmatched_sends=tuple(call.envelope for call in calls if not call.receives),
            unmatched_receives=tuple(call.envelope for call in calls if call.receives),
        )


class MemoryWire(LinkedWire[MemoryMessages]):
    """The wire of one rank."""

    within_host = True

    def begin_send(
        self, dst: int, tag: int, data: Buffer, *, priority: int = 0, signature: Signature | None = None, done: Done
    ) -> Request | None:
        """Write the message into the ring up to its room; the engine writes the rest."""
        view, lane = as_bytes(data), (self.rank, dst, tag)
        return self._transport.link(lane, dst).begin_send(lane, view, priority, done, signature)

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
        """Begin a receive in the engine."""
        view, lane = None if out is None else as_bytes(out, name="out", writable=True), (src, self.rank, tag)
        return self._transport.link(lane, src).begin_receive(lane, view, nbytes, done, signature, allocate)

    def takes_threads(self, peer: int) -> bool:
        """Whether a thread that runs in place of the event loop may begin messages with a peer."""
        transport = self._transport
        home = transport.home.get(peer)
        return home is not None and transport.state is None and transport.links[home].gone is None

    def catch_up(self, peer: int) -> bool:
        """Deliver events of the engine; return whether there were any."""
        self._transport.link((self.rank, peer, 0), peer)
        return self._transport.deliver_events()

    def unexpected(self, tag: int | None = None, *, free_bits: int = 0) -> list[Envelope]:
        """Return the messages for this rank that no receive has met, the oldest first."""
        engine, dst = self._transport.engine, self.rank
        found: list[Envelope] = []
        for ns, _, lane, of, nbytes, number, text in sorted(engine.announced(dst) if engine else ()):
            if tag is None or of >> free_bits == tag >> free_bits:
                said = PlainSignature(number, text)
                found.append(Envelope(src=lane >> 32, dst=dst, tag=of, nbytes=nbytes, since_ns=ns, signature=said))
        return found

    def lost(self, src: int, tag: int = 0) -> LinkLostError | None:
        """Return the error of a receive from a process that is lost."""
        lane = (src, self.rank, tag)
        link = self._transport.link(lane, src)
        return None if link.gone is None else link.loss_error(lane)

    def watch(self, notify: Callable[[], None]) -> AbstractContextManager[None]:
        """Call a function, for the length of a block, whenever a message or a loss may have arrived."""
        events = self._transport.events
        return nullcontext() if events is None else events.probing(notify)
