"""Messages between ranks of processes of one host, matched and moved by the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from transports.base import Endpoint, Envelope, Statistics
from transports.buffers import BounceBuffers, Buffer, as_bytes
from transports.linked import LinkedEndpoint, LinkedTransport
from transports.matching import Lane, lane_key
from transports.patience import Patience
from transports.shared_memory.engine import EngineEvents
from transports.shared_memory.memory_link import MemoryLink
from transports.signature import PlainSignature, Signature
from transports.starter import Request

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

    def __init__(self, member: int, placement: Sequence[Sequence[int]]) -> None:
        super().__init__(member, placement)
        self.engine = self.events = None
        self.memory: BounceBuffers = BounceBuffers()
        self.patience: Patience = Patience(0.0)

    def make_endpoint(self, rank: int) -> Endpoint:
        """Return the endpoint of a rank."""
        return MemoryEndpoint(self, rank)

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


class MemoryEndpoint(LinkedEndpoint[MemoryMessages]):
    """The end of one rank."""

    def begin_send(
        self,
        dst: int,
        tag: int,
        data: Buffer,
        *,
        priority: int = 0,
        signature: Signature | None = None,
        done: Callable[[Request], None],
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
        done: Callable[[Request], None],
        consume: Callable[[int, memoryview], None] | None = None,
        allocate: Callable[[Any], Buffer] | None = None,
    ) -> Request:
        """Begin a receive in the engine."""
        view, lane = None if out is None else as_bytes(out, name="out", writable=True), (src, self.rank, tag)
        return self._transport.link(lane, src).begin_receive(lane, view, nbytes, done, signature, allocate)

    @property
    def within_host(self) -> bool:
        """Whether messages go through memory of this host: always."""
        return True

    def takes_threads(self, peer: int) -> bool:
        """Whether a thread that runs in place of the event loop may begin messages with a peer."""
        transport = self._transport
        home = transport.home.get(peer)
        return home is not None and transport.state is None and transport.links[home].gone is None

    def catch_up(self, peer: int) -> bool:
        """Deliver events of the engine; return whether there were any."""
        transport = self._transport
        if transport.state is not None or peer not in transport.home:
            raise transport.unreachable_error((self.rank, peer, 0), peer)
        return transport.deliver_events()

    def announced(self, choices: Sequence[tuple[int, int]], *, free_bits: int = 0) -> Envelope | None:
        """Return the oldest message of the choices."""
        lanes = {lane_key(lane, free_bits) for lane in self.checked_lanes(choices)}
        arrived = self.unexpected()
        return next((each for each in arrived if lane_key((each.src, each.dst, each.tag), free_bits) in lanes), None)

    def unexpected(self) -> list[Envelope]:
        """Return the messages for this rank that no receive has met, the oldest first."""
        engine, dst = self._transport.engine, self.rank
        return [
            Envelope(
                src=lane >> 32,
                dst=dst,
                tag=tag,
                nbytes=nbytes,
                since_ns=since_ns,
                signature=PlainSignature(number, text),
            )
            for since_ns, _, lane, tag, nbytes, number, text in sorted(engine.announced(dst) if engine else ())
        ]

    def require_alive(self, lane: Lane) -> None:
        """Raise `LinkLostError` if the process of a source is lost."""
        link = self._transport.link(lane, lane[0])
        if link.gone is not None:
            raise link.loss_error(lane)

    def watching(self, sources: Iterable[int], notify: Callable[[], None]) -> AbstractContextManager[None]:
        """Call a function, for the length of a block, whenever a message or a loss may have arrived."""
        events = self._transport.events
        assert events is not None, "it is open"
        return events.probing(notify)
