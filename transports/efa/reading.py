"""Reading of frames from a rail: small frames are acted on, chunks go to their places in memory.

A plain state machine: a reader asks for room, puts bytes there, and says how many. So any task may read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from transports.frame import (
    EAGER_BYTES,
    HEADER_LIMIT_BYTES,
    LOCAL_CHUNK_BYTES,
    FrameError,
    FrameKind,
    damaged,
    parse,
)

# Room for two of the longest small frames, so that one that has come in part never fills it.
_READ_BYTES = 2 * (HEADER_LIMIT_BYTES + EAGER_BYTES)
# After a chunk probably comes another: read its header and little of its bytes, which must be copied once more.
_HEAD_BYTES = 256
# Small frames that are acted upon before other tasks may run: about 2 ms.
_FRAMES_AT_ONCE = 256
# In the middle of a chunk, waking up for every segment costs a tenth of the speed (64 MiB both ways over loopback TCP).
_WORTH_WAKING_BYTES = 128 << 10

_EAGER, _CHUNK, _PUSH = map(int, (FrameKind.EAGER, FrameKind.CHUNK, FrameKind.PUSH))  # enumerations compare slowly

_NOTHING = memoryview(b"")
_NO_CHUNK = (0, 0, _NOTHING, b"")

_MISMATCH = "the bytes do not match their checksum"


class Places(Protocol):
    """The destination of messages, as a reader sees it."""

    def eager(self, fields: list[int], payload: memoryview) -> None:
        """Take a small message, which must be copied."""

    def push(self, fields: list[int], nbytes: int) -> memoryview:
        """Take the announcement of a message that comes with its first chunk, and return the memory of that."""

    def place(self, number: int, offset: int, nbytes: int) -> memoryview:
        """Return the memory of a chunk."""

    def filled(self, number: int, offset: int, nbytes: int) -> None:
        """Note that a chunk is in its place."""

    def message(self, number: int) -> str:
        """Name the message that comes in chunks under a number, for people."""


class Reading:
    """The bytes that have come on one rail and have not been acted on.

    Args:
        places: The destination of messages.
        take: Acts on a frame without payload.
        staged: Whether chunks pass through a buffer of the rail.

    Attributes:
        arrived: Number of frames that have arrived whole.
        within_chunk: Whether a chunk has come in part.
        behind: Whether whole frames are there; nothing more is to be read before they have been acted on.
        stopped: Nothing more is acted on: the rail is dead, how many frames had arrived has been told, and the others
            bring the rest.
    """

    within_chunk: bool
    behind: bool
    stopped: bool

    def __init__(self, places: Places, take: Callable[[int, list[int]], None], *, staged: bool) -> None:
        self.arrived: int = 0
        self.within_chunk = self.behind = self.stopped = False
        self._places, self._take = places, take
        self._staging = memoryview(bytearray(LOCAL_CHUNK_BYTES)) if staged else None
        self._buffer = bytearray(_READ_BYTES)
        self._view = memoryview(self._buffer)
        self._head = self._view[:_HEAD_BYTES]
        self._start = self._end = 0  # bytes between these two marks have come and have not been handled
        self._chunks = False  # whether another chunk is likely to follow
        # Of a chunk that has come in part: where it is read to, how much is there; its number, offset, place, checksum.
        self._target, self._done, self._chunk = _NOTHING, 0, _NO_CHUNK

    def room(self) -> memoryview:
        """Return the memory for the next bytes."""
        if self.within_chunk:
            return self._target[self._done :]
        end = self._end
        if not end:
            return self._head if self._chunks else self._view
        most = end + (_HEAD_BYTES if self._chunks else _READ_BYTES)
        return self._view[end : max(end + 1, min(most, _READ_BYTES))]

    @property
    def hint_bytes(self) -> int:
        """Fewer bytes than this are not worth waking up for; they come for certain."""
        return min(self._target.nbytes - self._done, _WORTH_WAKING_BYTES) if self.within_chunk else 1

    def came(self, count: int) -> bool:
        """Act on frames, now that `count` bytes were put into the room.

        Returns:
            Whether other tasks should run before the rest is acted on, by `act`.

        Raises:
            ProtocolError: A frame makes no sense, or came damaged.
        """
        if self.within_chunk:
            self._done += count
            if self._done == self._target.nbytes:
                self._end_chunk()
            return False  # the bytes behind the header of the chunk were part of it
        self._end += count
        return self.act()

    def act(self) -> bool:
        """Act on whole frames; result and errors as of `came`."""
        left, buffer = _FRAMES_AT_ONCE, self._buffer
        while left and self._start < self._end and not self.stopped:
            frame = parse(buffer, self._start, self._end)
            if frame is None:
                break
            kind, fields, payload_at, payload_bytes, payload_checksum = frame
            after = payload_at + payload_bytes
            if kind == _CHUNK or (kind == _PUSH and payload_bytes):
                self._start = ready = min(after, self._end)
                self._begin_chunk(kind, fields, payload_bytes, payload_checksum, self._view[payload_at:ready])
                continue
            if after > self._end:
                break
            self._start = after
            if kind == _EAGER:
                self._eager(fields, self._view[payload_at:after], payload_checksum)
            else:
                self.arrived += 1
                self._take(kind, fields)
            left -= 1
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start > _READ_BYTES // 2:
            self._compact()
        self.behind = not left
        return self.behind

    def _compact(self) -> None:
        start, end = self._start, self._end
        self._view[: end - start] = self._view[start:end]
        self._start, self._end = 0, end - start

    def _eager(self, fields: list[int], payload: memoryview, expected: bytes) -> None:
        if damaged(payload, expected):
            raise FrameError(f"{message_of(*fields[1:])} came damaged: {_MISMATCH}")
        if payload.nbytes > _HEAD_BYTES:
            self._chunks = False
        self.arrived += 1
        self._places.eager(fields, payload)

    def _begin_chunk(self, kind: int, fields: list[int], nbytes: int, expected: bytes, ready: memoryview) -> None:
        """Put the first bytes of a chunk into place; the others are read straight to it."""
        if kind == _PUSH:
            self.arrived += 1
            offset, place = 0, self._places.push(fields, nbytes)
        else:
            offset = fields[1]
            place = self._places.place(fields[0], offset, nbytes)
        self._chunk = fields[0], offset, place, expected
        self._target = target = place if self._staging is None else self._staging[:nbytes]
        self._done = done = ready.nbytes
        target[:done] = ready
        self._chunks = self.within_chunk = True
        if done == nbytes:
            self._end_chunk()

    def _end_chunk(self) -> None:
        if self.stopped:
            return
        (number, offset, place, expected), target = self._chunk, self._target
        nbytes = target.nbytes
        self.within_chunk = False
        self._chunk, self._target = _NO_CHUNK, _NOTHING  # from here on the owner of the memory may resize it
        if damaged(target, expected):
            piece = f"bytes {offset} to {offset + nbytes} of {self._places.message(number)}"
            raise FrameError(f"{piece} came damaged: {_MISMATCH}")
        if self._staging is not None:
            place[:] = target
        del place, target
        self.arrived += 1
        self._places.filled(number, offset, nbytes)


def message_of(src: int, dst: int, tag: int) -> str:
    """Name a message, for people."""
    return f"the message from rank {src} to rank {dst}, tag {tag},"
