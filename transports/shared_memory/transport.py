"""SharedMemory: the transport between processes of one host."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import trio

from transports.buffers import BounceBuffers, Buffer, as_bytes
from transports.factory import Bootstrap, Exchange
from transports.failures import ArgumentError, LinkLostError, TransportError
from transports.identity import Identity
from transports.matched import LinkedTransport, LinkedWire
from transports.patience import Patience, usable_cores
from transports.request import Done, Request
from transports.shared_memory import engine as native
from transports.shared_memory.board import Board, Boards
from transports.shared_memory.engine import EngineEvents, bells
from transports.shared_memory.joining import MemoryJoining, ring_bytes
from transports.shared_memory.memory_link import GOODBYE, MemoryLink, MemoryRequest, Peer
from transports.shared_memory.segment import Heap, Segment
from transports.signature import OPEN_SIGNATURE, PlainSignature, Signature
from transports.wire import OPEN, TAG_LIMIT, Envelope, Wire

# The end of a segment, with the words that wake its process.
_LAST_BYTES = 4096
# Polling takes longer than waking a process (0.1 to 0.3 ms on virtual cores): otherwise two processes, one of which
# sleeps whenever the other one polls, never find each other awake. Measured on 2 processes with a core each, 8 bytes
# from threads, in hours in which waking is slow: 0.3 to 0.6 ms with 50 us, 0.1 to 0.2 with 300. It is no longer than
# that, for a peer that waits for this very core is let on only afterwards (1 MiB now and then 0.7 instead of 0.2 ms).
_LOOK_S = 150e-6
#: File that shows whether the scheduler groups processes by session (sched(7)).
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")


class SharedMemory(LinkedTransport[MemoryLink]):
    """Joins the ranks of this process to those of other processes of this host, through memory.

    A ring of memory leads from each process to each other. Messages that arrive before their receive are kept there, or
    by the receiver, in bounded memory; the bytes of longer ones, and of messages without room, are sent when a receive
    asks for them.
    Memory has no name and cannot outlive the processes that use it; the loss of a process shows as the end of its
    socket. Without the compiled engine no process can be reached.

    Processes are on one host if they reach each other's Unix sockets, and belong to one user. `peers` are the ranks of
    all other processes before the opening, and afterwards of the processes of this host that share memory.

    Args:
        member: Index of this process.
        placement: The ranks of each process, by index.
        secret: Proves membership to the other processes; at least one byte.
        exchange: All-gather among the processes: called with a name and bytes, returns the bytes of all by index.
        job: Name of the world; connections of other worlds are refused.
        epoch: Number of the world among the job's successive worlds.
        limit_bytes: Bytes of shared memory of this process; by default its part of half of the machine's memory.
        reads: Whether to read other processes' memory directly, if the system allows it.
        everybody: Whether to fail if a process cannot be reached.
        join_s: How long to wait for all processes at the opening.
        report: Prints a line about processes that are lost or cannot share memory.

    Attributes:
        exchange: The all-gather of the arguments.
        links: The links to the other processes of this host, by index.
        memory: Buffers of messages on loan.
        engine: Engine of this process; None before it has joined others.
        events: Deliverer of the engine's events on the event loop.

    Raises:
        ArgumentError: A placement without this process, or with ranks that are negative or named twice; no secret, or
            less than no memory.
    """

    engine: native.Engine | None
    events: EngineEvents | None
    patience: Patience

    def __init__(
        self,
        *,
        member: int,
        placement: Sequence[Sequence[int]],
        secret: bytes,
        exchange: Exchange,
        job: str = "",
        epoch: int = 0,
        limit_bytes: int | None = None,
        reads: bool = True,
        everybody: bool = False,
        join_s: float = 60.0,
        report: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(member, placement)
        self.engine = self.events = None
        self.memory: BounceBuffers = BounceBuffers()
        self.patience = Patience(0.0)
        if limit_bytes is not None and limit_bytes < 0:
            raise ArgumentError(f"limit_bytes is {limit_bytes}; name 0 bytes or more")
        self.exchange = exchange
        self.links: dict[int, MemoryLink] = {}
        self._report = report or (lambda _: None)
        self._everybody = everybody
        self._member_of = {rank: member for member, placed in enumerate(placement) for rank in placed}
        identity = Identity(job=job, epoch=epoch, member=member, members=len(placement), secret=secret)
        self._joining = MemoryJoining(identity, join_s=join_s, limit_bytes=limit_bytes, reads=reads)
        self._peers: dict[int, Peer] = {}
        self._boards: Boards | None = None

    def make_wire(self, rank: int) -> Wire:
        """Return the wire of a rank."""
        return _MemoryWire(self, rank)

    def board(self, key: int, ranks: Sequence[int]) -> Board | None:
        """Return the board of some ranks, if all live here or in processes that share memory with this one."""
        members = [self._member_of.get(rank, -1) for rank in ranks]
        boards = self._boards
        if boards is None or not all(member == self.member or member in self.links for member in members):
            return None
        return boards.make(key, ranks, members, self.links)

    def loan(self, nbytes: int) -> tuple[memoryview, Callable[[], None]] | None:
        """Return memory that the other processes of this host map, and its release; None: there is no room."""
        boards = self._boards
        start = None if boards is None else boards.shelf.take(nbytes)
        if boards is None or start is None:
            return None
        return boards.segment.view[start : start + nbytes], partial(boards.shelf.release, start)

    async def join(self) -> None:
        """Connect with the other processes of this host.

        Raises:
            TransportError: A process did not join, or cannot be reached although `everybody` is set.
        """
        self._peers = await self._joining.join(self.exchange)
        segment = self._joining.segment
        if segment is not None and self._peers:
            self._make_engine(segment)
        self.restrict_to(self.links)
        self._report_refused()

    def release(self) -> None:
        """Close the engine, and the descriptors that wake processes."""
        if self.engine is not None:
            self.engine.close()
        for peer in self._peers.values():
            os.close(peer.bell)
        self._joining.close()

    def _make_engine(self, segment: Segment) -> None:
        """Make the engine of this process, and its users: links and boards."""
        ways: list[tuple[memoryview, memoryview, memoryview, int] | None] = [None] * len(self.placement)
        for i, peer in self._peers.items():
            ways[i] = peer.messages_out, peer.messages_in, bells(peer.segment.view), peer.bell
        pids = [peer.pid for peer in self._peers.values()]
        look_s, yields = polling_rule(pids, len(usable_cores()))
        workers, bell = max(1, len(usable_cores()) // (1 + len(pids))), self._joining.bell
        self.engine = engine = native.Engine(bells(segment.view), ways, look_s, bell, workers, yields)
        self.events = EngineEvents(engine, bell, self._on_note)
        self.patience = Patience(look_s)
        heap = Heap(ring_bytes(len(self.placement)), segment.nbytes - _LAST_BYTES)
        self._boards = Boards(segment, heap, engine, look_s)
        for i, peer in sorted(self._peers.items()):
            link = MemoryLink(i, self.placement[i], self.memory, peer, engine, self.patience, self._report)
            self.links[i] = link
            link.on_loss, link.deliver_events = partial(self._handle_lost_peer, i), self.events.deliver_events

    def _on_note(self, member: int, first: int, second: int, third: int) -> None:
        """Handle a note, three numbers: its second is `GOODBYE` at the end of a process; all others are for boards."""
        if second == GOODBYE:
            self.links[member].on_goodbye()
        elif self._boards is not None:
            self._boards.receive_note(self.links[member], first, second, third)

    def _handle_lost_peer(self, member: int) -> None:
        """Mark the boards of a lost process, and let receives from any source search again."""
        if self._boards is not None:
            self._boards.lose(member, str(self.links[member].gone))
        if self.events is not None:
            self.events.call_probes()

    def _report_refused(self) -> None:
        """Report why memory is not shared; `TransportError` if a process has to be reached and cannot be."""
        if self._joining.unshared:
            self._report(f"process {self.member} {self._joining.unshared}")
        for other, reason in sorted(self._joining.refused.items()):
            self._report(f"process {other} of this host is reached by sockets: {reason}")
        missing = [i for i in range(len(self.placement)) if i != self.member and i not in self.links]
        if self._everybody and missing:
            members = ", ".join(map(str, missing))
            cause = "" if native.BUILT else ", for which compiled code is missing (overlap doctor)"
            raise TransportError(
                f"process {members} cannot be reached through the memory of this host{cause}; use sockets (efa)"
            )

    async def run(self) -> None:
        """Run the links, and deliver events of the engine."""
        async with trio.open_nursery() as nursery:
            for link in self.links.values():
                nursery.start_soon(link.run)
            if self.events is not None:
                nursery.start_soon(self.events.run)

    def lose(self, ranks: Sequence[int], reason: str) -> None:
        """Give up ranks of other processes that are known to be lost."""
        for member, placed in enumerate(self.placement):
            if not set(ranks).isdisjoint(placed):
                self._joining.meeting.lose(member, reason)
                if member in self.links:
                    self.links[member].give_up(reason)


class _MemoryWire(LinkedWire[SharedMemory]):
    """The wire of one rank."""

    within_host = True

    def begin_send(
        self, dst: int, tag: int, data: Buffer, *, priority: int = 0, signature: Signature | None = None, done: Done
    ) -> Request | None:
        """Write the message into the ring up to its room; the engine writes the rest."""
        lane, mine, transport = (self.rank, dst, tag), signature or OPEN_SIGNATURE, self._transport
        # inlined from `as_bytes` and `link`, for a short latency
        is_flat = isinstance(data, memoryview) and data.format == "B" and data.ndim == 1 and data.c_contiguous
        view = data if isinstance(data, memoryview) and is_flat else as_bytes(data)
        home = transport.home.get(dst)
        if home is None or transport.state is not None or not 0 <= tag < TAG_LIMIT:
            raise transport.unreachable_error(lane, dst)
        link, ranks = transport.links[home], self.rank << 32 | dst
        if link.gone is not None:
            raise link.loss_error(lane)
        call = MemoryRequest(link, lane, view.nbytes, done, receives=False, signature=signature)
        call.op = link.engine.send(
            link.member, tag, mine.fingerprint, mine.text, None, view.nbytes, view, ranks, priority, call
        )
        if call.op.state == native.DONE and not call.op.queued:
            link.count += 1
            return None
        return link.register(call)

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
        view, lane = out if isinstance(out, memoryview) else None, (src, self.rank, tag)
        if out is not None and not (view and view.format == "B" and view.ndim == 1 and not view.readonly):
            view = as_bytes(out, name="out", writable=True)
        link, mine = self._transport.link(lane, src), signature or OPEN_SIGNATURE
        if link.gone is not None and not link.has_left:
            raise link.loss_error(lane)
        loan = link.memory.take(nbytes) if view is None and nbytes != OPEN else None
        call = MemoryRequest(link, lane, nbytes, done, receives=True, loan=loan, signature=signature)
        call.allocate, target, ranks = allocate, view if loan is None else loan, src << 32 | self.rank
        call.op = link.engine.receive(link.member, tag, mine.fingerprint, mine.text, None, nbytes, target, ranks, call)
        return link.register(call)

    def takes_threads(self, peer: int) -> bool:
        """Whether a thread that runs in place of the event loop may begin messages with a peer."""
        transport = self._transport
        home = transport.home.get(peer)
        return home is not None and transport.state is None and transport.links[home].gone is None

    def promise_wait(self, peer: int) -> None:
        """Let other processes wake no event loop here meanwhile."""
        if self._transport.engine is not None:
            self._transport.engine.promise()

    def catch_up(self, peer: int) -> bool:
        """Deliver events of the engine; return whether there were any."""
        self._transport.link((self.rank, peer, 0), peer)
        return self._transport.events is not None and self._transport.events.deliver_events()

    def unexpected(self, tag: int | None = None) -> list[Envelope]:
        """Return the messages for this rank that no receive has met, the oldest first."""
        engine, dst = self._transport.engine, self.rank
        found: list[Envelope] = []
        for ns, _, lane, of, nbytes, number, text in sorted(engine.announced(dst) if engine else ()):
            if tag in (None, of):
                signature = PlainSignature(number, text)
                found.append(Envelope(src=lane >> 32, dst=dst, tag=of, nbytes=nbytes, since_ns=ns, signature=signature))
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


def factory(bootstrap: Bootstrap, *, everybody: bool = True) -> SharedMemory:
    """Make the transport of a world on one host, with the option ``shared_memory`` (bytes of memory).

    Args:
        bootstrap: The process and its world.
        everybody: Whether to fail if there is a process that cannot be reached.

    Raises:
        ArgumentError: An option has an impossible value.
    """
    return SharedMemory(
        **bootstrap.between_processes,
        limit_bytes=cast("int | None", bootstrap.options.get("shared_memory")),
        everybody=everybody,
    )


def polling_rule(others: Sequence[int], cores: int) -> tuple[float, bool]:
    """Return the seconds of polling before a thread sleeps, and whether it yields its core while it polls.

    The core is yielded if there are fewer cores than processes. Where Linux makes each session a scheduling group, a
    process can only yield to processes of its own session.

    Args:
        others: Ids of the processes that share memory with this one.
        cores: Number of cores that this process may use.
    """
    if len(others) < cores:
        return _LOOK_S, False
    grouped = AUTOGROUP.exists() and AUTOGROUP.read_text(encoding="ascii").strip() == "1"
    reached = not grouped or all(_session_id(other) == os.getsid(0) for other in others)
    return (_LOOK_S if reached else 0.0), True


def _session_id(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # the process is gone
        return None
