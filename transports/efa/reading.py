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


class ReadBuffer:
    """Received bytes of one rail, until their frames have been handled.

    Args:
        engine: Matches the messages.
        handle_frame: Called with the kind and the fields of each frame that has no payload, or a text as payload; the
            text is then the last field.
        staged: Whether chunks are received in a buffer of the rail, and copied to their memory when complete.

    Attributes:
        arrived_frames: Number of complete frames that have arrived.
        within_chunk: Whether a chunk has arrived in part.
        has_unhandled_frames: Whether complete frames may wait; `handle_frames` must handle them before the next read.
        stopped: Whether frames are ignored, because the rail is dead: the other side has the number of frames that had
            arrived, and sends all later ones again.
    """

    def __init__(self, engine: Engine, handle_frame: Callable[[int, list[Any]], None], *, staged: bool) -> None:
        self.arrived_frames: int = 0
        self.within_chunk: bool = False
        self.has_unhandled_frames: bool = False
        self.stopped: bool = False
        self._engine, self._handle_frame = engine, handle_frame
        self._staging = memoryview(bytearray(LOCAL_CHUNK_BYTES)) if staged else None
        self._buffer = bytearray(_READ_BYTES)
        self._view = memoryview(self._buffer)
        self._head = self._view[:_HEAD_BYTES]
        self._start = self._end = 0  # marks around the received bytes that have not been handled
        self._expects_chunk = False  # whether another chunk is likely to follow
        # an incomplete chunk: the memory into which it is read, the number of bytes there, and (number of its message,
        # offset, memory of the message, checksum)
        self._target, self._done_bytes, self._chunk = _NOTHING, 0, _NO_CHUNK

    def read_target(self) -> memoryview:
        """Return the memory into which the next bytes must be read: of the current chunk, or for small frames."""
        if self.within_chunk:
            return self._target[self._done_bytes :]
        end = self._end
        if not end:
            return self._head if self._expects_chunk else self._view
        # Where a chunk is likely, little is read with its header: bytes in this buffer must be copied once more. At
        # least one byte of room is left.
        limit = end + (_HEAD_BYTES if self._expects_chunk else _READ_BYTES)
        return self._view[end : max(end + 1, min(limit, _READ_BYTES))]

    @property
    def least_wake_bytes(self) -> int:
        """Least number of available bytes for which the reading task should wake up.

        At least that many will arrive, because they are the rest of the current chunk; between chunks it is 1.
        """
        return min(self._target.nbytes - self._done_bytes, _WORTH_WAKING_BYTES) if self.within_chunk else 1

    def handle_received(self, count: int) -> bool:
        """Handle complete frames after `count` bytes were read into the memory of `read_target`.

        Returns:
            Whether other tasks should run before `handle_frames` handles the rest.

        Raises:
            ProtocolError: A frame is invalid or damaged.
        """
        if self.within_chunk:
            self._done_bytes += count
            if self._done_bytes == self._target.nbytes:
                self._end_chunk()
            return False  # `read_target` was memory of the chunk alone, so no other frame can have arrived
        self._end += count
        return self.handle_frames()

    def handle_frames(self) -> bool:
        """Handle complete frames in the buffer; result and errors are as of `handle_received`."""
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
                self.arrived_frames += 1
                self._handle_frame(kind, fields)
            budget -= 1
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start > _READ_BYTES // 2:  # move the unhandled bytes to the start
            start, end = self._start, self._end
            self._view[: end - start] = self._view[start:end]
            self._start, self._end = 0, end - start
        # the budget is spent: more complete frames may wait
        self.has_unhandled_frames = not budget
        return self.has_unhandled_frames

    def _handle_eager(self, fields: list[int], payload: memoryview, expected: bytes) -> None:
        """Pass a small message to the engine; raise `DamageError` if its bytes do not have the expected checksum."""
        if is_damaged(payload, expected):
            raise DamageError(f"{format_message_name(*fields[1:4])} came damaged: {_MISMATCH}")
        if payload.nbytes > _HEAD_BYTES:
            self._expects_chunk = False
        self.arrived_frames += 1
        if self._engine.gone is None:
            self._engine.incoming.handle_eager(fields, payload)

    def _begin_chunk(self, kind: int, fields: list[int], nbytes: int, expected: bytes, ready: memoryview) -> None:
        """Copy the first bytes of a chunk, which arrived with its header, to the chunk's memory.

        `read_target` then returns the rest of that memory, so that later bytes need no copy. The first field is the
        number of the message, the last one the offset of the chunk; `expected` is the checksum of all its bytes.
        """
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
        """Check a complete chunk, copy it from the staging buffer if there is one, and count it for its message."""
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
        self.arrived_frames += 1
        self._engine.incoming.count_chunk(number, offset, nbytes)


def format_message_name(src: int, dst: int, tag: int) -> str:
    """Return the name of a message from `src` to `dst` with a tag, for people; it ends in a comma."""
    return f"the message from rank {src} to rank {dst}, tag {tag},"
