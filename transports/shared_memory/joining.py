"""Joining of processes of one host: a handshake, the passing of memory and sockets, and a trial of reading it.

Of each pair of processes, the one with the lower index dials the other one's Unix socket. Both sides agree whether they
can share memory; if they cannot, both get the reason.
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
from transports.handshake import HandshakeError, ended_connection_error, receive_exactly
from transports.identity import Identity
from transports.meeting import ListeningSockets, Meeting, Place, Stream
from transports.shared_memory.engine import BUILT, RING_BYTES, STALE
from transports.shared_memory.memory_limit import memory_limit_bytes
from transports.shared_memory.memory_link import Peer
from transports.shared_memory.peer_memory import buffer_address, permit_reading, read_memory
from transports.shared_memory.segment import Segment

_HANDSHAKE_S = 10.0
_CARD = struct.Struct("=QQ32s")  # description of a process's memory: size of the segment, address of a nonce, the nonce
_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid
_VERDICT_BYTES = 512
_GRAIN_BYTES = 1 << 20
_READS, _MAPS = b"reads", b"maps"  # verdicts: memory is mapped, and can also be read by a system call; or only mapped
_UNSHARED = "shares no memory with processes of this host, which sockets reach"


class MemoryJoining:
    """Connections of one process to the others of its host.

    Args:
        identity: Identity of this process.
        join_s: Seconds to wait for all processes.
        limit_bytes: Bytes of shared memory of this process; None: half of the machine's memory, divided by the number
            of processes.
        reads: Whether to read other processes' memory by a system call, if the system allows that.

    Attributes:
        meeting: The meeting with the other processes. A result is a peer, or the reason why no memory is shared.
        segment: Shared memory of this process; None: it has none.
        bell: Descriptor that wakes this process; -1: none.
        unshared: Reason, for the user, why this process can share no memory at all; "" if it can.
    """

    def __init__(self, identity: Identity, *, join_s: float, limit_bytes: int | None, reads: bool) -> None:
        self.meeting: Meeting[Peer | str] = Meeting(
            identity,
            "memory",
            join_s=join_s,
            handshake_s=_HANDSHAKE_S,
            prepare=lambda connection: connection.setblocking(False),
            finish=self._share_memory,
            discard=_close_peer,
        )
        self.member: int = identity.member
        self.members: int = identity.members
        self.segment: Segment | None = None
        self.bell: int = -1
        self.unshared: str = ""
        self._limit_bytes, self._reads = limit_bytes, reads
        self._nonce = bytearray(secrets.token_bytes(32))

    async def join(self, exchange: Exchange) -> dict[int, Peer]:
        """Connect with every process of this host, and return those that share memory, by index.

        Raises:
            TransportError: A process of this host did not join.
        """
        host = self._make_shared_memory()
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
        """Return the place (index, 0) of a connection to each other process of this host."""
        host = self.meeting.address.host
        return [(i, 0) for i, peer in self.meeting.peers.items() if host and peer.host == host]

    @property
    def peers(self) -> dict[int, Peer]:
        """The processes that share memory with this one, by index."""
        return {member: peer for (member, _), peer in self.meeting.results.items() if isinstance(peer, Peer)}

    @property
    def refused(self) -> dict[int, str]:
        """Other processes of this host that share no memory with this one: the reason, by index."""
        return {member: reason for (member, _), reason in self.meeting.results.items() if isinstance(reason, str)}

    def close(self) -> None:
        """Close the descriptor that wakes this process. A second call does nothing."""
        bell, self.bell = self.bell, -1
        if bell >= 0:
            os.close(bell)

    def _make_shared_memory(self) -> str:
        """Create the segment and the bell, if there are other processes; return the identity of the host.

        Return "" if this process cannot share memory; then `unshared` is the reason, if the user should get one.
        """
        needed = (os, "memfd_create"), (os, "eventfd"), (socket, "SOCK_SEQPACKET")
        if not BUILT or not all(hasattr(module, name) for module, name in needed):
            if STALE and self.members > 1:
                self.unshared = f"{_UNSHARED}: the compiled code is of another version; install overlap again"
            return ""
        identity = host_identity()
        if identity and self.members > 1:
            try:
                self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self.segment = self._make_segment()
            except OSError as error:
                self.unshared = f"{_UNSHARED}: {error.strerror}"
                return ""
            permit_reading()
        return identity

    def _make_segment(self) -> Segment:
        """Create the segment of this process, of the size of the limit; at least the rings and one MiB."""
        limit = self._limit_bytes if self._limit_bytes is not None else memory_limit_bytes() // 2 // self.members
        return Segment.make(max(limit // _GRAIN_BYTES * _GRAIN_BYTES, ring_bytes(self.members) + _GRAIN_BYTES))

    # -- both sides ---------------------------------------------------------------------------------------------------

    async def _dial(self, member: int, _: int) -> Peer | str:
        """Connect with a process of a higher index; return the peer, or why no memory is shared."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name, join_s = "\0" + self.meeting.peers[member].unix, self.meeting.join_s
        return await self.meeting.greet(connection, member, name, "0", source="", deadline_s=join_s)

    async def _share_memory(self, connection: socket.socket, stream: Stream, member: int, _: str) -> Peer | str:
        """Exchange memory with a process that has proved the secret; return the peer, or why no memory is shared.

        Each side sends the descriptors of its segment and bell, and the address of a nonce, which the other side tries
        to read. This is the `finish` of `Meeting`; it raises `LinkLostError` if the connection ended.
        """
        bell = -1
        try:
            await self._send_card(connection)
            card, (segment, bell) = await _receive_card(connection)
            return await self._map_peer(connection, stream, member, card, segment, bell)
        except BaseException as error:
            if bell >= 0:
                os.close(bell)
            if isinstance(error, OSError | HandshakeError | trio.BrokenResourceError):
                raise LinkLostError(f"process {member} cannot be reached: {error}") from error
            raise

    async def _send_card(self, connection: socket.socket) -> None:
        """Send the descriptors of this process's segment and bell, with the card that describes its memory."""
        assert self.segment is not None, "processes that share no memory are not dialled"
        card = _CARD.pack(self.segment.nbytes, buffer_address(self._nonce), bytes(self._nonce))
        await trio.lowlevel.wait_writable(connection)
        socket.send_fds(connection, [card], [self.segment.fileno(), self.bell])

    async def _map_peer(
        self, connection: socket.socket, stream: Stream, member: int, card: bytes, segment: int, bell: int
    ) -> Peer | str:
        """Map the peer's memory and try to read from the process; return the peer, or why no memory is shared.

        Both sides agree on the result. The descriptor of the segment is closed here. The returned peer owns the socket
        and the bell, which wakes the other process; both are closed if no memory is shared.
        """
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
        nbytes, address, nonce = _CARD.unpack(card)
        peer_segment: Segment | None = None
        try:
            peer_segment = Segment.from_descriptor(segment)
            verdict = _READS if self._can_read_peer(pid, uid, address, nonce) else _MAPS
            if peer_segment.nbytes != nbytes:
                verdict = b"the memory that was passed has another size"
        except (OSError, ValueError) as error:
            verdict = f"its memory cannot be mapped: {error}".encode()[:_VERDICT_BYTES]
        await stream.send_all(verdict.ljust(_VERDICT_BYTES, b"\0"))
        answer = (await receive_exactly(stream, _VERDICT_BYTES)).rstrip(b"\0")
        # A verdict other than these two words is the reason of a refusal; that of this side counts first.
        for word in (verdict, answer):
            if word not in (_READS, _MAPS):
                connection.close()
                os.close(bell)
                return word.decode(errors="replace")
        assert peer_segment is not None, "mapped, as the verdict is no refusal"
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

    def _can_read_peer(self, pid: int, uid: int, address: int, nonce: bytes) -> bool:
        """Whether the nonce that a process has sent can be read from its memory, at `address`."""
        seen = bytearray(len(nonce))
        if not self._reads or uid != os.getuid() or pid <= 0:
            return False
        with suppress(OSError, AttributeError):
            read_memory(pid, address, seen)
        return seen == nonce


def _close_peer(result: Peer | str) -> None:
    """Close the socket and the bell of an unwanted peer."""
    if isinstance(result, Peer):
        result.socket.close()
        os.close(result.bell)


def _ring_of_reader(segment: Segment, reader: int) -> memoryview:
    """Return the ring of the messages to process `reader`.

    A segment begins with one ring for each process of the world, by index.
    """
    start = reader * RING_BYTES
    return segment.view[start : start + RING_BYTES]


def ring_bytes(members: int) -> int:
    """Return the length of all rings at the start of a segment, in a world of `members` processes."""
    return RING_BYTES * members


async def _receive_card(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return the card of another process's memory, and the descriptors of its segment and bell; the caller closes them.

    Raise `HandshakeError` if the other process has hung up, or has not sent all.
    """
    await trio.lowlevel.wait_readable(connection)
    card, descriptors, _, _ = socket.recv_fds(connection, _CARD.size, 2, socket.MSG_CMSG_CLOEXEC)
    if len(card) != _CARD.size or len(descriptors) != 2:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ended_connection_error()
    return card, descriptors
