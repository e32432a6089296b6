"""Signatures and messages between worlds: what travels, and what a peer that lies gets."""

import random
from enum import Enum
from itertools import pairwise
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

import overlap
from overlap.collectives.call import Call, call
from overlap.collectives.kinds import Collective
from overlap.processes.control import ControlPlane
from overlap.processes.wire import Failed, MemberNotice, RankEvent, encode_message
from overlap.runtime.blame.views import find_stall
from overlap.runtime.forms import pack_form
from overlap.runtime.signature import fingerprint, parse_signature, signature_of
from overlap.runtime.world import World
from transports.matching.protocol import ProtocolError
from transports.signature import TEXT_BYTES
from transports.signature import fingerprints_agree as agree

from .companies import Company, run_far

# -- signatures: what is compared, what travels, and what a peer that lies gets ----------------------------------------

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
    again = parse_signature(signature.text, signature.fingerprint)
    assert again.call is not None
    assert again.call.key == call.key
    assert (again.what, again.site, again.fingerprint) == (str(call), "models/train.py:41", signature.fingerprint)


def test_all_kinds_have_a_text() -> None:
    for kind in Collective:
        rooted = _call(
            kind.value, "sum" if kind.traits.reduces else None, F32, (4, 4), 4, 0, ((0, 1),) * (kind.name == "PERMUTE")
        )
        again = parse_signature(signature_of(rooted, "a.py:1").text).call
        assert again is not None
        assert again.key == rooted.key


def test_a_place_in_code_is_a_line_of_its_file() -> None:
    code = test_a_place_in_code_is_a_line_of_its_file.__code__
    signature = signature_of(BASE, (code, 0))
    assert signature.site.endswith(f"test_signatures.py:{code.co_firstlineno}")
    assert parse_signature(signature.text).site.endswith(signature.site[-20:])
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
    again = parse_signature(signature.text, signature.fingerprint)
    assert again.call is None
    assert again.what[:20] == str(long)[:20]
    assert again.what.endswith(" ...")
    assert again.site.endswith("/train.py:123456")
    assert again.agrees(fingerprint(long))


def test_the_end_of_a_long_path_travels() -> None:
    again = parse_signature(signature_of(BASE, "über/" * 40 + "train.py:7").text)
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
    assert parse_signature(flat.text, flat.fingerprint).flat


def test_a_text_that_lies_is_refused() -> None:
    good = signature_of(CALLS[6], "train.py:41")
    with pytest.raises(ProtocolError, match="it has 89 bytes, and 88 are the most"):
        parse_signature(good.text + b"x" * (TEXT_BYTES + 1 - len(good.text)))
    with pytest.raises(ProtocolError, match="has the fingerprint"):
        parse_signature(good.text, fingerprint(BASE))
    with pytest.raises(ProtocolError, match="collective kind 77"):
        parse_signature(good.text[:1] + b"\x4d" + good.text[2:])
    with pytest.raises(ProtocolError, match="Expected `bool`, got `int`"):
        parse_signature(good.text[:2] + b"\xff" + good.text[3:])
    with pytest.raises(ProtocolError, match="Expected `int` >= 0"):
        parse_signature(good.text[:4] + b"\xff" * 40)
    with pytest.raises(ProtocolError, match="Expected `int` <= "):
        parse_signature(good.text[:4] + b"\xcf" + b"\xff" * 40)


def test_no_text_of_any_bytes_raises_anything_else() -> None:
    random_bytes = random.Random(7)
    texts = [signature_of(call, "train.py:41").text for call in CALLS + OPEN]
    refused = 0
    for _ in range(20_000):
        text = bytearray(random_bytes.choice(texts))
        for _ in range(random_bytes.randrange(4)):
            text[random_bytes.randrange(len(text))] = random_bytes.randrange(256)
        try:
            found = parse_signature(bytes(text[: random_bytes.randrange(TEXT_BYTES + 2)]))
        except ProtocolError:
            refused += 1
        else:
            assert found.what
            assert ":" in found.site
    assert refused > 1_000


