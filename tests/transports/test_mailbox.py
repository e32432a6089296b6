"""Mailboxes: several of them in one process, with memory between them as processes share it."""

import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.threads import run_threads, running
from transports.shared_memory.engine import RING_BYTES as RING_OF_A_PROCESS
from transports.signature import fingerprints_agree

from .mailbox_builds import COMPILER, DELAYS, build

mailbox = pytest.importorskip("transports.shared_memory._native", reason="it was not compiled")

PENDING, DONE, MISMATCH, LOST, WITHDRAWN, NO_MEMORY, CORRUPT, _, _, SIZED = range(10)
ANY_LENGTH, NO_LENGTH = 2**64 - 1, 2**64 - 2
RING_BYTES, LONG_S = 16 << 10, 60.0


class Boxes:
    """The mailboxes of some processes, each of which sends and receives arrays of bytes."""

    def __init__(self, size: int, ring_bytes: int = RING_BYTES, look_s: float = 0.0) -> None:
        self.rings = rings = {
            (i, j): memoryview(mmap(-1, ring_bytes)) for i in range(size) for j in range(size) if i != j
        }
        self.bells = bells = [memoryview(mmap(-1, 4096)) for _ in range(size)]
        self.boxes = [
            mailbox.Engine(
                bells[i], [None if j == i else (rings[i, j], rings[j, i], bells[j]) for j in range(size)], look_s
            )
            for i in range(size)
        ]

    def send(self, src: int, dst: int, data: np.ndarray[Any, Any], tag: int = 0, call: int = 1) -> Any:
        return self.boxes[src].send(dst, tag, call << 40, b"here.py:1", data.ctypes.data, data.nbytes, data)

    def receive(self, dst: int, src: int, out: np.ndarray[Any, Any], tag: int = 0, call: int = 1) -> Any:
        return self.boxes[dst].receive(src, tag, call << 40, b"there.py:2", out.ctypes.data, out.nbytes, out)

    def wait(self, index: int, op: Any, seconds: float = LONG_S) -> int:
        return int(self.boxes[index].wait(op, seconds))

    def sleepers(self, index: int) -> int:
        return int(self.bells[index].cast("I")[1])


@pytest.fixture
def pair() -> Iterator[Boxes]:
    boxes = Boxes(2)
    yield boxes
    for box in boxes.boxes:
        box.close()


def sleeping(boxes: Boxes, index: int, op: Any) -> threading.Thread:
    """Return a thread that sleeps in its wait for `op`."""
    thread = threading.Thread(target=boxes.wait, args=[index, op])
    thread.start()
    while boxes.sleepers(index) == 0:
        thread.join(0.001)
    return thread


def some(nbytes: int, seed: int = 1) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, RING_BYTES - 384, RING_BYTES, 10 * RING_BYTES + 7])
@pytest.mark.parametrize("first", ["send", "receive"])
def test_a_message_arrives_whole(pair: Boxes, nbytes: int, first: str) -> None:
    data, out = some(nbytes), np.zeros(nbytes, np.uint8)
    if first == "send":
        sent, got = pair.send(0, 1, data), pair.receive(1, 0, out)
    else:
        got, sent = pair.receive(1, 0, out), pair.send(0, 1, data)
    assert pair.wait(1, got) == DONE
    assert pair.wait(0, sent) == DONE
    assert np.array_equal(data, out)
    assert got.source == 0


def test_what_fits_into_the_ring_needs_no_receiver(pair: Boxes) -> None:
    assert pair.send(0, 1, some(1000)).state == DONE


def test_a_message_of_1_mib_fits_into_the_ring_of_a_process() -> None:
    boxes, data, out = Boxes(2, RING_OF_A_PROCESS), some(1 << 20), np.zeros(1 << 20, np.uint8)
    assert boxes.wait(0, boxes.send(0, 1, data)) == DONE
    assert boxes.wait(1, boxes.receive(1, 0, out)) == DONE
    assert np.array_equal(data, out)
    for box in boxes.boxes:
        box.close()


def test_a_long_message_waits_for_its_receiver_and_goes_on_without_a_thread_that_waits(pair: Boxes) -> None:
    data, out = some(5 * RING_BYTES), np.zeros(5 * RING_BYTES, np.uint8)
    sent = pair.send(0, 1, data)
    assert sent.state == PENDING
    got = pair.receive(1, 0, out)
    assert pair.wait(0, sent) == DONE  # nobody waits for `got`
    assert pair.wait(1, got) == DONE
    assert np.array_equal(data, out)


def test_two_that_send_long_messages_to_each_other_first_do_not_block_each_other(pair: Boxes) -> None:
    data = [some(5 * RING_BYTES, seed) for seed in (1, 2)]
    outs = [np.zeros(5 * RING_BYTES, np.uint8) for _ in range(2)]
    got = [pair.receive(i, 1 - i, outs[i]) for i in range(2)]
    sent = [pair.send(i, 1 - i, data[i]) for i in range(2)]
    assert [pair.wait(i, sent[i]) for i in range(2)] == [DONE, DONE]
    assert [pair.wait(i, got[i]) for i in range(2)] == [DONE, DONE]
    assert np.array_equal(outs[0], data[1])
    assert np.array_equal(outs[1], data[0])


