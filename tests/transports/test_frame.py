"""Frames: what is packed is parsed, and nothing else is."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Iterator
from itertools import chain, product

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transports.frame import (
    EAGER_BYTES,
    HEADER_LIMIT_BYTES,
    LIMITS,
    LOCAL_CHUNK_BYTES,
    PREFIX_BYTES,
    UNCHECKED,
    Frame,
    FrameError,
    FrameKind,
    checksum,
    damaged,
    pack,
    parse,
)

FUZZ_COUNT = 25_000
PAYLOADS_BYTES = {FrameKind.EAGER: EAGER_BYTES, FrameKind.CHUNK: LOCAL_CHUNK_BYTES}


@st.composite
def frames(draw: st.DrawFn) -> tuple[FrameKind, list[int], int]:
    kind = draw(st.sampled_from(FrameKind))
    fields = [draw(st.integers(0, limit - 1)) for limit in LIMITS[kind]]
    return kind, fields, draw(st.integers(0, PAYLOADS_BYTES.get(kind, 0)))


@given(frames(), st.binary(max_size=100), st.binary(max_size=100))
def test_what_is_packed_is_parsed_wherever_it_lies(
    frame: tuple[FrameKind, list[int], int], before: bytes, after: bytes
) -> None:
    kind, fields, payload_bytes = frame
    packed = pack(kind, *fields, payload_bytes=payload_bytes)
    buffer = bytearray(before + packed + after)
    start, end = len(before), len(before) + len(packed)
    assert parse(buffer, start, len(buffer)) == (kind, fields, end, payload_bytes, UNCHECKED)
    for less in range(start, end):
        assert parse(buffer, start, less) is None


def test_the_longest_headers_fit() -> None:
    for kind, limits in LIMITS.items():
        packed = pack(kind, *(limit - 1 for limit in limits))
        assert len(packed) <= PREFIX_BYTES + HEADER_LIMIT_BYTES
    assert set(LIMITS) == set(FrameKind)


@pytest.mark.parametrize("kind", FrameKind)
def test_every_field_has_its_limits(kind: FrameKind) -> None:
    fields = [0] * len(LIMITS[kind])
    for place, limit in enumerate(LIMITS[kind]):
        for wrong in (-1, limit):
            if wrong >= 2**64:
                continue  # msgpack cannot say it
            with pytest.raises(FrameError, match=f"a field of {kind.name} is not in 0|no msgpack array of unsigned"):
                whole(pack(kind, *fields[:place], wrong, *fields[place + 1 :]))
    for count in (len(fields) - 1, len(fields) + 1):
        if count >= 0:
            with pytest.raises(FrameError, match=f"{kind.name} has {len(fields)} fields, not {count}"):
                whole(pack(kind, *[0] * count))
    with pytest.raises(FrameError, match=f"{kind.name} carries|payload claims"):
        whole(pack(kind, *fields, payload_bytes=PAYLOADS_BYTES.get(kind, 0) + 1))


@pytest.mark.parametrize(
    "header",
    [
        {},
        {0: 1},
        b"",
        "text",
        None,
        [],
        [None],
        [0.0, 0, 0, 0, 0],
        [True, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, True],
        [2, [0]],
        [2, "0"],
        [2, b"0"],
        [2, {}],
        [14],
        [2**64 - 1],
        [-1],
        [msgpack.Timestamp(1, 2)],
        [2, msgpack.ExtType(1, b"")],
    ],
    ids=repr,
)
def test_headers_of_other_shapes_are_refused(header: object) -> None:
    with pytest.raises(FrameError):
        whole(prefixed(msgpack.packb(header)))


@pytest.mark.parametrize(
    "header",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1
        b"\xdf\xff\xff\xff\xff",  # a map
        b"\xc6\xff\xff\xff\xff",  # bytes
        b"\xc9\xff\xff\xff\xff\x01",  # an extension
        b"\x91" * 64,  # an array in an array in ...
        b"\x81" * 64,
        b"\xc1",
        b"\x92\x02\x00\x00",  # more follows
        b"",
        b"\x92\x02",
        b"\x93\x00\x81\x90\x00",  # a map whose key cannot be one
        b"\x92\x02\xd6\xff\xff\xff\xff\xff",  # a time far away
        b"\x92\x02\xc7\x0c\xff" + b"\xff" * 12,
    ],
)
def test_hostile_headers_are_refused(header: bytes) -> None:
    with pytest.raises(FrameError):
        whole(prefixed(header))


def test_claims_are_refused_before_anything_they_claim_has_come() -> None:
    with pytest.raises(FrameError, match="a header claims 65 bytes, the limit is 64"):
        parse(prefix(65, 0), 0, PREFIX_BYTES)
    with pytest.raises(FrameError, match="a payload claims 4294967295 bytes, the limit is 2097152"):
        parse(prefix(5, 2**32 - 1), 0, PREFIX_BYTES)


def noise(count: int, seed: int) -> Iterator[bytearray]:
    """Random bytes with a plausible prefix, half of them beginning like an array; all but some have a good checksum."""
    rows = np.random.default_rng(seed).integers(0, 256, (count, 60), np.uint8)
    rows[:, 8] %= HEADER_LIMIT_BYTES + 2
    rows[:, [9, 11, 12, 13]] = 0
    rows[::2, PREFIX_BYTES] = 0x90 + rows[::2, 8] % 8
    for index, row in enumerate(rows):
        frame = bytearray(row)
        if index % 8:
            frame[:8] = checksum(frame[8 : PREFIX_BYTES + row[8]])
        yield frame


def mutants(count: int, seed: int) -> Iterator[bytearray]:
    """Good frames with one bit flipped, and a checksum that covers it up."""
    chance = np.random.default_rng(seed)
    frames = [pack(kind, *(limit // 3 for limit in LIMITS[kind])) for kind in FrameKind]
    for which, place, bit in zip(*chance.integers(0, (12, 2**16, 8), (count, 3)).T.tolist(), strict=True):
        mutant = bytearray(frames[which])
        mutant[8 + place % (len(mutant) - 8)] ^= 1 << bit
        mutant[:8] = checksum(mutant[8:])
        yield mutant


@pytest.mark.parametrize("kind", FrameKind)
def test_every_flipped_bit_of_a_header_is_noticed(kind: FrameKind) -> None:
    """Also those that would make another good header; a length may first claim more than has come."""
    good = pack(kind, *(limit // 3 for limit in LIMITS[kind]), payload_bytes=PAYLOADS_BYTES.get(kind, 0))
    for place, bit in product(range(len(good)), range(8)):
        flipped = bytearray(good + bytes(HEADER_LIMIT_BYTES))
        flipped[place] ^= 1 << bit
        with pytest.raises(FrameError, match=r"^a (header came damaged: it does not match its checksum|\w+ claims)"):
            parse(flipped, 0, len(flipped))


def test_a_payload_is_damaged_if_it_has_a_checksum_that_it_does_not_match() -> None:
    payload = memoryview(b"12345678")
    frame = whole(pack(FrameKind.EAGER, 0, 0, 0, 0, payload_checksum=checksum(payload)))
    assert frame is not None
    assert not damaged(payload, frame[4])
    assert not damaged(memoryview(b""), checksum(b""))
    assert damaged(payload[:-1], frame[4])
    for place, bit in product(range(8), range(8)):
        flipped = bytearray(payload)
        flipped[place] ^= 1 << bit
        assert damaged(memoryview(flipped), frame[4])
        assert not damaged(memoryview(flipped), UNCHECKED)


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
    assert payload_at <= PREFIX_BYTES + HEADER_LIMIT_BYTES
    assert payload_bytes <= LOCAL_CHUNK_BYTES
    assert len(fields) == len(LIMITS[kind])
    assert all(0 <= field < limit for field, limit in zip(fields, LIMITS[kind], strict=True))
    return "understood"


def prefixed(header: bytes) -> bytes:
    checked = prefix(len(header), 0)[8:] + header
    return checksum(checked) + checked


def prefix(header_bytes: int, payload_bytes: int) -> bytearray:
    return bytearray(bytes(8) + header_bytes.to_bytes(2, "little") + payload_bytes.to_bytes(4, "little") + bytes(8))


def whole(frame: bytes) -> Frame | None:
    return parse(bytearray(frame), 0, len(frame))
