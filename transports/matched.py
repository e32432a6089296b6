"""The asynchronous shell around matching engines: what a transport needs beside a way to move bytes between processes.

A transport derives from `MatchedTransport`, makes a `Link` for every other process, and moves what the link's engine
says; endpoints, order, cancellation, credits and lengths are done here and in `transports.matching`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import trio
from trio.lowlevel import cancel_shielded_checkpoint, checkpoint_if_cancelled

from transports.base import (
    TAG_LIMIT,
    Endpoint,
    Statistics,
    Transport,
    check_choices,
    check_length,
    check_tag,
    describe_ranks,
)
from transports.bounce import BounceBuffers
from transports.buffers import Buffer, Delivery, as_bytes
from transports.failures import ArgumentError, TransportClosedError, TransportError
from transports.link import Link
from transports.matching import Lane, Receive, Send
from transports.patience import Patience
from transports.started import LinkStarter, delivery_of
from transports.starting import Starter

LinkType = TypeVar("LinkType", bound=Link)


class MatchedTransport(Transport):
    """A transport whose messages are matched by an engine for every other process.

    Subclasses make ``links`` and see to opening and closing; they set ``state`` to None while calls are welcome.

    Args:
        member: Index of this process.
        placement: The ranks of each process, by index.
        joins_itself: Whether it also carries messages among the ranks of this process.

    Attributes:
        member: Index of this process.
        links: The ways to other processes, by index.
        memory: For messages that are lent.
        state: Why nothing can be sent or received; None while it can.
        patience: How long to look at links before sleeping; None where none of them would have come sooner.
        at_once_bytes: Longer messages never leave at once, see `Link.send_now`.
    """

    patience: Patience | None = None
    at_once_bytes = sys.maxsize
    links: Mapping[int, Link]

    def __init__(self, member: int, placement: Sequence[Sequence[int]], *, joins_itself: bool = False) -> None:
        every = [rank for ranks in placement for rank in ranks]
        if not 0 <= member < len(placement) or not placement[member]:
            raise ArgumentError(f"member is {member}; placement names the ranks of processes 0 to {len(placement) - 1}")
        if len(set(every)) != len(every) or min(every) < 0 or max(every) >= 2**32:
            raise ArgumentError(f"placement is {placement!r}; name each rank once, from 0 up")
        self.member = member
        self.placement = tuple(tuple(ranks) for ranks in placement)
        self.ranks = self.placement[member]
        self.peers = tuple(sorted(every if joins_itself else set(every) - set(self.ranks)))
        self.memory = BounceBuffers()
        self.state: str | None = "is not open yet: async with transport.open()"
        self._home = {rank: i for i, ranks in enumerate(placement) if joins_itself or i != member for rank in ranks}
        self._endpoints = {rank: _MatchedEndpoint(self, rank) for rank in self.ranks}

    def reach(self, members: Iterable[int]) -> None:
        """Join the ranks of these processes only: it has turned out that others cannot be reached."""
        there = set(members)
        self._home = {rank: member for rank, member in self._home.items() if member in there}
        self.peers = tuple(sorted(self._home))

    def make_links(self, make: Callable[[int, tuple[int, ...]], LinkType]) -> dict[int, LinkType]:
        """Return a link for every process that can be reached, made from its index and its ranks."""
        return {i: make(i, self.placement[i]) for i in sorted(set(self._home.values()))}

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
        home = self._home.get(peer)
        if home is None or self.state is not None or not 0 <= lane[2] < TAG_LIMIT:
            raise self.refusal(lane, peer)
        return self.links[home]

    def refusal(self, lane: Lane, peer: int) -> TransportError:
        """Return why a message may not go to a rank, or come from there."""
        src, dst, tag = lane
        check_tag(tag)
        if peer not in self._home:
            return ArgumentError(
                f"process {self.member} has no connection to rank {peer}; it reaches {describe_ranks(self.peers)}"
            )
        return TransportClosedError(f"the transport {self.state}", src=src, dst=dst, tag=tag)


class _MatchedEndpoint(Endpoint):
    """The end of one rank."""

    def __init__(self, transport: MatchedTransport, rank: int) -> None:
        self.rank = rank
        self._transport = transport

    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        view = as_bytes(data)
        lane = (self.rank, dst, tag)
        link = self._transport.link(lane, dst)
        await checkpoint_if_cancelled()
        link.engine.check(lane)
        if link.send_now(lane, view):
            await cancel_shielded_checkpoint()
            return
        send = Send(lane, view, priority)
        link.post(send)
        await link.end_of(send)

    def try_send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> bool:
        view = as_bytes(data)
        if view.nbytes > self._transport.at_once_bytes:
            return False
        lane = (self.rank, dst, tag)
        link = self._transport.link(lane, dst)
        link.engine.check(lane)
        return link.send_now(lane, view)

    async def recv_into(self, src: int, tag: int, out: Buffer) -> None:
        view = as_bytes(out, name="out", writable=True)
        await self._receive((src, self.rank, tag), view, view.nbytes)

    async def recv(self, src: int, tag: int, nbytes: int) -> Delivery:
        check_length(nbytes)
        return delivery_of(await self._receive((src, self.rank, tag), None, nbytes), self._transport.memory)

    async def _receive(self, lane: Lane, view: memoryview | None, nbytes: int) -> Receive:
        link = self._transport.link(lane, lane[0])
        await checkpoint_if_cancelled()
        link.look()
        receive = Receive(lane, view, nbytes)
        if link.engine.receive(receive):
            link.settle()
        await link.end_of(receive)
        return receive

    def starter(self, peer: int) -> Starter:
        return LinkStarter(self._transport, self._transport.link((self.rank, peer, 0), peer), self.rank, peer)

    async def wait_any(self, choices: Sequence[tuple[int, int]]) -> int:
        check_choices(choices)
        lanes = [(src, self.rank, tag) for src, tag in choices]
        for lane in lanes:
            self._transport.link(lane, lane[0])
        await trio.lowlevel.checkpoint()
        while True:
            links = [self._transport.link(lane, lane[0]) for lane in lanes]
            for link in set(links):
                link.look()
            found = _first_announced(links, lanes)
            if found is not None:
                return found
            await _news(zip(links, lanes, strict=True))


def _first_announced(links: Sequence[Link], lanes: Sequence[Lane]) -> int | None:
    """Return which lane has a message; raise if none has and one never will have any."""
    for index, (link, lane) in enumerate(zip(links, lanes, strict=True)):
        if lane in link.engine.incoming.arrived:
            return index
    for link, lane in zip(links, lanes, strict=True):
        link.engine.check(lane)
    return None


async def _news(places: Iterable[tuple[Link, Lane]]) -> None:
    """Wait until something is announced at one of some places, or a process is gone."""
    changed = trio.Event()
    watched = list(places)
    for link, lane in watched:
        link.engine.incoming.watchers.add(lane, changed.set)
    try:
        await changed.wait()
    finally:
        for link, lane in watched:
            link.engine.incoming.watchers.remove(lane, changed.set)