def test_messages_of_one_tag_stay_in_order_and_other_tags_pass_them(pair: Boxes) -> None:
    for number, tag in enumerate([7, 7, 8, 7]):
        pair.send(0, 1, np.full(4, number, np.uint8), tag)
    outs = [np.zeros(4, np.uint8) for _ in range(4)]
    got = [pair.receive(1, 0, out, tag) for out, tag in zip(outs, [8, 7, 7, 7], strict=True)]
    assert [pair.wait(1, op) for op in got] == [DONE] * 4
    assert [int(out[0]) for out in outs] == [2, 0, 1, 3]


def test_a_long_message_that_stands_in_the_way_is_put_aside_and_found_later(pair: Boxes) -> None:
    aside, small = some(5 * RING_BYTES), np.full(4, 9, np.uint8)
    sent = [pair.send(0, 1, aside, 1), pair.send(0, 1, small, 2)]
    out, later = np.zeros(4, np.uint8), np.zeros(5 * RING_BYTES, np.uint8)
    got = pair.receive(1, 0, out, 2)
    asked = pair.receive(1, 0, later, 1)  # amid its coming, or after
    assert [pair.wait(1, got), pair.wait(1, asked)] == [DONE, DONE]
    assert [pair.wait(0, op) for op in sent] == [DONE, DONE]
    assert np.array_equal(later, aside)
    assert np.array_equal(out, small)


@pytest.mark.parametrize("put_aside", [False, True])
@pytest.mark.parametrize(("nbytes", "call"), [(8, 1), (4, 3), (9 * RING_BYTES, 1)])
def test_a_receive_of_something_else_fails_and_the_next_message_is_found(
    pair: Boxes, nbytes: int, call: int, put_aside: bool
) -> None:
    sent = [pair.send(0, 1, some(nbytes), 1, call), pair.send(0, 1, np.full(4, 5, np.uint8), 1)]
    after = pair.send(0, 1, np.full(1, 6, np.uint8), 2)
    if put_aside:
        assert pair.wait(1, pair.receive(1, 0, np.zeros(1, np.uint8), 2)) == DONE
    got = pair.receive(1, 0, np.zeros(4, np.uint8), 1)
    assert pair.wait(1, got) == MISMATCH
    assert (got.theirs, got.source) == ((call << 40, b"here.py:1", nbytes), 0)
    out = np.zeros(4, np.uint8)
    assert pair.wait(1, pair.receive(1, 0, out, 1)) == DONE
    assert out.tolist() == [5] * 4
    offered = nbytes > RING_BYTES  # its sender waits, and gets the receiver's signature
    assert [pair.wait(0, op) for op in [*sent, after]] == [MISMATCH if offered else DONE, DONE, DONE]
    assert not offered or sent[0].theirs == (1 << 40, b"there.py:2", 4)


def test_the_rest_of_a_message_that_nobody_takes_goes_on_without_its_receiver(pair: Boxes) -> None:
    got = pair.receive(1, 0, np.zeros(4, np.uint8))
    thread = sleeping(pair, 1, got)
    sent = pair.send(0, 1, some(5 * RING_BYTES))
    thread.join()
    assert got.state == MISMATCH
    assert pair.wait(0, sent, 5) == MISMATCH


def test_a_receive_takes_what_has_come_before_it_while_another_thread_sleeps() -> None:
    boxes = Boxes(3)
    early, data = boxes.send(1, 2, some(5 * RING_BYTES)), np.ones(4, np.uint8)
    awaited = boxes.receive(2, 0, np.zeros(4, np.uint8))
    thread = sleeping(boxes, 2, awaited)
    got = boxes.receive(2, 1, np.zeros(5 * RING_BYTES, np.uint8))
    assert boxes.wait(1, early, 5) == DONE
    boxes.send(0, 2, data)
    thread.join()
    assert (awaited.state, got.state) == (DONE, DONE)


def test_a_receive_from_anybody_takes_from_each_sender_in_turn() -> None:
    boxes = Boxes(3)
    for _ in range(50):
        boxes.send(0, 2, np.zeros(4, np.uint8))
        boxes.send(1, 2, np.ones(4, np.uint8))
    sources = []
    for _ in range(100):
        out = np.full(4, 9, np.uint8)
        got = boxes.receive(2, -1, out)
        assert boxes.wait(2, got) == DONE
        assert int(out[0]) == got.source
        sources.append(got.source)
    assert sorted(sources) == [0] * 50 + [1] * 50
    assert {0, 1} <= set(sources[:10])  # neither starves the other


