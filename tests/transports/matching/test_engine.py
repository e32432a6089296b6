"""What an engine makes of messages: the other side may say anything, in any order."""

import random
from collections.abc import Sequence

import pytest

from transports.buffers import BounceBuffers
from transports.failures import LengthMismatchError, LinkLostError, TransportClosedError
from transports.matching import Engine, Limits, ProtocolError, Receive, Send
from transports.matching import MessageKind as Kind

from .test_pair import held_bytes

LIMITS = Limits(eager_bytes=40_000, chunk_bytes=100_000)
LONG_BYTES = LIMITS.chunk_bytes + 100

Said = list[tuple[int, tuple[int, ...]]]


def an_engine(limits: Limits = LIMITS) -> Engine:
    return Engine("process 1 (ranks 1, 2)", (1, 2), (0,), limits, BounceBuffers())


def said(engine: Engine) -> Said:
    """Take all that it has to say, and forget the chunks."""
    words: Said = []
    while (message := engine.outgoing.next_message()) is not None:
        words.append(message[:2])
    while engine.outgoing.next_chunk() is not None:
        pass
    return words


def receive(engine: Engine, tag: int, nbytes: int) -> Receive:
    end = Receive((1, 0, tag), None, nbytes)
    engine.receive(end)
    return end


def send(engine: Engine, tag: int, nbytes: int) -> Send:
    end = Send((0, 1, tag), memoryview(bytes(nbytes)), 0)
    engine.outgoing.queue_announcement(end)
    return end


def hear(engine: Engine, kind: int, fields: Sequence[int], payload: bytes = b"") -> None:
    if kind == Kind.CHUNK:
        number, offset = fields
        engine.incoming.chunk_memory(number, offset, len(payload))[:] = payload
        engine.incoming.count_chunk(number, offset, len(payload))
    elif kind == Kind.EAGER:
        engine.incoming.handle_eager(fields, memoryview(payload))
    else:
        engine.handle(kind, [*fields, payload] if kind in (Kind.REFUSE, Kind.SIGNATURE) else fields)


