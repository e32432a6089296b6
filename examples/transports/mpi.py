"""A transport over MPI, as a package of its own would bring it, over the public contract.

    pip install mpi4py mpich
    OVERLAP_TRANSPORT=mpi mpiexec -n 2 python -m mpi4py train.py

The package names it in its `pyproject.toml`:

    [project.entry-points."overlap.transports"]
    mpi = "mpi:make"

Matching, order, signatures, any source, withdrawal, credits and lengths are in `transports.matching`: a link only moves
the messages of its engine. Heads travel with MPI tag 0 and bytes of chunks with tag 1. MPI keeps each tag in order
between two processes, so a head says which bytes come next. MPI cannot wake an event loop, so a task polls.

A longer one would add priorities beyond the four chunks under way, and receives posted ahead of heads (some us less for
each message). When a process dies, MPI ends all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any

import trio
from mpi4py import MPI

from transports import ArgumentError
from transports.factory import Bootstrap
from transports.matched import MatchedLink, MatchedTransport
from transports.matching import Limits, MessageKind

HEAD = Struct("<B6Q")  # kind, fields; a text or a small message follows
FIELDS = {MessageKind.EAGER: 5, MessageKind.OFFER: 6, MessageKind.REFUSE: 3, MessageKind.SIGNATURE: 3}  # others: 1
EAGER_BYTES, CHUNKS, BYE = 16 << 10, 4, 64
LIMITS = Limits(eager_bytes=EAGER_BYTES, chunk_bytes=4 << 20)
SHORTEST_SLEEP_S, LONGEST_SLEEP_S, LONGEST_GOODBYE_S = 200e-6, 1e-3, 5.0


class MpiLink(MatchedLink):
    """The link to another process of the communicator."""

    def connect(self, comm: Any) -> MpiLink:
        """Use a communicator, and return this link."""
        self.comm = comm
        self.busy: list[tuple[Any, Callable[[], None]]] = []  # requests of MPI, and what to do at their ends
        self.bye_came = False
        return self

    def flush(self) -> None:
        """Send due heads, and a few chunks at a time."""
        outgoing = self.engine.outgoing
        while (message := outgoing.next_message()) is not None:
            self.send_head(*message)
        while len(self.busy) < CHUNKS and (chunk := outgoing.next_chunk()) is not None:
            self.send_head(MessageKind.CHUNK, (chunk.send.number, chunk.offset, chunk.nbytes))
            self.busy.append((self.comm.Isend([chunk.view, MPI.BYTE], self.member, 1), _do_nothing))
        self.record_change()

    def send_head(self, kind: int, fields: Sequence[int], payload: memoryview | None = None) -> None:
        """Send a head, with the bytes of a small message or a text."""
        packet = HEAD.pack(kind, *fields, *(0,) * (6 - len(fields))) + bytes(payload or b"")
        self.busy.append((self.comm.Isend([packet, MPI.BYTE], self.member, 0), _do_nothing))

    def handle_head(self, packet: memoryview) -> None:
        """Handle a head that has arrived."""
        kind, *fields = HEAD.unpack_from(packet)
        payload = packet[HEAD.size :]
        if kind == BYE:
            self.bye_came = True
            self.engine.end(f"{self.name} has left", keep_arrived=True)
        elif kind == MessageKind.CHUNK:
            self.receive_chunk(*fields[:3])
        elif kind == MessageKind.EAGER:
            self.engine.incoming.handle_eager(fields[:5], payload)
        else:
            fields = fields[: FIELDS.get(kind, 1)]
            self.engine.handle(kind, [*fields, bytes(payload)] if payload else fields)

    def receive_chunk(self, number: int, offset: int, nbytes: int) -> None:
        """Receive the bytes of a chunk, straight into the memory of their message."""
        memory = self.engine.incoming.chunk_memory(number, offset, nbytes)
        arrived = lambda: self.engine.incoming.count_chunk(number, offset, nbytes)  # noqa: E731
        self.busy.append((self.comm.Irecv([memory, MPI.BYTE], self.member, 1), arrived))

    def progress(self) -> bool:
        """Go on with requests of MPI that have ended; return whether any has."""
        ended = [entry for entry in self.busy if entry[0].Test()]
        self.busy = [entry for entry in self.busy if entry not in ended]
        for _, then in ended:
            then()
        self.flush()
        return bool(ended)

    async def leave(self) -> None:
        """Finish matched messages, and exchange goodbyes."""
        with trio.move_on_after(LONGEST_GOODBYE_S, shield=True):
            while not self.engine.quiet or self.busy:
                await trio.lowlevel.checkpoint()
            self.send_head(BYE, ())
            while not self.bye_came or self.busy:
                await trio.lowlevel.checkpoint()


class MpiTransport(MatchedTransport):
    """Joins the processes of an MPI job; process i of the world is rank i of the communicator."""

    def __init__(self, member: int, placement: Sequence[Sequence[int]], comm: Any = MPI.COMM_WORLD) -> None:
        super().__init__(member, placement)
        if (comm.Get_rank(), comm.Get_size()) != (member, len(placement)):
            raise ArgumentError(f"process {member} is rank {comm.Get_rank()} of MPI; start the program with mpiexec")
        self.comm = comm.Dup()  # messages of the program do not meet these
        self.links = self.make_links(self.make_link)

    def make_link(self, member: int, ranks: tuple[int, ...]) -> MpiLink:
        """Return the link to a process."""
        return MpiLink(member, ranks, self.ranks, LIMITS, self.memory).connect(self.comm)

    async def run(self) -> None:
        """Poll, ever less often while nothing arrives."""
        idle_s = 0.0
        while True:
            idle_s = 0.0 if self.progress() else min(idle_s + 20e-6, LONGEST_SLEEP_S)
            if idle_s > SHORTEST_SLEEP_S:
                await trio.sleep(idle_s)
            else:
                await trio.lowlevel.checkpoint()

    def progress(self) -> bool:
        """Move what can move; return whether anything has."""
        moved, status = False, MPI.Status()
        while (head := self.comm.Improbe(tag=0, status=status)) is not None:
            packet = memoryview(bytearray(status.Get_count(MPI.BYTE)))
            head.Recv([packet, MPI.BYTE])
            self.links[status.Get_source()].handle_head(packet)
            moved = True
        for link in self.links.values():
            moved = link.progress() or moved
        return moved


def make(bootstrap: Bootstrap) -> MpiTransport:
    """Make the transport of a process."""
    return MpiTransport(bootstrap.member, bootstrap.placement)


def _do_nothing() -> None:
    """A send has ended: its engine already knows."""