def test_a_receive_that_is_withdrawn_takes_nothing(pair: Boxes) -> None:
    first, second = np.zeros(4, np.uint8), np.zeros(4, np.uint8)
    given_up, got = pair.receive(1, 0, first), pair.receive(1, 0, second)
    assert pair.boxes[1].withdraw(given_up) is True
    assert given_up.state == WITHDRAWN
    pair.send(0, 1, np.full(4, 3, np.uint8))
    assert pair.wait(1, got) == DONE
    assert (first.tolist(), second.tolist()) == ([0] * 4, [3] * 4)


def test_a_receive_that_is_withdrawn_amid_its_message_leaves_the_others_in_order(pair: Boxes) -> None:
    pair.boxes[0].close()  # no thread of its own sends on
    sent = [pair.send(0, 1, np.full(5 * RING_BYTES, 1, np.uint8), 1)]
    other = pair.receive(1, 0, np.zeros(4, np.uint8), 2)  # the message is put aside
    outs = [np.zeros(5 * RING_BYTES, np.uint8) for _ in range(3)]
    given_up, second = [pair.receive(1, 0, out, 1) for out in outs[:2]]
    assert pair.boxes[1].withdraw(given_up) is True
    sent += [pair.send(0, 1, np.full(5 * RING_BYTES, number, np.uint8), 1) for number in (2, 3)]
    third = pair.receive(1, 0, outs[2], 1)
    assert [pair.wait(0, op) for op in sent] == [DONE] * 3
    assert [pair.wait(1, op) for op in (second, third)] == [DONE] * 2
    assert (given_up.state, other.state) == (WITHDRAWN, PENDING)
    assert [(int(out[0]), int(out[-1])) for out in outs] == [(0, 0), (2, 2), (3, 3)]


def test_a_send_can_be_withdrawn_only_before_it_begins(pair: Boxes) -> None:
    sent = [pair.send(0, 1, some(nbytes)) for nbytes in (5 * RING_BYTES, RING_BYTES - 384, 100)]
    assert [pair.boxes[0].withdraw(op) for op in sent] == [False, False, True]
    assert [op.state for op in sent] == [PENDING, PENDING, WITHDRAWN]  # offered, half written, not begun
    outs = [np.zeros(nbytes, np.uint8) for nbytes in (5 * RING_BYTES, RING_BYTES - 384)]
    assert [pair.wait(1, pair.receive(1, 0, out)) for out in outs] == [DONE] * 2
    assert [pair.wait(0, op) for op in sent] == [DONE, DONE, WITHDRAWN]


def test_early_messages_take_bounded_memory_and_block_no_other_tag(pair: Boxes) -> None:
    count, nbytes = 400, RING_BYTES // 2
    early = [pair.send(0, 1, np.full(nbytes, number % 251, np.uint8), 1) for number in range(count)]
    wanted = pair.send(0, 1, np.full(4, 7, np.uint8), 2)
    out = np.zeros(4, np.uint8)
    assert pair.wait(1, pair.receive(1, 0, out, 2)) == DONE
    assert pair.wait(0, wanted) == DONE
    assert (out == 7).all()
    room = RING_BYTES - 256
    assert sum(op.state == DONE for op in early) <= 5 * room // nbytes  # four rings are kept, one is full
    outs = [np.zeros(nbytes, np.uint8) for _ in range(count)]
    got = [pair.receive(1, 0, each, 1) for each in outs]
    assert [pair.wait(1, op) for op in got] == [DONE] * count
    assert [pair.wait(0, op) for op in early] == [DONE] * count
    assert [(int(each[0]), int(each[-1])) for each in outs] == [(number % 251,) * 2 for number in range(count)]


