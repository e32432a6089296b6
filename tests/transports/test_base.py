"""The contract's own parts: flat views of buffers, deliveries, errors, names, and frames."""

from __future__ import annotations

import struct
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from itertools import chain, product
from pickle import PickleBuffer
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transports import ArgumentError, Delivery, LengthMismatchError, LinkLostError, NeuronLink, Request, TransportError
from transports.buffers import Buffer, as_bytes
from transports.frame import (
    EAGER_BYTES,
    FIELDS,
    HEADER_LIMIT_BYTES,
    LOCAL_CHUNK_BYTES,
    UNCHECKED,
    Frame,
    FrameError,
    checksum,
    is_damaged,
    pack,
    parse,
)
from transports.matching import MessageKind
from transports.signature import TEXT_BYTES
from transports.wire import describe_ranks
from transports.wrappers import WrappedWire

# -- the contract's own parts: flat views of buffers, deliveries, errors, names ----------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array([1, 2], ml_dtypes.bfloat16),
        np.array([1 + 2j]),
        np.array(3.0),
        np.arange(6, dtype=np.uint8).reshape(2, 3),
        np.array([1, 2], ">i4"),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_of_every_dtype_are_viewed_without_a_copy(data: npt.NDArray[np.generic]) -> None:
    view = as_bytes(data, writable=True)
    assert (view.format, view.ndim, bytes(view)) == ("B", 1, data.tobytes())
    view[:] = bytes(view.nbytes)
    assert data.tobytes() == bytes(data.nbytes)


@pytest.mark.parametrize("data", [b"", np.zeros((0, 3)), np.zeros((2, 0), np.uint8)], ids=type)
def test_empty_buffers_become_empty_bytes(data: Buffer) -> None:
    view = as_bytes(data)
    assert (view.format, view.ndim, view.nbytes) == ("B", 1, 0)


def test_bad_buffers_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"^out is read-only; receive into memory that may be written$"):
        as_bytes(b"x", name="out", writable=True)
    with pytest.raises(ArgumentError, match=r"\(shape \(2,\), strides \(16,\)\); copy it first$"):
        as_bytes(np.zeros(4)[::2])
    with pytest.raises(ArgumentError, match=r"^out is read-only"):
        as_bytes(memoryview(b""), name="out", writable=True)
    frozen = np.zeros((2, 0), np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(ArgumentError, match=r"^out is read-only"):
        as_bytes(frozen, name="out", writable=True)
    with pytest.raises(ArgumentError, match=r"^data cannot be taken as bytes: not C-contiguous \(shape \(4, 2\)"):
        as_bytes(np.zeros((4, 4), ml_dtypes.bfloat16)[:, ::2])
    with pytest.raises(ArgumentError, match=r"^data cannot be taken as bytes: not C-contiguous \(shape \(4, 2\)"):
        as_bytes(np.zeros((4, 4), np.uint8)[:, ::2])
    for odd in ("text", 7, None, np.array([object()])):
        with pytest.raises(ArgumentError, match=r"^data cannot be taken as bytes: "):
            as_bytes(odd)  # type: ignore[arg-type]


def test_a_delivery_is_released_once() -> None:
    released: list[str] = []
    delivery = Delivery(memoryview(b"12345"), lambda: released.append("released"))
    assert repr(delivery) == "<Delivery of 5 bytes>"
    with delivery:
        assert released == []
    delivery.release()
    assert (released, repr(delivery)) == (["released"], "<Delivery, released>")
    with pytest.raises(ValueError, match="released"):
        bytes(delivery.view)


def test_a_delivery_that_is_held_open_is_released_too() -> None:
    released: list[str] = []
    delivery = Delivery(memoryview(b"12345"), lambda: released.append("released"))
    holder = PickleBuffer(delivery.view)
    delivery.release()
    assert (released, holder.raw().nbytes) == (["released"], 5)


def test_errors_say_who_and_what() -> None:
    error = LengthMismatchError(sent_bytes=8, expected_bytes=4, src=0, dst=3, tag=17)
    assert str(error) == (
        "message from rank 0 to rank 3, tag 17: "
        "8 bytes were sent, 4 bytes were expected; both ends must name one length"
    )
    assert str(LinkLostError("gone", src=0, dst=3)) == "message from rank 0 to rank 3: gone"
    assert isinstance(error, TransportError)
    assert isinstance(ArgumentError("no"), ValueError)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((0,), "rank 0"), ((0, 1), "ranks 0, 1"), ((4, 5, 6), "ranks 4-6"), ((0, 2, 4), "ranks 0, 2, 4")],
)
def test_ranks_are_described_briefly(ranks: tuple[int, ...], text: str) -> None:
    assert describe_ranks(ranks) == text


