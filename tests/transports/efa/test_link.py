"""What a link makes of rails that come and go, and how it shares its messages among them; pure."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import trio
from trio.testing import MockClock

from transports.address import RAILS_LIMIT
from transports.buffers import BounceBuffers
from transports.efa.departures import single_rail_limits
from transports.efa.efa_link import EfaLink
from transports.efa.joining import ProvedSocket
from transports.efa.rail import Rail
from transports.efa.sharing import RailRate, RailState, delays_chunk, delays_small_frame
from transports.failures import LinkLostError
from transports.frame import CHUNK_BYTES, EAGER_BYTES, LIMITS, FrameError, pack, parse
from transports.matching import Chunk, MessageKind, Receive, Send

# -- what a link makes of rails that come and go, without time, tasks or sockets ---------------------------------------

LONG_BYTES = CHUNK_BYTES + 100


class Pipe(Rail):
    """A rail whose bytes lie on the wire until they are delivered, or lost with it."""

    def __init__(self, link: EfaLink, index: int) -> None:
        nowhere = ProvedSocket(socket=Mock(), encrypted=None)  # its bytes lie in `wire`
        super().__init__(link, index, nowhere, keep=True, staged=False)
        self.wire: list[bytes] = []
        self.incoming = b""
        link.add_rail(self)

    def measure_state(self) -> RailState:
        return RailState(0.0, 0)

    def write_eager(self, head: bytes, payload: memoryview) -> None:
        frame = head + payload
        self.keep_entry(frame)
        self.wire.append(frame)

    def write_pushed(self, send: Send) -> bool:
        if not self.owner.departures.reserve_immediate_send(send):
            return False
        self.wire.append(b"".join(self.prepare_chunk(Chunk(send, 0, send.nbytes))))
        self.record_frames_written()
        return True

    def start_writing(self) -> None:
        while parts := self.take_due_frames():
            self.wire.append(b"".join(parts))
            self.record_frames_written()

    def deliver(self, other: Pipe) -> None:
        """Let everything on the wire arrive at the other end."""
        for frames in self.wire:
            other.read(frames)
        self.wire.clear()
        other.owner.flush()

    def read(self, frames: bytes) -> None:
        """Read as the other end has written."""
        data = memoryview(frames)
        while data:
            room = self.reading.read_target()[: len(data)]
            room[:] = data[: len(room)]
            data = data[len(room) :]
            self.reading.handle_received(len(room))

    def close_socket(self) -> None:
        self.wire.clear()

    async def wait_and_write(self) -> None: ...

    async def wait_and_read(self) -> bool:
        data, self.incoming = self.incoming, b""
        self.read(data)
        self.count_read_bytes(len(data))
        return bool(data)


def a_link(member: int, ranks: tuple[int, ...], local: tuple[int, ...]) -> EfaLink:
    return EfaLink(member, ranks, local, BounceBuffers(), lambda _: None)


def receive(link: EfaLink, tag: int, nbytes: int) -> Receive:
    end = Receive((1, 0, tag), None, nbytes)
    assert not link.engine.receive(end)
    return end


def test_news_of_a_death_that_is_lost_with_another_rail_is_told_again() -> None:
    """Each side has told of one rail over the rail that the other side was losing: neither may wait for the other."""
    here = a_link(1, (1,), (0,))
    there = a_link(0, (0,), (1,))
    mine, theirs = ([Pipe(link, index) for index in range(3)] for link in (here, there))
    end = receive(here, 5, 8)
    theirs[1].idle = theirs[0].idle = False
    assert there.send_now((1, 0, 5), memoryview(b"12345678"))
    theirs[1].idle = True

    mine[0].idle = theirs[0].idle = False  # busy, so that the others take the news
    mine[2].die("cut")
    theirs[1].die("cut")
    assert mine[1].wire
    assert theirs[2].wire
    mine[1].die("cut")
    theirs[2].die("cut")
    mine[0].idle = theirs[0].idle = True
    here.flush()
    there.flush()
    for _ in range(3):
        mine[0].deliver(theirs[0])
        theirs[0].deliver(mine[0])
    assert bytes(end.loan or b"") == b"12345678"
    assert here._lost_rails == there._lost_rails == {}


def test_a_message_whose_array_was_used_again_once_it_had_left_survives_the_death_of_its_rail() -> None:
    here, there = a_link(1, (1,), (0,)), a_link(0, (0,), (1,))
    mine, theirs = ([Pipe(link, index) for index in range(2)] for link in (here, there))
    array = bytearray(b"1" * (EAGER_BYTES + 1))
    end = Send((1, 0, 5), memoryview(array), 0)
    there.engine.outgoing.queue_announcement(end)
    there.flush()
    assert end.ended
    (carrier,) = (i for i in range(2) if theirs[i].wire)
    array[:] = b"2" * len(array)
    theirs[carrier].die("cut")
    mine[carrier].die("cut")
    wanted = receive(here, 5, len(array))
    other = 1 - carrier
    mine[other].deliver(theirs[other])  # news of the death, for which it is sent again
    mine[other].incoming = b"".join(theirs[other].wire)
    trio.run(mine[other].read_until_dead)
    assert bytes(wanted.loan or b"")[: len(array)] == b"1" * len(array)


HEADER_BYTES = len(pack(MessageKind.PUSHED_CHUNK, 0, 0, 0, 0, 0, 0, 0))
WHOLE_BYTES = EAGER_BYTES + 100


@pytest.mark.parametrize("kept_bytes", [0, WHOLE_BYTES])
@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("count", [0, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1000, HEADER_BYTES + WHOLE_BYTES])
def test_what_travels_in_one_frame_arrives_once_wherever_its_rail_dies(
    count: int, wanted: bool, kept_bytes: int
) -> None:
    here, there = a_link(1, (1,), (0,)), a_link(0, (0,), (1,))
    for link in (here, there):
        link.set_limits(replace(single_rail_limits(inside=True, confirmed=True), kept_bytes=kept_bytes))
        link.watched = True
    mine, theirs = Pipe(here, 0), Pipe(there, 0)
    end, text = Receive((1, 0, 5), None, WHOLE_BYTES), random.Random(count).randbytes(WHOLE_BYTES)
    if wanted:
        here.engine.receive(end)
    array = bytearray(text)
    send = Send((1, 0, 5), memoryview(array), 0)
    there.queue_send(send)
    assert [len(frame) for frame in theirs.wire] == [HEADER_BYTES + WHOLE_BYTES]
    assert send.ended == bool(kept_bytes)
    if send.ended:
        array[:] = bytes(WHOLE_BYTES)
    mine.incoming = theirs.wire[0][:count]
    trio.run(mine.read_until_dead)
    theirs.die("cut")

    there.repeat_missing_frames(0, *here.last_arrival(0))
    here.repeat_missing_frames(0, *there.last_arrival(0))
    mine, theirs = Pipe(here, here.next_rail_number(0)), Pipe(there, there.next_rail_number(0))
    theirs.deliver(mine)
    if not wanted:
        assert not end.ended
        here.engine.receive(end)
    assert end.loan is not None
    assert end.loan[:WHOLE_BYTES] == text
    mine.deliver(theirs)
    assert send.ended
    assert send.error is None


def test_a_message_waits_behind_what_is_due() -> None:
    """It leaves in one frame only where nothing could have left before it."""
    link = a_link(1, (1,), (0,))
    link.set_limits(single_rail_limits(inside=True, confirmed=False))
    rail = Pipe(link, 0)
    rail.idle = False
    link.engine.outgoing.queue_announcement(Send((0, 1, 5), memoryview(bytes(LONG_BYTES)), 0))
    rail.idle = True
    link.queue_send(Send((0, 1, 6), memoryview(bytes(WHOLE_BYTES)), -1))
    frames, at, kinds = bytearray(b"".join(rail.wire)), 0, []
    while (frame := parse(frames, at, len(frames))) is not None:
        kinds.append((frame[0], frame[1][3]))
        at = frame[2] + frame[3]
    pushed, chunk = MessageKind.PUSH, MessageKind.PUSHED_CHUNK
    assert kinds == [(pushed, 6), (pushed, 5), (chunk, 6), (chunk, 5)]


def test_nothing_is_read_of_a_rail_after_its_death() -> None:
    """The other side repeats what it is not told of; taken twice, it would kill the next rail."""
    link = a_link(1, (1,), (0,))
    dying, other = Pipe(link, 0), Pipe(link, 1)
    end = receive(link, 5, 8)
    message = pack(MessageKind.EAGER, 0, 1, 0, 5, 0, payload_bytes=8) + b"12345678"
    dying.incoming = pack(MessageKind.LOST, 0, 0) + message
    trio.run(dying.read_until_dead)
    assert dying.dead
    assert dying.reading.arrived_frames == 1
    assert not end.matched
    other.incoming = message
    trio.run(other.read_until_dead)
    assert bytes(end.loan or b"") == b"12345678"


def test_nothing_is_counted_of_a_rail_that_died_of_an_answer() -> None:
    """What it has counted has been told: the other side repeats all that came after it."""

    class Broken(Pipe):
        def start_writing(self) -> None:
            self.die("cut")

    link = a_link(1, (1,), (0,))
    link.set_limits(replace(LIMITS, kept_bytes=0))
    dying = Broken(link, 0)
    Pipe(link, 1)
    first, second = receive(link, 5, 100), receive(link, 6, 8)
    dying.incoming = pack(MessageKind.PUSH, 0, 1, 0, 5, 100, 0)
    dying.incoming += pack(MessageKind.CHUNK, 0, 0, payload_bytes=100) + bytes(100)
    dying.incoming += pack(MessageKind.EAGER, 1, 1, 0, 6, 0, payload_bytes=8) + b"12345678"
    trio.run(dying.read_until_dead)
    assert dying.dead
    assert (first.ended, second.ended) == (True, False)
    assert dying.reading.arrived_frames == 2


def test_rails_that_are_busy_are_measured_whenever_something_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    link, looked_at = a_link(1, (1,), (0,)), list[int]()
    rails = [Pipe(link, index) for index in range(3)]

    def look(index: int) -> RailState:
        looked_at.append(index)
        return RailState(0.0, 0)

    for rail in rails:
        monkeypatch.setattr(rail, "measure_state", partial(look, rail.index))
    rails[1].rate.add_sample(0.0, 10**6, 10**6)
    link.flush()
    assert looked_at == [1]


def test_signs_of_life_are_no_progress_worth_waiting_for() -> None:
    """A message that has begun is finished before this side leaves, but only if it gets on."""
    link = a_link(1, (1,), (0,))
    rail = Pipe(link, 0)
    stuck = Send((0, 1, 5), memoryview(bytes(LONG_BYTES)), 0)
    clock = MockClock(autojump_threshold=0)

    async def live() -> None:
        while True:
            await trio.sleep(1)
            rail.read_bytes += 17

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(live)
            link.engine.outgoing.queue_announcement(stuck)
            link.flush()
            with trio.fail_after(60):
                await link.leave()
            nursery.cancel_scope.cancel()

    trio.run(main, clock=clock)
    assert clock.current_time() < 10
    assert isinstance(stuck.error, LinkLostError)
    assert "this side has closed" in str(stuck.error)


def news(link: EfaLink, index: int, count: int) -> list[tuple[int, list[int]]]:
    """Tell a link that a rail is lost on the other side; return what it answers."""
    link.handle_frame(link.rails[0], MessageKind.LOST, [index, count])
    frames = []
    while (packed := link.departures.next_frame()) is not None:
        frame = parse(bytearray(packed), 0, len(packed))
        assert frame is not None
        frames.append((frame[0], frame[1]))
    return frames


def test_the_loss_of_a_connection_that_this_side_never_had_is_answered_once() -> None:
    """The other side had let it in when this side gave it up; it waits to hear what has arrived here."""
    link = a_link(1, (1,), (0,))
    Pipe(link, 0).idle = False
    second = Pipe(link, 1)
    second.die("cut")
    assert link.next_rail_number(1) == RAILS_LIMIT + 1
    answer = [(MessageKind.LOST, [RAILS_LIMIT + 1, 0])]
    assert news(link, 1, 0) == [(MessageKind.LOST, [1, 0])]
    assert news(link, RAILS_LIMIT + 1, 7) == answer
    assert news(link, RAILS_LIMIT + 1, 7) == []


def test_news_of_a_loss_that_was_settled_long_ago_means_nothing() -> None:
    """Every death brings all of them up again, and rails overtake each other."""
    link = a_link(1, (1,), (0,))
    Pipe(link, 0).idle = False
    Pipe(link, 1).die("cut")
    news(link, 1, 0)
    back = Pipe(link, link.next_rail_number(1))
    back.idle = False
    assert news(link, 1, 0) == []
    assert back in link.rails


@pytest.mark.parametrize("index", [2, RAILS_LIMIT, RAILS_LIMIT + 1, 2**32 - 1])
def test_nobody_can_lose_what_has_never_been_tried(index: int) -> None:
    link = a_link(1, (1,), (0,))
    Pipe(link, 0)
    Pipe(link, 1)
    with pytest.raises(
        FrameError,
        match=f"^peer reports the loss of rail {index}, which never existed; "
        "install the same overlap in every process$",
    ):
        news(link, index, 0)


def test_a_rail_that_was_not_heard_since_its_return_does_not_hold_up_a_farewell() -> None:
    """The other side has let it in and left, or has given it up and never heard of it."""
    link = a_link(1, (1,), (0,))
    first = Pipe(link, 0)
    Pipe(link, 1).die("cut")
    news(link, 1, 0)
    back = Pipe(link, link.next_rail_number(1))
    link.handle_frame(first, MessageKind.BYE, [])
    assert link.engine.gone == "process 1 (rank 1) has left"
    back.die("the connection ended")
    assert link.engine.gone == "process 1 (rank 1) has left"


# -- which rail takes what, and how its speed is learned ---------------------------------------------------------------

MB = 10**6
CHUNK = 524288


def test_a_rate_is_what_was_delivered_while_enough_waited() -> None:
    pace = RailRate()
    assert pace.add_sample(0.0, 2 * MB, 2 * MB) == RailState(0.0, 2 * MB, sure=False)
    assert pace.add_sample(0.004, 2 * MB, MB).bytes_per_s == 0.0  # too soon to tell
    assert pace.add_sample(0.01, 2 * MB, MB) == RailState(100 * MB, MB)
    assert pace.add_sample(0.02, 4 * MB, 2_000_000).bytes_per_s == 100 * MB
    assert pace.add_sample(0.04, 8 * MB, 3_500_000).bytes_per_s == 125 * MB  # it may have been idle: no slower
    assert pace.add_sample(0.05, 8 * MB, 2_750_000).bytes_per_s == 100 * MB


def test_a_short_message_tells_that_a_rail_is_no_slower() -> None:
    pace = RailRate()
    pace.add_sample(0.0, MB, MB)
    assert pace.add_sample(0.0005, MB, 0).bytes_per_s == 0.0  # a switch may have had room for that much
    pace.add_sample(0.0, 2 * MB, MB)
    assert pace.add_sample(0.01, 2 * MB, 0) == RailState(100 * MB, 0, sure=False)
    pace.add_sample(0.02, 3 * MB, MB)
    assert pace.add_sample(0.07, 3 * MB, 0) == RailState(100 * MB, 0, sure=False)  # it may have been idle
    assert not pace.is_measuring


def test_a_rate_of_a_busy_time_takes_the_place_of_a_guess() -> None:
    pace = RailRate()
    pace.add_sample(0.0, 2 * MB, MB)
    assert pace.is_measuring
    pace.add_sample(0.01, 2 * MB, 0)
    pace.add_sample(0.0, 4 * MB, MB)
    assert pace.add_sample(0.01, 4 * MB, MB // 2) == RailState(50 * MB, MB // 2)


def test_the_last_packets_of_a_message_tell_nothing() -> None:
    pace = RailRate()
    pace.add_sample(0.0, 2 * MB, 2 * MB)
    pace.add_sample(0.01, 2 * MB, MB)
    pace.add_sample(0.02, 2 * MB, 1000)
    assert pace.add_sample(0.06, 2 * MB, 1000).bytes_per_s == 100 * MB


def test_a_rail_that_delivers_nothing_becomes_slow() -> None:
    pace = RailRate()
    pace.add_sample(0.0, 2 * MB, 2 * MB)
    pace.add_sample(0.01, 2 * MB, MB)
    rates = [pace.add_sample(0.01 * n, 2 * MB, MB).bytes_per_s for n in range(2, 6)]
    assert rates == [50 * MB, 25 * MB, 12.5 * MB, 6.25 * MB]


FAST, SLOW = 100 * MB, 10 * MB


@pytest.mark.parametrize(
    ("mine", "others", "due_bytes", "held"),
    [
        (RailState(SLOW, 0), [RailState(FAST, 0)], CHUNK, True),
        (RailState(SLOW, 0), [RailState(FAST, 0)], 20 * CHUNK, False),  # the other one is busy for longer
        (RailState(SLOW, CHUNK), [RailState(FAST, 0)], 15 * CHUNK, True),
        (RailState(FAST, 0), [RailState(SLOW, 0)], CHUNK, False),
        (RailState(FAST, MB), [RailState(FAST, 0)], CHUNK, True),  # equals share
        (RailState(FAST, CHUNK // 2), [RailState(FAST, 0)], CHUNK, False),
        (RailState(FAST, MB), [RailState(FAST, MB), RailState(SLOW, 0)], CHUNK, False),  # and no one that is slow does
        (RailState(0.0, MB), [RailState(0.0, 0)], CHUNK, True),
        (RailState(SLOW, 0, sure=False), [RailState(FAST, 0)], CHUNK, False),  # it may be as fast
        (RailState(SLOW, 0), [RailState(FAST, 0, sure=False)], CHUNK, True),
        (RailState(0.0, 0), [RailState(FAST, 0)], CHUNK, False),  # nobody knows yet
        (RailState(SLOW, 0), [RailState(0.0, 0)], CHUNK, False),
        (RailState(SLOW, 0), [RailState(FAST, MB), RailState(FAST, 2 * MB)], CHUNK, True),
        (RailState(SLOW, 0), [RailState(FAST, 8 * MB)], CHUNK, False),  # the other one is congested
    ],
)
def test_a_slow_rail_takes_a_chunk_only_if_it_comes_in_time(mine, others, due_bytes, held) -> None:
    assert delays_chunk(mine, others, due_bytes=due_bytes, chunk_bytes=CHUNK) is held


def test_small_frames_do_not_queue_on_a_slow_rail_while_a_fast_one_lives() -> None:
    assert delays_small_frame(RailState(SLOW, CHUNK), [RailState(FAST, CHUNK)])
    assert not delays_small_frame(RailState(SLOW, 0), [RailState(FAST, CHUNK)])
    assert not delays_small_frame(RailState(FAST, CHUNK), [RailState(SLOW, CHUNK)])
    assert not delays_small_frame(RailState(SLOW, CHUNK), [])
