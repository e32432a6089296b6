"""Packets come back as they were packed, and nothing else is taken for one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transports.matching import MessageKind, ProtocolError
from transports.mpi.wire import BYE, HEADERS
from transports.packets import Packets

WORD = st.integers(0, 2**64 - 1)
FIELDS = {
    MessageKind.EAGER: 4,
    MessageKind.OFFER: 5,
    MessageKind.ACCEPT: 2,
    MessageKind.REFUSE: 2,
    MessageKind.TAKEN: 1,
    MessageKind.WITHDRAW: 1,
    MessageKind.WITHDRAWN: 1,
    MessageKind.CREDIT: 1,
    MessageKind.ABANDON: 1,
    BYE: 0,
}


@given(st.sampled_from(sorted(FIELDS)), st.lists(WORD, min_size=5, max_size=5), st.binary(max_size=200))
def test_what_is_packed_is_unpacked(kind: int, words: list[int], payload: bytes) -> None:
    fields = tuple(words[: FIELDS[kind]])
    behind = payload if kind == MessageKind.EAGER else b""
    packet = HEADERS.pack(kind, *fields) + behind
    assert len(packet) <= HEADERS.head_bytes + len(behind)
    assert HEADERS.unpack(memoryview(packet)) == (kind, fields, behind)


@pytest.mark.parametrize("nbytes", range(8))
def test_too_short(nbytes: int) -> None:
    with pytest.raises(ProtocolError, match=f"packet of {nbytes} bytes is shorter"):
        HEADERS.unpack(memoryview(HEADERS.pack(BYE)[:nbytes]))


def test_another_version() -> None:
    another = Packets({BYE: 0}, magic=b"oMP1")
    with pytest.raises(ProtocolError, match="packet is marked b'oMP1'; install the same overlap"):
        HEADERS.unpack(memoryview(another.pack(BYE)))


@pytest.mark.parametrize("kind", [MessageKind.CHUNK, BYE + 1, 2**32 - 1])
def test_an_unknown_kind(kind: int) -> None:
    packet = bytearray(HEADERS.pack(BYE))
    packet[:4] = kind.to_bytes(4, "little")
    with pytest.raises(ProtocolError, match=f"packet of kind {int(kind)} cannot have 8 bytes"):
        HEADERS.unpack(memoryview(packet))


OFFER = HEADERS.pack(MessageKind.OFFER, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("packet", [OFFER + b"x", OFFER[:-1]])
def test_another_length_than_its_kind_has(packet: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"packet of kind 1 cannot have {len(packet)} bytes"):
        HEADERS.unpack(memoryview(packet))


@pytest.mark.slow
def test_noise_is_refused_or_read_but_nothing_else() -> None:
    random = np.random.default_rng(0)
    good = HEADERS.pack(MessageKind.EAGER, 1, 2, 3, 4) + b"abcdef"
    refused = 0
    for _ in range(20_000):
        message = bytearray(good)
        for at in random.integers(0, len(good), 2):
            message[at] = random.integers(0, 256)
        try:
            kind, fields, payload = HEADERS.unpack(memoryview(message))
        except ProtocolError:
            refused += 1
        else:
            assert HEADERS.pack(kind, *fields) + payload == bytes(message)
    assert 2_000 < refused < 18_000
