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
from transports.shared_memory.engine import EngineEvents, Way, bells
from transports.shared_memory.joining import MemoryJoining, ring_bytes
from transports.shared_memory.memory_link import GOODBYE, MemoryLink, MemoryRequest, Peer
from transports.shared_memory.segment import Heap, Segment
from transports.signature import OPEN_SIGNATURE, PlainSignature, Signature
from transports.wire import OPEN, TAG_LIMIT, Envelope, Wire

# The end of a segment, with the words that wake its process.
_LAST_BYTES = 4096
# How long to poll. It must be longer than waking a process takes (0.1 to 0.3 ms on virtual cores): otherwise one of two
# processes may always sleep while the other one polls. Measured for 8 bytes between threads of 2 processes with a core
# each, while waking is slow: 0.3 to 0.6 ms with polls of 50 us, 0.1 to 0.2 ms with 300 us. It must not be much longer,
# because a peer that needs this core waits for the end of the poll (1 MiB then takes up to 0.7 ms, not 0.2).
_LOOK_S = 150e-6
#: File that shows whether the scheduler groups processes by session (sched(7)).
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")


class SharedMemory(LinkedTransport[MemoryLink]):
    """Joins the ranks of this process to those of other processes of this host, through memory.

    A ring buffer in shared memory leads from each process to each other process. A message that arrives before its
    receive stays in the ring, or in bounded memory of the receiver. If the message is longer, or no room is left, its
    bytes stay in the sender's memory until a receive asks for them.

    The shared memory has no name, and ends with the processes that use it. A process is lost when its socket ends.
    Without the compiled engine no process can be reached.

    Processes are on one host if they reach each other's Unix sockets, and belong to one user. Before the opening,
    `peers` are the ranks of all other processes; afterwards, those of the processes of this host that share memory.

    Args:
        member: Index of this process.
        placement: The ranks of each process, by index.
        secret: Proves membership to the other processes; at least one byte.
        exchange: All-gather among the processes: called with a name and bytes, it returns the bytes of all by index.
        job: Name of the world; connections of other worlds are refused.
        epoch: Number of the world among the job's successive worlds.
        limit_bytes: Bytes of shared memory of this process; None: half of the machine's memory, divided by the number
            of processes.
        reads: Whether to read other processes' memory by a system call, if the system allows that.
        everybody: Whether the opening fails if a process cannot be reached.
        join_s: Seconds to wait for all processes at the opening.
        report: Prints a line about processes that are lost or cannot share memory.

    Attributes:
        exchange: The all-gather of the arguments.
        links: The links to the other processes of this host, by index.
        memory: Pool of buffers for messages that are received on loan.
        engine: Engine of this process; None before it has joined others, or if there are none.
        events: Delivers the engine's events on the event loop; None if there is no engine.

    Raises:
        ArgumentError: The placement lacks this process, or has ranks that are negative or named twice; the secret is
            empty; or `limit_bytes` is negative.
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
        limit_bytes: int | None = None,
        reads: bool = True,
        everybody: bool = False,
        join_s: float = 60.0,
        report: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(member, placement)
        self.engine: native.Engine | None = None
        self.events: EngineEvents | None = None
        self.memory: BounceBuffers = BounceBuffers()
        self.patience: Patience = Patience(0.0)
        if limit_bytes is not None and limit_bytes < 0:
            raise ArgumentError(f"limit_bytes is {limit_bytes}; name 0 bytes or more")
        self.exchange = exchange
        self.links: dict[int, MemoryLink] = {}
        self._report = report or (lambda _: None)
        self._everybody = everybody
        identity = Identity(job=job, epoch=epoch, member=member, members=len(placement), secret=secret)
        self._joining = MemoryJoining(identity, join_s=join_s, limit_bytes=limit_bytes, reads=reads)
        self._peers: dict[int, Peer] = {}
        self._boards: Boards | None = None

    def make_wire(self, rank: int) -> Wire:
        """Return the wire of a rank."""
        return _MemoryWire(self, rank)

    def board(self, key: int, ranks: Sequence[int]) -> Board | None:
        """Return the board of some ranks; None if one of them lives in a process that shares no memory with this one.

        Arguments are as of `Transport.board`.
        """
        homes = [self.member if rank in self.ranks else self.home.get(rank, -1) for rank in ranks]
        return None if self._boards is None or -1 in homes else self._boards.find_or_make(key, ranks, homes)

    def loan(self, nbytes: int) -> tuple[memoryview, Callable[[], None]] | None:
        """Return memory that the other processes of this host can read, and its release; None if no room is left."""
        if (boards := self._boards) is None or (start := boards.loan_pool.allocate(nbytes)) is None:
            return None
        return boards.segment.view[start : start + nbytes], partial(boards.loan_pool.release, start)

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
        self._report_unshared_memory()

    def release(self) -> None:
        """Close the engine, and the descriptors that wake processes."""
        if self.engine is not None:
            self.engine.close()
        for peer in self._peers.values():
            os.close(peer.bell)
        self._joining.close()

    def _make_engine(self, segment: Segment) -> None:
        """Make the links to the peers, and the boards, too."""
        ways: list[Way | None] = [None] * len(self.placement)  # by index of the process; None: not reached
        for i, peer in self._peers.items():
            peer_bells = bells(peer.segment.view)
            ways[i] = Way(ring_out=peer.messages_out, ring_in=peer.messages_in, bells=peer_bells, bell=peer.bell)
        pids = [peer.pid for peer in self._peers.values()]
        cores, bell = len(usable_cores()), self._joining.bell
        look_s, yields = choose_polling(pids, cores)
        # threads of each process for collectives of which every process moves bytes: an equal part of the cores
        workers = max(1, cores // (1 + len(pids)))
        # the compiled code takes no keyword arguments
        self.engine = engine = native.Engine(bells(segment.view), ways, look_s, bell, workers, yields, cores)
        self.events = EngineEvents(engine, bell, self._on_note)
        self.patience = Patience(look_s)
        # a segment: the rings, then memory for loans, then a page with the words that wake this process
        loans_start, loans_stop = ring_bytes(len(self.placement)), segment.nbytes - _LAST_BYTES
        heap = Heap(loans_start, loans_stop)
        self._boards = Boards(segment, heap, engine, look_s, self.links)
        for i, peer in sorted(self._peers.items()):
            link = MemoryLink(i, self.placement[i], self.memory, peer, engine, self.patience, self._report)
            self.links[i] = link
            link.on_loss, link.deliver_events = partial(self._handle_lost_peer, i), self.events.deliver_events

    def _on_note(self, member: int, key: int, rank: int, note: int) -> None:
        """Handle a note about the rows of a rank, see `board`, or a goodbye, if the rank is `GOODBYE`."""
        if rank == GOODBYE:
            self.links[member].on_goodbye()
        elif self._boards is not None:
            self._boards.receive_rows_note(self.links[member], key, rank, note)

    def _handle_lost_peer(self, member: int) -> None:
        """Mark the boards of a lost process as lost; notify receives from any source, so that they find the loss."""
        if self._boards is not None:
            self._boards.lose(member, str(self.links[member].gone))
        if self.events is not None:
            self.events.notify_arrival_watchers()

    def _report_unshared_memory(self) -> None:
        """Report why no memory is shared; raise `TransportError` if a process cannot be reached despite `everybody`."""
        if self._joining.unshared:
            self._report(f"process {self.member} {self._joining.unshared}")
        for other, reason in sorted(self._joining.refused.items()):
            self._report(f"process {other} of this host is reached by sockets: {reason}")
        missing = [i for i in range(len(self.placement)) if i != self.member and i not in self.links]
        if self._everybody and missing:
            members = ", ".join(map(str, missing))
            cause = "" if native.BUILT else ", for which compiled code is missing (overlap doctor)"
            reason = f"process {members} cannot be reached through the memory of this host{cause}"
            raise TransportError(f"{reason}; use sockets (efa)")

    async def run(self) -> None:
        """Run the links, and deliver events of the engine."""
        async with trio.open_nursery() as nursery:
            for link in self.links.values():
                nursery.start_soon(link.run)
            if self.events is not None:
                nursery.start_soon(self.events.run)

    def lose(self, ranks: Sequence[int], reason: str) -> None:
        """End all calls with the processes of lost ranks; see `Transport.lose`."""
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
        """Write as much of the message as fits into the ring; the engine writes the rest. See `Wire.begin_send`."""
        lane, mine, transport = (self.rank, dst, tag), signature or OPEN_SIGNATURE, self._transport
        # inlined from `as_bytes` and `link`, for a short latency
        is_flat = isinstance(data, memoryview) and data.format == "B" and data.ndim == 1 and data.c_contiguous
        view = data if isinstance(data, memoryview) and is_flat else as_bytes(data)
        home = transport.home.get(dst)
        if home is None or transport.state is not None or not 0 <= tag < TAG_LIMIT:
            raise transport.unreachable_error(lane, dst)
        link, ranks = transport.links[home], self.rank << 32 | dst
        if link.gone is not None:
            raise link.peer_gone_error(lane)
        call = MemoryRequest(link, lane, view.nbytes, done, receives=False, signature=signature)
        call.op = link.engine.send(
            link.member, tag, mine.fingerprint, mine.text, None, view.nbytes, view, ranks, priority, call
        )
        if call.op.state == native.DONE and not call.op.queued:
            link.count += 1
            return None
        return link.register_request(call)

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
        """Begin a receive in the engine; see `Wire.begin_recv`. `consume` is never called."""
        view, lane = out if isinstance(out, memoryview) else None, (src, self.rank, tag)
        if out is not None and not (view and view.format == "B" and view.ndim == 1 and not view.readonly):
            view = as_bytes(out, name="out", writable=True)
        link, mine = self._transport.link(lane, src), signature or OPEN_SIGNATURE
        # a process that has left may have sent the message before
        if link.gone is not None and not link.has_left:
            raise link.peer_gone_error(lane)
        loan = link.memory.take(nbytes) if view is None and nbytes != OPEN else None
        call = MemoryRequest(link, lane, nbytes, done, receives=True, loan=loan, signature=signature)
        call.allocate, target, ranks = allocate, view if loan is None else loan, src << 32 | self.rank
        call.op = link.engine.receive(link.member, tag, mine.fingerprint, mine.text, None, nbytes, target, ranks, call)
        return link.register_request(call)

    def takes_threads(self, peer: int) -> bool:
        """Whether a thread may begin messages with a peer: if the peer can be reached now."""
        transport = self._transport
        home = transport.home.get(peer)
        return home is not None and transport.state is None and transport.links[home].gone is None

    def promise_wait(self, peer: int) -> None:
        """Let the engine wake no event loop until the wait; see `Wire.promise_wait`."""
        if self._transport.engine is not None:
            self._transport.engine.promise()

    def catch_up(self, peer: int) -> bool:
        """Deliver events of the engine; return whether there were any."""
        # called for its errors
        self._transport.link((self.rank, peer, 0), peer)
        return self._transport.events is not None and self._transport.events.deliver_events()

    def unexpected(self, tag: int | None = None) -> list[Envelope]:
        """Return the messages for this rank that no receive has met, the oldest first."""
        engine, dst = self._transport.engine, self.rank
        found: list[Envelope] = []
        # the engine's lane has the sender in its upper 32 bits, and the receiver in its lower ones
        for ns, _, lane, sent_tag, nbytes, fingerprint, text in sorted(engine.announced(dst) if engine else ()):
            if tag in (None, sent_tag):
                call = PlainSignature(fingerprint, text)
                found.append(
                    Envelope(src=lane >> 32, dst=dst, tag=sent_tag, nbytes=nbytes, since_ns=ns, signature=call)
                )
        return found

    def lost(self, src: int, tag: int = 0) -> LinkLostError | None:
        """Return the error of a receive whose sender is lost; None if its message has arrived, or may still arrive."""
        lane = (src, self.rank, tag)
        link = self._transport.link(lane, src)
        return None if link.gone is None else link.peer_gone_error(lane)

    def watch(self, notify: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context in which `notify` is called whenever a message may have arrived, or a peer been lost."""
        events = self._transport.events
        return nullcontext() if events is None else events.watch_arrivals(notify)


