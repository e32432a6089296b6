"""Transports between processes: a link to each of the others, wires, and an asynchronous shell around matching.

A transport derives from `MatchedTransport`, makes a `MatchedLink` for every other process, and moves the messages of
its engine; wires, order, cancellation, credits and lengths are done here and in `transports.matching`. One that matches
by itself derives from `LinkedTransport`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, Generic, Self, TypeVar

import trio
from trio.lowlevel import cancel_shielded_checkpoint

from transports.base import Transport
from transports.buffers import BounceBuffers, Buffer, as_bytes
from transports.failures import ArgumentError, LinkLostError, TransportClosedError, TransportError
from transports.matching import Engine, Lane, Limits, Receive, Send
from transports.patience import Patience
from transports.request import Done, Request
from transports.signature import Signature
from transports.wire import TAG_LIMIT, Envelope, Wire, add_to_watchers, check_tag, describe_ranks

# Longest wait of a goodbye for the next sign of progress: longer than a busy machine keeps a process from running,
# shorter than a user's patience with a program that ends.
_PATIENCE_S = 2.0


class PeerLink(ABC):
    """The connection to one other process.

    Args:
        member: Index of the other process.
        ranks: Ranks of the other process.

    Attributes:
        name: Name of the other process in error messages.
        least_progress: A connection makes progress if its count of `progress_counts` grows by at least this in two
            seconds.
    """

    least_progress = 1

    def __init__(self, member: int, ranks: Sequence[int]) -> None:
        self.member = member
        self.name: str = f"process {member} ({describe_ranks(tuple(ranks))})"
        self._changed: trio.Event | None = None

    @abstractmethod
    def fail_unmatched(self) -> None:
        """Fail every unmatched send and receive, because this process leaves."""

    async def leave(self) -> None:  # noqa: B027 - a link without a connection says no goodbye
        """Wait until matched messages have finished, and send a goodbye; gives up when progress stops."""

    def progress_counts(self) -> Mapping[Hashable, int]:
        """Return for each connection of the link a count that grows as long as it moves bytes, such as their number."""
        return {}

    def record_change(self) -> None:
        """Wake `wait_until`, so that it checks its condition again."""
        if self._changed is not None:
            self._changed.set()

    async def wait_until(self, done: Callable[[], bool]) -> None:
        """Return when `done()` is true, or when no connection has made progress for two seconds.

        No error is raised in the second case: the caller checks the condition again.
        """
        last_counts: dict[Hashable, int] = {}
        # each round lasts two seconds at most, and another one follows only if bytes have moved in it
        while not done() and self._has_progressed(last_counts):
            with trio.move_on_after(_PATIENCE_S):
                while not done():
                    self._changed = trio.Event()
                    await self._changed.wait()
        # nobody waits: `record_change` has nothing to set
        self._changed = None

    def _has_progressed(self, last_counts: dict[Hashable, int]) -> bool:
        """Return whether any connection is new or has made progress since `last_counts`, which is updated."""
        counts = self.progress_counts()
        # a new connection starts this far below 0, so that it counts as progress even at 0
        growth = [count - last_counts.get(connection, -self.least_progress) for connection, count in counts.items()]
        last_counts.update(counts)
        return max(growth, default=0) >= self.least_progress


LinkType = TypeVar("LinkType", bound=PeerLink)
Made = TypeVar("Made", bound=PeerLink)


class LinkedTransport(Transport, Generic[LinkType]):
    """A transport that has a link to every other process.

    Subclasses make ``links`` and wires, and override `join`, `run`, `leave` and `release`.

    Args:
        member: Index of this process.
        placement: The ranks of each process, by index.

    Attributes:
        member: Index of this process.
        patience: How long a task polls for a message before it sleeps; None: polling never helps.
        links: The link to each other process, by the index of the process.
        home: For each rank of another process that can be reached, the index of that process.
        state: Why nothing can be sent or received now, as text; None while the transport is open.

    Raises:
        ArgumentError: A placement without this process, or with ranks that are negative or named twice.
    """

    links: Mapping[int, LinkType]
    patience: Patience | None = None

    def __init__(self, member: int, placement: Sequence[Sequence[int]]) -> None:
        every = [rank for ranks in placement for rank in ranks]
        if not 0 <= member < len(placement) or not placement[member]:
            raise ArgumentError(f"member: expected 0 to {len(placement) - 1}, with ranks in placement, got {member}")
        if wrong := [rank for rank in every if not 0 <= rank < 2**32]:
            raise ArgumentError(f"placement: expected ranks from 0 to {2**32 - 1}, got {wrong[0]}")
        if repeated := [rank for rank, count in Counter(every).items() if count > 1]:
            raise ArgumentError(f"placement: rank {repeated[0]} is named twice or more; name each rank once")
        self.member = member
        self.placement: tuple[tuple[int, ...], ...] = tuple(tuple(ranks) for ranks in placement)
        self.ranks: tuple[int, ...] = self.placement[member]
        self.peers: tuple[int, ...] = tuple(sorted(set(every) - set(self.ranks)))
        self.state: str | None = "is not open yet: async with transport.open()"
        self.home: dict[int, int] = {rank: i for i, ranks in enumerate(placement) if i != member for rank in ranks}
        self._joined = False
        self._wires: dict[int, Wire] = {rank: self.make_wire(rank) for rank in self.ranks}

    @abstractmethod
    def make_wire(self, rank: int) -> Wire:
        """Return a new wire for a rank of this process; the constructor calls it, before the transport is open."""

    # -- life ---------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        """Join the other processes, and move messages until the block ends; see `Transport.open`.

        Raises:
            TransportError: A process did not join, was refused, or runs with other settings.
        """
        if self._joined or self.state == "has been closed":
            raise TransportClosedError(f"a transport is opened once; make another {type(self).__name__}")
        self._joined = True
        try:
            await self.join()
            self.state = None
            async with trio.open_nursery() as nursery:
                # shielded: matched messages finish and goodbyes are sent, whatever is cancelled
                background = trio.CancelScope(shield=True)
                nursery.start_soon(self._run_in_scope, background)
                try:
                    yield self
                finally:
                    await self.aclose()
                    background.cancel()
        finally:
            self.release()

    async def _run_in_scope(self, scope: trio.CancelScope) -> None:
        """Move messages until the scope is cancelled."""
        with scope:
            await self.run()

    async def join(self) -> None:
        """Connect with the other processes; a transport without connections does nothing."""

    async def run(self) -> None:
        """Move the messages of all links until cancelled."""

    def release(self) -> None:
        """Release sockets and memory. Called at the end of `open`, even if joining failed."""

    async def leave(self) -> None:
        """Finish matched messages, and send goodbyes to all other processes in parallel.

        Shielded from cancellation, because a process without a complete goodbye looks crashed to the others. The time
        is bounded, see `PeerLink.wait_until`.
        """
        for link in self.links.values():
            link.fail_unmatched()
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for link in self.links.values():
                    nursery.start_soon(link.leave)

    async def aclose(self) -> None:
        """Fail unmatched messages, finish the rest, send goodbyes. Ends at most two seconds after the last progress."""
        opened = self.state is None
        self.state = "has been closed"
        if opened:
            await self.leave()
        await cancel_shielded_checkpoint()

    # -- what it joins ------------------------------------------------------------------------------------------------

    def restrict_to(self, members: Iterable[int]) -> None:
        """Restrict the transport to the ranks of these processes, because others cannot be reached."""
        reached = set(members)
        self.home = {rank: member for rank, member in self.home.items() if member in reached}
        self.peers = tuple(sorted(self.home))

    def make_links(self, make: Callable[[int, tuple[int, ...]], Made]) -> dict[int, Made]:
        """Return a link for every process that can be reached, by its index.

        Args:
            make: Called with the index and the ranks of a process; returns the link.
        """
        return {i: make(i, self.placement[i]) for i in sorted(set(self.home.values()))}

    def wire(self, rank: int) -> Wire:
        """Return the wire of a local rank.

        Raises:
            ArgumentError: The rank does not live here.
        """
        if rank not in self._wires:
            raise ArgumentError(f"there is no rank {rank} here; this process has {describe_ranks(self.ranks)}")
        return self._wires[rank]

    def link(self, lane: Lane, peer: int) -> LinkType:
        """Return the link to the process of a rank, after checking the rank, the tag and the state.

        Args:
            lane: (src, dst, tag) of the message.
            peer: The rank in the other process: `src` or `dst`.

        Raises:
            ArgumentError: The rank is not reached, or the tag is out of range.
            TransportClosedError: The transport is not open.
        """
        home = self.home.get(peer)
        if home is None or self.state is not None or not 0 <= lane[2] < TAG_LIMIT:
            raise self.unreachable_error(lane, peer)
        return self.links[home]

    def unreachable_error(self, lane: Lane, peer: int) -> TransportError:
        """Return the error of a message that cannot be sent: the peer is not reached, or the transport is not open.

        Arguments are as of `link`.

        Raises:
            ArgumentError: The tag is out of range.
        """
        src, dst, tag = lane
        check_tag(tag)
        if peer not in self.home:
            reason = f"process {self.member} has no connection to rank {peer}"
            return ArgumentError(f"{reason}; it reaches {describe_ranks(self.peers)}")
        return TransportClosedError(f"the transport {self.state}", src=src, dst=dst, tag=tag)


TransportType = TypeVar("TransportType", bound="LinkedTransport[Any]")


class LinkedWire(Wire, Generic[TransportType]):
    """The wire of one rank of a transport with links.

    Args:
        transport: Transport of the process.
        rank: The rank.
    """

    def __init__(self, transport: TransportType, rank: int) -> None:
        self.rank = rank
        self._transport = transport

    @property
    def polling_patience(self) -> Patience | None:
        """How long a task polls with `catch_up` before it sleeps; None: polling never helps."""
        return self._transport.patience

    def check(self, peer: int, tag: int = 0) -> None:
        """Raise the error that a message with the peer would raise at the call, if any; see `Wire.check`."""
        self._transport.link((self.rank, peer, tag), peer)


class MatchedLink(PeerLink):
    """The connection to one other process. Its matching engine decides which messages leave next.

    Args:
        member: Index of the other process.
        ranks: Ranks of the other process.
        local: Ranks of this process.
        limits: The limits that both processes have agreed on.
        memory: Pool of buffers for messages that are received on loan.

    Attributes:
        engine: The state of the messages between the two processes.
        memory: The pool of the arguments.
    """

    def __init__(
        self, member: int, ranks: Sequence[int], local: Sequence[int], limits: Limits, memory: BounceBuffers
    ) -> None:
        super().__init__(member, ranks)
        self.memory = memory
        self.engine: Engine = Engine(self.name, ranks, local, limits, memory)

    @abstractmethod
    def flush(self) -> None:
        """Transmit due messages of the engine until the system takes no more; a task transmits the rest."""

    def queue_send(self, send: Send) -> None:
        """Queue a message, and transmit due messages, as far as that needs no waiting."""
        self.engine.outgoing.queue_announcement(send)
        self.flush()

    def send_now(self, lane: Lane, view: memoryview, signature: Signature | None = None) -> bool:
        """Send a small message whole, at once; return False if that is impossible now, as this default does.

        Args:
            lane: Source, destination and tag.
            view: Bytes of the message, which may change after the call.
            signature: What the message is; None: anything.
        """
        return False

    def look(self) -> None:
        """Pass arrived messages to the engine, on a link that has no task for that; this default does nothing."""

    def catch_up(self) -> bool:
        """Send and receive what is possible without waiting; return whether any bytes moved.

        A task of this process calls it before it sleeps. This default returns False.
        """
        return False

    def withdraw(self, end: Send | Receive) -> None:
        """Cancel a send or receive that has not matched; its callback is called all the same, at once or later."""
        if not end.ended:
            self.engine.withdraw(end)
            self.flush()

    def fail_unmatched(self) -> None:
        """Fail every unmatched send and receive, because this process leaves."""
        self.engine.close()
        self.flush()


class MatchedTransport(LinkedTransport[MatchedLink]):
    """A transport with a matching engine for every other process.

    Args:
        member: Index of this process.
        placement: The ranks of each process, by index.

    Attributes:
        memory: Buffers of messages on loan.
        at_once_bytes: Longer messages never leave at once, see `MatchedLink.send_now`.
    """

    at_once_bytes: int = sys.maxsize

    def __init__(self, member: int, placement: Sequence[Sequence[int]]) -> None:
        super().__init__(member, placement)
        self.memory: BounceBuffers = BounceBuffers()

    def make_wire(self, rank: int) -> Wire:
        """Return the wire of a rank."""
        return _MatchedWire(self, rank)


class _MatchedWire(LinkedWire[MatchedTransport]):
    """The wire of one rank."""

    def begin_send(
        self, dst: int, tag: int, data: Buffer, *, priority: int = 0, signature: Signature | None = None, done: Done
    ) -> Request | None:
        """Send at once and return None if that needs no waiting, else begin a send; see `Wire.begin_send`."""
        view, transport = as_bytes(data), self._transport
        lane = (self.rank, dst, tag)
        link = transport.link(lane, dst)
        if link.engine.gone is not None and (error := link.engine.peer_gone_error(lane)) is not None:
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
        """Match an arrived message, or queue a receive; see `Wire.begin_recv`."""
        view = None if out is None else as_bytes(out, name="out", writable=True)
        lane = (src, self.rank, tag)
        link = self._transport.link(lane, src)
        link.look()
        receive = Receive(lane, view, nbytes, signature)
        receive.done, receive._withdraw, receive.memory = done, link.withdraw, link.memory
        receive.consume, receive.allocate = consume, allocate
        # a match may have an answer for the sender
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
        """Return the error of a receive whose sender is lost or has left; None if its message has arrived, or may."""
        lane = (src, self.rank, tag)
        return self._transport.link(lane, src).engine.peer_gone_error(lane)

    def watch(self, notify: Callable[[], None]) -> AbstractContextManager[None]:
        """Call a function, for the length of a block, whenever a message arrives or a link ends."""
        return add_to_watchers([link.engine.incoming.watchers for link in self._transport.links.values()], notify)
