"""Chunks that come before the announcement of their message, and announcements before those that were made earlier."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from transports.buffers import BounceBuffers
from transports.matching import Engine, Limits, ProtocolError, Receive
from transports.matching import MessageKind as Kind

LIMITS = Limits(eager_bytes=4, chunk_bytes=100, push_bytes=200, budget_bytes=600, overhead_bytes=10, ordered=False)
TEXT = random.Random(1).randbytes(150)
WORDS = ("announced", "first chunk", "second chunk", "wanted")


def an_engine(limits: Limits = LIMITS) -> Engine:
    return Engine("process 1 (rank 1)", (1,), (0,), limits, BounceBuffers())


def chunk(engine: Engine, number: int, offset: int, payload: bytes, *, nbytes: int = 150) -> None:
    place = engine.incoming.pushed_chunk_memory(len(payload), number, 1, 0, 5, nbytes, 0, offset)
    place[:] = payload
    engine.incoming.count_chunk(number, offset, len(payload))


def answers(engine: Engine) -> list[tuple[int, tuple[int, ...]]]:
    said = []
    while (message := engine.outgoing.next_message()) is not None:
        said.append(message[:2])
    return said


@pytest.mark.parametrize("lend", [True, False])
@pytest.mark.parametrize("order", list(permutations(WORDS)))
def test_a_message_is_whole_in_whatever_order_its_parts_come(order: tuple[str, ...], lend: bool) -> None:
    engine, out = an_engine(), bytearray(150)
    end = Receive((1, 0, 5), None if lend else memoryview(out), 150)
    events = {
        "announced": lambda: engine.handle(Kind.PUSH, (0, 1, 0, 5, 150, 0)),
        "first chunk": lambda: chunk(engine, 0, 0, TEXT[:100]),
        "second chunk": lambda: chunk(engine, 0, 100, TEXT[100:]),
        "wanted": lambda: engine.receive(end),
    }
    for name in order:
        assert not end.ended or name == "announced"  # each chunk has said the same
        events[name]()
    assert end.ended
    assert bytes((end.loan or b"")[:150] if lend else out) == TEXT
    assert answers(engine) in ([(Kind.TAKEN, (0,)), (Kind.CREDIT, (160,))], [(Kind.CREDIT, (160,)), (Kind.TAKEN, (0,))])
    assert engine.quiet


def test_messages_of_a_lane_meet_receives_in_the_order_of_their_numbers_however_they_come() -> None:
    engine = an_engine()
    ends = [Receive((1, 0, 5), None, 100) for _ in range(3)]
    for end in ends:
        engine.receive(end)
    for number in (2, 1, 0):
        assert [end.ended for end in ends] == [False] * 3
        chunk(engine, number, 0, bytes([number] * 100), nbytes=100)
        engine.handle(Kind.PUSH, (number, 1, 0, 5, 100, 0))
    assert [bytes((end.loan or b"")[:100]) for end in ends] == [bytes([number] * 100) for number in range(3)]


def test_a_chunk_whose_rail_died_half_way_comes_again_to_where_it_was_coming() -> None:
    """It was announced meanwhile."""
    engine, end = an_engine(), Receive((1, 0, 5), None, 150)
    engine.receive(end)
    engine.incoming.pushed_chunk_memory(100, 0, 1, 0, 5, 150, 0, 0)[:50] = bytes(50)
    engine.handle(Kind.PUSH, (0, 1, 0, 5, 150, 0))
    chunk(engine, 0, 100, TEXT[100:])
    chunk(engine, 0, 0, TEXT[:100])
    assert bytes((end.loan or b"")[:150]) == TEXT


@pytest.mark.parametrize(
    ("limits", "events", "reason"),
    [
        (LIMITS, [(0, 50, 100)], "message 0 has no chunk of 100 bytes at 50, or received it already"),
        (LIMITS, [(0, 200, 100)], "message 0 has no chunk of 100 bytes at 200, or received it already"),
        (LIMITS, [(0, 0, 0)], "message 0 has no chunk of 0 bytes at 0, or received it already"),
        (LIMITS, [(0, 0, 100), (0, 0, 100)], "message 0 has no chunk of 100 bytes at 0, or received it already"),
        (LIMITS, [(n, 0, 100) for n in range(4)], "peer sent more eager data than the agreed 600 bytes"),
    ],
)
def test_what_is_not_announced_has_a_place_and_a_budget(
    limits: Limits, events: list[tuple[int, int, int]], reason: str
) -> None:
    engine = an_engine(limits)
    for number, offset, nbytes in events[:-1]:
        chunk(engine, number, offset, bytes(nbytes))
    number, offset, nbytes = events[-1]
    with pytest.raises(ProtocolError, match=f"^{reason}$"):
        chunk(engine, number, offset, bytes(nbytes))
