"""Transports between processes, as an asynchronous shell around matching engines.

A transport derives from `MatchedTransport`, makes a `Link` for every other process, and moves what the link's engine
says; endpoints, order, cancellation, credits and lengths are done here and in `transports.matching`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Self, TypeVar

import trio
from trio.lowlevel import cancel_shielded_checkpoint

from transports.base import (
    TAG_LIMIT,
    Endpoint,
    Envelope,
    Statistics,
    Transport,
    check_choices,
    check_tag,
    describe_ranks,
)
from transports.blocking import StartingEndpoint
from transports.buffers import BounceBuffers, Buffer, Delivery, as_bytes
from transports.common import Waits
from transports.failures import ArgumentError, TransportClosedError, TransportError
from transports.matching import Engine, Lane, Limits, Receive, Send, any_of
from transports.patience import Patience
from transports.starter import Call, Starter

# Longest wait of a goodbye for the next sign of progress: longer than a busy machine keeps a process from running,
# shorter than a user's patience with a program that ends.
_PATIENCE_S = 2.0


class Link(ABC):
    """The connection to one other process, which moves the messages that its matching engine names.

    Args:
        member: Index of the other process.
        ranks: Ranks of the other process.
        local: Ranks of this process.
        limits: The limits that both processes have agreed on.
        memory: Buffers for received messages that are lent to the caller.

    Attributes:
        engine: The state of the messages between the two processes.
        name: Name of the other process in error messages.
        memory: As given.
        progress: Less `traffic` than this within two seconds is no progress.
    """

    progress = 1

    def __init__(
        self, member: int, ranks: Sequence[int], local: Sequence[int], limits: Limits, memory: BounceBuffers
    ) -> None:
        self.member = member
        self.name: str = f"process {member} ({describe_ranks(tuple(ranks))})"
        self.memory = memory
        self.engine: Engine = Engine(self.name, ranks, local, limits, memory)
        self._changed: trio.Event | None = None

    @abstractmethod
    def settle(self) -> None:
        """Transmit the messages of the engine as far as that needs no waiting, and let a task transmit the rest."""

    def post(self, send: Send) -> None:
        """Queue a message, and transmit it now if its turn has come."""
        self.engine.outgoing.announce(send)
        self.settle()

    def send_now(self, lane: Lane, view: memoryview) -> bool:
        """Send a small message whole, before all others; return False, with nothing done, if that is impossible."""
        return False

    def look(self) -> None:  # noqa: B027 - most links have nothing to do
        """Receive messages that have come, on a link without a task for that; called before a wait."""

    def catch_up(self) -> bool:
        """Move the bytes that are ready, for a task that is about to sleep; return whether any were."""
        return False

    @property
    def takes_threads(self) -> bool:
        """Whether a thread that has the event loop's place may begin messages and catch up."""
        return False

    @property
    def news(self) -> bool:
        """Whether `catch_up` has something to do, where that is known; any thread may ask."""
        return False

    def take_back(self, end: Send | Receive) -> None:
        """Withdraw a call that has not ended; its callback is called all the same, at once or later."""
        if not end.ended:
            self.engine.withdraw(end)
            self.settle()

    # -- leaving ------------------------------------------------------------------------------------------------------

    def give_up_waiting(self) -> None:
        """Fail every send and receive that has not met its other end, because this process leaves."""
        self.engine.close()
        self.settle()

    async def leave(self) -> None:  # noqa: B027 - a link without a connection says no goodbye
        """Finish the messages that both processes have begun, and say goodbye; ends by itself."""

    def traffic(self) -> Mapping[Hashable, int]:
        """Return the number of bytes moved on each connection, or another measure of progress; see `until`."""
        return {}

    def note_change(self) -> None:
        """Let `until` check its condition again."""
        if self._changed is not None:
            self._changed.set()

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait for a condition as long as the link makes progress."""
        seen: dict[Hashable, int] = {}
        while not done() and self._progresses(seen):
            with trio.move_on_after(_PATIENCE_S):
                while not done():
                    self._changed = trio.Event()
                    await self._changed.wait()
        self._changed = None

    def _progresses(self, seen: dict[Hashable, int]) -> bool:
        """Return whether any connection has made progress since the last call, or is new."""
        moved = self.traffic()
        progress = [count - seen.get(connection, -self.progress) for connection, count in moved.items()]
        seen.update(moved)
        return max(progress, default=0) >= self.progress


LinkType = TypeVar("LinkType", bound=Link)


class MatchedTransport(Transport):
    """A transport whose messages are matched by an engine for every other process.

    Subclasses make ``links``, and say how to `join` the others, `run`, `leave` and `release`.

    Args:
        member: Index of this process.
        placement: The ranks of each process, by index.
        joins_itself: Whether it also carries messages among the ranks of this process.

    Attributes:
        member: Index of this process.
        links: The ways to other processes, by index.
        home: The index of the process of each rank that can be reached.
        memory: For messages that are lent.
        state: Why nothing can be sent or received; None while it can.
        waiting: How this process waits for its neighbours on the host; None where nothing wakes a thread.
        patience: How long to look at links before sleeping; None where none of them would have come sooner.
        at_once_bytes: Longer messages never leave at once, see `Link.send_now`.
    """

    waiting: Waits | None = None
    patience: Patience | None = None
    at_once_bytes: int = sys.maxsize
    links: Mapping[int, Link]

    def __init__(self, member: int, placement: Sequence[Sequence[int]], *, joins_itself: bool = False) -> None:
        every = [rank for ranks in placement for rank in ranks]
        if not 0 <= member < len(placement) or not placement[member]:
            raise ArgumentError(f"member is {member}; placement names the ranks of processes 0 to {len(placement) - 1}")
        if len(set(every)) != len(every) or min(every) < 0 or max(every) >= 2**32:
            raise ArgumentError(f"placement is {placement!r}; name each rank once, from 0 up")
        self.member = member
        self.placement: tuple[tuple[int, ...], ...] = tuple(tuple(ranks) for ranks in placement)
        self.ranks: tuple[int, ...] = self.placement[member]
        self.peers: tuple[int, ...] = tuple(sorted(every if joins_itself else set(every) - set(self.ranks)))
        self.memory: BounceBuffers = BounceBuffers()
        self.state: str | None = "is not open yet: async with transport.open()"
        self.home: dict[int, int] = {
            rank: i for i, ranks in enumerate(placement) if joins_itself or i != member for rank in ranks
        }
        self._joined = False
        self._endpoints = {rank: _MatchedEndpoint(self, rank) for rank in self.ranks}

    # -- life ---------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Self]:
        """Join the others, and move messages until the block ends; see `Transport.open`.

        Raises:
            TransportError: A process did not come, was refused, or runs with other settings.
        """
        if self._joined or self.state == "has been closed":
            raise TransportClosedError(f"a transport is opened once; make another {type(self).__name__}")
        self._joined = True
        try:
            await self.join()
            self.state = None
            async with trio.open_nursery() as nursery:
                # shielded: what has met is finished and goodbye is said before this ends, whatever is cancelled
                background = trio.CancelScope(shield=True)
                nursery.start_soon(self._move, background)
                try:
                    yield self
                finally:
                    await self.aclose()
                    background.cancel()
        finally:
            self.release()

    async def _move(self, scope: trio.CancelScope) -> None:
        with scope:
            await self.run()

    async def join(self) -> None:
        """Connect with the other processes."""

    async def run(self) -> None:
        """Move what links have to say, until cancelled."""

    def release(self) -> None:
        """Give back what is left, open or not."""

    async def leave(self) -> None:
        """Finish what has met its other end, and say goodbye to all other processes at once.

        Shielded: it ends by itself, and a process that is cancelled within a goodbye looks like one that crashed.
        """
        for link in self.links.values():
            link.give_up_waiting()
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for link in self.links.values():
                    nursery.start_soon(link.leave)

    async def aclose(self) -> None:
        """Fail what has not met its other end, finish the rest, say goodbye. Ends two seconds after nothing moves."""
        opened = self.state is None
        self.state = "has been closed"
        if opened:
            await self.leave()
        await cancel_shielded_checkpoint()

    # -- what it joins ------------------------------------------------------------------------------------------------

    def reach(self, members: Iterable[int]) -> None:
        """Join the ranks of these processes only: it has turned out that others cannot be reached."""
        there = set(members)
        self.home = {rank: member for rank, member in self.home.items() if member in there}
        self.peers = tuple(sorted(self.home))

    def make_links(self, make: Callable[[int, tuple[int, ...]], LinkType]) -> dict[int, LinkType]:
        """Return a link for every process that can be reached, made from its index and its ranks."""
        return {i: make(i, self.placement[i]) for i in sorted(set(self.home.values()))}

    def endpoint(self, rank: int) -> Endpoint:
        """Return the endpoint of a local rank.

        Raises:
            ArgumentError: The rank does not live here.
        """
        if rank not in self._endpoints:
            raise ArgumentError(f"there is no rank {rank} here; this process has {describe_ranks(self.ranks)}")
        return self._endpoints[rank]

    def statistics(self) -> Statistics:
        """Return what local ranks wait for: sends that nobody has accepted, receives that nothing has met."""
        engines = [link.engine for link in self.links.values()]
        return Statistics(
            unmatched_sends=tuple(send.envelope for engine in engines for send in engine.outgoing.waiting),
            unmatched_receives=tuple(receive.envelope for engine in engines for receive in engine.incoming.waiting),
        )

    def link(self, lane: Lane, peer: int) -> Link:
        """Return the way to a rank, after checking that a message may go there or come from there."""
        home = self.home.get(peer)
        if home is None or self.state is not None or not 0 <= lane[2] < TAG_LIMIT:
            raise self.refusal(lane, peer)
        return self.links[home]

    def refusal(self, lane: Lane, peer: int) -> TransportError:
        """Return why a message may not go to a rank, or come from there."""
        src, dst, tag = lane
        check_tag(tag)
        if peer not in self.home:
            return ArgumentError(
                f"process {self.member} has no connection to rank {peer}; it reaches {describe_ranks(self.peers)}"
            )
        return TransportClosedError(f"the transport {self.state}", src=src, dst=dst, tag=tag)


class _BegunSend(Send, Call):
    """A send under way."""

    link: Link

    def withdraw(self) -> None:
        self.link.take_back(self)


class _BegunReceive(Receive, Call):
    """A receive under way."""

    link: Link

    def withdraw(self) -> None:
        self.link.take_back(self)

    def delivery(self) -> Delivery:
        lent = self.lent
        assert lent is not None, "a receive without a place is lent memory"
        if lent.readonly:  # the message came with its announcement, in memory of its own
            return Delivery(lent)
        return Delivery(lent[: self.nbytes].toreadonly(), partial(self.link.memory.give_back, lent))


class _MatchedEndpoint(StartingEndpoint):
    """The end of one rank."""

    def __init__(self, transport: MatchedTransport, rank: int) -> None:
        self.rank = rank
        self._transport = transport

    def starter(self, peer: int) -> Starter:
        self._transport.link((self.rank, peer, 0), peer)
        return self

    def begin_send(
        self, dst: int, tag: int, data: Buffer, *, priority: int = 0, done: Callable[[Call], None]
    ) -> Call | None:
        """Send at once if that needs no waiting, or begin to."""
        view, transport = as_bytes(data), self._transport
        lane = (self.rank, dst, tag)
        link = transport.link(lane, dst)
        if link.engine.gone is not None:
            link.engine.check(lane)
        if view.nbytes <= transport.at_once_bytes and link.send_now(lane, view):
            return None
        send = _BegunSend(lane, view, priority)
        send.link, send.wake = link, done
        link.post(send)
        return send

    def begin_recv(
        self,
        src: int,
        tag: int,
        out: Buffer | None,
        nbytes: int,
        *,
        done: Callable[[Call], None],
        consume: Callable[[int, memoryview], None] | None = None,
    ) -> Call:
        """Begin a receive."""
        view = None if out is None else as_bytes(out, name="out", writable=True)
        lane = (src, self.rank, tag)
        link = self._transport.link(lane, src)
        link.look()
        receive = _BegunReceive(lane, view, nbytes)
        receive.link, receive.wake, receive.consume = link, done, consume
        if link.engine.receive(receive):
            link.settle()
        return receive

    @property
    def patience(self) -> Patience | None:
        """Whether, and for how long, to catch up repeatedly before sleeping."""
        return self._transport.patience

    @property
    def waiting(self) -> Waits | None:
        """The way to wait for the other processes of the host."""
        return self._transport.waiting

    def takes_threads(self, peer: int) -> bool:
        """Whether a thread that has the event loop's place may begin messages with a peer, and catch up."""
        transport = self._transport
        home = transport.home.get(peer)
        return home is not None and transport.state is None and transport.links[home].takes_threads

    def news(self, peer: int) -> bool:
        """Whether there is something to catch up with."""
        home = self._transport.home.get(peer)
        return home is not None and self._transport.links[home].news

    def catch_up(self, peer: int) -> bool:
        """Move the bytes from and to a peer that are ready."""
        transport = self._transport
        if transport.state is not None or peer not in transport.home:
            raise transport.refusal((self.rank, peer, 0), peer)
        return transport.links[transport.home[peer]].catch_up()

    def announced(self, choices: Sequence[tuple[int, int]], *, free_bits: int = 0) -> Envelope | None:
        check_choices(choices)
        wanted = {any_of((src, self.rank, tag), free_bits) for src, tag in choices}
        found: list[tuple[int, Envelope]] = []
        for link in dict.fromkeys(self._transport.link((src, self.rank, tag), src) for src, tag in choices):
            link.look()
            first = link.engine.incoming.first_of(wanted, free_bits)
            if first is not None:
                found.append(first)
        return min(found)[1] if found else None

    async def wait_any(self, choices: Sequence[tuple[int, int]], *, free_bits: int = 0) -> Envelope:
        check_choices(choices)
        lanes = [(src, self.rank, tag) for src, tag in choices]
        for lane in lanes:
            self._transport.link(lane, lane[0])
        await trio.lowlevel.checkpoint()
        while (found := self.announced(choices, free_bits=free_bits)) is None:
            places = [(self._transport.link(lane, lane[0]), lane) for lane in lanes]
            for link, lane in places:
                link.engine.check(lane)
            await _news(places, free_bits)
        return found


async def _news(places: Sequence[tuple[Link, Lane]], free_bits: int) -> None:
    """Wait until something is announced at one of some places, or a process is gone."""
    changed = trio.Event()
    for link, lane in places:
        link.engine.incoming.watchers.add(lane, changed.set, free_bits)
    try:
        await changed.wait()
    finally:
        for link, lane in places:
            link.engine.incoming.watchers.remove(lane, changed.set, free_bits)
