"""What is read from a rail means the same however it comes in pieces, and whoever reads it."""

from __future__ import annotations

import random

import pytest

from transports.efa.reading import Reading
from transports.frame import CHUNK_BYTES, EAGER_BYTES, FrameError, checksum, pack
from transports.matching import MessageKind

LONG_BYTES = CHUNK_BYTES + 1000


class Destinations:
    """An engine with one long message, and what has happened."""

    gone = None

    def __init__(self, *, staged: bool = False) -> None:
        self.incoming, self.filling = self, dict[int, object]()
        self.memory = bytearray(LONG_BYTES)
        self.events: list[tuple[object, ...]] = []
        self.reading = Reading(self, self._take, staged=staged)  # type: ignore[arg-type]

    def _take(self, kind: int, fields: list[int]) -> None:
        self.events.append((MessageKind(kind), *fields, self.reading.arrived))

    def handle_eager(self, fields: list[int], payload: memoryview) -> None:
        self.events.append((MessageKind.EAGER, *fields, bytes(payload), self.reading.arrived))

    def chunk_memory(self, number: int, offset: int, nbytes: int) -> memoryview:
        return memoryview(self.memory)[offset : offset + nbytes]

    def pushed_chunk_memory(self, nbytes: int, *fields: int) -> memoryview:
        self.events.append((MessageKind.PUSHED_CHUNK, *fields, self.reading.arrived + 1))
        return self.chunk_memory(fields[0], fields[-1], nbytes)

    def count_chunk(self, number: int, offset: int, nbytes: int) -> None:
        piece = bytes(self.memory[offset : offset + nbytes])
        self.events.append(("filled", number, offset, piece, self.reading.arrived))

    def feed(self, data: bytes, most_bytes: random.Random | None = None) -> None:
        """Give it all of something, in pieces of random lengths or as large as there is room."""
        at = 0
        while at < len(data):
            room = self.reading.room()
            assert room.nbytes
            count = min(room.nbytes, len(data) - at)
            if most_bytes is not None:
                count = min(count, most_bytes.choice((1, 7, 40, 300, 70_000)))
            room[:count] = data[at : at + count]
            del room
            at += count
            behind = self.reading.handle_received(count)
            while behind:
                behind = self.reading.handle_frames()


def eager(number: int, payload: bytes) -> bytes:
    return (
        pack(MessageKind.EAGER, number, 1, 0, 5, 0, payload_bytes=len(payload), payload_checksum=checksum(payload))
        + payload
    )


def chunk(offset: int, payload: bytes) -> bytes:
    return pack(MessageKind.CHUNK, 2, offset, payload_bytes=len(payload), payload_checksum=checksum(payload)) + payload


def pushed(payload: bytes) -> bytes:
    """Return a message that comes with its announcement."""
    nbytes, said = len(payload), checksum(payload)
    return (
        pack(MessageKind.PUSHED_CHUNK, 9, 1, 0, 6, nbytes, 0, 0, payload_bytes=nbytes, payload_checksum=said) + payload
    )


def conversation() -> tuple[bytes, bytes]:
    """Return frames of all lengths, and the long message among them, the beginning of which is sent once more."""
    source = random.Random(1)
    message = source.randbytes(LONG_BYTES)
    frames = [
        eager(0, b"small"),
        eager(1, source.randbytes(EAGER_BYTES)),
        pack(MessageKind.PUSH, 2, 1, 0, 6, LONG_BYTES, 0),
    ]
    frames += [chunk(0, message[:CHUNK_BYTES]), eager(3, b""), chunk(CHUNK_BYTES, message[CHUNK_BYTES:])]
    frames += [eager(4, source.randbytes(EAGER_BYTES)), *(eager(5 + i, b"x") for i in range(600))]
    frames += [pushed(message[:70_000]), pushed(message[:100])]
    return b"".join(frames), message


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_however_it_comes_in_pieces(seed: int, staged: bool) -> None:
    data, message = conversation()
    whole, pieces = Destinations(), Destinations(staged=staged)
    whole.feed(data)
    pieces.feed(data, random.Random(seed))
    assert whole.memory == pieces.memory == message
    assert whole.events == pieces.events
    kinds = [event[0] for event in whole.events]
    assert kinds[:7] == [
        *[MessageKind.EAGER] * 2,
        MessageKind.PUSH,
        "filled",
        MessageKind.EAGER,
        "filled",
        MessageKind.EAGER,
    ]
    assert kinds[-4:] == [MessageKind.PUSHED_CHUNK, "filled", MessageKind.PUSHED_CHUNK, "filled"]
    assert [event[-1] for event in whole.events] == [*range(1, 608), 608, 608, 609, 609]


def test_many_small_frames_are_not_acted_on_all_at_once() -> None:
    places = Destinations()
    data = b"".join(eager(number, b"") for number in range(600))
    places.reading.room()[: len(data)] = data
    assert places.reading.handle_received(len(data))
    assert places.reading.behind
    acted = len(places.events)
    assert 0 < acted < 600
    assert places.reading.handle_frames()
    assert not places.reading.handle_frames()
    assert not places.reading.behind
    assert len(places.events) == 600


def test_after_a_chunk_little_more_than_the_next_header_is_read_until_something_longer_comes_at_once() -> None:
    """What is read beside the header of a chunk is copied once more."""
    places = Destinations()
    everything = places.reading.room().nbytes
    places.feed(chunk(0, bytes(CHUNK_BYTES)))
    assert places.reading.room().nbytes < 1000
    places.feed(eager(3, b"small"))
    assert places.reading.room().nbytes < 1000
    places.feed(eager(4, bytes(EAGER_BYTES)))
    assert places.reading.room().nbytes == everything


@pytest.mark.parametrize(("frame", "number"), [(chunk(0, bytes(CHUNK_BYTES)), 2), (pushed(bytes(CHUNK_BYTES)), 9)])
def test_a_chunk_that_came_damaged_is_named(frame: bytes, number: int) -> None:
    places, damaged = Destinations(), bytearray(frame)
    damaged[-1] ^= 1
    with pytest.raises(FrameError) as caught:
        places.feed(bytes(damaged))
    assert str(caught.value) == (
        f"bytes 0 to 524288 of message {number} came damaged: the bytes do not match their checksum"
    )