async def test_a_wire_of_requests_alone_lends_memory_of_its_own() -> None:
    class OnlyCopies(WrappedWire):
        def begin_recv(self, src: int, tag: int, out: Buffer | None, nbytes: int, **options: Any) -> Request:
            request = Request(options["done"], nbytes)
            request.loan = memoryview(bytearray([src, tag, 9]))
            request.end()
            request.end(ValueError("it has ended"))
            return request

    wire = OnlyCopies(NeuronLink(2).wire(1), [0, 1])
    with await wire.recv(0, 5, 3) as delivery:
        assert (bytes(delivery.view), delivery.view.readonly) == (bytes([0, 5, 9]), True)
    with pytest.raises(ArgumentError, match=r"^nbytes is -1; a message has 0 bytes or more$"):
        await wire.recv(0, 5, -1)
    assert repr(wire) == "<OnlyCopies of rank 1>"


async def test_leaving_open_closes() -> None:
    async with NeuronLink(2).open() as link:
        end = link.wire(0)
    with pytest.raises(TransportError, match="closed"):
        await end.send(1, 0, b"x")


def test_an_error_names_the_message_or_what_it_is_a_part_of() -> None:
    error = LinkLostError("the wire is cut", src=0, dst=1, tag=5)
    assert str(error) == "message from rank 0 to rank 1, tag 5: the wire is cut"
    error.operation = "all_reduce #3 on group 'world' (train.py:41)"
    assert str(error) == (
        "message from rank 0 to rank 1 of all_reduce #3 on group 'world' (train.py:41): the wire is cut"
    )
    assert str(LinkLostError("the wire is cut")) == "the wire is cut"


# -- frames: what is packed is parsed, and nothing else is -------------------------------------------------------------

FUZZ_COUNT = 25_000
LIMITS = {kind: [2 ** (8 * struct.calcsize(field)) for field in FIELDS[kind]] for kind in MessageKind}
PAYLOADS_BYTES = {
    MessageKind.EAGER: EAGER_BYTES,
    MessageKind.CHUNK: LOCAL_CHUNK_BYTES,
    MessageKind.PUSHED_CHUNK: LOCAL_CHUNK_BYTES,
    MessageKind.REFUSE: TEXT_BYTES,
    MessageKind.SIGNATURE: TEXT_BYTES,
}


@st.composite
def frames(draw: st.DrawFn) -> tuple[MessageKind, list[int], int]:
    kind = draw(st.sampled_from(MessageKind))
    fields = [draw(st.integers(0, limit - 1)) for limit in LIMITS[kind]]
    return kind, fields, draw(st.integers(0, PAYLOADS_BYTES.get(kind, 0)))


@given(frames(), st.binary(max_size=100), st.binary(max_size=100))
def test_what_is_packed_is_parsed_wherever_it_lies(
    frame: tuple[MessageKind, list[int], int], before: bytes, after: bytes
) -> None:
    kind, fields, payload_bytes = frame
    packed = pack(kind, *fields, payload_bytes=payload_bytes)
    buffer = bytearray(before + packed + after)
    start, end = len(before), len(before) + len(packed)
    assert parse(buffer, start, len(buffer)) == (kind, fields, end, payload_bytes, UNCHECKED)
    for less in range(start, end):
        assert parse(buffer, start, less) is None


def test_the_longest_header_fits() -> None:
    assert max(len(pack(kind, *[0] * len(FIELDS[kind]))) for kind in MessageKind) == HEADER_LIMIT_BYTES
    assert set(FIELDS) == set(MessageKind)


@pytest.mark.parametrize("kind", MessageKind)
def test_every_field_has_its_limits(kind: MessageKind) -> None:
    """Nobody can even say more; of payloads they can."""
    fields = [0] * len(FIELDS[kind])
    for place, limit in enumerate(LIMITS[kind]):
        for wrong in (-1, limit):
            with pytest.raises(struct.error):
                pack(kind, *fields[:place], wrong, *fields[place + 1 :])
    with pytest.raises(FrameError, match=f"{kind.name} frame of {PAYLOADS_BYTES.get(kind, 0) + 1} bytes"):
        whole(pack(kind, *fields, payload_bytes=PAYLOADS_BYTES.get(kind, 0) + 1))


