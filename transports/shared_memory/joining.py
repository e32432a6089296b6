"""How processes of one host come together: a handshake, then memory and sockets are passed, then it is tried.

The lower member of each pair dials the higher one's Unix socket. Two that cannot share memory both know it in the end,
and why.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field

import msgpack
import trio

from transports.efa.address import host_identity
from transports.efa.door import Door
from transports.factory import Exchange
from transports.failures import LinkLostError, TransportError
from transports.handshake import HandshakeError, Hello, greet, welcome
from transports.shared_memory.memory_link import Peer
from transports.shared_memory.packets import SLOT_BYTES, SLOTS
from transports.shared_memory.peer_memory import address_of, allow, read
from transports.shared_memory.segment import Segment

_HANDSHAKE_S = 10.0
_CARD = struct.Struct("=QQ32s")  # size of the segment; where a nonce lies, and the nonce
_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid
_VERDICT_BYTES = 512
_READS, _MAPS = b"reads", b"maps"


@dataclass(kw_only=True)
class Joining:
    """One process's way to the others of its host."""

    member: int  # Its index
    members: int  # How many processes the world has
    secret: bytes  # What all members know
    job: str  # Name of the world
    epoch: int  # Which of the job's successive worlds
    # How much memory this process may give to be shared; None: its part of half of this machine's.
    limit_bytes: int | None
    reads: bool  # Whether to read others' memory where it lies, if the system allows it
    join_s: float  # How long to wait for all of them
    neighbours: tuple[int, ...] = ()  # The processes of this host, this one among them, once that is known
    segment: Segment | None = None  # This process's memory for others, then
    bell: int = -1  # Descriptor of what wakes this process
    unshared: str = ""  # Why this process can share no memory at all; empty if it can
    # Why other processes of this host cannot be reached, by index.
    refused: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._nonce = bytearray(secrets.token_bytes(32))
        self._peers: dict[int, Peer] = {}
        self._expected: set[int] = set()
        self._complete = trio.Event()
        self._failure: TransportError | None = None
        self._names: dict[int, str] = {}

    async def join(self, exchange: Exchange) -> dict[int, Peer]:
        """Come together with every process of this host that can share memory.

        Raises:
            TransportError: One that is there did not come.
        """
        door = Door((), unix=True, pending=2 * self.members, stays=False)
        identity = self._prepare()
        listeners = door.open() if identity else []
        try:
            told = await exchange("memory", msgpack.packb((identity, door.unix)))
            self._meet(identity, [self._unpacked(card) for card in told])
            if self._expected:
                await self._come_together(door, listeners)
        except BaseException:
            for peer in self._peers.values():
                peer.socket.close()
                os.close(peer.bell)
            self.close()
            raise
        finally:
            for listener in listeners:
                listener.close()
            if self.segment is not None:
                self.segment.passed()
        return self._peers

    def close(self) -> None:
        """Close what is left of this process's own."""
        bell, self.bell = self.bell, -1
        if bell >= 0:
            os.close(bell)

    def _prepare(self) -> str:
        """Return what makes processes neighbours of this one; empty if it can have none."""
        if not hasattr(os, "memfd_create") or not hasattr(os, "eventfd") or not hasattr(socket, "SOCK_SEQPACKET"):
            return ""
        identity = host_identity()
        if identity and self.members > 1:
            try:
                self.segment = self._make_segment()
            except OSError as error:
                self.unshared = f"shares no memory with processes of this host, which sockets reach: {error.strerror}"
                return ""
            allow()
        return identity

    def _unpacked(self, card: bytes) -> tuple[str, str]:
        try:
            identity, name = msgpack.unpackb(card, use_list=False)
            if isinstance(identity, str) and isinstance(name, str):
                return identity, name
        except (ValueError, TypeError, msgpack.UnpackException):
            pass
        raise TransportError("a process told no address that can be understood")

    def _meet(self, identity: str, told: list[tuple[str, str]]) -> None:
        self.neighbours = tuple(i for i, (theirs, _) in enumerate(told) if identity and theirs == identity)
        self._expected = set(self.neighbours) - {self.member}
        self._names = {i: told[i][1] for i in self._expected}
        if self._expected:
            self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def _make_segment(self) -> Segment:
        """Make this process's segment; where the limit leaves no room, the smallest that is of any use."""
        half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        limit = self.limit_bytes if self.limit_bytes is not None else half // self.members
        slots = SLOTS * SLOT_BYTES * self.members
        return Segment.make(max(limit // SLOT_BYTES * SLOT_BYTES, slots + SLOT_BYTES))

    async def _come_together(self, door: Door, listeners: list[socket.socket]) -> None:
        with trio.move_on_after(self.join_s):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(door.serve, listeners, self._serve)
                for member in self._expected:
                    if member > self.member:
                        nursery.start_soon(self._dial, member)
                await self._complete.wait()
                nursery.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure
        absent = self._expected - self._peers.keys() - self.refused.keys()
        if absent:
            who = ", ".join(map(str, sorted(absent)))
            raise LinkLostError(
                f"process {self.member} shares no memory with process {who} of this host after {self.join_s:g} s"
            )

    def lose(self, member: int, reason: str) -> None:
        """Wait no longer for a process that will not come; it may be lost before it is known to be a neighbour."""
        self._fail(LinkLostError(f"process {member} is lost: {reason}"))

    def _fail(self, error: TransportError) -> None:
        self._failure = self._failure or error
        self._complete.set()

    def _settled(self, member: int, found: Peer | str) -> None:
        if isinstance(found, Peer):
            self._peers[member] = found
        else:
            self.refused[member] = found
        if self._expected <= self._peers.keys() | self.refused.keys():
            self._complete.set()

    # -- both sides ---------------------------------------------------------------------------------------------------

    async def _dial(self, member: int) -> None:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            await trio.socket.from_stdlib_socket(connection).connect("\0" + self._names[member])
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
            await greet(stream, self._hello(), self.secret, deadline_s=self.join_s)
            await self._pass(connection, [far.fileno()])
            card, (segment, bell) = await _receive(connection, 2)
            self._settled(member, await self._try(connection, near, member, card, segment, bell))
        except (OSError, TransportError) as error:
            near.close()
            self._fail(LinkLostError(f"process {member} cannot be reached: {error}"))
        except BaseException:
            near.close()
            raise
        finally:
            far.close()
            connection.close()

    async def _serve(self, connection: socket.socket) -> None:
        said: list[Hello] = []
        kept: socket.socket | None = None

        def judge(hello: Hello) -> Hello | str:
            said.append(hello)
            return self._judge(hello)

        try:
            connection.setblocking(False)
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
            await welcome(stream, self.secret, judge, deadline_s=_HANDSHAKE_S)
            card, (end, segment, bell) = await _receive(connection, 3)
            kept = socket.socket(fileno=end)
            await self._pass(connection, [])
            self._settled(said[0].member, await self._try(connection, kept, said[0].member, card, segment, bell))
        except (OSError, HandshakeError) as error:
            if kept is not None:
                kept.close()
                self._fail(LinkLostError(f"process {said[0].member} is lost: {error}"))
        finally:
            connection.close()

    def _hello(self) -> Hello:
        return Hello(role="memory", job=self.job, epoch=self.epoch, member=self.member, members=self.members)

    def _judge(self, hello: Hello) -> Hello | str:
        expected = (("memory", "role"), (self.job, "job"), (self.epoch, "epoch"), (self.members, "members"))
        for value, name in expected:
            if getattr(hello, name) != value:
                return f"{name} {getattr(hello, name)!r} refused; here it is {value!r}"
        if hello.member not in self._expected or hello.member >= self.member or hello.member in self._peers:
            return f"process {hello.member} is not expected to call process {self.member}"
        return self._hello()

    async def _pass(self, connection: socket.socket, more: list[int]) -> None:
        """Tell where this process's memory is."""
        assert self.segment is not None, "there are neighbours"
        card = _CARD.pack(self.segment.nbytes, address_of(self._nonce), bytes(self._nonce))
        await trio.lowlevel.wait_writable(connection)
        socket.send_fds(connection, [card], [*more, self.segment.fileno(), self.bell])

    async def _try(
        self, connection: socket.socket, packets: socket.socket, member: int, card: bytes, segment: int, bell: int
    ) -> Peer | str:
        """Map the other's memory, try to read it, and compare notes: both sides come to the same end."""
        pid, uid, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        nbytes, address, nonce = _CARD.unpack(card)
        theirs: Segment | None = None
        try:
            theirs = Segment.of_another(segment)
            verdict = _READS if self._can_read(pid, uid, address, nonce) else _MAPS
            if theirs.nbytes != nbytes:
                verdict = b"the memory that was passed has another size"
        except (OSError, ValueError) as error:
            verdict = f"its memory cannot be mapped: {error}".encode()[:_VERDICT_BYTES]
        packets.setblocking(False)
        packets.send(verdict)
        answer = await _packet(packets)
        if theirs is None or not {verdict, answer} <= {_READS, _MAPS}:
            packets.close()
            os.close(bell)
            return min(verdict, answer, key=lambda word: word in (_READS, _MAPS)).decode(errors="replace")
        return self._peer(member, packets, pid, verdict == answer == _READS, theirs, bell)

    def _can_read(self, pid: int, uid: int, address: int, nonce: bytes) -> bool:
        seen = bytearray(len(nonce))
        if not self.reads or uid != os.getuid() or pid <= 0:
            return False
        with suppress(OSError, AttributeError):
            read(pid, address, seen)
        return seen == nonce

    def _peer(self, member: int, packets: socket.socket, pid: int, readable: bool, theirs: Segment, bell: int) -> Peer:
        assert self.segment is not None, "there are neighbours"
        slots = None if readable else self._slots
        return Peer(
            socket=packets,
            pid=pid,
            readable=readable,
            segment=theirs,
            bell=bell,
            outbox=slots and slots(self.segment, member),
            inbox=slots and slots(theirs, self.member),
        )

    def _slots(self, segment: Segment, reader: int) -> memoryview:
        """Return the slots of a segment that one of the processes reads."""
        start = reader * SLOTS * SLOT_BYTES
        return segment.view[start : start + SLOTS * SLOT_BYTES]


async def _receive(connection: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """Receive a card and so many descriptors."""
    with trio.fail_after(_HANDSHAKE_S):
        await trio.lowlevel.wait_readable(connection)
    card, descriptors, _, _ = socket.recv_fds(connection, _CARD.size, count, socket.MSG_CMSG_CLOEXEC)
    if len(card) != _CARD.size or len(descriptors) != count:
        for descriptor in descriptors:
            os.close(descriptor)
        raise HandshakeError("the other side hung up during the handshake", why="left")
    return card, descriptors


async def _packet(packets: socket.socket) -> bytes:
    while True:
        await trio.lowlevel.wait_readable(packets)
        with suppress(BlockingIOError):
            got = packets.recv(_VERDICT_BYTES)
            if not got:
                raise HandshakeError("the other side hung up during the handshake", why="left")
            return got
