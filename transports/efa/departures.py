"""Departures: the frames that leave for one other process, from its matching engine and from dead rails."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeAlias

from transports.buffers import BounceBuffers
from transports.frame import LIMITS, LOCAL_CHUNK_BYTES, UNCHECKED, checksum, pack
from transports.matching import Chunk, Limits, MessageKind, Send
from transports.matching.ends import ENDED, FLOWING
from transports.matching.outgoing import Outgoing

_CHUNK, _PUSHED_CHUNK = map(int, (MessageKind.CHUNK, MessageKind.PUSHED_CHUNK))  # asking an enumeration takes 0.2 us

#: A frame that a rail keeps until it has arrived: a small frame, a chunk (see `Departures.entry_to_keep`), or None for
#: a frame that need not be repeated.
Entry: TypeAlias = "bytes | Chunk | None"


def single_rail_limits(*, inside: bool, confirmed: bool) -> Limits:
    """Return the limits of a link with a single connection, on which all messages arrive in order.

    Args:
        inside: Whether both processes live on one host.
        confirmed: Whether receivers confirm long messages. That is needed if the connection may end before a process,
            because then messages are repeated over the next connection.
    """
    chunk_bytes = LOCAL_CHUNK_BYTES if inside else LIMITS.chunk_bytes
    return replace(LIMITS, ordered=True, chunk_bytes=chunk_bytes, confirmed=confirmed)


class Departures:
    """The frames that wait to leave for one other process, on any of its rails. Repeated frames leave first.

    Args:
        outgoing: Queues of the matching engine, from which new frames are made.
        limits: The limits that both processes have agreed on.
        memory: Pool of buffers for copies of chunks that may have to be repeated.

    Attributes:
        checksums: Whether payloads get a checksum.
    """

    def __init__(self, outgoing: Outgoing, limits: Limits, memory: BounceBuffers) -> None:
        self.checksums: bool = True
        self._limits, self._memory = limits, memory
        self._outgoing = outgoing
        self._frames: deque[bytes] = deque()
        self._chunks: deque[Chunk] = deque()
        self._queues = (self._frames, self._chunks, *outgoing.queues)

    @property
    def due(self) -> bool:
        """Whether any frame or chunk could leave now."""
        return any(self._queues)

    @property
    def due_bytes(self) -> int:
        """Bytes of long messages that could leave now. Cost: O(messages)."""
        return sum(chunk.nbytes for chunk in self._chunks) + self._outgoing.due_bytes

    def reserve_immediate_send(self, send: Send) -> bool:
        """Reserve a number and credit for a message that leaves at once as one chunk; False if it must queue."""
        return not any(self._queues) and self._outgoing.reserve_immediate_send(send)

    def next_frame(self) -> bytes | None:
        """Return the next small frame; None if none is due."""
        if self._frames:
            return self._frames.popleft()
        message = self._outgoing.next_message()
        if message is None:
            return None
        kind, fields, payload = message
        return pack(kind, *fields) if payload is None else b"".join((self.pack_header(payload, kind, *fields), payload))

    def pack_header(self, payload: memoryview, kind: int, *fields: int) -> bytes:
        """Return the header of a frame with a payload, with its checksum unless `checksums` is off.

        Args:
            payload: Bytes that follow the header.
            kind: Kind of the frame, a `MessageKind`.
            fields: The fields of this kind, see `MessageKind`.
        """
        payload_checksum = checksum(payload) if self.checksums else UNCHECKED
        return pack(kind, *fields, payload_bytes=payload.nbytes, payload_checksum=payload_checksum)

    def pack_chunk_header(self, chunk: Chunk, piece: memoryview) -> bytes:
        """Return the header of a chunk. For a pushed message, the header announces the message as well.

        Args:
            chunk: The chunk.
            piece: Bytes of the chunk, in the sender's memory or in the rail's staging buffer.
        """
        send = chunk.send
        if send.pushed:
            fields = (send.number, *send.lane, send.nbytes, send.place, chunk.offset)
            return self.pack_header(piece, _PUSHED_CHUNK, *fields)
        return self.pack_header(piece, _CHUNK, send.number, chunk.offset)

    def next_chunk(self) -> Chunk | None:
        """Return the next chunk; None if none is due."""
        while self._chunks:
            chunk = self._chunks.popleft()
            if chunk.send.progress is not ENDED:
                return chunk
        return self._outgoing.next_chunk()

    def count_written_chunk(self, chunk: Chunk) -> None:
        """Count a chunk that the system has taken; the last chunk of an unconfirmed send ends the send."""
        if chunk.offset + chunk.nbytes == chunk.send.nbytes and not self._limits.confirms(chunk.send.nbytes):
            self._outgoing.end_departed_send(chunk.send)

    def entry_to_keep(self, chunk: Chunk) -> Chunk:
        """Return what a rail keeps of a chunk that it has written, to repeat it if it does not arrive.

        If the receiver confirms the send, that is the chunk itself: its bytes stay in the sender's memory. Otherwise
        the send ends before the bytes have arrived, so it is a copy, whose buffer `release_entry` releases.
        """
        send, nbytes = chunk.send, chunk.nbytes
        if self._limits.confirms(send.nbytes):
            return chunk
        buffer = self._memory.take(nbytes)
        buffer[:nbytes] = chunk.view
        copy = Send(send.lane, buffer[:nbytes], send.priority)
        copy.number, copy.place, copy.pushed, copy.progress = send.number, send.place, send.pushed, FLOWING
        copy.done = lambda _: self._memory.release(buffer)
        return Chunk(copy, chunk.offset, nbytes)

    def release_entry(self, entry: Entry) -> None:
        """Release the copied bytes of an entry, because its frame has arrived; nothing if the entry has no copy."""
        if isinstance(entry, Chunk) and not self._limits.confirms(entry.send.nbytes):
            entry.send.end()

    def queue_frame(self, frame: bytes) -> None:
        """Queue a frame that could not be written at once."""
        self._frames.append(frame)

    def requeue_lost_frames(self, entries: Iterable[Entry]) -> int:
        """Queue the lost frames of a dead rail before all others, to send them again; return their length in bytes.

        Chunks of sends that have ended are dropped, and so are entries that need no repetition (None).
        """
        lost = list(entries)
        chunks = [entry for entry in lost if isinstance(entry, Chunk) and entry.send.progress is not ENDED]
        frames = [entry for entry in lost if isinstance(entry, bytes)]
        self._chunks.extendleft(reversed(chunks))
        self._frames.extendleft(reversed(frames))
        return sum(chunk.nbytes for chunk in chunks) + sum(map(len, frames))

    def clear(self) -> None:
        """Drop the queued frames and chunks; messages of the matching engine stay."""
        self._frames.clear()
        self._chunks.clear()