@pytest.mark.parametrize("length", range(12))
def test_a_text_that_is_cut_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match="truncated"):
        parse_signature(signature_of(CALLS[6], "train.py:41").text[:length])


# ----------------------------------------------------------------------------------------------------------------------
# Messages between worlds, of every kind and with any value that its types allow: their sender is named, or they
# do

RANKS = 4
NUMBERS = st.integers(-2, 5) | st.integers(-(2**63), 2**63 - 1)
WORDS = st.sampled_from(["", "barrier", "all_reduce", "sum", "float32", "recv", "bfloat16", "x" * 600]) | st.text(
    max_size=9
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Return all values of a type that a message may hold."""
    if hint is int:
        return NUMBERS
    if hint is str:
        return WORDS
    if hint is bytes:
        return st.binary(max_size=9) | WORDS.map(pack_form)
    if hint in (bool, type(None)):
        return st.from_type(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    if isinstance(hint, type) and (issubclass(hint, msgspec.Struct) or hasattr(hint, "_fields")):
        return st.builds(hint, **{name: values(each) for name, each in get_type_hints(hint).items()})
    of, within = get_origin(hint), get_args(hint)
    if of is list:
        return st.lists(values(within[0]), max_size=4)
    if of is tuple and within[1:] == (...,):
        return st.lists(values(within[0]), max_size=4).map(tuple)
    if of is tuple:
        return st.tuples(*map(values, within))
    assert of is Union or str(hint).count("|"), hint
    return st.one_of(*map(values, within))


def events(kind: type[RankEvent], channels: list[int]) -> st.SearchStrategy[RankEvent]:
    hints = get_type_hints(kind)
    fields = {name: values(hints[name]) for name in kind.__struct_fields__}
    if "channel" in fields:
        fields["channel"] = st.sampled_from(channels) | NUMBERS
    return st.builds(kind, **fields)


@pytest.mark.parametrize("kind", get_args(RankEvent), ids=lambda kind: kind.__name__)
def test_it_is_acted_upon_or_its_sender_is_named(kind: type[RankEvent], monkeypatch: pytest.MonkeyPatch) -> None:
    planes, blamed = list[ControlPlane](), list[tuple[int, BaseException]]()
    attached = ControlPlane.exchange_reports

    def known(plane: ControlPlane, world: World) -> Any:
        planes.append(plane)
        return attached(plane, world)

    def blame(world: World, culprit: int, cause: BaseException, doing: list[str]) -> None:
        blamed.append((culprit, cause))

    def hear(here: ControlPlane, event: RankEvent) -> None:
        blamed.clear()
        here._handle_notice(MemberNotice(1, encode_message(event)))
        find_stall(here.quiet_views(), RANKS)  # whatever it is told of
        for culprit, cause in blamed:
            if isinstance(event, Failed) and 0 <= event.culprit < RANKS:
                assert culprit == event.culprit
            else:
                assert culprit == 2  # the first rank of process 1
                assert str(cause).startswith("process 1 sent an invalid event: ")
        if isinstance(event, Failed):
            assert blamed

    async def main(rank: overlap.Rank) -> None:
        await rank.barrier()  # so that there is a communicator to speak of
        begun.set()
        await over.wait()

    async def nemesis(everybody: list[Company]) -> None:
        await begun.wait()
        (here,) = [plane for plane in planes if plane._membership is everybody[0]]
        channels = list(here._communicators.spanning)
        assert channels
        given(events(kind, channels))(lambda event: hear(here, event))()
        over.set()

    begun, over = trio.Event(), trio.Event()
    monkeypatch.setattr(ControlPlane, "exchange_reports", known)
    monkeypatch.setattr(World, "end_by_culprit", blame)
    monkeypatch.setattr(World, "stop", lambda world, reason: None)
    run_far(main, 2, 2, nemesis=nemesis)