def test_a_receiver_whose_own_messages_nobody_takes_can_ask_for_an_offer(pair: Boxes) -> None:
    full = [pair.send(1, 0, some(RING_BYTES // 2)) for _ in range(20)]
    assert {op.state for op in full} == {DONE, PENDING}
    data, out = some(9 * RING_BYTES), np.zeros(9 * RING_BYTES, np.uint8)
    sent, got = pair.send(0, 1, data), pair.receive(1, 0, out)
    assert [pair.wait(1, got), pair.wait(0, sent)] == [DONE, DONE]
    assert np.array_equal(out, data)


# Offsets of the counts of a ring in its memory, as `native/messages.c` lays them out.
WRITTEN, READ = 0, 64


HEAD_BYTES, TEXT_BYTES = 128, 88


def make_head(
    kind: int, tag: int, nbytes: int, fingerprint: int = 1 << 40, text: bytes = b"", length: int = -1
) -> bytes:
    """Return a head with the checksum of `native/messages.c`."""
    length = len(text) if length < 0 else length

    def packed(checksum: int) -> bytes:
        return struct.pack("<QQQQIHH88s", tag, 0, nbytes, fingerprint, checksum, kind, length, text)

    factor, sums = 0x9E3779B97F4A7C15, [1, 2, 3, 4]
    for i, word in enumerate(struct.unpack("<16Q", packed(0))):
        sums[i % 4] = (sums[i % 4] ^ word) * factor % 2**64
    mixed = sums[0]
    for other in sums[1:]:
        mixed = (mixed * factor + other) % 2**64
    return packed((mixed * factor % 2**64) >> 32)


def write_head(boxes: Boxes, head: bytes) -> None:
    """As process 0, write the first head to process 1."""
    ring = boxes.rings[0, 1]
    ring[256 : 256 + HEAD_BYTES] = head
    ring[WRITTEN : WRITTEN + 8] = HEAD_BYTES.to_bytes(8, "little")


@pytest.mark.parametrize("withdrawn", [True, False])
def test_a_receive_that_has_taken_an_offer_asks_for_it_or_refuses_it(pair: Boxes, withdrawn: bool) -> None:
    ring, full = pair.rings[1, 0], [pair.send(1, 0, some(RING_BYTES // 2)) for _ in range(2)]
    write_head(pair, make_head(2, 0, 100))
    got = pair.receive(1, 0, np.zeros(100, np.uint8))  # there is no room for its question
    assert pair.boxes[1].withdraw(got) is True if withdrawn else pair.wait(1, got, 0.0) == PENDING
    assert (got.state, full[1].state) == (PENDING, PENDING)
    ring[READ : READ + 8] = ring[WRITTEN : WRITTEN + 8]
    assert pair.wait(1, full[1]) == DONE
    assert pair.wait(1, got, LONG_S if withdrawn else 0.0) == (WITHDRAWN if withdrawn else PENDING)
    at = 256 + 2 * (HEAD_BYTES + RING_BYTES // 2) % (RING_BYTES - 256)
    tag, _, nbytes, _, _, kind = struct.unpack("<QQQQIH", ring[at : at + 38])
    assert (tag, nbytes, kind) == (0, 100, 4 if withdrawn else 3)


@pytest.mark.parametrize("nonsense", [1, 63, 65, RING_BYTES, 2**63, 2**64 - 2 * RING_BYTES])
@pytest.mark.parametrize("count", [WRITTEN, READ])
def test_a_peer_that_writes_nonsense_is_named_by_all_ends(count: int, nonsense: int) -> None:
    """Its counts, before the end of the ring: nothing behind the end is read or written."""
    boxes = Boxes(2)
    box, out = boxes.boxes[1], np.zeros(4, np.uint8)
    waiting = boxes.receive(1, 0, out)
    anybody = boxes.receive(1, -1, out, 5)
    thread = sleeping(boxes, 1, waiting)
    ring = boxes.rings[(0, 1) if count == WRITTEN else (1, 0)]
    before = boxes.send(1, 0, out)
    ring[count : count + 8] = nonsense.to_bytes(8, "little")
    # The sleeping thread may find the nonsense first: the send fails either way.
    after = boxes.send(1, 0, out) if count == READ else None
    boxes.wait(1, waiting, 0.0)
    thread.join()
    assert [op.state for op in (waiting, anybody)] == [CORRUPT] * 2
    assert [op.source for op in (waiting, anybody)] == [0, 0]
    assert before.state == DONE
    assert after is None or after.state == CORRUPT
    assert [boxes.receive(1, src, out).state for src in (0, -1)] == [CORRUPT] * 2
    assert boxes.send(1, 0, out).state == CORRUPT
    box.close()


@pytest.mark.parametrize(
    ("kind", "tag", "nbytes"),
    [(0, 0, 4), (8, 0, 4), (7, 0, 0), (1, 0, 2**62), (1, 0, RING_BYTES), (3, 0, 0), (4, 7, 0), (5, 0, 4)],
)
def test_a_head_that_can_mean_nothing_is_named_by_all_ends(pair: Boxes, kind: int, tag: int, nbytes: int) -> None:
    write_head(pair, make_head(kind, tag, nbytes))
    got = pair.receive(1, 0, np.zeros(4, np.uint8), 1)
    assert (pair.wait(1, got), got.source) == (CORRUPT, 0)


@pytest.mark.parametrize("bit", [*range(0, 8 * 40, 7), 8 * 40 + 3, 8 * HEAD_BYTES - 1])
def test_a_flipped_bit_of_a_head_is_named_by_all_ends(pair: Boxes, bit: int) -> None:
    """Also of a tag or lane: another message would be looked for, and its receive would wait for ever."""
    head = bytearray(make_head(1, 0, 4, text=b"here.py:1"))
    head[bit // 8] ^= 1 << bit % 8
    write_head(pair, bytes(head))
    got = pair.receive(1, 0, np.zeros(4, np.uint8))
    assert (pair.wait(1, got), got.source) == (CORRUPT, 0)


@pytest.mark.parametrize("length", [TEXT_BYTES + 1, 2**16 - 1])
def test_a_text_that_claims_to_be_too_long_is_not_read(pair: Boxes, length: int) -> None:
    write_head(pair, make_head(1, 0, 4, 2 << 40, b"x" * TEXT_BYTES, length))
    got = pair.receive(1, 0, np.zeros(4, np.uint8))
    assert (pair.wait(1, got), got.source) == (CORRUPT, 0)


def test_a_text_of_any_bytes_is_delivered_as_it_is(pair: Boxes) -> None:
    text = bytes(range(256 - TEXT_BYTES, 256))
    write_head(pair, make_head(1, 0, 4, 2 << 40, text))
    got = pair.receive(1, 0, np.zeros(4, np.uint8))
    assert (pair.wait(1, got), got.theirs) == (MISMATCH, (2 << 40, text, 4))


@pytest.mark.parametrize(
    ("mine", "theirs", "agree"),
    [
        (1 << 40 | 2 << 20 | 3, 1 << 40 | 2 << 20 | 3, True),
        (1 << 40 | 2 << 20 | 3, 1 << 40 | 2 << 20, True),
        (1 << 40, 1 << 40 | 2 << 20 | 3, True),
        (0, 1 << 40 | 2 << 20 | 3, True),
        (1 << 40 | 2 << 20 | 3, 1 << 40 | 2 << 20 | 4, False),
        (1 << 40 | 2 << 20 | 3, 1 << 40 | 3 << 20, False),
        (1 << 40, 2 << 40, False),
    ],
)
def test_a_part_of_a_fingerprint_is_equal_or_open(pair: Boxes, mine: int, theirs: int, agree: bool) -> None:
    out = np.zeros(4, np.uint8)
    pair.boxes[0].send(1, 0, theirs, b"", None, 4, out)
    got = pair.boxes[1].receive(0, 0, mine, b"", None, 4, out)
    assert (pair.wait(1, got) == DONE) == agree == fingerprints_agree(mine, theirs) == fingerprints_agree(theirs, mine)


@pytest.mark.parametrize("nbytes", [0, 4, RING_BYTES // 2, 5 * RING_BYTES])
@pytest.mark.parametrize("first", ["send", "receive"])
def test_a_receive_of_any_length_gets_its_memory_where_it_meets_its_message(
    pair: Boxes, nbytes: int, first: str
) -> None:
    data, memory = some(nbytes), bytearray()
    if first == "send":
        sent = pair.send(0, 1, data)
    got = pair.boxes[1].receive(0, 0, 1 << 40, b"", None, ANY_LENGTH, memory)
    after = pair.receive(1, 0, np.zeros(1, np.uint8))
    if first == "receive":
        sent = pair.send(0, 1, data)
    pair.send(0, 1, np.full(1, 5, np.uint8))
    assert pair.wait(1, got) == SIZED
    assert got.theirs == (1 << 40, b"here.py:1", nbytes)
    assert pair.wait(1, after) == DONE  # the next message is for the next receive
    out = np.zeros(nbytes, np.uint8)
    accepted = pair.boxes[1].accept(got, None, out)
    assert [pair.wait(1, accepted), pair.wait(0, sent)] == [DONE, DONE]
    assert np.array_equal(data, out)


@pytest.mark.parametrize("nbytes", [4, 5 * RING_BYTES])
def test_a_message_of_any_length_that_is_not_accepted_is_dropped(pair: Boxes, nbytes: int) -> None:
    sent = pair.send(0, 1, some(nbytes))
    got = pair.boxes[1].receive(0, 0, 0, b"", None, ANY_LENGTH, None)
    assert pair.wait(1, got) == SIZED
    assert pair.wait(1, pair.boxes[1].accept(got, None, None)) == MISMATCH
    assert pair.wait(0, sent) == (DONE if nbytes == 4 else MISMATCH)
    assert pair.wait(1, pair.boxes[1].accept(got, None, np.zeros(nbytes, np.uint8))) == LOST  # once only


def test_a_message_of_any_length_is_lost_with_its_process(pair: Boxes) -> None:
    pair.send(0, 1, some(5 * RING_BYTES))
    got = pair.boxes[1].receive(0, 0, 0, b"", None, ANY_LENGTH, None)
    assert pair.wait(1, got) == SIZED
    pair.boxes[1].lose(0)
    assert pair.wait(1, pair.boxes[1].accept(got, None, np.zeros(5 * RING_BYTES, np.uint8))) == LOST


def test_a_receive_of_any_length_compares_the_signature_first(pair: Boxes) -> None:
    sent = pair.send(0, 1, some(5 * RING_BYTES))
    got = pair.boxes[1].receive(0, 0, 2 << 40, b"any.py:3", None, ANY_LENGTH, None)
    assert pair.wait(1, got) == MISMATCH
    assert pair.wait(0, sent) == MISMATCH
    assert sent.theirs == (2 << 40, b"any.py:3", NO_LENGTH)


def test_a_look_at_a_message_returns_while_another_thread_reads_a_long_one() -> None:
    ring_bytes, within = 32 << 20, False
    boxes, out = Boxes(2, ring_bytes), np.zeros(ring_bytes - 384, np.uint8)
    other, ring = boxes.receive(1, 0, np.zeros(4, np.uint8), 9), boxes.rings[0, 1]
    for _ in range(1000):  # the thread may be done before this one gets a core
        got = boxes.receive(1, 0, out)
        thread, before = sleeping(boxes, 1, got), int.from_bytes(ring[READ : READ + 8], "little")
        boxes.send(0, 1, out)  # all of it lies in the ring
        while got.state == PENDING:
            begun = int.from_bytes(ring[READ : READ + 8], "little") > before
            boxes.wait(1, other, 0.0)
            within |= begun and got.state == PENDING
        thread.join()
        if within:
            break
    assert within


def test_the_thread_of_a_mailbox_takes_no_signals(pair: Boxes) -> None:
    def threads() -> set[str]:
        return {task.name for task in Path("/proc/self/task").iterdir()}

    pair.boxes[0].close()  # it starts no thread
    before = threads()
    pair.receive(1, 0, np.zeros(5 * RING_BYTES, np.uint8))
    assert pair.wait(0, pair.send(0, 1, some(5 * RING_BYTES))) == DONE  # by the thread of the other
    (thread,) = threads() - before
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("SigBlk")]
    mask = int(line.split()[1], 16)
    assert mask >> (signal.SIGINT - 1) & mask >> (signal.SIGUSR1 - 1) & 1


def test_what_is_sent_to_a_lost_process_ends_and_wakes_who_waits(pair: Boxes) -> None:
    sent, states = pair.send(0, 1, some(5 * RING_BYTES)), deque[int]()
    with running(threading.Thread(target=lambda: states.append(pair.wait(0, sent)))):
        pair.boxes[0].lose(1)
    assert list(states) == [LOST]


def test_a_fork_leaves_the_messages_to_its_parent(pair: Boxes) -> None:
    pair.send(0, 1, np.zeros(4, np.uint8), 9)  # starts the thread that a fork must not start
    first, out = pair.receive(1, 0, np.zeros(4, np.uint8)), np.zeros(5 * RING_BYTES, np.uint8)
    got, data = pair.receive(1, 0, out), some(5 * RING_BYTES)
    calls = [
        lambda: pair.send(0, 1, np.ones(4, np.uint8)),
        lambda: pair.receive(1, 0, np.zeros(4, np.uint8)),
        lambda: pair.boxes[0].lose(1),
        lambda: pair.boxes[0].note(1, 0, 0, 0),
    ]
    child = os.fork()
    if child == 0:
        refused = 0
        try:
            for call in calls:
                try:
                    call()
                except RuntimeError:
                    refused += 1
            refused += pair.boxes[1].withdraw(got) is True
        finally:
            os._exit(10 * refused + pair.wait(1, first, 0.0))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10 * (len(calls) + 1) + PENDING
    pair.send(0, 1, np.ones(4, np.uint8))
    assert pair.wait(1, first) == DONE
    pair.send(0, 1, data)
    assert pair.wait(1, got) == DONE
    assert np.array_equal(out, data)


def test_threads_may_send_while_others_close() -> None:
    data = some(64)
    for _ in range(300):
        boxes, begin = Boxes(2), threading.Barrier(4)

        def end(box: Any = boxes.boxes[0], begin: Any = begin) -> None:
            box.send(1, 0, 0, b"", data.ctypes.data, data.nbytes, data)
            begin.wait()
            for _ in range(3):
                box.close()
                box.send(1, 0, 0, b"", data.ctypes.data, data.nbytes, data)

        run_threads(threading.Thread(target=end) for _ in range(4))
        out = np.zeros(64, np.uint8)
        assert [boxes.wait(1, boxes.receive(1, 0, out)) for _ in range(16)] == [DONE] * 16


def test_a_wait_ends_in_time(pair: Boxes) -> None:
    assert pair.wait(1, pair.receive(1, 0, np.zeros(4, np.uint8)), 0.001) == PENDING


@pytest.mark.parametrize("look_s", [0.0, 50e-6])
def test_threads_that_wait_for_different_messages_are_each_woken(look_s: float) -> None:
    boxes = Boxes(2, look_s=look_s)
    outs = [np.zeros(4, np.uint8) for _ in range(8)]
    got = [boxes.receive(1, 0, out, tag) for tag, out in enumerate(outs)]
    states: deque[int] = deque()
    with running(*(threading.Thread(target=lambda op=op: states.append(boxes.wait(1, op))) for op in got)):
        for tag in reversed(range(8)):
            boxes.send(0, 1, np.full(4, tag + 1, np.uint8), tag)
    assert list(states) == [DONE] * 8
    assert [int(out[0]) for out in outs] == list(range(1, 9))


@pytest.mark.parametrize("nbytes", [4, 3 * RING_BYTES])
def test_thousands_may_be_under_way(pair: Boxes, nbytes: int) -> None:
    count = 5000 if nbytes < RING_BYTES else 200
    outs = [np.zeros(nbytes, np.uint8) for _ in range(count)]
    got = [pair.receive(1, 0, out) for out in outs]
    sent = [pair.send(0, 1, np.full(nbytes, number % 251, np.uint8)) for number in range(count)]
    assert {pair.wait(0, op) for op in sent} == {DONE}
    assert {pair.wait(1, op) for op in got} == {DONE}
    assert [int(out[-1]) for out in outs] == [number % 251 for number in range(count)]


def test_memory_of_messages_that_end_is_let_go(pair: Boxes) -> None:
    class Owner:
        freed = 0

        def __del__(self) -> None:
            Owner.freed += 1

    data, out = np.ones(4, np.uint8), np.zeros(4, np.uint8)
    for _ in range(10):
        pair.boxes[0].send(1, 0, 0, b"", data.ctypes.data, 4, Owner())
        op = pair.boxes[1].receive(0, 0, 0, b"", out.ctypes.data, 4, Owner())
        assert pair.wait(1, op) == DONE
    del op
    pair.wait(1, pair.receive(1, 0, out), 0.0)
    pair.send(0, 1, data)
    assert Owner.freed == 20


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="there is no gcc")
def test_the_thread_of_a_mailbox_ends_whenever_it_is_closed(tmp_path: Path) -> None:
    environment = os.environ | {"MAILBOX_BUILD": str(build(tmp_path, DELAYS))}
    command = [sys.executable, "-m", "tests.transports.mailbox_closing", "1000"]
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=LONG_S)
    assert ran.stdout == "1 more with a mailbox, 0 more at the end\n"


# Words of a process that wake it, see native/engine.h.
SLEEPERS, UNATTENDED = 1, 3


def write_bell(boxes: Boxes, index: int, word: int, value: int) -> None:
    boxes.bells[index].cast("I")[word] = value


def test_a_thread_that_sleeps_notices_a_message_though_it_is_not_counted(pair: Boxes) -> None:
    data, out = some(8), np.zeros(8, np.uint8)
    got = pair.receive(1, 0, out)
    thread = threading.Thread(target=pair.wait, args=[1, got, 1e9], daemon=True)
    thread.start()
    while pair.sleepers(1) == 0:
        thread.join(0.001)
    write_bell(pair, 1, SLEEPERS, 0)
    assert pair.send(0, 1, data).state == DONE
    thread.join(LONG_S)
    assert (thread.is_alive(), got.state) == (False, DONE)
    assert np.array_equal(data, out)
    assert pair.sleepers(1) == 0  # the next bell is right again


@pytest.mark.parametrize(("word", "value"), [(SLEEPERS, 7), (UNATTENDED, 0)])
def test_a_message_that_no_thread_waits_for_arrives_though_a_wrong_thread_is_woken(
    pair: Boxes, word: int, value: int
) -> None:
    data, out, late = some(8), np.zeros(8, np.uint8), time.monotonic() + LONG_S
    got = pair.receive(1, 0, out)
    write_bell(pair, 1, word, value)
    assert pair.send(0, 1, data).state == DONE
    while (got.state == PENDING or pair.sleepers(1)) and time.monotonic() < late:
        time.sleep(0.001)
    assert (got.state, pair.sleepers(1)) == (DONE, 0)
    assert np.array_equal(data, out)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda box: box.send(1, 0, 0, b"", 0, 0), TypeError),
        (lambda box: box.send(0, 0, 0, b"", 0, 0, None), ValueError),  # to itself
        (lambda box: box.send(-1, 0, 0, b"", 0, 0, None), ValueError),
        (lambda box: box.send(2, 0, 0, b"", 0, 0, None), ValueError),
        (lambda box: box.send(1, 0, 0, "text", 0, 0, None), TypeError),
        (lambda box: box.send(1, 0, 0, b"x" * 89, 0, 0, None), ValueError),
        (lambda box: box.receive(5, 0, 0, b"", 0, 0, None), ValueError),
        (lambda box: box.receive(1, 0, 0, b"x" * 89, 0, 0, None), ValueError),
        (lambda box: box.accept(None, 0, None), TypeError),
        (lambda box: box.accept(box.receive(1, 0, 0, b"", 0, 0, None), 0, None), TypeError),
        (lambda box: box.wait(None, 0.0), TypeError),
        (lambda box: box.withdraw(1), TypeError),
        (lambda box: box.lose(9), ValueError),
        (lambda box: mailbox.Engine(memoryview(bytearray(4)), [], 0.0), ValueError),
        (lambda box: mailbox.Engine(memoryview(b"x" * 64), [], 0.0), BufferError),
        (lambda box: mailbox.Op(), TypeError),
    ],
)
def test_calls_that_can_mean_nothing_are_refused(pair: Boxes, call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call(pair.boxes[0])


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_calls_gives_each_receive_the_next_message_of_its_tag(seed: int) -> None:
    """Three processes, each with two threads that send and receive in an order of their own."""
    order, size, count = random.Random(seed), 3, 150
    boxes = Boxes(size, look_s=order.choice([0.0, 20e-6]))
    plan = [(order.randrange(size), order.randrange(size - 1), order.randrange(3)) for _ in range(count)]
    moves = [(src, other + (other >= src), tag) for src, other, tag in plan]
    lengths = [order.choice([0, 4, 300, RING_BYTES, 3 * RING_BYTES]) for _ in moves]
    data = [np.full(n, number % 251, np.uint8) for number, n in enumerate(lengths)]
    outs = [np.full(n, 255, np.uint8) for n in lengths]
    failures: deque[str] = deque()

    def sender(rank: int) -> None:
        ops = [boxes.send(src, dst, data[n], tag) for n, (src, dst, tag) in enumerate(moves) if src == rank]
        if {boxes.wait(rank, op) for op in ops} - {DONE}:
            failures.append(f"a send of {rank}")

    def receiver(rank: int) -> None:
        mine = [n for n, (_, dst, _) in enumerate(moves) if dst == rank]
        queues: dict[tuple[int, int], deque[int]] = {}
        for n in mine:
            queues.setdefault((moves[n][0], moves[n][2]), deque()).append(n)
        own = random.Random(seed + rank)
        while queues:  # within a tag in order, between tags in any
            key = own.choice(sorted(queues))
            number = queues[key].popleft()
            if not queues[key]:
                del queues[key]
            if boxes.wait(rank, boxes.receive(rank, key[0], outs[number], key[1])) != DONE:
                failures.append(f"message {number}")

    run_threads(threading.Thread(target=do, args=[rank]) for rank in range(size) for do in (sender, receiver))
    assert not failures
    for number, out in enumerate(outs):
        assert (out == number % 251).all(), number


def taken(boxes: Boxes, index: int) -> tuple[list[Any], list[tuple[int, int, int, int]]]:
    """Let both event loops take in what there is; return what that of one process has been given."""
    owners, notes = list[Any](), list[tuple[int, int, int, int]]()
    for _ in range(8):
        for each in range(2):
            found = boxes.boxes[each].take_ended()
            if each == index:
                owners += found[0]
                notes += found[1]
    return owners, notes


def test_a_note_passes_a_message_that_nobody_wants(pair: Boxes) -> None:
    """The message is half written, and its receiver waits for nothing."""
    data = [some(RING_BYTES * 2 // 3, seed) for seed in (1, 2)]
    first, second = (pair.send(0, 1, one) for one in data)
    assert (first.state, second.state) == (DONE, PENDING)
    pair.boxes[0].note(1, 7, 8, 9)
    assert taken(pair, 1)[1] == [(0, 7, 8, 9)]
    assert second.state == DONE
    for one in data:  # kept, and in order
        out = np.zeros_like(one)
        assert pair.wait(1, pair.receive(1, 0, out)) == DONE
        assert (out == one).all()


@pytest.mark.parametrize("before", [0, 2])
def test_an_offer_is_withdrawn_though_its_receiver_waits_for_nothing(pair: Boxes, before: int) -> None:
    """Also behind a message that is half written."""
    long, owner = some(10 * RING_BYTES), object()
    offered = pair.boxes[0].send(1, 5, 0, b"", None, long.nbytes, memoryview(long), 1, 0, owner)
    kept = [pair.send(0, 1, some(RING_BYTES * 2 // 3, seed)) for seed in range(before)]
    assert pair.boxes[0].withdraw(offered) is False
    assert taken(pair, 0)[0] == [owner]
    assert offered.state == WITHDRAWN
    assert {op.state for op in kept} <= {DONE}
    got = pair.boxes[1].receive(0, 5, 0, b"", None, long.nbytes, memoryview(np.zeros_like(long)), 1, owner)
    assert pair.wait(1, got, 0.0) == PENDING


@pytest.mark.parametrize("order", ["by priority", "of one tag"])
def test_what_waits_to_be_sent_leaves_by_priority_and_in_order(pair: Boxes, order: str) -> None:
    full = [pair.send(0, 1, some(RING_BYTES * 2 // 3)) for _ in range(2)]
    tags = [5, 5, 5] if order == "of one tag" else [5, 6, 7]
    sent = [
        pair.boxes[0].send(1, tag, 0, b"", None, 1, memoryview(bytes([number])), 1, priority, object())
        for number, (tag, priority) in enumerate(zip(tags, (3, 1, 2), strict=True))
    ]
    assert {op.state for op in sent} == {PENDING}
    pair.boxes[0].note(1, 0, 0, 0)
    taken(pair, 1)
    turns = [(turn, tag) for turn, _, _, tag, *_ in pair.boxes[1].announced(1) if tag in (5, 6, 7)]
    assert [tag for _, tag in sorted(turns)] == ([5, 5, 5] if order == "of one tag" else [6, 7, 5])
    outs = [np.zeros(1, np.uint8) for _ in sent]
    for tag, out in zip(tags, outs, strict=True):
        got = pair.boxes[1].receive(0, tag, 0, b"", None, 1, memoryview(out), 1, object())
        assert pair.wait(1, got) == DONE
    assert [int(out[0]) for out in outs] == [0, 1, 2]
    assert {op.state for op in full} == {DONE}