def factory(bootstrap: Bootstrap, *, everybody: bool = True) -> SharedMemory:
    """Make the transport of a world on one host, with the option ``shared_memory`` (bytes of memory).

    Args:
        bootstrap: The process and its world.
        everybody: Whether the opening fails if there is a process that cannot be reached.

    Raises:
        ArgumentError: An option has an impossible value.
    """
    limit_bytes = cast("int | None", bootstrap.options.get("shared_memory"))
    return SharedMemory(**bootstrap.constructor_arguments, limit_bytes=limit_bytes, everybody=everybody)


def choose_polling(others: Sequence[int], cores: int) -> tuple[float, bool]:
    """Return how many seconds a thread polls before it sleeps, and whether it yields its core while it polls.

    It yields the core if there are fewer cores than processes. If Linux makes each session a scheduling group, a yield
    lets only processes of the same session run. So with too few cores, and a process in another session, threads do not
    poll at all (0.0).

    Args:
        others: Ids of the processes that share memory with this one.
        cores: Number of cores that this process may use.
    """
    if len(others) < cores:
        return _LOOK_S, False
    grouped = AUTOGROUP.exists() and AUTOGROUP.read_text(encoding="ascii").strip() == "1"
    reached = not grouped or all(_find_session(other) == os.getsid(0) for other in others)
    return (_LOOK_S if reached else 0.0), True


def _find_session(pid: int) -> int | None:
    """Return None if the process is gone."""
    try:
        return os.getsid(pid)
    except OSError:  # the process is gone
        return None
