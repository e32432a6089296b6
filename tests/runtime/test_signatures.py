"""Signatures: what is compared, what travels, and what a peer that lies gets."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from overlap.collectives.call import Call, call
from overlap.collectives.kinds import Collective
from overlap.runtime.signature import fingerprint, parse, signature_of
from transports.matching.protocol import ProtocolError
from transports.signature import TEXT_BYTES
from transports.signature import parts_agree as agree

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)


def _call(
    kind: str = "all_reduce", op: str | None = "sum", dtype: object = F32, shape: object = (4,), *more: object
) -> Call:
    return call(kind, op, dtype, shape, *(more or (2,)))


BASE = _call()
CALLS = [
    BASE,
    _call("all_reduce", "max"),
    _call(dtype=F64),
    _call(shape=(2, 2)),
    _call(shape=()),
    _call(shape=(3, 5, 7, 2, 2, 2, 2, 1000)),
    _call("broadcast", None, F32, (4,), 3, 2),
    _call("permute", None, F32, (4,), 3, 0, ((0, 1), (1, 2))),
    _call("all_gather", None, F32, (4, 2), 2, 0, (), (1, 3)),
    _call("all_reduce", "sum", F32, (4,), 2, 0, (), (), True),
    _call("all_reduce", "sum", F32, (4,), 2, 0, (), (), False, True),
    _call("all_reduce", "sum", F32, (4,), 2, 0, (), (), False, False, "ring"),
    _call("send/recv", None, F32, (4,), 2, 0, (), (), False, False, None, "['float32 (4,)']"),
    _call("barrier", None, None, None),
    _call("all_reduce", "sum", np.dtype("float16"), (4,)),
]
OPEN = [
    _call("broadcast", None, None, None, 3, 2),
    _call("scatter", None, None, None, 3),
    _call("send/recv", None, None, None),
]


@pytest.mark.parametrize("call", CALLS + OPEN, ids=str)
def test_a_signature_comes_back_from_its_text(call: Call) -> None:
    signature = signature_of(call, "models/train.py:41")
    assert len(signature.text) <= TEXT_BYTES
    again = parse(signature.text, signature.fingerprint)
    assert again.call is not None
    assert again.call.key == call.key
    assert (again.what, again.site, again.fingerprint) == (str(call), "models/train.py:41", signature.fingerprint)


def test_all_kinds_have_a_text() -> None:
    for kind in Collective:
        rooted = _call(
            kind.value, "sum" if kind.traits.reduces else None, F32, (4, 4), 4, 0, ((0, 1),) * (kind.name == "PERMUTE")
        )
        again = parse(signature_of(rooted, "a.py:1").text).call
        assert again is not None
        assert again.key == rooted.key


def test_a_place_in_code_is_a_line_of_its_file() -> None:
    code = test_a_place_in_code_is_a_line_of_its_file.__code__
    signature = signature_of(BASE, (code, 0))
    assert signature.site.endswith(f"test_signatures.py:{code.co_firstlineno}")
    assert parse(signature.text).site.endswith(signature.site[-20:])
    assert signature_of(BASE, (code, 0)) is signature
    assert signature_of(BASE, (code, 2)) is not signature


@pytest.mark.parametrize(
    "long",
    [
        _call(shape=(123456,) * 40),
        _call("send/recv", None, F32, (4,), 2, 0, (), (), False, False, None, "['float32 (4,)', " * 40 + "]"),
        _call("all_to_all", None, F32, (64 * 65, 3), 64, 0, (), tuple([2] * 64 + [1] * (64 * 63))),
        _call("permute", None, F32, (4,), 99, 0, tuple(pairwise(range(99)))),
    ],
    ids=lambda call: call.kind.text,
)
def test_the_text_of_a_long_call_has_its_beginning(long: Call) -> None:
    signature = signature_of(long, "a/long/way/" * 20 + "train.py:123456")
    assert len(signature.text) <= TEXT_BYTES
    again = parse(signature.text, signature.fingerprint)
    assert again.call is None
    assert again.what[:20] == str(long)[:20]
    assert again.what.endswith(" ...")
    assert again.site.endswith("/train.py:123456")
    assert again.agrees(fingerprint(long))


def test_the_end_of_a_long_path_travels() -> None:
    again = parse(signature_of(BASE, "über/" * 40 + "train.py:7").text)
    assert again.what == str(BASE)
    assert again.site.endswith("über/train.py:7")


def test_calls_that_differ_do_not_agree() -> None:
    for one in CALLS:
        for other in CALLS:
            assert agree(fingerprint(one), fingerprint(other)) == (one is other), (str(one), str(other))


def test_a_rank_that_only_receives_agrees_with_any_array() -> None:
    broadcast, scatter, receive = map(fingerprint, OPEN)
    for shape, dtype in (((4,), F32), ((), F64), ((6, 1), F32)):
        theirs = fingerprint(_call("broadcast", None, dtype, shape, 3, 2))
        assert agree(broadcast, theirs)
        assert agree(theirs, broadcast)
        assert not agree(scatter, theirs)
        assert agree(receive, fingerprint(_call("send/recv", None, dtype, shape)))
    assert not agree(broadcast, fingerprint(_call("broadcast", None, F32, (4,), 3, 1)))


def test_plain_memory_agrees_with_each_shape_of_as_many_elements() -> None:
    flat = signature_of(_call("send/recv", None, F32, (6,)), "a.py:1", flat=True)
    assert flat.agrees(fingerprint(_call("send/recv", None, F32, (2, 3))))
    assert not flat.agrees(fingerprint(_call("send/recv", None, F32, (7,))))
    assert not flat.agrees(fingerprint(_call("send/recv", None, F64, (6,))))
    assert parse(flat.text, flat.fingerprint).flat


def test_a_text_that_lies_is_refused() -> None:
    good = signature_of(CALLS[6], "train.py:41")
    with pytest.raises(ProtocolError, match="it has 89 bytes, and 88 are the most"):
        parse(good.text + b"x" * (TEXT_BYTES + 1 - len(good.text)))
    with pytest.raises(ProtocolError, match="has the fingerprint"):
        parse(good.text, fingerprint(BASE))
    with pytest.raises(ProtocolError, match="the kind 77"):
        parse(good.text[:1] + b"\x4d" + good.text[2:])
    with pytest.raises(ProtocolError, match="Expected `bool`, got `int`"):
        parse(good.text[:2] + b"\xff" + good.text[3:])
    with pytest.raises(ProtocolError, match="Expected `int` >= 0"):
        parse(good.text[:4] + b"\xff" * 40)
    with pytest.raises(ProtocolError, match="Expected `int` <= "):
        parse(good.text[:4] + b"\xcf" + b"\xff" * 40)


def test_no_text_of_any_bytes_raises_anything_else() -> None:
    random_bytes = random.Random(7)
    texts = [signature_of(call, "train.py:41").text for call in CALLS + OPEN]
    refused = 0
    for _ in range(20_000):
        text = bytearray(random_bytes.choice(texts))
        for _ in range(random_bytes.randrange(4)):
            text[random_bytes.randrange(len(text))] = random_bytes.randrange(256)
        try:
            found = parse(bytes(text[: random_bytes.randrange(TEXT_BYTES + 2)]))
        except ProtocolError:
            refused += 1
        else:
            assert found.what
            assert ":" in found.site
    assert refused > 1_000


@pytest.mark.parametrize("length", range(12))
def test_a_text_that_is_cut_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match="truncated"):
        parse(signature_of(CALLS[6], "train.py:41").text[:length])
