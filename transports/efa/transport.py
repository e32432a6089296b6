"""Efa: one process's end of the fabric between processes, and the endpoints of its ranks."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Self, cast

import trio
from trio.lowlevel import cancel_shielded_checkpoint, checkpoint_if_cancelled

from transports.base import (
    ArgumentError,
    Buffer,
    Delivery,
    Endpoint,
    Statistics,
    Transport,
    TransportClosedError,
    as_bytes,
    check_length,
    check_tag,
    describe_ranks,
)
from transports.efa.connection import SocketRail, StreamRail
from transports.efa.joining import Connection, Joining
from transports.efa.messages import Lane, Receive, Send
from transports.efa.peer import Peer
from transports.efa.rail import Rail
from transports.factory import Bootstrap, Exchange
from transports.rooms import Rooms
from transports.tls import Tls

__all__ = ["Efa", "factory"]

# How often each rail is asked for a sign of life, at most.
_TICK_S = 1.0
_TICKS_OF_SILENCE = 8


class Efa(Transport):
    """Joins the ranks of this process to those of other processes, over sockets.

    Messages of up to `frame.EAGER_BYTES` leave at once, and wait at the receiver if it is late (up to
    `outbound.BUDGET_BYTES` for each pair of processes). Longer ones wait for their receive, and then travel in chunks
    over all rails, from the sender's memory into the receiver's. A send of these returns when all has arrived; one that
    is cancelled asks the receiver whether that is in time, so it ends a round trip later. A rail
    that dies is survived as long as another one lives.

    Ranks of one process do not reach each other over it; see `NeuronLink` and `Router`.

    Args:
        member: Index of this process.
        placement: The ranks of each process, by index.
        secret: Proves membership to the other processes; at least one byte.
        exchange: All-gather among the processes: called with a name and bytes, returns everybody's by index.
        job: Name of the world; connections of others are refused.
        epoch: Which of the job's successive worlds.
        rails: How many connections to each other process; or the interfaces or local addresses they use, one each.
        host: Local address to listen at, if `rails` is a number.
        unix: Use Unix sockets between processes of one host, if both want that; they are twice as fast as TCP.
        peer_direct: Send from and receive into the callers' memory; otherwise stage payloads through a host buffer.
        tls: Encrypts every connection, at a fraction of the speed.
        silence_s: A process is lost when it says nothing for so long, though asked.
        join_s: How long to wait for all processes when opening.
        report: Takes a line about rails and processes that are lost, and about strangers.

    Raises:
        ArgumentError: A placement without this process, or with ranks that are negative or named twice.
    """

    def __init__(
        self,
        *,
        member: int,
        placement: Sequence[Sequence[int]],
        secret: bytes,
        exchange: Exchange,
        job: str = "",
        epoch: int = 0,
        rails: int | Sequence[str] = 1,
        host: str = "127.0.0.1",
        unix: bool = True,
        peer_direct: bool = True,
        tls: Tls | None = None,
        silence_s: float = 15.0,
        join_s: float = 60.0,
        report: Callable[[str], None] | None = None,
    ) -> None:
        every = [rank for ranks in placement for rank in ranks]
        if not 0 <= member < len(placement) or not placement[member]:
            raise ArgumentError(f"member is {member}; placement names the ranks of processes 0 to {len(placement) - 1}")
        if len(set(every)) != len(every) or min(every) < 0 or max(every) >= 2**32:
            raise ArgumentError(f"placement is {placement!r}; name each rank once, from 0 up")
        if not 0 < silence_s < math.inf:
            raise ArgumentError(f"silence_s is {silence_s}; it must be above 0, and finite")
        self.member = member
        self.ranks = tuple(placement[member])
        self.peers = tuple(sorted(set(every) - set(self.ranks)))
        self._exchange = exchange
        self._peer_direct = peer_direct
        self._tick_s = min(_TICK_S, silence_s / _TICKS_OF_SILENCE)
        self._silence_s = silence_s
        self.rooms = Rooms()
        say = report or (lambda _: None)
        self._joining = Joining(
            member=member,
            members=len(placement),
            secret=secret,
            job=job,
            epoch=epoch,
            rails=rails,
            host=host,
            unix=unix,
            tls=tls,
            silence_s=silence_s,
            join_s=join_s,
            report=say,
        )
        self._processes = {
            other: Peer(other, tuple(ranks), self.ranks, self.rooms, say)
            for other, ranks in enumerate(placement)
            if other != member
        }
        self._peer_of = {rank: self._processes[i] for i, ranks in enumerate(placement) if i != member for rank in ranks}
        self._endpoints = {rank: _EfaEndpoint(self, rank) for rank in self.ranks}
        self._opened = self._closed = False

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
        peers = self._processes.values()
        return Statistics(
            unmatched_sends=tuple(send.envelope for peer in peers for send in peer.outbound.waiting),
            unmatched_receives=tuple(receive.envelope for peer in peers for receive in peer.inbound.waiting),
        )

    def open(self) -> AbstractAsyncContextManager[Self]:
        """Connect with all other processes, and stay connected for the length of an ``async with``.

        Raises:
            TransportError: Somebody did not come, was refused, or runs with other settings. At the ``async with``.
        """
        return self._stay_open()

    @asynccontextmanager
    async def _stay_open(self) -> AsyncIterator[Self]:
        if self._opened:
            raise TransportClosedError("an Efa is opened once; make another one")
        self._opened = True
        connections = await self._joining.join(self._exchange)
        for (member, index), connection in sorted(connections.items(), key=lambda item: item[0]):
            peer = self._processes[member]
            peer.rails.append(self._rail(peer, index, connection))
        async with trio.open_nursery() as nursery:
            # shielded: what has met is finished and goodbye is said before this ends, whatever is cancelled
            background = trio.CancelScope(shield=True)
            nursery.start_soon(self._run, background)
            try:
                yield self
            finally:
                await self.aclose()
                background.cancel()

    async def _run(self, scope: trio.CancelScope) -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                for peer in self._processes.values():
                    for rail in tuple(peer.rails):
                        nursery.start_soon(rail.run)
                nursery.start_soon(self._keep_watch)

    def _rail(self, peer: Peer, index: int, connection: Connection) -> Rail:
        keep, staged = self._joining.rail_count > 1, not self._peer_direct
        kind = SocketRail if connection.encrypted is None else StreamRail
        return kind(peer, index, connection, keep=keep, staged=staged)

    async def _keep_watch(self) -> None:
        """Ask every rail for a sign of life, and give up processes that show none.

        Ticks are counted, not seconds: an event loop that stood still has not listened, so it proves nothing.
        """
        limit = math.ceil(self._silence_s / self._tick_s)
        while True:
            await trio.sleep(self._tick_s)
            for peer in self._processes.values():
                peer.tick(limit, self._silence_s)

    async def aclose(self) -> None:
        """Fail what has not met its other end, finish the rest, say goodbye. Ends two seconds after nothing moves."""
        closed, self._closed = self._closed, True
        if not closed:
            for peer in self._processes.values():
                peer.give_up_waiting()
            # shielded: it ends by itself, and who is cancelled half-way through a goodbye looks like one that crashed
            with trio.CancelScope(shield=True):
                async with trio.open_nursery() as nursery:
                    for peer in self._processes.values():
                        nursery.start_soon(peer.leave)
        await cancel_shielded_checkpoint()

    def _check(self, lane: Lane, rank: int) -> Peer:
        """Return the process of a rank, after checking that a message may go there or come from there."""
        check_tag(lane[2])
        peer = self._peer_of.get(rank)
        if peer is None:
            raise ArgumentError(
                f"process {self.member} has no connection to rank {rank}; it reaches {describe_ranks(self.peers)}"
            )
        if self._closed or not self._opened:
            src, dst, tag = lane
            state = "has been closed" if self._closed else "is not open"
            raise TransportClosedError(f"the transport {state}", src=src, dst=dst, tag=tag)
        return peer


class _EfaEndpoint(Endpoint):
    """The end of one rank; see `Efa`."""

    def __init__(self, efa: Efa, rank: int) -> None:
        self.rank = rank
        self._efa = efa

    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        view = as_bytes(data)
        lane = (self.rank, dst, tag)
        peer = self._efa._check(lane, dst)
        await checkpoint_if_cancelled()
        peer.check(lane)
        if peer.send_now(lane, view):
            await cancel_shielded_checkpoint()
            return
        send = Send(lane, view, priority, peer.withdraw)
        peer.announce(send)
        await send.wait()

    def try_send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> bool:
        view = as_bytes(data)
        lane = (self.rank, dst, tag)
        peer = self._efa._check(lane, dst)
        peer.check(lane)
        return peer.send_now(lane, view)

    async def recv_into(self, src: int, tag: int, out: Buffer) -> None:
        view = as_bytes(out, name="out", writable=True)
        await self._receive((src, self.rank, tag), view, view.nbytes)

    async def recv(self, src: int, tag: int, nbytes: int) -> Delivery:
        check_length(nbytes)
        room = await self._receive((src, self.rank, tag), None, nbytes)
        assert room is not None, "what is received without a place is lent"
        if room.readonly:  # it came with its announcement, in memory of its own
            return Delivery(room)
        return Delivery(room[:nbytes].toreadonly(), partial(self._efa.rooms.give_back, room))

    async def _receive(self, lane: Lane, view: memoryview | None, nbytes: int) -> memoryview | None:
        peer = self._efa._check(lane, lane[0])
        await checkpoint_if_cancelled()
        return await peer.receive(Receive(lane, view, nbytes, peer.inbound.forget))


def factory(bootstrap: Bootstrap) -> Efa:
    """Make the transport of a process; ``rails``, ``unix`` and ``peer_direct`` are its options.

    Raises:
        ArgumentError: An option that cannot be meant.
    """
    options = bootstrap.options
    return Efa(
        member=bootstrap.member,
        placement=bootstrap.placement,
        secret=bootstrap.secret,
        exchange=bootstrap.exchange,
        job=bootstrap.job,
        epoch=bootstrap.epoch,
        rails=cast("int | Sequence[str]", options.get("rails", 1)),
        host=bootstrap.host,
        unix=options.get("unix") is not False,
        peer_direct=options.get("peer_direct") is not False,
        tls=bootstrap.tls,
        report=bootstrap.report,
    )