@pytest.mark.parametrize("kind", [len(MessageKind), 255])
def test_a_kind_that_does_not_exist_is_refused_before_anything_else_has_come(kind: int) -> None:
    with pytest.raises(FrameError, match=f"frame kind {kind} is unknown"):
        whole(bytes([*bytes(8), kind]))


def noise(count: int, seed: int) -> Iterator[bytearray]:
    """Random bytes that begin with a plausible kind and length; all but some have a good checksum."""
    rows = np.random.default_rng(seed).integers(0, 256, (count, 60), np.uint8)
    rows[:, 8] %= len(MessageKind) + 1
    rows[:, [11, 12]] = 0
    for index, row in enumerate(rows):
        frame = bytearray(row)
        if index % 8 and row[8] < len(MessageKind):
            frame[:8] = checksum(frame[8 : len(pack(row[8], *[0] * len(FIELDS[row[8]])))])
        yield frame[: 60 - index % 60]


def mutants(count: int, seed: int) -> Iterator[bytearray]:
    """Good frames with one bit flipped, and a checksum that covers it up."""
    chance = np.random.default_rng(seed)
    frames = [pack(kind, *(limit // 3 for limit in LIMITS[kind])) for kind in MessageKind]
    for which, place, bit in zip(*chance.integers(0, (len(MessageKind), 2**16, 8), (count, 3)).T.tolist(), strict=True):
        mutant = bytearray(frames[which])
        mutant[8 + place % (len(mutant) - 8)] ^= 1 << bit
        mutant[:8] = checksum(mutant[8:])
        yield mutant


@pytest.mark.parametrize("kind", MessageKind)
def test_every_flipped_bit_of_a_header_is_noticed(kind: MessageKind) -> None:
    """Also those that would make another good header; a length may first claim more than has come."""
    good = pack(kind, *(limit // 3 for limit in LIMITS[kind]), payload_bytes=PAYLOADS_BYTES.get(kind, 0))
    for place, bit in product(range(len(good)), range(8)):
        flipped = bytearray(good + bytes(HEADER_LIMIT_BYTES))
        flipped[place] ^= 1 << bit
        with pytest.raises(
            FrameError, match=r"^(frame header damaged: it does not match its checksum|frame kind \d+ is unknown)"
        ):
            parse(flipped, 0, len(flipped))


def test_a_payload_is_damaged_if_it_has_a_checksum_that_it_does_not_match() -> None:
    payload = memoryview(b"12345678")
    frame = whole(pack(MessageKind.EAGER, 0, 0, 0, 0, 0, payload_checksum=checksum(payload)))
    assert frame is not None
    assert not is_damaged(payload, frame[4])
    assert not is_damaged(memoryview(b""), checksum(b""))
    assert is_damaged(payload[:-1], frame[4])
    for place, bit in product(range(8), range(8)):
        flipped = bytearray(payload)
        flipped[place] ^= 1 << bit
        assert is_damaged(memoryview(flipped), frame[4])
        assert not is_damaged(memoryview(flipped), UNCHECKED)


def test_random_and_mutated_frames_are_understood_or_refused() -> None:
    """A million of them were tried once; nothing but the parser's own error may come out."""
    outcomes = Counter(map(tried, chain(noise(FUZZ_COUNT, 1), mutants(FUZZ_COUNT, 2))))
    assert set(outcomes) == {"refused", "understood", "incomplete"}
    assert min(outcomes.values()) > FUZZ_COUNT // 100


def test_what_is_refused_takes_no_memory() -> None:
    frames = [*noise(2000, 3), *mutants(2000, 4)]
    tracemalloc.start()
    try:
        before_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for frame in frames:
            tried(frame)
        assert tracemalloc.get_traced_memory()[1] - before_bytes < 100_000
    finally:
        tracemalloc.stop()


def tried(buffer: bytearray) -> str:
    try:
        frame = parse(buffer, 0, len(buffer))
    except FrameError:
        return "refused"
    if frame is None:
        return "incomplete"
    kind, fields, payload_at, payload_bytes, _ = frame
    assert payload_at <= HEADER_LIMIT_BYTES
    assert payload_bytes <= PAYLOADS_BYTES.get(MessageKind(kind), 0)
    assert len(fields) == len(LIMITS[kind])
    assert all(0 <= field < limit for field, limit in zip(fields, LIMITS[kind], strict=True))
    return "understood"


def whole(frame: bytes) -> Frame | None:
    return parse(bytearray(frame), 0, len(frame))
