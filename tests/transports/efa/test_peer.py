"""What a peer makes of frames, without time, tasks or sockets: the other side may say anything."""

from __future__ import annotations

import random

import pytest
import trio
from trio.testing import MockClock

from transports.base import LengthMismatchError, LinkLostError
from transports.efa import rail as efa_rail
from transports.efa.messages import Receive, Send
from transports.efa.outbound import BUDGET_BYTES
from transports.efa.peer import Peer
from transports.frame import CHUNK_BYTES, FrameError, Kind, pack, parse
from transports.rooms import Rooms

LONG_BYTES = CHUNK_BYTES + 100


class Rail:
    """Takes whatever is due, and forgets it."""

    index = 0
    idle = True
    owes = False
    dead = farewell = False
    arrived = 0

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.said: list[tuple[int, list[int]]] = []

    def start_writing(self) -> None:
        while parts := self.peer.outbound.pull(self):  # type: ignore[arg-type]
            frames, at = bytearray(b"".join(parts)), 0
            while (frame := parse(frames, at, len(frames))) is not None:
                self.said.append(frame[:2])
                at = frame[2] + frame[3]

    def own_frames(self) -> list[bytes]:
        return []

    def keep(self, entry: object) -> None:
        pass

    def staged(self, piece: memoryview) -> memoryview:
        return piece

    def acknowledged(self, count: int) -> None:
        pass


class Pipe(efa_rail.Rail):
    """A rail whose bytes lie on the wire until they are delivered, or lost with it."""

    def __init__(self, peer: Peer, index: int) -> None:
        super().__init__(peer, index, keep=True, staged=False)
        self.wire: list[bytes] = []
        self.incoming = b""
        peer.rails.append(self)

    def put(self, frame: bytes) -> None:
        self.keep(frame)
        self.wire.append(frame)

    def start_writing(self) -> None:
        while parts := self.pull():
            self.wire.append(b"".join(parts))

    def deliver(self, other: Pipe) -> None:
        """Let everything on the wire arrive at the other end."""
        frames, at = bytearray(b"".join(self.wire)), 0
        self.wire.clear()
        while (frame := parse(frames, at, len(frames))) is not None:
            kind, fields, payload_at, nbytes = frame
            at = payload_at + nbytes
            other._count()
            other.peer.take(other, kind, fields, memoryview(frames)[payload_at:at])
        other.peer.settle()

    def cut(self) -> None:
        self.wire.clear()

    async def write_on(self) -> None: ...

    async def read_some(self, into: memoryview) -> int:
        data, self.incoming = self.incoming, b""
        into[: len(data)] = data
        return len(data)

    async def release(self) -> None: ...


def a_peer() -> tuple[Peer, Rail]:
    peer = Peer(1, (1, 2), (0,), Rooms(), lambda _: None)
    rail = Rail(peer)
    peer.rails.append(rail)  # type: ignore[arg-type]
    return peer, rail


def receive(peer: Peer, tag: int, nbytes: int) -> Receive:
    end = Receive((1, 0, tag), None, nbytes, peer.inbound.forget)
    peer.inbound.post(end)
    return end


def feed(peer: Peer, rail: Rail, kind: Kind, fields: list[int], payload: bytes) -> None:
    if kind == Kind.CHUNK:
        number, offset = fields
        peer.place(number, offset, len(payload))[:] = payload
        peer.filled(number, offset, len(payload))
    else:
        peer.take(rail, kind, fields, memoryview(payload))  # type: ignore[arg-type]
    peer.settle()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_said_is_acted_upon_or_refused(seed: int) -> None:
    """Well-formed frames in senseless order, with numbers small enough to hit what is there."""
    chance = random.Random(seed)
    kinds = [kind for kind in Kind if kind not in (Kind.BYE, Kind.ALIVE)]
    refused = 0
    for _ in range(40):
        peer, rail = a_peer()
        for tag in range(3):
            peer.announce(Send((0, 1, tag), memoryview(bytes(LONG_BYTES)), 0, peer.withdraw))
            for nbytes in (0, 8, LONG_BYTES):
                receive(peer, tag, nbytes)
        for _ in range(60):
            kind = chance.choice(kinds)
            fields = {
                Kind.EAGER: [chance.randrange(8), chance.choice((1, 2, 2, 9)), 0, chance.randrange(4)],
                Kind.OFFER: [chance.randrange(8), 1, chance.choice((0, 0, 0, 7)), chance.randrange(4), LONG_BYTES],
                Kind.REFUSE: [chance.randrange(4), 5],
                Kind.CHUNK: [chance.randrange(8), chance.choice((0, CHUNK_BYTES, 7))],
                Kind.LOST: [chance.randrange(1, 3), chance.randrange(9)],
            }.get(kind, [chance.randrange(8)])
            sizes = {Kind.EAGER: (0, 8, 30_000), Kind.CHUNK: (0, 8, 100, CHUNK_BYTES)}.get(kind, (0,))
            try:
                feed(peer, rail, kind, fields, bytes(chance.choice(sizes)))
            except FrameError:
                refused += 1
            held_bytes = sum(len(a.payload or b"") for queue in peer.inbound.arrived.values() for a in queue)
            assert held_bytes <= BUDGET_BYTES
    assert refused > 500


