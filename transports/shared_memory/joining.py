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

from transports.delays import limit_own_time
from transports.efa.address import PeerAddress, host_identity
from transports.factory import Exchange
from transports.failures import LinkLostError, TransportError
from transports.handshake import HandshakeError, advise_on_silence
from transports.meeting import ListeningSockets, Meeting, Place
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
        meeting: The meeting with the others; a result is a peer, or the reason why no memory is shared.
        limit_bytes: Bytes of shared memory of this process; None: its part of half of the machine's memory.
        reads: Whether to read other processes' memory directly, if the system allows it.

    Attributes:
        segment: Shared memory of this process; None without other processes on the host.
        bell: Descriptor that wakes this process.
        unshared: Why this process can share no memory at all; empty if it can.
    """

    meeting: Meeting[Peer | str]
    member: int
    members: int

    def __init__(self, meeting: Meeting[Peer | str], *, limit_bytes: int | None, reads: bool) -> None:
        self.meeting, self.member, self.members = meeting, meeting.identity.member, meeting.identity.members
        self.segment: Segment | None = None
        self.bell: int = -1
        self.unshared: str = ""
        self._limit_bytes, self._reads = limit_bytes, reads
        self._nonce = bytearray(secrets.token_bytes(32))
        self._names: dict[int, str] = {}

    async def join(self, exchange: Exchange) -> dict[int, Peer]:
        """Connect with every process of this host that can share memory.

        Raises:
            TransportError: A process of this host did not join.
        """
        self.meeting.sockets = sockets = ListeningSockets((), unix=True, pending=2 * self.members, reopens=False)
        identity = self._make_memory()
        listeners = sockets.listen() if identity else []
        try:
            cards = await exchange("memory", PeerAddress(host=identity, unix=sockets.unix).pack())
            peers = [PeerAddress.unpack(card, member) for member, card in enumerate(cards)]
            near = [i for i, peer in enumerate(peers) if identity and peer.host == identity and i != self.member]
            self._names = {i: peers[i].unix for i in near}
            missing = await self.meeting.gather(
                [(i, 0) for i in self._names], listeners, self._dial_peer, self._serve_peer
            )
            if missing:
                members = ", ".join(str(member) for member, _ in sorted(missing))
                after = f"of this host after {self.meeting.join_s:g} s"
                raise LinkLostError(
                    f"process {self.member} shares no memory with process {members} {after}; "
                    "see whether these still run"
                )
        except BaseException:
            for peer in self.peers.values():
                peer.socket.close()
                os.close(peer.bell)
            self.close()
            raise
        finally:
            for listener in listeners:
                listener.close()
            if self.segment is not None:
                self.segment.close_descriptor()
        return self.peers

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

    async def _dial_peer(self, member: int, _: int) -> Peer | str:
        """Connect with a higher member, and exchange memory; return the peer, or why no memory is shared."""
        own_end, peer_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            name = "\0" + self._names[member]
            await self.meeting.greet(connection, member, name, detail="0", deadline_s=self.meeting.join_s)
            await self._send_memory(connection, [peer_end.fileno()])
            card, (segment, bell) = await _receive_card(connection, 2)
            return await self._map_peer(connection, own_end, member, card, segment, bell)
        except BaseException as error:
            own_end.close()
            if isinstance(error, OSError | TransportError):
                raise LinkLostError(f"process {member} cannot be reached: {error}") from error
            raise
        finally:
            peer_end.close()
            connection.close()

    async def _serve_peer(self, connection: socket.socket) -> None:
        """Receive a lower member, exchange memory, and record the peer, or why no memory is shared."""
        places: list[Place] = []
        packets: socket.socket | None = None
        try:
            connection.setblocking(False)
            await self.meeting.welcome(connection, partial(self.meeting.admit, places), deadline_s=_HANDSHAKE_S)
            card, (end, segment, bell) = await _receive_card(connection, 3)
            packets, place = socket.socket(fileno=end), places[0]
            await self._send_memory(connection, [])
            self.meeting.record_result(place, await self._map_peer(connection, packets, place[0], card, segment, bell))
        except (OSError, HandshakeError) as error:
            if packets is not None:
                packets.close()
                self.meeting.lose(places[0][0], str(error))
            elif places:
                self.meeting.free_place(places[0])
        finally:
            connection.close()

    async def _send_memory(self, connection: socket.socket, more: list[int]) -> None:
        """Send the descriptors of this process's memory, and the address of a nonce in this process."""
        assert self.segment is not None, "there are neighbours"
        card = _CARD.pack(self.segment.nbytes, buffer_address(self._nonce), bytes(self._nonce))
        await trio.lowlevel.wait_writable(connection)
        socket.send_fds(connection, [card], [*more, self.segment.fileno(), self.bell])

    async def _map_peer(
        self, connection: socket.socket, packets: socket.socket, member: int, card: bytes, segment: int, bell: int
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
        packets.setblocking(False)
        packets.send(verdict)
        answer = await _receive_packet(packets)
        if peer_segment is None or not {verdict, answer} <= {_READS, _MAPS}:
            packets.close()
            os.close(bell)
            return min(verdict, answer, key=lambda word: word in (_READS, _MAPS)).decode(errors="replace")
        return self._make_peer(member, packets, pid, verdict == answer == _READS, peer_segment, bell)

    def _can_read(self, pid: int, uid: int, address: int, nonce: bytes) -> bool:
        """Whether the nonce of another process can be read from its memory."""
        seen = bytearray(len(nonce))
        if not self._reads or uid != os.getuid() or pid <= 0:
            return False
        with suppress(OSError, AttributeError):
            read_memory(pid, address, seen)
        return seen == nonce

    def _make_peer(
        self, member: int, packets: socket.socket, pid: int, readable: bool, peer_segment: Segment, bell: int
    ) -> Peer:
        """Return a peer, with the rings in both directions."""
        assert self.segment is not None, "there are neighbours"
        return Peer(
            socket=packets,
            pid=pid,
            readable=readable,
            segment=peer_segment,
            bell=bell,
            messages_out=_ring(self.segment, member),
            messages_in=_ring(peer_segment, self.member),
        )


def _ring(segment: Segment, reader: int) -> memoryview:
    """Return the ring of a segment that a process reads."""
    start = reader * RING_BYTES
    return segment.view[start : start + RING_BYTES]


def ring_bytes(members: int) -> int:
    """Return the bytes at the start of a segment that are rings, not loans."""
    return RING_BYTES * members


async def _receive_card(connection: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """Receive a card and `count` descriptors."""
    with limit_own_time(_HANDSHAKE_S) as limit:
        await trio.lowlevel.wait_readable(connection)
    if limit.cancelled_caught:
        advice = advise_on_silence(connection)
        raise HandshakeError(f"the other side passed no memory within {_HANDSHAKE_S:g} s; {advice}", why="silent")
    card, descriptors, _, _ = socket.recv_fds(connection, _CARD.size, count, socket.MSG_CMSG_CLOEXEC)
    if len(card) != _CARD.size or len(descriptors) != count:
        for descriptor in descriptors:
            os.close(descriptor)
        raise HandshakeError("the other side hung up during the handshake; see what it has printed", why="left")
    return card, descriptors


async def _receive_packet(packets: socket.socket) -> bytes:
    """Wait for a packet; `HandshakeError` if the other side has hung up."""
    while True:
        await trio.lowlevel.wait_readable(packets)
        with suppress(BlockingIOError):
            got = packets.recv(_VERDICT_BYTES)
            if not got:
                raise HandshakeError("the other side hung up during the handshake; see what it has printed", why="left")
            return got
