"""Two engines that talk over wires that deliver in any order, against a model of two lines."""

import random
from dataclasses import dataclass, field
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transports.buffers import BounceBuffers
from transports.failures import LengthMismatchError, SignatureMismatchError
from transports.matching import Engine, Limits, MessageKind, ProtocolError, Receive, Send
from transports.matching import MessageKind as Kind
from transports.signature import OPEN_SIGNATURE, PlainSignature
from transports.wire import OPEN

# -- two engines that talk to each other over wires that deliver in any order, against a model of two lines ------------

# Where it is agreed that the wires keep messages in order, they do.

SIZES = (0, 3, 4, 9, 25)  # eager, eager, eager at most, three chunks, seven

# None, two calls, and one whose length is open.
CALLS = (
    None,
    PlainSignature(1 << 40 | 5, b"five"),
    PlainSignature(1 << 40 | 6, b"six"),
    PlainSignature(1 << 40, b"any"),
)


@dataclass
class Side:
    """One process: its engine, what is on its way to it, what it wants."""

    engine: Engine
    coming: list[tuple[int, tuple[int, ...], bytes]] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    outs: list[bytearray] = field(default_factory=list)


class Pair:
    """Rank 0 and rank 1. What is put on a wire may be delivered before what was put there earlier."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.sides = [
            Side(Engine(f"process {1 - rank}", [1 - rank], [rank], limits, BounceBuffers())) for rank in (0, 1)
        ]

    @property
    def unasked_bytes(self) -> int:
        """Up to this length a message may be sent before its receive is known."""
        return max(self.limits.eager_bytes, self.limits.push_bytes)

    def send(self, rank: int, tag: int, nbytes: int, priority: int, call: int) -> None:
        side = self.sides[rank]
        side.texts.append(bytes([len(side.sends) % 256] * nbytes))
        send = Send((rank, 1 - rank, tag), memoryview(side.texts[-1]), priority, CALLS[call])
        side.sends.append(send)
        side.engine.outgoing.queue_announcement(send)

    def receive(self, rank: int, tag: int, nbytes: int, lend: int, call: int) -> None:
        side = self.sides[rank]
        side.outs.append(bytearray(nbytes))
        view = None if lend else memoryview(side.outs[-1])
        side.receives.append(Receive((1 - rank, rank, tag), view, OPEN if lend == 2 else nbytes, CALLS[call]))
        side.engine.receive(side.receives[-1])

    def withdraw(self, rank: int, which: int) -> None:
        side = self.sides[rank]
        waiting: list[Send | Receive] = [end for end in (*side.sends, *side.receives) if not end.ended]
        if waiting:
            side.engine.withdraw(waiting[which % len(waiting)])

    def transmit(self, rank: int, count: int = 1) -> None:
        """Put messages on the wire, and a chunk if there is none."""
        side, other = self.sides[rank], self.sides[1 - rank]
        for _ in range(count):
            message = side.engine.outgoing.next_message()
            if message is not None:
                kind, fields, payload = message
                other.coming.append((kind, fields, bytes(payload or b"")))
            elif (chunk := side.engine.outgoing.next_chunk()) is not None:
                send = chunk.send
                if send.pushed:  # such a chunk announces the message, too, as it may arrive first
                    kind = MessageKind.PUSHED_CHUNK
                    fields = (send.number, *send.lane, send.nbytes, send.place, chunk.offset)
                else:
                    kind, fields = MessageKind.CHUNK, (send.number, chunk.offset)
                other.coming.append((kind, fields, bytes(chunk.view)))
                if not self.limits.confirmed and send.next_offset >= send.nbytes:
                    side.engine.outgoing.end_departed_send(send)

    def deliver(self, rank: int, which: int) -> None:
        side = self.sides[rank]
        if not side.coming:
            return
        ordered = self.limits.push_bytes and self.limits.ordered
        kind, fields, payload = side.coming.pop(0 if ordered else which % len(side.coming))
        if kind == MessageKind.EAGER:
            side.engine.incoming.handle_eager(fields, memoryview(payload))
        elif kind in (MessageKind.CHUNK, MessageKind.PUSHED_CHUNK):
            incoming, number, offset = side.engine.incoming, fields[0], fields[-1]
            if kind == MessageKind.PUSHED_CHUNK:
                incoming.pushed_chunk_memory(len(payload), *fields)[:] = payload
            else:
                incoming.chunk_memory(number, offset, len(payload))[:] = payload
            incoming.count_chunk(number, offset, len(payload))
        else:
            texts = (MessageKind.REFUSE, MessageKind.SIGNATURE)
            side.engine.handle(kind, (*fields, payload) if kind in texts else fields)

    def drain(self) -> None:
        """Let everything arrive."""
        while any(side.engine.outgoing.due or side.coming for side in self.sides):
            for rank in (0, 1):
                self.transmit(rank)
                self.deliver(rank, 0)

    def check(self) -> None:
        """What holds at every instant."""
        for side in self.sides:
            assert 0 <= side.engine.outgoing._credit_bytes <= self.limits.budget_bytes
            assert held_bytes(side.engine) <= self.limits.budget_bytes


def held_bytes(engine: Engine) -> int:
    """Return the memory of messages without a receive."""
    arrived = [arrival for queue in engine.incoming.arrived.values() for arrival in queue]
    return sum(len(each.payload or b"") if each.pushed is None else each.nbytes for each in arrived)


def check_end(pair: Pair) -> None:
    """The k-th send of a lane that was not withdrawn has met the k-th receive that was not, and nothing else has."""
    for rank in (0, 1):
        there, here = pair.sides[rank], pair.sides[1 - rank]
        for tag in (0, 1):
            sends = [i for i, s in enumerate(there.sends) if s.lane[2] == tag and not s.withdrawn]
            receives = [i for i, r in enumerate(here.receives) if r.lane[2] == tag and not r.withdrawn]
            for i, k in zip(sends, receives, strict=False):
                check_met(pair, there.sends[i], there.texts[i], here.receives[k], here.outs[k])
            for i in sends[len(receives) :]:
                assert not there.sends[i].ended or there.sends[i].nbytes <= pair.unasked_bytes
                assert there.sends[i].error is None
            assert not any(here.receives[k].ended for k in receives[len(sends) :])


def check_met(pair: Pair, send: Send, text: bytes, receive: Receive, out: bytearray) -> None:
    assert send.ended
    assert receive.ended
    theirs = send.signature or OPEN_SIGNATURE
    if receive.signature is not None and not receive.signature.agrees(theirs.fingerprint):
        assert isinstance(receive.error, SignatureMismatchError)
        assert receive.theirs == theirs
        if send.nbytes > pair.unasked_bytes:
            assert isinstance(send.error, SignatureMismatchError)
            assert send.theirs == receive.signature
        return
    if send.nbytes == receive.nbytes:
        assert send.error is receive.error is None
        got = bytes(receive.loan or b"")[: len(text)] if receive.wants_loan else bytes(out)
        assert got == text
        return
    assert isinstance(receive.error, LengthMismatchError)
    if send.nbytes > pair.unasked_bytes:
        assert isinstance(send.error, LengthMismatchError)


RANK, TAG, SIZE, CALL = st.integers(0, 1), st.integers(0, 1), st.sampled_from(SIZES), st.integers(0, 3)
STEPS = st.one_of(
    st.tuples(st.just("send"), RANK, TAG, SIZE, st.integers(-1, 1), CALL),
    st.tuples(st.just("receive"), RANK, TAG, SIZE, st.integers(0, 2), CALL),
    st.tuples(st.just("withdraw"), RANK, st.integers(0, 9)),
    st.tuples(st.just("transmit"), RANK, st.integers(1, 5)),
    st.tuples(st.just("deliver"), RANK, st.integers(0, 9)),
    st.tuples(st.just("deliver"), RANK, st.integers(0, 9)),
)


# Up to which length messages come unasked, and whether they do in order.
AGREED = ((0, False), (9, True), (9, False))


@given(st.lists(STEPS, max_size=60), st.booleans(), st.sampled_from(AGREED))
@settings(max_examples=300)
def test_every_message_meets_its_receive_and_no_other(
    steps: list[tuple[str, *tuple[int, ...]]], confirmed: bool, agreement: tuple[int, bool]
) -> None:
    push_bytes, ordered = agreement
    agreed = Limits(
        eager_bytes=4,
        chunk_bytes=4,
        push_bytes=push_bytes,
        ordered=ordered,
        budget_bytes=16,
        overhead_bytes=2,
        confirmed=confirmed,
    )
    pair = Pair(agreed)
    for name, *arguments in steps:
        getattr(pair, name)(*arguments)
        pair.check()
    pair.drain()
    check_end(pair)
    for side in pair.sides:
        side.engine.close()
    pair.drain()
    for side in pair.sides:
        assert side.engine.quiet
        assert all(end.ended for end in (*side.sends, *side.receives))


# ----------------------------------------------------------------------------------------------------------------------
# Chunks that come before the announcement of their message, and announcements before those that were made earlier

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
