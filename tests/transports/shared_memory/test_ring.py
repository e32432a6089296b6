"""Rings of packets: what is written is read, in order and whole, and nonsense is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transports.shared_memory.ring import RING_BYTES, InRing, OutRing

from transports.matching import ProtocolError
from transports.shared_memory import ring

# The last words of the head of a ring, and the first of its packets.
_WRITTEN, _READ, _FIRST_LENGTH = 0, 8, 32


def ends() -> tuple[OutRing, InRing, memoryview]:
    memory = memoryview(bytearray(RING_BYTES))
    return OutRing(memory), InRing(memory), memory.cast("Q")


def packet(number: int, nbytes: int) -> bytes:
    return (np.arange(nbytes) + number).astype(np.uint8).tobytes()


@given(st.lists(st.tuples(st.integers(1, 100_000), st.integers(0, 40), st.booleans()), max_size=300))
def test_packets_come_as_they_left(steps: list[tuple[int, int, bool]]) -> None:
    writer, reader, _ = ends()
    left, come = list[bytes](), 0
    for number, (nbytes, head, reads) in enumerate(steps):
        whole = packet(number, nbytes)
        if writer.write(whole[:head], memoryview(whole)[head:]):
            left.append(whole)
        else:
            assert sum(map(len, left[come:])) + nbytes > RING_BYTES // 2
        while reads and (found := reader.peek()) is not None:
            assert found == left[come]
            reader.drop()
            come += 1
        assert reader.waits == (come < len(left))
    while (found := reader.peek()) is not None:
        assert found == left[come]
        reader.drop()
        come += 1
    assert come == len(left)


def test_a_full_ring_takes_nothing_until_a_packet_is_dropped() -> None:
    writer, reader, _ = ends()
    number = 0
    while writer.write(packet(number, 5000)):
        number += 1
    assert not writer.write(b"x" * 5000)
    assert not writer.drained
    writer.say_full(True)
    assert reader.peek() == packet(0, 5000)
    reader.drop()
    assert reader.wanted
    assert writer.drained
    assert writer.write(packet(number, 5000))
    writer.say_full(False)
    for expected in range(1, number + 1):
        assert reader.peek() == packet(expected, 5000)
        reader.drop()
        assert not reader.wanted
    assert reader.peek() is None


def test_a_writer_that_begins_to_wait_as_room_is_made_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has looked before the room could be seen; so the reader looks whether it waits after that can be seen."""
    writer, reader, words = ends()
    assert writer.write(b"packet")
    reader.peek()

    def meanwhile() -> None:
        assert words[_READ] == 16
        writer.say_full(True)

    reader.drop()
    monkeypatch.setattr(ring, "fence", meanwhile)
    assert reader.wanted


def test_order_is_kept_where_the_processor_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packet is there before it is counted, read after that, and read to its end before its room is given back."""
    writer, reader, words = ends()
    seen: list[tuple[int, int, int]] = []
    monkeypatch.setattr(ring, "FENCED", False)
    monkeypatch.setattr(ring, "keep_order", lambda: seen.append((words[_WRITTEN], words[_READ], words[_FIRST_LENGTH])))
    assert writer.write(b"packet")
    assert reader.peek() == b"packet"
    reader.drop()
    assert seen == [(0, 0, 6), (16, 0, 6), (16, 0, 6)]
    assert reader.peek() is None


@pytest.mark.parametrize(
    ("written", "length"), [(16, 100), (8, 8), (1 << 40, 8), (16, 1 << 40), (16, (1 << 64) - 1), (7, 1)]
)
def test_nonsense_is_refused(written: int, length: int) -> None:
    _, reader, words = ends()
    words[_WRITTEN], words[_FIRST_LENGTH] = written, length
    with pytest.raises(ProtocolError, match="a packet of"):
        reader.peek()
