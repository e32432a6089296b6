"""Reading of frames from a rail: small frames are handled, chunks are read into the memory of their messages.

A plain state machine: a reader asks for room, puts bytes there, and reports their number. So any task may read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transports.frame import EAGER_BYTES, HEADER_LIMIT_BYTES, LOCAL_CHUNK_BYTES, DamageError, is_damaged, parse
from transports.matching import Engine, MessageKind

# Room for two of the longest small frames, so that an incomplete frame never fills it.
_READ_BYTES = 2 * (HEADER_LIMIT_BYTES + EAGER_BYTES)
# Another chunk probably follows a chunk: read its header and few of its bytes, which must be copied once more.
_HEAD_BYTES = 256
# Small frames that are handled before other tasks may run: about 2 ms.
_FRAMES_AT_ONCE = 256
# Within a chunk, waking up for every segment costs a tenth of the speed (64 MiB both ways over loopback TCP).
_WORTH_WAKING_BYTES = 128 << 10

# enumerations compare slowly
_EAGER, _CHUNK, _PUSHED_CHUNK = map(int, (MessageKind.EAGER, MessageKind.CHUNK, MessageKind.PUSHED_CHUNK))
_TEXTS = frozenset(map(int, (MessageKind.REFUSE, MessageKind.SIGNATURE)))  # kinds whose payload is a text

_NOTHING = memoryview(b"")
_NO_CHUNK = (0, 0, _NOTHING, b"")

_MISMATCH = "the bytes do not match their checksum"


class Reading:
    """The received bytes of one rail whose frames have not been handled.

    Args:
        engine: Matches the messages.
        handle_frame: Handles a frame without payload, or with a text, which is the last of its fields.
        staged: Whether chunks pass through a buffer of the rail.

    Attributes:
        arrived: Number of complete frames.
        within_chunk: Whether a chunk has arrived in part.
        behind: Whether complete frames wait; they must be handled before the next read.
        stopped: No more frames are handled: the rail is dead, its count of frames has been reported, and other rails
            repeat the rest.
    """

    within_chunk: bool
    behind: bool
    stopped: bool

    def __init__(self, engine: Engine, handle_frame: Callable[[int, list[Any]], None], *, staged: bool) -> None:
        self.arrived: int = 0
        self.within_chunk = self.behind = self.stopped = False
        self._engine, self._handle_frame = engine, handle_frame
        self._staging = memoryview(bytearray(LOCAL_CHUNK_BYTES)) if staged else None
        self._buffer = bytearray(_READ_BYTES)
        self._view = memoryview(self._buffer)
        self._head = self._view[:_HEAD_BYTES]
        self._start = self._end = 0  # marks around the received bytes that have not been handled
        self._expects_chunk = False  # whether another chunk is likely to follow
        # an incomplete chunk: target memory, bytes so far, and its number, offset, memory and checksum
        self._target, self._done_bytes, self._chunk = _NOTHING, 0, _NO_CHUNK

    def room(self) -> memoryview:
        """Return the memory for the next bytes: of the current chunk, or of the buffer for small frames."""
        if self.within_chunk:
            return self._target[self._done_bytes :]
        end = self._end
        if not end:
            return self._head if self._expects_chunk else self._view
        limit = end + (_HEAD_BYTES if self._expects_chunk else _READ_BYTES)
        return self._view[end : max(end + 1, min(limit, _READ_BYTES))]

    @property
    def hint_bytes(self) -> int:
        """Least number of bytes for which the reader should wake up; at least that many will arrive."""
        return min(self._target.nbytes - self._done_bytes, _WORTH_WAKING_BYTES) if self.within_chunk else 1

    def handle_received(self, count: int) -> bool:
        """Handle complete frames after `count` bytes were read into the room.

        Returns:
            Whether other tasks should run before `handle_frames` handles the rest.

        Raises:
            ProtocolError: A frame is invalid or damaged.
        """
        if self.within_chunk:
            self._done_bytes += count
            if self._done_bytes == self._target.nbytes:
                self._end_chunk()
            return False  # the bytes behind the header of the chunk were part of it
        self._end += count
        return self.handle_frames()

    def handle_frames(self) -> bool:
        """Handle complete frames; result and errors as of `handle_received`."""
        budget, buffer = _FRAMES_AT_ONCE, self._buffer
        while budget and self._start < self._end and not self.stopped:
            frame = parse(buffer, self._start, self._end)
            if frame is None:
                break
            kind, fields, payload_at, payload_bytes, payload_checksum = frame
            after = payload_at + payload_bytes
            if kind in (_CHUNK, _PUSHED_CHUNK):
                self._start = ready = min(after, self._end)
                self._begin_chunk(kind, fields, payload_bytes, payload_checksum, self._view[payload_at:ready])
                continue
            if after > self._end:
                break
            self._start = after
            if kind == _EAGER:
                self._handle_eager(fields, self._view[payload_at:after], payload_checksum)
            else:
                if kind in _TEXTS:
                    if is_damaged(text := self._view[payload_at:after], payload_checksum):
                        raise DamageError(f"the text of a frame came damaged: {_MISMATCH}")
                    fields.append(bytes(text))  # type: ignore[arg-type]  # the last field
                self.arrived += 1
                self._handle_frame(kind, fields)
            budget -= 1
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start > _READ_BYTES // 2:  # move the unhandled bytes to the start
            start, end = self._start, self._end
            self._view[: end - start] = self._view[start:end]
            self._start, self._end = 0, end - start
        self.behind = not budget
        return self.behind

    def _handle_eager(self, fields: list[int], payload: memoryview, expected: bytes) -> None:
        """Check the bytes of a small message, and pass it on; `DamageError` if they are damaged."""
        if is_damaged(payload, expected):
            raise DamageError(f"{format_message_name(*fields[1:4])} came damaged: {_MISMATCH}")
        if payload.nbytes > _HEAD_BYTES:
            self._expects_chunk = False
        self.arrived += 1
        if self._engine.gone is None:
            self._engine.incoming.handle_eager(fields, payload)

    def _begin_chunk(self, kind: int, fields: list[int], nbytes: int, expected: bytes, ready: memoryview) -> None:
        """Copy the already received bytes of a chunk to its memory; the others are read straight into it."""
        incoming, offset = self._engine.incoming, fields[-1]
        if kind == _PUSHED_CHUNK and self._engine.gone is None:
            memory = incoming.pushed_chunk_memory(nbytes, *fields)
        else:
            memory = incoming.chunk_memory(fields[0], offset, nbytes)
        self._chunk = fields[0], offset, memory, expected
        self._target = target = memory if self._staging is None else self._staging[:nbytes]
        self._done_bytes = done = ready.nbytes
        target[:done] = ready
        self._expects_chunk = self.within_chunk = True
        if done == nbytes:
            self._end_chunk()

    def _end_chunk(self) -> None:
        """Check a complete chunk, copy it from the staging buffer if there is one, and count it."""
        if self.stopped:
            return
        (number, offset, memory, expected), target = self._chunk, self._target
        nbytes = target.nbytes
        self.within_chunk = False
        self._chunk, self._target = _NO_CHUNK, _NOTHING  # the owner may resize the memory from here on
        if is_damaged(target, expected):
            receive = self._engine.incoming.filling.get(number)
            name = f"message {number}" if receive is None else format_message_name(*receive.lane)
            piece = f"bytes {offset} to {offset + nbytes} of {name}"
            raise DamageError(f"{piece} came damaged: {_MISMATCH}")
        if self._staging is not None:
            memory[:] = target
        del memory, target
        self.arrived += 1
        self._engine.incoming.count_chunk(number, offset, nbytes)


def format_message_name(src: int, dst: int, tag: int) -> str:
    """Return the name of a message, for people."""
    return f"the message from rank {src} to rank {dst}, tag {tag},"
