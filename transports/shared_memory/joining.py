"""Joining of processes of one host: a handshake, the passing of memory and sockets, and a trial of reading it.

The lower member of each pair dials the higher one's Unix socket. Both sides agree whether they can share memory, and
learn the reason if they cannot.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from contextlib import suppress
from functools import partial

import trio

from transports.address import PeerAddress, host_identity
from transports.factory import Exchange
from transports.failures import LinkLostError
from transports.handshake import HandshakeError, receive_exactly
from transports.identity import Identity
from transports.meeting import ListeningSockets, Meeting, Place, Stream
from transports.shared_memory.engine import BUILT, RING_BYTES
from transports.shared_memory.memory_limit import memory_bytes
from transports.shared_memory.memory_link import Peer
from transports.shared_memory.peer_memory import buffer_address, permit_reading, read_memory
from transports.shared_memory.segment import Segment

_HANDSHAKE_S = 10.0
_CARD = struct.Struct("=QQ32s")  # size of the segment, address of a nonce, and the nonce
_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid
_VERDICT_BYTES = 512
_GRAIN_BYTES = 1 << 20
_READS, _MAPS = b"reads", b"maps"


class MemoryJoining:
    """Connections of one process to the others of its host.

    Args:
        identity: Identity of this process.
        join_s: How long to wait for all processes.
        limit_bytes: Bytes of shared memory of this process; None: its part of half of the machine's memory.
        reads: Whether to read other processes' memory directly, if the system allows it.

    Attributes:
        meeting: The meeting with the others; a result is a peer, or the reason why no memory is shared.
        segment: Shared memory of this process; None without other processes on the host.
        bell: Descriptor that wakes this process.
        unshared: Why this process can share no memory at all; empty if it can.
    """

    member: int
    members: int

    def __init__(self, identity: Identity, *, join_s: float, limit_bytes: int | None, reads: bool) -> None:
        self.meeting: Meeting[Peer | str] = Meeting(
            identity,
            "memory",
            join_s=join_s,
            handshake_s=_HANDSHAKE_S,
            prepare=lambda connection: connection.setblocking(False),
            finish=self._share_memory,
            discard=_discard,
        )
        self.member, self.members = identity.member, identity.members
        self.segment: Segment | None = None
        self.bell: int = -1
        self.unshared: str = ""
        self._limit_bytes, self._reads = limit_bytes, reads
        self._nonce = bytearray(secrets.token_bytes(32))

    async def join(self, exchange: Exchange) -> dict[int, Peer]:
        """Connect with every process of this host that can share memory.

        Raises:
            TransportError: A process of this host did not join.
        """
        host = self._make_memory()
        sockets = ListeningSockets((), unix=bool(host), pending=2 * self.members, reopens=False)
        make_address = partial(PeerAddress, host=host, unix=sockets.unix)
        try:
            await self.meeting.join(sockets, exchange, make_address, self._choose_places, self._dial)
        except BaseException:
            self.close()
            raise
        finally:
            if self.segment is not None:
                self.segment.close_descriptor()
        return self.peers

    def _choose_places(self) -> list[Place]:
        host = self.meeting.address.host
        return [(i, 0) for i, peer in self.meeting.peers.items() if host and peer.host == host]

    @property
    def peers(self) -> dict[int, Peer]:
        """The processes that share memory with this one, by index."""
        return {member: peer for (member, _), peer in self.meeting.results.items() if isinstance(peer, Peer)}

    @property
    def refused(self) -> dict[int, str]:
        """Reasons why other processes of this host cannot be reached, by index."""
        return {member: reason for (member, _), reason in self.meeting.results.items() if isinstance(reason, str)}

    def close(self) -> None:
        """Close the descriptor that wakes this process; twice is harmless."""
        bell, self.bell = self.bell, -1
        if bell >= 0:
            os.close(bell)

    def _make_memory(self) -> str:
        """Make segment and bell; return the identity shared with neighbours, or "" if there can be none."""
        needed = (os, "memfd_create"), (os, "eventfd"), (socket, "SOCK_SEQPACKET")
        if not BUILT or not all(hasattr(module, name) for module, name in needed):
            return ""
        identity = host_identity()
        if identity and self.members > 1:
            try:
                self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self.segment = self._make_segment()
            except OSError as error:
                self.unshared = f"shares no memory with processes of this host, which sockets reach: {error.strerror}"
                return ""
            permit_reading()
        return identity

    def _make_segment(self) -> Segment:
        """Make the segment of this process, within the limit but not below the smallest useful size."""
        limit = self._limit_bytes if self._limit_bytes is not None else memory_bytes() // 2 // self.members
        return Segment.make(max(limit // _GRAIN_BYTES * _GRAIN_BYTES, ring_bytes(self.members) + _GRAIN_BYTES))

    # -- both sides ---------------------------------------------------------------------------------------------------

    async def _dial(self, member: int, _: int) -> Peer | str:
        """Connect with a higher member; return the peer, or why no memory is shared."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name, join_s = "\0" + self.meeting.peers[member].unix, self.meeting.join_s
        return await self.meeting.greet(connection, member, name, "0", source="", deadline_s=join_s)

    async def _share_memory(self, connection: socket.socket, stream: Stream, member: int, _: str) -> Peer | str:
        """Exchange memory with a process that has proved the secret; return the peer, or why no memory is shared.

        Each side passes the descriptors of its memory, and the address of a nonce, which the other one tries to read.
        """
        bell = -1
        try:
            await self._send_memory(connection)
            card, (segment, bell) = await _receive_card(connection)
            return await self._map_peer(connection, stream, member, card, segment, bell)
        except BaseException as error:
            if bell >= 0:
                os.close(bell)
            if isinstance(error, OSError | HandshakeError | trio.BrokenResourceError):
                raise LinkLostError(f"process {member} cannot be reached: {error}") from error
            raise

    async def _send_memory(self, connection: socket.socket) -> None:
        """Send the descriptors of this process's memory, and the address of a nonce in this process."""
        assert self.segment is not None, "there are neighbours"
        card = _CARD.pack(self.segment.nbytes, buffer_address(self._nonce), bytes(self._nonce))
        await trio.lowlevel.wait_writable(connection)
        socket.send_fds(connection, [card], [self.segment.fileno(), self.bell])

    async def _map_peer(
        self, connection: socket.socket, stream: Stream, member: int, card: bytes, segment: int, bell: int
    ) -> Peer | str:
        """Map the peer's memory and try to read from the process; both sides agree on the result."""
        pid, uid, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        nbytes, address, nonce = _CARD.unpack(card)
        peer_segment: Segment | None = None
        try:
            peer_segment = Segment.from_descriptor(segment)
            verdict = _READS if self._can_read(pid, uid, address, nonce) else _MAPS
            if peer_segment.nbytes != nbytes:
                verdict = b"the memory that was passed has another size"
        except (OSError, ValueError) as error:
            verdict = f"its memory cannot be mapped: {error}".encode()[:_VERDICT_BYTES]
        await stream.send_all(verdict.ljust(_VERDICT_BYTES, b"\0"))
        answer = (await receive_exactly(stream, _VERDICT_BYTES)).rstrip(b"\0")
        if peer_segment is None or not {verdict, answer} <= {_READS, _MAPS}:
            connection.close()
            os.close(bell)
            return min(verdict, answer, key=lambda word: word in (_READS, _MAPS)).decode(errors="replace")
        assert self.segment is not None, "there are neighbours"
        return Peer(
            socket=connection,
            pid=pid,
            readable=verdict == answer == _READS,
            segment=peer_segment,
            bell=bell,
            messages_out=_ring_of_reader(self.segment, member),
            messages_in=_ring_of_reader(peer_segment, self.member),
        )

    def _can_read(self, pid: int, uid: int, address: int, nonce: bytes) -> bool:
        """Whether the nonce of another process can be read from its memory."""
        seen = bytearray(len(nonce))
        if not self._reads or uid != os.getuid() or pid <= 0:
            return False
        with suppress(OSError, AttributeError):
            read_memory(pid, address, seen)
        return seen == nonce


def _discard(result: Peer | str) -> None:
    if isinstance(result, Peer):
        result.socket.close()
        os.close(result.bell)


def _ring_of_reader(segment: Segment, reader: int) -> memoryview:
    start = reader * RING_BYTES
    return segment.view[start : start + RING_BYTES]


def ring_bytes(members: int) -> int:
    """Return the bytes at the start of a segment that are rings, not loans."""
    return RING_BYTES * members


async def _receive_card(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a card, and the descriptors of a segment and of a bell."""
    await trio.lowlevel.wait_readable(connection)
    card, descriptors, _, _ = socket.recv_fds(connection, _CARD.size, 2, socket.MSG_CMSG_CLOEXEC)
    if len(card) != _CARD.size or len(descriptors) != 2:
        for descriptor in descriptors:
            os.close(descriptor)
        raise HandshakeError("the other side hung up during the handshake; see what it has printed", why="left")
    return card, descriptors
