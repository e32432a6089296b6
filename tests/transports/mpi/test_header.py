"""Headers of the Mpi transport come back as they were, and nothing else is taken for one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transports.matching import MessageKind
from transports.mpi.header import HEADER_BYTES, MAGIC, Header, HeaderError, HeaderKind, header_of, read

WORD = st.integers(0, 2**64 - 1)
RANK = st.integers(0, 2**32 - 1)


@given(st.sampled_from(HeaderKind), st.integers(0, 2**16 - 1), RANK, RANK, WORD, WORD, WORD)
def test_what_is_packed_is_read(
    kind: HeaderKind, slot: int, src: int, dst: int, tag: int, number: int, nbytes: int
) -> None:
    payload = b"" if kind is not HeaderKind.EAGER else bytes(range(nbytes % 200))
    nbytes = nbytes if kind is not HeaderKind.EAGER else len(payload)
    header = Header(kind, slot, src, dst, tag, number, nbytes)
    got, behind = read(memoryview(header.pack(payload)))
    assert got == header
    assert got.kind is kind
    assert behind == payload


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (MessageKind.EAGER, (7, 1, 2, 3)),
        (MessageKind.OFFER, (7, 1, 2, 3, 10**6)),
        (MessageKind.REFUSE, (7, 8)),
        (MessageKind.CREDIT, (4096,)),
        *((kind, (7,)) for kind in (MessageKind.ACCEPT, MessageKind.TAKEN, MessageKind.WITHDRAW, MessageKind.ABANDON)),
    ],
)
def test_what_an_engine_says_is_heard(kind: MessageKind, fields: tuple[int, ...]) -> None:
    payload = b"four" if kind is MessageKind.EAGER else b""
    header, behind = read(memoryview(header_of(kind, fields, slot=5, payload_bytes=len(payload)).pack(payload)))
    assert (header.kind, header.fields, bytes(behind)) == (kind, fields, payload)
    assert header.slot == (5 if kind is MessageKind.ACCEPT else header.slot)


@pytest.mark.parametrize("nbytes", [0, 1, HEADER_BYTES - 1])
def test_too_short(nbytes: int) -> None:
    with pytest.raises(HeaderError, match=f"{nbytes} bytes are no header, which has {HEADER_BYTES}"):
        read(memoryview(Header(HeaderKind.BYE).pack()[:nbytes]))


def test_another_protocol() -> None:
    with pytest.raises(HeaderError, match=r"a header starts with b'oMP2', this one with b'oMP1'"):
        read(memoryview(b"oMP1" + Header(HeaderKind.BYE).pack()[len(MAGIC) :]))


@pytest.mark.parametrize("kind", [MessageKind.CHUNK, max(HeaderKind) + 1, 2**16 - 1])
def test_an_unknown_kind(kind: int) -> None:
    message = bytearray(Header(HeaderKind.BYE).pack())
    message[4:6] = kind.to_bytes(2, "little")
    with pytest.raises(HeaderError, match=f"no header of kind {kind}"):
        read(memoryview(message))


def test_a_payload_of_another_length_than_promised() -> None:
    whole = Header(HeaderKind.EAGER, nbytes=4).pack(b"four")
    for message in (whole[:-1], whole + b"x"):
        with pytest.raises(HeaderError, match=r"EAGER is followed by [35] bytes instead of 4"):
            read(memoryview(message))
    with pytest.raises(HeaderError, match="OFFER is followed by 1 bytes instead of 0"):
        read(memoryview(Header(HeaderKind.OFFER, nbytes=1).pack() + b"x"))


def test_noise_is_refused_or_read_but_nothing_else() -> None:
    random = np.random.default_rng(0)
    good = Header(HeaderKind.EAGER, 1, 2, 3, 4, 5, 6).pack(b"abcdef")
    refused = 0
    for _ in range(20_000):
        message = bytearray(good)
        for at in random.integers(0, len(good), 2):
            message[at] = random.integers(0, 256)
        try:
            header, payload = read(memoryview(message))
        except HeaderError:
            refused += 1
        else:
            assert header.pack(payload) == bytes(message)
    assert 2_000 < refused < 18_000