@pytest.mark.parametrize("push_bytes", [0, LONG_BYTES])
@pytest.mark.parametrize("confirmed", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_said_is_acted_upon_or_refused(seed: int, confirmed: bool, push_bytes: int) -> None:
    """Well-formed messages in senseless order, with numbers small enough to hit what is there."""
    chance = random.Random(seed)
    limits = Limits(
        eager_bytes=40_000, chunk_bytes=100_000, push_bytes=push_bytes, budget_bytes=200_000, confirmed=confirmed
    )
    refused = 0
    for _ in range(40):
        engine = an_engine(limits)
        for tag in range(3):
            send(engine, tag, LONG_BYTES)
            for nbytes in (0, 8, LONG_BYTES):
                receive(engine, tag, nbytes)
        for _ in range(60):
            kind = chance.choice(list(Kind))
            fields = {
                Kind.EAGER: [
                    chance.randrange(8),
                    chance.choice((1, 2, 2, 9)),
                    0,
                    chance.randrange(4),
                    chance.randrange(3),
                ],
                Kind.OFFER: [chance.randrange(8), 1, chance.choice((0, 0, 0, 7)), chance.randrange(4), LONG_BYTES, 0],
                Kind.PUSH: [chance.randrange(4), 1, chance.choice((0, 0, 0, 7)), chance.randrange(4), LONG_BYTES, 0],
                Kind.REFUSE: [chance.randrange(4), 5, 0],
                Kind.SIGNATURE: [chance.randrange(8), chance.choice((0, 1, 2, 4096)), chance.getrandbits(64)],
                Kind.CHUNK: [chance.randrange(8), chance.choice((0, limits.chunk_bytes, 7))],
            }.get(kind, [chance.randrange(8)])
            sizes = {
                Kind.EAGER: (0, 8, 30_000),
                Kind.CHUNK: (0, 8, 100, limits.chunk_bytes),
                Kind.SIGNATURE: (0, 88, 89),
            }.get(kind, (0,))
            try:
                hear(engine, kind, fields, bytes(chance.choice(sizes)))
            except ProtocolError:
                refused += 1
            said(engine)
            assert held_bytes(engine) <= limits.budget_bytes
            assert 0 <= engine.outgoing._credit_bytes <= limits.budget_bytes
    assert refused > 500


def test_announcements_are_matched_in_the_order_of_their_numbers() -> None:
    engine = an_engine()
    ends = [receive(engine, 5, 8) for _ in range(3)]
    for number in (2, 1, 0):
        assert [end.matched for end in ends] == [False] * 3
        hear(engine, Kind.EAGER, [number, 1, 0, 5, 0], number.to_bytes(8, "little"))
    assert [bytes(end.loan or b"") for end in ends] == [i.to_bytes(8, "little") for i in range(3)]


def test_a_refused_offer_tells_both_lengths_at_both_ends() -> None:
    engine = an_engine()
    wanted = receive(engine, 5, 8)
    hear(engine, Kind.OFFER, [0, 1, 0, 5, 10**6, 0])
    assert said(engine) == [(Kind.REFUSE, (0, 8, 0))]
    offered = send(engine, 5, 10**6)
    assert said(engine) == [(Kind.OFFER, (0, 0, 1, 5, 10**6, 0))]
    hear(engine, Kind.REFUSE, [0, 8, 0])
    for end in (wanted, offered):
        assert isinstance(end.error, LengthMismatchError)
        assert (end.error.sent_bytes, end.error.expected_bytes) == (10**6, 8)


def test_a_withdrawn_offer_makes_way_for_the_next() -> None:
    engine = an_engine()
    hear(engine, Kind.OFFER, [0, 1, 0, 5, LONG_BYTES, 0])
    hear(engine, Kind.EAGER, [1, 1, 0, 5, 0], b"12345678")
    hear(engine, Kind.WITHDRAW, [0])
    assert said(engine) == [(Kind.WITHDRAWN, (0,))]
    (arrival,) = engine.incoming.arrived[1, 0, 5]
    assert arrival.payload == b"12345678"


def test_a_withdrawal_after_the_match_is_not_answered() -> None:
    engine = an_engine()
    receive(engine, 5, LONG_BYTES)
    hear(engine, Kind.OFFER, [0, 1, 0, 5, LONG_BYTES, 0])
    hear(engine, Kind.WITHDRAW, [0])
    assert said(engine) == [(Kind.ACCEPT, (0,))]


def test_a_cancelled_send_asks_once_and_ends_when_it_is_answered() -> None:
    engine = an_engine()
    end = send(engine, 5, LONG_BYTES)
    said(engine)
    assert not engine.withdraw(end)
    assert not engine.withdraw(end)
    assert said(engine) == [(Kind.WITHDRAW, (0,))]
    hear(engine, Kind.WITHDRAWN, [0])
    assert (end.ended, end.withdrawn, end.error) == (True, True, None)
    assert engine.quiet


def test_a_send_that_has_not_been_announced_is_withdrawn_without_a_word() -> None:
    engine = an_engine()
    end = send(engine, 5, LONG_BYTES)
    assert engine.withdraw(end)
    assert end.withdrawn
    assert said(engine) == []


@pytest.mark.parametrize("accepted", [False, True])
def test_whoever_closes_says_which_offers_come_to_nothing(accepted: bool) -> None:
    """Else both sides could wait for each other's bytes until they lose patience."""
    here, there = an_engine(), Engine("process 0 (rank 0)", (0,), (1, 2), LIMITS, BounceBuffers())
    offered = send(here, 5, LONG_BYTES)
    wanted = Receive((0, 1, 5), None, LONG_BYTES)
    for kind, fields in said(here):
        hear(there, kind, fields)
    if accepted:
        there.receive(wanted)
    here.close()
    assert isinstance(offered.error, TransportClosedError)
    for kind, fields in said(here):
        hear(there, kind, fields)
    for kind, fields in said(there):
        hear(here, kind, fields)
    if not accepted:
        there.receive(wanted)
        assert not wanted.ended
        there.end("process 0 (rank 0) has left", keep_arrived=True)
    assert isinstance(wanted.error, LinkLostError)
    assert "process 0 (rank 0) has left" in str(wanted.error)
    assert here.quiet
    assert there.quiet


def test_who_watches_is_woken_by_what_nobody_waits_for() -> None:
    engine, woken = an_engine(), []

    def wake() -> None:
        woken.append(len(engine.incoming.arrived))

    engine.incoming.watchers.append(wake)
    receive(engine, 5, 8)
    hear(engine, Kind.EAGER, [0, 1, 0, 5, 0], b"12345678")
    assert woken == []
    hear(engine, Kind.EAGER, [1, 1, 0, 6, 0], b"12345678")
    hear(engine, Kind.OFFER, [2, 1, 0, 5, LONG_BYTES, 0])
    assert woken == [1, 2]
    assert engine.incoming.awaited
    engine.incoming.watchers.remove(wake)
    hear(engine, Kind.EAGER, [3, 1, 0, 5, 0], b"")
    engine.close()
    assert woken == [1, 2]
    assert not engine.incoming.awaited


def test_the_oldest_message_is_first_whatever_its_lane() -> None:
    engine = an_engine()
    for number, tag in enumerate((5, 4, 5)):
        hear(engine, Kind.EAGER, [number, 1, 0, tag, 0], b"12345678")
    hear(engine, Kind.EAGER, [3, 1, 0, 99, 0], b"above")
    order = []
    while announced := [each for each in engine.incoming.unexpected(0, None) if each.tag != 99]:
        first = min(announced, key=lambda message: message.since_ns)
        receive(engine, first.tag, first.nbytes)
        order.append(first.tag)
    assert order == [5, 4, 5]
    assert [message.tag for message in engine.incoming.unexpected(0, 99)] == [99]


def test_eager_data_has_a_budget_which_comes_back_as_it_is_received() -> None:
    limits = Limits(eager_bytes=100, chunk_bytes=100, budget_bytes=400, overhead_bytes=0)
    engine = an_engine(limits)
    for number in range(10):  # more than the budget, but never more than is credited
        wanted = receive(engine, 5, 100)
        hear(engine, Kind.EAGER, [number, 1, 0, 5, 0], bytes(100))
        assert wanted.ended
        assert said(engine) == [(Kind.CREDIT, (100,))]
    for number in range(10, 14):
        hear(engine, Kind.EAGER, [number, 1, 0, 5, 0], bytes(100))
    with pytest.raises(ProtocolError, match="peer sent more eager data than the agreed 400 bytes"):
        hear(engine, Kind.EAGER, [14, 1, 0, 5, 0], b"x")


@pytest.mark.parametrize(("nbytes", "leaves"), [(99, True), (100, True), (101, False)])
def test_a_message_leaves_eagerly_up_to_the_limit_of_eager_ones(nbytes: int, leaves: bool) -> None:
    limits = Limits(eager_bytes=100, chunk_bytes=1000, overhead_bytes=0)
    assert (an_engine(limits).outgoing.reserve_eager(memoryview(bytes(nbytes))) is not None) is leaves
    engine = an_engine(limits)
    send(engine, 5, nbytes)
    assert [kind for kind, _ in said(engine)] == [Kind.EAGER if leaves else Kind.OFFER]


@pytest.mark.parametrize(("budget_bytes", "leaves"), [(149, False), (150, True)])
def test_a_message_leaves_eagerly_up_to_the_budget(budget_bytes: int, leaves: bool) -> None:
    limits = Limits(eager_bytes=100, chunk_bytes=1000, overhead_bytes=50, budget_bytes=budget_bytes)
    assert (an_engine(limits).outgoing.reserve_eager(memoryview(bytes(100))) is not None) is leaves
    engine = an_engine(limits)
    send(engine, 5, 100)
    assert [kind for kind, _ in said(engine)] == [Kind.EAGER if leaves else Kind.OFFER]


def test_what_may_wait_and_what_may_be_early_is_bounded() -> None:
    limits = Limits(eager_bytes=100, chunk_bytes=100, waiting=3)
    engine = an_engine(limits)
    hear(engine, Kind.OFFER, [0, 1, 0, 5, 1000, 0])
    for number in (7, 9):
        hear(engine, Kind.OFFER, [number, 1, 0, 5, 1000, 0])
    with pytest.raises(ProtocolError, match="peer announced more than 3 messages that no rank receives"):
        hear(engine, Kind.OFFER, [11, 1, 0, 5, 1000, 0])
    hear(engine, Kind.WITHDRAW, [4])
    for kind in (Kind.WITHDRAW, Kind.ABANDON):
        with pytest.raises(ProtocolError, match="peer took back offer 5, beyond the window of 3"):
            hear(engine, kind, [5])


@pytest.mark.parametrize("kind", [Kind.WITHDRAW, Kind.ABANDON])
def test_a_withdrawal_may_overtake_its_offer(kind: Kind) -> None:
    engine = an_engine()
    wanted = receive(engine, 5, 8)
    hear(engine, kind, [0])
    hear(engine, Kind.OFFER, [0, 1, 0, 5, LONG_BYTES, 0])
    assert not wanted.ended
    assert said(engine) == [(Kind.WITHDRAWN, (0,))]
    hear(engine, Kind.EAGER, [1, 1, 0, 5, 0], b"12345678")
    assert wanted.ended
    assert wanted.error is None


def test_the_most_urgent_message_that_is_accepted_goes_next() -> None:
    engine = an_engine()
    ends = [Send((0, 1, tag), memoryview(bytes(2 * LIMITS.chunk_bytes)), -tag) for tag in range(3)]
    for end in ends:
        engine.outgoing.queue_announcement(end)
        said(engine)  # one by one, so that their numbers say nothing of how urgent they are
    left: list[tuple[int, int]] = []

    def next_chunk() -> None:
        chunk = engine.outgoing.next_chunk()
        assert chunk is not None
        left.append((chunk.send.lane[2], chunk.offset // LIMITS.chunk_bytes))

    hear(engine, Kind.ACCEPT, [ends[0].number])
    next_chunk()
    for end in ends[1:]:
        hear(engine, Kind.ACCEPT, [end.number])
    for _ in range(5):
        next_chunk()
    assert engine.outgoing.next_chunk() is None
    assert left == [(0, 0), (2, 0), (2, 1), (1, 0), (1, 1), (0, 1)]


def test_the_most_urgent_message_is_announced_next_but_not_before_its_elders_of_the_same_lane() -> None:
    engine = an_engine()
    for tag, priority in ((0, 0), (1, -1), (2, 5), (2, -9)):
        engine.outgoing.queue_announcement(Send((0, 1, tag), memoryview(b""), priority))
    assert [fields[3] for _, fields in said(engine)] == [1, 0, 2, 2]


def test_a_cancelled_send_whose_receiver_is_lost_was_in_time() -> None:
    engine = an_engine()
    cancelled, other = send(engine, 5, LONG_BYTES), send(engine, 6, LONG_BYTES)
    said(engine)
    engine.withdraw(cancelled)
    engine.end("process 1 (ranks 1, 2) is lost")
    assert (cancelled.withdrawn, cancelled.error) == (True, None)
    assert isinstance(other.error, LinkLostError)


def test_a_chunk_comes_once() -> None:
    engine = an_engine()
    receive(engine, 5, LONG_BYTES)
    hear(engine, Kind.OFFER, [0, 1, 0, 5, LONG_BYTES, 0])
    hear(engine, Kind.CHUNK, [0, 0], bytes(LIMITS.chunk_bytes))
    with pytest.raises(ProtocolError, match="message 0 has no chunk of 100000 bytes at 0, or received it already"):
        hear(engine, Kind.CHUNK, [0, 0], bytes(LIMITS.chunk_bytes))


@pytest.mark.parametrize(
    ("limits", "nbytes", "kinds", "reason"),
    [
        (LIMITS, LONG_BYTES, [Kind.TAKEN], "peer reports the arrival of message 0, which it had not accepted"),
        (
            LIMITS,
            LONG_BYTES,
            [Kind.ACCEPT, Kind.TAKEN],
            "peer reports the arrival of message 0, which has not left completely",
        ),
        (LIMITS, LONG_BYTES, [Kind.ACCEPT, Kind.ACCEPT], "peer answered offer 0, which does not wait for an answer"),
        (LIMITS, LONG_BYTES, [Kind.WITHDRAWN], "peer dropped offer 0, which was not cancelled"),
        (
            Limits(eager_bytes=0, chunk_bytes=9, budget_bytes=0),
            0,
            [Kind.ACCEPT],
            "peer accepted message 0, which has no bytes",
        ),
    ],
)
def test_answers_that_make_no_sense_are_refused(limits: Limits, nbytes: int, kinds: list[Kind], reason: str) -> None:
    engine = an_engine(limits)
    send(engine, 5, nbytes)
    assert engine.outgoing.next_message() is not None
    for kind in kinds[:-1]:
        hear(engine, kind, [0])
    with pytest.raises(ProtocolError, match=reason):
        hear(engine, kinds[-1], [0])


def test_where_the_wire_says_what_has_left_the_receiver_cannot() -> None:
    """The wire still reads the memory of a message that has been handed to it."""
    engine = an_engine(Limits(eager_bytes=0, chunk_bytes=100, confirmed=False))
    end = send(engine, 5, 100)
    said(engine)
    hear(engine, Kind.ACCEPT, [0])
    assert engine.outgoing.next_chunk() is not None
    with pytest.raises(ProtocolError, match="peer reports the arrival of message 0, which has not left completely"):
        hear(engine, Kind.TAKEN, [0])
    engine.outgoing.end_departed_send(end)
    assert end.ended


PUSHING = Limits(
    eager_bytes=40_000, chunk_bytes=100_000, push_bytes=2 * LONG_BYTES, budget_bytes=3 * LONG_BYTES, confirmed=False
)
PUSHED = (0, 1, 0, 5, LONG_BYTES, 0)


def test_a_message_that_nobody_asked_for_leaves_at_once_and_has_been_sent_when_it_has_left() -> None:
    engine = an_engine(PUSHING)
    end = send(engine, 5, LONG_BYTES)
    message = engine.outgoing.next_message()
    assert message == (Kind.PUSH, (0, 0, 1, 5, LONG_BYTES, 0), None)
    chunks = [engine.outgoing.next_chunk(), engine.outgoing.next_chunk()]
    assert [chunk.nbytes for chunk in chunks if chunk is not None] == [LIMITS.chunk_bytes, 100]
    assert engine.outgoing.next_chunk() is None
    assert not end.ended
    engine.outgoing.end_departed_send(end)
    assert end.ended
    assert engine.quiet


def test_who_has_used_up_the_budget_asks_again() -> None:
    engine = an_engine(PUSHING)
    for tag in range(3):
        send(engine, tag, LONG_BYTES)
    assert [kind for kind, _ in said(engine)] == [Kind.PUSH, Kind.PUSH, Kind.OFFER]
    hear(engine, Kind.CREDIT, [LONG_BYTES])
    send(engine, 9, LONG_BYTES)
    assert [kind for kind, _ in said(engine)] == [Kind.PUSH]


@pytest.mark.parametrize("lend", [True, False])
@pytest.mark.parametrize("met", [0, 1, 2])
def test_a_message_that_nobody_asked_for_finds_its_receive_before_during_or_after(met: int, lend: bool) -> None:
    """The receive comes before the announcement, before the second chunk, or after all."""
    engine, text, out = an_engine(PUSHING), random.Random(met).randbytes(LONG_BYTES), bytearray(LONG_BYTES)
    end = Receive((1, 0, 5), None if lend else memoryview(out), LONG_BYTES)
    events = [
        lambda: hear(engine, Kind.PUSH, PUSHED),
        lambda: hear(engine, Kind.CHUNK, [0, 0], text[: LIMITS.chunk_bytes]),
        lambda: hear(engine, Kind.CHUNK, [0, LIMITS.chunk_bytes], text[LIMITS.chunk_bytes :]),
    ]
    events.insert((0, 2, 3)[met], lambda: engine.receive(end))
    for event in events:
        assert not end.ended
        event()
    assert end.ended
    assert bytes((end.loan or b"")[:LONG_BYTES] if lend else out) == text
    assert said(engine) == [(Kind.CREDIT, (LONG_BYTES + LIMITS.overhead_bytes,))]
    assert engine.quiet


@pytest.mark.parametrize("early", [True, False])
def test_a_message_that_nobody_asked_for_and_nobody_can_use_is_taken_in_all_the_same(early: bool) -> None:
    engine, end = an_engine(PUSHING), Receive((1, 0, 5), None, 7)
    if early:
        engine.receive(end)
    hear(engine, Kind.PUSH, PUSHED)
    if not early:
        engine.receive(end)
    assert isinstance(end.error, LengthMismatchError)
    assert said(engine) == [(Kind.CREDIT, (LONG_BYTES + LIMITS.overhead_bytes,))]
    assert not engine.quiet
    hear(engine, Kind.CHUNK, [0, 0], bytes(LIMITS.chunk_bytes))
    hear(engine, Kind.CHUNK, [0, LIMITS.chunk_bytes], bytes(100))
    assert engine.quiet


def test_who_waits_for_a_message_that_has_come_in_part_hears_of_its_loss() -> None:
    engine, out = an_engine(PUSHING), bytearray(LONG_BYTES)
    hear(engine, Kind.PUSH, PUSHED)
    hear(engine, Kind.CHUNK, [0, 0], bytes(LIMITS.chunk_bytes))
    end = Receive((1, 0, 5), memoryview(out), LONG_BYTES)
    engine.receive(end)
    engine.end("process 1 is lost")
    assert isinstance(end.error, LinkLostError)


@pytest.mark.parametrize("keep", [True, False])
def test_of_messages_that_nobody_asked_for_only_whole_ones_outlive_their_sender(keep: bool) -> None:
    engine = an_engine(PUSHING)
    for number in range(2):
        hear(engine, Kind.PUSH, (number, 1, 0, number, LONG_BYTES, 0))
        hear(engine, Kind.CHUNK, [number, 0], bytes(LIMITS.chunk_bytes))
    hear(engine, Kind.CHUNK, [0, LIMITS.chunk_bytes], bytes(100))
    engine.end("process 1 has left", keep_arrived=keep)
    assert list(engine.incoming.arrived) == ([(1, 0, 0)] if keep else [])


@pytest.mark.parametrize(
    ("limits", "said_before", "fields", "reason"),
    [
        (PUSHING, [], (0, 9, 0, 5, LONG_BYTES, 0), "peer sent a message of ranks that it does not join: 9 to 0"),
        (
            PUSHING,
            [],
            (0, 1, 0, 5, 2 * LONG_BYTES + 1, 0),
            rf"rank 1 pushed message 0 \(to rank 0, tag 5\) of {2 * LONG_BYTES + 1} bytes; "
            f"the limit is {2 * LONG_BYTES}",
        ),
        (LIMITS, [], PUSHED, rf"rank 1 pushed message 0 \(to rank 0, tag 5\) of {LONG_BYTES} bytes; the limit is 0"),
        (
            PUSHING,
            [(number, 1, 0, 5, LONG_BYTES, 0) for number in range(2)],
            (2, 1, 0, 5, LONG_BYTES, 0),
            f"peer sent more eager data than the agreed {3 * LONG_BYTES} bytes",
        ),
    ],
)
def test_what_comes_unasked_has_a_turn_a_length_and_a_budget(
    limits: Limits, said_before: list[tuple[int, ...]], fields: tuple[int, ...], reason: str
) -> None:
    engine = an_engine(limits)
    for announced in said_before:
        hear(engine, Kind.PUSH, announced)
    with pytest.raises(ProtocolError, match=f"^{reason}$"):
        hear(engine, Kind.PUSH, fields)


@pytest.mark.parametrize("met", [0, 1, 2])
@pytest.mark.parametrize("asked", [True, False])
def test_who_consumes_gets_every_chunk_once_and_in_order(met: int, asked: bool) -> None:
    """The receive comes before the announcement, before the second chunk, or after all."""
    engine, text, got = an_engine(PUSHING), random.Random(met).randbytes(LONG_BYTES), list[tuple[int, bytes]]()
    end = Receive((1, 0, 5), None, LONG_BYTES)
    end.consume = lambda offset, piece: got.append((offset, bytes(piece)))
    events = [
        lambda: hear(engine, Kind.OFFER if asked else Kind.PUSH, PUSHED),
        lambda: hear(engine, Kind.CHUNK, [0, 0], text[: LIMITS.chunk_bytes]),
        lambda: hear(engine, Kind.CHUNK, [0, LIMITS.chunk_bytes], text[LIMITS.chunk_bytes :]),
    ]
    events.insert((0, 1, 1)[met] if asked else (0, 2, 3)[met], lambda: engine.receive(end))
    for event in events:
        event()
    assert end.ended
    assert got == [(0, text[: LIMITS.chunk_bytes]), (LIMITS.chunk_bytes, text[LIMITS.chunk_bytes :])]


def test_where_chunks_overtake_each_other_nobody_consumes_them() -> None:
    engine, text, got = an_engine(), random.Random(0).randbytes(LONG_BYTES), list[int]()
    end = Receive((1, 0, 5), None, LONG_BYTES)
    end.consume = lambda offset, piece: got.append(offset)
    engine.receive(end)
    hear(engine, Kind.OFFER, PUSHED)
    hear(engine, Kind.CHUNK, [0, LIMITS.chunk_bytes], text[LIMITS.chunk_bytes :])
    hear(engine, Kind.CHUNK, [0, 0], text[: LIMITS.chunk_bytes])
    assert end.loan is not None
    assert bytes(end.loan[:LONG_BYTES]) == text
    assert got == []


def test_who_waits_both_ways_hears_first_of_the_message_that_did_not_come() -> None:
    engine, told = an_engine(), list[str]()
    ends = [send(engine, 5, LONG_BYTES), receive(engine, 5, LONG_BYTES)]
    for end in ends:
        end.done = lambda end: told.append(type(end).__name__)
    engine.end("process 1 is lost")
    assert told == ["Receive", "Send"]


def test_the_sender_hears_that_all_has_come_before_who_waits_for_it_does() -> None:
    engine, order = an_engine(), list[object]()
    engine.incoming.flush_answers = lambda: order.append(said(engine))
    end = receive(engine, 5, LONG_BYTES)
    end.done = lambda _: order.append("woken")
    engine.handle(Kind.OFFER, (0, 1, 0, 5, LONG_BYTES, 0))
    assert said(engine) == [(Kind.ACCEPT, (0,))]
    hear(engine, Kind.CHUNK, (0, 0), bytes(LIMITS.chunk_bytes))
    assert order == []
    hear(engine, Kind.CHUNK, (0, LIMITS.chunk_bytes), bytes(LONG_BYTES - LIMITS.chunk_bytes))
    assert order == [[(Kind.TAKEN, (0,))], "woken"]