def test_announcements_are_matched_in_the_order_of_their_numbers() -> None:
    peer, rail = a_peer()
    ends = [receive(peer, 5, 8) for _ in range(3)]
    for number in (2, 1, 0):
        assert [end.matched for end in ends] == [False] * 3
        feed(peer, rail, Kind.EAGER, [number, 1, 0, 5], number.to_bytes(8, "little"))
    assert [bytes(end.result()) for end in ends] == [i.to_bytes(8, "little") for i in range(3)]


def test_a_refused_offer_tells_both_lengths_at_both_ends() -> None:
    peer, rail = a_peer()
    end = receive(peer, 5, 8)
    feed(peer, rail, Kind.OFFER, [0, 1, 0, 5, 10**6], b"")
    assert rail.said == [(Kind.REFUSE, [0, 8])]
    with pytest.raises(LengthMismatchError, match="1000000 bytes were sent, 8 bytes were expected"):
        end.result()
    send = Send((0, 1, 5), memoryview(bytes(10**6)), 0, peer.withdraw)
    peer.announce(send)
    feed(peer, rail, Kind.REFUSE, [0, 8], b"")
    with pytest.raises(LengthMismatchError, match="1000000 bytes were sent, 8 bytes were expected"):
        send.result()


def test_a_withdrawn_offer_makes_way_for_the_next() -> None:
    peer, rail = a_peer()
    feed(peer, rail, Kind.OFFER, [0, 1, 0, 5, LONG_BYTES], b"")
    feed(peer, rail, Kind.EAGER, [1, 1, 0, 5], b"12345678")
    feed(peer, rail, Kind.WITHDRAW, [0], b"")
    assert rail.said == [(Kind.WITHDRAWN, [0])]
    (arrival,) = peer.inbound.arrived[1, 0, 5]
    assert arrival.payload == b"12345678"


def test_a_withdrawal_after_the_match_is_not_answered() -> None:
    peer, rail = a_peer()
    receive(peer, 5, LONG_BYTES)
    feed(peer, rail, Kind.OFFER, [0, 1, 0, 5, LONG_BYTES], b"")
    feed(peer, rail, Kind.WITHDRAW, [0], b"")
    assert rail.said == [(Kind.ACCEPT, [0])]


def test_news_of_a_death_that_is_lost_with_another_rail_is_told_again() -> None:
    """Each side has told of one rail over the rail that the other side was losing: neither may wait for the other."""
    here = Peer(1, (1,), (0,), Rooms(), lambda _: None)
    there = Peer(0, (0,), (1,), Rooms(), lambda _: None)
    mine, theirs = ([Pipe(peer, index) for index in range(3)] for peer in (here, there))
    end = receive(here, 5, 8)
    theirs[2].put(there.outbound.eager((1, 0, 5), memoryview(b"12345678")))  # type: ignore[arg-type]

    mine[0].idle = theirs[0].idle = False  # busy, so that the others take the news
    mine[2].die("cut")
    theirs[1].die("cut")
    assert mine[1].wire
    assert theirs[2].wire
    mine[1].die("cut")
    theirs[2].die("cut")
    mine[0].idle = theirs[0].idle = True
    here.settle()
    there.settle()
    for _ in range(3):
        mine[0].deliver(theirs[0])
        theirs[0].deliver(mine[0])
    assert bytes(end.result()) == b"12345678"  # type: ignore[arg-type]
    assert not here._dead
    assert not there._dead


def test_nothing_is_read_of_a_rail_after_its_death() -> None:
    """The other side repeats what it is not told of; taken twice, it would kill the next rail."""
    peer = Peer(1, (1,), (0,), Rooms(), lambda _: None)
    dying, other = Pipe(peer, 0), Pipe(peer, 1)
    end = receive(peer, 5, 8)
    message = pack(Kind.EAGER, 0, 1, 0, 5, payload_bytes=8) + b"12345678"
    dying.incoming = pack(Kind.LOST, 0, 0) + message
    trio.run(dying._read_until_dead)
    assert dying.dead
    assert dying.arrived == 1
    assert not end.matched
    other.incoming = message
    trio.run(other._read_until_dead)
    assert bytes(end.result()) == b"12345678"  # type: ignore[arg-type]


def test_signs_of_life_are_no_progress_worth_waiting_for() -> None:
    """A message that has begun is finished before this side leaves, but only if it gets on."""
    peer = Peer(1, (1,), (0,), Rooms(), lambda _: None)
    rail = Pipe(peer, 0)
    stuck = Send((0, 1, 5), memoryview(bytes(LONG_BYTES)), 0, peer.withdraw)
    clock = MockClock(autojump_threshold=0)

    async def live() -> None:
        while True:
            await trio.sleep(1)
            rail.read_bytes += 17

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(live)
            peer.announce(stuck)
            peer.outbound.accepted(0)
            peer.settle()
            with trio.fail_after(60):
                await peer.leave()
            nursery.cancel_scope.cancel()

    trio.run(main, clock=clock)
    assert clock.current_time() < 10
    with pytest.raises(LinkLostError, match="this side has closed"):
        stuck.result()
