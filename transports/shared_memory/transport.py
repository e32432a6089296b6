"""SharedMemory: the transport between processes of one host."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import cast

import trio

from transports.common import Board
from transports.factory import Bootstrap, Exchange
from transports.failures import ArgumentError, TransportError
from transports.identity import Identity
from transports.matched import MatchedTransport
from transports.meeting import Meeting
from transports.patience import usable
from transports.shared_memory import engine as native
from transports.shared_memory.board import Boards
from transports.shared_memory.engine import BUILT, EngineDoor, Post, allows_mail, bells
from transports.shared_memory.joining import Joining, reserved
from transports.shared_memory.memory_link import MemoryLink, Peer
from transports.shared_memory.peer_memory import WORDS, Word
from transports.shared_memory.segment import Heap
from transports.shared_memory.waiting import NAPS, Inlet, Waiting, looking, sleepers

# The end of a segment, with the mark of a process that sleeps.
_LAST_BYTES = 4096
_WORD_AT = 64  # of the word on which threads sleep, in another cache line than the mark


class SharedMemory(MatchedTransport):
    """Joins the ranks of this process to those of other processes of this host, through memory.

    Messages of up to `memory_link.EAGER_BYTES` travel in packets, through rings of memory, and wait at the receiver if
    it is late (up to `Limits.budget_bytes` for each pair of processes). One of up to `slots.SLOT_BYTES` is copied into
    a slot of memory that both map, as long as one is empty. The sender of any other names its address, and the receiver
    reads it there in one copy, once it wants the message; where the system does not allow that, the message goes
    through those slots piece by piece. A send of it returns when the receiver has taken all of it.
    Memory has no name and cannot outlive the processes that use it; the death of a process is noticed by the end of its
    socket.

    Processes are on one host if they reach each other's Unix sockets, and belong to one user. `peers` are the ranks of
    all other processes before it is open, and afterwards of the processes that were found on this host.

    Args:
        member: Index of this process.
        placement: The ranks of each process, by index.
        secret: Proves membership to the other processes; at least one byte.
        exchange: All-gather among the processes: called with a name and bytes, returns the bytes of each by index.
        job: Name of the world; connections of others are refused.
        epoch: Which of the job's successive worlds.
        limit_bytes: Memory that this process may give to be shared; by default its part of half of this machine's.
        reads: Whether to read others' memory where it lies, if the system allows it.
        mails: Whether this process has a mailbox, if one is built.
        everybody: Whether to fail if there is a process that cannot be reached.
        join_s: How long to wait for all processes when opening.
        report: Takes a line about processes that are lost or cannot share memory.

    Attributes:
        exchange: As passed.
        links: The ways to the other processes of this host, by index.

    Raises:
        ArgumentError: A placement without this process, or with ranks that are negative or named twice; no secret, or
            less than no memory.
    """

    waiting: Waiting | None = None

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
        mails: bool = True,
        everybody: bool = False,
        join_s: float = 60.0,
        report: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(member, placement)
        if limit_bytes is not None and limit_bytes < 0:
            raise ArgumentError(f"limit_bytes is {limit_bytes}; name 0 bytes or more")
        self.exchange = exchange
        self.links: dict[int, MemoryLink] = {}
        self._report = report or (lambda _: None)
        self._everybody = everybody
        self._member_of = {rank: member for member, placed in enumerate(placement) for rank in placed}
        mine = Identity(job=job, epoch=epoch, member=member, members=len(placement), secret=secret)
        meeting: Meeting[Peer | str] = Meeting(mine, "memory", join_s=join_s)
        self._joining = Joining(meeting, limit_bytes=limit_bytes, reads=reads, mails=mails)
        self._peers: dict[int, Peer] = {}
        self._boards: Boards | None = None
        self._engine: native.Engine | None = None
        self._post: Post | None = None
        self._asleep: dict[int, memoryview] = {}
        self._words: dict[int, Word] = {}

    def board(self, key: int, ranks: Sequence[int]) -> Board | None:
        """Return the board of some ranks, if each lives here or in a process that shares memory with this one."""
        members = [self._member_of.get(rank, -1) for rank in ranks]
        boards = self._boards
        if boards is None or not all(member == self.member or member in self.links for member in members):
            return None
        return boards.make(key, ranks, members, self.links)

    def post(self, ranks: Sequence[int]) -> Post | None:
        """Return the mailbox of this process if each of the ranks has one, alone in its process."""
        return self._post if self._post is not None and self._post.peers.keys() >= set(ranks) else None

    def lend(self, nbytes: int) -> tuple[memoryview, Callable[[], None]] | None:
        """Return memory that the other processes of this host map, and its release; None: there is no room."""
        boards = self._boards
        start = None if boards is None else boards.shelf.take(nbytes)
        if boards is None or start is None:
            return None
        return boards.segment.view[start : start + nbytes], partial(boards.shelf.give_back, start)

    async def join(self) -> None:
        """Connect with the other processes of this host.

        Raises:
            TransportError: A process did not come, or cannot be reached though everybody must.
        """
        self._peers = await self._joining.join(self.exchange)
        for other, peer in sorted(self._peers.items()):
            ranks = self.placement[other]
            self.links[other] = MemoryLink(other, ranks, self.ranks, self.memory, peer, self._report)
        self.reach(self.links)
        self._engine = self._make_engine()
        self._make_boards()
        self._post = self._make_post()
        self._tell_refused()

    def release(self) -> None:
        """Close the descriptors that wake processes, and the mailbox."""
        if self._engine is not None:
            self._engine.close()
        for peer in self._peers.values():
            os.close(peer.bell)
        self._joining.close()

    def _make_boards(self) -> None:
        segment = self._joining.segment
        if segment is None or not self.links:
            return
        first = reserved(len(self.placement))
        segments = {self.member: segment, **{other: link.peer.segment for other, link in self.links.items()}}
        self._asleep = {i: each.view[-_LAST_BYTES:].cast("Q") for i, each in segments.items()}
        if WORDS:
            self._words = {i: Word(each.view[-_LAST_BYTES:][_WORD_AT : _WORD_AT + 4]) for i, each in segments.items()}
        look_s, let_run = self._looking()
        asleep, word = self._asleep[self.member], self._words.get(self.member)
        inlets: list[Inlet] = [*self.links.values()]
        door = None if self._engine is None else EngineDoor(self._engine)
        if door is not None:
            inlets.append(door)
        bell = self._joining.bell
        self.waiting = Waiting(bell, inlets, asleep, word, look_s=look_s, let_run=let_run, door=door)
        heap = Heap(first, segment.nbytes - _LAST_BYTES)
        self._boards = boards = Boards(segment, heap, self._engine, look_s)
        for other, link in self.links.items():
            link.hear_told = boards.hear
            link.on_loss = partial(self._lost, other)
            link.ring = partial(self._ring, (other,))

    def _looking(self) -> tuple[float, Callable[[], object]]:
        """Return how long to look for others before sleeping, and what yields the core meanwhile."""
        return looking([link.peer.pid for link in self.links.values()], len(usable()))

    def _make_engine(self) -> native.Engine | None:
        """Make the engine of this process, if it is compiled."""
        segment = self._joining.segment
        if segment is None or not self.links or not BUILT:
            return None
        ways: list[tuple[memoryview, memoryview, memoryview, int] | None] = [None] * len(self.placement)
        for other, link in self.links.items():
            ways[other] = link.peer.mail_out, link.peer.mail_in, bells(link.peer.segment.view), link.peer.bell
        most = max(1, len(usable()) // (1 + len(self.links)))
        look_s, let_run = self._looking()
        yields = let_run is os.sched_yield
        return native.Engine(bells(segment.view), ways, look_s, self._joining.bell, most, yields)

    def _make_post(self) -> Post | None:
        """Return the mailbox of this process, if it has one, for the others that have one too."""
        segment = self._joining.segment
        segments = {self.member: segment} | {other: link.peer.segment for other, link in self.links.items()}
        with_one = [i for i, each in segments.items() if each is not None and allows_mail(each.view)]
        if self._engine is None or self.member not in with_one:
            return None
        return Post(self._engine, {self.placement[i][0]: i for i in with_one if len(self.placement[i]) == 1})

    def _lost(self, member: int) -> None:
        if self._boards is not None:
            self._boards.lose(member, str(self.links[member].engine.gone))
        if self._engine is not None:
            self._engine.lose(member)

    def _ring(self, members: Sequence[int]) -> None:
        """Wake the sleeping ones among some processes, for which there are packets."""
        for member in sleepers(self._asleep, members):
            if self._asleep[member][0] == NAPS:
                self._words[member].wake()
                continue
            link = self.links.get(member)
            with suppress(BlockingIOError):  # the bell has been rung more often than it can count
                os.eventfd_write(self._joining.bell if link is None else link.peer.bell, 1)

    def _tell_refused(self) -> None:
        if self._joining.unshared:
            self._report(f"process {self.member} {self._joining.unshared}")
        for other, reason in sorted(self._joining.refused.items()):
            self._report(f"process {other} of this host is reached by sockets: {reason}")
        missing = [i for i in range(len(self.placement)) if i != self.member and i not in self.links]
        if self._everybody and missing:
            who = ", ".join(map(str, missing))
            raise TransportError(f"process {who} cannot be reached through the memory of this host; use sockets (efa)")

    async def run(self) -> None:
        """Run the links, and let watchers look whenever this process is rung."""
        async with trio.open_nursery() as nursery:
            for link in self.links.values():
                nursery.start_soon(link.run)
            if self.waiting is not None:
                nursery.start_soon(self.waiting.run)

    def lose(self, ranks: Sequence[int], reason: str) -> bool:
        """Give up ranks of other processes that are known to be gone."""
        lost = [i for i, placed in enumerate(self.placement) if not set(ranks).isdisjoint(placed)]
        for member in lost:
            self._joining.meeting.lose(member, reason)
            if member in self.links:
                self.links[member].give_up(reason)
        return not self.links.keys().isdisjoint(lost)


def factory(bootstrap: Bootstrap, *, everybody: bool = True) -> SharedMemory:
    """Make the transport of a process whose world lives on one host; the option ``shared_memory`` bounds its
    memory, and ``mailbox`` says whether it has one.

    Args:
        bootstrap: The process and its world.
        everybody: Whether to fail if there is a process that cannot be reached.

    Raises:
        ArgumentError: An option has an impossible value.
    """
    return SharedMemory(
        member=bootstrap.member,
        placement=bootstrap.placement,
        secret=bootstrap.secret,
        exchange=bootstrap.exchange,
        job=bootstrap.job,
        epoch=bootstrap.epoch,
        limit_bytes=cast("int | None", bootstrap.options.get("shared_memory")),
        mails=bool(bootstrap.options.get("mailbox", True)),
        everybody=everybody,
        report=bootstrap.report,
    )
