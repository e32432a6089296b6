"""The asynchronous shell around matching engines: what a transport needs beside a way to move bytes between processes.

A transport derives from `MatchedTransport`, makes a `Link` for every other process, and moves what the link's engine
says; endpoints, order, cancellation, credits and lengths are done here and in `transports.matching`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

import trio
from trio.lowlevel import (
    Abort,
    RaiseCancelT,
    cancel_shielded_checkpoint,
    checkpoint_if_cancelled,
    current_task,
    reschedule,
    wait_task_rescheduled,
)

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
from transports.matching import Engine, Lane, Limits, Receive, Send
from transports.patience import Patience
from transports.starting import Call, Starter

__all__ = ["Link", "MatchedTransport", "take_leave"]


class Link(ABC):
    """The way to one other process.

    Args:
        member: Its index.
        ranks: Its ranks.
        local: The ranks of this process.
        limits: What both have agreed on.
        memory: For messages that are lent.

    Attributes:
        engine: What is known of the messages between the two.
        name: Of the other process, for people.
        memory: For messages that are lent.
    """

    def __init__(
        self, member: int, ranks: Sequence[int], local: Sequence[int], limits: Limits, memory: BounceBuffers
    ) -> None:
        self.member = member
        self.name = f"process {member} ({describe_ranks(tuple(ranks))})"
        self.memory = memory
        self.engine = Engine(self.name, ranks, local, limits, memory)

    @abstractmethod
    def settle(self) -> None:
        """Transmit what the engine has to say, as far as that needs no waiting, and see to it that the rest follows."""

    def post(self, send: Send) -> None:
        """Send a message when its turn comes, which may be now."""
        self.engine.outgoing.announce(send)
        self.settle()

    def send_now(self, lane: Lane, view: memoryview) -> bool:
        """Send a small message whole, before all that waits; False if that cannot be, and nothing has happened."""
        return False

    def look(self) -> None:  # noqa: B027 - most have nothing to do
        """Take in what has come, where nothing else does that in time; called before a wait."""

    def catch_up(self) -> bool:
        """Move what can be, though a task would do so soon, and say if anything was: who may sleep calls this."""
        return False

    def take_back(self, end: Send | Receive) -> None:
        """Withdraw a call, if it has not ended; its end is told all the same, at once or later."""
        if not end.ended:
            self.engine.withdraw(end)
            self.settle()

    async def end_of(self, end: Send | Receive) -> None:
        """Wait until a call ends, and raise what it ended with."""
        raise_cancel: RaiseCancelT | None = None

        def cancelled(raise_it: RaiseCancelT) -> Abort:
            nonlocal raise_cancel
            end.wake = None  # taken back at once, it ends right here
            if self.engine.withdraw(end):
                return Abort.SUCCEEDED
            end.wake, raise_cancel = woken, raise_it
            self.settle()
            return Abort.FAILED

        def woken(_: Send | Receive) -> None:
            reschedule(task)

        if end.ended:
            await cancel_shielded_checkpoint()
        else:
            task = current_task()
            end.wake = woken
            await wait_task_rescheduled(cancelled)
        if end.withdrawn:
            assert raise_cancel is not None, "only what is cancelled is withdrawn"
            raise_cancel()
        if end.error is not None:
            raise end.error


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

    def way(self, peer: int) -> Link:
        """Return the way to a rank that is there, which is asked again and again."""
        return self.links[self._home[peer]] if self.state is None else self.link((self.ranks[0], peer, 0), peer)

    def link(self, lane: Lane, peer: int) -> Link:
        """Return the way to a rank, after checking that a message may go there or come from there."""
        home = self._home.get(peer)
        if home is None or self.state is not None or not 0 <= lane[2] < TAG_LIMIT:
            raise self._refusal(lane, peer)
        return self.links[home]

    def _refusal(self, lane: Lane, peer: int) -> TransportError:
        """Return why a message may not go to a rank, or come from there."""
        src, dst, tag = lane
        check_tag(tag)
        if peer not in self._home:
            return ArgumentError(
                f"process {self.member} has no connection to rank {peer}; it reaches {describe_ranks(self.peers)}"
            )
        return TransportClosedError(f"the transport {self.state}", src=src, dst=dst, tag=tag)


class Leaving(Protocol):
    """A link that says goodbye."""

    def give_up_waiting(self) -> None:
        """Fail what has not met its other end."""

    async def leave(self) -> None:
        """Finish the rest, and say goodbye; ends by itself."""


async def take_leave(links: Collection[Leaving]) -> None:
    """Leave other processes, of all of them at once.

    Shielded: it ends by itself, and who is cancelled half-way through a goodbye looks like one that crashed.
    """
    for link in links:
        link.give_up_waiting()
    with trio.CancelScope(shield=True):
        async with trio.open_nursery() as nursery:
            for link in links:
                nursery.start_soon(link.leave)


class _StartedSend(Send, Call):
    """One that was started by a plain function."""

    link: Link

    def withdraw(self) -> None:
        self.link.take_back(self)

    def delivery(self) -> Delivery:
        raise AssertionError("only what was received is delivered")


class _StartedReceive(Receive, Call):
    """One that was started by a plain function."""

    link: Link

    def withdraw(self) -> None:
        self.link.take_back(self)

    def delivery(self) -> Delivery:
        return _delivery(self, self.link.memory)


def _delivery(receive: Receive, memory: BounceBuffers) -> Delivery:
    lent = receive.lent
    assert lent is not None, "what is received without a place is lent"
    if lent.readonly:  # it came with its announcement, in memory of its own
        return Delivery(lent)
    return Delivery(lent[: receive.nbytes].toreadonly(), partial(memory.give_back, lent))


class _MatchedEndpoint(Endpoint, Starter):
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
        return _delivery(await self._receive((src, self.rank, tag), None, nbytes), self._transport.memory)

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
        return self

    def begin_send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0, done: Callable[[Call], None]) -> Call:
        view = as_bytes(data)
        lane = (self.rank, dst, tag)
        link = self._transport.link(lane, dst)
        link.engine.check(lane)
        send = _StartedSend(lane, view, priority)
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
        view = None if out is None else as_bytes(out, name="out", writable=True)
        lane = (src, self.rank, tag)
        link = self._transport.link(lane, src)
        link.look()
        receive = _StartedReceive(lane, view, nbytes)
        receive.link, receive.wake, receive.consume = link, done, consume
        if link.engine.receive(receive):
            link.settle()
        return receive

    @property
    def patience(self) -> Patience | None:
        return self._transport.patience

    def catch_up(self, peer: int) -> bool:
        return self._transport.way(peer).catch_up()

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
